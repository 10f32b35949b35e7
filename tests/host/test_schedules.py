"""A host fires its schedules: each tick once, whatever else happens, and for nothing while nothing is due."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from holdfast import Host, Run, agent
from holdfast.clock import system_clock
from holdfast.errors import (
    Draining,
    HoldfastError,
    InvalidKey,
    InvalidRequest,
    InvalidSchedule,
    LimitExceeded,
    ScheduleBroken,
    ScheduleFinished,
    StorageError,
    UnknownAgent,
    UnknownPolicy,
    UnknownSchedule,
)
from holdfast.host.scheduler import LOOK_EVERY_S
from holdfast.protocol.events import MessageAccepted, RunStarted
from holdfast.protocol.schedules import Miss, ScheduleView
from holdfast.settings import Settings
from holdfast.storage import MemoryStore, SqliteStore
from holdfast.storage.port import DueSchedule, Fire, Fired
from holdfast.testing import VirtualClock, explore, run_virtual
from tests.host.test_sessions_explored import check_log, settle_all
from tests.host.unreliable import Fate, Unreliable, failing_at_random

QUICK = Settings(grace_s=1.0, abandon_after_s=1.0, drain_timeout_s=0.0, principal_schedules=50)


@agent
async def echo(run: Run) -> str:
    """Says what it heard."""
    return run.text


@agent
async def slow(run: Run) -> None:
    """Takes 25 seconds."""
    await asyncio.sleep(25)


@agent
async def quick(run: Run) -> None:
    """Ends at once."""


class Jumping:
    """A clock that follows the loop, and that an operator sets."""

    def __init__(self) -> None:
        self._true = VirtualClock()
        self.wrong_by_s = 0.0

    def now(self) -> float:
        return self._true.now() + self.wrong_by_s

    def monotonic(self) -> float:
        return self._true.monotonic()


class Watched:
    """Notes what is asked of a store about schedules, and what it answers to each firing."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.asked: Counter[str] = Counter()
        self.fired: list[tuple[str, float, Fired]] = []

    def __getattr__(self, name: str) -> Any:
        if "schedule" in name:
            self.asked[name] += 1
        verb = getattr(self._store, name)
        if name != "fire_schedule":
            return verb

        def fire(request: Fire) -> asyncio.Future[Fired]:
            done: asyncio.Future[Fired] = verb(request)

            def note(done: asyncio.Future[Fired]) -> None:
                if not done.cancelled() and done.exception() is None:
                    answer = done.result()
                    self.fired.append((request.send.key, request.send.at, answer))
                    if answer.outcome == "fired":
                        assert answer.schedule is not None and answer.schedule.text == request.send.content

            done.add_done_callback(note)
            return done

        return fire


def hosted(
    store: Any = None, *, clock: Any = None, agents: Any = (echo, slow, quick), settings: Settings = QUICK
) -> Host:
    """A host on a virtual clock."""
    return Host(agents=agents, store=store or MemoryStore(), settings=settings, clock=clock or VirtualClock())


async def accepted(host: Host, key: str) -> list[str]:
    """What was accepted in a session, once it is idle, whose log is whole."""
    events = await settle_all(host, key)
    check_log(events)
    return [event.content for event in events if isinstance(event, MessageAccepted)]


# ── ticks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_schedule_fires_at_its_ticks_until_it_is_paused_and_again_once_it_is_resumed() -> None:
    async def main() -> None:
        async with hosted() as host:
            schedule = await host.session("s").schedule("tick", every_s=10.0)
            await asyncio.sleep(35.0)
            assert len(await accepted(host, "s")) == 3
            assert (await schedule.pause()).state == "paused"
            await asyncio.sleep(100.0)
            view = await schedule.resume()
            assert (view.state, view.fired, view.missed) == ("active", 3, 0)
            await asyncio.sleep(20.0)
            assert len(await accepted(host, "s")) == 5
            assert (await schedule.run_now()).disposition == "started"
            assert len(await accepted(host, "s")) == 6
            last = await schedule.delete()
            assert (last.fired, last.refused) == (6, 0)
            await asyncio.sleep(100.0)
            assert len(await accepted(host, "s")) == 6
            with pytest.raises(UnknownSchedule):
                await schedule.info()

    run_virtual(main())


def test_what_a_firing_sends_is_a_message_like_any_other() -> None:
    async def main() -> None:
        async with hosted() as host:
            session = host.session("s", principal="anna")
            schedule = await session.schedule("tick", every_s=10.0, agent="echo", max_runs=1)
            await asyncio.sleep(15.0)
            view = await schedule.info()
            assert view.last is not None and view.last.message_id is not None
            assert (await session.wait(view.last.message_id)).text == "tick"
            assert view.state == "finished"
            with pytest.raises(ScheduleFinished):
                await schedule.run_now()
            assert [view.schedule_id for view in await host.schedules(principal="anna")] == [schedule.schedule_id]
            assert await host.schedules(principal="bert") == []
            with pytest.raises(UnknownSchedule):
                await host.find_schedule(schedule.schedule_id, principal="bert").pause()
            assert host.statistics().counts["ticks_fired"] == 1

    run_virtual(main())


@pytest.mark.parametrize(
    ("overlap", "starts", "waits", "refused"), [("queue", 1, 1, 0), ("reject", 1, 0, 1), ("interrupt", 2, 0, 0)]
)
def test_a_tick_during_a_run_follows_the_overlap_policy(overlap: Any, starts: int, waits: int, refused: int) -> None:
    async def main() -> None:
        async with hosted() as host:
            session = host.session("s", agent="slow")
            schedule = await session.schedule("tick", every_s=10.0, overlap=overlap)
            await asyncio.sleep(25.0)
            view = await schedule.info()
            assert (view.fired, view.refused) == (2 - refused, refused)
            assert len(await session.mailbox()) == waits
            events = await host.store.read_events(1, after=0, limit=1000)
            assert sum(event.kind == RunStarted.__struct_config__.tag for event in events) == starts
            await schedule.delete()
            await session.stop()

    run_virtual(main())


def test_a_full_mailbox_refuses_ticks_and_the_schedule_goes_on() -> None:
    async def main() -> None:
        settings = Settings(grace_s=1.0, abandon_after_s=1.0, drain_timeout_s=0.0, mailbox_limit=2)
        async with hosted(settings=settings) as host:
            schedule = await host.schedule("s", "tick", agent="slow", every_s=1.0)
            await asyncio.sleep(20.5)
            view = await schedule.info()
            assert (view.fired, view.refused, view.problem) == (3, 17, None)
            assert view.last is not None and view.last.outcome == "mailbox_full"
            assert host.statistics().counts["ticks_refused"] == 17
            assert not [one for one in host.incidents.newest if one.kind == "schedule"]
            await schedule.delete()
            await host.session("s").stop()

    run_virtual(main())


def test_a_schedule_for_an_agent_that_is_gone_stays_is_told_once_and_turns_in_no_loop() -> None:
    async def main() -> None:
        store = MemoryStore()
        async with hosted(store) as host:
            await host.schedule("s", "tick", agent="slow", every_s=60.0, schedule_id="orphan")
            await host.schedule("t", "tick", agent="echo", every_s=60.0)
        watched = Watched(store)
        async with hosted(watched, agents=(echo,)) as host:
            await asyncio.sleep(10 * 60.0 + 1.0)
            view = await host.find_schedule("orphan").info()
            assert view.state == "active" and view.fired == 0 and view.refused == 10
            assert view.problem is not None and "'slow'" in view.problem
            assert view.last is not None and view.last.outcome == "unknown_agent"
            told = [one.text for one in host.incidents.newest if one.kind == "schedule"]
            assert len(told) == 1 and "orphan" in told[0]
            assert watched.asked["fire_schedule"] == 20
            assert len(await accepted(host, "t")) == 10, "the others are not disturbed"
            assert await host.store.find_session("local", "s") is None
            with pytest.raises(UnknownAgent):
                await host.find_schedule("orphan").run_now()
        async with hosted(store) as host:
            await asyncio.sleep(60.0)
            view = await host.find_schedule("orphan").info()
            assert (view.fired, view.problem) == (1, None)
            await host.session("s").stop()

    run_virtual(main())


class Later:
    """The machine's clock, set so far forward."""

    def __init__(self, later_s: float = 0.0) -> None:
        self.later_s = later_s

    def now(self) -> float:
        return system_clock.now() + self.later_s

    def monotonic(self) -> float:
        return system_clock.monotonic() + self.later_s


def stored_body(path: str, schedule_id: str) -> Any:
    with closing(sqlite3.connect(path)) as database:
        return database.execute("SELECT body FROM schedule WHERE schedule_id = ?", (schedule_id,)).fetchone()[0]


def store_body(path: str, schedule_id: str, body: Any) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE schedule SET body = ? WHERE schedule_id = ?", (body, schedule_id))


EVERY = (b'"every_s":-5.0', b'"every_s":1e-300')
DEEP = b'{"unknown":' + b"[" * 5000 + b"]" * 5000 + b"}"
NEWER = (
    b'{"principal":"local","schedule_id":"x","revision":1,"spec":{"session":"s","text":"t","miss":"ask"},"progress":{}}'
)


@pytest.mark.parametrize("body", [NEWER, b"\x00\xff", b'{"principal": "\xff"}', b"", DEEP, *EVERY, None], ids=range(8))
def test_a_schedule_that_cannot_be_read_is_told_once_and_stops_no_other_one(body: bytes | None, tmp_path: Path) -> None:
    path = str(tmp_path / "host.db")

    async def main() -> None:
        async with hosted(SqliteStore(path), clock=Later()) as host:
            for key in ("broken", "whole", "late"):
                await host.schedule(key, f"tick {key}", every_s=3600.0, miss="delay", schedule_id=key)
        kept = stored_body(path, "broken")
        damaged = 5 if body is None else kept.replace(b'"every_s":3600.0', body) if body in EVERY else body
        assert damaged != kept
        store_body(path, "broken", damaged)
        clock = Later(2 * 3600.0)
        watched = Watched(SqliteStore(path))
        async with hosted(watched, clock=clock) as host:
            while len(watched.fired) < 3:
                await asyncio.sleep(0.01)
            assert [await accepted(host, key) for key in ("whole", "late")] == [["tick whole"], ["tick late"]]
            told = [one.text for one in host.incidents.newest if one.kind == "schedule"]
            assert len(told) == 1 and "'broken' of 'local' does not fire: damaged" in told[0]
            view, *others = await host.schedules(principal="local")
            assert (view.schedule_id, view.session, view.state, view.next_at) == ("broken", "broken", "broken", None)
            assert view.problem is not None and view.problem in told[0]
            assert [other.state for other in others] == ["active", "active"]
            asked = watched.asked["due_schedules"]
            for _ in range(50):
                await host.schedules()  # a turn of the store: whoever asks it again and again would come in between
            assert watched.asked["due_schedules"] == asked, "it turns in no loop"
            broken = host.find_schedule("broken")
            for change in (broken.pause, broken.resume, broken.run_now):
                with pytest.raises(ScheduleBroken, match="'broken' is broken") as refused:
                    await change()
                assert "save the schedule again" in refused.value.hint
            clock.later_s += 2 * 3600.0
            host.scheduler._wake()
            while len(watched.fired) < 6:
                await asyncio.sleep(0.01)
            assert len([one for one in host.incidents.newest if one.kind == "schedule"]) == 1, "it is told once"
        assert stored_body(path, "broken") == damaged, "it is for the version that wrote it"
        store_body(path, "broken", kept)
        async with hosted(SqliteStore(path), clock=Later(8 * 3600.0)) as host:
            while (await host.find_schedule("broken").info()).fired < 1:
                await asyncio.sleep(0.01)
            assert await accepted(host, "broken") == ["tick broken"], "it goes on where it can be read again"

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("end", ["put", "delete"])
def test_a_schedule_that_cannot_be_read_is_put_again_or_deleted(end: str, tmp_path: Path) -> None:
    path = str(tmp_path / "host.db")

    async def main() -> None:
        async with hosted(SqliteStore(path), clock=Later()) as host:
            schedule = await host.schedule("s", "tick", every_s=3600.0, schedule_id="one")
            await schedule.pause()
        store_body(path, "one", NEWER)
        async with hosted(SqliteStore(path), clock=Later()) as host:
            schedule = host.find_schedule("one")
            assert (await schedule.info()).state == "broken"
            if end == "delete":
                assert (await schedule.delete()).state == "broken"
                assert await host.schedules() == []
                return
            await host.schedule("s", "tock", every_s=60.0, schedule_id="one")
            view = await schedule.info()
            assert (view.state, view.text, view.problem) == ("active", "tock", None)
            assert view.created_at > 0.0
            assert (await schedule.run_now()).disposition == "started"
            assert await accepted(host, "s") == ["tock"]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_schedule_whose_session_was_deleted_is_told_and_goes_on_counting() -> None:
    async def main() -> None:
        async with hosted() as host:
            schedule = await host.schedule("s", "tick", every_s=60.0)
            await asyncio.sleep(70.0)
            await host.session("s").delete()
            await asyncio.sleep(180.0)
            view = await schedule.info()
            assert (view.fired, view.refused) == (1, 3)
            assert view.last is not None and view.last.outcome == "session_deleted"
            assert view.problem is not None
            assert len([one for one in host.incidents.newest if one.kind == "schedule"]) == 1

    run_virtual(main())


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"cron": "0 0 31 4 *"}, InvalidSchedule),
        ({"cron": "* * */20 * 1L"}, InvalidSchedule),
        ({"every_s": 0.0}, InvalidSchedule),
        ({}, InvalidSchedule),
        ({"every_s": 5.0, "agent": "nobody"}, UnknownAgent),
        ({"every_s": 5.0, "overlap": "sometimes"}, UnknownPolicy),
        ({"every_s": 5.0, "schedule_id": "a/b"}, InvalidKey),
        ({"every_s": 5.0, "schedule_id": ""}, InvalidKey),
        ({"every_s": 5.0, "text": "a\0b"}, InvalidRequest),
        ({"every_s": 5.0, "text": "\ud800"}, InvalidRequest),
        ({"every_s": 5.0, "text": None}, InvalidRequest),
        ({"every_s": 5.0, "text": "x" * 100_001}, InvalidRequest),
    ],
)
def test_what_cannot_be_a_schedule_is_refused_and_nothing_is_stored(
    bad: dict[str, Any], error: type[Exception]
) -> None:
    async def main() -> None:
        async with hosted() as host:
            with pytest.raises(error):
                await host.schedule("s", **{"text": "tick", **bad})
            assert await host.schedules() == []

    run_virtual(main())


def test_a_principal_has_so_many_schedules_and_a_host_that_drains_takes_none() -> None:
    async def main() -> None:
        async with hosted() as host:
            for n in range(50):
                await host.schedule("s", "tick", every_s=3600.0, schedule_id=f"s{n}")
            with pytest.raises(LimitExceeded):
                await host.schedule("s", "tick", every_s=3600.0)
            await host.schedule("s", "tick", every_s=3600.0, principal="anna")
            await host.drain()
            with pytest.raises(Draining):
                await host.schedule("s", "other", every_s=3600.0, schedule_id="s1")
            with pytest.raises(Draining):
                await host.find_schedule("s1").run_now()

    run_virtual(main())


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_while_nothing_is_due_the_store_is_not_asked() -> None:
    async def main() -> None:
        watched = Watched(MemoryStore())
        async with hosted(watched) as host:
            await host.schedule("s", "tick", every_s=86400.0)
            await asyncio.sleep(1.0)
            before = dict(watched.asked)
            await asyncio.sleep(80_000.0)
            assert dict(watched.asked) == before
            await asyncio.sleep(6400.0)
            assert watched.asked["fire_schedule"] == 1

    run_virtual(main())


def test_a_schedule_that_is_put_while_the_host_looks_fires_in_its_time() -> None:
    """Between the store's answer to "what is next?" and its taking effect there is no gap."""

    class Lagging(Watched):
        async def next_schedule(self) -> float | None:
            read: float | None = await self._store.next_schedule()
            await asyncio.sleep(0)  # as an answer on its way from a reader's thread
            return read

    async def scenario() -> None:
        async with hosted(Lagging(MemoryStore(yielding=True))) as host:
            await host.schedule("s", "often", every_s=5.0, agent="quick")
            putting = [
                asyncio.ensure_future(host.schedule(f"k{n}", "once", every_s=1.0 + n, agent="quick", max_runs=1))
                for n in range(3)
            ]
            for put in putting:
                await put
            await asyncio.sleep(4.0)
            for n in range(3):
                view = await (await putting[n]).info()
                assert (view.fired, view.state) == (1, "finished")
                assert view.last is not None and view.last.at - (view.last.tick_at or 0.0) < 0.1

    explore(scenario, schedules=1000, seed=2)
    explore(scenario, schedules=40, chooser="pct", seed=2)


def test_a_clock_that_jumps_is_noticed_and_no_tick_is_fired_twice() -> None:
    async def main() -> None:
        clock = Jumping()
        async with hosted(clock=clock) as host:
            skip = await host.schedule("skip", "tick", every_s=600.0, agent="quick")
            burst = await host.schedule("burst", "tick", every_s=600.0, miss="burst", agent="quick")
            await asyncio.sleep(601.0)
            clock.wrong_by_s = 6000.0
            await asyncio.sleep(LOOK_EVERY_S + 1)
            assert [(await one.info()).fired for one in (skip, burst)] == [2, 11]
            assert [(await one.info()).missed for one in (skip, burst)] == [9, 0]
            clock.wrong_by_s = 4000.0
            await asyncio.sleep(1900.0)
            assert [(await one.info()).fired for one in (skip, burst)] == [2, 11], "it waits until the clock is there"
            await asyncio.sleep(700.0)
            assert [(await one.info()).fired for one in (skip, burst)] == [3, 12]
            clock.wrong_by_s = 10 * 365 * 86400.0
            await asyncio.sleep(LOOK_EVERY_S + 1)
            wrong = await skip.info()
            clock.wrong_by_s = 4000.0
            await asyncio.sleep(600.0 + LOOK_EVERY_S)
            view = await skip.info()
            assert view.fired == wrong.fired + 1, "ten years are not waited for"
            assert view.missed == wrong.missed

    run_virtual(main())


def test_what_a_host_missed_while_it_was_down_follows_the_miss_policy() -> None:
    async def main() -> None:
        store = MemoryStore()
        async with hosted(store) as host:
            for miss in ("skip", "delay", "burst"):
                await host.schedule(miss, "tick", every_s=3600.0, miss=miss, schedule_id=miss)
            await asyncio.sleep(3700.0)
        await asyncio.sleep(5 * 3600.0)
        async with hosted(store) as host:
            await asyncio.sleep(1.0)
            seen = {view.schedule_id: (view.fired, view.missed) for view in await host.schedules()}
            assert seen == {"skip": (1, 5), "delay": (2, 4), "burst": (6, 0)}

    run_virtual(main())


def test_a_host_that_drains_fires_nothing_more() -> None:
    async def main() -> None:
        store = MemoryStore()
        watched = Watched(store)
        host = hosted(watched)
        await host.start()
        await host.schedule("s", "tick", every_s=10.0)
        await asyncio.sleep(15.0)
        await host.drain()
        fired = watched.asked["fire_schedule"]
        await asyncio.sleep(100.0)
        assert watched.asked["fire_schedule"] == fired == 1
        await host.close()

    run_virtual(main())


def test_principals_take_turns_when_more_is_due_than_is_fired_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.host.scheduler.BATCH", 4)

    async def main() -> None:
        watched = Watched(MemoryStore())
        async with hosted(watched) as host:
            for n in range(40):
                await host.schedule(f"many{n}", "tick", every_s=60.0, agent="quick")
            await host.schedule("few", "tick", every_s=60.0, agent="quick", principal="anna")
            await asyncio.sleep(61.0)
            order = [key for key, _, fired in watched.fired if fired.outcome == "fired"]
            assert len(order) == 41
            assert order.index("few") < 4

    run_virtual(main())


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_ticks(watched: Watched, views: list[ScheduleView]) -> None:
    """No tick of a schedule that is there to the end was fired twice, and what is fired was counted."""
    fired = Counter[str]()
    seen: set[tuple[str, float]] = set()
    for key, _, answer in watched.fired:
        if answer.outcome == "fired":
            fired[key] += 1
            assert answer.schedule is not None and answer.schedule.last is not None
            tick_at = answer.schedule.last.tick_at
            if tick_at is not None:
                assert (key, tick_at) not in seen, "a tick was fired twice"
                seen.add((key, tick_at))
    for view in views:
        assert view.fired == fired[view.session]


@pytest.mark.parametrize("fate", ["done", "lost", "refused"])
def test_no_order_of_firing_pausing_replacing_deleting_and_restarting_fires_a_tick_twice(fate: Fate) -> None:
    """Also where the store's answers to every other firing are lost, or the firing is refused."""

    async def scenario() -> None:
        watched = Watched(MemoryStore(yielding=True))
        firings = 0

        def decide(verb: str) -> Fate:
            nonlocal firings
            firings += verb == "fire_schedule"
            return fate if verb == "fire_schedule" and firings % 2 else "done"

        store = Unreliable(decide, watched)  # type: ignore[arg-type]

        async def perhaps(doing: Any) -> None:
            try:
                await doing
            except HoldfastError:
                pass

        async with hosted(store) as host:
            for key in ("kept", "gone"):
                await host.schedule(key, "tick", every_s=1.0, agent="quick", schedule_id=key)
            await asyncio.sleep(1.0)  # just when they are due
            kept, gone = host.find_schedule("kept"), host.find_schedule("gone")
            doings = [
                asyncio.ensure_future(perhaps(doing))
                for doing in (
                    kept.run_now(),
                    kept.pause(),
                    host.schedule("kept", "other", every_s=1.0, agent="quick", schedule_id="kept"),
                    gone.delete(),
                )
            ]
            for doing in doings:
                await doing
            await kept.resume()
            await asyncio.sleep(1.0)
        async with hosted(store) as host:
            await asyncio.sleep(3.5)
            check_ticks(watched, await host.schedules())
            said = await accepted(host, "kept")
            view = await host.find_schedule("kept").info()
            assert len(said) == view.fired
            with pytest.raises(UnknownSchedule):
                await host.find_schedule("gone").info()

    explore(scenario, schedules=60, seed=3, max_steps=60_000)
    explore(scenario, schedules=30, chooser="pct", seed=4, max_steps=60_000)


@pytest.mark.parametrize("fate", ["refused", "lost"])
def test_a_store_that_fails_loses_and_doubles_no_tick(fate: Any) -> None:
    async def main(seed: int) -> None:
        chance = random.Random(seed).random
        watched = Watched(MemoryStore())
        store = Unreliable(failing_at_random(chance, chance=0.3, fate=fate, times=20), watched)  # type: ignore[arg-type]
        async with hosted(store) as host:
            while True:
                try:
                    schedule = await host.schedule("s", "tick", every_s=10.0, schedule_id="s", miss="burst")
                    break
                except StorageError:
                    pass
            await asyncio.sleep(600.0)
            view = await schedule.info()
            assert view.missed == 0 and view.refused == 0
            assert 59 <= view.fired <= 60
            assert len(await accepted(host, "s")) == view.fired
            check_ticks(watched, [view])
            assert store.failed >= 1
            assert host.admission.statistics().running == 0

    for seed in range(5):
        run_virtual(main(seed))


def test_a_look_that_moves_nothing_is_not_repeated_at_once() -> None:
    """A store whose clock is behind, say: it lists what it does not find due."""

    class Behind(Watched):
        async def due_schedules(self, *, now: float, limit: int) -> list[DueSchedule]:
            self.asked["due_schedules"] += 1
            return list(await self._store.due_schedules(now=now + 100.0, limit=limit))

    async def main() -> None:
        watched = Behind(MemoryStore())
        async with hosted(watched) as host:
            await host.schedule("s", "tick", every_s=10.0)
            await asyncio.sleep(60.0)
            assert watched.asked["due_schedules"] < 200

    run_virtual(main())


# ── a year ───────────────────────────────────────────────────────────────────────────────────────────────────────────

ZONES = ("Europe/Berlin", "America/New_York", "UTC", "America/Santiago")
LINES: dict[Miss, str] = {"skip": "30 2 * * *", "burst": "0 9 * * *", "delay": "15 */3 * * *"}


def expected(miss: Miss, zone: str, start: float, end: float) -> int:
    """How many ticks a line has after one time and up to another, told by the calendar."""
    tz = ZoneInfo(zone)
    if miss == "delay":  # its hour begins with a star: it follows the clock
        first = int(start // 900 + 1) * 900
        times = (datetime.fromtimestamp(time, tz) for time in range(first, int(end) + 1, 900))
        return sum(time.minute == 15 and time.hour % 3 == 0 for time in times)
    hour, minute = (2, 30) if miss == "skip" else (9, 0)
    count = 0
    day = datetime.fromtimestamp(start, tz).replace(hour=0, minute=0, second=0, microsecond=0)
    while day.timestamp() <= end:
        time = day.replace(hour=hour, minute=minute, fold=0).timestamp()
        back = datetime.fromtimestamp(time, tz)
        if (back.hour, back.minute) != (hour, minute):  # a time that the clock leaves out: right after the gap
            time -= 1800.0  # in these zones a gap begins at 2:00
        count += start < time <= end
        day += timedelta(days=1)
    return count


async def live_through(days: float, began_at: float, seed: int) -> None:
    """Lines in four zones; the host restarts, the store loses answers, the clock is set, and stays wrong."""
    settings = Settings(drain_timeout_s=0.0, evict_after_s=40_000.0, event_retention_s=1e9)
    chance, loop = random.Random(seed), asyncio.get_running_loop()
    clock = Jumping()
    clock.wrong_by_s = began_at - clock.now()
    watched = Watched(MemoryStore())
    lose = failing_at_random(chance.random, chance=0.01, fate="lost", times=10_000)
    lossy = Unreliable(lose, watched)  # type: ignore[arg-type]
    end_s = loop.time() + days * 86400.0
    async with hosted(watched, clock=clock, settings=settings) as host:
        for zone in ZONES:
            for miss, cron in LINES.items():
                key = f"{miss} {zone.replace('/', '-')}"
                await host.schedule(key, "tick", cron=cron, timezone=zone, miss=miss, schedule_id=key)
        await host.schedule("even", "tick", every_s=7200.0, jitter_s=600.0, schedule_id="even")
    newest = clock.now()
    while loop.time() < end_s:
        async with hosted(lossy, clock=clock, settings=settings):
            await asyncio.sleep(60.0 + 11 * 86400.0 * chance.random() ** 4)
            newest = max(newest, clock.now())
            clock.wrong_by_s += chance.choice([0.0, 0.0, 3000.0, -3000.0, 86400.0, -4000.0])
            await asyncio.sleep(60.0 + 3 * 86400.0 * chance.random())
        await asyncio.sleep(chance.choice([1.0, 60.0, 7200.0, 2 * 86400.0]))
    async with hosted(watched, clock=clock, settings=settings) as host:
        await asyncio.sleep(4 * 3600.0)
        newest = max(newest, clock.now())
        views = await host.schedules(limit=100)
        assert len(views) == 13
        check_ticks(watched, views)
        for view in views:
            assert len(await accepted(host, view.session)) == view.fired
            assert (view.problem, view.refused, view.state) == (None, 0, "active")
            assert view.next_at is not None and view.next_at > newest
            gone = view.fired + view.missed
            if view.cron is None:
                assert abs(gone - (newest - began_at) / 7200.0) <= 2
                continue
            assert gone == expected(view.miss, view.timezone, began_at, newest), view.schedule_id
            assert view.fired
            assert view.missed == 0 or view.miss != "burst"


def test_weeks_of_clock_changes_with_restarts_and_clocks_that_jump_fire_each_tick_once() -> None:
    run_virtual(live_through(45, 1_772_323_200.0, 1), max_steps=5_000_000)  # from 1 March 2026


@pytest.mark.nightly
def test_a_year_with_restarts_and_clocks_that_jump_fires_each_tick_once() -> None:
    run_virtual(live_through(366, 1_750_000_000.0, 0), max_steps=20_000_000)
