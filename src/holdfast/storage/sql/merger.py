"""Merging of the small rows of events, beside the work.

Each append is stored in a small row, so that readers see only what is stored. A pass goes over the rows written since
the last pass, in the order of their rowids. In this range it merges the consecutive small rows of each run into the
last of them, whether or not the run has ended. A range in which no run has enough rows is not read. So a page is
emptied once, whatever the number of streams whose rows lie on it, and a merged row, which lies before the next range,
is not written again.

A pass reads and packs in small steps, each in its own transaction, and writes in the last one. Rows dropped in the
meantime make that transaction fail. A pass that fails, or is cut short by a kill, leaves its rows as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from holdfast.storage.event_packs import merge_events, unpack_events
from holdfast.storage.rows import SessionRow
from holdfast.storage.sql.database import Database

__all__ = ["EventsDropped", "Merged", "Merger"]

_RANGE: Final = 2_048
"""Number of rows after which they are merged. More would compress better, but take longer in one transaction."""
_STEP: Final = 256
"""Number of rows that one step reads or packs."""
_FEWEST: Final = 4
"""Number of consecutive rows below which they stay: they take little space."""
_SMALL_BYTES: Final = 4_096
"""Size above which a row stays as it is: what a run writes in large rows is not worth writing again."""
_MERGED_BYTES: Final = 65_536
"""Size of the small rows that one row is merged from, at most."""


class EventsDropped(Exception):
    """Rows of a pass were dropped since it read them, so the whole transaction must be rolled back."""


class Merged(Protocol):
    """What merging needs of the tables."""

    def get(self, session: int) -> SessionRow | None:
        """Return the session with that number."""
        ...

    def grow(self, principal: str, amount: int) -> None:
        """Add to the stored bytes of the principal."""
        ...


class _Row(NamedTuple):
    first_seq: int
    last_seq: int
    body: bytes


class _Replacement(NamedTuple):
    """A merged row, in place of rows of the session up to the one that ends at ``last_seq``."""

    session: int
    first_seq: int
    first_last_seq: int
    last_seq: int
    rows: int
    saved_bytes: int
    body: bytes


class Merger:
    """The passes over one database. Only the thread that writes uses it.

    Parameters:
        tables: tables of the rows.
        database: database that runs the statements.
        between: callback for failpoints, called between the writes of a transaction.
    """

    def __init__(self, tables: Merged, database: Database, between: Callable[[], None]) -> None:
        self._tables = tables
        self._database = database
        self._between = between
        self._added = 0
        self._rows_of: Counter[str | None] = Counter()
        """Rows of each run among those added since the last pass began; without a run: None."""
        self._steps: Iterator[None] | None = None

    @property
    def is_due(self) -> bool:
        """Whether a pass is under way, or enough rows have been added for the next one."""
        return self._steps is not None or self._added >= _RANGE

    def added(self, run_ids: Sequence[str | None]) -> None:
        """Count rows of events that were written, each by its run."""
        self._added += len(run_ids)
        self._rows_of.update(run_ids)

    def step(self) -> bool:
        """Do the next step of a pass, inside a transaction; return whether the pass goes on.

        Raises `EventsDropped` if rows were dropped since the pass read them. After any error, the caller must roll the
        transaction back and call `abandon`.
        """
        if self._steps is None:
            self._steps = self._pass(self._added, {run for run, rows in self._rows_of.items() if rows >= _FEWEST})
            self._added = 0
            self._rows_of.clear()
        if next(self._steps, self) is self:
            self._steps = None
        return self._steps is not None

    def abandon(self) -> None:
        """End the pass that is under way, and leave its rows as they are."""
        self._steps = None

    def _pass(self, rows: int, long: set[str | None]) -> Iterator[None]:
        """Merge the rows of the `long` runs among the last `rows` rows; yield after each step but the last."""
        if not long:
            return
        ((last,),) = self._database.query("last_event_row")
        runs: dict[tuple[int, str], list[_Row]] = {}
        for start in range(max(0, last - rows), last, _STEP):
            found = self._database.query("small_events", start, min(start + _STEP, last), _SMALL_BYTES)
            for session, run_id, *row in found:
                if run_id in long:
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
            self._replace(replacement)

    def _replace(self, new: _Replacement) -> None:
        row = self._tables.get(new.session)
        dropped = self._database.write("drop_merged_events", new.session, new.first_last_seq, new.last_seq)
        self._between()
        written = self._database.write("merge_event", new.first_seq, new.body, new.session, new.last_seq)
        if row is None or dropped != new.rows - 1 or written != 1:
            raise EventsDropped(f"events of session {new.session} were dropped while they were merged")
        self._tables.grow(row.principal, -new.saved_bytes)


def _merge(session: int, part: Sequence[_Row]) -> _Replacement:
    body = merge_events([event for row in part for event in unpack_events(row.last_seq, row.body)])
    saved = sum([len(row.body) for row in part]) - len(body)
    return _Replacement(session, part[0].first_seq, part[0].last_seq, part[-1].last_seq, len(part), saved, body)


def _parts(rows: Sequence[_Row]) -> Iterator[Sequence[_Row]]:
    """Yield the rows of a run in parts without gaps, of limited size: events of the session may lie between them."""
    start = size = 0
    for index, row in enumerate(rows):
        size += len(row.body)
        if index > start and (size > _MERGED_BYTES or row.first_seq != rows[index - 1].last_seq + 1):
            yield rows[start:index]
            start, size = index, len(row.body)
    yield rows[start:]
