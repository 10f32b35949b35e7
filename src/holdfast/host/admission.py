"""Admission of runs: limits per principal and in total, and a fair queue of sessions that wait for a slot."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

__all__ = ["Admission", "AdmissionStatistics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionStatistics:
    """Numbers of active runs, waiting sessions, principals with waiting sessions, and refused reservations."""

    running: int
    awaiting_slot: int
    principals_awaiting_slot: int
    refused: int


class Admission:
    """The run slots of a host, with a fair queue of sessions. Use it on the host's loop only; no method waits.

    Parameters:
        max_runs: total number of slots.
        principal_runs: maximum number of slots that one principal may hold; may be changed at any time.
    """

    def __init__(self, *, max_runs: int, principal_runs: int) -> None:
        self._max_runs = max_runs
        self.principal_runs = principal_runs
        self._running = 0
        self._held: dict[str, int] = {}
        self._line: dict[str, deque[int]] = {}
        self._awaiting_slot: set[int] = set()
        self._refused = 0

    def reserve(self, principal: str) -> bool:
        """Take a slot if one is free, and return whether it was taken. The caller must `release` a taken slot."""
        held = self._held.get(principal, 0)
        if self._running >= self._max_runs or held >= self.principal_runs:
            self._refused += 1
            return False
        self.occupy(principal)
        return True

    def occupy(self, principal: str) -> None:
        """Take a slot for a run that is already active, beyond the limits if necessary."""
        self._running += 1
        self._held[principal] = self._held.get(principal, 0) + 1

    def release(self, principal: str) -> None:
        """Release one of the principal's slots."""
        self._running -= 1
        held = self._held[principal] - 1
        if held:
            self._held[principal] = held
        else:
            del self._held[principal]

    @property
    def waiting(self) -> int:
        """Number of sessions that wait for a slot."""
        return len(self._awaiting_slot)

    def enqueue(self, principal: str, session: int) -> None:
        """Queue a session for a slot. A session that is already queued keeps its place."""
        if session not in self._awaiting_slot:
            self._awaiting_slot.add(session)
            self._line.setdefault(principal, deque()).append(session)

    def admit(self) -> tuple[str, int] | None:
        """Reserve a slot for the next queued session; return its principal and row id, or None if no session may start.

        Principals take turns. Each principal's sessions are admitted in the order in which they were queued.
        """
        for principal in list(self._line):
            if self._running >= self._max_runs:
                return None
            if self._held.get(principal, 0) >= self.principal_runs:
                continue
            waiting = self._line.pop(principal)
            session = waiting.popleft()
            self._awaiting_slot.discard(session)
            if waiting:
                self._line[principal] = waiting  # moves to the end, so that other principals are next
            self.reserve(principal)
            return principal, session
        return None

    def statistics(self) -> AdmissionStatistics:
        """Return a snapshot of the slots and the queue."""
        return AdmissionStatistics(
            running=self._running,
            awaiting_slot=len(self._awaiting_slot),
            principals_awaiting_slot=len(self._line),
            refused=self._refused,
        )
