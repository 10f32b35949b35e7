"""Checks of the conformance suite for appends: those of one write, and the rows that are merged without a trace."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast.errors import QuotaExceeded, StaleFence
from holdfast.protocol.events import ReasoningDelta, Stored, TextDelta, ToolOutput, encode_event
from holdfast.protocol.stopping import Cause
from holdfast.storage.port import Append, Appended, Claim
from holdfast.testing.suites.store_driver import Check, Driver, MakeStore, opened

__all__ = ["PACK_CHECKS"]

_CHECKS: list[Check] = []
_TEXTS = ("", "a", "wörld ", 'see "at":1.5,"text":"', "\\", "line\nbreak", "\0", "a long piece " * 40, "\u2028😀")
"""Texts of deltas, some of which look like the JSON around them."""


def _check(check: Check) -> Check:
    _CHECKS.append(check)
    return check


def _piece(claim: Claim, number: int) -> tuple[str, bytes]:
    run_id = claim.lease.run_id
    text = _TEXTS[number % len(_TEXTS)]
    at = 1.7e9 + number * 0.0213457 if number % 5 else float(number)
    if number % 11 == 3:
        return encode_event(ReasoningDelta(run_id=run_id, text=text, at=at))
    if number % 11 == 4:
        return encode_event(ToolOutput(run_id=run_id, call_id="c", text=text, at=at))
    return encode_event(TextDelta(run_id=run_id, text=text, at=at))


async def _stream(on: Driver, claim: Claim, first: int, last: int) -> list[Stored]:
    """Append the pieces with numbers from `first` to `last`, each by itself; return what a reader was shown."""
    appended = await asyncio.gather(
        *[on.store.append(claim.lease, [_piece(claim, number)], nth=number) for number in range(first, last + 1)]
    )
    return [event for done in appended for event in done.events]


async def _reads_the_same(on: Driver, session: int, seen: Sequence[Stored]) -> None:
    """Check that every event that a reader has seen is read again as it was, from each position."""
    whole = await on.log(session)
    assert whole[seen[0].seq - 1 : seen[0].seq - 1 + len(seen)] == list(seen)
    for after in range(0, len(whole), max(1, len(whole) // 50)):
        page = await on.store.read_events(session, after=after, limit=5)
        assert list(page) == whole[after : after + len(page)], f"a cursor at {after} reads on from there"
        assert len(page) >= min(5, len(whole) - after)


@_check
async def what_was_streamed_is_read_unchanged_after_its_rows_were_merged(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start()
        session = claim.lease.session
        seen = await _stream(on, claim, 1, 40)
        seen += (await on.send("in between", message_id="m2")).events
        seen += await _stream(on, claim, 41, 60)
        before = [event for event in await on.store.run_events(session, claim.lease.run_id) if event in seen]
        done = await on.commit(claim, text="answer", events=[_piece(claim, 61)])
        seen += done.events
        await _reads_the_same(on, session, seen)
        journal = await on.store.run_events(session, claim.lease.run_id)
        assert [event for event in journal if event in before] == before
        assert "message.accepted" not in [event.kind for event in journal]
        again = await on.commit(claim, text="answer", events=[_piece(claim, 61)])
        assert list(again.events) == list(done.events), "a repeated commit is answered from the middle of a pack"
    async with opened(make_store, at=2.0) as on:
        await _reads_the_same(on, session, seen)


@_check
async def a_long_stream_reads_the_same_while_it_is_merged(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start()
        session = claim.lease.session
        seen = await _stream(on, claim, 1, 2200)
        await _reads_the_same(on, session, seen)
        repeated = await on.store.append(claim.lease, [_piece(claim, 2200)], nth=2200)
        assert list(repeated.events) == seen[-1:]
    async with opened(make_store, at=2.0) as on:
        await _reads_the_same(on, session, seen)
        (claim,) = await on.store.rescue(at=30.0)
        again = await on.store.restart(claim.lease, at=31.0)
        seen += again.events
        seen += await _stream(on, claim, 1, 700)
        seen += (await on.commit(claim)).events
        await _reads_the_same(on, session, seen)


@_check
async def merged_rows_are_dropped_whole(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start()
        session = claim.lease.session
        await _stream(on, claim, 1, 400)
        await on.commit(claim)
    async with opened(make_store, at=2.0) as on:
        merged = await on.store.stored_bytes("p")
        await on.store.prune(events_before=99.0, tombstones_before=0.0, idempotency_before=0.0)
        assert await on.log(session) == []
        assert await on.store.stored_bytes("p") < merged
        claim = await on.start()
        await _stream(on, claim, 1, 20)
        await on.store.delete_session("p", "k", at=40.0, cause=Cause(kind="stop"))
    async with opened(make_store, at=41.0) as on:
        (claim,) = await on.store.rescue(at=70.0)
        await on.commit(claim, "interrupted")
        assert await on.kinds(session) == ["run.stopping", "session.deleted"]
        assert await on.store.prune(events_before=0.0, tombstones_before=99.0, idempotency_before=0.0) == 1
        assert await on.store.stored_bytes("p") == 0


@_check
async def an_append_that_is_refused_refuses_no_other_of_its_write(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claims = [await on.start(key=key) for key in ("a", "b", "c")]
        await on.commit(claims[1])
        appends = [Append(claim.lease, [encode_event(TextDelta(run_id="r", text="x"))] * 2, 1) for claim in claims]
        for _ in range(2):  # the second time, each append is a repeated one
            first, late, last = await on.store.append_all(appends)
            assert isinstance(late, StaleFence)
            for claim, done in ((claims[0], first), (claims[2], last)):
                assert isinstance(done, Appended)
                assert (await on.log(claim.lease.session))[2:] == list(done.events)
        assert (await on.log(claims[1].lease.session))[-1].kind != "text.delta"
        too_much = await on.store.append_all([Append(claims[0].lease, appends[0].events, 2)], stored_limit=1)
        assert [type(done) for done in too_much] == [QuotaExceeded]


PACK_CHECKS: Sequence[Check] = tuple(_CHECKS)
"""The checks of this part."""
