"""Launcher for a confined program: enters new namespaces, sets limits, and executes the program.

A bare interpreter runs this file, so it imports only the standard library. The first argument is a JSON object with
``limits`` (numbers by name), ``places`` (the visible file system; null disables namespaces) and ``filter`` (the system
call filter in hexadecimal digits; null disables the filter). The remaining arguments are the program and its arguments.

- The confinement is complete before the program starts. If the setup fails, the launcher writes one line to standard
  error and exits with 125.
- With namespaces, there are three processes. The launcher waits outside the process-id namespace, its child is the
  first process of the namespace, and the program is the child of the first process. When the program ends, the kernel
  kills all processes that the program left in the namespace. Without namespaces, the launcher itself becomes the
  program.
- With namespaces, the program has no capability in its user namespace, so it cannot undo a read-only mount. It also
  cannot create another user namespace.
- The program's child processes run under the same filter, because exec does not remove it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

CANNOT = 125
"""Exit code: the program was not started because the setup failed."""

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_MNT_DETACH = 2
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_SYS_MOUNT_SETATTR = 442
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41}
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_FILTER_STEP_BYTES = 8
_CAPABILITY_VERSION_3 = 0x20080522
_LEAST_PIDS = 301
_STAGE = "/proc"
_DEVICES = ("null", "zero", "full", "random", "urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def main(arguments: list[str]) -> NoReturn:
    """Set up the confinement and execute the program ``arguments[1:]``. Never returns."""
    specification = json.loads(arguments[0])
    limits, places, program = specification["limits"], specification["places"], arguments[1:]
    calls = bytes.fromhex(specification["filter"] or "")
    try:
        if places is None:
            if limits["processes"] is not None:
                _limit_processes(limits["processes"])
            _limit(limits)
            _filter_calls(calls)
            _become(program)
        _enter_namespaces(network=bool(places["network"]))
        _outlive(limits, places, calls, program)
    except OSError as error:
        os.write(2, f"sandbox: cannot confine {program[0]}: {error}\n".encode())
    finally:
        os._exit(CANNOT)


def _outlive(limits: dict[str, Any], places: dict[str, Any], calls: bytes, program: list[str]) -> NoReturn:
    """Fork the first process of the new namespace, and exit with the program's exit code or signal."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # sent to the whole tree; the program handles it
        signal.signal(signum, signal.SIG_IGN)
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(read)
        _be_first(limits, places, calls, program, write)
    os.close(write)
    told = os.read(read, 4)
    os.wait()
    if not told:
        os._exit(CANNOT)
    code = os.waitstatus_to_exitcode(struct.unpack("i", told)[0])
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _be_first(
    limits: dict[str, Any], places: dict[str, Any], calls: bytes, program: list[str], report: int
) -> NoReturn:
    """Run the namespace's first process: set up the file system, start the program, and exit when it has ended."""
    try:
        _arrange(places, limits["processes"])
        _limit_processes(limits["processes"])
        pid = os.fork()
        if pid == 0:
            os.close(report)
            _limit(limits)
            _drop_capabilities()
            _filter_calls(calls)
            _become(program)
        nothing = os.open("/dev/null", os.O_RDWR)
        for fd in range(3):
            os.dup2(nothing, fd)
        while True:
            ended, status = os.wait()
            if ended == pid:
                os.write(report, struct.pack("i", status))
                break
    except OSError as error:
        os.write(2, f"sandbox: cannot confine {program[0]}: {error}\n".encode())
    finally:
        os._exit(0)


def _become(program: list[str]) -> NoReturn:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        os.write(2, f"sandbox: cannot start {program[0]}: {error}\n".encode())
    finally:
        os._exit(CANNOT)


def _limit_processes(processes: int) -> None:
    """Limit the number of processes in this user namespace; outside one, all processes of the user would count."""
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    most = processes + 2  # plus the two that wait for the program
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def _limit(limits: dict[str, Any]) -> None:
    """Set the limits that apply to each process, without raising a hard limit."""
    for which, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
    ):
        if which == resource.RLIMIT_AS and sys.platform != "linux":
            continue  # macOS does not enforce this limit
        hard = resource.getrlimit(which)[1]
        lowered = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # One second between the signal, which gives the reason, and the kill.
        last = lowered + 1 if which == resource.RLIMIT_CPU and hard == resource.RLIM_INFINITY else lowered
        resource.setrlimit(which, (lowered, last))
    if sys.platform == "linux":
        _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def _enter_namespaces(*, network: bool) -> None:
    """Enter new namespaces for users, mounts, processes, IPC and host name, keeping the user and group ids.

    Unless `network` is true, enter a new network namespace, too.
    """
    uid, gid = os.getuid(), os.getgid()
    flags = _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWIPC | _CLONE_NEWUTS
    _check(_libc.unshare(flags | (0 if network else _CLONE_NEWNET)), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _arrange(places: dict[str, Any], processes: int) -> None:
    """Build a file system of the visible paths and detach the old one."""
    pivot_root = _SYS_PIVOT_ROOT.get(platform.machine())
    if pivot_root is None:
        raise OSError(errno.ENOSYS, f"the number of the system call pivot_root is unknown on {platform.machine()}")
    size = f"size={places['scratch_bytes']},mode=1777".encode()
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", _STAGE, b"tmpfs", _MS_NOSUID | _MS_NODEV, b"size=1m,mode=755")
    for folder in ("dev/shm", "tmp", "proc"):
        os.makedirs(f"{_STAGE}/{folder}")
    _mount("tmpfs", f"{_STAGE}/tmp", b"tmpfs", _MS_NOSUID | _MS_NODEV, size)
    _mount("tmpfs", f"{_STAGE}/dev/shm", b"tmpfs", _MS_NOSUID | _MS_NODEV, size)
    for link, target in places["links"]:
        os.makedirs(os.path.dirname(_STAGE + link), exist_ok=True)
        os.symlink(target, _STAGE + link)
    shown = [*((path, False) for path in places["read"]), *((path, True) for path in places["write"])]
    for path, writable in sorted(shown):  # deeper paths are mounted over their parents
        _show(path, _ATTR_NOSUID | _ATTR_NODEV | (0 if writable else _ATTR_RDONLY))
    for path in places["hidden"]:
        _hide(path, [inner for inner in places["write"] if inner.startswith(f"{path}/")])
    for name in _DEVICES:
        _show(f"/dev/{name}", _ATTR_NOSUID)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{_STAGE}/dev/{name}")
    _mount("proc", f"{_STAGE}/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _bound_pids(processes)
    _forbid_user_namespaces()
    for mounted in (f"{_STAGE}/proc", _STAGE):
        _set_attributes(mounted, _ATTR_RDONLY, recursive=False)
    os.chdir(_STAGE)
    _check(_libc.syscall(pivot_root, b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount")
    os.chdir(places["directory"])


def _bound_pids(processes: int) -> None:
    """Limit the namespace's process ids if the kernel supports it (6.14): real root is exempt from RLIMIT_NPROC."""
    try:
        with open(f"{_STAGE}/proc/sys/kernel/pid_max", "r+") as file:
            if int(file.read()) > processes:
                file.seek(0)
                file.write(str(max(processes + 2, _LEAST_PIDS)))
    except OSError:
        return


def _forbid_user_namespaces() -> None:
    """Forbid new user namespaces, in which the program would regain all capabilities."""
    with open(f"{_STAGE}/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")


def _show(path: str, attributes: int) -> None:
    target = _STAGE + path
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    _mount(path, target, None, _MS_BIND | _MS_REC)
    _set_attributes(target, attributes, recursive=True)


def _hide(path: str, shown: list[str]) -> None:
    """Cover a visible path with an empty file or folder in which only the folders `shown` remain visible."""
    target = _STAGE + path
    if os.path.isdir(target):
        _mount("tmpfs", target, b"tmpfs", _MS_NOSUID | _MS_NODEV, b"size=4k,mode=755")
        for folder in shown:
            _show(folder, _ATTR_NOSUID | _ATTR_NODEV)
        _set_attributes(target, _ATTR_RDONLY, recursive=False)
    elif os.path.exists(target):
        _mount("/dev/null", target, None, _MS_BIND)


def _mount(source: str, target: str, kind: bytes | None, flags: int, data: bytes | None = None) -> None:
    _check(_libc.mount(os.fsencode(source), os.fsencode(target), kind, flags, data), f"mount {target}")


def _set_attributes(path: str, attributes: int, *, recursive: bool) -> None:
    value = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    result = _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), flags, value, len(value))
    _check(result, f"mount_setattr {path}")


def _drop_capabilities() -> None:
    capability = 0
    while _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    if ctypes.get_errno() != errno.EINVAL:  # EINVAL: the kernel has no further capabilities
        _check(-1, "capabilities")
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, bytes(24)), "capabilities")


def _filter_calls(calls: bytes) -> None:
    """Install the system call filter for this process and its descendants."""
    if not calls:
        return
    program = ctypes.create_string_buffer(calls, len(calls))
    given = struct.pack("HxxxxxxP", len(calls) // _FILTER_STEP_BYTES, ctypes.addressof(program))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, given, 0, 0), "seccomp")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main(sys.argv[1:])
