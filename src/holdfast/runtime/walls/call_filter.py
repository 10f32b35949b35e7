"""Filter that blocks system calls with effects that would reach outside of a wall or outlast it.

A set-uid file that is created behind a wall also exists outside: anyone who runs it there acts as the file's owner, the
server's user. So the filter blocks modes with the set-uid or set-gid bit, and extended attributes, which include file
capabilities. Namespaces do not cover sockets to the machine's host (``AF_VSOCK``) or the kernel's keyrings, which all
programs of a server would share. So only Unix, internet and netlink sockets without raw access are allowed, and system
calls for keys are blocked. So are all calls that look into other processes, change mounts, enter or make namespaces,
administer the machine, or put input into a terminal.

The memory of System V IPC objects belongs to no process, so no limit covers it: the filter blocks the calls that make
such objects. It blocks ``fallocate`` too, which fills a disk faster than a quota can be checked; C libraries then write
the file instead.

Without namespaces (`alone`), the filter blocks more: sockets and all IPC, which is not files, changes of other files'
modes, owners and times, which Landlock does not cover, and changes to processes of the same user.

- The filter sees only call numbers and arguments in registers. A call that passes its mode or flags in memory
  (``openat2``, ``clone3``, ``io_uring``) fails as if the kernel did not support the call; C libraries then fall back to
  an older call.
- Calls through another instruction set of the processor (32 bit, x32) fail in the same way.
"""

from __future__ import annotations

import errno
import functools
import platform
import struct

from holdfast.runtime.walls.call_numbers import ARCHITECTURES, CALL_NUMBERS

__all__ = ["REFUSED_CALLS", "call_filter"]

_SPECIAL_MODE = 0o6000
_CREATES = 0o100 | 0o20000000  # O_CREAT, __O_TMPFILE
_X32 = 0x40000000
_CLONE_NEW = 0x7E020000
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_SOCKET_TYPE, _SOCK_DGRAM, _SOCK_RAW, _SOCK_PACKET = 0xF, 2, 3, 10
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C

_LOOKS = ("ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd", "process_madvise")
_ADMINISTERS = (
    *("mount", "umount2", "pivot_root", "chroot", "unshare", "setns", "move_mount", "open_tree", "open_tree_attr"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr", "open_by_handle_at", "name_to_handle_at"),
    *("kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "reboot", "swapon", "swapoff"),
    *("acct", "quotactl", "quotactl_fd", "iopl", "ioperm", "syslog", "settimeofday", "clock_settime", "adjtimex"),
    *("clock_adjtime", "sethostname", "setdomainname", "vhangup", "fanotify_init", "lookup_dcookie", "bpf"),
    *("perf_event_open", "modify_ldt"),
)
_UNSUPPORTED = (
    *("openat2", "clone3", "io_uring_setup", "io_uring_enter", "io_uring_register", "userfaultfd"),
    *("add_key", "request_key", "keyctl"),
)
_ATTRIBUTES = ("setxattr", "lsetxattr", "fsetxattr", "setxattrat")
_UNCOUNTED = ("shmget", "msgget", "semget")
REFUSED_CALLS = {
    **dict.fromkeys((*_LOOKS, *_ADMINISTERS), errno.EPERM),
    **dict.fromkeys((*_UNSUPPORTED, *_UNCOUNTED), errno.ENOSYS),
    **dict.fromkeys((*_ATTRIBUTES, "fallocate"), errno.EOPNOTSUPP),
}
"""Calls that fail behind each wall whatever their arguments, with the error."""
_REFUSED_ALONE = {
    **dict.fromkeys(("socket", "io_submit", "mq_open", "mq_unlink"), errno.EACCES),
    **dict.fromkeys(("shmget", "shmat", "shmctl", "msgget", "msgsnd", "msgrcv", "msgctl"), errno.EACCES),
    **dict.fromkeys(("semget", "semop", "semtimedop", "semctl"), errno.EACCES),
    **dict.fromkeys(("chmod", "fchmod", "fchmodat", "fchmodat2"), errno.EPERM),
    **dict.fromkeys(("chown", "lchown", "fchown", "fchownat"), errno.EPERM),
    **dict.fromkeys(("utime", "utimes", "futimesat"), errno.EPERM),
    **dict.fromkeys(("removexattr", "lremovexattr", "fremovexattr", "removexattrat"), errno.ENOTSUP),
    **dict.fromkeys(("inotify_init", "inotify_init1"), errno.ENOSYS),
    **dict.fromkeys(("move_pages", "migrate_pages"), errno.EPERM),
}
_OWN_PROCESS_ONLY = {
    "prlimit64": 0,
    "sched_setaffinity": 0,
    "sched_setscheduler": 0,
    "sched_setparam": 0,
    "sched_setattr": 0,
    "setpriority": 1,
    "ioprio_set": 1,
}
"""Calls without namespaces that may concern this process only, and the position of the argument that names it."""
_PATH_MUST_BE_NULL = {"utimensat": 1}
_MODE_AT = {"chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2, "creat": 1, "mknod": 1, "mknodat": 2}
_FLAGS_AND_MODE_AT = {"open": (1, 2), "openat": (2, 3)}

# Classic BPF: load a word of the call description, jump on it, return a verdict.
_LOAD, _IF_EQUAL, _IF_LEAST, _IF_BITS, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000

_Step = tuple[int, int, int, int]


@functools.cache
def call_filter(machine: str = "", *, alone: bool = False) -> bytes | None:
    """Return the filter as an array of ``struct sock_filter``, or None if the processor is unknown.

    Parameters:
        machine: processor name as in ``platform.machine()``; empty means this machine's processor.
        alone: whether the wall lacks namespaces, so that the filter also blocks what they would keep apart.
    """
    machine = machine or platform.machine()
    numbers = CALL_NUMBERS.get(machine)
    if numbers is None:
        return None
    steps: list[_Step] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, ARCHITECTURES[machine]),
        _verdict(errno.ENOSYS),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        steps += [(_IF_LEAST, 0, 1, _X32), _verdict(errno.ENOSYS)]
    for name, number in numbers.items():
        judged = _judge(name, alone=alone)
        if judged:
            steps += [(_IF_EQUAL, 0, len(judged), number), *judged]
    steps.append(_verdict(0))
    return b"".join(struct.pack("=HBBI", code, yes, no, value) for code, yes, no, value in steps)


def _judge(name: str, *, alone: bool) -> list[_Step]:
    """Return the filter steps for the system call `name`, the last of which is a verdict; empty allows the call."""
    if alone and name in _REFUSED_ALONE:
        return [_verdict(_REFUSED_ALONE[name])]
    if name in REFUSED_CALLS:
        return [_verdict(REFUSED_CALLS[name])]
    if alone and name in _OWN_PROCESS_ONLY:
        return [_load_argument(_OWN_PROCESS_ONLY[name]), (_IF_EQUAL, 1, 0, 0), _verdict(errno.EPERM), _verdict(0)]
    if alone and name in _PATH_MUST_BE_NULL:
        return _judge_null(_PATH_MUST_BE_NULL[name])
    if name == "socket":
        return _judge_socket()
    if name == "socketpair":
        return _judge_pair() if alone else []
    if name == "clone":
        return [_load_argument(0), (_IF_BITS, 0, 1, _CLONE_NEW), _verdict(errno.EPERM), _verdict(0)]
    if name == "ioctl":
        refused = [_verdict(errno.EPERM), _verdict(0)]
        return [_load_argument(1), (_IF_EQUAL, 1, 0, _TIOCSTI), (_IF_EQUAL, 0, 1, _TIOCLINUX), *refused]
    if name in _MODE_AT:
        return _judge_mode(_MODE_AT[name])
    if name in _FLAGS_AND_MODE_AT:
        flags, mode = _FLAGS_AND_MODE_AT[name]
        judged = _judge_mode(mode)
        return [_load_argument(flags), (_IF_BITS, 0, len(judged) - 1, _CREATES), *judged]
    return []


def _judge_socket() -> list[_Step]:
    steps = [_load_argument(1), (_AND, 0, 0, _SOCKET_TYPE)]
    for kind in (_SOCK_RAW, _SOCK_PACKET):
        steps += [(_IF_EQUAL, 0, 1, kind), _verdict(errno.EPERM)]
    steps.append(_load_argument(0))
    for family in (_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK):
        steps += [(_IF_EQUAL, 0, 1, family), _verdict(0)]
    return [*steps, _verdict(errno.EAFNOSUPPORT)]


def _judge_pair() -> list[_Step]:
    """Refuse pairs of datagram sockets: each end could send to any other socket of the host."""
    steps = [_load_argument(1), (_AND, 0, 0, _SOCKET_TYPE)]
    return [*steps, (_IF_EQUAL, 0, 1, _SOCK_DGRAM), _verdict(errno.EACCES), _verdict(0)]


def _judge_mode(argument: int) -> list[_Step]:
    return [_load_argument(argument), (_IF_BITS, 0, 1, _SPECIAL_MODE), _verdict(errno.EPERM), _verdict(0)]


def _judge_null(argument: int) -> list[_Step]:
    low, high = _load_argument(argument), (_LOAD, 0, 0, _ARGUMENTS + 8 * argument + 4)
    refused = _verdict(errno.EPERM)
    return [low, (_IF_EQUAL, 0, 3, 0), high, (_IF_EQUAL, 0, 1, 0), _verdict(0), refused]


def _load_argument(index: int) -> _Step:
    """Load the lower half of a 64-bit argument, which holds all modes and flags on little-endian processors."""
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * index)


def _verdict(number: int) -> _Step:
    return (_RETURN, 0, 0, _ERROR | number if number else _ALLOW)
