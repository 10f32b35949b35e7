"""Events of a session that is not there yet: its readers wait, and everything that makes the session wakes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from holdfast import Host, Run, Settings, agent
from holdfast.errors import InvalidCursor, LimitExceeded, SessionDeleted, UnknownSession
from holdfast.events import Gap
from holdfast.host import Session
from holdfast.protocol.events import format_cursor

_LONG_S = 3600.0
"""No keep-alive comes: whoever is woken was woken by what made the session."""


@agent
async def echo(run: Run) -> str:
    """Says it again."""
    return run.text


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where the store is."""
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/store.db"


@asynccontextmanager
async def hosted(store: str, **settings: object) -> AsyncIterator[Host]:
    """A host whose streams send no keep-alive."""
    given = Settings(**{"drain_timeout_s": 1, "grace_s": 1, "keepalive_s": _LONG_S, **settings})  # type: ignore[arg-type]
    async with asyncio.timeout(60), Host(echo, store=store, settings=given) as host:
        yield host


async def first_kind(session: Session) -> str:
    """The kind of the session's first event."""
    async with aclosing(session.events()) as events:
        return (await anext(events)).kind


async def waits(host: Host, reading: asyncio.Task[str]) -> None:
    """Return once the reader waits; it has looked by then."""
    while not host.readers:
        assert not reading.done(), reading.result()
        await asyncio.sleep(0)
    await host.sessions()  # a look behind the reader's own
    assert not reading.done()


async def sent(host: Host) -> None:
    """By a message."""
    await host.session("s").send("hello")


async def scheduled(host: Host) -> None:
    """By a schedule."""
    schedule = await host.schedule("s", "tick", every_s=_LONG_S)
    await schedule.run_now()


async def branched(host: Host) -> None:
    """By a branch of another session."""
    await host.session("old").ask("hello")
    await host.session("old").fork("s")


async def imported(host: Host) -> None:
    """By an import."""
    await host.session("old").ask("hello")
    await host.session("s").import_history(await host.session("old").export())


@pytest.mark.parametrize("make", [sent, scheduled, branched, imported])
def test_what_makes_a_session_wakes_its_readers(store: str, make: Callable[[Host], Awaitable[None]]) -> None:
    async def main() -> None:
        async with hosted(store) as host:
            reading = asyncio.create_task(first_kind(host.session("s")))
            await waits(host, reading)
            await make(host)
            assert await reading == ("message.accepted" if make in (sent, scheduled) else "history.edited")
            assert host.readers == 0
            assert not host.directory.awaited, "nothing is kept of a wait that is over"

    asyncio.run(main())


def test_a_message_that_gets_no_run_yet_wakes_readers_too(store: str) -> None:
    async def main() -> None:
        async with hosted(store) as host:
            reading = asyncio.create_task(first_kind(host.session("s")))
            await waits(host, reading)
            await host.session("s").send("later", policy="collect", quiet_s=_LONG_S, max_wait_s=_LONG_S)
            assert await reading == "message.accepted"

    asyncio.run(main())


def test_waiting_makes_no_rows_and_sees_nothing_of_others(store: str) -> None:
    async def main() -> None:
        async with hosted(store) as host:
            mallory = asyncio.create_task(first_kind(host.session("s", principal="mallory")))
            await waits(host, mallory)
            await host.session("s").ask("a secret")
            await host.session("t", principal="mallory").ask("another session")
            assert not mallory.done()
            assert [view.key for view in await host.sessions(principal="mallory")] == ["t"]
            mallory.cancel()
            await asyncio.wait([mallory])
            assert host.readers == 0
            assert not host.directory.awaited

    asyncio.run(main())


def test_a_reader_that_waits_sees_all_that_one_sees_who_comes_later(store: str) -> None:
    async def main() -> None:
        async with hosted(store) as host:
            session = host.session("s")

            async def read() -> list[object]:
                found: list[object] = []
                async with aclosing(session.events()) as events:
                    async for event in events:
                        found.append(event)
                        if event.kind == "message.settled":
                            break
                return found

            early = [asyncio.create_task(read()) for _ in range(5)]
            while host.readers < len(early):
                assert not any(reading.done() for reading in early)
                await asyncio.sleep(0)
            receipt = await session.send("hello")
            await session.wait(receipt.message_id)
            late = [event async for event in session.events(follow=receipt.message_id)]
            assert not any(isinstance(event, Gap) for event in late)
            for reading in early:
                assert await reading == late

    asyncio.run(main())


def test_a_wait_has_keep_alives_and_ends_with_the_streams(store: str) -> None:
    async def main() -> None:
        async with hosted(store) as host:
            async with aclosing(await host.session("s").open_log(keepalive_s=0.001)) as log:
                assert await anext(log) is None
                assert log.position == "0"
                assert host.readers == 1
            reading = asyncio.create_task(anext(host.session("s").events(), None))
            while not host.readers:
                await asyncio.sleep(0)
            host.close_streams()
            assert await reading is None
            assert [event async for event in host.session("s").events()] == [], "and nobody waits from then on"

    asyncio.run(main())


def test_only_the_beginning_can_be_waited_for(store: str) -> None:
    async def main() -> None:
        async with hosted(store) as host:
            session = host.session("s")
            with pytest.raises(UnknownSession):
                await anext(session.events(after=format_cursor(0, 1)))
            with pytest.raises(UnknownSession):
                await anext(session.events(follow="m_none"))
            with pytest.raises(UnknownSession):
                await anext(session.events(after="nonsense"))
            await session.ask("hello")
            assert (await anext(session.events(after="0"))).kind == "message.accepted"
            with pytest.raises(InvalidCursor):
                await anext(session.events(after="1"))
            await session.delete()
            with pytest.raises(SessionDeleted):
                await anext(session.events())

    asyncio.run(main())


def test_a_session_that_the_store_refuses_wakes_nobody(store: str) -> None:
    async def main() -> None:
        async with hosted(store, principal_sessions=1) as host:
            await host.session("one").ask("x")
            reading = asyncio.create_task(first_kind(host.session("s")))
            await waits(host, reading)
            with pytest.raises(LimitExceeded):
                await host.session("s").send("one too many")
            assert not reading.done()
            reading.cancel()
            await asyncio.wait([reading])

    asyncio.run(main())
