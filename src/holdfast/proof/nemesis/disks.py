"""Disk faults: a full, a slow and a read-only disk."""

from __future__ import annotations

import os

from holdfast import ids
from holdfast.clock import system_clock
from holdfast.errors import HoldfastError
from holdfast.proof.nemesis.disk import LimitedDisk
from holdfast.proof.nemesis.episode import Episode
from holdfast.server.errors import status_of

__all__ = ["disk_full", "disk_read_only", "disk_slow"]

_ROUNDS = 2
_REFUSED_WITHIN_S = 10.0
_SLOW_S = 0.1
_PADDING = " " * 65_536
"""Large enough to exhaust the space that the store has already allocated."""
_STORE_CANNOT_BE_USED = 7
"""The exit code of ``holdfast serve`` for a store that cannot be used."""


class _Refusals:
    """One person's sends while the disk accepts no writes: each must be refused, and none may be stored."""

    def __init__(self, episode: Episode, code: str, status: int) -> None:
        self._episode = episode
        self._code = code
        self._status = status
        self._refused: list[tuple[str, str]] = []

    async def meet(self) -> None:
        """Send messages until one is refused, and check the error that the client receives."""
        tally = self._episode.tally
        end = system_clock.monotonic() + _REFUSED_WITHIN_S
        while system_clock.monotonic() < end:
            key, content = ids.message_id(), self._episode.content("emit") + _PADDING
            try:
                await self._episode.admin.session(f"refused-{key}").send(content, idempotency_key=key, agent=None)
            except HoldfastError as error:
                self._refused.append((key, content))
                status = status_of(type(error))
                told = f"{error.code} ({status}): {error}"
                tally.check(error.code == self._code, f"a send was refused with {told} instead of {self._code}")
                tally.check(
                    status_of(type(error)) == self._status, f"a send was refused with {told} instead of {self._status}"
                )
                tally.check(bool(error.hint), f"a send was refused without a hint: {told}")
                return
        tally.check(False, f"no send was refused within {_REFUSED_WITHIN_S:g} s")

    async def repeat(self) -> None:
        """Send the refused messages again, and check that the server accepts each as a new message."""
        tally = self._episode.tally
        for key, content in self._refused:
            session = self._episode.admin.session(f"refused-{key}")
            try:
                receipt = await session.send(content, idempotency_key=key, agent=None)
            except HoldfastError as error:
                tally.check(False, f"what was refused cannot be sent again: {error.code}: {error.message}")
            else:
                tally.check(receipt.disposition != "duplicate", "a refused message had been stored")


async def disk_full(episode: Episode) -> None:
    """Fill the disk under load and make room again, twice; then fill it once more, kill the server, and restart it."""
    tally, disk, server = episode.tally, episode.disk, episode.server
    for _ in range(_ROUNDS):
        refusals = _Refusals(episode, "store_full", 503)
        episode.progress("the disk is full")
        await disk.fill(server.pid)
        tally.injected["full"] += 1
        await refusals.meet()
        await episode.watch(episode.ask.span_s)
        await refusals.meet()
        await disk.free(server.pid)
        await episode.goes_on("a full disk")
        await refusals.repeat()
    episode.progress("killed on a full disk")
    await disk.fill(server.pid)
    await episode.kill()
    tally.injected["killed when full"] += 1
    if await episode.start():
        await disk.free(server.pid)
    else:
        await _look_at_refused_start(episode, "store_full")
        await disk.free(None)
        await episode.start_again("a full disk")
    await episode.goes_on("a start on a disk that had been full")


async def disk_slow(episode: Episode) -> None:
    """Make each commit slower, under load."""
    for slow_s in (_SLOW_S, 3 * _SLOW_S):
        episode.progress(f"each commit takes {slow_s:g} s more")
        await episode.pull(slow_s=slow_s)
        await episode.goes_on("commits became slow")
        await episode.watch(episode.ask.span_s)
        await episode.pull(slow_s=0.0)
        await episode.goes_on("commits had been slow")


async def disk_read_only(episode: Episode) -> None:
    """Refuse writes as if the file had become read-only; then kill the server and restart it on a read-only disk."""
    tally, disk = episode.tally, episode.disk
    refusals = _Refusals(episode, "store_read_only", 503)
    episode.progress("the store is read-only")
    await episode.pull(read_only=True)
    await refusals.meet()
    await episode.watch(episode.ask.span_s)
    await refusals.meet()
    await episode.pull(read_only=False)
    await episode.goes_on("a read-only store")
    await refusals.repeat()
    await episode.kill()
    if isinstance(disk, LimitedDisk) and os.geteuid() == 0:
        tally.injected["read-only at the start"] += 0  # root can write regardless
    else:
        episode.progress("started on a read-only disk")
        await disk.set_read_only(True)
        tally.injected["read-only at the start"] += 1
        if tally.check(not await episode.start(), "a server started on a read-only disk"):
            await _look_at_refused_start(episode, "store_read_only")
        else:
            await episode.kill()
        await disk.set_read_only(False)
    await episode.start_again("a read-only disk")
    await episode.goes_on("a start on a disk that had been read-only")


async def _look_at_refused_start(episode: Episode, code: str) -> None:
    tally, refusal = episode.tally, await episode.refused()
    exited, told = refusal.exited, refusal.message
    tally.check(exited == _STORE_CANNOT_BE_USED, f"a start that the disk refuses ends with exit code {exited}: {told}")
    tally.check(refusal.code == code, f"a start that the disk refuses reports {refusal.code or 'no code'}: {told}")
