"""Reader faults: readers that never read, read a byte at a time, disconnect, or close their sending half."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from holdfast import ids
from holdfast.clock import system_clock
from holdfast.errors import format_error
from holdfast.proof.nemesis.episode import Episode
from holdfast.proof.raw_connection import RawConnection
from holdfast.protocol.events import Gap

__all__ = ["STALL_S", "hostile_readers"]

STALL_S = 1.0
"""Time in seconds after which the server in this episode drops a reader that reads nothing."""

_OF_EACH_KIND = 6
_POURS = 3
_CAUGHT_UP_S = 20.0
_POLL_S = 0.05
_EMPTIED_S = 5.0
_BITE_BYTES = 512
_STREAMING = 200


class _HonestReader:
    """Reads every event of a session while others misbehave."""

    def __init__(self, episode: Episode, key: str) -> None:
        self._session = episode.admin.session(key)
        self.seen: list[int] = []
        self.gaps = 0

    async def read(self) -> None:
        async with aclosing(self._session.events()) as events:
            async for event in events:
                if isinstance(event, Gap):
                    self.gaps += 1
                else:
                    self.seen.append(event.seq)


async def hostile_readers(episode: Episode) -> None:
    """Connect readers of all kinds to a session that emits many events."""
    tally = episode.tally
    session = episode.admin.session(f"poured-{ids.message_id()}")
    await session.send(episode.content("emit"), agent=None)
    honest = _HonestReader(episode, session.key)
    acts = {
        "reader of a byte at a time": _byte_by_byte,
        "reader that breaks off": _breaks_off,
        "reader that closes its half": _half_closes,
    }
    over = asyncio.Event()
    tasks = [asyncio.create_task(honest.read(), name="honest reader")]
    tasks += [
        asyncio.create_task(act(episode, session.key), name=name)
        for name, act in acts.items()
        for _ in range(_OF_EACH_KIND)
    ]
    stalled = [
        asyncio.create_task(_never_reads(episode, session.key, over), name="reader that never reads")
        for _ in range(_OF_EACH_KIND)
    ]
    try:
        for _ in range(_POURS):
            episode.progress(f"{_OF_EACH_KIND} readers of each kind at {len(honest.seen)} events")
            receipt = await session.send(episode.content("pour", "emit"), agent=None)
            settled = await session.wait(receipt.message_id, timeout_s=_CAUGHT_UP_S)
            tally.check(settled.state == "completed", f"a run that slow readers watch is {settled.state}")
            await episode.watch(episode.ask.span_s / _POURS)
        newest = (await session.info()).seq
        end = system_clock.monotonic() + _CAUGHT_UP_S
        while len(honest.seen) < newest and system_clock.monotonic() < end:  # noqa: ASYNC110 - no event signals it
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(2 * STALL_S)
        over.set()
        for let_go in await asyncio.gather(*stalled, return_exceptions=True):
            if isinstance(let_go, BaseException):
                tally.check(False, f"the reader that never reads died of {format_error(let_go)}")
            elif not episode.ask.agents:  # output of other agents may fit into the socket
                tally.check(let_go, "a reader that never reads is not dropped")
        tally.check(
            honest.seen == list(range(1, newest + 1)) and not honest.gaps,
            f"an honest reader beside slow ones saw {len(honest.seen)} of {newest} events and {honest.gaps} gaps",
        )
    finally:
        for task in tasks:
            tally.check_alive(task)
        for doomed in (*tasks, *stalled):
            doomed.cancel()
        await asyncio.gather(*tasks, *stalled, return_exceptions=True)
    await episode.goes_on("slow and vanishing readers")


async def _connected(episode: Episode, key: str, kind: str) -> RawConnection:
    """Open an event stream of the session, and return the connection once the stream has started."""
    line = RawConnection(episode.settings.port, episode.admin_key)
    try:
        await line.open(small=True)
        await line.say(line.request("GET", f"/v1/sessions/{key}/events")[0])
        async with asyncio.timeout(_CAUGHT_UP_S):
            status = await line.status()
        if status != _STREAMING:
            raise ConnectionError(f"the server answered a request for an event stream with status {status}")
    except BaseException:
        line.drop()
        raise
    episode.tally.injected[kind] += 1
    return line


async def _never_reads(episode: Episode, key: str, over: asyncio.Event) -> bool:
    """Hold a stream unread until `over` is set; return whether the server has dropped it."""
    line = await _connected(episode, key, "never reads")
    try:
        await over.wait()
        async with asyncio.timeout(_EMPTIED_S):
            while await line.take(1 << 16):
                pass
    except TimeoutError:
        return False
    finally:
        line.drop()
    return True


async def _byte_by_byte(episode: Episode, key: str) -> None:
    line = await _connected(episode, key, "a byte at a time")
    try:
        while True:
            await line.take(1)
            await asyncio.sleep(_POLL_S)
    finally:
        line.drop()


async def _breaks_off(episode: Episode, key: str) -> None:
    while True:
        line = await _connected(episode, key, "broken off")
        try:
            await line.take(_BITE_BYTES)
        finally:
            line.drop(reset=True)
        await asyncio.sleep(4 * _POLL_S)


async def _half_closes(episode: Episode, key: str) -> None:
    while True:
        line = await _connected(episode, key, "half closed")
        try:
            await line.take(_BITE_BYTES)
            line.half_close()
            await line.take(_BITE_BYTES)
            await asyncio.sleep(4 * _POLL_S)
        finally:
            line.drop()
