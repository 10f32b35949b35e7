"""Admission of runs: limits per principal and in total, and a fair queue of sessions that wait for a slot."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

__all__ = ["Admission", "AdmissionStatistics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionStatistics:
    """A snapshot: runs that hold a place, sessions in line, principals in line, and how often a place was refused."""

    running: int
    in_line: int
    principals_in_line: int
    refused: int


class Admission:
    """Places for runs. Used on the host's loop only; nothing here waits.

    Parameters:
        max_runs: places in all.
        principal_runs: places that one principal may hold.
    """

    def __init__(self, *, max_runs: int, principal_runs: int) -> None:
        self._max_runs = max_runs
        self._principal_runs = principal_runs
        self._running = 0
        self._held: dict[str, int] = {}
        self._line: dict[str, deque[int]] = {}
        self._in_line: set[int] = set()
        self._refused = 0

    def reserve(self, principal: str) -> bool:
        """Take a place, if there is one. Whoever got True gives it back by `release`."""
        held = self._held.get(principal, 0)
        if self._running >= self._max_runs or held >= self._principal_runs:
            self._refused += 1
            return False
        self.occupy(principal)
        return True

    def occupy(self, principal: str) -> None:
        """Take a place for a run that is on already, whatever the caps say."""
        self._running += 1
        self._held[principal] = self._held.get(principal, 0) + 1

    def release(self, principal: str) -> None:
        """Give a place back."""
        self._running -= 1
        held = self._held[principal] - 1
        if held:
            self._held[principal] = held
        else:
            del self._held[principal]

    @property
    def waiting(self) -> int:
        """Sessions in line."""
        return len(self._in_line)

    def line_up(self, principal: str, session: int) -> None:
        """Put a session in line for a place; once is enough."""
        if session not in self._in_line:
            self._in_line.add(session)
            self._line.setdefault(principal, deque()).append(session)

    def admit(self) -> tuple[str, int] | None:
        """The next session that may start, its place reserved: principals in turn, each in its own order."""
        for principal in list(self._line):
            if self._running >= self._max_runs:
                return None
            if self._held.get(principal, 0) >= self._principal_runs:
                continue
            waiting = self._line.pop(principal)
            session = waiting.popleft()
            self._in_line.discard(session)
            if waiting:
                self._line[principal] = waiting  # goes to the end: the others are first now
            self.reserve(principal)
            return principal, session
        return None

    def statistics(self) -> AdmissionStatistics:
        """A snapshot."""
        return AdmissionStatistics(
            running=self._running,
            in_line=len(self._in_line),
            principals_in_line=len(self._line),
            refused=self._refused,
        )
