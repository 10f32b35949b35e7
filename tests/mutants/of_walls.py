"""Faults of the walls around programs: system calls, file systems, capabilities, networks, quotas and grants."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

APART = "tests/tools/sandbox/test_kept_apart.py"
SANDBOX = "tests/tools/sandbox/test_sandbox.py"
GATE = "tests/tools/sandbox/proxy/test_gate.py"
ACCESS = "tests/tools/test_access.py"
BY_PRINCIPAL = "tests/tools/sandbox/test_by_principal.py"
QUOTAS = "tests/host/test_program_quotas.py"
SET_UID = ("tests/system/attacks/test_set_uid.py",)
WAYS_OUT = ("tests/system/attacks/test_ways_out.py",)
PROTECTED = (f"{SANDBOX}::test_protected_paths_of_the_workspace_are_read_only",)

MUTANTS = (
    Mutant(
        name="a quick program is not measured",
        of="P13",
        breaks="programs that end before the host watches them fill the disk beyond their principal's quota",
        file="host/program_quotas.py",
        old="            if known is not None:\n                self._ask_to_measure(principal, known)",
        new="            assert known is None or known",
        tests=(
            "tests/host/test_program_quotas.py"
            "::test_what_a_program_wrote_is_measured_although_it_ended_before_it_was_watched",
        ),
    ),
    Mutant(
        name="an old walk answers an order to measure",
        of="P13",
        breaks="a workspace whose files were deleted is still refused as full",
        file="runtime/processes/folder_meter.py",
        old="        folder.stale, folder.answers = False, folder.asked",
        new="        folder.stale, folder.answers = False, 1 << 60",
        tests=("tests/runtime/processes/test_folder_meter.py",),
    ),
    # system calls
    Mutant(
        name="a set-uid file made in the sandbox",
        of="P14 P16",
        breaks="a confined program leaves a shell that runs as the server's user",
        file="runtime/walls/build.py",
        old="    limits.install_filter(wall.call_filter)",
        new="    assert wall.call_filter is not None",
        tests=SET_UID,
    ),
    Mutant(
        name="a mode with the set-uid bit passes",
        of="P14 P16",
        breaks="a confined program gives a file of the workspace the server's rights",
        file="runtime/walls/call_filter.py",
        old="_SPECIAL_MODE = 0o6000",
        new="_SPECIAL_MODE = 0o2000",
        tests=SET_UID,
    ),
    Mutant(
        name="a user namespace in the sandbox",
        of="M7 P14 P16",
        breaks="a confined program gets all capabilities in a namespace of its own",
        file="runtime/walls/call_filter.py",
        old='"chroot", "unshare", "setns"',
        new='"chroot", "setns"',
        tests=SET_UID,
    ),
    Mutant(
        name="the kernel permits user namespaces inside",
        of="M7 P14 P16",
        breaks="one gap in the filter is enough for all capabilities in a namespace of its own",
        file="runtime/walls/namespaces.py",
        old='    _write(_STAGE + b"/proc/sys/user/max_user_namespaces", b"0")  # a program',
        new="    # a program",
        tests=(f"{APART}::test_proc_says_nothing_of_the_machine",),
    ),
    Mutant(
        name="the 32-bit entry is not judged",
        of="H3 P14 P16",
        breaks="a confined program makes a set-uid file by an old system call",
        file="runtime/walls/call_filter.py",
        old="        (_IF_EQUAL, 1, 0, ARCHITECTURES[machine]),\n        _verdict(errno.ENOSYS),",
        new="        (_IF_EQUAL, 1, 0, ARCHITECTURES[machine]),\n        _verdict(0),",
        tests=SET_UID,
    ),
    Mutant(
        name="a socket out of the namespaces",
        of="M7 P14 P16",
        breaks="a confined program without a network talks to the machine's host",
        file="runtime/walls/call_filter.py",
        old="    return [*steps, _verdict(errno.EAFNOSUPPORT)]",
        new="    return [*steps, _verdict(0)]",
        tests=WAYS_OUT,
    ),
    Mutant(
        name="keys of the kernel in the sandbox",
        of="M7 P14 P16",
        breaks="one user's program leaves something for the next one's",
        file="runtime/walls/call_filter.py",
        old='    *("add_key", "request_key", "keyctl"),',
        new='    *("request_key", "keyctl"),',
        tests=WAYS_OUT,
    ),
    # rights and file systems
    Mutant(
        name="capabilities are kept behind Landlock alone",
        of="P14 P16",
        breaks="where namespaces are missing, a program of a server that runs as root has all of root's powers",
        file="runtime/walls/build.py",
        old="    limits.renounce_capabilities()",
        new="    if wall.namespaces:\n        limits.renounce_capabilities()",
        tests=(f"{SANDBOX}::test_it_has_no_capabilities_and_cannot_undo_its_wall",),
    ),
    Mutant(
        name="the host's part of /proc is not covered",
        of="P14 P16",
        breaks="a program reads what /proc tells of the machine: its command line, keys, disks and symbols",
        file="runtime/walls/namespaces.py",
        old="    _cover_host()\n    size",
        new="    size",
        tests=(f"{APART}::test_proc_says_nothing_of_the_machine",),
    ),
    Mutant(
        name="protected paths are writable",
        of="P14 P16",
        breaks="a program changes files of the workspace that its session did not make, unasked",
        file="runtime/walls/build.py",
        old="    namespaces.protect(wall.protected, wall.writable)",
        new="    namespaces.protect(wall.protected[:0], wall.writable)",
        tests=PROTECTED,
    ),
    Mutant(
        name="hidden paths are shown",
        of="P14 P16",
        breaks="a program reads the store and the token below a folder that it may read",
        file="runtime/walls/namespaces.py",
        old="    for path in wall.hidden:",
        new="    for path in wall.hidden[:0]:",
        tests=(
            "tests/testing/suites/test_sandbox_suite.py::test_backend_conforms[namespaces-hidden_paths_are_covered]",
        ),
    ),
    Mutant(
        name="a path that was swapped is mounted",
        of="P14 P16",
        breaks="a link that takes the place of a checked path shows a folder of the host",
        file="runtime/walls/namespaces.py",
        old="        if (found.st_dev, found.st_ino) != path[1:3]:",
        new="        if found.st_ino == 0:",
        tests=(f"{APART}::test_a_folder_on_the_way_that_became_a_link_shows_nothing",),
    ),
    # between sessions
    Mutant(
        name="the zygote reads what it forks for",
        of="P14 P16",
        breaks="every later program's parent has a copy of the secrets of earlier ones",
        file="runtime/processes/zygote.py",
        old="        self._kept.use(key)",
        new="""
        self._kept.use(key)
        self._request = _read_all(os.dup(fds[-1])) if kind == "spawn" else b""
""",
        tests=(f"{APART}::test_the_zygote_never_has_the_environment_of_a_program",),
    ),
    Mutant(
        name="kept namespaces are those of all sessions",
        of="P14 P16",
        breaks="programs of two principals that work in one folder share a network",
        file="tools/sandbox/backends/linux.py",
        old='key=f"{plan.session}\\0{digest}".encode()',
        new='key=f"\\0{digest}".encode()',
        tests=(f"{APART}::test_sessions_share_no_namespace_even_in_one_folder",),
    ),
    Mutant(
        name="a kept file system is not copied",
        of="P14 P16",
        breaks="programs of one session that run at once cover each other's /tmp, and mounts pile up",
        file="runtime/walls/namespaces.py",
        old='        check(libc.unshare(CLONE_NEWNS), "unshare")\n',
        new="        assert CLONE_NEWNS\n",
        tests=(f"{APART}::test_concurrent_programs_of_one_session_have_each_a_file_system",),
    ),
    Mutant(
        name="kept namespaces are those of programs with other networks",
        of="P14 P16",
        breaks="a program reaches a private network by the proxy of another one of its session that may reach it",
        file="tools/sandbox/backends/linux.py",
        old="(network.hosts, network.networks, network.connections, network.bytes_limit)",
        new="(network.hosts,)",
        tests=(
            "tests/tools/sandbox/test_network.py"
            "::test_a_program_cannot_use_the_proxy_of_one_with_more_networks_in_its_session",
        ),
    ),
    Mutant(
        name="concurrent programs of a session keep namespaces of their own",
        of="P16",
        breaks="the limit of a session's processes holds for each of its programs alone",
        file="tools/sandbox/backends/linux.py",
        old="marshal.dumps(shown, _PLAIN)",
        new="marshal.dumps(shown)",
        tests=(f"{APART}::test_concurrent_programs_of_one_session_share_a_loopback",),
    ),
    # network
    Mutant(
        name="the proxy connects to a private address",
        of="P14 P16",
        breaks="a program that may reach some hosts reaches services of the private network by a name of its own",
        file="tools/sandbox/proxy/gate.py",
        old="            addresses = self._addresses.permitted(target.host, await self._lookup(target))",
        new="            addresses = await self._lookup(target)",
        tests=(f"{GATE}::test_addresses_that_are_not_public_are_refused_however_they_are_spelled",),
    ),
    Mutant(
        name="the proxy resolves twice",
        of="P14 P16",
        breaks="a name that changes its address between check and connection leads into the private network",
        file="tools/sandbox/proxy/gate.py",
        old="            addresses = self._addresses.permitted(target.host, await self._lookup(target))",
        new="""
            self._addresses.permitted(target.host, await self._lookup(target))
            addresses = await self._lookup(target)
""",
        tests=(f"{GATE}::test_a_name_is_resolved_once_and_only_the_checked_address_is_connected",),
    ),
    Mutant(
        name="the proxy leads to every host",
        of="P14 P16",
        breaks="a program that may reach one host reaches all of the internet",
        file="tools/sandbox/proxy/gate.py",
        old="            self._hosts.check(target)\n",
        new="            assert self._hosts\n",
        tests=(f"{GATE}::test_a_host_that_is_not_allowed_is_neither_resolved_nor_reached",),
    ),
    # quotas
    Mutant(
        name="a quota ends nothing",
        of="P9 P16",
        breaks="a program that uses up the machine's memory is reported, and continues",
        file="host/program_quotas.py",
        old="        watched.tree.ask_kill(0.0, KILL_BOUND_S)",
        new="        assert watched.tree.count(1) <= KILL_BOUND_S",
        tests=(f"{QUOTAS}::test_a_bomb_is_ended_and_its_result_says_why[descriptors]",),
    ),
    Mutant(
        name="the smallest program is ended",
        of="P9 P16",
        breaks="a principal that is above its quota loses a harmless program, and the bomb continues",
        file="runtime/processes/program_meter.py",
        old="            largest = max(owner.programs, key=lambda watch: size[watch])",
        new="            largest = min(owner.programs, key=lambda watch: size[watch])",
        tests=(
            f"{QUOTAS}::test_many_programs_that_are_small_alone_are_above_the_quota_together_and_the_largest_is_ended",
        ),
    ),
    # grants
    Mutant(
        name="the grant of another principal is accepted",
        of="P14 P16",
        breaks="what one person granted to an own agent holds for the agents of everyone",
        file="storage/sql/statements.sql",
        old="SELECT body FROM access_grant WHERE principal = ? AND session IN (0, ?) ORDER BY granted_at, grant_id",
        new="SELECT body FROM access_grant WHERE ? <> '' AND session IN (0, ?) ORDER BY granted_at, grant_id",
        tests=("tests/storage/test_conformance.py", f"{ACCESS}"),
    ),
    Mutant(
        name="a grant of a session is its principal's",
        of="P14 P16",
        breaks="a grant for one session holds in all sessions of the principal",
        file="storage/transactions/grants.py",
        old='    tables.grants.add(row.session if given.scope == "session" else 0, grant)',
        new="    tables.grants.add(0, grant)",
        tests=(f"{ACCESS}::test_a_grant_of_a_session_holds_until_it_is_revoked_and_only_there",),
    ),
    Mutant(
        name="an approval of another call is replayed",
        of="P14 P16",
        breaks="the approval of a harmless access is accepted for a question about another one",
        file="storage/transactions/questions.py",
        old='    if given.decision == "approved" and given.call_hash and given.call_hash != hash_call(question):',
        new='    if given.decision == "approved" and not given.call_hash and hash_call(question):',
        tests=(f"{ACCESS}::test_an_approval_counts_for_the_access_that_was_shown",),
    ),
    Mutant(
        name="the hash leaves the access out",
        of="P14 P16",
        breaks="an approval of a small access is good for a large one of the same call",
        file="protocol/call_hash.py",
        old="        asked.append(question.access)",
        new="        asked.append(True)",
        tests=("tests/protocol/test_call_hash.py",),
    ),
    Mutant(
        name="a revoked grant still holds",
        of="P14 P16",
        breaks="a person revokes an access, and later calls still have it",
        file="storage/transactions/grants.py",
        old="    tables.grants.drop(grant)\n",
        new="    assert tables.grants.count(principal)\n",
        tests=(f"{ACCESS}::test_a_grant_of_a_session_holds_until_it_is_revoked_and_only_there",),
    ),
    Mutant(
        name="a running program keeps a revoked grant",
        of="P14 P16",
        breaks="a person revokes an access, and the program that has it continues",
        file="host/grants.py",
        old="            on_revoked(grant_id)\n",
        new="            assert on_revoked\n",
        tests=(f"{ACCESS}::test_a_program_ends_when_the_grant_that_it_uses_is_revoked",),
    ),
    Mutant(
        name="a secret reaches every call",
        of="P14 P16",
        breaks="a secret that was granted to a session is in the environment of programs that did not ask for it",
        file="tools/access.py",
        old="            secrets=request.access.secrets,",
        new="            secrets=join(approved, standing).secrets,",
        tests=(f"{ACCESS}::test_a_secret_reaches_only_the_call_that_asked_for_it",),
    ),
    Mutant(
        name="the local token approves",
        of="P6 P14 P16",
        breaks="a file that programs of the machine's user can read is enough to approve a call",
        file="server/context.py",
        old="        return self.programs or (self.executes and caller.credential == LOCAL.credential)",
        new="        return self.programs or (self.executes and not caller.credential)",
        tests=("tests/server/test_grants.py::test_the_local_token_approves_nothing_where_tools_touch_files",),
    ),
    Mutant(
        name="a principal gets another one's sandbox",
        of="P14 P16",
        breaks="programs of one user read what only another one was given",
        file="tools/sandbox/sandbox.py",
        old="        found = choice(principal)",
        new='        found = choice("alice")',
        tests=(f"{BY_PRINCIPAL}::test_each_principals_programs_see_what_the_principal_may",),
    ),
    Mutant(
        name="a function of sandboxes that fails permits",
        of="P16",
        breaks="programs of a user whom the operator's function does not know run with a default sandbox",
        file="tools/sandbox/sandbox.py",
        old='    raise ToolFailed("no sandbox is known',
        new='    return Sandbox() if choice else Sandbox("no sandbox is known',
        tests=(f"{BY_PRINCIPAL}::test_each_principals_programs_see_what_the_principal_may",),
    ),
    Mutant(
        name="a named workspace is everybody's",
        of="P16 P14",
        breaks="with serve --workspace, the agent of each user reads the files of all others",
        file="tools/assistant.py",
        old='Workspace(workspace, owner="local", ',
        new="Workspace(workspace, ",
        tests=("tests/system/attacks/test_two_users.py",),
    ),
)
