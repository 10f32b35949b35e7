"""Generation of secrets and ids. Ids are short and unguessable, and sort by creation time (in milliseconds)."""

from __future__ import annotations

import os
import time

__all__ = ["message_id", "node_id", "run_id", "schedule_id", "secret", "stop_id"]

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def _base32(value: int, digits: int) -> str:
    out = []
    for _ in range(digits):
        out.append(_ALPHABET[value & 31])
        value >>= 5
    return "".join(reversed(out))


_BYTES = 8
_DRAW = 512
_drawn: list[str] = []
"""Random digits generated in advance, because a system call for each id would be most of the id's cost."""
os.register_at_fork(after_in_child=_drawn.clear)


def _make(prefix: str) -> str:
    """Return an id: the prefix, the time, and 16 random digits. Callable from any thread: `list.pop` is atomic."""
    while True:
        try:
            return f"{prefix}{time.time_ns() // 1_000_000:011x}{_drawn.pop()}"
        except IndexError:
            drawn = os.urandom(_BYTES * _DRAW).hex()
            _drawn.extend(drawn[at : at + 2 * _BYTES] for at in range(0, len(drawn), 2 * _BYTES))


def message_id() -> str:
    """Return a new message id: ``m_`` and 27 hexadecimal digits."""
    return _make("m_")


def run_id() -> str:
    """Return a new run id: ``r_`` and 27 hexadecimal digits."""
    return _make("r_")


def node_id() -> str:
    """Return a new node id, which identifies one process for its lifetime: ``n_`` and 27 hexadecimal digits."""
    return _make("n_")


def grant_id() -> str:
    """Return a new id of a grant."""
    return _make("g")


def schedule_id() -> str:
    """Return a new schedule id: ``t_`` and 27 hexadecimal digits."""
    return _make("t_")


def stop_id() -> str:
    """Return a new stop id: ``s_`` and 27 hexadecimal digits."""
    return _make("s_")


def secret(prefix: str = "hf_") -> str:
    """Return a new secret: `prefix` and 160 random bits in base 32.

    The caller must show the secret only once, and store only its hash.
    """
    return prefix + _base32(int.from_bytes(os.urandom(20), "big"), 32)
