"""Restrict this process and its descendants with Landlock. The zygote imports this module.

Everything that Landlock can restrict is handled, so what no rule allows is denied: files, TCP, abstract sockets and
signals, as far as the kernel supports them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct

from holdfast.runtime.walls.kernel import libc, system_call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.runtime.walls.spec import WallPath

__all__ = ["ALL", "READ", "SCOPES_ABI", "USE", "landlock_abi", "make_ruleset", "restrict"]

SCOPES_ABI = 6
"""First ABI that keeps signals and abstract sockets inside, without which Landlock alone does not confine."""

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_TCP = 3
_SCOPES = 3

READ = _READ_FILE | _READ_DIR | _EXECUTE
USE = READ | _WRITE_FILE | _IOCTL
"""Rights on devices."""
ALL = (1 << 16) - 1

_CREATE_RULESET = 444
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1


def landlock_abi() -> int:
    """Return the version of Landlock in this kernel; 0 if it is missing or disabled."""
    return max(0, int(libc.syscall(_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION)))


def make_ruleset(rules: Iterable[tuple[bytes | WallPath, int]], *, tcp: bool) -> int:
    """Return a descriptor of a ruleset for `restrict`; it changes nothing by itself.

    Parameters:
        rules: paths with the rights on them and on what is below them. A path without an identity is skipped if it does
            not exist.
        tcp: whether TCP connections stay possible.

    Raises:
        OSError: Landlock is not available, or a path leads to another file than the specification means.
    """
    abi = landlock_abi()
    if abi == 0:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), "landlock")
    files = (1 << (13 + (abi >= 2) + (abi >= 3) + (abi >= 5))) - 1
    if abi in (3, 4):
        files &= ~_IOCTL
    attributes = struct.pack("QQQ", files, _TCP if abi >= 4 and not tcp else 0, _SCOPES if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = system_call("landlock_create_ruleset", attributes, ctypes.c_size_t(size), 0)
    try:
        for path, rights in rules:
            _allow(ruleset, path, rights & files)
    except BaseException:
        os.close(ruleset)
        raise
    return ruleset


def restrict(ruleset: int) -> None:
    """Allow only what the ruleset allows, from now on and irrevocably. ``no_new_privs`` must be set.

    Raises:
        OSError: the kernel refuses.
    """
    system_call("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: bytes | WallPath, rights: int) -> None:
    name = path if isinstance(path, bytes) else path[0]
    try:
        fd = os.open(name, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, PermissionError):
        if isinstance(path, bytes):
            return
        raise
    try:
        found = os.fstat(fd)
        if not isinstance(path, bytes) and (found.st_dev, found.st_ino) != path[1:3]:
            raise OSError(errno.ESTALE, "the path now leads to another file", os.fsdecode(name))
        if not stat.S_ISDIR(found.st_mode):
            rights &= _ON_FILES
        rule = struct.pack("=QI", rights, fd)
        system_call("landlock_add_rule", ruleset, _RULE_PATH_BENEATH, rule, 0, what=os.fsdecode(name))
    finally:
        os.close(fd)
