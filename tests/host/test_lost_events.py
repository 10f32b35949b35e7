"""A store that has lost events, by an asynchronous failover for example: what rests on them ends, and nothing is mixed.

The loss is made by hand: events are deleted, and their numbers are used again.
"""

import asyncio
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.host.live_session import SharedSession
from holdfast.host.session_directory import SessionDirectory
from holdfast.protocol.events import Stored
from tests.host.test_cluster import done, forgotten, hosts, run, started


@pytest.fixture(autouse=True)
def no_work_yet() -> None:
    done.clear()


def watch(host: holdfast.Host) -> Any:
    """The host's `ClusterWatch`."""
    return host.parts.cluster_watch


async def never(_: Any) -> None:
    """In the place of a poll."""


def test_streams_end_that_showed_events_which_the_store_has_lost(postgres_url: str) -> None:
    async def main() -> None:
        async with hosts(f"{postgres_url}&signals=off") as (one, two):
            alice = one.session("alice")
            await alice.ask("kept")
            (live,) = one.parts.directory.live.values()
            kept = len(await one.store.read_events(live.session, after=0, limit=99))
            shown: list[Any] = []

            async def read() -> None:
                async for event in two.session("alice").events():
                    shown.append(event)

            reading = asyncio.ensure_future(read())
            await alice.ask("lost")
            while len(shown) < 2 * kept:
                await asyncio.sleep(0.005)
            with psycopg.connect(postgres_url, autocommit=True) as connection:
                connection.execute("DELETE FROM event WHERE first_seq > %s", [kept])
                connection.execute("UPDATE session SET next_seq = %s", [kept + 1])
            await reading
            assert [event.seq for event in shown] == list(range(1, 2 * kept + 1))
            (incident,) = [found for found in two.incidents.newest if "lost events" in found.text]
            assert incident.session == "alice"
            receipt = await two.session("alice").send("once more")
            seen: list[Any] = [event async for event in two.session("alice").events(follow=receipt.message_id)]
            assert [event.seq for event in seen] == list(range(1, len(seen) + 1))

    run(main)


def test_an_interrupt_is_found_although_it_has_the_number_of_an_event_that_was_lost(postgres_url: str) -> None:
    async def main() -> None:
        async with hosts(f"{postgres_url}&signals=off") as (holder, other):
            await started(holder, "alice", "wait")
            (live,) = holder.parts.directory.live.values()
            assert isinstance(live, SharedSession)
            before = live.seen
            for n in range(3):
                await other.session("alice").send(f"lost {n}")
            while live.seen < before + 3:
                await asyncio.sleep(0.005)
            with psycopg.connect(postgres_url, autocommit=True) as connection:
                connection.execute("DELETE FROM event WHERE first_seq > %s", [before])
                connection.execute("UPDATE session SET next_seq = %s", [before + 1])
            receipt = await other.session("alice").interrupt("enough")
            assert (receipt.outcome, receipt.proof) == ("gone", "observed")
            await forgotten(holder)

    run(main)


def test_a_session_that_the_store_has_lost_shows_nothing_of_the_one_that_got_its_number(postgres_url: str) -> None:
    async def main() -> None:
        async with hosts(f"{postgres_url}&signals=off", cluster_poll_s=60.0) as (host, _):
            directory = host.parts.directory
            lost = directory.load(session=7, number=7, principal="alice", key="a", seq=5)
            reader = lost.log.reader(after=5)
            mine = directory.load(session=7, number=7, principal="bob", key="b", seq=0)
            assert mine is not lost
            mine.publish([Stored(1, "text.delta", b'{"text":"private"}')])
            assert await reader.read(9) is None
            directory.evict(idle_for_s=0.0)
            assert 7 not in directory.live

    run(main)


def test_a_stream_ends_also_if_only_its_reader_has_read_the_events_that_are_lost(postgres_url: str) -> None:
    async def main() -> None:
        async with hosts(f"{postgres_url}&signals=off") as (one, two):
            await one.session("alice").ask("kept")
            (live,) = one.parts.directory.live.values()
            kept = len(await one.store.read_events(live.session, after=0, limit=99))
            await one.session("alice").ask("lost")
            load = SessionDirectory.load

            def early(directory: SessionDirectory, **about: Any) -> Any:
                return load(directory, **{**about, "seq": kept})  # it was found before the last events were written

            shown = two.session("alice").events()
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(SessionDirectory, "load", early)
                patched.setattr(type(watch(two)), "_poll", never)
                for _ in range(2 * kept):
                    await anext(shown)
                with psycopg.connect(postgres_url, autocommit=True) as connection:
                    connection.execute("DELETE FROM event WHERE first_seq > %s", [kept])
                    connection.execute("UPDATE session SET next_seq = %s", [kept + 1])
            await watch(two)._follower.poll()
            with pytest.raises(StopAsyncIteration):
                await anext(shown)

    run(main)
