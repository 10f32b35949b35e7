"""Several hosts on one PostgreSQL: any of them serves any session, with signals and without.

A host here is a node of its own, with its own store. Hosts that are killed or stopped are processes of their own
(`tests/host/cluster_node.py`).
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import psycopg
import pytest

import holdfast
from holdfast.clock import system_clock
from holdfast.errors import SessionAgentMissing
from holdfast.events import Gap, MessageAccepted, RunFinished, TextDelta
from holdfast.host import remote_stops
from holdfast.host.run_history import read_run_history
from holdfast.host.run_launcher import RunLauncher
from holdfast.protocol.stopping import Cause
from holdfast.settings import Settings
from holdfast.storage.port import Fire, Send, StopRequest
from holdfast.storage.postgres import PostgresStore

done: Counter[str] = Counter()


@holdfast.agent(replayable=True)
async def worker(run: holdfast.Run) -> str:
    for message in run.messages:
        done[message.content] += 1
    if run.text == "wait":
        await run.interrupt.wait()
    if run.text == "stubborn":
        try:
            await run.interrupt.wait()
        finally:
            await asyncio.shield(asyncio.sleep(60))
    if run.text == "ask":
        return f"told: {(await run.ask_user('who?')).text}"
    if run.text == "steps":
        while not (steered := await run.take_steering()):
            await run.emit("x")
            await asyncio.sleep(0.005)
        return f"steered by {steered[0].content}"
    if run.text == "stream":
        for n in range(40):
            await run.emit(f"{n} ")
            await asyncio.sleep(0.005)
    return f"did {run.text}"


@holdfast.agent
async def other_agent(run: holdfast.Run) -> str:
    return f"the other did {run.text}"


@pytest.fixture(autouse=True)
def no_work_yet() -> None:
    done.clear()


@pytest.fixture(params=["with signals", "without signals"])
def url(postgres_url: str, request: pytest.FixtureRequest) -> str:
    return postgres_url if request.param == "with signals" else f"{postgres_url}&signals=off"


@asynccontextmanager
async def hosts(
    url: str, count: int = 2, *, agents: Any = (worker,), **settings: Any
) -> AsyncIterator[list[holdfast.Host]]:
    """Hosts with the same agent; poll soon if there are no signals, and too late for the test if there are."""
    poll_s = 0.05 if "signals=off" in url else 60.0
    chosen = Settings(**{"cluster_poll_s": poll_s, "grace_s": 1.0, "drain_timeout_s": 0.2, **settings})
    async with AsyncExitStack() as opened:
        made = []
        for _ in range(count):
            store = PostgresStore(url, lease_s=20.0)
            made.append(await opened.enter_async_context(holdfast.Host(agents=agents, store=store, settings=chosen)))
        for host in made:
            cluster = host.store.cluster
            assert cluster is not None
            while "signals=off" not in url and cluster.signals.problem is not None:
                await asyncio.sleep(0.005)
        yield made


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main(), 40))


async def started(host: holdfast.Host, key: str, text: str) -> str:
    """Send a message whose run starts on this host; return the id of the run, once its agent works."""
    receipt = await host.session(key).send(text)
    assert receipt.disposition == "started"
    while not done[text]:
        await asyncio.sleep(0.001)
    return receipt.run_id or ""


async def forgotten(holder: holdfast.Host) -> None:
    """Return once the host has heard of the commit of its last run, which other hosts may read before."""
    while holder.live:
        await asyncio.sleep(0.001)


def end_lease(url: str, host: holdfast.Host) -> None:
    """The lease of a host is over, though the host lives."""
    cluster = host.store.cluster
    assert cluster is not None
    with psycopg.connect(url, autocommit=True) as connection:
        over = "UPDATE node SET lease_until = clock_timestamp() - interval '1 s' WHERE epoch = %s"
        connection.execute(over, [cluster.epoch])


def sent_by_hand(text: str) -> Send:
    """A message that is sent to a store, past its host."""
    return Send(
        principal="local",
        key="alice",
        agent=None,
        default_agent="worker",
        message_id="m1",
        content=text,
        policy="queue",
        at=1.0,
        run_id="r_by_hand",
    )


def test_each_message_runs_once_wherever_it_is_sent_and_is_answered_there(url: str) -> None:
    async def main() -> None:
        async with hosts(url, 3) as nodes:
            asked = [(nodes[(n + n // 5) % 3].session(f"s{n % 5}"), f"m{n}") for n in range(60)]
            answers = await asyncio.gather(*(session.ask(text) for session, text in asked))
            assert sorted(done.values()) == [1] * 60
            assert all(answer.startswith("did ") for answer in answers)
            for n in range(5):
                said = [[entry.content for entry in await node.session(f"s{n}").transcript()] for node in nodes]
                assert said[0] == said[1] == said[2]
            broken = [node.statistics().promises[name].broken for node in nodes for name in ("P4", "P5", "P7", "P9")]
            assert not any(broken)

    run(main)


def test_an_interrupt_from_any_host_returns_the_true_receipt_of_the_holder(url: str) -> None:
    async def main() -> None:
        async with hosts(url) as (holder, other):
            run_id = await started(holder, "alice", "wait")
            receipt = await other.session("alice").interrupt("enough")
            assert (receipt.scope, receipt.outcome, receipt.proof) == (run_id, "gone", "observed")
            assert receipt.stopped.tasks > 0, "which only the holder can know"
            assert (receipt.cause.kind, receipt.cause.reason) == ("user", "enough")
            await forgotten(holder)
            again = await other.session("alice").interrupt("once more")
            assert again.cause.reason == "nothing was running"

    run(main)


def test_the_grace_period_of_an_interrupt_holds_on_the_host_that_has_the_run(url: str) -> None:
    async def main() -> None:
        async with hosts(url, grace_s=30.0) as (holder, other):
            await started(holder, "alice", "stubborn")
            receipt = await other.session("alice").interrupt("enough", grace_s=0.0)
            assert receipt.elapsed_s < 10
            assert receipt.outcome in ("gone", "quarantined")

    run(main)


def test_a_host_takes_over_as_many_runs_as_it_has_slots_and_leaves_the_others(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = [f"s{n}" for n in range(5)]

    async def main() -> None:
        async with (
            hosts(postgres_url, 1) as (holder,),
            hosts(postgres_url, 1),
            hosts(postgres_url, 1, max_runs=2) as (other,),
        ):
            for key in sessions:
                await holder.session(key).send("wait")
            while done["wait"] < len(sessions):
                await asyncio.sleep(0.005)
            most = 0
            start = RunLauncher.start

            def counted(launcher: RunLauncher, *args: Any, **named: Any) -> Any:
                nonlocal most
                started = start(launcher, *args, **named)
                most = max(most, len(other.live))
                return started

            monkeypatch.setattr(RunLauncher, "start", counted)
            assert holder.store.cluster is not None
            holder.store.cluster.signals.listen(lambda _: None, lambda _: None)  # as if it were frozen
            end_lease(postgres_url, holder)
            await other.parts.recovery.take_over()
            while done["wait"] < 2 * len(sessions):
                await asyncio.sleep(0.005)
            assert most == 2
            for key in sessions:
                assert (await other.session(key).interrupt("enough")).outcome == "gone"

    run(main)


@pytest.mark.parametrize("verb", ["interrupt", "stop"])
def test_a_second_stop_at_another_host_shortens_the_grace_period(url: str, verb: str) -> None:
    async def main() -> None:
        async with hosts(url, grace_s=30.0) as (holder, other):
            run_id = await started(holder, "alice", "stubborn")
            first = asyncio.ensure_future(other.session("alice").interrupt("enough"))
            (run,) = holder.live.values()
            while not run.scope.interrupt.triggered:
                await asyncio.sleep(0.005)
            second = await getattr(other.session("alice"), verb)("now", grace_s=0.0)
            receipt = second if verb == "interrupt" else second.receipt
            assert (receipt.scope, receipt.cause.reason) == (run_id, "enough")
            assert (await first).elapsed_s < 10
            kinds = [event.kind for event in await holder.store.read_events(run.actor.session, after=0, limit=99)]
            assert kinds.count("run.stopping") == 1

    run(main)


def test_a_late_request_to_shorten_the_grace_period_of_a_run_leaves_the_next_run_alone(postgres_url: str) -> None:
    async def main() -> None:
        async with hosts(postgres_url) as (holder, other):
            await started(holder, "alice", "wait")
            (run,) = holder.live.values()
            cause = Cause(kind="user", reason="late", origin="", at=1.0)
            late = msgspec.json.encode(StopRequest("alice", cause, 99, 0.0, "r_before"))
            cluster = other.store.cluster
            assert cluster is not None
            (request,) = await cluster.ask(run.actor.session, "interrupt", late)
            while not (await cluster.replies([request]))[0].is_gone:  # once it was carried out, it is dropped
                await asyncio.sleep(0.005)
            assert not run.scope.interrupt.triggered

    run(main)


def test_a_stop_and_a_deletion_from_another_host_end_the_run(url: str) -> None:
    async def main() -> None:
        async with hosts(url) as (holder, other):
            await started(holder, "alice", "wait")
            waiting = await other.session("alice").send("waits")
            stopped = await other.session("alice").stop("enough")
            assert stopped.receipt.outcome == "gone"
            assert [message.message_id for message in stopped.withdrawn] == [waiting.message_id]
            done.clear()
            await started(holder, "alice", "wait")
            deleted = await other.session("alice").delete()
            assert (deleted.receipt.outcome, deleted.receipt.proof) == ("gone", "observed")
            assert deleted.receipt.stopped.tasks > 0
            await forgotten(holder)

    run(main)


def test_a_message_that_interrupts_reaches_the_run_on_another_host(url: str) -> None:
    async def main() -> None:
        async with hosts(url) as (holder, other):
            await started(holder, "alice", "wait")
            assert await other.session("alice").ask("next", policy="interrupt") == "did next"
            done.clear()
            await started(holder, "bob", "wait")
            assert await other.session("bob").ask("instead", policy="rollback") == "did instead"
            assert [entry.content for entry in await holder.session("bob").transcript()] == ["instead", "did instead"]

    run(main)


def test_steering_and_answers_reach_a_run_on_another_host(url: str) -> None:
    async def main() -> None:
        async with hosts(url) as (holder, other):
            first = await holder.session("alice").send("steps")
            await other.session("alice").send("this way", policy="steer")
            assert (await other.session("alice").wait(first.message_id)).text.endswith("steered by this way")
            asking = await holder.session("bob").send("ask")
            while not (questions := await other.session("bob").questions()):
                await asyncio.sleep(0.005)
            await other.session("bob").answer(questions[0], "bob")
            assert (await holder.session("bob").wait(asking.message_id)).text == "told: bob"

    run(main)


def test_a_stream_at_any_host_has_every_event_of_the_run_in_order(url: str) -> None:
    async def main() -> None:
        async with hosts(url) as (holder, other):
            waiting = asyncio.ensure_future(anext(other.session("alice").events()))  # before the session exists
            await asyncio.sleep(0)
            receipt = await holder.session("alice").send("stream")
            events = [event async for event in other.session("alice").events(follow=receipt.message_id)]
            assert [event.seq for event in events if not isinstance(event, Gap)] == list(range(1, len(events) + 1))
            text = "".join(event.text for event in events if isinstance(event, TextDelta))
            assert text == "".join(f"{n} " for n in range(40)) + "did stream"
            assert [event.status for event in events if isinstance(event, RunFinished)] == ["completed"]
            assert isinstance(await waiting, MessageAccepted)

    run(main)


def test_sessions_that_one_host_has_no_room_for_run_on_another(url: str) -> None:
    async def main() -> None:
        async with hosts(url, max_runs=1) as (full, free):
            await started(full, "alice", "wait")
            receipt = await full.session("bob").send("elsewhere")
            assert receipt.disposition == "queued"
            assert (await full.session("bob").wait(receipt.message_id)).text == "did elsewhere"
            assert free.statistics().counts["runs_started"] == 1

    run(main)


def test_a_host_claims_only_runs_of_agents_that_it_has(url: str) -> None:
    async def main() -> None:
        async with hosts(url, 1) as (one,), hosts(url, 1, agents=[other_agent]) as (two,):
            first = await started(one, "alice", "wait")
            with pytest.raises(SessionAgentMissing):
                await two.session("alice").send("not here")
            moved = await two.session("alice").send("over there", agent="other_agent")
            assert moved.disposition == "queued"
            await two.session("alice").interrupt("enough", run_id=first)
            assert (await one.session("alice").wait(moved.message_id)).text == "the other did over there"
            assert not done["over there"]

    run(main)


def test_a_drain_hands_its_runs_to_the_other_hosts(url: str) -> None:
    async def main() -> None:
        async with hosts(url) as (leaving, staying):
            run_id = await started(leaving, "alice", "wait")
            waiting = await staying.session("alice").send("afterwards")
            drained = await leaving.drain()
            assert (drained.suspended, drained.orphans) == ((run_id,), ())
            while run_id not in staying.live:
                await asyncio.sleep(0.005)
            receipt = await staying.session("alice").interrupt("enough")
            assert receipt.outcome == "gone"
            assert (await staying.session("alice").wait(waiting.message_id)).text == "did afterwards"

    run(main)


def test_a_claim_whose_reply_was_lost_for_good_is_found_by_its_holder(postgres_url: str) -> None:
    async def main() -> None:
        store = PostgresStore(postgres_url, lease_s=1.0)
        async with holdfast.Host(worker, store=store) as host:
            claimed = await store.send(sent_by_hand("hello"))
            assert claimed.disposition == "started"
            assert (await host.session("alice").wait("m1", timeout_s=20)).text == "did hello"
            assert done["hello"] == 1
            assert host.statistics().counts["runs_reclaimed"] == 1

    run(main)


def test_an_interrupt_during_a_take_over_is_answered_when_the_run_has_ended(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        begun, released = loop.create_future(), loop.create_future()

        async def slowly(*arguments: Any) -> Any:
            begun.set_result(None)
            await released
            return await read_run_history(*arguments)

        monkeypatch.setattr("holdfast.host.recovery.read_run_history", slowly)
        async with hosts(postgres_url, 1) as (host,):
            gone = PostgresStore(postgres_url)
            await gone.open(node_id="gone", at=1.0)
            await gone.send(sent_by_hand("wait"))
            await gone.close()
            await begun
            stopping = asyncio.ensure_future(host.session("alice").interrupt("enough"))
            while (await host.session("alice").info()).state != "stopping":
                await asyncio.sleep(0.005)
            cluster = host.store.cluster
            assert cluster is not None
            await cluster.held()  # a write after the claim with which the stop looks for the run
            for _ in range(10):
                await asyncio.sleep(0)
            assert not stopping.done()
            released.set_result(None)
            receipt = await stopping
            assert (receipt.outcome, receipt.cause.reason) == ("gone", "enough")
            assert not host.live

    run(main)


def test_hosts_that_leave_workspaces_behind_are_warned_of(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(holdfast.Agent, "executes", True)

    async def main() -> None:
        async with hosts(postgres_url, 1):
            assert "workspace" not in caplog.text
            async with hosts(postgres_url, 1):
                while "leaves its workspace behind" not in caplog.text:
                    await asyncio.sleep(0.005)

    run(main)


@pytest.mark.parametrize("stops", [1, 50])
def test_stops_elsewhere_wait_as_long_as_the_holder_may_take_and_share_their_reads(
    postgres_url: str, stops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_stops, "_MARGIN_S", -40.0)  # without the time of a take-over
    reads = 0

    @holdfast.agent
    async def slow(run: holdfast.Run) -> None:
        done["slow"] += 1
        try:
            await run.interrupt.wait()
        finally:
            await asyncio.sleep(0.5)  # longer than the default grace period, shorter than the caller's

    async def main() -> None:
        async with hosts(postgres_url, agents=[slow], grace_s=0.05, abandon_after_s=0.05) as (holder, other):
            await started(holder, "alice", "slow")
            read = other.store.run

            def counted(session: int, run_id: str) -> Any:
                nonlocal reads
                reads += 1
                return read(session, run_id)

            monkeypatch.setattr(other.store, "run", counted)
            session = other.session("alice")
            receipts = await asyncio.gather(*(session.interrupt("enough", grace_s=20.0) for _ in range(stops)))
            assert {(receipt.outcome, receipt.forced) for receipt in receipts} == {("gone", ())}
            assert reads < 25

    run(main)


def test_a_schedule_waits_for_a_host_that_has_the_agent_of_its_session(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: asyncio.Queue[str] = asyncio.Queue()

    async def main() -> None:
        async with hosts(postgres_url, 1, agents=[other_agent], cluster_poll_s=0.05) as (stranger,):
            fire = stranger.store.fire_schedule

            def seen(request: Fire) -> Any:
                fired = fire(request)
                fired.add_done_callback(lambda done: outcomes.put_nowait(done.result().outcome))
                return fired

            monkeypatch.setattr(stranger.store, "fire_schedule", seen)
            async with hosts(postgres_url, 1) as (owner,):
                await owner.session("alice").ask("hello")
            await stranger.session("alice").schedule("tick", every_s=3600.0, initial_delay_s=0.0)
            assert await outcomes.get() == "waits"
            (schedule,) = await stranger.schedules()
            assert schedule.last is None

    run(main)


class Shifted:
    """A clock that shows another time of day."""

    def __init__(self, by_s: float) -> None:
        self.by_s = by_s

    def now(self) -> float:
        return system_clock.now() + self.by_s

    def monotonic(self) -> float:
        return system_clock.monotonic()


@pytest.mark.parametrize("by_s", [3600.0, -3600.0], ids=["an hour ahead", "an hour behind"])
def test_hosts_whose_clocks_differ_serve_each_others_sessions(postgres_url: str, by_s: float) -> None:
    async def main() -> None:
        chosen = Settings(cluster_poll_s=0.1, grace_s=1.0, drain_timeout_s=0.2)
        stores = [PostgresStore(postgres_url, lease_s=1.0) for _ in range(2)]
        async with holdfast.Host(agents=[worker], store=stores[0], settings=chosen) as right:
            wrong = holdfast.Host(agents=[worker], store=stores[1], settings=chosen, clock=Shifted(by_s))
            async with wrong:
                for holder, other, key in ((right, wrong, "a"), (wrong, right, "b")):
                    await started(holder, key, "wait")
                    waiting = await other.session(key).send(f"after {key}")
                    await asyncio.sleep(1.5)  # the lease must not seem to end
                    receipt = await other.session(key).interrupt("enough")
                    assert (receipt.outcome, receipt.proof) == ("gone", "observed")
                    assert (await other.session(key).wait(waiting.message_id)).text == f"did after {key}"
                    done.clear()
                # What the host with the other clock accepted, and did not come to, is due for the others at once.
                await wrong.session("c").send("later", policy="collect", quiet_s=2.0)
            while not done["later"]:
                await asyncio.sleep(0.01)
            for host in (right, wrong):
                assert host.statistics().counts["runs_taken_over"] == 0
                assert not any(promise.broken for promise in host.statistics().promises.values())

    run(main)


def test_an_interrupt_is_found_among_events_that_were_read_because_a_reply_was_lost(postgres_url: str) -> None:
    async def main() -> None:
        async with hosts(f"{postgres_url}&signals=off", cluster_poll_s=60.0) as (holder, other):
            await started(holder, "alice", "wait")
            (live,) = holder.parts.directory.live.values()
            interrupt = asyncio.ensure_future(other.session("alice").interrupt("enough"))
            while (await holder.store.read_events(live.session, after=0, limit=99))[-1].kind != "run.stopping":
                await asyncio.sleep(0.005)
            await holder.parts.directory.catch_up(live)
            assert (await interrupt).outcome == "gone"

    run(main)
