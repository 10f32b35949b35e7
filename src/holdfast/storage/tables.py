# ruff: noqa: D102 - `Tables` documents its methods
"""The tables of `holdfast.storage.records` in SQL, and the reads.

Rows of sessions are kept from one transaction to the next, because only this object writes them; what is written is
collected and goes out with `flush`, many rows to a statement. A session is written only if its fence and its counter
are still those that were read (`SessionChanged` otherwise), so that a kept row can never overwrite what it has not
seen. After any error the transaction is rolled back and `forget` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from holdfast.errors import StorageError
from holdfast.protocol.events import Stored, encode_json
from holdfast.protocol.messages import (
    Attachment,
    Entry,
    Message,
    Question,
    RunState,
    RunView,
    SessionView,
    Settlement,
)
from holdfast.protocol.stopping import Cause
from holdfast.storage.port import DueQuestion, KeyRecord, Ready
from holdfast.storage.records import (
    Counters,
    EndedRun,
    HistoryRow,
    KnownMessage,
    Mail,
    SessionRow,
    due_at,
    due_of,
    journal,
    live_run,
    pack_entries,
    pack_events,
    question_due,
    ready_since,
    session_view,
    settlement_of,
    unpack_entries,
    unpack_events,
)

__all__ = ["Database", "SessionChanged", "SqlReads", "SqlTables"]

_KEPT_SESSIONS = 2048
_PRUNED_TOGETHER = 1000
_ALL = 2**62
_PURGES = ("purge_withdrawn_messages", "purge_events", "purge_edits", "purge_attachment_uses", "purge_session")


class SessionChanged(Exception):
    """A session's row is not what was read: nothing of the transaction may stay."""


class Database(Protocol):
    """A connection inside a transaction (or, for `SqlReads`, outside of one)."""

    def query(self, name: str, *parameters: object) -> list[tuple[Any, ...]]:
        """The rows of a named statement."""
        ...

    def write(self, name: str, *parameters: object) -> int:
        """Execute a named statement; the number of rows it wrote."""
        ...

    def write_rows(self, name: str, rows: Sequence[tuple[object, ...]]) -> int:
        """Execute a named statement for many rows; the number of rows it wrote."""
        ...


class _LiveRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the session's row holds of the run that is on."""

    agent: str
    attempt: int
    started_at: float
    started_seq: int
    messages: tuple[str, ...]
    state: RunState = "running"
    cause: Cause | None = None
    steered: int = 0
    rolled_back: bool = False
    resumed_as: str | None = None
    questions: tuple[Question, ...] = ()
    answered: tuple[tuple[str, int], ...] = ()


_decode_live = msgspec.json.Decoder(_LiveRun).decode
_decode_run = msgspec.json.Decoder(RunView).decode
_decode_message = msgspec.json.Decoder(Message).decode
_decode_attachment = msgspec.json.Decoder(Attachment).decode


def _mail(columns: tuple[Any, ...]) -> Mail:
    body, batch, due, target = columns
    return Mail(_decode_message(body), batch, due, target)


def _known(rows: list[tuple[Any, ...]]) -> KnownMessage | None:
    if not rows:
        return None
    message_id, seq, body_hash, run_id, withdrawn_at = rows[0]
    return KnownMessage(message_id, seq, bytes(body_hash), run_id, withdrawn_at is not None)


def _ended(rows: list[tuple[Any, ...]]) -> EndedRun | None:
    if not rows:
        return None
    body, fence, started_seq, commit_seq, end_seq, next_run_id, previous_run_id, last_n, rolled_back = rows[0]
    return EndedRun(
        _decode_run(body),
        fence,
        started_seq,
        commit_seq,
        end_seq,
        next_run_id,
        previous_run_id,
        last_n,
        bool(rolled_back),
    )


def _piece(history_id: str, columns: tuple[Any, ...]) -> HistoryRow:
    previous_id, whole, last_n, entries = columns
    return HistoryRow(history_id, previous_id, bool(whole), last_n, tuple(unpack_entries(entries) if entries else ()))


def _read_entries(database: Database, session: int, newest: str | None, *, after: int, limit: int) -> list[Entry]:
    """Entries with n > after of the transcript that ends with the piece `newest`."""
    out: list[Entry] = []
    if newest is None:
        return out
    for (body,) in database.query("entries_after", newest, session, after, session, session, after, limit):
        out.extend(entry for entry in unpack_entries(body) if entry.n > after)
        if len(out) >= limit:
            break
    return out[:limit]


def _row(columns: tuple[Any, ...]) -> tuple[SessionRow, int, tuple[str, ...]]:
    """A session without its messages; how many wait; the ids of those of the run that is on."""
    row = SessionRow(*columns[:11])
    _, row.append_nth, row.append_seq, row.sweep, row.last_run_id, row.deleted_at, row.history_id, waiting = columns[
        11:
    ]
    if row.run_id is None:
        return row, waiting, ()
    live = _decode_live(columns[11])
    row.run_agent = live.agent
    row.attempt = live.attempt
    row.started_at = live.started_at
    row.started_seq = live.started_seq
    row.run_state = live.state
    row.cause = live.cause
    row.steered = live.steered
    row.rolled_back = live.rolled_back
    row.resumed_as = live.resumed_as
    row.questions = live.questions
    row.answered = live.answered
    return row, waiting, live.messages


def _load(database: Database, columns: tuple[Any, ...]) -> SessionRow:
    row, waiting, taken = _row(columns)
    if waiting:
        row.waiting = tuple(_mail(columns) for columns in database.query("waiting_messages", row.session))
    row.taken = tuple(
        _mail(columns) for message_id in taken for columns in database.query("taken_message", row.session, message_id)
    )
    return row


def _state_columns(row: SessionRow) -> tuple[object, ...]:
    live = None
    if row.run_id is not None:
        live = encode_json(
            _LiveRun(
                row.run_agent,
                row.attempt,
                row.started_at,
                row.started_seq,
                tuple([mail.message.message_id for mail in row.taken]),
                row.run_state,
                row.cause,
                row.steered,
                row.rolled_back,
                row.resumed_as,
                row.questions,
                row.answered,
            )
        )
    waiting = row.waiting
    return (
        row.agent,
        row.updated_at,
        row.next_seq,
        row.next_n,
        row.fence,
        row.holder,
        row.run_id,
        live,
        row.append_nth,
        row.append_seq,
        row.sweep,
        row.last_run_id,
        row.history_id,
        len(waiting),
        ready_since(row),
        0.0 if row.run_id is not None else due_at(row),
        question_due(row),
        row.deleted_at,
    )


class SqlTables:
    """See the module, and `holdfast.storage.records.Tables`.

    Parameters:
        database: where the statements go.
        epoch: of the node that writes.
        last_number: the highest session number that was ever used.
        between: called in `flush` after the first statement that wrote, for failpoints.
    """

    def __init__(
        self, database: Database, *, epoch: int, last_number: int, between: Callable[[], None] = lambda: None
    ) -> None:
        self.epoch = epoch
        self.counters = Counters()
        self._database = database
        self._between = between
        self._last_number = last_number
        self._rows: dict[int, SessionRow] = {}
        self._names: dict[tuple[str, str], SessionRow] = {}
        self._seen: dict[int, tuple[int, int]] = {}
        self._live: dict[str, int] = {}
        self._new: dict[int, SessionRow] = {}
        self._changed: dict[int, SessionRow] = {}
        self._messages: dict[tuple[int, str], list[object]] = {}
        self._taken: list[tuple[object, ...]] = []
        self._withdrawn: list[tuple[object, ...]] = []
        self._events: list[tuple[object, ...]] = []
        self._runs: list[tuple[object, ...]] = []
        self._edits: list[tuple[object, ...]] = []
        self._uses: list[tuple[object, ...]] = []

    def forget(self) -> None:
        """Drop what was kept and collected; numbers that were given out stay used."""
        for kept in (self._rows, self._names, self._seen, self._live, self._new, self._changed, self._messages):
            kept.clear()
        for collected in (self._taken, self._withdrawn, self._events, self._runs, self._edits, self._uses):
            collected.clear()

    def trim(self) -> None:
        """Keep no more than a bounded number of sessions; call it after a commit."""
        if len(self._rows) > _KEPT_SESSIONS:
            for session in list(self._rows)[: _KEPT_SESSIONS // 2]:
                row = self._rows.pop(session)
                del self._names[row.principal, row.key]
                del self._seen[session]
        if len(self._live) > _KEPT_SESSIONS:
            self._live.clear()

    def flush(self) -> None:
        """Write what was collected. Raises `SessionChanged`."""
        write = self._database.write_rows
        if self._new:
            rows = [
                (row.session, row.principal, row.key, row.created_at, *_state_columns(row))
                for row in self._new.values()
            ]
            write("add_sessions", rows)
        changed = self._changed
        if changed:
            seen = self._seen
            rows = [(session, *seen[session], *_state_columns(row)) for session, row in changed.items()]
            if write("save_sessions", rows) != len(rows):
                raise SessionChanged
        if self._new or changed:
            self._between()
            for session, row in (*self._new.items(), *changed.items()):
                self._seen[session] = (row.fence, row.next_seq)
            self._new.clear()
            changed.clear()
        if self._messages:
            write("add_messages", [tuple(message) for message in self._messages.values()])
            self._messages.clear()
        for name, collected in (("take_message", self._taken), ("withdraw_message", self._withdrawn)):
            for parameters in collected:
                if self._database.write(name, *parameters) != 1:
                    raise SessionChanged
            collected.clear()
        for name, collected in (
            ("add_events", self._events),
            ("add_runs", self._runs),
            ("add_edits", self._edits),
            ("use_attachments", self._uses),
        ):
            if collected:
                write(name, collected)
                collected.clear()

    def _keep(self, row: SessionRow) -> SessionRow:
        self._rows[row.session] = row
        self._names[row.principal, row.key] = row
        self._seen[row.session] = (row.fence, row.next_seq)
        return row

    def _flush_for(self, row: SessionRow) -> None:
        if row.session in self._changed or row.session in self._new:
            self.flush()

    def find(self, principal: str, key: str) -> SessionRow | None:
        kept = self._names.get((principal, key))
        if kept is not None:
            return kept
        rows = self._database.query("session_by_key", principal, key)
        return self._keep(_load(self._database, rows[0])) if rows else None

    def get(self, session: int) -> SessionRow | None:
        kept = self._rows.get(session)
        if kept is not None:
            return kept
        rows = self._database.query("session_by_number", session)
        return self._keep(_load(self._database, rows[0])) if rows else None

    def live_sessions(self, principal: str) -> int:
        count = self._live.get(principal)
        if count is None:
            self.flush()
            count = self._live[principal] = int(self._database.query("live_sessions", principal)[0][0])
        return count

    def new_session_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def by_idempotency_key(self, row: SessionRow, key: str) -> KnownMessage | None:
        self._flush_for(row)
        return _known(self._database.query("message_by_idempotency_key", row.session, key))

    def known_message(self, row: SessionRow, message_id: str) -> KnownMessage | None:
        self._flush_for(row)
        return _known(self._database.query("message_by_id", row.session, message_id))

    def ended_run(self, row: SessionRow, run_id: str) -> EndedRun | None:
        self._flush_for(row)
        return _ended(self._database.query("ended_run", row.session, run_id))

    def events_between(self, row: SessionRow, first: int, last: int) -> tuple[Stored, ...]:
        self._flush_for(row)
        found = SqlReads(self._database).events(row.session, after=first - 1, limit=last - first + 1)
        return tuple(event for event in found if event.seq <= last)

    def orphans(self) -> Sequence[SessionRow]:
        self.flush()
        rows = [self.get(session) for (session,) in self._database.query("orphans", self.epoch)]
        return sorted((row for row in rows if row is not None), key=lambda row: (row.started_at, row.session))

    def add_session(self, row: SessionRow) -> None:
        self._new[row.session] = self._keep(row)
        if row.principal in self._live:
            self._live[row.principal] += 1

    def save(self, row: SessionRow) -> None:
        if row.session not in self._new:
            self._changed[row.session] = row
        if row.deleted_at is not None:
            self._live.pop(row.principal, None)

    def refuse_used_message_id(self, row: SessionRow, message_id: str) -> None:
        """The primary key refuses it in `flush`."""

    def add_message(self, row: SessionRow, mail: Mail, *, idempotency_key: str | None, body_hash: bytes) -> None:
        message = mail.message
        key = (row.session, message.message_id)
        if key in self._messages:
            self.flush()
        self._messages[key] = [
            row.session,
            message.message_id,
            message.seq,
            message.accepted_at,
            idempotency_key,
            body_hash,
            mail.batch,
            mail.due_at,
            mail.target_run_id,
            None,
            None,
            encode_json(message),
        ]

    def take(self, row: SessionRow, mails: Sequence[Mail], run_id: str) -> None:
        for mail in mails:
            collected = self._messages.get((row.session, mail.message.message_id))
            if collected is not None:
                collected[9] = run_id
            else:
                self._taken.append((run_id, row.session, mail.message.message_id))

    def withdraw(self, row: SessionRow, mails: Sequence[Mail], at: float) -> None:
        for mail in mails:
            collected = self._messages.get((row.session, mail.message.message_id))
            if collected is not None:
                collected[10] = at
            else:
                self._withdrawn.append((at, row.session, mail.message.message_id))

    def add_events(self, row: SessionRow, run_id: str | None, at: float, events: Sequence[Stored]) -> None:
        self._events.append((row.session, events[-1].seq, events[0].seq, run_id, at, pack_events(events)))

    def add_run(self, row: SessionRow, run: EndedRun, history: HistoryRow | None) -> None:
        view = run.view
        self._runs.append(
            (
                view.run_id,
                row.session,
                run.previous_run_id,
                run.next_run_id,
                run.fence,
                run.started_seq,
                run.commit_seq,
                run.end_seq,
                run.last_n,
                encode_json(view),
                pack_entries(history.entries) if history is not None and history.entries else None,
                None if history is None else history.previous_id,
                0 if history is None else int(history.whole),
                int(run.rolled_back),
            )
        )

    def add_edit(self, row: SessionRow, history: HistoryRow) -> None:
        entries = pack_entries(history.entries) if history.entries else None
        self._edits.append((row.session, history.history_id, history.previous_id, history.last_n, entries))

    def history(self, row: SessionRow) -> HistoryRow | None:
        if row.history_id is None:
            return None
        self._flush_for(row)
        for name in ("run_piece", "edit_piece"):
            for columns in self._database.query(name, row.session, row.history_id):
                return _piece(row.history_id, columns)
        raise StorageError(f"the transcript of session {row.session} lacks its piece {row.history_id!r}")

    def transcript(self, row: SessionRow, history_id: str | None) -> tuple[Entry, ...]:
        self._flush_for(row)
        return tuple(_read_entries(self._database, row.session, history_id, after=0, limit=_ALL))

    def attachment(self, principal: str, digest: str) -> Attachment | None:
        rows = self._database.query("attachment", principal, digest)
        return _decode_attachment(rows[0][0]) if rows else None

    def attached_bytes(self, principal: str) -> int:
        return int(self._database.query("attached_bytes", principal)[0][0])

    def add_attachment(self, principal: str, attachment: Attachment, body: bytes, at: float) -> None:
        about = encode_json(attachment)
        self._database.write("add_attachment", principal, attachment.digest, at, attachment.size_bytes, about, body)
        self._between()

    def touch_attachment(self, principal: str, digest: str, at: float) -> None:
        self._database.write("touch_attachment", at, principal, digest, at)
        self._between()

    def use_attachments(self, row: SessionRow, digests: Iterable[str]) -> None:
        self._uses.extend((row.principal, digest, row.session) for digest in dict.fromkeys(digests))

    def prune(
        self,
        *,
        events_before: float,
        tombstones_before: float,
        idempotency_before: float,
        attachments_before: float,
        after: int,
    ) -> tuple[int, int | None]:
        """See `Store.prune`, for some sessions numbered above ``after``: what was dropped, and where to go on."""
        upto = after + _PRUNED_TOGETHER
        self.flush()
        self._between()
        database = self._database
        dropped = 0
        for (session,) in database.query("tombstones", after, upto, tombstones_before):
            for (body,) in database.query("ended_runs", session, session, _ALL, session):
                run = _decode_run(body)
                database.write("purge_run", run.run_id, session)
                for message_id in run.messages:
                    database.write("purge_message", message_id, session)
            for name in _PURGES:
                database.write(name, session)
            dropped += 1
            row = self._rows.pop(session, None)
            if row is not None:
                del self._names[row.principal, row.key]
                del self._seen[session]
        for (session,) in database.query("sessions_to_prune", after, upto, events_before):
            row = self.get(session)
            if row is None:
                continue
            keep = row.next_seq if row.run_id is None else row.started_seq
            first_kept = database.query("events_to_keep", session, events_before, keep)[0][0]
            dropped += database.write("prune_events", session, row.next_seq if first_kept is None else first_kept)
        dropped += database.write("forget_idempotency_keys", idempotency_before, after, upto)
        if upto < self._last_number:
            return dropped, upto
        return dropped + database.write("drop_attachments", attachments_before), None

    def add_key(self, record: KeyRecord) -> None:
        """See `Store.add_key`."""
        if any(key_id == record.key_id for key_id, *_ in self._database.query("keys")):
            raise StorageError(f"there is a key {record.key_id!r} already")
        self._database.write(
            "add_key",
            record.key_id,
            record.principal,
            record.role,
            record.digest,
            record.created_at,
            record.label,
            record.revoked_at,
        )
        self._between()

    def revoke_key(self, key_id: str, at: float) -> bool:
        """See `Store.revoke_key`."""
        revoked = self._database.write("revoke_key", at, key_id) == 1
        self._between()
        return revoked


class SqlReads:
    """The reads of the port, on one connection."""

    def __init__(self, database: Database) -> None:
        self._query = database.query
        self._database = database

    def events(self, session: int, *, after: int, limit: int) -> list[Stored]:
        """Events with seq > after, whole packs until there are `limit`."""
        out: list[Stored] = []
        last = after
        while len(out) < limit:
            rows = self._query("events_after", session, last, min(limit - len(out), 128))
            if not rows:
                break
            for last_seq, body in rows:
                pack = unpack_events(last_seq, body)
                out.extend(pack if pack[0].seq > after else [event for event in pack if event.seq > after])
                last = last_seq
                if len(out) >= limit:
                    break
        return out

    def oldest_seq(self, session: int) -> int:
        rows = self._query("oldest_event", session) or self._query("next_seq", session)
        return int(rows[0][0]) if rows else 1

    def run_events(self, session: int, run_id: str) -> tuple[Stored, ...]:
        view = self._ended_or_live(session, run_id)
        if view is None:
            return ()
        packs: Iterable[list[Stored]] = (
            unpack_events(last_seq, body) for last_seq, body in self._query("run_events", session, view[1], run_id)
        )
        return tuple(journal(packs))

    def transcript(self, session: int, *, after: int, limit: int) -> tuple[Entry, ...]:
        for (newest,) in self._query("history_id", session):
            return tuple(_read_entries(self._database, session, newest, after=after, limit=limit))
        return ()

    def questions(self, session: int) -> tuple[Question, ...]:
        return tuple(
            question for columns in self._query("session_by_number", session) for question in _row(columns)[0].questions
        )

    def due_questions(self, *, before: float, limit: int) -> tuple[DueQuestion, ...]:
        rows = [_row(columns)[0] for columns in self._query("asking", before, limit)]
        return due_of(rows, before=before, limit=limit)

    def attachment(self, principal: str, digest: str) -> tuple[Attachment, bytes] | None:
        for about, body in self._query("attachment_with_bytes", principal, digest):
            return _decode_attachment(about), bytes(body)
        return None

    def find_session(self, principal: str, key: str) -> tuple[int, SessionView] | None:
        for columns in self._query("session_by_key", principal, key):
            row, waiting, _ = _row(columns)
            return row.session, session_view(row, waiting=waiting)
        return None

    def sessions(self, *, principal: str | None, limit: int, before: float | None) -> tuple[SessionView, ...]:
        name = "sessions" if principal is None else "sessions_of_principal"
        parameters: list[object] = [] if principal is None else [principal]
        if before is not None:
            name += "_before"
            parameters.append(before)
        views = []
        for columns in self._query(name, *parameters, limit):
            row, waiting, _ = _row(columns)
            views.append(session_view(row, waiting=waiting))
        return tuple(views)

    def mailbox(self, session: int) -> tuple[Mail, ...]:
        return tuple(_mail(columns) for columns in self._query("waiting_messages", session))

    def settlement(self, session: int, message_id: str) -> Settlement | None:
        known = _known(self._query("message_by_id", session, message_id))
        if known is None:
            return None
        ended = None if known.run_id is None else _ended(self._query("ended_run", session, known.run_id))
        return settlement_of(known, ended)

    def _live(self, session: int) -> tuple[RunView, int] | None:
        for columns in self._query("session_by_number", session):
            row = _load(self._database, columns)
            view = live_run(row)
            return None if view is None else (view, row.started_seq)
        return None

    def _ended_or_live(self, session: int, run_id: str) -> tuple[RunView, int] | None:
        live = self._live(session)
        if live is not None and live[0].run_id == run_id:
            return live
        ended = _ended(self._query("ended_run", session, run_id))
        return None if ended is None else (ended.view, ended.started_seq)

    def run(self, session: int, run_id: str) -> RunView | None:
        found = self._ended_or_live(session, run_id)
        return None if found is None else found[0]

    def runs(self, session: int, *, limit: int) -> tuple[RunView, ...]:
        live = self._live(session)
        ended = [_decode_run(body) for (body,) in self._query("ended_runs", session, session, limit, session)]
        if live is not None and all(run.run_id != live[0].run_id for run in ended):
            ended.insert(0, live[0])
        return tuple(ended[:limit])

    def ready(self, *, limit: int) -> tuple[Ready, ...]:
        return tuple(
            Ready(
                session=session,
                principal=principal,
                key=key,
                agent=agent if run is None else _decode_live(run).agent,
                not_before=due,
            )
            for session, principal, key, agent, due, run in self._query("ready", limit)
        )

    def keys(self) -> tuple[KeyRecord, ...]:
        return tuple(
            KeyRecord(
                key_id=key_id,
                principal=principal,
                role=role,
                digest=bytes(digest),
                created_at=created_at,
                label=label,
                revoked_at=revoked_at,
            )
            for key_id, principal, role, digest, created_at, label, revoked_at in self._query("keys")
        )

    def live_sessions(self) -> int:
        return int(self._query("all_live_sessions")[0][0])
