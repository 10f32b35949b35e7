"""Checks of the conformance suite for transcript edits and attachments."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import (
    HistoryChanged,
    InvalidRequest,
    LimitExceeded,
    NothingToUndo,
    SessionBusy,
    SessionDeleted,
    UnknownAttachment,
    UnknownSession,
)
from holdfast.protocol.events import HistoryEdited, MessageAccepted, decode_event
from holdfast.protocol.messages import AgentState, Attachment, Entry, HistoryEdit
from holdfast.protocol.stopping import Cause
from holdfast.storage.port import Claim, Edited, EditHistory
from holdfast.testing.suites.store_driver import Check, Driver, MakeStore, opened, refused

__all__ = ["HISTORY_CHECKS"]

_CHECKS: list[Check] = []


def _check(check: Check) -> Check:
    _CHECKS.append(check)
    return check


def _edit(edit: HistoryEdit, *contents: str, key: str = "k", expected_n: int | None = None) -> EditHistory:
    return EditHistory(
        principal="p",
        key=key,
        edit=edit,
        at=30.0,
        entries=[Entry(role="summary", content=content) for content in contents],
        expected_n=expected_n,
        agent="demo",
    )


async def _say(on: Driver, *contents: str, key: str = "k") -> Claim:
    """Commit a run with an assistant entry for each text, and return the run's claim."""
    claim = await on.start(key=key)
    await on.commit(claim, entries=[Entry(role="assistant", content=content) for content in contents])
    return claim


async def _read(on: Driver, session: int) -> list[str]:
    """Check that the transcript reads the same from any position, and return the contents of its entries."""
    entries = await on.store.transcript(session)
    assert [entry.n for entry in entries] == sorted({entry.n for entry in entries})
    for start in (0, *(entry.n for entry in entries)):
        rest = [entry for entry in entries if entry.n > start]
        assert list(await on.store.transcript(session, after=start)) == rest
        assert list(await on.store.transcript(session, after=start, limit=1)) == rest[:1]
    return [entry.content for entry in entries]


def _event(edited: Edited) -> HistoryEdited:
    (stored,) = edited.events
    event = decode_event(stored)
    assert isinstance(event, HistoryEdited)
    return event


@_check
async def an_undo_takes_the_newest_piece_away(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        await refused(on.store.edit_history(_edit("undo")), UnknownSession)
        session = (await _say(on, "1", "2")).lease.session
        await refused(on.store.edit_history(_edit("undo", expected_n=1)), HistoryChanged)
        await _say(on)
        await _say(on, "3", "4")
        undone = await on.store.edit_history(_edit("undo", expected_n=4))
        assert [entry.content for entry in undone.removed] == ["3", "4"]
        event = _event(undone)
        assert (event.edit, event.from_n, event.added) == ("undo", 3, 0)
        assert (await on.log(session))[-1] == undone.events[0]
        assert await _read(on, session) == ["1", "2"]
        await _say(on, "5")
        assert [entry.n for entry in await on.store.transcript(session)] == [1, 2, 5], "no number names two entries"
        await on.store.edit_history(_edit("undo"))
        await on.store.edit_history(_edit("undo"))
        assert await _read(on, session) == []
        await refused(on.store.edit_history(_edit("undo")), NothingToUndo)
        assert len(await on.store.runs(session)) == 4, "runs stay"
    async with opened(make_store, at=2.0) as on:
        assert await _read(on, session) == []
        await _say(on, "6")
        assert await _read(on, session) == ["6"]


@_check
async def a_compaction_stands_in_the_place_of_all_before(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        session = (await _say(on, "1", "2")).lease.session
        await _say(on, "3")
        await refused(on.store.edit_history(_edit("compact", "s", expected_n=2)), HistoryChanged)
        compacted = await on.store.edit_history(_edit("compact", "s", "3", expected_n=3))
        assert [entry.content for entry in compacted.removed] == ["1", "2", "3"]
        event = _event(compacted)
        assert (event.edit, event.from_n, event.added) == ("compact", 1, 2)
        assert await _read(on, session) == ["s", "3"]
        await _say(on, "4")
        assert await _read(on, session) == ["s", "3", "4"]
        await refused(on.store.edit_history(_edit("compact", "t", expected_n=3)), HistoryChanged)
    async with opened(make_store, at=2.0) as on:
        assert await _read(on, session) == ["s", "3", "4"]
        await on.store.edit_history(_edit("undo"))
        undone = await on.store.edit_history(_edit("undo"))
        assert [entry.content for entry in undone.removed] == ["s", "3"]
        event = _event(undone)
        assert (event.from_n, event.added) == (undone.removed[0].n, 3)
        assert await _read(on, session) == ["1", "2", "3"], "what it stood for is back"
        await on.store.edit_history(_edit("compact"))
        assert await _read(on, session) == []
        await _say(on, "5")
        assert await _read(on, session) == ["5"]


@_check
async def a_run_may_replace_the_transcript(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        session = (await _say(on, "1", "2")).lease.session
        claim = await on.start()
        entries = [Entry(role="summary", content="s"), Entry(role="assistant", content="3")]
        await on.commit(claim, entries=entries, replaces_history=True)
        assert await _read(on, session) == ["s", "3"]
        await _say(on, "4")
        await on.store.edit_history(_edit("undo"))
        undone = await on.store.edit_history(_edit("undo"))
        assert [entry.run_id for entry in undone.removed] == [None, None]
        assert await _read(on, session) == ["1", "2"]
        await on.commit(await on.start(), replaces_history=True)
        assert await _read(on, session) == []
        await on.store.edit_history(_edit("undo"))
        assert await _read(on, session) == ["1", "2"]


@_check
async def what_an_agent_keeps_is_read_by_itself(make_store: MakeStore) -> None:
    def kept(body: str) -> Entry:
        return Entry(role="assistant", content=body[:1], agent_state=AgentState(by="a", body=body))

    async with opened(make_store) as on:
        claim = await on.start()
        session = claim.lease.session
        await on.commit(claim, entries=[Entry(role="user", content="hi"), kept("1 é\n\0\ud800")])
        await on.commit(await on.start(), entries=[kept("2" * 100_000)])
        entries = await on.store.transcript(session)
        assert [entry.agent_state for entry in entries] == [None, AgentState(by="a", n=2), AgentState(by="a", n=3)]
        await _say(on, "3")
        summary = Entry(role="summary", content="s", agent_state=entries[1].agent_state)
        await on.store.edit_history(
            EditHistory(principal="p", key="k", edit="compact", at=30.0, entries=[summary, entries[2]])
        )
        carried = await on.store.transcript(session)
        assert [(entry.n, entry.agent_state) for entry in carried] == [
            (5, entries[1].agent_state),
            (6, entries[2].agent_state),
        ]
        copied = EditHistory(principal="p", key="b", edit="branch", at=30.0, entries=[kept("b")], agent="demo")
        branch = (await on.store.edit_history(copied)).session
        again = await on.start()
        await on.commit(again, entries=[Entry(role="summary", content="t"), kept("4")], replaces_history=True)
        await on.commit(again, entries=[Entry(role="summary", content="t"), kept("4")], replaces_history=True)
        await on.store.edit_history(_edit("undo"))
        assert await on.store.transcript(session) == carried
    async with opened(make_store, at=2.0) as on:
        bodies = [await on.store.kept(session, n) for n in range(10)]
        assert bodies == ["", "", "1 é\n\0\\ud800", "2" * 100_000, "", "", "", "", "4", ""]
        assert [await on.store.kept(branch, n) for n in range(3)] == ["", "b", ""]
        await on.store.delete_session("p", "k", at=60.0, cause=Cause(kind="stop"))
        await on.store.prune(events_before=0.0, tombstones_before=99.0, idempotency_before=0.0)
        assert [await on.store.kept(session, 3), await on.store.kept(branch, 1)] == ["", "b"]


@_check
async def a_history_is_not_edited_under_a_run(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        session = (await _say(on, "1")).lease.session
        claim = await on.start()
        edits = (_edit("undo"), _edit("compact", "s"), _edit("import", "i"), _edit("branch", "b"))
        for edit in edits:
            await refused(on.store.edit_history(edit), SessionBusy)
        await on.send("waits")
        await on.commit(claim)
        for edit in edits:
            await refused(on.store.edit_history(edit), SessionBusy)
        await refused(on.store.edit_history(_edit("retry")), InvalidRequest)
        assert await _read(on, session) == ["1"]
        cause = Cause(kind="stop")
        await on.store.delete_session("p", "k", at=50.0, cause=cause)
        for edit in edits:
            await refused(on.store.edit_history(edit), SessionDeleted)


@_check
async def a_branch_or_an_import_begins_a_session(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        await _say(on, "1", "2")
        for edit in ("branch", "import"):
            made = await on.store.edit_history(_edit(edit, "1", "2", key=edit))
            event = _event(made)
            assert (event.seq, event.edit, event.from_n, event.added) == (1, edit, 0, 2)
            assert made.removed == ()
            found = await on.store.find_session("p", edit)
            assert found is not None
            assert (found[0], found[1].state, found[1].agent, found[1].seq) == (made.session, "idle", "demo", 1)
            assert await _read(on, made.session) == ["1", "2"]
            claim = await on.start(key=edit)
            assert claim.started_seq == 3
            await on.commit(claim, entries=[Entry(role="assistant", content="3")])
            assert await _read(on, made.session) == ["1", "2", "3"]
            again = _edit(edit, "x", key=edit)
            await refused(on.store.edit_history(again), SessionBusy)
        await refused(on.store.edit_history(_edit("compact", "s", key="missing")), UnknownSession)
        limited = EditHistory(principal="p", key="more", edit="import", at=30.0, session_limit=3)
        await refused(on.store.edit_history(limited), LimitExceeded)
        assert await on.store.find_session("p", "more") is None
        empty = await on.start(key="empty")
        await on.commit(empty)
        made = await on.store.edit_history(_edit("import", "i", key="empty"))
        assert await _read(on, made.session) == ["i"], "a session without a history may get one"
        await on.store.edit_history(_edit("undo", key="empty"))
        assert await _read(on, made.session) == []
    async with opened(make_store, at=2.0) as on:
        found = await on.store.find_session("p", "branch")
        assert found is not None
        assert await _read(on, found[0]) == ["1", "2", "3"]


@_check
async def a_retry_takes_the_last_runs_entries_with_it(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        first = await _say(on, "1")
        session = first.lease.session
        last = await _say(on, "2", "3")
        last_id = last.lease.run_id
        await refused(on.send(retry_of=first.lease.run_id), HistoryChanged)
        await refused(on.send(retry_of="r_unknown"), HistoryChanged)
        await refused(on.send(retry_of=last_id, key="other"), HistoryChanged)
        assert await on.store.find_session("p", "other") is None
        sent = await on.send("again", retry_of=last_id, idempotency_key="i", message_id="m9")
        assert [event.kind for event in sent.events] == ["history.edited", "message.accepted", "run.started"]
        assert sent.seq == sent.events[1].seq
        edited = decode_event(sent.events[0])
        assert isinstance(edited, HistoryEdited)
        assert (edited.edit, edited.from_n) == ("retry", 2)
        assert await _read(on, session) == ["1"]
        again = await on.send("again", retry_of=last_id, idempotency_key="i")
        assert (again.disposition, again.message_id) == ("duplicate", "m9")
        await refused(on.send(retry_of=last_id), SessionBusy)
        assert sent.claim is not None
        assert sent.claim.events == sent.events[2:]
        journal = await on.store.run_events(session, sent.claim.lease.run_id)
        assert [event.kind for event in journal] == ["run.started"]
        await on.commit(sent.claim, entries=[Entry(role="assistant", content="4")])
        assert await _read(on, session) == ["1", "4"]
        retried = sent.claim.lease.run_id
        await on.store.edit_history(_edit("compact", "s"))
        await refused(on.send(retry_of=retried), HistoryChanged)
        await on.store.edit_history(_edit("undo"))
        await on.store.edit_history(_edit("undo"))
        again = await on.send(retry_of=retried, room=False)
        assert [event.kind for event in again.events] == ["message.accepted"], "its entries are gone already"
        assert await _read(on, session) == ["1"]
        await refused(on.send(retry_of=retried), SessionBusy)


def _attachment(digest: str = "d1", name: str = "cat.png") -> Attachment:
    return Attachment(digest=digest, media_type="image/png", name=name)


async def _attach(
    on: Driver, digest: str = "d1", body: bytes = b"\0cat", *, principal: str = "p", at: float = 5.0, limit: int = 100
) -> Attachment:
    return await on.store.add_attachment(principal, _attachment(digest), body, at=at, limit_bytes=limit)


@_check
async def an_attachment_is_kept_once_for_each_principal(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        kept = await _attach(on)
        assert kept == Attachment(digest="d1", media_type="image/png", name="cat.png", size_bytes=4)
        again = await on.store.add_attachment("p", _attachment(name="dog.png"), b"\0cat", at=6.0, limit_bytes=4)
        assert again == kept, "the first answer"
        assert await on.store.attachment("p", "d1") == (kept, b"\0cat")
        assert await on.store.attachment("q", "d1") is None, "it is another's"
        parts = [await on.store.attachment_part("p", "d1", start=start, size=3) for start in (0, 3, 4, 9)]
        assert parts == [b"\0ca", b"t", b"", b""]
        assert await on.store.attachment_part("q", "d1", start=0, size=3) is None
        await refused(on.send(principal="q", attachments=(kept,)), UnknownAttachment)
        assert await on.store.find_session("q", "k") is None
        await refused(on.store.add_attachment("p", _attachment("d2"), b"x", at=6.0, limit_bytes=4), LimitExceeded)
        assert await on.store.attachment("p", "d2") is None
        assert (await _attach(on, "d2", b"", limit=4)).size_bytes == 0
        assert await _attach(on, principal="q", limit=4) == kept
    async with opened(make_store, at=2.0) as on:
        assert await on.store.attachment("p", "d1") == (kept, b"\0cat")


@_check
async def a_message_carries_its_attachments(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        kept = await _attach(on)
        sent = await on.send(attachments=(Attachment(digest="d1", media_type="text/html", name="x"),), message_id="m1")
        assert sent.claim is not None
        assert sent.claim.messages[0].attachments == (kept,), "as it is kept"
        accepted = decode_event(sent.events[0])
        assert isinstance(accepted, MessageAccepted)
        assert accepted.attachments == (kept,)
        await refused(on.send(attachments=(kept, _attachment("d9"))), UnknownAttachment)
        entries = [
            Entry(role="user", content="look", attachments=(kept,), message_id="m1"),
            Entry(role="tool_call", content="{}", call_id="c", name="t"),
            Entry(role="tool_result", content="no", call_id="c", name="t", status="error"),
            Entry(role="tool_result", content="", call_id="d", name="t", status="interrupted"),
            Entry(role="summary", content="s"),
        ]
        await on.commit(sent.claim, entries=entries)
        read = await on.store.transcript(sent.session)
        assert [(e.role, e.status, e.attachments) for e in read] == [(e.role, e.status, e.attachments) for e in entries]
        strange = EditHistory(principal="q", key="stolen", edit="import", at=30.0, entries=read)
        await refused(on.store.edit_history(strange), UnknownAttachment)
        assert await on.store.find_session("q", "stolen") is None
    async with opened(make_store, at=2.0) as on:
        assert await on.store.transcript(sent.session) == read
        queued = await on.send("1", attachments=(kept,), room=False)
        assert (await on.store.mailbox(queued.session))[0].message.attachments == (kept,)


@_check
async def what_no_session_refers_to_is_dropped_in_time(make_store: MakeStore) -> None:
    async with opened(make_store) as on:

        async def prune(*, before: float = 50.0, tombstones: float = 0.0) -> int:
            return await on.store.prune(
                events_before=0.0, tombstones_before=tombstones, idempotency_before=0.0, attachments_before=before
            )

        for digest in ("sent", "imported", "unused", "again"):
            await _attach(on, digest, at=5.0)
        await _attach(on, "young", at=50.0)
        await _attach(on, "again", at=60.0)
        await _attach(on, "sent", principal="q", at=5.0)
        await on.send(attachments=(_attachment("sent"), _attachment("sent")))
        copied = Entry(role="user", content="x", attachments=(_attachment("imported"),))
        await on.store.edit_history(
            EditHistory(principal="p", key="b", edit="import", at=30.0, entries=[copied], agent="demo")
        )
        assert await prune(before=0.0) == 0
        assert await prune() == 2
        for digest in ("sent", "imported", "young", "again"):
            assert await on.store.attachment("p", digest) is not None, digest
        assert await on.store.attachment("p", "unused") is None
        assert await on.store.attachment("q", "sent") is None, "a use by p does not count for q"
        cause = Cause(kind="stop")
        await on.store.delete_session("p", "b", at=60.0, cause=cause)
        assert await prune() == 1, "a deleted session refers to nothing"
        assert await prune(tombstones=99.0) == 1
        assert await on.store.attachment("p", "imported") is None
        assert await on.store.attachment("p", "sent") is not None
        assert (await _attach(on, "imported", at=70.0)).size_bytes == 4, "it may come again"


HISTORY_CHECKS: Sequence[Check] = tuple(_CHECKS)
