"""Sessions at both ends of a stream: items as messages, and a log as an observable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import reactivex
from reactivex import Subject
from reactivex import operators as ops
from reactivex.scheduler import ThreadPoolScheduler

from holdfast import Host, Run, Settings
from holdfast.errors import (
    EventsMissed,
    InvalidCursor,
    MailboxFull,
    MessageWithdrawn,
    RunFailed,
    RunInterrupted,
    WaitsForItself,
)
from holdfast.integrations.reactive import Outcome, ReactiveBridge
from holdfast.protocol.events import Gap
from tests.integrations.reactive.watching import Watcher, gone, soon


async def echo(run: Run) -> str:
    if run.text == "bad":
        raise ValueError("no")
    if run.text.startswith("long"):
        await asyncio.sleep(1000)
    return f"{run.session_key}: {run.text}"


def hosting(scenario: Callable[[Host, ReactiveBridge], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(30):
            async with Host(
                echo, store="memory://", settings=Settings(grace_s=1, drain_timeout_s=0.1, **settings)
            ) as host:
                bridge = ReactiveBridge(concurrency=20).open()
                await scenario(host, bridge)
                await bridge.aclose()
                gone(bridge)
                assert host.readers == 0

    asyncio.run(main())


def states(settlements: list[Any]) -> list[str]:
    return [settlement.state for settlement in settlements]


def test_each_item_is_a_run_of_the_session_that_it_belongs_to() -> None:
    async def scenario(host: Host, bridge: ReactiveBridge) -> None:
        words = reactivex.from_iterable([("ann", "1"), ("bob", "2"), ("ann", "3"), ("bob", "4")])
        asked = bridge.ask(lambda item: host.session(item[0]), text=lambda item: str(item[1]), ordered=True)
        assert await bridge.collect(words.pipe(asked)) == ["ann: 1", "bob: 2", "ann: 3", "bob: 4"]
        said = [entry.content for entry in await host.session("ann").transcript() if entry.role == "user"]
        assert said == ["1", "3"]

    hosting(scenario)


def test_messages_of_a_session_are_sent_in_order_from_any_thread() -> None:
    async def scenario(host: Host, bridge: ReactiveBridge) -> None:
        pool = ThreadPoolScheduler(2)
        words = reactivex.from_iterable([str(n) for n in range(40)]).pipe(ops.subscribe_on(pool))
        session = host.session("ann")
        receipts = await bridge.collect(words.pipe(bridge.send(session, ordered=True)))
        assert [receipt.seq for receipt in receipts] == sorted(receipt.seq for receipt in receipts)
        await session.wait(receipts[-1].message_id)
        said = [entry.content for entry in await session.transcript() if entry.role == "user"]
        assert said == [str(n) for n in range(40)]
        pool.executor.shutdown()

    hosting(scenario)


def test_a_run_that_fails_ends_the_stream_or_is_an_outcome() -> None:
    async def scenario(host: Host, bridge: ReactiveBridge) -> None:
        words = reactivex.of("good", "bad", "better")
        with pytest.raises(RunFailed):
            await bridge.collect(words.pipe(bridge.ask(host.session("ann"))))
        found: list[Outcome] = await bridge.collect(
            words.pipe(bridge.ask(host.session("bob"), outcomes=True, ordered=True))
        )
        assert [one.settled for one in found] == ["done", "failed", "done"]

    hosting(scenario)


def test_the_same_idempotency_key_runs_once() -> None:
    async def scenario(host: Host, bridge: ReactiveBridge) -> None:
        words = reactivex.of("a", "b", "a")
        asked = bridge.ask(host.session("ann"), idempotency_key=lambda word: f"key-{word}", ordered=True)
        assert await bridge.collect(words.pipe(asked)) == ["ann: a", "ann: b", "ann: a"]
        assert len(await host.session("ann").runs()) == 2

    hosting(scenario)


def test_disposing_takes_the_messages_back_that_wait_and_interrupts_the_run_that_is_on() -> None:
    async def scenario(host: Host, bridge: ReactiveBridge) -> None:
        session = host.session("ann")
        other = await host.session("bob").send("long")
        watcher = Watcher()
        words = reactivex.of("long 1", "long 2", "long 3")
        subscription = words.pipe(bridge.ask(session)).subscribe(watcher)
        await soon(lambda: bridge.statistics().in_flight == 3)
        async with asyncio.timeout(60):
            while len(await _mailbox(host)) < 2:
                await asyncio.sleep(0.01)
        messages = [event.message_id async for event in _accepted(host)]
        subscription.dispose()
        await soon(lambda: not bridge.streams)
        assert states([await session.message(one) for one in messages]) == ["interrupted", "withdrawn", "withdrawn"]
        cause = (await session.message(messages[0])).cause
        assert cause is not None and cause.reason == "the subscription was disposed"
        assert (await host.session("bob").message(other.message_id)).state == "taken"
        assert bridge.statistics().interrupted == 3
        assert (watcher.values, watcher.ended) == ([], False)
        await host.session("bob").interrupt()
        assert await session.ask("next") == "ann: next"

    hosting(scenario)


async def _mailbox(host: Host) -> list[Any]:
    try:
        return list(await host.session("ann").mailbox())
    except Exception:
        return []


async def _accepted(host: Host) -> AsyncIterator[Any]:
    view = await host.session("ann").info()
    async for event in host.session("ann").events():
        if event.kind == "message.accepted":
            yield event
        if not isinstance(event, Gap) and event.seq >= view.seq:
            return


class Slow:
    """A session whose first send is stored, but answered late."""

    key = "ann"

    def __init__(self, session: Any) -> None:
        self.session = session
        self.sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    async def send(self, content: str, **options: Any) -> Any:
        receipt = await self.session.send(content, **options)
        self.sent += 1
        if self.sent == 1:
            await asyncio.sleep(1000)
        return receipt


def test_a_send_that_is_cut_off_is_taken_back_too() -> None:
    async def scenario(host: Host, bridge: ReactiveBridge) -> None:
        slow: Any = Slow(host.session("ann"))
        subscription = reactivex.of("long").pipe(bridge.ask(slow)).subscribe(Watcher())
        await soon(lambda: slow.sent)
        subscription.dispose()
        await soon(lambda: not bridge.streams)
        (run,) = await slow.runs()
        assert run.state == "interrupted"
        assert await slow.ask("next") == "ann: next"

    hosting(scenario)


class Hesitant(Slow):
    """A session that takes its time with the first message before it stores it."""

    async def send(self, content: str, **options: Any) -> Any:
        await asyncio.sleep(0.05 if content == "0" else 0)
        return await self.session.send(content, **options)


def test_a_message_that_is_sent_slowly_is_not_overtaken() -> None:
    async def scenario(host: Host, bridge: ReactiveBridge) -> None:
        hesitant: Any = Hesitant(host.session("ann"))
        words = reactivex.from_iterable([str(n) for n in range(5)])
        receipts = await bridge.collect(words.pipe(bridge.send(hesitant, ordered=True)))
        assert [receipt.seq for receipt in receipts] == sorted(receipt.seq for receipt in receipts)

    hosting(scenario)


class Full(Slow):
    """A session whose mailbox is full."""

    async def send(self, content: str, **options: Any) -> Any:
        self.sent += 1
        raise MailboxFull("full")


@pytest.mark.parametrize("kind", [Slow, Full])
def test_what_was_never_sent_is_not_sent_to_be_taken_back(kind: Any) -> None:
    async def scenario(host: Host, bridge: ReactiveBridge) -> None:
        session = host.session("ann")
        other = await session.send("long")
        stuck: Any = kind(session)
        words = reactivex.of("long 1", "long 2", "long 3")
        asked = bridge.ask(stuck, policy="interrupt" if kind is Full else "queue")
        subscription = words.pipe(asked).subscribe(Watcher())
        await soon(lambda: stuck.sent)
        sent = stuck.sent
        subscription.dispose()
        await soon(lambda: not bridge.streams)
        assert stuck.sent <= sent + 1  # the one whose send was cut off may have arrived
        assert (await session.message(other.message_id)).state == "taken"
        assert await session.mailbox() == []
        await session.interrupt()

    hosting(scenario)


def test_a_run_that_others_share_is_not_interrupted() -> None:
    async def scenario(host: Host, bridge: ReactiveBridge) -> None:
        session = host.session("ann")
        watcher = Watcher()
        subscription = reactivex.of("long").pipe(bridge.ask(session, policy="steer")).subscribe(watcher)
        await soon(lambda: bridge.statistics().in_flight)
        async with asyncio.timeout(60):
            while not await _mailbox_or_runs(session):
                await asyncio.sleep(0.01)
        subscription.dispose()
        await soon(lambda: not bridge.streams)
        (run,) = await session.runs()
        assert run.state == "running"
        await session.interrupt()

    hosting(scenario)


async def _mailbox_or_runs(session: Any) -> Any:
    try:
        return [run for run in await session.runs() if run.state == "running"]
    except Exception:
        return []


def test_a_full_mailbox_holds_the_source_back_or_is_an_error() -> None:
    async def scenario(host: Host, bridge: ReactiveBridge) -> None:
        session = host.session("ann")
        words = reactivex.from_iterable([str(n) for n in range(30)])
        receipts = await bridge.collect(words.pipe(bridge.send(session, ordered=True)))
        assert len(receipts) == 30
        await session.wait(receipts[-1].message_id)
        await session.send("long")
        with pytest.raises(MailboxFull):
            await bridge.collect(words.pipe(bridge.send(session, full_s=0)))
        with pytest.raises(MailboxFull):
            await bridge.collect(words.pipe(bridge.ask(session, full_s=0.05)))

    hosting(scenario, mailbox_limit=3)


def test_a_message_that_somebody_withdraws_is_an_error_of_its_item() -> None:
    async def scenario(host: Host, bridge: ReactiveBridge) -> None:
        session = host.session("ann")
        running = await session.send("long")
        asked = asyncio.create_task(bridge.collect(reactivex.of("b").pipe(bridge.ask(session, outcomes=True))))
        async with asyncio.timeout(60):
            while not await session.mailbox():
                await asyncio.sleep(0.01)
        (item,) = await session.mailbox()
        await session.withdraw(item.message.message_id)
        (outcome,) = await asked
        assert isinstance(outcome.error, MessageWithdrawn)
        await session.interrupt(run_id=running.run_id)

    hosting(scenario)


def test_a_run_that_asks_its_own_session_is_told_and_leaves_no_message() -> None:
    async def main() -> None:
        async def selfish(run: Run) -> str:
            async with ReactiveBridge(run) as bridge:
                try:
                    await bridge.collect(reactivex.of("me").pipe(bridge.ask(host.session("ann"))))
                except WaitsForItself:
                    return f"{len(await host.session('ann').mailbox())} messages"
            return "answered"

        async with asyncio.timeout(60), Host(selfish, store="memory://") as host:
            assert await host.session("ann").ask("go") == "0 messages"
            assert len(await host.session("ann").runs()) == 1

    asyncio.run(main())


# The log of a session


def is_text(event: Any) -> bool:
    return bool(event.kind == "text.delta")


def text(event: Any) -> str:
    return str(event.text)


def test_a_log_is_an_observable_with_a_cursor() -> None:
    async def scenario(host: Host, bridge: ReactiveBridge) -> None:
        session = host.session("ann")
        first = await session.send("one")
        await session.wait(first.message_id)
        second = await session.send("two")
        await session.wait(second.message_id)
        whole = await bridge.collect(bridge.events(session, follow=second.message_id))
        assert [event.seq for event in whole] == list(range(1, len(whole) + 1))
        later = await bridge.collect(bridge.events(session, after=second.cursor, follow=second.message_id))
        assert later == whole[second.seq - 1 :]
        texts = bridge.events(session, follow=second.message_id).pipe(ops.filter(is_text), ops.map(text))
        assert await bridge.collect(texts) == ["ann: one", "ann: two"]

    hosting(scenario)


def test_disposing_ends_the_reader() -> None:
    async def scenario(host: Host, bridge: ReactiveBridge) -> None:
        session = host.session("ann")
        await session.ask("one")
        watcher = Watcher()
        subscription = bridge.events(session).subscribe(watcher)
        await soon(lambda: watcher.values)
        assert host.readers == 1
        seen = len(watcher.values)
        subscription.dispose()
        await soon(lambda: not bridge.streams)
        assert host.readers == 0
        await session.ask("two")
        assert len(watcher.values) == seen
        assert not watcher.ended

    hosting(scenario)


def test_a_reader_that_is_disposed_before_it_began_never_reads() -> None:
    async def scenario(host: Host, bridge: ReactiveBridge) -> None:
        session = host.session("ann")
        await session.ask("one")
        watcher = Watcher()
        bridge.events(session).subscribe(watcher).dispose()
        await soon(lambda: not bridge.streams)
        assert (watcher.values, watcher.ended, host.readers) == ([], False, 0)

    hosting(scenario)


def test_a_subscription_of_a_log_may_come_from_a_thread_and_be_told_on_a_scheduler() -> None:
    async def scenario(host: Host, bridge: ReactiveBridge) -> None:
        session = host.session("ann")
        receipt = await session.send("one")
        pool = ThreadPoolScheduler(2)
        watcher = Watcher()
        log = bridge.events(session, follow=receipt.message_id, scheduler=pool)
        log.pipe(ops.subscribe_on(pool)).subscribe(watcher)
        await soon(lambda: watcher.completed)
        assert [event.seq for event in watcher.values] == list(range(1, len(watcher.values) + 1))
        assert watcher.breaches == []
        pool.executor.shutdown()

    hosting(scenario)


def test_errors_of_the_log_pass() -> None:
    async def scenario(host: Host, bridge: ReactiveBridge) -> None:
        session = host.session("ann")
        await session.ask("one")
        with pytest.raises(InvalidCursor):
            await bridge.collect(bridge.events(session, after="nonsense"))

    hosting(scenario)


class Gappy:
    """A session whose log has a gap."""

    key = "ann"

    def events(self, **_: Any) -> AsyncIterator[Any]:
        async def read() -> AsyncIterator[Any]:
            yield Gap(after=0, until=4, reason="pruned")
            yield "event 5"

        return read()


class Plain(Gappy):
    """A log that is no generator."""

    def events(self, **options: Any) -> AsyncIterator[Any]:
        inner = super().events(**options)

        class Reader:
            def __aiter__(self) -> Any:
                return self

            async def __anext__(self) -> Any:
                return await anext(inner)

        return Reader()


@pytest.mark.parametrize("session", [Gappy(), Plain()])
def test_a_gap_is_a_value_or_an_error(session: Any) -> None:
    async def scenario(_: Host, bridge: ReactiveBridge) -> None:
        gap, event = await bridge.collect(bridge.events(session))
        assert (gap.kind, event) == ("gap", "event 5")
        with pytest.raises(EventsMissed, match=r"the events 1 to 4 were missed \(pruned\)") as caught:
            await bridge.collect(bridge.events(session, gaps="error"))
        assert caught.value.code == "events_missed"

    hosting(scenario)


def test_a_drain_completes_logs_and_a_close_cuts_them_off() -> None:
    async def scenario(host: Host, bridge: ReactiveBridge) -> None:
        session = host.session("ann")
        await session.ask("one")
        drained, closed, never = Watcher(), Watcher(), Watcher()
        bridge.events(session).subscribe(closed)
        await soon(lambda: closed.values)
        await bridge.aclose("closed")
        assert isinstance(closed.error, RunInterrupted)
        other = ReactiveBridge().open()
        other.events(session).subscribe(drained)
        await soon(lambda: drained.values)
        other.events(session).subscribe(never)
        await other.drain()
        assert drained.completed
        assert never.completed
        gone(other)

    hosting(scenario)


def test_an_observer_of_a_log_that_raises_ends_its_reader() -> None:
    async def scenario(host: Host, bridge: ReactiveBridge) -> None:
        told: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
        session = host.session("ann")
        await session.ask("one")

        def observe(_: Any) -> None:
            raise KeyError("observer")

        bridge.events(session).subscribe(observe)
        await soon(lambda: not bridge.streams)
        assert [type(error) for error in told] == [KeyError]

    hosting(scenario)


def test_a_log_feeds_another_session() -> None:
    async def scenario(host: Host, bridge: ReactiveBridge) -> None:
        subject: Subject[str] = Subject()
        ann, bob = host.session("ann"), host.session("bob")
        subject.pipe(bridge.send(ann)).subscribe()
        subject.on_next("hello")
        await soon(lambda: bridge.statistics().done)
        watcher = Watcher()
        bridge.events(ann).pipe(ops.filter(is_text), ops.map(text), bridge.ask(bob)).subscribe(watcher)
        await soon(lambda: watcher.values)
        assert watcher.values == ["bob: ann: hello"]

    hosting(scenario)
