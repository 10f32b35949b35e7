"""Conformance suite for the port of walls (`holdfast.tools.sandbox.port`): run it on your own backend.

With pytest::

    @pytest.mark.parametrize("check", SANDBOX_CHECKS, ids=lambda check: check.__name__)
    def test_my_backend_conforms(check):
        run_sandbox_check(check, MyBackend)

The programs of the checks are shell commands and scripts for this interpreter, so the wall must show both.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from holdfast.errors import NotSupported
from holdfast.testing.suites.check_runner import not_offered, run_check
from holdfast.testing.suites.sandbox_bench import SECRET, assert_ok, open_bench
from holdfast.testing.suites.sandbox_stops import STOP_CHECKS
from holdfast.tools.sandbox.environment import clean_environment
from holdfast.tools.sandbox.plan import plan_wall
from holdfast.tools.sandbox.port import SandboxBackend
from holdfast.tools.sandbox.sandbox import Network, Sandbox

__all__ = ["SANDBOX_CHECKS", "SandboxCheck", "SandboxSubject", "run_sandbox_check"]

SandboxSubject = Callable[[], SandboxBackend]
"""A function that returns the backend under test, which this machine can use."""
SandboxCheck = Callable[[SandboxSubject], Awaitable[None]]
"""A function that checks one rule for backends and raises `AssertionError` if the backend breaks the rule."""

_CHECKS: list[SandboxCheck] = []
_VARIABLE = "CONFORMANCE_CREDENTIAL"
_NETWORKS: tuple[Network, ...] = ("hosts", "all")


def run_sandbox_check(check: SandboxCheck, subject: SandboxSubject) -> None:
    """Run one check on a new event loop, for at most 60 seconds.

    Raises:
        AssertionError: if the backend breaks a rule of the port; a note on the error names the rule.
        TimeoutError: if the check takes longer.
        unittest.SkipTest: if the backend, or this machine, lacks what the check tests.
    """
    run_check(check, subject, port="holdfast/tools/sandbox/port.py")


def _check(check: SandboxCheck) -> SandboxCheck:
    _CHECKS.append(check)
    return check


# ── programs and their ends ──────────────────────────────────────────────────────────────────────────────────────────


@_check
async def a_backend_has_a_name_and_layers(subject: SandboxSubject) -> None:
    """A backend names itself, the layers of its walls, and those that this machine lacks."""
    async with open_bench(subject) as bench:
        assert bench.backend.name
        assert bench.backend.layers, "the backend has no layer, so it builds no wall"
        assert bench.backend.missing.keys().isdisjoint(bench.backend.layers), "a layer cannot be present and missing"


@_check
async def output_and_exit_code_come_back(subject: SandboxSubject) -> None:
    """Standard output, standard error and the exit code are the program's own."""
    async with open_bench(subject) as bench:
        ended = await bench.run("printf out; printf err >&2; exit 7")
        assert (ended.stdout, ended.stderr, ended.returncode) == ("out", "err", 7), ended


@_check
async def arguments_arrive_unchanged(subject: SandboxSubject) -> None:
    """Arguments with spaces, quotes, line breaks and leading dashes arrive as they are."""
    words = ["", "a b", "it's", '"$HOME"', "two\nlines", "--help", "-v", "$(id)", "ü"]
    async with open_bench(subject) as bench:
        ended = await bench.run(["/bin/sh", "-c", 'printf "<%s>" "$@"', "name", *words])
        assert ended.stdout == "".join(f"<{word}>" for word in words), ended


@_check
async def standard_input_arrives(subject: SandboxSubject) -> None:
    """Standard input arrives complete, and ends."""
    async with open_bench(subject) as bench:
        ended = await bench.run("wc -c", input=b"x" * 200_000)
        assert ended.stdout.strip() == "200000", ended


@_check
async def large_output_is_complete(subject: SandboxSubject) -> None:
    """A megabyte of output arrives complete."""
    async with open_bench(subject) as bench:
        ended = await bench.run("head -c 1000000 /dev/zero | tr '\\0' x")
        assert len(ended.stdout) == 1_000_000, len(ended.stdout)


@_check
async def death_by_a_signal_is_visible(subject: SandboxSubject) -> None:
    """A program that a signal ends has the negative number of the signal as its exit code, or 128 plus the number."""
    async with open_bench(subject) as bench:
        ended = await bench.run("kill -KILL $$")
        assert ended.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), ended
        ended = await bench.run("kill -TERM $$")
        assert ended.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM), ended


@_check
async def a_missing_program_is_an_error(subject: SandboxSubject) -> None:
    """A program that does not exist fails the start, or ends with exit code 127."""
    async with open_bench(subject) as bench:
        try:
            ended = await bench.run(["no-such-program-anywhere"])
        except FileNotFoundError:
            return
        assert ended.returncode == 127, ended


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@_check
async def the_workspace_can_be_changed(subject: SandboxSubject) -> None:
    """A program starts in its folder, and what it writes there exists outside, owned by this user."""
    async with open_bench(subject) as bench:
        (bench.folder / "sub").mkdir()
        assert_ok(await bench.run("pwd > where", directory=bench.folder / "sub"))
        made = bench.folder / "sub" / "where"
        assert made.read_text().strip() == str(bench.folder / "sub")
        assert made.stat().st_uid == os.geteuid()


@_check
async def nothing_beside_the_workspace_is_visible(subject: SandboxSubject) -> None:
    """Folders that a program was not given are not there: not by name, by ``..``, or by a link."""
    async with open_bench(subject) as bench:
        secret = bench.outside / "secret"
        (bench.folder / "link").symlink_to(secret)
        for path in (str(secret), "../server/secret", "link", f"/proc/self/root{secret}", f"/proc/1/root{secret}"):
            ended = await bench.run(f"cat {shlex.quote(path)}")
            assert SECRET not in ended.stdout, f"readable as {path}"
            assert ended.returncode != 0, f"no error for {path}"
        ended = await bench.run(f"ls -a {shlex.quote(str(bench.outside))} .. ; echo x > ../made ; true")
        assert "server" not in ended.stdout, f"visible: {ended.stdout}"
        assert not (bench.outside.parent / "made").exists(), "a program wrote beside its workspace"


@_check
async def the_home_and_the_system_secrets_are_hidden(subject: SandboxSubject) -> None:
    """This user's home, the system's passwords and private keys cannot be read."""
    async with open_bench(subject) as bench:
        home = str(Path.home())
        for path in (f"{home}/.ssh", f"{home}/.config", "/etc/ssl/private", "/var/lib", "/run/systemd", "/run/user"):
            ended = await bench.run(f"ls -A {shlex.quote(path)}")
            assert not ended.stdout, f"visible: {path}: {ended.stdout}"
        for path in (f"{home}/.bashrc", "/etc/shadow", "/proc/kcore"):
            assert (await bench.run(f"head -c 1 {shlex.quote(path)}")).returncode != 0, f"readable: {path}"


@_check
async def the_system_is_read_only(subject: SandboxSubject) -> None:
    """The system and the interpreter can be read, not written."""
    async with open_bench(subject) as bench:
        assert_ok(await bench.run("test -x /bin/sh && test -r /etc/passwd && ls /usr/bin >/dev/null"))
        for folder in ("/usr", "/usr/bin", "/etc", "/", sys.prefix, f"{sys.prefix}/lib"):
            made = Path(folder) / "holdfast-conformance"
            ended = await bench.run(f"echo x > {shlex.quote(str(made))}")
            private = str(made.parent).startswith("/tmp/")  # the folders on the way belong to the program's own /tmp
            assert ended.returncode != 0 or private, f"writable: {folder}"
            assert not made.exists(), f"written to from inside: {folder}"


@_check
async def what_is_given_can_be_read_or_written(subject: SandboxSubject) -> None:
    """Readable paths can be read and not written; writable folders can be written."""
    async with open_bench(subject) as bench:
        for name in ("read", "write"):
            (bench.outside / name).mkdir()
            (bench.outside / name / "file").write_text(name)
        read, write = bench.outside / "read", bench.outside / "write"
        sandbox = Sandbox(readable=(read,), writable=(write,))
        ended = await bench.run(
            f"cat {read}/file {write}/file; echo more >> {write}/file; echo x >> {read}/file", sandbox
        )
        assert ended.stdout == "readwrite", ended
        assert (write / "file").read_text() == "writemore\n"
        assert (read / "file").read_text() == "read"
        assert not (await bench.run(f"cat {bench.outside}/secret", sandbox)).stdout


@_check
async def protected_paths_stay_read_only(subject: SandboxSubject) -> None:
    """A protected path of the workspace can be read, but not be written, removed or replaced."""
    async with open_bench(subject) as bench:
        (bench.folder / "kept").mkdir()
        (bench.folder / "kept" / "file").write_text("old")
        (bench.folder / "single").write_text("old")
        protected = (bench.folder / "kept", bench.folder / "single")
        command = (
            "cat kept/file single; echo new > kept/file; echo new > single; echo x > kept/more; rm -rf kept single; "
            "mv kept other; mv single other; ln -sf /etc/passwd single; echo fine > own"
        )
        try:
            ended = await bench.run(command, protected=protected)
        except Exception as error:
            if "namespaces" in str(error):
                raise not_offered("read-only paths in the workspace") from error
            raise
        assert ended.stdout == "oldold", ended
        assert [(bench.folder / name).read_text() for name in ("kept/file", "single")] == ["old", "old"]
        assert (bench.folder / "own").read_text() == "fine\n"


@_check
async def a_replaced_path_shows_nothing_else(subject: SandboxSubject) -> None:
    """A protected path that is replaced with a link after it was checked does not show where the link leads."""
    async with open_bench(subject) as bench:
        (bench.folder / "kept").mkdir()
        (bench.folder / "kept" / "file").write_text("mine")
        backend, argv = bench.backend, ["/bin/sh", "-c", "cat kept/secret"]
        plan = plan_wall(Sandbox(), folder=bench.folder, protected=(bench.folder / "kept",))
        os.rename(bench.folder / "kept", bench.folder / "moved")
        (bench.folder / "kept").symlink_to(bench.outside)
        bench.launch = lambda *_, **__: backend.launch(plan, argv)  # type: ignore[method-assign]
        try:
            ended = await bench.run(argv)
        except Exception:  # refused: as good as hidden
            return
        assert SECRET not in ended.stdout + ended.stderr, "the folder of the server is visible through the link"


@_check
async def hidden_paths_are_covered(subject: SandboxSubject) -> None:
    """A hidden path below a readable folder is not visible."""
    async with open_bench(subject) as bench:
        inner = bench.outside / "inner"
        inner.mkdir()
        (inner / "deep").write_text(SECRET)
        (bench.outside / "plain").write_text("plain")
        hidden = (str(inner), str(bench.outside / "secret"))
        try:
            ended = await bench.run(
                f"cat {bench.outside}/plain {inner}/deep {bench.outside}/secret",
                Sandbox(readable=(bench.outside,)),
                hidden=hidden,
            )
        except Exception as error:
            if "namespaces" in str(error):
                raise not_offered("hidden paths in readable folders") from error
            raise
        assert ended.stdout == "plain", ended


@_check
async def scratch_space_is_private_and_bounded(subject: SandboxSubject) -> None:
    """``/tmp`` is empty and of this program only, and it has a size; or it is not there for the program."""
    async with open_bench(subject) as bench:
        name = f"holdfast-suite-{os.getpid()}"
        with tempfile.NamedTemporaryFile(prefix="holdfast-seen-", dir="/tmp") as seen:
            made = await bench.run(f"echo mine > /tmp/{name}")
            written = name in os.listdir("/tmp")
            if written:
                os.unlink(f"/tmp/{name}")
            assert not written, "a program wrote into this machine's /tmp"
            ended = await bench.run("ls /tmp")
            assert os.path.basename(seen.name) not in ended.stdout, "this machine's /tmp is visible"
            assert name not in ended.stdout, "the /tmp of an earlier program is visible"
        if bench.backend.layers == ("landlock",):
            raise not_offered("a /tmp of the program's own")
        assert_ok(made)
        ended = await bench.run("head -c 8000000 /dev/zero > /tmp/big", Sandbox(scratch_bytes=4 << 20))
        assert ended.returncode != 0, "the scratch space has no bound"


@_check
async def set_uid_files_cannot_be_made(subject: SandboxSubject) -> None:
    """A program cannot make a set-uid file, which would run outside with the rights of its owner."""
    async with open_bench(subject) as bench:
        script = """
        import os
        for mode in (0o4755, 0o2755):
            open("file", "w").close()
            try:
                os.chmod("file", mode)
            except OSError:
                pass
            try:
                os.close(os.open(f"made{mode}", os.O_CREAT | os.O_WRONLY, mode))
            except OSError:
                pass
        """
        assert_ok(await bench.python(script))
        special = [path.name for path in bench.folder.iterdir() if path.stat().st_mode & 0o6000]
        assert not special, f"made with set-uid or set-gid bits: {special}"


# ── processes, environment and descriptors ───────────────────────────────────────────────────────────────────────────


@_check
async def other_processes_are_out_of_reach(subject: SandboxSubject) -> None:
    """A program can neither signal this process nor read its environment, memory or descriptors."""
    async with open_bench(subject) as bench:
        script = f"""
        import os
        try:
            os.kill({os.getpid()}, 0)
            print("reached: signal")
        except OSError:
            pass
        for name in ("environ", "maps", "mem", "root/etc/shadow", "fd/0"):
            try:
                with open("/proc/{os.getpid()}/" + name, "rb") as file:
                    file.read(1)
                print("reached:", name)
            except OSError:
                pass
        """
        ended = await bench.python(script)
        assert_ok(ended)
        assert not ended.stdout, ended.stdout


@_check
async def the_environment_is_complete_and_no_more(subject: SandboxSubject) -> None:
    """A program has the plan's variables, and none of this process's others."""
    os.environ["CONFORMANCE_OUTSIDE"] = SECRET
    try:
        async with open_bench(subject) as bench:
            given = clean_environment() | {"GIVEN": "a value", "QUOTED": "'\" $x \\", "EMPTY": ""}
            ended = await bench.run("env -0", environment=given)
    finally:
        del os.environ["CONFORMANCE_OUTSIDE"]
    found = dict(entry.split("=", 1) for entry in ended.stdout.split("\0") if "=" in entry)
    assert SECRET not in ended.stdout, "a variable of this process is visible"
    wrong = {name: found.get(name) for name in ("GIVEN", "QUOTED", "EMPTY") if found.get(name) != given[name]}
    assert not wrong, f"wrong values: {wrong}"


@_check
async def secrets_are_no_arguments(subject: SandboxSubject) -> None:
    """A secret reaches the program as a variable, and is in no command line that others can read."""
    os.environ[_VARIABLE] = SECRET
    try:
        async with open_bench(subject) as bench:
            sandbox = Sandbox(secrets=(_VARIABLE,))
            launch = await asyncio.to_thread(bench.launch, ["true"], sandbox)
            for fd in launch.pass_fds:
                os.close(fd)
            ended = await bench.run(f"printf %s ${_VARIABLE}", sandbox)
    finally:
        del os.environ[_VARIABLE]
    assert not [word for word in launch.argv if SECRET in word], "the secret is in the arguments"
    assert ended.stdout == SECRET, ended


@_check
async def no_descriptor_is_inherited(subject: SandboxSubject) -> None:
    """A program has its three standard streams and no other descriptor."""
    async with open_bench(subject) as bench:
        script = """
        import os
        for fd in range(3, 256):
            try:
                os.fstat(fd)
            except OSError:
                continue
            print(fd, os.readlink(f"/proc/self/fd/{fd}") if os.path.isdir("/proc/self/fd") else "")
        """
        ended = await bench.python(script)
        assert_ok(ended)
        assert not ended.stdout, f"inherited: {ended.stdout}"


# ── network ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@_check
async def without_network_the_loopback_is_out_of_reach(subject: SandboxSubject) -> None:
    """With the network ``none``, a program reaches no port of this machine, and no abstract Unix socket."""
    async with open_bench(subject) as bench:
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as local:
            local.bind(f"\0holdfast-conformance-{os.getpid()}")
            local.listen()
            port = listener.getsockname()[1]
            script = f"""
            import socket
            for family, address in (
                (socket.AF_INET, ("127.0.0.1", {port})),
                (socket.AF_INET, ("0.0.0.0", {port})),
                (socket.AF_INET6, ("::ffff:127.0.0.1", {port})),
                (socket.AF_UNIX, "\\0holdfast-conformance-{os.getpid()}"),
            ):
                try:
                    with socket.socket(family) as one:
                        one.settimeout(2)
                        one.connect(address)
                    print("reached", address)
                except OSError:
                    pass
            """
            ended = await bench.python(script)
        assert_ok(ended)
        assert not ended.stdout, ended.stdout


@_check
async def a_network_leads_to_its_hosts_only(subject: SandboxSubject) -> None:
    """With the network ``hosts``, a program reaches its hosts through the proxy of its variables, and nothing else."""
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    async with open_bench(subject) as bench, await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        script = f"""
        import os, socket
        host, _, port = os.environ["http_proxy"].removeprefix("http://").partition(":")
        for target in ("127.0.0.1:{port}", "127.0.0.2:{port}", "localhost:{port}"):
            with socket.create_connection((host, int(port)), 10) as one:
                one.sendall(f"GET http://{{target}}/ HTTP/1.1\\r\\nhost: {{target}}\\r\\n\\r\\n".encode())
                print(one.recv(100).split()[1].decode())
        """
        sandbox = Sandbox(network="hosts", hosts=(f"127.0.0.1:{port}",), allow_networks=("127.0.0.1",))
        try:
            ended = await bench.python(script, sandbox)
        except NotSupported as error:
            raise not_offered("a network") from error
    assert_ok(ended)
    assert ended.stdout.split() == ["200", "403", "403"], ended
    assert asked == [b"GET / HTTP/1.1\r\n"], asked


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@_check
async def memory_is_limited(subject: SandboxSubject) -> None:
    """A program that uses more memory than allowed fails or is ended."""
    async with open_bench(subject) as bench:
        script = "data = b'x' * (600 << 20); print(len(data))"
        ended = await bench.python(script, Sandbox(memory_bytes=256 << 20))
        assert ended.returncode != 0, ended
        assert_ok(await bench.python(script, Sandbox(memory_bytes=2 << 30)))


@_check
async def files_and_descriptors_are_limited(subject: SandboxSubject) -> None:
    """The size of files and the number of open descriptors have limits."""
    async with open_bench(subject) as bench:
        await bench.run("head -c 3000000 /dev/zero > big", Sandbox(file_bytes=1 << 20))
        assert (bench.folder / "big").stat().st_size <= 1 << 20
        script = "import os; fds = [os.open('/dev/null', 0) for _ in range(200)]"
        assert (await bench.python(script, Sandbox(open_files=64))).returncode != 0, "open files are not limited"


@_check
async def processor_time_is_limited(subject: SandboxSubject) -> None:
    """A program that computes for longer than allowed is ended."""
    async with open_bench(subject) as bench:
        ended = await bench.run("while :; do :; done", Sandbox(cpu_s=1))
        assert ended.returncode != 0, ended


@_check
async def processes_are_limited(subject: SandboxSubject) -> None:
    """A program cannot start many more processes than allowed."""
    async with open_bench(subject) as bench:
        if bench.backend.layers == ("landlock",):
            raise not_offered("a limit of processes of its own, because without namespaces all of the user's count")
        script = """
        import os, time
        made = 0
        try:
            for made in range(1000):
                if os.fork() == 0:
                    time.sleep(60)
        except OSError:
            pass
        print(made, flush=True)
        """
        ended = await bench.python(script, Sandbox(processes=40))
        most = 40 + 300  # the kernel gives out 300 ids beyond a bound once
        assert int(ended.stdout or 999) <= most, f"started {ended.stdout} processes with a limit of 40"
        assert ended.tree.outcome == "gone", ended.tree


@_check
async def programs_run_at_the_lowest_priority(subject: SandboxSubject) -> None:
    """A program runs with niceness 19 unless its plan is not idle, and is the first to go when memory runs out."""
    async with open_bench(subject) as bench:
        ended = await bench.run("nice; cat /proc/self/oom_score_adj 2>/dev/null || echo 1000")
        assert ended.stdout.split() == ["19", "1000"], ended
        ended = await bench.run("nice", idle=False)
        assert ended.stdout.split() == [str(os.getpriority(os.PRIO_PROCESS, 0))], ended


@_check
async def privileges_cannot_be_gained(subject: SandboxSubject) -> None:
    """A program has no capability, gains none by exec, and cannot make a user namespace, mount or trace."""
    async with open_bench(subject) as bench:
        script = """
        import ctypes, os
        try:
            status = dict(line.split(":", 1) for line in open("/proc/self/status"))
        except OSError:  # Landlock alone shows no processes
            status = {}
        for name in ("CapPrm", "CapEff", "CapAmb"):
            if int(status.get(name, "0"), 16):
                print(name, status[name].strip())
        libc = ctypes.CDLL(None)
        if libc.prctl(39, 0, 0, 0, 0) != 1:
            print("no_new_privs is not set")
        pid = os.fork()
        if pid == 0:
            os._exit(0 if libc.unshare(0x10000000) == 0 else 1)
        if os.waitpid(pid, 0)[1] == 0:
            print("made a user namespace")
        if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0:
            print("mounted")
        """
        ended = await bench.python(script)
        assert_ok(ended)
        assert not ended.stdout, ended.stdout


@_check
async def a_plan_that_cannot_be_enforced_is_refused(subject: SandboxSubject) -> None:
    """A program with a network reaches no port of this machine directly, or is refused."""
    async with open_bench(subject) as bench:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            script = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('reached')"
            argv = [sys.executable, "-I", "-S", "-c", script]
            for network in _NETWORKS:
                plan = replace(plan_wall(Sandbox(), folder=bench.folder), network=network, hosts=("example.org",))
                try:
                    launch = await asyncio.to_thread(bench.backend.launch, plan, argv)
                except NotSupported:
                    continue
                bench.launch = lambda *_, one=launch, **__: one  # type: ignore[method-assign]
                ended = await bench.run(argv)
                assert "reached" not in ended.stdout, f"with the network {network}, it reached a port of this machine"


SANDBOX_CHECKS: Sequence[SandboxCheck] = (*_CHECKS, *STOP_CHECKS)
