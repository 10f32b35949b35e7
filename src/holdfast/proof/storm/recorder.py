"""Recorder of a storm's history: keeps records in memory, in the order of arrival."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from holdfast.clock import system_clock
from holdfast.proof.history import Record

__all__ = ["StormRecorder"]

R = TypeVar("R", bound=Record)


class StormRecorder:
    """The records of a storm. Use this class on one event loop only."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._tokens = 0

    def note(self, kind: Callable[..., R], **fields: Any) -> R:
        """Create a record of this kind with the current time, add it to the records, and return it."""
        record = kind(at=system_clock.monotonic(), **fields)
        self.records.append(record)
        return record

    def token(self) -> str:
        """Return a unique name for a call."""
        self._tokens += 1
        return f"t{self._tokens}"
