"""Runs of a busy host flush together: what they wrote is stored whatever happens to one of them, or to the host."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from holdfast import Host, Run, agent
from holdfast.errors import HoldfastError, StaleFence
from holdfast.host import flush_beat
from holdfast.host.flush_beat import BUSY_AT, FLUSH_EVERY_S, LONG_BEAT_S, VERY_BUSY_AT, FlushBeat
from holdfast.host.log_reader import LogReader, open_log
from holdfast.protocol.events import Stored, TextDelta, decode_event, encode_event
from holdfast.storage import MemoryStore
from holdfast.storage.port import ALL_BYTES, Append, Appended, Lease, Send
from holdfast.testing import VirtualClock, explore, run_virtual

SESSIONS = 2 * BUSY_AT


@agent
async def short(run: Run) -> None:
    """Emit four pieces, one every 5 ms."""
    for number in range(4):
        await run.emit(f"{number} ")
        await asyncio.sleep(0.005)


def virtual_host() -> Host:
    """A host on a virtual clock."""
    return Host(agents=[short], store=MemoryStore(), clock=VirtualClock())


async def texts(host: Host, key: str) -> list[str]:
    """The pieces of text in the session's log."""
    session, view = await host.directory.find("local", key)
    found = await host.store.read_events(session, after=0, limit=10_000)
    assert [event.seq for event in found] == list(range(1, view.seq + 1))
    events = [decode_event(event) for event in found]
    return [event.text for event in events if isinstance(event, TextDelta)]


def test_a_flush_that_raises_holds_up_no_other() -> None:
    async def test() -> None:
        async with virtual_host() as host:
            beat = FlushBeat(host.context)
            flushed: list[int] = []

            def broken() -> None:
                raise RuntimeError("broken")

            now = asyncio.get_running_loop().time()
            beat.join(lambda: flushed.append(1), last_flush=now)
            beat.join(broken, last_flush=now)
            beat.join(lambda: flushed.append(2), last_flush=now).cancel()
            beat.join(lambda: flushed.append(3), last_flush=now)
            await asyncio.sleep(2 * FLUSH_EVERY_S)
            assert flushed == [1, 3]
            assert "broken" in host.incidents.newest[-1].text
            beat.join(lambda: flushed.append(4), last_flush=now)
            await asyncio.sleep(FLUSH_EVERY_S)
            assert flushed == [1, 3, 4], "the next beat is not affected"

    run_virtual(test())


class CountsWrites(MemoryStore):
    """Notes how many appends each write has."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[int] = []

    def append_all(
        self, appends: Sequence[Append], *, stored_limit: int = ALL_BYTES
    ) -> asyncio.Future[list[Appended | HoldfastError]]:
        self.writes.append(len(appends))
        return super().append_all(appends, stored_limit=stored_limit)


def test_the_flushes_of_a_beat_are_one_write_and_a_refused_or_failing_one_holds_up_no_other() -> None:
    async def test() -> None:
        store = CountsWrites()
        async with Host(agents=[short], store=store, clock=VirtualClock()) as host:
            beat = FlushBeat(host.context)
            sent = [await host.store.send(request(f"k{number}")) for number in range(4)]
            leases = [receipt.claim.lease for receipt in sent if receipt.claim is not None]
            leases[1] = Lease(leases[1].session, leases[1].run_id, leases[1].fence + 1)
            done: list[tuple[int, object]] = []

            def append(number: int) -> None:
                def passed_on(result: Appended | BaseException) -> None:
                    done.append((number, result))
                    if number == 2:
                        raise RuntimeError("a reader is broken")

                beat.append(Append(leases[number], [encode_event(TextDelta(run_id="r", text="x"))], 1), passed_on)

            now = asyncio.get_running_loop().time()
            for number in range(4):
                beat.join(partial(append, number), last_flush=now)
            await asyncio.sleep(2 * FLUSH_EVERY_S)
            assert store.writes == [4]
            assert [number for number, _ in done] == [0, 1, 2, 3]
            assert [type(result) for _, result in done] == [Appended, StaleFence, Appended, Appended]
            assert "a reader is broken" in host.incidents.newest[-1].text
            append(3)
            assert len(done) == 4, "a flush beside the beat is a write of its own, whose result comes later"
            await asyncio.sleep(0.01)
            assert len(done) == 5
            for session, pieces in ((1, 1), (2, 0), (3, 1), (4, 1)):
                found = await host.store.read_events(session, after=0, limit=100)
                assert [event.kind for event in found].count("text.delta") == pieces

    run_virtual(test())


def request(key: str) -> Send:
    """The first message of a session, whose run is claimed for the caller."""
    return Send(
        principal="local", key=key, agent=None, default_agent="short", message_id=f"m_{key}", content="x",
        policy="queue", at=1.0, run_id=f"r_{key}",
    )  # fmt: skip


def test_flushes_of_a_busy_host_share_a_beat_and_a_quiet_host_waits_less() -> None:
    async def test() -> None:
        async with virtual_host() as host:
            loop = asyncio.get_running_loop()
            beat = FlushBeat(host.context)
            at: list[float] = []
            silent = loop.time() - 1.0
            began = loop.time()
            beat.join(lambda: at.append(loop.time()), last_flush=silent)
            await asyncio.sleep(FLUSH_EVERY_S)
            assert at[0] - began <= flush_beat.BEAT_S + 1e-9
            assert not beat.is_busy()
            for _ in range(2 * BUSY_AT):
                beat.join(lambda: None, last_flush=silent)
            assert beat.is_busy()
            at.clear()
            for pause_s in (0.003, 0.004, 0.005):
                await asyncio.sleep(pause_s)
                beat.join(lambda: at.append(loop.time()), last_flush=silent)
            await asyncio.sleep(2 * FLUSH_EVERY_S)
            assert len(at) == 3
            assert len(set(at)) <= 2, "they flush on the beats of 20 ms, not each on its own"
            await asyncio.sleep(2 * LONG_BEAT_S)
            assert not beat.is_busy(), "once the output ends, the host is at ease again"

    run_virtual(test())


@pytest.mark.parametrize("streams", [1, BUSY_AT, VERY_BUSY_AT - 1, VERY_BUSY_AT, 4 * VERY_BUSY_AT])
def test_streams_flush_on_beats_that_are_longer_if_they_are_many(streams: int) -> None:
    async def test() -> None:
        async with virtual_host() as host:
            loop = asyncio.get_running_loop()
            beat = FlushBeat(host.context)
            last = [0.0] * streams
            pauses: list[float] = []
            longest = 0.0

            async def stream(number: int) -> None:
                nonlocal longest
                for _ in range(100):  # a piece every 4 ms, and one flush at a time
                    done = asyncio.Event()
                    beat.join(done.set, last_flush=last[number])
                    began = loop.time()
                    await done.wait()
                    longest = max(longest, loop.time() - began)
                    pauses.append(loop.time() - last[number])
                    last[number] = loop.time()
                    await asyncio.sleep(0.004 - loop.time() % 0.004)

            async with asyncio.TaskGroup() as group:
                for number in range(streams):
                    group.create_task(stream(number))
            # As many flushes as would make the beat long, if it were short, may make it alternate between the two.
            expected = {1: FLUSH_EVERY_S, BUSY_AT: FLUSH_EVERY_S, 4 * VERY_BUSY_AT: LONG_BEAT_S}
            steady = pauses[len(pauses) // 2 :]
            assert longest <= LONG_BEAT_S + 1e-9
            assert min(steady) > FLUSH_EVERY_S / 2
            assert max(steady) <= LONG_BEAT_S + 1e-9
            if streams in expected:
                assert sum(steady) / len(steady) == pytest.approx(expected[streams], rel=0.05)

    run_virtual(test())


def test_a_run_that_ends_within_some_iterations_of_a_beat_has_no_flush_of_its_own() -> None:
    async def test() -> None:
        async with virtual_host() as host:
            loop = asyncio.get_running_loop()
            beat = FlushBeat(host.context)
            flushed: list[int] = []
            for _ in range(2 * BUSY_AT):
                beat.count()
            beat.join(lambda: flushed.append(0), last_flush=0.0)
            short = beat.join(lambda: flushed.append(1), last_flush=0.0)
            commit = asyncio.Event()

            due = math.ceil(loop.time() / FLUSH_EVERY_S) * FLUSH_EVERY_S
            loop.call_at(due, lambda: loop.call_soon(commit.set))
            await commit.wait()
            short.cancel()
            await asyncio.sleep(2 * FLUSH_EVERY_S)
            assert flushed == [0]

    run_virtual(test())


@pytest.mark.parametrize(
    ("flushes", "pause_s"), [(0, FLUSH_EVERY_S), (BUSY_AT, FLUSH_EVERY_S), (2 * VERY_BUSY_AT, LONG_BEAT_S)]
)
def test_a_run_that_flushed_on_a_beat_waits_for_a_later_one(flushes: int, pause_s: float) -> None:
    async def test() -> None:
        async with virtual_host() as host:
            loop = asyncio.get_running_loop()
            beat = FlushBeat(host.context)
            at: list[float] = []

            def flush() -> None:
                at.append(loop.time())
                loop.call_soon(stored)

            def stored() -> None:  # in the same tick of the clock, as on a loop whose clock is coarse
                if len(at) < 8:
                    for _ in range(flushes):
                        beat.count()
                    beat.join(flush, last_flush=at[-1])

            await asyncio.sleep(0.0003)
            flush()
            await asyncio.sleep(1.0)
            pauses = [later - earlier for earlier, later in itertools.pairwise(at)]
            assert len(pauses) == 7
            assert 0.5 * FLUSH_EVERY_S < pauses[0] < 1.5 * pause_s
            assert pauses[1:] == pytest.approx([pause_s] * 6)

    run_virtual(test())


class Talkers:
    """Agents that emit a piece every millisecond, and how many pieces each session's agent has emitted."""

    def __init__(self) -> None:
        self.said: dict[str, int] = {}

    async def __call__(self, run: Run) -> None:
        for number in range(1, 10_000):
            await run.emit(f"{number} ")
            self.said[run.session_key] = number
            await asyncio.sleep(0.001)


def test_text_before_an_interrupt_is_stored_at_any_point_of_the_beat() -> None:
    async def test() -> None:
        talkers = Talkers()
        async with Host(agent(name="talks")(talkers.__call__), store=MemoryStore(), clock=VirtualClock()) as host:
            keys = [f"s{number}" for number in range(SESSIONS)]
            for key in keys:
                await host.session(key).send("go")
            await asyncio.sleep(0.2)
            for number, key in enumerate(keys):
                await asyncio.sleep(0.0013 * (number % 7))
                await host.session(key).interrupt("enough")
                found = await texts(host, key)
                assert found == [f"{n} " for n in range(1, len(found) + 1)]
                assert len(found) >= talkers.said[key] > 100

    run_virtual(test())


def test_text_of_a_beat_that_the_shutdown_cuts_short_is_stored(tmp_path: Path) -> None:
    async def test() -> None:
        talkers = Talkers()
        talks = agent(name="talks")(talkers.__call__)
        url = f"sqlite:///{tmp_path}/store.db"
        async with Host(talks, store=url) as host:
            for number in range(SESSIONS):
                await host.session(f"s{number}").send("go")
            while len(talkers.said) < SESSIONS or min(talkers.said.values()) < 20:
                await asyncio.sleep(0.01)
            await host.drain(deadline_s=0.0)
        said = dict(talkers.said)
        async with Host(talks, store=url) as host:
            for key, count in said.items():
                assert len(await texts(host, key)) >= count >= 20

    asyncio.run(test())


def takes_all(log: LogReader, seen: list[int]) -> None:
    def sink(events: Sequence[Stored]) -> bool:
        seen.extend(event.seq for event in events)
        return True

    log.sink = sink


@pytest.mark.parametrize("direct", [True, False])
def test_readers_that_join_in_the_middle_of_a_beat_see_each_event_once(direct: bool) -> None:
    async def read(host: Host, joins_after_s: float) -> None:
        await asyncio.sleep(joins_after_s)
        seen: list[int] = []
        log = await open_log(host.context, host.directory, "local", "s", after=None, follow=None, keepalive_s=5.0)
        assert isinstance(log, LogReader)
        if direct:
            takes_all(log, seen)
        async for batch in log:
            if batch is None:
                break  # the sink has taken the last event
            assert isinstance(batch, list)
            await asyncio.sleep(0)
            seen.extend(event.seq for event in batch)
            if batch[-1].kind == "message.settled":
                break
        await log.aclose()
        assert seen == list(range(1, seen[-1] + 1))

    async def test() -> None:
        async with Host(agents=[short], store=MemoryStore(yielding=True), clock=VirtualClock()) as host:
            await host.session("s").send("go")
            async with asyncio.TaskGroup() as group:
                for number in range(8):
                    group.create_task(read(host, number * 0.0027))

    explore(test, schedules=60)


def test_a_reader_whose_sink_takes_events_is_kept_alive_only_when_it_is_quiet() -> None:
    async def test() -> None:
        async with virtual_host() as host:
            loop = asyncio.get_running_loop()
            await host.session("s").ask("go")
            log = await open_log(host.context, host.directory, "local", "s", after=None, follow=None, keepalive_s=1.0)
            assert isinstance(log, LogReader)
            seen: list[int] = []
            takes_all(log, seen)
            await anext(log)  # what was stored before
            waiting = asyncio.ensure_future(anext(log))
            live = host.directory.live[next(iter(host.directory.live))]
            for _ in range(5):
                await asyncio.sleep(0.6)
                live.publish([Stored(live.log.next_seq, "text.delta", b'{"kind":"text.delta","text":"x"}')])
            quiet_since = loop.time()
            assert not waiting.done()
            assert await waiting is None
            assert loop.time() - quiet_since == pytest.approx(1.0)
            assert len(seen) == 5
            await log.aclose()

    run_virtual(test())
