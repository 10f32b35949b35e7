"""The tag of a process, stored in an unenforced resource limit, and a kernel filter that makes the tag indelible.

The zygote imports this module, so its imports must be cheap. Invariants:

- A tag is the soft value of a limit that Linux does not enforce (a *carrier*). The tag is inherited across fork and
  exec.
- Once a process is *sealed*, no code in it or its descendants can change that limit: calls of ``setrlimit`` and
  ``prlimit`` for this limit return success and do nothing, through every system call entry of this architecture. A call
  takes effect only if a certain random number is in the upper half of the argument that selects the limit; the kernel
  ignores that half. A program never knows the number, because an exec replaces the memory that holds it.
- A host below a sealed host takes the next carrier. If no carrier is left, or the kernel refuses the filter, the
  process stays unsealed and `Seal.sealed` is False.
- An unprivileged user may install a filter only after setting ``no_new_privs``: setuid programs then run without their
  privileges.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import threading

from holdfast.runtime.processes import procfs

__all__ = ["CARRIERS", "Seal", "current", "read", "seal"]

CARRIERS = (10, 5, 15)
"""Limits that Linux does not enforce for ordinary programs: LOCKS, RSS and RTTIME."""

_NAMES = {10: b"Max file locks", 5: b"Max resident set", 15: b"Max realtime timeout"}
_TRIAL = 0b10110 << 58

_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER = 1
_TSYNC_AND_SPEC_ALLOW = 1 | 4

_AUDIT_X86_64 = 0xC000003E
_AUDIT_I386 = 0x40000003
_AUDIT_AARCH64 = 0xC00000B7
_AUDIT_ARM = 0x40000028

_ARCHITECTURES: dict[str, tuple[int, int, tuple[tuple[int, int, int], ...]]] = {
    "x86_64": (302, 317, ((_AUDIT_X86_64, 160, 302), (_AUDIT_I386, 75, 340))),
    "aarch64": (261, 277, ((_AUDIT_AARCH64, 164, 261), (_AUDIT_ARM, 75, 369))),
}
"""Numbers of ``prlimit64`` and ``seccomp``, then of ``setrlimit`` and ``prlimit64`` for each entry of the kernel."""

_X32 = 0x40000000
_ALLOW = 0x7FFF0000
_PRETEND = 0x00050000
_REFUSE = 0x00050000 | errno.EPERM
_UNKNOWN_ENTRY = 0x00050000 | errno.ENOSYS

_LOAD = 0x20
_AND = 0x54
_EQUAL = 0x15
_RETURN = 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16


class Seal:
    """Sets the tags of processes, including sealed ones.

    Attributes:
        carrier: resource limit that holds the tags; None if no carrier is free.
        sealed: whether tags are indelible in processes started from now on.
        gave_up_privileges: whether ``no_new_privs`` was set for the seal, so that setuid programs run without their
            privileges.
    """

    __slots__ = ("_cookie", "carrier", "gave_up_privileges", "pid", "sealed")

    def __init__(self, carrier: int | None, cookie: int, *, sealed: bool, gave_up_privileges: bool) -> None:
        self.pid = os.getpid()
        self.carrier = carrier
        self.sealed = sealed
        self.gave_up_privileges = gave_up_privileges
        self._cookie = cookie

    def put(self, pid: int, tag: int) -> bool:
        """Set the tag of ``pid``, where 0 means this process; return False if it cannot be set.

        The tag cannot be set if the process is gone or belongs to another user, or if the hard limit is below the tag.
        """
        if self.carrier is None:
            return False
        try:
            hard = resource.prlimit(pid, self.carrier)[1]
        except (OSError, ValueError):
            return False
        return self.restore(pid, (tag, hard))

    def limits(self) -> tuple[int, int] | None:
        """Return the limits of the carrier in this process; None if no carrier is free."""
        return None if self.carrier is None else resource.getrlimit(self.carrier)

    def restore(self, pid: int, limits: tuple[int, int]) -> bool:
        """Set the limits of the carrier for ``pid``, where 0 means this process; return False if the kernel refuses."""
        assert self.carrier is not None
        infinity = (1 << 64) - 1
        wanted = struct.pack("=QQ", *(infinity if limit == resource.RLIM_INFINITY else limit for limit in limits))
        number = _ARCHITECTURES[os.uname().machine][0] if self.sealed else 0
        if not number:
            try:
                resource.prlimit(pid, self.carrier, limits)
            except (OSError, ValueError):
                return False
            return True
        word = self._cookie << 32 | self.carrier
        return int(_libc().syscall(number, ctypes.c_long(pid), ctypes.c_ulong(word), wanted, None)) == 0


_UNSEALED = Seal(CARRIERS[0], 0, sealed=False, gave_up_privileges=False)
"""Seal before any call of `seal`."""

_current: Seal | None = None
_lock = threading.Lock()


def current() -> Seal:
    """Return the `Seal` of this process; its ``sealed`` is False before a call of `seal` and in a forked child."""
    return _current if _current is not None and _current.pid == os.getpid() else _UNSEALED


def seal() -> Seal:
    """Seal this process, including all its threads, permanently; a repeated call returns the first result.

    If the process lacks the privilege to install a filter, ``no_new_privs`` is set first; see the invariants. The
    filter stays until the process ends.
    """
    global _current
    with _lock:
        if _current is None or _current.pid != os.getpid():
            _current = _seal()
        return _current


def _seal() -> Seal:
    carrier = next((limit for limit in CARRIERS if _is_free(limit)), None)
    architecture = _ARCHITECTURES.get(os.uname().machine)
    if carrier is None or architecture is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        return Seal(carrier, 0, sealed=False, gave_up_privileges=False)
    cookie = int.from_bytes(os.urandom(4), "little") | 1
    program = _program(carrier, cookie, architecture[2])
    done = _install(architecture[1], program)
    gave_up = False
    if not done and ctypes.get_errno() == errno.EACCES:  # any other refusal would remain without privileges too
        gave_up = _libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
        done = gave_up and _install(architecture[1], program)
    return Seal(carrier, cookie if done else 0, sealed=done, gave_up_privileges=gave_up)


def _is_free(carrier: int) -> bool:
    """Whether this limit can hold a tag and no ancestor uses it as a carrier.

    Setting a sealed limit returns success without effect, so the value is read back.
    """
    before = resource.getrlimit(carrier)
    if before[0] >> 58 == _TRIAL >> 58:
        return False
    try:
        resource.setrlimit(carrier, (_TRIAL, before[1]))
        held = resource.getrlimit(carrier)[0] == _TRIAL
        resource.setrlimit(carrier, before)
    except (OSError, ValueError):
        return False
    return held


def _install(number: int, program: bytes) -> bool:
    """Filter all threads of this process; False if the kernel refuses, with the reason in ctypes' errno."""
    ctypes.set_errno(0)  # a thread with a filter of its own causes a refusal without a reason
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    return int(_libc().syscall(number, _SECCOMP_SET_MODE_FILTER, _TSYNC_AND_SPEC_ALLOW, header)) == 0


def _program(carrier: int, cookie: int, entries: tuple[tuple[int, int, int], ...]) -> bytes:
    """Return the filter in kernel instructions: each is a code, two relative jumps and a value."""
    code: list[tuple[int, int, int, int]] = [(_LOAD, 0, 0, _ARCH)]
    for arch, setrlimit, prlimit in entries:
        block = _entry(arch, setrlimit, prlimit, carrier, cookie)
        code += [(_EQUAL, 0, len(block), arch), *block]
    code.append((_RETURN, 0, 0, _UNKNOWN_ENTRY))
    return b"".join(struct.pack("=HBBI", *one) for one in code)


def _entry(arch: int, setrlimit: int, prlimit: int, carrier: int, cookie: int) -> list[tuple[int, int, int, int]]:
    """Return the part for one system call entry. Words are little-endian: the lower half comes first."""
    low, high = 0, 4
    wide = arch not in (_AUDIT_I386, _AUDIT_ARM)
    limit, new, old = _ARGUMENTS + 8, _ARGUMENTS + 16, _ARGUMENTS + 24
    return [
        (_LOAD, 0, 0, _NUMBER),
        (_AND, 0, 0, 0xFFFFFFFF ^ _X32),
        (_EQUAL, 0, 3, setrlimit),
        (_LOAD, 0, 0, _ARGUMENTS + low),
        (_EQUAL, 0, 13, carrier),
        (_RETURN, 0, 0, _PRETEND),
        (_EQUAL, 0, 11, prlimit),
        (_LOAD, 0, 0, limit + low),
        (_EQUAL, 0, 9, carrier),
        (_LOAD, 0, 0, limit + high),
        (_EQUAL, 7, 0, cookie if wide else 0xFFFFFFFF),
        (_LOAD, 0, 0, new + low),
        (_EQUAL, 0, 2, 0),
        (_LOAD, 0, 0, new + high),
        (_EQUAL, 3, 0, 0),
        (_LOAD, 0, 0, old + low),
        (_EQUAL, 2, 0, 0),
        (_RETURN, 0, 0, _REFUSE),  # it would return an old value that is never written
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _PRETEND),
    ]


def read(pid: int, carrier: int) -> int | None:
    """Return the soft limit of ``pid``, even of a zombie; None if the process is gone or the value is not a number."""
    try:
        return resource.prlimit(pid, carrier)[0]
    except ProcessLookupError:
        return None
    except (PermissionError, ValueError):  # another user's: a world-readable file has it too, but slower
        return _read_slowly(pid, carrier)


def _read_slowly(pid: int, carrier: int) -> int | None:
    limits = procfs.read_text(f"/proc/{pid}/limits")
    start = -1 if not limits else limits.find(_NAMES[carrier])
    if not limits or start < 0:
        return None
    soft = limits[start + len(_NAMES[carrier]) :].split(None, 1)[0]
    return int(soft) if soft.isdigit() else None


_c_library: ctypes.CDLL | None = None


def _libc() -> ctypes.CDLL:
    global _c_library
    if _c_library is None:
        _c_library = ctypes.CDLL(None, use_errno=True)
        _c_library.syscall.restype = ctypes.c_long
    return _c_library
