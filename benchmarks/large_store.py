"""A store with many sessions, runs and events, made in minutes.

``python -m benchmarks.large_store grown.db --sessions 1000000 --events 10000000`` writes the rows that so many runs
would have left, without running them. With ``--schema FILE`` the tables are those of that file (the schema of version 5
is in the fixtures of the tests), which makes a store to migrate. ``--entries`` adds a session with a long transcript.
Only columns that version 5 has are named; `holdfast.storage.sqlite.migration` fills the others.
"""

from __future__ import annotations

import argparse
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

from holdfast.protocol.events import (
    Event,
    MessageAccepted,
    MessageSettled,
    RunFinished,
    RunStarted,
    TextDelta,
    encode_event,
    encode_json,
)
from holdfast.protocol.messages import Entry, Message, RunView, Usage
from holdfast.storage.event_packs import pack_entries
from holdfast.storage.sql import statements
from holdfast.storage.sqlite import SCHEMA_VERSION
from holdfast.storage.sqlite.database import SqliteDatabase
from holdfast.storage.sqlite.migration import set_landmarks

__all__ = ["EVENTS_A_RUN", "LONG", "SPAN_S", "make_store"]

EVENTS_A_RUN = 5
LONG = "long"
"""Key of the session with the long transcript."""
_APPLICATION_ID = 0x484F4C44
SPAN_S = 5 * 86400.0
"""The runs are spread over so many seconds: less than what is kept, so that nothing is due to be pruned."""
_M, _R = "@message@", "@run@"
_EVENTS = "INSERT INTO event (session, last_seq, first_seq, run_id, at, body) VALUES (?, ?, ?, ?, ?, ?)"
_MESSAGES = (
    "INSERT INTO message (session, message_id, seq, at, idempotency_key, body_hash, batch, due_at, run_id, body)"
    " VALUES (?, ?, ?, ?, ?, x'', ?, 0.0, ?, ?)"
)
_RUNS = (
    "INSERT INTO run (run_id, session, previous_run_id, fence, started_seq, commit_seq, end_seq, last_n, body, entries,"
    " previous_id, whole, rolled_back) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0)"
)
_SESSIONS = (
    "INSERT INTO session (session, principal, key, agent, created_at, updated_at, next_seq, next_n, fence, holder,"
    " append_nth, append_seq, sweep, last_run_id, history_id, waiting, due_at)"
    " VALUES (?, ?, ?, 'demo', ?, ?, ?, ?, ?, 1, 0, 0, 0, ?, ?, 0, 0.0)"
)


def _template(body: bytes) -> bytes:
    """A format of ``bytes`` for a body with the ids `_M` and `_R`."""
    return body.replace(b"%", b"%%").replace(_M.encode(), b"%(m)b").replace(_R.encode(), b"%(r)b")


class _Bodies:
    """The bodies of a run's rows, as the store writes them; only the ids differ."""

    def __init__(self, at: float) -> None:
        def pack(*events: Event) -> bytes:
            return _template(b"\n".join(b"%b %b" % (kind.encode(), body) for kind, body in map(encode_event, events)))

        text = "It is done."
        self.begin = pack(
            MessageAccepted(at=at, message_id=_M, content="Do it.", policy="queue"),
            RunStarted(at=at, run_id=_R, agent="demo", messages=(_M,)),
        )
        self.end = pack(
            TextDelta(at=at, run_id=_R, text=text),
            RunFinished(at=at, run_id=_R, status="completed", text=text),
            MessageSettled(at=at, message_id=_M, state="completed", run_id=_R),
        )
        self.message = _template(
            encode_json(Message(message_id=_M, seq=1, content="Do it.", policy="queue", accepted_at=at))
        )
        view = RunView(
            run_id=_R, agent="demo", state="completed", attempt=1, messages=(_M,), started_at=at, ended_at=at,
            text=text, usage=Usage(),
        )  # fmt: skip
        self.run = _template(encode_json(view))
        self.text = text


def make_store(
    path: Path,
    *,
    sessions: int,
    events: int,
    entries: int = 0,
    principals: int = 1,
    schema: Path | None = None,
    ended_at: float | None = None,
) -> None:
    """Make a store.

    Parameters:
        path: the file, which must not exist.
        sessions: number of sessions, with the same number of runs each.
        events: number of events, at least `EVENTS_A_RUN` a session; rounded down to whole runs.
        entries: length of one more transcript, of the session `LONG` of the first principal; 0 for none.
        principals: the sessions are theirs in turns; their names are ``p0``, ``p1`` and so on.
        schema: file with the tables of version 5; None makes a store of the current version.
        ended_at: when the last run ended; None for now.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists")
    now = time.time() if ended_at is None else ended_at
    rounds = max(1, events // (EVENTS_A_RUN * sessions))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for pragma in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -262144"):
            connection.execute(f"PRAGMA {pragma}")
        connection.executescript(statements.block("schema") if schema is None else schema.read_text("utf-8"))
        connection.execute("BEGIN")
        connection.execute("INSERT INTO node (node_id, opened_at) VALUES ('n_generated', ?)", (now - SPAN_S,))
        bodies = _Bodies(now)
        names = [f"p{number}" for number in range(principals)]
        _write(connection, bodies, range(1, sessions + 1), rounds, names, now)
        if entries:
            _write(connection, bodies, range(sessions + 1, sessions + 2), entries // 2, names[:1], now)
        _count(connection)
        if schema is None:
            _fill(connection)
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION if schema is None else 5}")
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode = WAL")


def _write(
    connection: sqlite3.Connection, bodies: _Bodies, numbers: range, rounds: int, principals: list[str], now: float
) -> None:
    total = len(numbers) * rounds
    step_s = SPAN_S / total

    def ids(session: int, nth: int) -> tuple[str, str, float]:
        at = now - SPAN_S + step_s * (nth * len(numbers) + session - numbers[0] + 1)
        tail = f"{int(at * 1000):011x}{session:08x}{nth:08x}"
        return "m_" + tail, "r_" + tail, at

    def runs() -> Iterator[tuple[int, int, str, str, float, dict[bytes, bytes]]]:
        for nth in range(rounds):
            for session in numbers:
                message, run, at = ids(session, nth)
                yield session, nth, message, run, at, {b"m": message.encode(), b"r": run.encode()}

    def messages() -> Iterable[tuple[object, ...]]:
        for session, nth, message, run, at, both in runs():
            seq = nth * EVENTS_A_RUN + 1
            yield session, message, seq, at, f"k{nth}", seq, run, bodies.message % both

    def events() -> Iterable[tuple[object, ...]]:
        for session in numbers:
            for nth in range(rounds):
                message, run, at = ids(session, nth)
                both = {b"m": message.encode(), b"r": run.encode()}
                seq = nth * EVENTS_A_RUN
                yield session, seq + 2, seq + 1, run, at, bodies.begin % both
                yield session, seq + EVENTS_A_RUN, seq + 3, run, at, bodies.end % both

    def ended() -> Iterable[tuple[object, ...]]:
        for session, nth, _, run, _, both in runs():
            seq, n = nth * EVENTS_A_RUN, nth * 2
            before = ids(session, nth - 1)[1] if nth else None
            said = [
                Entry(n=n + 1, role="user", content="Do it.", run_id=run),
                Entry(n=n + 2, role="assistant", content=bodies.text, run_id=run),
            ]
            numbers = (nth + 1, seq + 2, seq + 3, seq + EVENTS_A_RUN, n + 2)
            yield run, session, before, *numbers, bodies.run % both, pack_entries(said), before

    def rows() -> Iterable[tuple[object, ...]]:
        for session in numbers:
            principal = principals[session % len(principals)]
            key = LONG if len(numbers) == 1 else f"s{session:08}"
            _, last, at = ids(session, rounds - 1)
            counters = (rounds * EVENTS_A_RUN + 1, rounds * 2 + 1, rounds)
            yield session, principal, key, ids(session, 0)[2], at, *counters, last, last

    for statement, made in ((_SESSIONS, rows()), (_MESSAGES, messages()), (_EVENTS, events()), (_RUNS, ended())):
        connection.executemany(statement, made)


def _count(connection: sqlite3.Connection) -> None:
    """Count the bytes of the principals."""
    connection.execute(
        "INSERT INTO stored (principal, bytes) SELECT principal, sum(size) FROM session JOIN ("
        " SELECT session, length(body) AS size FROM message"
        " UNION ALL SELECT session, length(body) FROM event"
        " UNION ALL SELECT session, length(body) + length(entries) FROM run"
        ") AS part ON part.session = session.session GROUP BY principal"
    )


def _fill(connection: sqlite3.Connection) -> None:
    """Fill what version 6 added, with the statements that migrate to it."""
    for statement in statements.block("migrate_5").split(";\n"):
        if statement.startswith(("UPDATE", "INSERT")):
            connection.execute(statement)
    set_landmarks(SqliteDatabase(connection))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--sessions", type=int, default=1_000_000)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--entries", type=int, default=0)
    parser.add_argument("--principals", type=int, default=1)
    parser.add_argument("--schema", type=Path)
    asked = parser.parse_args()
    began = time.perf_counter()
    make_store(
        asked.path,
        sessions=asked.sessions,
        events=asked.events,
        entries=asked.entries,
        principals=asked.principals,
        schema=asked.schema,
    )
    print(f"{asked.path}: {asked.path.stat().st_size:,} bytes in {time.perf_counter() - began:.0f} s")
