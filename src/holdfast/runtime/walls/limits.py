"""Limits and privileges of a walled program. The zygote imports this module; nothing here can be undone."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct

from holdfast.runtime.walls.kernel import check, libc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "drop_capabilities",
    "forbid_privileges",
    "install_filter",
    "limit",
    "limit_processes",
    "most_open_files",
    "prefer_for_kill",
    "renounce_capabilities",
]

_PR_CAPBSET_DROP = 24
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522
_STEP_BYTES = 8
_LEAST_OPEN_FILES = 16
_MOST_OPEN_FILES = 1 << 20


def limit(limits: Mapping[int, int]) -> None:
    """Set resource limits, without raising a hard limit. For open files, see `most_open_files`."""
    for which, value in limits.items():
        if which == resource.RLIMIT_NOFILE:
            value = min(value, most_open_files())
        hard = resource.getrlimit(which)[1]
        lowered = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # One second between the signal, which gives the reason, and the kill.
        last = lowered + 1 if which == resource.RLIMIT_CPU and hard == resource.RLIM_INFINITY else lowered
        resource.setrlimit(which, (lowered, last))


def most_open_files() -> int:
    """Return the maximum limit of open files for a walled program: half of the soft limit of this process.

    Descriptors that were sent over a socket and not received yet count for the user. The kernel refuses to send more if
    their number exceeds the limit of open files of the process that sends. So a program with the limit of its server
    could make the kernel refuse the messages with which the server starts programs.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_OPEN_FILES if soft == resource.RLIM_INFINITY else max(soft // 2, _LEAST_OPEN_FILES)


def limit_processes(processes: int) -> None:
    """Limit the number of processes in this user namespace; outside one, all processes of the user would count."""
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    most = processes if hard == resource.RLIM_INFINITY else min(processes, hard)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def prefer_for_kill() -> None:
    """Make the kernel kill this process and its descendants first when memory runs out, if it allows that."""
    try:
        with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
            file.write(b"1000")
    except OSError:
        return


def renounce_capabilities() -> None:
    """Drop what an exec as root would give back, for this process and its descendants; it keeps what it has."""
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    capability = 0
    while libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    # EINVAL: the kernel has no further capabilities. EPERM: an ordinary user, whose bounding set gives nothing.
    if ctypes.get_errno() != errno.EINVAL and os.geteuid() == 0:
        check(-1, "capabilities")


def drop_capabilities() -> None:
    """Drop all capabilities that this process has."""
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    check(libc.capset(header, bytes(24)), "capabilities")


def forbid_privileges() -> None:
    """Make every later exec ignore set-uid modes and file capabilities."""
    check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def install_filter(call_filter: bytes) -> None:
    """Install a system call filter for this process and its descendants; ``no_new_privs`` must be set."""
    if not call_filter:
        return
    program = ctypes.create_string_buffer(call_filter, len(call_filter))
    given = struct.pack("HxxxxxxP", len(call_filter) // _STEP_BYTES, ctypes.addressof(program))
    check(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, given, 0, 0), "seccomp")
