"""Filter that blocks system calls with effects that would reach outside the sandbox or outlast it.

A set-uid file that is created in a sandbox also exists outside: anyone who runs it there acts as the file's owner, the
server's user. So the filter blocks modes with the set-uid or set-gid bit, and extended attributes, which include file
capabilities. Namespaces do not cover sockets to the machine's host (``AF_VSOCK``) or the kernel's keyrings, which all
scripts of a server would share. So only Unix, internet and netlink sockets are allowed, and system calls for keys are
blocked.

- The filter sees only call numbers and arguments in registers. A call that passes its mode in memory (``openat2``,
  ``io_uring``) fails as if the kernel did not support the call; C libraries then fall back to an older call.
- Calls through another instruction set of the processor (32 bit, x32) fail in the same way.
"""

from __future__ import annotations

import errno
import platform
import struct

__all__ = ["system_call_filter"]

_SPECIAL_MODE = 0o6000
_CREATES = 0o100 | 0o20000000  # O_CREAT, __O_TMPFILE
_X32 = 0x40000000
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_GENERIC = {
    "fchmod": 52,
    "fchmodat": 53,
    "openat": 56,
    "mknodat": 33,
    "setxattr": 5,
    "lsetxattr": 6,
    "fsetxattr": 7,
    "socket": 198,
    "add_key": 217,
    "request_key": 218,
    "keyctl": 219,
    "userfaultfd": 282,
}
_NEWER = {"fchmodat2": 452, "openat2": 437, "io_uring_setup": 425, "setxattrat": 463}
_NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {
        "chmod": 90,
        "fchmod": 91,
        "fchmodat": 268,
        "creat": 85,
        "open": 2,
        "openat": 257,
        "mknod": 133,
        "mknodat": 259,
        "setxattr": 188,
        "lsetxattr": 189,
        "fsetxattr": 190,
        "socket": 41,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "userfaultfd": 323,
        **_NEWER,
    },
    "aarch64": _GENERIC | _NEWER,
    "riscv64": _GENERIC | _NEWER,
}
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7, "riscv64": 0xC00000F3}
_REFUSED = {
    "openat2": errno.ENOSYS,
    "io_uring_setup": errno.ENOSYS,
    "setxattr": errno.ENOTSUP,
    "lsetxattr": errno.ENOTSUP,
    "fsetxattr": errno.ENOTSUP,
    "setxattrat": errno.ENOTSUP,
    "add_key": errno.ENOSYS,
    "request_key": errno.ENOSYS,
    "keyctl": errno.ENOSYS,
    "userfaultfd": errno.ENOSYS,
}
_MODE_AT = {"chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2, "creat": 1, "mknod": 1, "mknodat": 2}
_FLAGS_AND_MODE_AT = {"open": (1, 2), "openat": (2, 3)}

# Classic BPF: load a word of the call description, jump on it, return a verdict.
_LOAD, _IF_EQUAL, _IF_LEAST, _IF_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000

_Step = tuple[int, int, int, int]


def system_call_filter(machine: str = "") -> bytes | None:
    """Return the filter as an array of ``struct sock_filter``, or None if the processor is unknown.

    Parameters:
        machine: processor name as in ``platform.machine()``; empty means this machine's processor.
    """
    machine = machine or platform.machine()
    numbers = _NUMBERS.get(machine)
    if numbers is None:
        return None
    steps: list[_Step] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        _verdict(errno.ENOSYS),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        steps += [(_IF_LEAST, 0, 1, _X32), _verdict(errno.ENOSYS)]
    for name, number in numbers.items():
        judged = _judge(name)
        steps += [(_IF_EQUAL, 0, len(judged), number), *judged]
    steps.append(_verdict(0))
    return b"".join(struct.pack("=HBBI", code, yes, no, value) for code, yes, no, value in steps)


def _judge(name: str) -> list[_Step]:
    """Return the filter steps for the system call `name`; the last step is a verdict."""
    if name in _REFUSED:
        return [_verdict(_REFUSED[name])]
    if name == "socket":
        return _judge_family()
    if name in _MODE_AT:
        return _judge_mode(_MODE_AT[name])
    flags, mode = _FLAGS_AND_MODE_AT[name]
    judged = _judge_mode(mode)
    return [_load_argument(flags), (_IF_BITS, 0, len(judged) - 1, _CREATES), *judged]


def _judge_family() -> list[_Step]:
    steps = [_load_argument(0)]
    for family in (_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK):
        steps += [(_IF_EQUAL, 0, 1, family), _verdict(0)]
    return [*steps, _verdict(errno.EAFNOSUPPORT)]


def _judge_mode(argument: int) -> list[_Step]:
    return [_load_argument(argument), (_IF_BITS, 0, 1, _SPECIAL_MODE), _verdict(errno.EPERM), _verdict(0)]


def _load_argument(index: int) -> _Step:
    """Load the lower half of a 64-bit argument, which holds all modes and flags on little-endian processors."""
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * index)


def _verdict(number: int) -> _Step:
    return (_RETURN, 0, 0, _ERROR | number if number else _ALLOW)
