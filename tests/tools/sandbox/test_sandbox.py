"""Confinement: what a program inside can see, change and use up; and that it says so where nothing confines."""

from __future__ import annotations

import os
import platform
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import NotSupported
from holdfast.runtime.process_host import Completed, process_host
from holdfast.runtime.processes.procfs import all_pids, read_text
from holdfast.tools.sandbox.environment import clean_environment
from holdfast.tools.sandbox.sandbox import Isolation, Sandbox, find_isolation

ISOLATION = find_isolation()
LINUX = sys.platform == "linux"

confines = pytest.mark.skipif(ISOLATION.kind == "none", reason=f"this machine confines nothing: {ISOLATION.reason}")


def inside(folder: Path, code: str, *, sandbox: Sandbox | None = None, **more: Any) -> Completed:
    """Run Python code confined, with one folder to write in."""
    argv = (sandbox or Sandbox()).command(
        [sys.executable, "-I", "-S", "-c", code], isolation=ISOLATION, directory=folder, writable=[folder], **more
    )
    return process_host().run_blocking(argv, timeout_s=30, env=clean_environment())


def kernel() -> tuple[int, int]:
    major, minor = platform.release().split(".")[:2]
    return int(major), int("".join(character for character in minor if character.isdigit()))


def of_folder(folder: Path) -> list[int]:
    """Processes that were started to work in the folder."""
    return [pid for pid in all_pids() if os.fsencode(folder) in (read_text(f"/proc/{pid}/cmdline") or b"")]


@confines
def test_it_sees_no_network_not_even_the_loopback(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=5)"
        denied = inside(tmp_path, code)
        assert denied.returncode == 1 and b"Network is unreachable" in denied.stderr
        allowed = inside(tmp_path, code, sandbox=Sandbox(network="allow"))
        assert (allowed.returncode, allowed.stderr) == (0, b"")


@confines
def test_it_writes_in_its_folder_and_nowhere_else_that_lasts(tmp_path: Path) -> None:
    code = """
import os, sys
open("mine", "w").write("x")
open("/tmp/scratch", "w").write("x")
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
    argv = Sandbox().command(
        [sys.executable, "-I", "-S", "-c", code, *paths], isolation=ISOLATION, directory=inner, writable=[inner]
    )
    ended = process_host().run_blocking(argv, timeout_s=30)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
    assert (inner / "mine").read_text() == "x"
    assert not Path("/tmp/scratch").exists()


@confines
def test_it_reads_the_system_and_what_is_named_but_no_other_file(tmp_path: Path) -> None:
    inner, named, other = (tmp_path / name for name in ("in", "named", "other"))
    for folder in (inner, named, other):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    (inner / "way_out").symlink_to(other / "file")
    code = f"""
import os
print(open({str(named / "file")!r}).read())
for path in ({str(other / "file")!r}, "way_out", os.path.expanduser("~/.ssh"), "/root", "/home", "/var", "/sys"):
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
    ended = inside(inner, code, readable=[named])
    lines = ended.stdout.decode().splitlines()
    assert (lines[0], lines[-1]) == ("named", "read-only"), ended
    assert [line for line in lines[1:-1] if not line.endswith(" []")] == []


@confines
def test_it_can_neither_see_nor_signal_nor_read_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TEST_SECRET", "told-to-nobody")
    code = f"""
import os
me = {os.getpid()}
seen = [int(name) for name in os.listdir("/proc") if name.isdigit()]
print(len(seen) <= 4)
try:
    os.kill(me, 0)
    print("signalled")
except ProcessLookupError:
    pass
for pid in seen:
    try:
        print("told-to-nobody" in open(f"/proc/{{pid}}/environ").read())
    except OSError:
        pass
"""
    ended = inside(tmp_path, code)
    assert set(ended.stdout.split()) == {b"True", b"False"}, ended
    assert ended.stdout.count(b"True") == 1


@confines
def test_it_has_no_capabilities_and_cannot_undo_what_confines_it(tmp_path: Path) -> None:
    code = """
import ctypes, os
status = open("/proc/self/status").read()
print({line.split()[1] for line in status.splitlines() if line.startswith("Cap")})
libc = ctypes.CDLL(None, use_errno=True)
print(libc.mount(b"none", b"/usr", None, 32 | 4096, None), libc.umount2(b"/usr", 2), libc.unshare(0x20000))
libc.unshare(0x10000000 | 0x20000)  # a user namespace of its own gives it power over nothing that was there
print(libc.mount(b"none", b"/usr", None, 32 | 4096, None), libc.umount2(b"/usr", 2))
try:
    open("/usr/made", "w")
except OSError as error:
    print("no")
"""
    ended = inside(tmp_path, code)
    assert ended.stdout.decode().splitlines() == ["{'0000000000000000'}", "-1 -1 -1", "-1 -1", "no"], ended


@confines
@pytest.mark.skipif(os.geteuid() == 0 and kernel() < (6, 14), reason="root's processes are bounded from Linux 6.14 on")
def test_the_number_of_its_processes_is_bounded(tmp_path: Path) -> None:
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
    ended = inside(tmp_path, code, sandbox=Sandbox(processes=20))
    assert int(ended.stdout) <= (300 if os.geteuid() == 0 else 20), ended
    assert of_folder(tmp_path) == []


@confines
def test_memory_files_descriptors_and_cpu_are_bounded(tmp_path: Path) -> None:
    sandbox = Sandbox(memory_bytes=200 << 20, file_bytes=1 << 20, open_files=32, cpu_s=1, scratch_bytes=2 << 20)
    code = """
import os
def tried(work):
    try:
        work()
    except (OSError, MemoryError) as error:
        return type(error).__name__, getattr(error, "errno", None)
def many():
    held = [open("/dev/null") for _ in range(100)]
def scratch():
    for number in range(10):
        open(f"/tmp/{number}", "wb").write(bytes(1 << 19))
print(tried(lambda: bytearray(400 << 20)), tried(lambda: open("big", "wb").write(bytes(2 << 20))), tried(many))
print(tried(scratch), flush=True)
while True:
    pass
"""
    ended = inside(tmp_path, code, sandbox=sandbox)
    assert ended.stdout.decode().splitlines() == [
        "('MemoryError', None) ('OSError', 27) ('OSError', 24)",
        "('OSError', 28)",
    ], ended
    assert ended.returncode == -24
    assert (tmp_path / "big").stat().st_size <= 1 << 20


@confines
@pytest.mark.parametrize(
    ("how", "code"), [("os._exit(7)", 7), ("os.kill(os.getpid(), 9)", -9), ("os.kill(os.getpid(), 15)", -15)]
)
def test_its_end_is_told_as_it_was_and_takes_all_its_processes_along(tmp_path: Path, how: str, code: int) -> None:
    stray = "if os.fork() == 0: os.setsid(); time.sleep(60)"
    ended = inside(tmp_path, f"import os, time\n{stray}\n{how}")
    assert ended.returncode == code, ended
    assert of_folder(tmp_path) == []
    assert ended.tree.survivors == ()


@confines
def test_what_cannot_be_confined_is_not_started(tmp_path: Path) -> None:
    argv = Sandbox().command(["/bin/sh", "-c", "echo ran"], isolation=ISOLATION, directory=tmp_path / "hidden")
    ended = process_host().run_blocking(argv, timeout_s=30)
    assert ended.returncode != 0 and b"ran" not in ended.stdout and b"hidden" in ended.stderr


@pytest.mark.skipif(not LINUX, reason="the limits are Linux's")
def test_without_isolation_it_is_refused_or_said_and_limited(tmp_path: Path) -> None:
    nothing = Isolation(kind="none", reason="tried in a test")
    with pytest.raises(NotSupported, match="tried in a test"):
        Sandbox().command(["true"], isolation=nothing, directory=tmp_path)
    bare = Sandbox(network="allow", memory_bytes=200 << 20)
    assert "Not isolated" in bare.describe(nothing)
    code = "bytearray(400 << 20)"
    argv = bare.command([sys.executable, "-I", "-S", "-c", code], isolation=nothing, directory=tmp_path)
    ended = process_host().run_blocking(argv, timeout_s=30)
    assert ended.returncode == 1 and b"MemoryError" in ended.stderr
