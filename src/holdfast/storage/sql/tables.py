# ruff: noqa: D102 - `Tables` documents its methods
"""The tables of a store in SQL.

Session rows are cached between transactions, because normally only this object writes them. If other nodes may write
the database too, a row is cached only while this node holds the session, and `finish` checks the cached rows that the
transaction has read but not written. Long message contents are not cached but read again when needed (`Mail.shelved`).
Writes are collected, and `flush` writes many rows with one statement. If a session's fence, run id or next seq in the
database differs from the value that was read, the transaction fails with `SessionChanged`, so that a cached row never
overwrites a change made elsewhere. After any error, the caller must roll the transaction back and call `forget`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from holdfast.errors import StorageError
from holdfast.protocol.events import Stored, encode_json
from holdfast.protocol.messages import Attachment, Entry
from holdfast.storage.backend import Counters, PruneTimes
from holdfast.storage.event_packs import pack_entries
from holdfast.storage.rows import NOBODY, EndedRun, HistoryRow, KnownMessage, Mail, ScheduleRow, SessionRow
from holdfast.storage.sql.active_sessions import ActiveSessions
from holdfast.storage.sql.columns import (
    decode_attachment,
    ended_of,
    key_columns,
    known_of,
    listed_at,
    load,
    mail_of,
    piece_of,
    schedule_columns,
    schedule_of,
    shelve,
)
from holdfast.storage.sql.database import LARGE_BYTES, Database, SessionChanged
from holdfast.storage.sql.database_use import Sharing
from holdfast.storage.sql.grants import SqlGrants
from holdfast.storage.sql.merger import Merger
from holdfast.storage.sql.principal_sums import PrincipalSums
from holdfast.storage.sql.pruner import drop_old_events, prune_batch, purge_contents, purge_session
from holdfast.storage.sql.reads import SqlReads
from holdfast.storage.sql.session_saves import Seen, SessionSaves, seen_of
from holdfast.storage.sql.transcripts import ALL_LANDMARKS, is_landmark, read_entries, rebuild_landmarks
from holdfast.storage.values import KeyRecord, OldEvents, RequestKind

__all__ = ["SqlTables"]

_KEPT_SESSIONS = 2048
_KEPT_MAILS = 20_000
_KEPT_CHARACTERS = 4_096
_NUMBERS_OF_EPOCH = 40
"""Low bits of a ``commit_no``, which count rows. The bits above are the epoch, so a restart reuses no number."""


class SqlTables:
    """Implementation of `holdfast.storage.backend.Tables` in SQL, as described in the module.

    Parameters:
        database: database that runs the statements.
        epoch: epoch of the writing node.
        sharing: whether and how other nodes write the database.
        workspace_pool: see `Tables.workspace_pool`.
        between: callback for failpoints, called between the writes of a transaction.
    """

    def __init__(
        self,
        database: Database,
        *,
        epoch: int,
        sharing: Sharing,
        workspace_pool: str | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self.epoch = epoch
        self.workspace_pool = workspace_pool
        self.counters = Counters()
        self.merger = Merger(self, database, between)
        self.grants = SqlGrants(self, database, between)
        self._database = database
        self._between = between
        self._sharing = sharing
        self._commit_no = epoch << _NUMBERS_OF_EPOCH
        self._rows: dict[int, SessionRow] = {}
        self._names: dict[tuple[str, str], SessionRow] = {}
        self._seen: dict[int, Seen] = {}
        """Fence, next seq and run id of each cached session, as they are in the database."""
        self._cached: set[int] = set()
        """Sessions whose rows were already cached when this transaction read them."""
        self._loaded: set[int] = set()
        """Sessions whose rows were read from the database, or written, in this transaction."""
        self._listed: dict[int, int] = {}
        """``listed_at`` of the cached sessions."""
        self._active = ActiveSessions(database)
        self._characters: dict[int, int] = {}
        """Characters of messages added to each cached session since its long contents were last dropped."""
        self._large: set[int] = set()
        self._mails: dict[int, int] = {}
        self._kept_mails = 0
        self._deleted: set[int] = set()
        """The cached sessions that are deleted."""
        self._sums = PrincipalSums(database)
        self._collected_bytes = 0
        """Size of bodies in rows collected since the last flush."""
        self._saves = SessionSaves()
        self._messages: dict[tuple[int, str], list[object]] = {}
        self._taken: list[tuple[object, ...]] = []
        self._withdrawn: list[tuple[object, ...]] = []
        self._events: list[tuple[Any, ...]] = []
        self._events_since: list[tuple[object, ...]] = []
        self._runs: list[tuple[object, ...]] = []
        self._edits: list[tuple[object, ...]] = []
        self._landmarks: list[tuple[object, ...]] = []
        self._kept: list[tuple[object, ...]] = []
        self._uses: list[tuple[object, ...]] = []

    def forget(self) -> None:
        """Drop cached and collected rows; session numbers already assigned are not reused."""
        self.merger.abandon()
        for kept in (self._rows, self._names, self._seen, self._listed, self._messages):
            kept.clear()
        self._saves.clear()
        for counted in (self._characters, self._large, self._mails, self._deleted, self._cached, self._loaded):
            counted.clear()
        self._active.forget()
        self._sums.forget()
        self._kept_mails = self._collected_bytes = 0
        for collected in (
            self._taken,
            self._withdrawn,
            self._events,
            self._events_since,
            self._runs,
            self._edits,
            self._landmarks,
            self._kept,
            self._uses,
        ):
            collected.clear()

    def trim(self) -> None:
        """Drop long message contents and, if too many are cached, sessions from the cache. Call this after a commit."""
        for session in self._large:
            row = self._rows[session]
            row.waiting, row.taken = shelve(row.waiting), shelve(row.taken)
            del self._characters[session]
        self._large.clear()
        if self._sharing.is_shared:
            self._drop_not_held()
        self._loaded.clear()
        self._cached.clear()
        if len(self._rows) > _KEPT_SESSIONS or self._kept_mails > _KEPT_MAILS:
            for row in list(self._rows.values()):
                if len(self._rows) <= _KEPT_SESSIONS // 2 and self._kept_mails <= _KEPT_MAILS // 2:
                    break
                self._let_go(row)
        self._sums.trim()

    def _drop_not_held(self) -> None:
        """Drop the rows of sessions that this node does not hold, and begin new numbers of events."""
        for session in self._loaded | self._cached:
            row = self._rows.get(session)
            if row is not None and (row.run_id is None or row.holder != self.epoch):
                self._let_go(row)
        self._commit_no = 0

    def forget_sums(self) -> None:
        """Drop cached sums of principals, which other nodes may have changed. Call this between transactions."""
        self._sums.forget_cached()

    def finish(self) -> None:
        """Write all that was collected, at the end of a transaction. Raises `SessionChanged` as `flush` does."""
        self.flush()
        if self._sharing.is_shared:
            unchanged = [(session, *self._seen[session]) for session in sorted(self._cached - self._loaded)]
            self._database.write_rows("unchanged_sessions", unchanged, exact=True)
        self._sums.flush()

    def flush(self) -> None:
        """Write collected rows but the sums. Raises `SessionChanged` if a stored row was changed elsewhere.

        The error may also be raised later, by the commit.
        """
        large = self._collected_bytes > LARGE_BYTES
        self._collected_bytes = 0
        write = self._database.write_rows
        self._flush_sessions()
        if self._messages:
            self._flush_messages(large=large)
        for name, collected in (("take_message", self._taken), ("withdraw_message", self._withdrawn)):
            for parameters in collected:
                write(name, [parameters], exact=True)
            collected.clear()
        if not self._sharing.is_shared:
            self.merger.count_rows([event[3] for event in self._events])
        for name, collected in (
            ("add_events", self._events),
            ("add_runs", self._runs),
            ("add_edits", self._edits),
            ("add_landmarks", self._landmarks),
            ("add_kept", self._kept),
            ("use_attachments", self._uses),
        ):
            if collected:
                write(name, collected, large=large)
                collected.clear()
        for parameters in self._events_since:
            write("set_events_since", [parameters])
        self._events_since.clear()

    def _flush_sessions(self) -> None:
        """Write the collected session rows, and note what the database then contains."""
        saves, seen = self._saves, self._seen
        saves.write_new(self._database)
        stored = saves.stored()
        if stored:
            self._sharing.lock(stored)
            saves.write_stored(self._database, seen)
        self._loaded.update(saves.new, stored)
        if self._sharing.is_shared:
            self._sharing.wrote(saves.rows(), self.epoch)
        if saves.appended:
            self._between()
            for session, row in saves.appended.items():
                seen[session] = seen_of(row)
        if saves.new or saves.changed or saves.started or saves.ended:
            self._between()
            active = []
            for session, row in (
                *saves.new.items(),
                *saves.changed.items(),
                *saves.started.items(),
                *saves.ended.items(),
            ):
                seen[session] = seen_of(row)
                listed = listed_at(row)
                if listed != self._listed[session]:
                    self._listed[session] = listed
                    if session not in saves.new:
                        self._database.write_rows("save_listed", [(listed, session)])
                if row.run_id is not None and row.holder != NOBODY:
                    active.append(session)
                mails = len(row.waiting) + len(row.taken)
                self._kept_mails += mails - self._mails[session]
                self._mails[session] = mails
            self._active.add(active)
        saves.clear()

    def _flush_messages(self, *, large: bool) -> None:
        plain: list[tuple[object, ...]] = []
        others: list[tuple[object, ...]] = []
        for message in self._messages.values():
            session, message_id, seq, at, key, body_hash, batch, due, target, run_id, withdrawn, body = message
            if key is None and not body_hash and target is None and withdrawn is None:
                plain.append((session, message_id, seq, at, batch, due, run_id, body))
            else:
                others.append(tuple(message))
        for name, rows in (("add_plain_messages", plain), ("add_messages", others)):
            if rows:
                self._database.write_rows(name, rows, large=large)
        self._messages.clear()

    def _keep(self, row: SessionRow) -> SessionRow:
        self._rows[row.session] = row
        self._loaded.add(row.session)
        self._names[row.principal, row.key] = row
        self._seen[row.session] = seen_of(row)
        self._listed[row.session] = listed_at(row)
        mails = self._mails[row.session] = len(row.waiting) + len(row.taken)
        self._kept_mails += mails
        if row.deleted_at is not None:
            self._deleted.add(row.session)
        return row

    def _let_go(self, row: SessionRow) -> None:
        session = row.session
        del self._rows[session], self._names[row.principal, row.key], self._seen[session], self._listed[session]
        self._kept_mails -= self._mails.pop(session)
        self._characters.pop(session, None)
        self._large.discard(session)
        self._deleted.discard(session)

    def _flush_for(self, row: SessionRow) -> None:
        if row.session in self._saves:
            self.flush()

    def find(self, principal: str, key: str) -> SessionRow | None:
        kept = self._names.get((principal, key))
        if kept is not None:
            self._cached.add(kept.session)
            return kept
        rows = self._database.query("session_by_key", principal, key)
        return self._keep(load(self._database, rows[0])) if rows else None

    def get(self, session: int) -> SessionRow | None:
        kept = self._rows.get(session)
        if kept is not None:
            self._cached.add(session)
            return kept
        rows = self._database.query("session_by_number", session)
        return self._keep(load(self._database, rows[0])) if rows else None

    def live_sessions(self, principal: str) -> int:
        return self._sums.sessions(principal)

    def stored_bytes(self, principal: str) -> int:
        return self._sums.stored_bytes(principal)

    def grow(self, principal: str, amount: int) -> None:
        if amount > 0:
            self._collected_bytes += amount
        self._sums.grow(principal, amount)

    def new_session_number(self) -> int:
        return self._sharing.new_session_number()

    def by_idempotency_key(self, row: SessionRow, key: str) -> KnownMessage | None:
        self._flush_for(row)
        return known_of(self._database.query("message_by_idempotency_key", row.session, key))

    def known_message(self, row: SessionRow, message_id: str) -> KnownMessage | None:
        self._flush_for(row)
        return known_of(self._database.query("message_by_id", row.session, message_id))

    def ended_run(self, row: SessionRow, run_id: str) -> EndedRun | None:
        self._flush_for(row)
        return ended_of(self._database.query("ended_run", row.session, run_id))

    def events_between(self, row: SessionRow, first: int, last: int) -> tuple[Stored, ...]:
        self._flush_for(row)
        found = SqlReads(self._database).events(row.session, after=first - 1, limit=last - first + 1)
        return tuple(event for event in found if event.seq <= last)

    def orphans(self) -> Sequence[SessionRow]:
        self.flush()
        rows = [self.get(session) for session in self._sharing.orphans(self.epoch)]
        return sorted((row for row in rows if row is not None), key=lambda row: (row.started_at, row.session))

    def of_nodes(self, name: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Return the rows of a statement about the nodes that share the database."""
        return self._database.query(name, *parameters)

    def ask_others(self, session: int, kind: RequestKind, body: bytes) -> Sequence[int]:
        return self._sharing.ask(session, kind, body, self.epoch)

    def add_session(self, row: SessionRow) -> None:
        self._saves.new[row.session] = self._keep(row)
        self._sums.count(row.principal, 1)

    def save(self, row: SessionRow) -> None:
        self._saves.save(row)
        if row.deleted_at is not None and row.session not in self._deleted:
            self._deleted.add(row.session)
            self._sums.count(row.principal, -1)

    def save_append(self, row: SessionRow) -> None:
        self._saves.save_append(row)

    def save_start(self, row: SessionRow) -> None:
        self._saves.save_start(row)

    def save_end(self, row: SessionRow) -> None:
        self._saves.save_end(row)

    def refuse_used_message_id(self, row: SessionRow, message_id: str) -> None:
        """Do nothing, because `flush` fails for a used message id, which would violate the table's primary key."""

    def add_message(self, row: SessionRow, mail: Mail, *, idempotency_key: str | None, body_hash: bytes) -> None:
        message = mail.message
        key = (row.session, message.message_id)
        if key in self._messages:
            self.flush()
        body = encode_json(message)
        self.grow(row.principal, len(body))
        characters = self._characters[row.session] = self._characters.get(row.session, 0) + len(message.content)
        if characters > _KEPT_CHARACTERS:
            self._large.add(row.session)
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
            body,
        ]

    def unshelve(self, row: SessionRow, mails: tuple[Mail, ...]) -> tuple[Mail, ...]:
        return tuple([self._unshelved(row, mail) if mail.shelved else mail for mail in mails])

    def _unshelved(self, row: SessionRow, mail: Mail) -> Mail:
        (columns,) = self._database.query("taken_message", row.session, mail.message.message_id)
        return mail_of(columns)

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

    def add_events(
        self, row: SessionRow, run_id: str | None, at: float, first_seq: int, last_seq: int, body: bytes
    ) -> None:
        self.grow(row.principal, len(body))
        if row.events_since is None:
            row.events_since = at
            if row.session not in self._saves.new:
                self._events_since.append((at, row.session))
        self._commit_no += 1
        self._events.append((row.session, last_seq, first_seq, run_id, at, self._commit_no, body))
        self._sharing.added(row.session, first_seq, last_seq, body)

    def add_run(self, row: SessionRow, run: EndedRun, history: HistoryRow | None) -> None:
        view = run.view
        if history is not None:
            if history.whole:
                self._drop_landmarks(row)
            if is_landmark(history):
                self._landmarks.append((row.session, history.last_n, view.run_id))
        body = encode_json(view)
        entries = pack_entries(history.entries) if history is not None and history.entries else None
        self.grow(row.principal, len(body) + len(entries or b""))
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
                body,
                entries,
                None if history is None else history.previous_id,
                0 if history is None else int(history.whole),
                int(run.rolled_back),
            )
        )

    def add_kept(self, row: SessionRow, n: int, body: str) -> None:
        raw = body.encode()
        self.grow(row.principal, len(raw))
        self._kept.append((row.session, n, raw))

    def add_edit(self, row: SessionRow, history: HistoryRow) -> None:
        self._drop_landmarks(row)
        entries = pack_entries(history.entries) if history.entries else None
        self.grow(row.principal, len(entries or b""))
        self._edits.append((row.session, history.history_id, history.previous_id, history.last_n, entries))

    def _drop_landmarks(self, row: SessionRow) -> None:
        self.flush()
        self._database.write("drop_landmarks", row.session, ALL_LANDMARKS)

    def step_back(self, row: SessionRow, newest: HistoryRow) -> None:
        self.flush()
        row.history_id = newest.previous_id
        if newest.whole:
            rebuild_landmarks(self._database, row.session, row.history_id)
            return
        restored = self.history(row)
        last_n = 0 if restored is None else restored.last_n
        self._database.write("drop_landmarks", row.session, last_n)
        if restored is not None:
            self._landmarks.append((row.session, last_n, restored.history_id))

    def history(self, row: SessionRow) -> HistoryRow | None:
        if row.history_id is None:
            return None
        self._flush_for(row)
        for name in ("run_piece", "edit_piece"):
            for columns in self._database.query(name, row.session, row.history_id):
                return piece_of(row.history_id, columns)
        raise StorageError(f"the transcript of session {row.session} is incomplete: {row.history_id!r} is missing")

    def transcript(self, row: SessionRow, history_id: str | None) -> tuple[Entry, ...]:
        self._flush_for(row)
        return tuple(read_entries(self._database, row.session, history_id))

    def attachment(self, principal: str, digest: str) -> Attachment | None:
        rows = self._database.query("attachment", principal, digest)
        return decode_attachment(rows[0][0]) if rows else None

    def attached_bytes(self, principal: str) -> int:
        return int(self._database.query("attached_bytes", principal)[0][0])

    def add_attachment(self, principal: str, attachment: Attachment, body: bytes | bytearray, at: float) -> None:
        size, about = attachment.size_bytes, encode_json(attachment)
        self._database.write_large("add_attachment", principal, attachment.digest, at, size, about, value=body)
        self.grow(principal, size)
        self._between()

    def touch_attachment(self, principal: str, digest: str, at: float) -> None:
        self._database.write("touch_attachment", at, principal, digest, at)
        self._between()

    def use_attachments(self, row: SessionRow, digests: Iterable[str]) -> None:
        self._uses.extend((row.principal, digest, row.session) for digest in dict.fromkeys(digests))

    def find_schedule(self, principal: str, schedule_id: str) -> ScheduleRow | None:
        rows = self._database.query("schedule_by_id", principal, schedule_id)
        return schedule_of(rows[0]) if rows else None

    def schedule(self, schedule: int) -> ScheduleRow | None:
        rows = self._database.query("schedule_by_number", schedule)
        return schedule_of(rows[0]) if rows else None

    def schedules_of(self, principal: str) -> int:
        return int(self._database.query("schedules_of", principal)[0][0])

    def add_schedule(self, row: ScheduleRow) -> None:
        self._database.write("add_schedule", row.principal, row.schedule_id, *schedule_columns(row))
        self._between()

    def save_schedule(self, row: ScheduleRow) -> None:
        if self._database.write("save_schedule", *schedule_columns(row), row.schedule, row.revision - 1) != 1:
            raise SessionChanged
        self._between()

    def put_off_schedule(self, row: ScheduleRow, *, at: float, until: float) -> None:
        self._database.write("put_off_schedule", until, at, row.schedule)
        self._between()

    def drop_schedule(self, row: ScheduleRow) -> None:
        if self._database.write("drop_schedule", row.schedule, row.revision) != 1:
            raise SessionChanged
        self._between()

    def purge_contents(self, row: SessionRow, *, keep_run_id: str | None = None) -> None:
        row.history_id = None
        self.save(row)
        self.flush()
        self._between()
        purge_contents(self, self._database, row, keep_run_id=keep_run_id)

    def prune(self, before: PruneTimes, after: tuple[Any, ...]) -> tuple[int, tuple[Any, ...] | None]:
        self.flush()
        self._between()
        found = prune_batch(self, self._database, before, after)
        self.flush()
        return found

    def drop_old_events(self, read: Sequence[OldEvents], *, before: float) -> int:
        self.flush()
        self._between()
        dropped = drop_old_events(self, self._database, read, before=before)
        self.flush()
        return dropped

    def drop_session(self, row: SessionRow) -> None:
        """Delete a tombstone with all its rows. Called by `prune_batch`."""
        purge_session(self, self._database, row)
        self._let_go(row)

    def drop_events(self, row: SessionRow, *, before: int) -> int:
        """Delete the packs of events that end below `before`, and return their number. Only for pruning."""
        self.merger.dropped(row.session)
        return self.drop(row.principal, "prune_events", row.session, before)

    def drop(self, principal: str, name: str, *parameters: object) -> int:
        """Execute a statement that deletes rows and returns their sizes; return the number of deleted rows.

        The sizes are subtracted from the principal's stored bytes.
        """
        sizes = self._database.query(name, *parameters)
        if sizes:
            self.grow(principal, -sum(int(size) for (size,) in sizes))
        return len(sizes)

    def add_key(self, record: KeyRecord) -> None:
        if any(key_id == record.key_id for key_id, *_ in self._database.query("keys")):
            raise StorageError(f"key {record.key_id!r} already exists")
        self._database.write("add_key", *key_columns(record))
        self._between()

    def revoke_key(self, key_id: str, at: float) -> bool:
        revoked = self._database.write("revoke_key", at, key_id) == 1
        self._between()
        return revoked
