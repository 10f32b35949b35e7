"""The only source of identifiers: short, unguessable, sorted by time."""

from __future__ import annotations

import os
import time

__all__ = ["message_id", "node_id", "run_id", "secret", "stop_id"]

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def _base32(value: int, digits: int) -> str:
    out = []
    for _ in range(digits):
        out.append(_ALPHABET[value & 31])
        value >>= 5
    return "".join(reversed(out))


def _make(prefix: str) -> str:
    milliseconds = time.time_ns() // 1_000_000
    return prefix + f"{milliseconds:011x}" + os.urandom(8).hex()


def message_id() -> str:
    """A new message id, ``m_`` and 27 hexadecimal digits."""
    return _make("m_")


def run_id() -> str:
    """A new run id, ``r_`` and 27 hexadecimal digits."""
    return _make("r_")


def node_id() -> str:
    """A new id for a running process, ``n_`` and 27 hexadecimal digits."""
    return _make("n_")


def stop_id() -> str:
    """A new id for a stop, ``s_`` and 27 hexadecimal digits."""
    return _make("s_")


def secret(prefix: str = "hf_") -> str:
    """A new secret of 160 random bits, to be shown once and stored hashed."""
    return prefix + _base32(int.from_bytes(os.urandom(20), "big"), 32)
