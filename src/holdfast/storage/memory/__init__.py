"""The in-memory store, for tests and demos, and as the reference model for other stores."""

from __future__ import annotations

from holdfast.storage.memory.backend import MemoryBackend
from holdfast.storage.store import Store

__all__ = ["MemoryBackend", "MemoryStore"]


class MemoryStore(Store):
    """A `Store` in memory.

    Parameters:
        yielding: whether writes run in a separate task, as described in `MemoryBackend`.
    """

    backend: MemoryBackend

    def __init__(self, *, yielding: bool = False) -> None:
        super().__init__(MemoryBackend(yielding=yielding))
