"""Walls: what a program inside can see, change and use up, with each combination of layers."""

from __future__ import annotations

import ast
import os
import platform
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigurationError, NotSupported
from holdfast.runtime.processes.procfs import all_pids, read_text
from holdfast.tools.sandbox.choice import find_backend
from holdfast.tools.sandbox.plan import plan_wall
from holdfast.tools.sandbox.sandbox import Network, Sandbox
from tests.tools.sandbox.walled import ALL_LAYERS, Ended, linux_backend, reason_against, run_walled

NAMESPACES = [layers for layers in ALL_LAYERS if "namespaces" in layers]


def inside(folder: Path, code: str, layers: tuple[str, ...], *words: str, **more: Any) -> Ended:
    """Run Python code behind a wall of these layers, with one folder to write in."""
    if (reason := reason_against(layers)) is not None:
        pytest.skip(reason)
    return run_walled([sys.executable, "-I", "-S", "-c", code, *words], folder=folder, layers=layers, **more)


NETWORKS: tuple[Network, ...] = ("none", "all")


def kernel() -> tuple[int, int]:
    major, minor = platform.release().split(".")[:2]
    return int(major), int("".join(character for character in minor if character.isdigit()))


def of_folder(folder: Path) -> list[int]:
    """Processes that were started to work in the folder."""
    return [pid for pid in all_pids() if os.fsencode(folder) in (read_text(f"/proc/{pid}/cmdline") or b"")]


@pytest.mark.parametrize("layers", ALL_LAYERS)
def test_it_does_not_reach_the_loopback_of_the_host(tmp_path: Path, layers: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=5)"
        for network in NETWORKS if "namespaces" in layers else NETWORKS[:1]:
            denied = inside(tmp_path, code, layers, sandbox=Sandbox(network=network))
            assert denied.returncode == 1 and "Error" in denied.output


@pytest.mark.parametrize("layers", ALL_LAYERS)
def test_it_writes_in_its_folder_and_nowhere_else_that_lasts(tmp_path: Path, layers: tuple[str, ...]) -> None:
    code = """
import os, sys, tempfile
open("mine", "w").write("x")
tempfile.NamedTemporaryFile().write(b"x")
for path in sys.argv[1:]:
    try:
        open(path, "a").close()
        print("wrote", path)
    except OSError:
        pass
"""
    inner, outer = tmp_path / "in", tmp_path / "out"
    inner.mkdir()
    outer.mkdir()
    (outer / "secret").write_text("s")
    paths = ["/made", "/etc/passwd", "/usr/made", "/dev/made", "/proc/sys/kernel/hostname", f"{outer}/secret"]
    ended = inside(inner, code, layers, *paths)
    assert (ended.returncode, ended.output) == (0, "")
    assert (inner / "mine").read_text() == "x"


@pytest.mark.parametrize("layers", ALL_LAYERS)
def test_it_reads_the_system_and_what_is_named_but_no_other_file(tmp_path: Path, layers: tuple[str, ...]) -> None:
    inner, named, other = (tmp_path / name for name in ("in", "named", "other"))
    for folder in (inner, named, other):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    (inner / "way_out").symlink_to(other / "file")
    code = f"""
import os
print(open({str(named / "file")!r}).read())
for path in ({str(other / "file")!r}, "way_out", os.path.expanduser("~/.ssh"), "/root", "/home", "/var", "/sys",
             "/etc/shadow", "/etc/ssl/private", "/proc/1/environ", "/proc/{os.getpid()}/environ"):
    try:
        seen = os.listdir(path) if os.path.isdir(path) else [open(path).read()]
    except OSError:
        continue
    print(path, [name for name in seen if name not in {sys.prefix.split("/")!r} + {sys.base_prefix.split("/")!r}])
try:
    open({str(named / "file")!r}, "w")
except OSError:
    print("read-only")
"""
    ended = inside(inner, code, layers, readable=[named])
    lines = ended.output.splitlines()
    assert (lines[0], lines[-1]) == ("named", "read-only"), ended
    on_the_way = set(tmp_path.parts)
    told = [(path, set(ast.literal_eval(seen))) for path, _, seen in (line.partition(" ") for line in lines[1:-1])]
    assert [(path, seen) for path, seen in told if not seen <= on_the_way] == []


@pytest.mark.parametrize("layers", ALL_LAYERS)
def test_it_can_neither_signal_nor_read_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: tuple[str, ...]
) -> None:
    monkeypatch.setenv("HOLDFAST_TEST_SECRET", "told-to-nobody")
    code = f"""
import os
me = {os.getpid()}
try:
    os.kill(me, 0)
    print("signalled")
except OSError:
    pass
try:
    seen = [int(name) for name in os.listdir("/proc") if name.isdigit()]
except OSError:
    seen = [me]
for pid in seen:
    try:
        print("told-to-nobody" in open(f"/proc/{{pid}}/environ").read())
    except OSError:
        pass
print(len(seen))
"""
    ended = inside(tmp_path, code, layers)
    assert "signalled" not in ended.output and "True" not in ended.output, ended
    assert int(ended.output.splitlines()[-1]) <= 2


@pytest.mark.parametrize("layers", ALL_LAYERS)
def test_it_has_no_capabilities_and_cannot_undo_its_wall(tmp_path: Path, layers: tuple[str, ...]) -> None:
    code = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
data = ctypes.create_string_buffer(24)
assert libc.capget(struct.pack("Ii", 0x20080522, 0), data) == 0
print(data.raw == bytes(24), sum(libc.prctl(23, one, 0, 0, 0) for one in range(41)), libc.prctl(39, 0, 0, 0, 0))
print(libc.mount(b"none", b"/usr", None, 32 | 4096, None), libc.umount2(b"/usr", 2), libc.unshare(0x20000))
libc.unshare(0x10000000 | 0x20000)  # a user namespace of its own gives it power over nothing that was there
print(libc.mount(b"none", b"/usr", None, 32 | 4096, None), libc.umount2(b"/usr", 2))
try:
    open("/usr/made", "w")
except OSError as error:
    print("no")
"""
    ended = inside(tmp_path, code, layers)
    assert ended.output.splitlines() == ["True 0 1", "-1 -1 -1", "-1 -1", "no"], ended


@pytest.mark.parametrize("layers", NAMESPACES)
@pytest.mark.skipif(os.geteuid() == 0 and kernel() < (6, 14), reason="root's processes are bounded from Linux 6.14 on")
def test_the_number_of_its_processes_is_bounded(tmp_path: Path, layers: tuple[str, ...]) -> None:
    code = """
import os, time
count = 0
try:
    while count < 400:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        count += 1
except OSError:
    pass
print(count)
"""
    ended = inside(tmp_path, code, layers, sandbox=Sandbox(processes=20))
    reserved = 300  # ids that the kernel gives out once, also above the bound
    assert int(ended.output) <= (reserved + 20 if os.geteuid() == 0 else 20), ended
    assert of_folder(tmp_path) == []


@pytest.mark.parametrize("layers", ALL_LAYERS)
def test_memory_files_descriptors_and_cpu_are_bounded(tmp_path: Path, layers: tuple[str, ...]) -> None:
    sandbox = Sandbox(memory_bytes=200 << 20, file_bytes=1 << 20, open_files=32, cpu_s=1, scratch_bytes=2 << 20)
    code = """
import os, tempfile
def tried(work):
    try:
        work()
    except (OSError, MemoryError) as error:
        return type(error).__name__, getattr(error, "errno", None)
def many():
    held = [open("/dev/null") for _ in range(100)]
def scratch():
    for number in range(10):
        open(f"{tempfile.gettempdir()}/{number}", "wb").write(bytes(1 << 19))
print(tried(lambda: bytearray(400 << 20)), tried(lambda: open("big", "wb").write(bytes(2 << 20))), tried(many))
print(tried(scratch), flush=True)
while True:
    pass
"""
    ended = inside(tmp_path, code, layers, sandbox=sandbox, timeout_s=240)  # other work may take all processors
    said = ended.output.splitlines()
    assert said[0] == "('MemoryError', None) ('OSError', 27) ('OSError', 24)", ended
    if "namespaces" in layers:
        assert said[1] == "('OSError', 28)", ended
    assert ended.returncode == -24
    assert (tmp_path / "big").stat().st_size <= 1 << 20


@pytest.mark.parametrize("layers", ALL_LAYERS)
@pytest.mark.parametrize(
    ("how", "code"), [("os._exit(7)", 7), ("os.kill(os.getpid(), 9)", -9), ("os.kill(os.getpid(), 15)", -15)]
)
def test_its_end_is_told_as_it_was_and_takes_all_its_processes_along(
    tmp_path: Path, how: str, code: int, layers: tuple[str, ...]
) -> None:
    stray = "if os.fork() == 0: os.setsid(); time.sleep(60)"
    ended = inside(tmp_path, f"import os, time\n{stray}\n{how}", layers)
    assert ended.returncode == code, ended
    assert of_folder(tmp_path) == []
    assert ended.tree.outcome == "gone"


@pytest.mark.parametrize("layers", ALL_LAYERS)
def test_a_program_is_not_started_where_its_wall_cannot_be_built(tmp_path: Path, layers: tuple[str, ...]) -> None:
    outside = tmp_path / "out"
    inner = tmp_path / "in"
    inner.mkdir()
    outside.mkdir()
    if "namespaces" in layers:
        with pytest.raises(FileNotFoundError):
            inside(inner, "print('ran')", layers, directory=outside)
    plan = plan_wall(Sandbox(), folder=inner)
    inner.rename(tmp_path / "moved")
    outside.rename(inner)
    with pytest.raises(OSError, match=r"another file|replaced"):
        launch = linux_backend(layers).launch(plan, ["true"])
        moved = tmp_path / "again"
        inner.rename(moved)
        inner.mkdir()
        from holdfast.runtime.process_host import process_host

        try:
            process_host().run_blocking(launch.argv, env=launch.environment, wall=launch.wall, cwd="/")
        except OSError as error:
            raise OSError(f"another file: {error}") from error


def test_a_path_that_becomes_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "work" / "sub").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    plan = plan_wall(Sandbox(writable=(tmp_path / "work" / "sub",)), folder=tmp_path / "work")
    (tmp_path / "work" / "sub").rmdir()
    (tmp_path / "work" / "sub").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="link"):
        find_backend("linux").launch(plan, ["true"])


@pytest.mark.parametrize("layers", ALL_LAYERS)
def test_a_named_link_leads_to_what_it_led_to(tmp_path: Path, layers: tuple[str, ...]) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "tool-1.2").mkdir()
    (tmp_path / "tool-1.2" / "file").write_text("found")
    (tmp_path / "tool").symlink_to(tmp_path / "tool-1.2")
    ended = inside(
        tmp_path / "work",
        f"print(open({str(tmp_path / 'tool' / 'file')!r}).read())",
        layers,
        readable=[tmp_path / "tool"],
    )
    assert ended.output == "found\n"


@pytest.mark.parametrize("layers", ALL_LAYERS)
def test_a_named_link_may_lie_in_a_visible_folder(layers: tuple[str, ...]) -> None:
    """Below ``/tmp``, whose visible folders are mounted again for each program."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        root = Path(os.path.realpath(folder))
        for name in ("work", "tools/tool-1.2"):
            (root / name).mkdir(parents=True)
        (root / "tools" / "tool-1.2" / "file").write_text("found")
        (root / "tools" / "tool").symlink_to("tool-1.2")
        ended = inside(
            root / "work",
            f"print(open({str(root / 'tools' / 'tool' / 'file')!r}).read())",
            layers,
            readable=[root / "tools" / "tool", root / "tools"],
        )
    assert ended.output == "found\n"


@pytest.mark.parametrize("path", ["/", "/tmp", "/dev/shm", "/dev", "/proc", "/proc/sys"])
def test_what_each_wall_replaces_cannot_be_shared(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigurationError, match="has its own"):
        plan_wall(Sandbox(readable=(path,)), folder=tmp_path)
    with pytest.raises(ConfigurationError, match="has its own"):
        plan_wall(Sandbox(), folder=path)


def test_a_contradiction_or_a_missing_path_is_an_error(tmp_path: Path) -> None:
    for wrong in ({"network": "hosts ", "hosts": ()}, {"hosts": ("a.example",)}, {"readable": "/etc"}, {"cpu_s": 0}):
        with pytest.raises(ConfigurationError):
            Sandbox(**wrong)
    with pytest.raises(ConfigurationError, match="not usable"):
        plan_wall(Sandbox(readable=(tmp_path / "missing",)), folder=tmp_path)
    with pytest.raises(ConfigurationError, match="SECRET_OF_NOBODY"):
        plan_wall(Sandbox(secrets=("SECRET_OF_NOBODY",)), folder=tmp_path)
    with pytest.raises(NotSupported, match="not confined there"):
        plan_wall(Sandbox(), folder=tmp_path, hidden=[str(tmp_path / "h.db")])
    with pytest.raises(ConfigurationError, match="unknown sandbox"):
        find_backend("chroot")


def test_landlock_alone_refuses_what_it_cannot_enforce(tmp_path: Path) -> None:
    if (reason := reason_against(("landlock",))) is not None:
        pytest.skip(reason)
    (tmp_path / "kept").touch()
    for plan in (
        plan_wall(Sandbox(network="all"), folder=tmp_path),
        plan_wall(Sandbox(), folder=tmp_path, protected=[tmp_path / "kept"]),
    ):
        with pytest.raises(NotSupported, match="namespaces"):
            linux_backend(("landlock",)).launch(plan, ["true"])


@pytest.mark.parametrize("layers", NAMESPACES)
def test_protected_paths_of_the_workspace_are_read_only(tmp_path: Path, layers: tuple[str, ...]) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").write_text("old")
    (tmp_path / "note").write_text("old")
    command = "echo x >note; echo x >old/file; rm -rf old note; mv old older; echo x >new; cat note old/file"
    if (reason := reason_against(layers)) is not None:
        pytest.skip(reason)
    for session in ("", "s", "s"):
        protected = [tmp_path / "old", tmp_path / "note"]
        ended = run_walled(command, folder=tmp_path, layers=layers, session=session, protected=protected)
        assert ended.output.startswith("oldold"), ended
        assert (tmp_path / "note").read_text() == (tmp_path / "old" / "file").read_text() == "old"
        assert (tmp_path / "new").read_text() == "x\n"


@pytest.mark.parametrize("layers", ALL_LAYERS)
def test_a_secret_is_granted_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: tuple[str, ...]) -> None:
    monkeypatch.setenv("DEPLOY_TOKEN", "s3cret")
    if (reason := reason_against(layers)) is not None:
        pytest.skip(reason)
    assert run_walled("env", folder=tmp_path, layers=layers).output.count("s3cret") == 0
    given = run_walled("env", folder=tmp_path, layers=layers, sandbox=Sandbox(secrets=("DEPLOY_TOKEN",)))
    assert "DEPLOY_TOKEN=s3cret" in given.output


@pytest.mark.parametrize("layers", NAMESPACES)
def test_programs_of_a_session_share_its_workspace_but_no_tmp_no_processes_and_no_shared_memory(
    tmp_path: Path, layers: tuple[str, ...]
) -> None:
    leave = "echo x >/tmp/left; echo x >/dev/shm/left; (sleep 60 &) ; ipcmk -M 10 >/dev/null; echo kept >file"
    look = "ls /dev/shm; ls /tmp/left; cat file; ls /proc | grep -c '^[0-9]'; wc -l </proc/sysvipc/shm"
    if (reason := reason_against(layers)) is not None:
        pytest.skip(reason)
    for _ in range(2):
        assert run_walled(leave, folder=tmp_path, layers=layers, session="shared").returncode == 0
        ended = run_walled(look, folder=tmp_path, layers=layers, session="shared")
        lines = ended.output.splitlines()
        assert lines[0] == "kept" and int(lines[1]) <= 5 and lines[2] == "1" and "/tmp/left" in lines[3], ended


@pytest.mark.parametrize("layers", NAMESPACES)
def test_a_listening_socket_of_its_network_is_handed_out(tmp_path: Path, layers: tuple[str, ...]) -> None:
    if (reason := reason_against(layers)) is not None:
        pytest.skip(reason)
    from holdfast.runtime.process_host import process_host

    plan = plan_wall(Sandbox(), folder=tmp_path)
    code = """
import os, socket
host, port = os.environ["HTTP_PROXY"].removeprefix("http://").split(":")
with socket.create_connection((host, int(port)), timeout=20) as connection:
    print(connection.recv(100).decode())
try:
    os.fstat(3)
    socket.socket(fileno=3).getsockname()
    print("a socket too many")
except OSError:
    pass
"""
    launch = linux_backend(layers).launch(plan, [sys.executable, "-I", "-S", "-c", code])
    assert launch.wall is not None
    launch.wall.listen_fd = 3
    launch.wall.proxy_variables = [b"HTTP_PROXY"]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = process_host().spawn_blocking(
            launch.argv,
            env=launch.environment,
            wall=launch.wall,
            cwd=launch.directory,
            pass_fds=[theirs.fileno()],
            stdout=(out := os.open(tmp_path / "out", os.O_CREAT | os.O_RDWR)),
        )
        theirs.close()
        _, (listener, *_), _, _ = socket.recv_fds(ours, 100, 1)
        with socket.socket(fileno=listener) as accepting:
            connection, _ = accepting.accept()
            connection.sendall(b"through the proxy")
            connection.close()
        assert process.wait_blocking(30) == 0
        assert ours.recv(1) == b""  # nobody is left inside
        process.kill_tree_blocking()
    os.close(out)
    assert (tmp_path / "out").read_text().split("\n")[0] == "through the proxy"
    assert "too many" not in (tmp_path / "out").read_text()


def test_without_a_wall_programs_run_only_where_the_operator_chose_that(tmp_path: Path) -> None:
    backend = find_backend("none")
    launch = backend.launch(plan_wall(Sandbox(), folder=tmp_path), ["true"])
    assert launch.wall is None and backend.layers == ()
    assert find_backend("auto").name in ("linux", "bwrap")


@pytest.mark.parametrize("layers", ALL_LAYERS)
def test_it_runs_at_the_lowest_priority_and_is_killed_first_for_memory(tmp_path: Path, layers: tuple[str, ...]) -> None:
    code = "import os; print(os.getpriority(os.PRIO_PROCESS, 0)); print(open('/proc/self/oom_score_adj').read())"
    ended = inside(tmp_path, code, layers)
    assert ended.output.split()[0] == "19"
    if "namespaces" in layers:
        assert ended.output.split()[1] == "1000"


@pytest.mark.parametrize("layers", ALL_LAYERS)
def test_its_session_yields_to_all_others(tmp_path: Path, layers: tuple[str, ...]) -> None:
    """Where the kernel schedules sessions against each other, a niceness alone counts only within a session."""
    from holdfast.runtime.process_host import process_host

    if not Path("/proc/self/autogroup").exists():
        pytest.skip("this kernel does not schedule sessions against each other")
    if (reason := reason_against(layers)) is not None:
        pytest.skip(reason)
    launch = linux_backend(layers).launch(plan_wall(Sandbox(), folder=tmp_path), ["/bin/sleep", "60"])
    process = process_host().spawn_blocking(
        launch.argv, cwd=launch.directory, env=launch.environment, wall=launch.wall, name="yields"
    )
    try:
        until = time.monotonic() + 30
        while not (read_text(f"/proc/{process.pid}/autogroup") or b"").endswith(b" nice 19\n"):
            assert time.monotonic() < until, read_text(f"/proc/{process.pid}/autogroup")
            time.sleep(0.01)
    finally:
        assert process.kill_tree_blocking().outcome == "gone"


@pytest.mark.parametrize("layers", ALL_LAYERS)
def test_memory_that_belongs_to_no_process_cannot_be_had(tmp_path: Path, layers: tuple[str, ...]) -> None:
    code = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for name, arguments in (("shmget", (0, 4096, 0o1600)), ("msgget", (0, 0o1600)), ("semget", (0, 1, 0o1600))):
    if getattr(libc, name)(*arguments) >= 0 or ctypes.get_errno() not in (errno.ENOSYS, errno.EACCES):
        print(name, ctypes.get_errno())
"""
    ended = inside(tmp_path, code, layers)
    assert (ended.returncode, ended.output) == (0, "")


@pytest.mark.parametrize("layers", ALL_LAYERS)
def test_space_is_taken_by_writing_only(tmp_path: Path, layers: tuple[str, ...]) -> None:
    """A reservation would fill a disk between two checks of a quota; C libraries write instead."""
    code = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
fd = os.open("reserved", os.O_CREAT | os.O_RDWR)
size = ctypes.c_long(1 << 20)
if libc.fallocate(fd, 1, ctypes.c_long(0), size) == 0 or ctypes.get_errno() != errno.EOPNOTSUPP:
    print("reserved", ctypes.get_errno())
os.posix_fallocate(fd, 0, 1 << 20)
print(os.fstat(fd).st_size)
"""
    ended = inside(tmp_path, code, layers)
    assert (ended.returncode, ended.output) == (0, f"{1 << 20}\n")


def test_signals_of_a_stop_reach_the_program(tmp_path: Path) -> None:
    from holdfast.runtime.process_host import process_host

    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(5)); open('ready', 'w'); time.sleep(60)"
    launch = find_backend("linux").launch(plan_wall(Sandbox(), folder=tmp_path), [sys.executable, "-I", "-c", code])
    process = process_host().spawn_blocking(launch.argv, env=launch.environment, wall=launch.wall, cwd=launch.directory)
    while not (tmp_path / "ready").exists():
        signal.sigtimedwait([], 0.01)
    result = process.kill_tree_blocking(term_first_s=30.0)
    assert (process.returncode, result.outcome) == (5, "gone")
