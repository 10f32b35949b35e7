"""Checks of the conformance suite for housekeeping: deletion, pruning, quotas, pages, lists, keys and closing."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import (
    QuotaExceeded,
    SessionDeleted,
    StaleFence,
    StorageError,
    UnknownSession,
)
from holdfast.protocol.events import Stored, TextDelta, encode_event
from holdfast.protocol.messages import Attachment, Entry
from holdfast.protocol.stopping import Cause
from holdfast.storage.port import (
    EditHistory,
    KeyRecord,
    NotReady,
    OldEvents,
)
from holdfast.testing.suites.store_driver import Check, MakeStore, interrupt_of, opened, refused

__all__ = ["HOUSEKEEPING_CHECKS"]

_CHECKS: list[Check] = []


def _check(check: Check) -> Check:
    _CHECKS.append(check)
    return check


@_check
async def a_deleted_session_leaves_a_tombstone(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        cause = Cause(kind="stop", reason="deleted")
        await refused(on.store.delete_session("p", "k", at=12.0, cause=cause), UnknownSession)
        claim = await on.start()
        session = claim.lease.session
        await on.send("waits", message_id="m1")
        gone = await on.store.delete_session("p", "k", at=12.0, cause=cause)
        assert gone.run_id == claim.lease.run_id
        assert [m.message_id for m in gone.withdrawn] == ["m1"]
        assert [e.kind for e in gone.events] == ["run.stopping", "message.settled", "session.deleted"]
        await refused(on.send(), SessionDeleted)
        await refused(on.send(idempotency_key="i"), SessionDeleted)
        await refused(on.interrupt(), SessionDeleted)
        await refused(on.store.stop_session(interrupt_of()), SessionDeleted)
        await refused(on.store.delete_session("p", "k", at=13.0, cause=cause), SessionDeleted)
        await refused(on.store.withdraw("p", "k", "m1", at=13.0), SessionDeleted)
        assert (await on.say(claim, "late")).events == ()
        done = await on.commit(claim, "interrupted", next_run_id="r2")
        assert done.events == ()
        assert done.claim is None
        assert [s.state for s in done.settled] == ["interrupted"]
        assert (await on.log(session))[-1].kind == "session.deleted"
        found = await on.store.find_session("p", "k")
        assert found is not None
        assert found[1].state == "deleted"
        assert (await on.store.info()).sessions == 0
        assert await on.store.ready(limit=10) == ()
        assert isinstance(await on.store.claim(session, run_id="r9", at=14.0), NotReady)
        assert await on.store.transcript(session) == (), "the conversation is deleted with the session, at once"
        assert [run.text for run in await on.store.runs(session)] == [""]
        assert await on.store.settlement(session, "m1") is None
        assert "message.accepted" not in [e.kind for e in await on.log(session)]
        assert (await on.send(key="other", session_limit=1)).disposition == "started", "a tombstone is not counted"


@_check
async def after_the_purge_a_key_is_a_new_session(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start(idempotency_key="i")
        cause = Cause(kind="stop")
        await on.store.delete_session("p", "k", at=12.0, cause=cause)
        assert await on.store.prune(events_before=0.0, tombstones_before=99.0, idempotency_before=0.0) == 0
        await on.commit(claim, "interrupted")
        assert await on.store.prune(events_before=0.0, tombstones_before=12.0, idempotency_before=0.0) == 0
        assert await on.store.prune(events_before=0.0, tombstones_before=99.0, idempotency_before=0.0) == 1
        assert await on.store.find_session("p", "k") is None
        assert await on.log(claim.lease.session) == []
        assert await on.store.runs(claim.lease.session) == ()
    async with opened(make_store, at=2.0) as on:
        fresh = await on.send(idempotency_key="i")
        assert fresh.disposition == "started"
        assert fresh.seq == 1
        assert fresh.number != claim.number
        assert fresh.session != claim.lease.session
        await refused(on.commit(claim), StaleFence)


@_check
async def pruning_drops_old_events_but_no_history(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        old = await on.start("old", at=10.0, idempotency_key="i", message_id="m1")
        session = old.lease.session
        await on.commit(old, at=11.0, text="answer", entries=[Entry(role="user", content="old")])
        assert await on.store.oldest_seq(session) == 1
        running = await on.start("long", at=12.0, idempotency_key="j")
        await on.say(running, "x")
        await on.send("waits", at=13.0, idempotency_key="l", message_id="m3")
        assert await on.store.prune(events_before=11.0, tombstones_before=0.0, idempotency_before=0.0) == 1
        assert await on.store.oldest_seq(session) == 3
        assert await on.store.prune(events_before=99.0, tombstones_before=0.0, idempotency_before=99.0) == 2
        assert await on.store.oldest_seq(session) == 5, "the run that is on keeps its events"
        events = await on.store.read_events(session, after=0, limit=100)
        assert events[0].seq == 5
        assert (await on.send(idempotency_key="i", at=14.0)).disposition == "queued"
        for key in ("j", "l"):
            assert (await on.send(idempotency_key=key, at=14.0)).disposition == "duplicate"
        assert [entry.content for entry in await on.store.transcript(session)] == ["old"]
        assert len(await on.store.runs(session)) == 2
        done = await on.commit(running, at=15.0, next_run_id="r9")
        assert done.claim is not None
        assert [m.message_id for m in done.claim.messages] == ["m3"]
        await on.store.stop_session(interrupt_of(at=16.0))
        await on.commit(done.claim, "interrupted", at=16.0)
        assert await on.store.prune(events_before=99.0, tombstones_before=0.0, idempotency_before=0.0) > 0
        found = await on.store.find_session("p", "k")
        assert found is not None
        assert await on.store.oldest_seq(session) == found[1].seq + 1, "nothing is kept"
        assert list(await on.store.read_events(session, after=0, limit=100)) == []
        settled = await on.store.settlement(session, "m1")
        assert settled is not None
        assert settled.text == "answer"
        assert (await on.start("next", at=17.0)).started_seq == found[1].seq + 2


@_check
async def old_events_are_dropped_only_as_far_as_they_were_read(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        logs: dict[str, list[Stored]] = {}
        for key in ("k", "l", "gone"):
            for number in range(3):
                claim = await on.start(f"{key} {number}", key=key, at=10.0 + number)
                await on.commit(claim, at=10.5 + number)
            logs[key] = await on.log(claim.lease.session)
        await on.store.delete_session("p", "gone", at=13.0, cause=Cause(kind="stop"))
        running = await on.start("long", key="l", at=14.0)
        await on.say(running, "x")

        read: list[OldEvents] = []
        after: tuple[float, int] | None = None
        while True:
            found, after = await on.store.old_events(before=99.0, after=after, limit_bytes=1)
            for old in found:
                left = [event for event in await on.log(old.session) if event.seq > old.events[-1].seq]
                assert await on.store.drop_old_events([old], before=99.0) >= 1
                assert await on.log(old.session) == left, "what was not read is kept"
                assert await on.store.drop_old_events([old], before=99.0) == 0
            read += found
            if after is None:
                break
        for key in ("k", "l"):
            events = [event for old in read if old.key == key for event in old.events]
            assert events == logs[key], "each event is read once, and those of the active run are not"
        assert {(old.principal, old.key) for old in read} == {("p", "k"), ("p", "l")}, "deleted means deleted"
        found, after = await on.store.old_events(before=99.0, limit_bytes=10**6)
        assert (list(found), after) == ([], None)
        await on.commit(running, at=15.0)
        found, _ = await on.store.old_events(before=12.0, limit_bytes=10**6)
        assert list(found) == [], "they are not old yet"
        found, _ = await on.store.old_events(before=99.0, limit_bytes=10**6)
        assert await on.store.drop_old_events(found, before=12.0) == 0, "nor for this time"
        assert await on.store.drop_old_events(found, before=99.0) >= 1


@_check
async def what_a_principal_stores_is_counted_bounded_and_given_back(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        assert await on.store.stored_bytes("p") == 0
        claim = await on.start("x" * 1000)
        sent = await on.store.stored_bytes("p")
        assert sent >= 1000
        assert await on.store.stored_bytes("q") == 0, "it is another's"
        await refused(on.send(message_id="m2", key="k2", stored_limit=sent), QuotaExceeded)
        await refused(on.send(message_id="m2", stored_limit=sent), QuotaExceeded)
        assert await on.store.stored_bytes("p") == sent, "a refusal writes nothing"
        said = encode_event(TextDelta(run_id=claim.lease.run_id, text="y" * 5000))
        await refused(on.store.append(claim.lease, [said], nth=1, stored_limit=sent + 4000), QuotaExceeded)
        entries = [Entry(role="assistant", content="z" * 5000)]
        await refused(on.commit(claim, entries=entries, stored_limit=sent + 4000), QuotaExceeded)
        await refused(on.commit(claim, text="t" * 5000, stored_limit=sent + 4000), QuotaExceeded)
        assert await on.store.stored_bytes("p") == sent, "what a run may not write is not written"
        await on.store.append(claim.lease, [said], nth=1, stored_limit=sent + 6000)
        await on.commit(claim, entries=entries)
        grown = await on.store.stored_bytes("p")
        assert grown >= sent + 10_000, "what a run writes is counted"
        assert list(await on.store.most_stored(limit=5)) == [("p", grown)]
        entries = [Entry(role="user", content="e" * 100)]
        await refused(
            on.store.edit_history(
                EditHistory(
                    principal="p",
                    key="k3",
                    edit="import",
                    at=30.0,
                    entries=entries,
                    agent="echo",
                    stored_limit=grown + 99,
                )
            ),
            QuotaExceeded,
        )
        body = b"b" * 100
        kept = Attachment(digest="d", media_type="a/b", size_bytes=100)
        await refused(
            on.store.add_attachment("p", kept, body, at=30.0, limit_bytes=10**6, stored_limit=grown + 99), QuotaExceeded
        )
        await on.store.add_attachment("p", kept, body, at=30.0, limit_bytes=10**6, stored_limit=grown + 100)
        assert await on.store.stored_bytes("p") == grown + 100
        await on.store.delete_session("p", "k", at=40.0, cause=Cause(kind="user", at=40.0))
        await on.store.prune(events_before=0.0, tombstones_before=50.0, idempotency_before=0.0, attachments_before=50.0)
        assert await on.store.stored_bytes("p") == 0, "what was dropped is given back"


@_check
async def pages_end_where_they_have_enough_bytes(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        for n in range(6):
            claim = await on.start(message_id=f"m{n}")
            for _ in range(5):
                await on.say(claim, "x" * 1000)
            entries = [Entry(role="user", content="hi"), Entry(role="assistant", content="y" * 1000)]
            await on.commit(claim, entries=entries)
        session = claim.lease.session
        log, after = await on.log(session), 0
        while page := await on.store.read_events(session, after=after, limit=1000, limit_bytes=2500):
            assert list(page) == log[after : after + len(page)]
            assert sum(len(event.body) for event in page[:-1]) < 2500 + 1200, "a row of the store more at most"
            after = page[-1].seq
        assert after == log[-1].seq
        entries = list(await on.store.transcript(session))
        assert len(entries) == 12
        read: list[Entry] = []
        while some := await on.store.transcript(session, after=read[-1].n if read else 0, limit_bytes=2100):
            assert len(some) <= 4, "two long entries, and what lies between"
            read += some
        assert read == entries
        assert len(await on.store.transcript(session, limit_bytes=1)) == 1, "never empty because of it"
        assert len(await on.store.transcript(session, after=2, limit=3, limit_bytes=10**6)) == 3
        size = await on.store.transcript_within(session, limit_bytes=1000)
        assert isinstance(size, int), "it is more than that"
        assert 6000 <= size <= 12_000
        whole = await on.store.transcript_within(session, limit_bytes=size)
        assert not isinstance(whole, int)
        assert list(whole) == entries
        nothing = await on.store.transcript_within(999_999, limit_bytes=0)
        assert not isinstance(nothing, int)
        assert list(nothing) == []


@_check
async def reads_begin_anywhere_in_the_log(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start()
        for n in range(20):
            await on.say(claim, *(["x"] * (n % 5 + 1)))
        session = claim.lease.session
        log = await on.log(session)
        for after in range(len(log) + 2):
            events = await on.store.read_events(session, after=after, limit=4)
            assert list(events) == log[after : after + len(events)]
            assert len(events) >= min(4, len(log) - after)
        assert list(await on.store.read_events(999_999, after=0, limit=5)) == []
        assert await on.store.oldest_seq(999_999) == 1
        assert list(await on.store.run_events(session, claim.lease.run_id)) == log[1:]


@_check
async def a_dropped_or_cancelled_caller_does_not_undo_its_write(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start()
        dropped = on.say(claim, "dropped")
        dropped.cancel()
        kept = await on.say(claim, "kept")
        log = await on.log(claim.lease.session)
        assert log[-1] == kept.events[0]
        assert len(log) in (3, 4)
        assert (await on.say(claim, "more")).events[0].seq == log[-1].seq + 1


@_check
async def a_closed_store_has_finished_what_it_was_given(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start()
        writes = [on.say(claim, str(n)) for n in range(20)]
    assert all(write.done() and write.exception() is None for write in writes)
    try:
        await on.store.find_session("p", "k")
    except StorageError:
        pass
    else:
        raise AssertionError("a closed store answered find_session; it must raise StorageError")
    await on.store.close()
    async with opened(make_store, at=2.0) as on:
        assert len(await on.log(claim.lease.session)) == 22


@_check
async def sessions_are_listed_by_their_last_change(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        for n in range(5):
            await on.send(key=f"k{n}", at=10.0 + n, principal="p" if n % 2 == 0 else "q")
        keys = [view.key for view in await on.store.sessions(principal=None, limit=3)]
        assert keys == ["k4", "k3", "k2"]
        assert [v.key for v in await on.store.sessions(principal=None, limit=9, before=(12.0, 0))] == ["k1", "k0"]
        assert [v.key for v in await on.store.sessions(principal="q", limit=9)] == ["k3", "k1"]
        assert [v.key for v in await on.store.sessions(principal="q", limit=9, before=(13.0, 0))] == ["k1"]
        await on.send(key="k0", at=20.0)
        views = await on.store.sessions(principal="p", limit=9)
        assert [(v.key, v.waiting) for v in views] == [("k0", 1), ("k4", 0), ("k2", 0)]
        assert await on.store.find_session("q", "k0") is None, "keys count per principal"


@_check
async def api_keys_are_kept_and_revoked(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        key = KeyRecord(key_id="a", principal="p", role="user", digest=b"\0\xff", created_at=1.0, label="laptop")
        await on.store.add_key(key)
        await on.store.add_key(KeyRecord(key_id="b", principal="q", role="admin", digest=b"d", created_at=2.0))
        await refused(on.store.add_key(key), StorageError)
        assert await on.store.revoke_key("b", at=5.0)
        assert not await on.store.revoke_key("b", at=6.0)
        assert not await on.store.revoke_key("c", at=6.0)
    async with opened(make_store, at=2.0) as on:
        first, second = await on.store.keys()
        assert first == key
        assert second.revoked_at == 5.0
        assert second.role == "admin"


HOUSEKEEPING_CHECKS: Sequence[Check] = tuple(_CHECKS)
