"""Compaction of the event log: merges small rows of events between commits.

Each append is stored in a small row at once, so that readers see only stored events. A pass covers the oldest range of
rows that no pass has covered, in rowid order. Within this range, it merges consecutive small rows of a run into the
last of them, whether or not the run has ended. A range in which no run has enough rows is not read. So each page is
emptied once, however many streams have rows on it. A merged row lies before the next range, so it is never rewritten.

A pass reads and packs in small steps, each in its own transaction, and writes in the last one. It covers a limited
number of rows: if rows are added faster than they are merged, only the number of waiting rows grows. Sessions whose
events were dropped in the meantime are left out. A pass that fails, or that a kill cuts short, leaves its rows as they
are.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from holdfast.storage.event_packs import merge_packs
from holdfast.storage.rows import SessionRow
from holdfast.storage.sql.database import Database

__all__ = ["EventsDropped", "Merger", "MergerTables"]

_RANGE: Final = 2_048
"""Number of new rows that start a pass. More would compress better, but make the last transaction longer."""
_STEP: Final = 256
"""Maximum number of rows that one step reads, and approximate number that it packs."""
_FEWEST: Final = 4
"""Minimum number of consecutive rows to merge; fewer take little space."""
_SMALL_BYTES: Final = 4_096
"""Maximum size of a row to merge; larger rows are not worth rewriting."""
_MERGED_BYTES: Final = 65_536
"""Maximum total size of the rows that are merged into one."""


class EventsDropped(Exception):
    """Rows were dropped without `Merger.dropped`, so the whole transaction must be rolled back."""


class MergerTables(Protocol):
    """The tables, as merging uses them."""

    def get(self, session: int) -> SessionRow | None:
        """Return the session with that number."""
        ...

    def grow(self, principal: str, amount: int) -> None:
        """Add `amount` to the principal's stored bytes."""
        ...


class _Row(NamedTuple):
    first_seq: int
    last_seq: int
    at: float
    body: bytes


class _Replacement(NamedTuple):
    """A merged row, which replaces rows of the session up to the one that ends at ``last_seq``.

    ``at`` is the newest time of these rows, because pruning drops a merged row only when all its events are old. The
    last row is not always the newest: the clock may have been set back.
    """

    session: int
    first_seq: int
    first_last_seq: int
    last_seq: int
    at: float
    rows: int
    saved_bytes: int
    body: bytes


class _Range:
    """A range of event rows that no pass has covered, which grows until it is full."""

    __slots__ = ("_rows_of", "_runs_to_merge", "rows")

    def __init__(self) -> None:
        self.rows = 0
        self._rows_of: Counter[str | None] = Counter()
        self._runs_to_merge: set[str | None] | None = None

    @property
    def is_full(self) -> bool:
        """Whether further rows begin another range."""
        return self.rows >= _RANGE

    def count(self, run_ids: Sequence[str | None]) -> None:
        """Count rows that were written, each by its run."""
        self.rows += len(run_ids)
        self._rows_of.update(run_ids)
        if self.is_full:
            self._runs_to_merge = self.runs_to_merge()
            self._rows_of.clear()

    def runs_to_merge(self) -> set[str | None]:
        """Return the ids of the runs that have enough rows in the range to merge some of them."""
        if self._runs_to_merge is not None:
            return self._runs_to_merge
        return {run_id for run_id, rows in self._rows_of.items() if run_id is not None and rows >= _FEWEST}


class Merger:
    """Merges the event rows of one database. Use it on the writer thread only.

    Parameters:
        tables: tables of the rows.
        database: database that runs the statements.
        between: callback for failpoints, called between the writes of a transaction.
    """

    def __init__(self, tables: MergerTables, database: Database, between: Callable[[], None]) -> None:
        self._tables = tables
        self._database = database
        self._between = between
        self._ranges: deque[_Range] = deque()
        """Ranges of rows that no pass has covered, oldest first, up to the newest row."""
        self._dropped: set[int] = set()
        """Sessions whose events were dropped since the pass began."""
        self._steps: Iterator[None] | None = None

    @property
    def is_due(self) -> bool:
        """Whether a pass is in progress, or enough rows were written for the next one."""
        return self._steps is not None or bool(self._ranges and self._ranges[0].is_full)

    def count_rows(self, run_ids: Sequence[str | None]) -> None:
        """Count event rows that were written, each by its run."""
        if not self._ranges or self._ranges[-1].is_full:
            self._ranges.append(_Range())
        self._ranges[-1].count(run_ids)

    def dropped(self, session: int) -> None:
        """Leave the session out of the pass in progress, because some of its events are dropped."""
        if self._steps is not None:
            self._dropped.add(session)

    def step(self) -> bool:
        """Do the next step, inside a transaction; return whether rows remain that no pass has covered.

        After any error, the caller must roll the transaction back and call `abandon`.
        """
        if self._steps is None:
            if not self._ranges:
                return False
            self._dropped.clear()
            self._steps = self._pass()
        if next(self._steps, self) is self:
            self._steps = None
        return self._steps is not None or bool(self._ranges)

    def abandon(self) -> None:
        """Abandon the pass in progress, and leave its rows as they are."""
        self._steps = None

    def _pass(self) -> Iterator[None]:
        """Merge the rows of the oldest range; yield after each step except the last."""
        rows = sum([counted.rows for counted in self._ranges])
        counted = self._ranges.popleft()
        runs_to_merge = counted.runs_to_merge()
        if not runs_to_merge:
            return
        ((last,),) = self._database.query("last_event_row")
        first = max(0, last - rows)
        end = min(first + counted.rows, last)
        runs: dict[tuple[int, str], list[_Row]] = {}
        for start in range(first, end, _STEP):
            found = self._database.query("small_events", start, min(start + _STEP, end), _SMALL_BYTES)
            for session, run_id, *row in found:
                if run_id in runs_to_merge:
                    runs.setdefault((session, run_id), []).append(_Row(*row))
            yield
        replacements = []
        packed = 0
        for (session, _), small in runs.items():
            for part in _parts(small):
                if len(part) < _FEWEST:
                    continue
                replacements.append(_merge(session, part))
                packed += len(part)
                if packed >= _STEP:
                    packed = 0
                    yield
        for replacement in replacements:
            if replacement.session not in self._dropped:
                self._replace(replacement)

    def _replace(self, new: _Replacement) -> None:
        row = self._tables.get(new.session)
        if row is not None and row.deleted_at is not None:
            return  # the last row stays when the others are dropped, so it must hold no more than the deletion
        dropped = self._database.write("drop_merged_events", new.session, new.first_last_seq, new.last_seq)
        self._between()
        written = self._database.write("merge_event", new.first_seq, new.at, new.body, new.session, new.last_seq)
        if row is None or dropped != new.rows - 1 or written != 1:
            raise EventsDropped(f"events of session {new.session} were dropped while they were merged")
        self._tables.grow(row.principal, -new.saved_bytes)


def _merge(session: int, part: Sequence[_Row]) -> _Replacement:
    body = merge_packs([row.body for row in part])
    saved = sum([len(row.body) for row in part]) - len(body)
    return _Replacement(
        session=session,
        first_seq=part[0].first_seq,
        first_last_seq=part[0].last_seq,
        last_seq=part[-1].last_seq,
        at=max([row.at for row in part]),
        rows=len(part),
        saved_bytes=saved,
        body=body,
    )


def _parts(rows: Sequence[_Row]) -> Iterator[Sequence[_Row]]:
    """Split the rows of a run into parts of limited size without gaps: events of the session may lie between rows."""
    start = size = 0
    for index, row in enumerate(rows):
        size += len(row.body)
        if index > start and (size > _MERGED_BYTES or row.first_seq != rows[index - 1].last_seq + 1):
            yield rows[start:index]
            start, size = index, len(row.body)
    yield rows[start:]
