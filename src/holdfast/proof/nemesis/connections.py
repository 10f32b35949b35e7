"""Connection faults: thousands of connections, opened and dropped in the middle of a request."""

from __future__ import annotations

import asyncio
import resource

import msgspec
import psutil

from holdfast import ids
from holdfast.clock import system_clock
from holdfast.errors import HoldfastError, ServerUnreachable
from holdfast.proof.nemesis.episode import Episode
from holdfast.proof.raw_connection import RawConnection

__all__ = ["connections"]

_BATCH = 400
_KEPT_FREE = 256
_HELD_S = 0.02
_GONE_S = 20.0
_POLL_S = 0.05
_SLOW_S = 2.0
_MEMORY_SLACK_BYTES = 64 << 20
_DESCRIPTOR_SLACK = 64
_SETTLED_S = 0.5
_KINDS = ("idle", "half a head", "half a body", "right after a send", "a stream never read")
_SENDERS = 10
_BYSTANDER_S = 1.0


class _Bystander:
    """Another user, whose runs continue while connections are opened and dropped."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode
        self._session = episode.admin.session(f"bystander-{ids.message_id()}")
        self._receipts: list[str] = []

    async def works(self) -> None:
        """Send one message after another, until cancelled."""
        while True:
            content = self._episode.content("emit", "call", "thread", span_s=_BYSTANDER_S)
            receipt = await self._session.send(content, agent=None)
            self._receipts.append(receipt.message_id)
            await self._session.wait(receipt.message_id, timeout_s=_GONE_S)

    async def look(self) -> None:
        """Check that all runs of the bystander have completed."""
        for message_id in self._receipts:
            state = (await self._session.wait(message_id, timeout_s=_GONE_S)).state
            self._episode.tally.check(state == "completed", f"a run beside the connections is {state}")


async def connections(episode: Episode) -> None:
    """Open and drop connections of each kind in turn, in batches, while a bystander's runs continue."""
    tally, total = episode.tally, episode.ask.connections
    batch = max(len(_KINDS), min(_BATCH, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _KEPT_FREE) // 4))
    bystander = _Bystander(episode)
    working = asyncio.create_task(bystander.works(), name="bystander")
    senders = [f"cut-{number}-{ids.message_id()[-6:]}" for number in range(_SENDERS)]
    opened = min(2 * len(_KINDS), total)
    await _opened_and_dropped(episode, senders, opened)  # warm-up: makes what exists once
    await asyncio.sleep(_SETTLED_S)
    before = await _held(episode)
    try:
        while opened < total:
            count = min(batch, total - opened)
            await _opened_and_dropped(episode, senders, count)
            opened += count
            episode.progress(f"{opened:,} connections opened and dropped")
            if episode.load.broken is not None:
                raise episode.load.broken
    finally:
        tally.check_alive(working)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    await bystander.look()
    await _come_to_rest(episode, senders)
    after = await _held(episode, below=before)
    for what, slack in (("descriptors", _DESCRIPTOR_SLACK), ("memory", _MEMORY_SLACK_BYTES)):
        tally.check(
            after[what] <= before[what] + slack,
            f"the server holds {after[what]:,} of {what} after {opened:,} connections, {before[what]:,} before",
        )
    began = system_clock.monotonic()
    await episode.goes_on(f"{opened:,} connections")
    took_s = system_clock.monotonic() - began
    tally.check(took_s < _SLOW_S, f"an answer takes {took_s:.1f} s after {opened:,} connections")


async def _opened_and_dropped(episode: Episode, senders: list[str], count: int) -> None:
    """Open a batch of connections, hold all of them open at once, and drop them."""
    lines = [RawConnection(episode.settings.port, episode.admin_key) for _ in range(count)]
    try:
        for line in lines:
            await line.open()
        for number, line in enumerate(lines):
            kind = _KINDS[number % len(_KINDS)]
            key = senders[number // len(_KINDS) % len(senders)]
            episode.tally.injected[kind] += await _begin(episode, line, kind, key)
        await asyncio.sleep(_HELD_S)
    finally:
        for number, line in enumerate(lines):
            line.drop(reset=bool(number // len(_KINDS) % 2))


async def _begin(episode: Episode, line: RawConnection, kind: str, key: str) -> bool:
    """Send the data of a connection of this kind; return False if the server has already closed the connection."""
    message = {"content": episode.content("emit", span_s=0.0), "idempotency_key": ids.message_id(), "policy": "reject"}
    head, body = line.request("POST", f"/v1/sessions/{key}/messages", msgspec.json.encode(message))
    match kind:
        case "half a head":
            return await line.say(head[: len(head) // 2])
        case "half a body":
            return await line.say(head + body[: len(body) // 2])
        case "right after a send":
            return await line.say(head + body)
        case "a stream never read":
            return await line.say(line.request("GET", f"/v1/sessions/{key}/events")[0])
        case _:
            return True


async def _held(episode: Episode, below: dict[str, int] | None = None) -> dict[str, int]:
    """Return the server's descriptors and memory; with `below`, wait until there are about as few descriptors."""
    deadline = system_clock.monotonic() + _GONE_S
    while True:
        try:
            process = psutil.Process(episode.server.pid)
            held = {"descriptors": process.num_fds(), "memory": process.memory_info().rss}
        except psutil.NoSuchProcess:
            raise ServerUnreachable("the server exited while connections were opened and dropped") from None
        if below is None or held["descriptors"] <= below["descriptors"] + _DESCRIPTOR_SLACK:
            return held
        if system_clock.monotonic() > deadline:
            return held
        await asyncio.sleep(_POLL_S)


async def _come_to_rest(episode: Episode, senders: list[str]) -> None:
    """Check that messages whose senders did not wait for the answer are settled."""
    for key in senders:
        session = episode.admin.session(key)
        deadline = system_clock.monotonic() + _GONE_S
        told = "it does not exist"
        while system_clock.monotonic() < deadline:
            try:
                view = await session.info()
            except HoldfastError as error:
                told = error.code
            else:
                told = f"run {view.run_id}, {view.waiting} waiting"
                if view.run_id is None and not view.waiting:
                    told = ""
                    break
            await asyncio.sleep(_POLL_S)
        episode.tally.check(not told, f"session {key} whose senders went away does not come to rest: {told}")
