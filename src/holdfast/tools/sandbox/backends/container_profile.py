"""The system calls that containers may not make, as a profile for container engines.

The profile blocks what the filter of the other backends blocks (`holdfast.runtime.walls.call_filter`).
"""

from __future__ import annotations

import errno
import functools
import json
from typing import Any, Final

from holdfast.runtime.walls.call_filter import REFUSED_CALLS

__all__ = ["call_profile"]

_MODE_AT: Final = {
    "chmod": 1,
    "fchmod": 1,
    "fchmodat": 2,
    "fchmodat2": 2,
    "creat": 1,
    "mknod": 1,
    "mknodat": 2,
    "open": 2,
    "openat": 3,
}
_SPECIAL_MODES: Final = (0o4000, 0o2000)
_NAMESPACES: Final = (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
_FAMILIES: Final = (1, 2, 10, 16)  # Unix, internet, netlink
_FAMILY_LIMIT: Final = 64
_RAW, _PACKET, _SOCKET_TYPE = 3, 10, 0xF
_TERMINAL_INPUT: Final = (0x5412, 0x541C)
_FLAGS_AT: Final = {"open": 1, "openat": 2}
_CREATES: Final = (0o100, 0o20000000)  # O_CREAT, __O_TMPFILE


@functools.cache
def call_profile() -> bytes:
    """Return the profile in the engines' JSON format."""
    rules = [
        *(_rule((name,), number) for name, number in REFUSED_CALLS.items()),
        *(_rule(("clone",), errno.EPERM, _has(0, flag)) for flag in _NAMESPACES),
        *(_rule(("ioctl",), errno.EPERM, _is(1, number)) for number in _TERMINAL_INPUT),
        *(_rule(("socket",), errno.EPERM, _is(1, kind, _SOCKET_TYPE)) for kind in (_RAW, _PACKET)),
        *(
            _rule(("socket",), errno.EAFNOSUPPORT, _is(0, family))
            for family in range(_FAMILY_LIMIT)
            if family not in _FAMILIES
        ),
    ]
    for name, position in _MODE_AT.items():
        created = [[_has(_FLAGS_AT[name], flag)] for flag in _CREATES] if name in _FLAGS_AT else [[]]
        rules += [
            _rule((name,), errno.EPERM, _has(position, bit), *condition)
            for bit in _SPECIAL_MODES
            for condition in created
        ]
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules}).encode()


def _rule(names: tuple[str, ...], number: int, *conditions: dict[str, Any]) -> dict[str, Any]:
    rule = {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": number}
    return rule | ({"args": conditions} if conditions else {})


def _has(position: int, bit: int) -> dict[str, Any]:
    return _is(position, bit, bit)


def _is(position: int, value: int, mask: int = 0xFFFFFFFF) -> dict[str, Any]:
    return {"index": position, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}
