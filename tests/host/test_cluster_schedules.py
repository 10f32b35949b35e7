"""Schedules of several hosts on one PostgreSQL: every host tries each due tick, and exactly one of them fires it."""

import asyncio
from collections import Counter
from typing import Any

import pytest

import holdfast
from holdfast import failpoints
from holdfast.events import MessageAccepted
from holdfast.protocol.events import decode_event
from holdfast.protocol.schedules import ScheduleSpec
from holdfast.storage.port import Fire, Fired, PutSchedule, Send
from tests.host.test_cluster import done, hosts, run
from tests.storage.postgres.test_races import blocked, nodes

SESSIONS = 8
TICKS = 3


@pytest.fixture(autouse=True)
def no_work_yet() -> None:
    done.clear()


def watch_fires(host: holdfast.Host, monkeypatch: pytest.MonkeyPatch) -> list[Fired]:
    """The answers that this host gets whenever it tries to fire a schedule."""
    answers: list[Fired] = []
    fire = host.store.fire_schedule

    def watched(request: Fire) -> asyncio.Future[Fired]:
        fired = fire(request)
        fired.add_done_callback(lambda each: answers.append(each.result()))
        return fired

    monkeypatch.setattr(host.store, "fire_schedule", watched)
    return answers


async def accepted(store: Any, principal: str, key: str) -> list[str]:
    """The ids of the messages that a session has accepted."""
    found = await store.find_session(principal, key)
    events = [decode_event(event) for event in await store.read_events(found[0], after=0, limit=1000)]
    return [event.message_id for event in events if isinstance(event, MessageAccepted)]


@pytest.mark.parametrize("signals", ["on", "off"])
def test_each_tick_is_fired_once_by_whichever_host(
    postgres_url: str, signals: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with hosts(f"{postgres_url}&signals={signals}", cluster_poll_s=0.05) as (one, two):
            answers = [watch_fires(host, monkeypatch) for host in (one, two)]
            made = [
                await one.session(f"s{n}").schedule(
                    f"tick {n}", every_s=1.0, initial_delay_s=1.0, max_runs=TICKS, miss="burst"
                )
                for n in range(SESSIONS)
            ]
            for schedule in made:
                while (await schedule.info()).state != "finished":
                    await asyncio.sleep(0.02)
            fired = [answer for each in answers for answer in each if answer.outcome == "fired"]
            assert len(fired) == SESSIONS * TICKS
            for n, schedule in enumerate(made):
                view = await schedule.info()
                assert (view.fired, view.missed, view.refused) == (TICKS, 0, 0)
                ids = await accepted(two.store, "local", f"s{n}")
                own = [each for each in fired if each.schedule and each.schedule.schedule_id == schedule.schedule_id]
                assert sorted(ids) == sorted(each.sent.message_id for each in own if each.sent)
                ticks = sorted(
                    each.schedule.last.tick_at or 0.0 for each in own if each.schedule and each.schedule.last
                )
                assert [tick - ticks[0] for tick in ticks] == pytest.approx([0.0, 1.0, 2.0])
            while sum(done.values()) < SESSIONS * TICKS:
                await asyncio.sleep(0.005)
            assert done == Counter({f"tick {n}": TICKS for n in range(SESSIONS)})
            counted = [host.statistics().counts.get("ticks_fired", 0) for host in (one, two)]
            assert sum(counted) == SESSIONS * TICKS
            assert all(each for each in answers), "both hosts have tried"

    run(main)


def fire_of(due: Any, number: int, at: float) -> Fire:
    spec = due.spec
    message = Send(
        principal=due.principal, key=spec.session, agent=None, default_agent="demo", message_id=f"m{number}",
        content=spec.text, policy=spec.overlap, at=at, run_id=f"r{number}",
    )  # fmt: skip
    return Fire(schedule=due.schedule, revision=due.revision, send=message, is_shared=True)


@pytest.mark.parametrize("is_new", [True, False], ids=["new session", "existing session"])
def test_a_tick_that_two_hosts_fire_at_the_same_moment_is_sent_by_one(postgres_url: str, is_new: bool) -> None:
    """The second transaction begins before the first one commits, and waits for it."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with nodes(postgres_url, 2) as (first, second):
            spec = ScheduleSpec(session="k", text="tick", every_s=10.0)
            put = PutSchedule(principal="p", schedule_id="s", spec=spec, at=100.0, limit=9, stored_limit=10**6)
            await first.put_schedule(put)
            before = 0
            if not is_new:
                (due,) = await first.due_schedules(now=110.0, limit=9)
                assert (await first.fire_schedule(fire_of(due, 0, 110.0))).outcome == "fired"
                before = 1
            at = 110.0 + 10.0 * before
            (due,) = await first.due_schedules(now=at, limit=9)
            assert await second.due_schedules(now=at, limit=9) == (due,)
            late: list[asyncio.Future[Fired]] = []
            begun: list[None] = []

            def at_commit(name: str) -> None:
                if name == "postgres.before_commit" and not begun:
                    begun.append(None)
                    loop.call_soon_threadsafe(lambda: late.append(second.fire_schedule(fire_of(due, 2, at))))
                    blocked(postgres_url)

            with failpoints.attend(at_commit):
                fired = await first.fire_schedule(fire_of(due, 1, at))
                lost = await late[0]
            assert (fired.outcome, lost.outcome, lost.sent) == ("fired", "changed", None)
            assert (await accepted(second, "p", "k"))[before:] == ["m1"]
            _, view = await second.schedule("p", "s")
            assert (view.fired, view.next_at) == (before + 1, at + 10.0)

    run(main)
