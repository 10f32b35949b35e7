"""Checks of the conformance suite for schedules: each tick is fired, counted or refused once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.errors import (
    LimitExceeded,
    QuotaExceeded,
    ScheduleChanged,
    ScheduleFinished,
    SessionBusy,
    UnknownAgent,
    UnknownSchedule,
)
from holdfast.protocol.events import MessageAccepted, decode_event
from holdfast.protocol.schedules import ScheduleSpec, ScheduleView
from holdfast.protocol.stopping import Cause
from holdfast.storage.port import DueSchedule, Fire, Fired, PutSchedule, Send
from holdfast.testing.suites.store_driver import Check, Driver, MakeStore, opened, refused

__all__ = ["SCHEDULE_CHECKS"]

_CHECKS: list[Check] = []
_AGENTS = {"demo": "", "other": ""}


def _check(check: Check) -> Check:
    _CHECKS.append(check)
    return check


async def _put(
    on: Driver,
    schedule_id: str = "s",
    *,
    principal: str = "p",
    at: float = 100.0,
    limit: int = 1000,
    stored_limit: int = 1_000_000,
    **spec: Any,
) -> ScheduleView:
    spec = {"session": "k", "text": "tick", "every_s": 10.0, **spec}
    return await on.store.put_schedule(
        PutSchedule(
            principal=principal,
            schedule_id=schedule_id,
            spec=ScheduleSpec(**spec),
            at=at,
            limit=limit,
            stored_limit=stored_limit,
        )
    )


async def _read(on: Driver, schedule_id: str = "s", principal: str = "p") -> tuple[DueSchedule, ScheduleView]:
    found = await on.store.schedule(principal, schedule_id)
    assert found is not None, "what was put must be found"
    return found


def _fire_of(
    on: Driver,
    due: DueSchedule,
    at: float,
    *,
    room: bool = True,
    by_hand: bool = False,
    stored_limit: int = 1_000_000,
) -> Fire:
    spec = due.spec
    return Fire(
        schedule=due.schedule,
        revision=due.revision,
        send=Send(
            principal=due.principal,
            key=spec.session,
            agent=spec.agent,
            default_agent="demo",
            message_id=on.fresh("m"),
            content=spec.text,
            policy=spec.overlap,
            at=at,
            run_id=on.fresh("r") if room else None,
            stored_limit=stored_limit,
            served=_AGENTS,
        ),
        by_hand=by_hand,
    )


async def _fire(on: Driver, at: float, schedule_id: str = "s", **more: Any) -> Fired:
    """Read a schedule, and fire it in the state that was read."""
    due, _ = await _read(on, schedule_id)
    return await on.store.fire_schedule(_fire_of(on, due, at, **more))


async def _ids(on: Driver, now: float, limit: int = 100) -> list[str]:
    return [due.schedule_id for due in await on.store.due_schedules(now=now, limit=limit)]


@_check
async def a_tick_is_fired_once_and_the_schedule_goes_on(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        assert await on.store.next_schedule() is None
        put = await _put(on)
        assert (put.state, put.next_at, put.fired) == ("active", 110.0, 0)
        assert await on.store.next_schedule() == 110.0
        assert await _ids(on, 109.9) == []
        assert await _ids(on, 110.0) == ["s"]
        due, view = await _read(on)
        assert view == put
        early = await on.store.fire_schedule(_fire_of(on, due, 109.0))
        assert (early.outcome, early.sent) == ("waits", None)
        fire = _fire_of(on, due, 110.5)
        fired = await on.store.fire_schedule(fire)
        assert fired.outcome == "fired"
        assert fired.sent is not None and fired.sent.disposition == "started" and fired.sent.claim is not None
        assert fired.sent.claim.messages[0].content == "tick"
        again = await on.store.fire_schedule(fire)
        assert (again.outcome, again.sent) == ("changed", None), "the tick is gone over"
        _, view = await _read(on)
        assert again.schedule == fired.schedule == view
        assert (view.fired, view.missed, view.refused, view.next_at) == (1, 0, 0, 120.0)
        assert view.last is not None and view.last.outcome == "fired" and view.last.tick_at == 110.0
        assert view.last.message_id == fire.send.message_id
        accepted = [decode_event(event) for event in await on.log(fired.sent.session)]
        assert sum(isinstance(event, MessageAccepted) for event in accepted) == 1
    async with opened(make_store, at=2.0) as on:
        assert await _ids(on, 120.0) == ["s"]
        assert (await _read(on))[1] == view


@_check
async def what_refuses_a_tick_is_counted_and_the_schedule_goes_on(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        await _put(on, overlap="reject")
        await _put(on, "stranger", agent="vanished", session="other")
        claim = await on.start()
        busy = await _fire(on, 110.0)
        assert (busy.outcome, busy.sent, busy.problem) == ("busy", None, None), "that passes by itself"
        await on.commit(claim)
        waiting = await _fire(on, 120.0, room=False)
        assert waiting.outcome == "fired", "it is the host that has no room, not the session"
        assert waiting.sent is not None and waiting.sent.disposition == "queued"
        assert (await _fire(on, 130.0)).outcome == "busy"
        unknown = await _fire(on, 110.0, "stranger")
        assert unknown.outcome == "unknown_agent"
        assert unknown.problem is not None and "vanished" in unknown.problem
        assert (await _fire(on, 120.0, "stranger")).problem is None, "it was reported before"
        _, view = await _read(on, "stranger")
        assert (view.refused, view.fired, view.next_at) == (2, 0, 130.0)
        assert view.problem == unknown.problem
        assert await on.store.find_session("p", "other") is None
        await _put(on, "stranger", agent="demo", session="other")
        assert (await _fire(on, 130.0, "stranger")).outcome == "fired"
        assert (await _read(on, "stranger"))[1].problem is None
        await on.store.delete_session("p", "k", at=131.0, cause=Cause(kind="stop"))
        gone = await _fire(on, 140.0)
        assert gone.outcome == "session_deleted" and gone.problem is not None
        _, view = await _read(on)
        assert (view.fired, view.refused, view.next_at) == (1, 3, 150.0)
        assert view.last is not None and view.last.outcome == "session_deleted"


@_check
async def the_texts_of_schedules_count_as_stored(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        await _put(on, text="x" * 1000, stored_limit=1000)
        assert await on.store.stored_bytes("p") == 1000
        await refused(_put(on, "more", text="y", stored_limit=1000), QuotaExceeded)
        await refused(_put(on, text="x" * 1001, stored_limit=1000), QuotaExceeded)
        await _put(on, "more", principal="q", text="y", stored_limit=1000)
        over = await _fire(on, 110.0, stored_limit=1999)
        assert (over.outcome, over.sent) == ("quota_exceeded", None)
        assert (await _read(on))[1].refused == 1, "it is counted, and the schedule continues"
        await _put(on, text="x" * 400, stored_limit=1000)
        assert await on.store.stored_bytes("p") == 400, "a shorter text gives room back"
        await on.store.delete_schedule("p", "s")
        assert await on.store.stored_bytes("p") == 0


@_check
async def missed_ticks_are_counted(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        await _put(on)
        await _put(on, "daily", every_s=86400.0)
        await _put(on, "each", miss="burst", overlap="queue", session="each")
        late = await _fire(on, 145.0)
        assert (late.outcome, late.missed) == ("fired", 3)
        _, view = await _read(on)
        assert (view.fired, view.missed, view.next_at) == (1, 3, 150.0)
        late = await _fire(on, 100.0 + 2.5 * 86400.0, "daily")
        assert (late.outcome, late.missed, late.sent) == ("missed", 2, None)
        _, view = await _read(on, "daily")
        assert view.last is not None and view.last.outcome == "missed"
        assert view.next_at == 100.0 + 3 * 86400.0
        outcomes = [(await _fire(on, 145.0, "each")).outcome for _ in range(5)]
        assert outcomes == ["fired"] * 4 + ["waits"]
        assert len(await on.store.mailbox(_session(await on.store.find_session("p", "each")))) == 3


def _session(found: Any) -> int:
    assert found is not None, "the session came into being"
    return int(found[0])


@_check
async def a_paused_schedule_has_no_ticks(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        await refused(on.store.pause_schedule("p", "s", paused=True, at=100.0), UnknownSchedule)
        await _put(on)
        due, _ = await _read(on)
        paused = await on.store.pause_schedule("p", "s", paused=True, at=105.0)
        assert (paused.state, paused.next_at) == ("paused", None)
        assert await on.store.pause_schedule("p", "s", paused=True, at=106.0) == paused
        assert await _ids(on, 1e9) == []
        assert await on.store.next_schedule() is None
        changed = await on.store.fire_schedule(_fire_of(on, due, 110.0))
        assert (changed.outcome, changed.sent) == ("changed", None)
        assert (await _fire(on, 110.0)).outcome == "waits"
        assert (await _put(on, text="other")).state == "paused", "who replaces it does not resume it"
        resumed = await on.store.pause_schedule("p", "s", paused=False, at=137.0)
        assert (resumed.state, resumed.next_at, resumed.missed) == ("active", 140.0, 0)
        assert await on.store.next_schedule() == 140.0
        assert await on.store.delete_schedule("p", "s") == resumed
        assert await on.store.next_schedule() is None
        assert await on.store.schedule("p", "s") is None
        await refused(on.store.delete_schedule("p", "s"), UnknownSchedule)
        assert (await on.store.fire_schedule(_fire_of(on, due, 150.0))).schedule is None


@_check
async def a_schedule_is_replaced_under_its_id(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        first = await _put(on)
        assert await _put(on, at=105.0) == first, "the same again changes nothing"
        due, _ = await _read(on)
        other = await _put(on, at=106.0, text="other")
        assert (other.text, other.next_at, other.created_at) == ("other", 110.0, 100.0), "its ticks stay"
        changed = await on.store.fire_schedule(_fire_of(on, due, 110.0))
        assert (changed.outcome, changed.sent) == ("changed", None), "what was read is not what is fired"
        assert (await _fire(on, 110.0)).outcome == "fired"
        anew = await _put(on, at=115.0, text="other", every_s=60.0)
        assert (anew.next_at, anew.fired) == (175.0, 0)
        await _put(on, principal="q", session="q", at=116.0)
        assert [view.principal for view in await on.store.schedules(principal=None, limit=9)] == ["p", "q"]
        assert [view.text for view in await on.store.schedules(principal="p", limit=9)] == ["other"]
        assert await on.store.schedules(principal="p", session="q", limit=9) in ((), [])
        assert len(await on.store.schedules(principal="q", session="q", limit=9)) == 1
        assert len(await on.store.schedules(principal=None, limit=1)) == 1
        await refused(_put(on, "more", limit=1), LimitExceeded)
        await _put(on, text="a third", limit=1)


@_check
async def a_schedule_ends_after_its_runs(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        await _put(on, max_runs=2)
        assert (await _fire(on, 110.0)).outcome == "fired"
        by_hand = await _fire(on, 111.0, by_hand=True)
        assert by_hand.outcome == "fired" and by_hand.sent is not None
        _, view = await _read(on)
        assert (view.state, view.next_at, view.fired) == ("finished", None, 2)
        assert await on.store.next_schedule() is None
        due, _ = await _read(on)
        await refused(on.store.fire_schedule(_fire_of(on, due, 120.0, by_hand=True)), ScheduleFinished)
        assert (await _put(on, max_runs=3, at=121.0)).state == "active", "another cadence begins anew"


@_check
async def a_run_by_hand_leaves_the_ticks_where_they_are(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        await _put(on, overlap="reject")
        due, _ = await _read(on)
        fire = _fire_of(on, due, 105.0, by_hand=True)
        fired = await on.store.fire_schedule(fire)
        assert fired.sent is not None and fired.sent.message_id == fire.send.message_id
        await refused(on.store.fire_schedule(fire), ScheduleChanged)
        due, view = await _read(on)
        assert (view.fired, view.next_at) == (1, 110.0)
        assert view.last is not None and view.last.tick_at is None
        await refused(on.store.fire_schedule(_fire_of(on, due, 106.0, by_hand=True)), SessionBusy)
        assert (await _read(on))[1] == view, "a manual run that is refused does not count as a tick"
        await on.store.pause_schedule("p", "s", paused=True, at=107.0)
        await refused(on.store.fire_schedule(_fire_of(on, due, 108.0, by_hand=True)), ScheduleChanged)
        await _put(on, "stranger", agent="vanished", session="other")
        stranger, _ = await _read(on, "stranger")
        await refused(on.store.fire_schedule(_fire_of(on, stranger, 108.0, by_hand=True)), UnknownAgent)


@_check
async def principals_take_turns_when_much_is_due(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        for number in range(4):
            await _put(on, f"p{number}", at=100.0 + number)
        await _put(on, "q0", principal="q", at=103.5)
        assert await _ids(on, 200.0) == ["p0", "q0", "p1", "p2", "p3"]
        assert await _ids(on, 200.0, limit=2) == ["p0", "q0"]


@_check
async def a_clock_that_was_set_back_is_looked_at(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        future = 100.0 + 10 * 86400.0
        await _put(on)
        await _put(on, "later", at=100.0)
        assert (await _fire(on, future)).outcome == "fired"
        assert await _ids(on, 105.0) == ["s"], "it was decided in a time that has not come yet"
        back = await _fire(on, 105.0)
        assert (back.outcome, back.missed) == ("set_back", 0)
        assert (await _read(on))[1].next_at == 110.0
        assert await _ids(on, 105.0) == []
        assert (await _fire(on, 110.0)).outcome == "fired"
        twice = await _fire(on, future + 1.0)
        assert twice.outcome == "duplicate" and twice.sent is not None, "the same tick is the same message"
        assert (await _read(on))[1].fired == 2
        assert await _ids(on, future - 3600.0) == ["later"], "less than three hours is not set back"


@_check
async def nobody_passes_for_a_schedule(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        await _put(on)
        due, _ = await _read(on)
        await on.send(idempotency_key=f"schedule:{due.schedule}:110.000", body_hash=b"0123456789abcdef")
        result = await _fire(on, 110.0)
        assert result.outcome == "idempotency_mismatch"
        assert (await _fire(on, 120.0)).outcome == "fired"
        assert msgspec.json.decode(msgspec.json.encode((await _read(on))[1]), type=ScheduleView).refused == 1


SCHEDULE_CHECKS: Sequence[Check] = tuple(_CHECKS)
