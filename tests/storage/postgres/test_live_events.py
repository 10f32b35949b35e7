"""Events that nodes send each other over NATS: committed ones, to those that follow, readable by nobody else."""

import asyncio
import random
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import nats
import pytest

import holdfast
from holdfast import failpoints
from holdfast.errors import StaleFence
from holdfast.host.live_session import SharedSession
from holdfast.proof.storm.nats_server import NatsServer
from holdfast.protocol.events import Stored, TextDelta, encode_event
from holdfast.settings import Settings
from holdfast.storage.cluster import CommittedEvents, SessionEvents
from holdfast.storage.event_packs import pack_events
from holdfast.storage.postgres import live_events
from holdfast.storage.postgres.live_events import FOLLOW_S, LiveEvents
from tests.storage.postgres.test_nats_signals import collected as collected
from tests.storage.postgres.test_nats_signals import nodes
from tests.storage.postgres.test_races import end_lease, message, run
from tests.storage.postgres.test_signals import connected

KEY = b"k" * 32

# If a server takes no more data, nats-py leaves the socket to the garbage collection.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as running:
        yield running


class Received:
    """The events that a node receives of others."""

    def __init__(self, store: Any) -> None:
        self.batches: asyncio.Queue[SessionEvents] = asyncio.Queue()
        store.cluster.signals.listen(lambda _: None, self._receive)

    def _receive(self, batches: Sequence[SessionEvents]) -> None:
        for batch in batches:
            self.batches.put_nowait(batch)

    async def next(self) -> SessionEvents:
        async with asyncio.timeout(20):
            return await self.batches.get()


def delta(text: str) -> list[tuple[str, bytes]]:
    return [encode_event(TextDelta(run_id="r", text=text))]


async def follow(follower: Any, sender: Any, session: int) -> None:
    """Return once the sender knows that the other node follows the session."""
    follower.cluster.signals.follow(session)
    live = sender.cluster.signals._live
    async with asyncio.timeout(20):
        while session not in live._followed_elsewhere:
            await asyncio.sleep(0.002)


def test_a_node_that_follows_a_session_receives_what_others_commit_to_it(server: NatsServer, postgres_url: str) -> None:
    async def main() -> None:
        async with nodes(server.url(), postgres_url, postgres_url, postgres_url) as (one, two, three):
            await connected((one, two, three))
            received, none = Received(two), Received(three)
            lease = (await one.send(message(0))).claim.lease
            other = (await one.send(message(1, key="other"))).claim.lease
            await follow(two, one, lease.session)
            for n in range(5):
                await one.append(other, delta("not followed"))
                appended = await one.append(lease, delta(f"text {n}"))
                assert await received.next() == SessionEvents(lease.session, appended.events)
                assert (await two.read_events(lease.session, after=0, limit=99))[-1] == appended.events[-1]
            assert none.batches.empty()

    run(main)


def test_events_of_a_transaction_that_fails_are_not_sent(server: NatsServer, postgres_url: str) -> None:
    async def main() -> None:
        async with nodes(server.url(), postgres_url, postgres_url) as (one, two):
            await connected((one, two))
            received = Received(two)
            lease = (await one.send(message(0))).claim.lease
            await follow(two, one, lease.session)
            loop = asyncio.get_running_loop()
            taken: list[Any] = []

            async def take_over() -> Any:
                return await two.rescue(at=2.0)

            def at_commit(name: str) -> None:
                if name == "postgres.before_commit" and not taken:
                    taken.append(None)
                    end_lease(postgres_url, one.cluster.epoch)
                    asyncio.run_coroutine_threadsafe(take_over(), loop).result(4)

            with failpoints.attend(at_commit), pytest.raises(StaleFence):
                await one.append(lease, delta("never stored"))
            again = (await one.send(message(2, key="again"))).claim.lease
            await follow(two, one, again.session)
            appended = await one.append(again, delta("stored"))
            assert await received.next() == SessionEvents(again.session, appended.events)

    run(main)


def test_nats_sees_no_content_and_only_what_is_followed(server: NatsServer, postgres_url: str) -> None:
    async def main() -> None:
        async with nodes(server.url(), postgres_url, postgres_url) as (one, two):
            await connected((one, two))
            seen: list[bytes] = []

            async def see(received: Any) -> None:
                seen.append(received.data)

            client = await nats.connect(server.url())
            await client.subscribe(f"holdfast.{one.backend.cluster_id}.events.*", cb=see)
            await client.flush()
            received = Received(two)
            lease = (await one.send(message(0))).claim.lease
            await one.append(lease, delta("a secret before"))
            await follow(two, one, lease.session)
            await one.append(lease, delta("a secret after"))
            assert b"a secret after" in (await received.next()).events[0].body
            async with asyncio.timeout(20):
                while not seen:
                    await asyncio.sleep(0.002)
            assert len(seen) == 1
            assert b"secret" not in seen[0]
            await client.close()

    run(main)


def test_foreign_and_altered_messages_are_ignored(server: NatsServer, postgres_url: str) -> None:
    async def main() -> None:
        async with nodes(server.url(), postgres_url, postgres_url) as (one, two):
            await connected((one, two))
            received = Received(two)
            client = await nats.connect(server.url())
            lease = (await one.send(message(0))).claim.lease
            await follow(two, one, lease.session)
            subject = f"holdfast.{one.backend.cluster_id}.events.{lease.session}"
            stranger = LiveEvents()
            stranger.start(b"another key" * 3)
            stranger.note_followers([lease.session])
            stranger.add([CommittedEvents(lease.session, 9, pack_events([Stored(9, *delta("forged")[0])]))])
            ((_, forged),) = stranger.take()
            node = LiveEvents()
            node.start(one.backend._connection.cluster_key)
            node.note_followers([lease.session])
            node.add([CommittedEvents(lease.session, 7, pack_events([Stored(7, *delta("true")[0])]))])
            ((_, true),) = node.take()
            at_seq = live_events._HEADER.size - 1
            for text in (
                b"",
                b"\0" * 10,
                b"\xff" * 200,
                forged,
                true[:-1],
                true[:at_seq] + b"\x08" + true[at_seq + 1 :],
            ):
                await client.publish(subject, text)
            await client.publish(subject, true)
            batch = await received.next()
            assert (batch.session, batch.events[-1].seq) == (lease.session, 7)
            assert received.batches.empty()
            await client.close()

    run(main)


def watch(host: holdfast.Host) -> Any:
    """The host's `ClusterWatch`."""
    return host.parts.cluster_watch


def listen(host: holdfast.Host, on_signals: Any, on_events: Any) -> None:
    """Pass what the host hears of others to these callbacks instead of to its parts."""
    assert host.store.cluster is not None
    host.store.cluster.signals.listen(on_signals, on_events)


async def log_of(host: holdfast.Host, session: int) -> Sequence[Stored]:
    return await host.store.read_events(session, after=0, limit=99)


proceed: dict[str, asyncio.Future[None]] = {}
"""What the writer waits for."""


@holdfast.agent(name="writer")
async def writer(run: holdfast.Run) -> str:
    """Write 200 pieces, each once the one before is stored; before that, others until a reader is live."""
    went_live = proceed.pop("writer", None)
    while went_live is not None and not went_live.done():
        await run.emit("…")
        await run.context.recorder.written()
    for n in range(200):
        await run.emit(f"{n},")
        await run.context.recorder.written()
    return "done"


def test_a_reader_at_another_host_sees_each_event_once_without_reading_the_store_for_it(
    server: NatsServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        settings = Settings(nats=server.url(), cluster_poll_s=60.0)
        async with (
            holdfast.Host(writer, store=postgres_url, settings=settings) as one,
            holdfast.Host(writer, store=postgres_url, settings=settings) as two,
        ):
            await connected((one.store, two.store))
            follower = watch(two)._follower
            read_events, receive = two.store.read_events, follower.receive
            is_live, reads, received = False, 0, 0
            went_live: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            proceed["writer"] = went_live

            def counted(*args: Any, **named: Any) -> Any:
                nonlocal reads
                reads += is_live
                return read_events(*args, **named)

            def receiving(batches: Sequence[SessionEvents]) -> None:
                nonlocal is_live, received
                receive(batches)
                (live,) = two.parts.directory.live.values()
                assert isinstance(live, SharedSession)
                is_live = is_live or live.seen == batches[-1].events[-1].seq
                received += is_live * len(batches)
                if is_live and not went_live.done():
                    went_live.set_result(None)

            monkeypatch.setattr(two.store, "read_events", counted)
            listen(two, watch(two)._on_signals, receiving)
            receipt = await one.session("a").send("go")
            seen: list[Any] = [event async for event in two.session("a").events(follow=receipt.message_id)]
            text = "".join(event.text for event in seen if event.kind == "text.delta")
            assert text.lstrip("…") == "".join(f"{n}," for n in range(200)) + "done"
            assert [event.seq for event in seen] == list(range(1, len(seen) + 1))
            assert received > 50
            assert reads < received / 5, "some may have been requested before"

    run(main)


@holdfast.agent(name="patient")
async def patient(run: holdfast.Run) -> str:
    await run.interrupt.wait()
    return "never"


def test_an_interrupt_whose_event_was_lost_is_found_by_the_next_event(server: NatsServer, postgres_url: str) -> None:
    async def main() -> None:
        settings = Settings(nats=server.url(), cluster_poll_s=60.0)
        async with (
            holdfast.Host(patient, store=postgres_url, settings=settings) as one,
            holdfast.Host(patient, store=postgres_url, settings=settings) as two,
        ):
            await connected((one.store, two.store))
            listen(two, lambda _: None, lambda _: None)
            receipt = await one.session("a").send("go")
            (live,) = one.parts.directory.live.values()
            listen(one, lambda _: None, lambda _: None)
            interrupt = asyncio.ensure_future(two.session("a").interrupt("enough"))
            async with asyncio.timeout(20):
                while (await log_of(two, live.session))[-1].kind != "run.stopping":
                    await asyncio.sleep(0.005)
            await two.session("a").send("later")
            last = (await log_of(two, live.session))[-1]
            watch(one)._follower.receive([SessionEvents(live.session, (last,))])
            listen(two, watch(two)._on_signals, lambda _: None)
            assert (await interrupt).outcome == "gone"
            assert receipt.disposition == "started"
            await one.session("a").stop()

    run(main)


@pytest.mark.parametrize("seed", range(6))
def test_lost_late_and_repeated_events_are_shown_once_and_in_order(
    server: NatsServer, postgres_url: str, seed: int
) -> None:
    chance = random.Random(seed)

    async def main() -> None:
        settings = Settings(nats=server.url(), cluster_poll_s=0.05)
        async with (
            holdfast.Host(writer, store=postgres_url, settings=settings) as one,
            holdfast.Host(writer, store=postgres_url, settings=settings) as two,
        ):
            await connected((one.store, two.store))
            receive = watch(two)._follower.receive
            kept: list[SessionEvents] = []

            def shuffled(received: Sequence[SessionEvents]) -> None:
                kept.extend(received)
                chance.shuffle(kept)
                passed = [batch for batch in kept if chance.random() < 0.6]
                del kept[: chance.randrange(len(kept) + 1)]
                receive(passed)

            listen(two, watch(two)._on_signals, shuffled)
            receipt = await one.session("a").send("go")
            seen: list[Any] = [event async for event in two.session("a").events(follow=receipt.message_id)]
            assert [event.seq for event in seen] == list(range(1, len(seen) + 1))
            assert sum(event.kind == "text.delta" for event in seen) > 0

    run(main)


def test_a_node_closes_although_its_nats_server_takes_no_more_data(postgres_url: str) -> None:
    async def main() -> None:
        with NatsServer() as frozen:
            async with nodes(frozen.url(), postgres_url, postgres_url) as (one, two):
                await connected((one, two))
                lease = (await one.send(message(0))).claim.lease
                await follow(two, one, lease.session)
                process: Any = frozen._process
                process.send_signal(signal.SIGSTOP)
                try:
                    for _ in range(40):
                        await one.append(lease, delta("x" * 400_000))
                    async with asyncio.timeout(20):
                        await one.close()
                finally:
                    process.send_signal(signal.SIGCONT)

    run(main)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


def test_following_ends_by_itself_and_is_asked_for_again_while_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(live_events, "system_clock", clock)
    follower, sender = LiveEvents(), LiveEvents()
    for live in (follower, sender):
        live.start(KEY)
    commit = CommittedEvents(7, 3, pack_events([Stored(3, *delta("x")[0])]))
    assert not sender.add([commit])
    assert follower.follow(7)
    assert not follower.follow(7)
    assert (follower.changed_channels(), follower.to_ask(), follower.to_ask()) == ({7}, [7], [])
    assert follower.changed_channels() is None
    sender.note_followers([7])
    assert sender.add([commit])
    assert len(sender.take()) == 1
    clock.now_s += FOLLOW_S / 2
    assert follower.follow(7)
    assert follower.to_ask() == [7]
    clock.now_s += FOLLOW_S / 2 + 1
    assert follower.changed_channels() is None
    assert not sender.add([commit])
    clock.now_s += FOLLOW_S
    assert follower.changed_channels() == set()
    assert follower.follow(7)


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_events, "_WAITING_BYTES", 1000)
    monkeypatch.setattr(live_events, "_MESSAGE_BYTES", 500)
    monkeypatch.setattr(live_events, "_FOLLOWED_LIMIT", 10)
    sender = LiveEvents()
    sender.start(KEY)
    sender.note_followers(range(11))
    assert not sender.add([CommittedEvents(10, 1, b"x" * 501)])
    assert sender.add([CommittedEvents(10, n, b"x" * 400) for n in range(1, 9)])
    assert len(sender.take()) == 2
    assert sum(sender.add([CommittedEvents(session, 1, b"x")]) for session in range(11)) == 5
