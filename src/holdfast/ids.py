"""The only source of identifiers: short, unguessable, sorted by time."""

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
"""Random bytes in stock: asking the system for each id's own would be most of the id's cost."""
os.register_at_fork(after_in_child=_drawn.clear)


def _random() -> str:
    """16 random hexadecimal digits, each handed out once. From any thread: `list.pop` is atomic."""
    while True:
        try:
            return _drawn.pop()
        except IndexError:
            drawn = os.urandom(_BYTES * _DRAW).hex()
            _drawn.extend(drawn[at : at + 2 * _BYTES] for at in range(0, len(drawn), 2 * _BYTES))


def _make(prefix: str) -> str:
    return f"{prefix}{time.time_ns() // 1_000_000:011x}{_random()}"


def message_id() -> str:
    """A new message id, ``m_`` and 27 hexadecimal digits."""
    return _make("m_")


def run_id() -> str:
    """A new run id, ``r_`` and 27 hexadecimal digits."""
    return _make("r_")


def node_id() -> str:
    """A new id for a running process, ``n_`` and 27 hexadecimal digits."""
    return _make("n_")


def schedule_id() -> str:
    """A new id for a schedule, ``t_`` and 27 hexadecimal digits."""
    return _make("t_")


def stop_id() -> str:
    """A new id for a stop, ``s_`` and 27 hexadecimal digits."""
    return _make("s_")


def secret(prefix: str = "hf_") -> str:
    """A new secret of 160 random bits, to be shown once and stored hashed."""
    return prefix + _base32(int.from_bytes(os.urandom(20), "big"), 32)
