"""Linux system calls that Python does not offer, through ctypes. The zygote imports this module.

The C library is loaded as a `ctypes.PyDLL`, which keeps the interpreter's lock: a child that `clone_beside` makes never
waits for a lock of its parent.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "CLONE_NEWCGROUP",
    "CLONE_NEWIPC",
    "CLONE_NEWNET",
    "CLONE_NEWNS",
    "CLONE_NEWPID",
    "CLONE_NEWUSER",
    "CLONE_NEWUTS",
    "check",
    "clone_beside",
    "clone_child",
    "close_others",
    "libc",
    "run_in_child",
    "set_dumpable",
    "system_call",
]

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_NEWCGROUP = 0x02000000

_CLONE_VM, _CLONE_VFORK, _CLONE_PARENT = 0x0100, 0x4000, 0x8000
_CLONE_INTO_CGROUP = 1 << 33
_SIGCHLD = 17
_PR_SET_DUMPABLE = 4
_HIGHEST_FD = 0xFFFFFFFF
_CLOSE_RANGE = 436

_GENERIC = {"clone": 220, "pivot_root": 41}
_NUMBERS = {"x86_64": {"clone": 56, "pivot_root": 155}, "aarch64": _GENERIC, "riscv64": _GENERIC}
_SAME_EVERYWHERE = {
    "open_tree": 428,
    "move_mount": 429,
    "clone3": 435,
    "mount_setattr": 442,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}

libc = ctypes.PyDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

_SHARES_MEMORY = sys.version_info < (3, 14)  # from then on, the interpreter checks on which stack it runs
_STACK_BYTES = 1 << 20
_FAILED = 127
_Function = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
libc.clone.argtypes = [_Function, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]


def check(result: int, what: str) -> int:
    """Return the result of a call of the C library.

    Raises:
        OSError: the result is negative; the error names `what`.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def system_call(name: str, *arguments: object, what: str = "") -> int:
    """Make a system call and return its result.

    Raises:
        OSError: the call failed, or its number is unknown for this processor.
    """
    number = _SAME_EVERYWHERE.get(name) or _NUMBERS.get(os.uname().machine, {}).get(name)
    if number is None:
        raise OSError(errno.ENOSYS, f"the number of the system call is unknown on {os.uname().machine}", name)
    return check(int(libc.syscall(number, *arguments)), what or name)


def clone_beside(cgroup: int = -1) -> int:
    """Fork a sibling: a child of this process's parent. Return its pid, and 0 in the sibling.

    This process must have one thread only.

    Parameters:
        cgroup: descriptor of the cgroup (v2) of the sibling; -1 means that of this process.
    """
    return _clone(_CLONE_PARENT, cgroup)


def clone_child(cgroup: int = -1) -> int:
    """Fork a child, without the handlers that `os.fork` runs in it. Return its pid, and 0 in the child.

    This process must have one thread only. Each page that a child touches is copied, which is most of a fork's cost.

    Parameters:
        cgroup: as for `clone_beside`.
    """
    return _clone(0, cgroup)


def _clone(flags: int, cgroup: int) -> int:
    if cgroup < 0:
        return system_call("clone", ctypes.c_ulong(flags | _SIGCHLD), None, None, None, None)
    signum = 0 if flags & _CLONE_PARENT else _SIGCHLD  # a sibling has that of this process
    arguments = struct.pack("11Q", flags | _CLONE_INTO_CGROUP, 0, 0, 0, signum, 0, 0, 0, 0, 0, cgroup)
    try:
        return system_call("clone3", arguments, ctypes.c_size_t(len(arguments)), what="its cgroup")
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.E2BIG):  # the filter of a container, or before Linux 5.7
            raise
    pid = _clone(flags, -1)
    if pid == 0:  # this takes milliseconds
        procs = os.open("cgroup.procs", os.O_WRONLY | os.O_CLOEXEC, dir_fd=cgroup)
        os.write(procs, b"0")
        os.close(procs)
    return pid


def run_in_child(function: Callable[[], int]) -> int:
    """Run a function in a child that then exits with the function's result, and return the child's pid.

    Until the child exits, it uses the memory of this process, which waits for it: unlike a fork, this copies no page.
    So `function` must undo what it changes in memory, and must not end the child itself. It may call `clone_beside`,
    whose sibling has a copy of the memory. This process must have one thread only.
    """
    if not _SHARES_MEMORY:
        pid = clone_child()
        if pid == 0:
            os._exit(_status(function))
        return pid
    with mmap.mmap(-1, _STACK_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as stack:
        start = ctypes.c_char.from_buffer(stack)
        try:
            top = ctypes.addressof(start) + _STACK_BYTES
            called = _Function(lambda _: _status(function))
            return check(int(libc.clone(called, top, _CLONE_VM | _CLONE_VFORK | _SIGCHLD, None)), "clone")
        finally:
            del start  # the memory cannot be unmapped before


def _status(function: Callable[[], int]) -> int:
    try:
        return function()
    except BaseException:
        return _FAILED


def close_others(kept: set[int]) -> None:
    """Close all descriptors but those in `kept`."""
    low = 0
    for fd in (*sorted(kept), None):
        high = _HIGHEST_FD if fd is None else fd - 1
        if low <= high and libc.syscall(_CLOSE_RANGE, ctypes.c_uint(low), ctypes.c_uint(high), 0) != 0:
            os.closerange(low, os.sysconf("SC_OPEN_MAX") if fd is None else fd)  # before Linux 5.9
        low = 0 if fd is None else fd + 1


def set_dumpable(dumpable: bool) -> None:
    """Set whether this process owns its files in ``/proc``, and other processes of its user may read its memory."""
    libc.prctl(_PR_SET_DUMPABLE, int(dumpable), 0, 0, 0)
