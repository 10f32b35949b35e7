"""Transcripts in SQL: a chain of pieces, read backwards from the newest, with a sparse index of landmarks.

Each run or edit that wrote entries is a piece, which refers to the previous piece. Without an index, a page in the
middle of a long transcript would have to walk the chain back from its newest piece. So about one piece in `SPACING`
entries is a landmark, which is found by the number of its last entry. A full index would make every run write one more
page to the write-ahead log; a landmark is one row in many runs.

Every landmark of a session is part of its current transcript: undo drops the landmarks of the pieces that it removes,
and makes the piece that it restores a landmark. A piece that replaces the transcript drops all landmarks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Final

from holdfast.protocol.messages import Entry
from holdfast.storage.event_packs import entries_after, unpack_entries
from holdfast.storage.rows import HistoryRow
from holdfast.storage.sql.database import Database
from holdfast.storage.values import ALL_BYTES, ALL_ENTRIES

__all__ = ["ALL_LANDMARKS", "SPACING", "is_landmark", "read_all_entries", "read_entries", "rebuild_landmarks"]

SPACING: Final = 64
"""Approximate number of entries between landmarks. Two neighbours are less than twice this far apart, unless one
piece is longer."""
ALL_LANDMARKS: Final = -1
"""Position before all landmarks: an edit can leave a piece whose last entry has the number 0."""
_TOGETHER: Final = 512
"""Maximum number of entries per query, because the limit of bytes may end the page earlier."""
_SHORT: Final = 8192
"""Maximum size in bytes of a piece that is read in the same query as others."""


def is_landmark(history: HistoryRow) -> bool:
    """Return whether a run's new piece becomes a landmark: one of its entry numbers is a multiple of `SPACING`."""
    return bool(history.entries) and history.last_n // SPACING != (history.entries[0].n - 1) // SPACING


def rebuild_landmarks(database: Database, session: int, newest: str | None) -> None:
    """Replace the session's landmarks with those of the transcript that ends with the piece `newest`."""
    database.write("drop_landmarks", session, ALL_LANDMARKS)
    rows: list[tuple[object, ...]] = []
    later: tuple[str, int] | None = None
    for piece, last_n in database.query("chain", newest, session, session):
        if later is None:
            rows.append((session, last_n, piece))
        elif later[1] // SPACING != last_n // SPACING and later[1] != rows[0][1]:
            rows.append((session, later[1], later[0]))
        later = piece, last_n
    if rows:
        database.write_rows("add_landmarks", rows)


def read_entries(
    database: Database,
    session: int,
    newest: str | None,
    *,
    after: int = 0,
    limit: int = ALL_ENTRIES,
    limit_bytes: int = ALL_BYTES,
) -> list[Entry]:
    """Return entries with n > `after` of the transcript that ends with the piece `newest`, in order.

    The cost of a page depends on its entries, not on its position. Large pieces are loaded one at a time. Each
    statement may see a later state than the one before, so landmarks are used only while the session has this
    transcript.

    Parameters:
        newest: the newest piece.
        limit: maximum number of entries.
        limit_bytes: size of their JSON in bytes; the entry that reaches it is the last.
    """
    out: list[Entry] = []
    size = 0
    while newest is not None and limit > 0:
        upto, first = 0, newest
        if limit < ALL_ENTRIES or limit_bytes < ALL_BYTES:
            least = after + min(limit - len(out), _TOGETHER)
            for found in database.query("landmark", session, least, session, newest):
                upto, first = found
        for entry, length in _entries(database, session, first, after):
            out.append(entry)
            size += length
            if len(out) >= limit or size >= limit_bytes:
                return out
        if not upto or first == newest:
            break
        after = upto
    return out


def _entries(database: Database, session: int, newest: str, after: int) -> Iterator[tuple[Entry, int]]:
    """Yield the entries with n > `after` up to the piece `newest`, each with the length of its JSON."""
    runs = database.query("pieces", _SHORT, newest, session, _SHORT, session, after)
    first = runs[-1][1] if runs else newest  # an edit, or a run before `after`
    for *_, last_n, body in database.query("edit_piece", session, first) if first is not None else ():
        if last_n > after:
            yield from entries_after(body or b"", after)
    for piece, _, size, body in reversed(runs):
        if body is not None:
            for line, entry in zip(body.split(b"\n"), unpack_entries(body), strict=True):
                if entry.n > after:
                    yield entry, len(line)
        elif size:
            for *_, large in database.query("run_piece", session, piece):
                yield from entries_after(large, after)


def read_all_entries(database: Database, session: int, newest: str | None, *, limit_bytes: int) -> list[Entry] | None:
    """Return all entries of the transcript that ends with the piece `newest`; None if they exceed `limit_bytes`."""
    if newest is None:
        return []
    pieces: list[tuple[int, bytes]] = []
    size = 0
    with closing(database.rows("pieces_within", newest, session, limit_bytes, session, session)) as rows:
        for last_n, body in rows:
            size += limit_bytes + 1 if body is None else len(body)
            if size > limit_bytes:
                return None
            pieces.append((last_n, body))
    pieces.sort()
    return [entry for _, body in pieces for entry in unpack_entries(body)]
