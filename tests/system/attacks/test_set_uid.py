"""A confined script cannot leave a file behind that runs with the rights of the server's user."""

from __future__ import annotations

import os
import platform
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.runtime.walls.call_filter import call_filter
from holdfast.tools.files.workspace import Workspace
from tests.tools.sandbox.walled import ALL_LAYERS, reason_against, run_walled

NOBODY = 65534

ATTACK = r"""
import ctypes, os, platform, shutil, struct, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
CHMOD, FCHMODAT, FCHMODAT2, OPENAT2, URING = (90, 268, 452, 437, 425) if X86 else (None, 53, 452, 437, 425)
AT = -100
MODE = 0o6755
CAPABILITIES = struct.pack("<IIIII", 0x02000001, 0xFFFFFFFF, 0, 0xFFFFFFFF, 0)

def shell(name):
    shutil.copyfile("/bin/sh", name)
    os.chmod(name, 0o755)
    return name

def ways():
    yield "chmod", lambda n: os.chmod(shell(n), MODE)
    yield "fchmod", lambda n: os.fchmod(os.open(shell(n), os.O_RDWR), MODE)
    yield "fchmodat", lambda n: libc.syscall(FCHMODAT, AT, shell(n).encode(), MODE, 0)
    yield "fchmodat2", lambda n: libc.syscall(FCHMODAT2, AT, shell(n).encode(), MODE, 0)
    high = ctypes.c_ulong(MODE | 1 << 40)
    yield "high bits", lambda n: libc.syscall(FCHMODAT, ctypes.c_long(AT), shell(n).encode(), high)
    yield "open", lambda n: os.close(os.open(n, os.O_CREAT | os.O_WRONLY, MODE))
    yield "openat", lambda n: os.close(os.open(n, os.O_CREAT | os.O_WRONLY, MODE, dir_fd=os.open(".", os.O_RDONLY)))
    yield "tmpfile", tmpfile
    yield "creat", lambda n: libc.creat(n.encode(), MODE)
    how = struct.pack("QQQ", os.O_CREAT | os.O_WRONLY, MODE, 0)
    yield "openat2", lambda n: libc.syscall(OPENAT2, AT, n.encode(), how, 24)
    yield "mknod", lambda n: os.mknod(n, 0o100000 | MODE)
    yield "mknodat", lambda n: os.mknod(n, 0o100000 | MODE, dir_fd=os.open(".", os.O_RDONLY))
    yield "device", lambda n: os.mknod(n, 0o020666, os.makedev(1, 1))
    yield "capability", capability
    yield "capability in a namespace", in_namespace
    yield "chmod program", lambda n: subprocess.run(["chmod", "6755", shell(n)])
    yield "install", lambda n: subprocess.run(["install", "-m", "6755", "/bin/sh", n])
    yield "cp -p", lambda n: subprocess.run(["cp", "-p", "/usr/bin/passwd", n])
    unpack = "mkdir {0}.d; tar -C / -cf - usr/bin/passwd | tar -xpf - -C {0}.d"
    yield "tar", lambda n: subprocess.run(unpack.format(n), shell=True)
    yield "umask", lambda n: (os.umask(0), os.close(os.open(n, os.O_CREAT | os.O_WRONLY, MODE)))
    yield "32 bit", lambda n: thirty_two(shell(n))
    yield "x32", lambda n: libc.syscall(0x40000000 | 90, shell(n).encode(), MODE) if X86 else None
    code = "import os; os.chmod({0!r}, {1})"
    yield "child", lambda n: subprocess.run([sys.executable, "-I", "-S", "-c", code.format(shell(n), MODE)])

def tmpfile(name):
    fd = os.open(".", os.O_TMPFILE | os.O_WRONLY, MODE)
    os.link(f"/proc/self/fd/{fd}", name, follow_symlinks=True)

def capability(name):
    os.setxattr(shell(name), "security.capability", CAPABILITIES)

def in_namespace(name):
    shell(name)
    if os.fork() == 0:
        try:
            uid, gid = os.getuid(), os.getgid()
            if libc.unshare(0x10000000) == 0:
                for file, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
                    open(f"/proc/self/{file}", "w").write(text)
                os.setxattr(name, "security.capability", CAPABILITIES)
        finally:
            os._exit(0)
    os.wait()

def thirty_two(name):  # int 0x80 with the number of the 32-bit chmod; the name has to lie low
    if not X86:
        return
    import mmap
    libc.mmap.restype = ctypes.c_void_p
    page = libc.mmap(ctypes.c_void_p(0x10000), 4096, 7, 0x32, -1, 0)
    code = b"\x53\xb8\x0f\x00\x00\x00\xbb\x80\x00\x01\x00\xb9" + struct.pack("<I", MODE) + b"\xcd\x80\x5b\xc3"
    ctypes.memmove(page, code, len(code))
    ctypes.memmove(page + 0x80, name.encode() + b"\0", len(name) + 1)
    ctypes.CFUNCTYPE(ctypes.c_int)(page)()

for number, (label, way) in enumerate(ways()):
    try:
        way(f"f{number}")
    except (OSError, AttributeError) as error:
        pass
    print("tried", label, flush=True)
try:
    libc.unshare(0x10000000) == 0 and print("NAMESPACE")
finally:
    os.chmod(shell("plain"), 0o755)
    os.makedirs("made", 0o755)
    print(subprocess.run(["./plain", "-c", "echo works"], capture_output=True, text=True).stdout)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that an ordinary user can reach; those of pytest are closed to others."""
    with tempfile.TemporaryDirectory(prefix="holdfast-attack-") as name:
        os.chmod(name, 0o755)
        (Path(name) / "work").mkdir()
        yield Path(name) / "work"


def privileged(folder: Path) -> list[str]:
    """What below the folder runs with more rights than its caller has."""
    found = []
    for at, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(at, name)
            status = os.lstat(path)
            if status.st_mode & 0o6000 or stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
                found.append(f"{path} {stat.filemode(status.st_mode)}")
            if "security.capability" in os.listxattr(path, follow_symlinks=False):
                found.append(f"{path} has capabilities")
    return found


def usable_by_others(program: str) -> bool:
    try:
        return subprocess.run([program, "-c", ""], user=NOBODY, group=NOBODY, check=False).returncode == 0
    except PermissionError:
        return False


@pytest.mark.parametrize("layers", ALL_LAYERS)
def test_no_script_makes_a_file_with_the_rights_of_the_servers_user(folder: Path, layers: tuple[str, ...]) -> None:
    if (reason := reason_against(layers)) is not None:
        pytest.skip(reason)
    done = run_walled([sys.executable, "-I", "-S", "-c", ATTACK], folder=folder, layers=layers, timeout_s=60)
    assert done.output.count("tried") == 23, done
    if "namespaces" in layers:  # without, modes cannot be changed at all
        assert done.returncode == 0 and "works" in done.output, done
    assert "NAMESPACE" not in done.output
    assert privileged(folder) == []


def test_a_file_tool_does_not_carry_a_set_uid_bit_over_to_what_a_model_wrote(folder: Path) -> None:
    program = folder / "program"
    program.write_text("old")
    program.chmod(0o6755)
    Workspace(folder).replace("program", b"new", check=lambda: None)
    assert program.read_text() == "new"
    assert stat.S_IMODE(program.stat().st_mode) == 0o755


@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "riscv64"])
def test_every_jump_of_the_filter_ends_inside_of_it(machine: str) -> None:
    program = call_filter(machine)
    assert program is not None and len(program) % 8 == 0
    steps = [program[at : at + 8] for at in range(0, len(program), 8)]
    for at, step in enumerate(steps):
        if step[0] & 0x07 == 0x05:
            assert at + 1 + max(step[2], step[3]) < len(steps)
    assert steps[-1][0] == 0x06
    assert call_filter("abacus") is None
    assert (call_filter() is not None) or platform.machine() not in ("x86_64", "aarch64", "riscv64")
