"""Faults of tools: secrets, paths, addresses, programs."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = (
    Mutant(
        name="secret in a child's environment",
        of="P2",
        breaks="a command that a model wrote prints the host's API keys",
        file="tools/sandbox/environment.py",
        old="if not is_secret(name) and _matches(name, patterns)",
        new="if patterns",
        tests=("tests/tools/programs/test_terminal.py::test_no_secret_of_the_host_reaches_a_command",),
    ),
    Mutant(
        name="workspace symlink followed",
        of="P2",
        breaks="a link in the workspace leads a tool to files outside",
        file="tools/files/workspace.py",
        old="""
                    try:
                        from_root, more = self._parts(target)
                    except ToolFailed:
                        raise _outside(path) from None
""",
        new="""
                    if os.path.isabs(target):
                        folders.append(os.open(os.path.dirname(target), os.O_RDONLY))
                        last = os.path.basename(target)
                        continue
                    from_root, more = self._parts(target)
""",
        tests=("tests/tools/files/test_workspace.py::test_no_path_leads_out",),
    ),
    Mutant(
        name="a link that is swapped in is opened",
        of="P2",
        breaks="a link that appears between check and open exposes a file outside",
        file="tools/files/entries.py",
        old="_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC",
        new="_OPEN_FILE = os.O_RDONLY | os.O_CLOEXEC",
        tests=("tests/tools/files/test_workspace.py",),
    ),
    Mutant(
        name="private address after redirect",
        of="P2",
        breaks="a public page sends the agent to a service of the private network",
        file="tools/web/fetch.py",
        old="            addresses = await self._rules.addresses(host, port)",
        new="            addresses = await self._rules.addresses(host, port) if not _ else [host]",
        tests=("tests/tools/web/test_fetch.py::test_each_redirect_is_judged_anew",),
    ),
    Mutant(
        name="the name is resolved a second time",
        of="P2",
        breaks="a name that changes its address between check and connection leads into the private network",
        file="tools/web/fetch.py",
        old="                    request.url.copy_with(host=address, port=port),",
        new="                    request.url,",
        tests=("tests/tools/web/test_fetch.py::test_a_name_is_resolved_once_and_only_the_judged_address_is_connected",),
    ),
    Mutant(
        name="numbers hide a private address",
        of="P2",
        breaks="an IPv4 address inside an IPv6 one is taken for a public one",
        file="tools/addresses.py",
        old="""
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
""",
        new="        if address.version == 4:",
        tests=("tests/tools/web/test_fetch.py",),
    ),
    Mutant(
        name="a command's strays live on",
        of="P3",
        breaks="processes that a command left in the background keep running after its call",
        file="tools/programs/program.py",
        old="            result = await self.process.kill_tree(term_first_s=term_first_s)",
        new="            result = await self.process.wait_gone()",
        tests=("tests/tools/programs/test_terminal.py::test_processes_that_a_command_leaves_are_ended_and_counted",),
    ),
    Mutant(
        name="the workspace has the settings in it",
        of="P14",
        breaks="an agent writes the settings that the host starts with next",
        file="tools/files/workspace_guard.py",
        old="        if _contains(root, path):",
        new="        if root == path:",
        tests=("tests/system/attacks/test_workspace.py",),
    ),
    Mutant(
        name="the workspace of a deleted session comes back",
        of="P14",
        breaks="a new session of the same key finds the files of the deleted one",
        file="tools/files/workspace.py",
        old="_folder_name(session.session_key, session.session_id)",
        new="_folder_name(session.session_key)",
        tests=("tests/system/attacks/test_workspace.py",),
    ),
    Mutant(
        name="a helper that can be looked into",
        of="P14",
        breaks="a program of a tool reads what the zygote and the reapers hold",
        file="runtime/processes/zygote.py",
        old="    make_undumpable()  # including its forks, the reapers",
        new="    assert make_undumpable",
        tests=("tests/system/attacks/test_undumpable.py",),
    ),
)
