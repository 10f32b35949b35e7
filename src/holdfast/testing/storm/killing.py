"""The storm over a server of its own, which it kills: once at every failpoint, then at random moments."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import msgspec

from holdfast import failpoints, ids
from holdfast.client import Client
from holdfast.clock import system_clock
from holdfast.errors import HoldfastError
from holdfast.server.auth import make_key
from holdfast.storage import open_store
from holdfast.testing.history import Opened, Record, StatisticsRead
from holdfast.testing.storm.access import RemoteAccess
from holdfast.testing.storm.embedded import LIMITS, PRINCIPALS, SETTINGS, warm_up
from holdfast.testing.storm.load import Load
from holdfast.testing.storm.recorder import Recorder
from holdfast.testing.storm.server import OwnServer, free_port
from holdfast.testing.storm.stamps import read_stamps
from holdfast.testing.storm.watch import in_tree, note_processes, process_figures, until_gone

__all__ = ["kill_storm"]

Progress = Callable[[str], None]

_HIT_S = 20.0
_AT_START = ("restart", "rescue")
"""Verbs of the store that a start calls for what a kill has left."""


class _KillStorm:
    """One storm: its server, its clients, its load and its watchers."""

    def __init__(self, recorder: Recorder, server: OwnServer, access: RemoteAccess, load: Load, admin: Client) -> None:
        self.recorder = recorder
        self.server = server
        self.access = access
        self.load = load
        self.admin = admin
        self.storm = server.storm

    async def start(self, failpoint: str | None = None) -> bool:
        ready = await self.server.start(failpoint)
        if ready:
            self.access.up.set()
        return ready

    async def kill(self) -> None:
        self.access.up.clear()
        await self.server.kill()

    async def hit(self, name: str) -> bool:
        """Let the next incarnation end itself at a failpoint, under load. The one before is dead already."""
        if name.split(".")[1] in _AT_START:
            await self.start()
            await self.load.linger(8, 5.0)
            await self.kill()
        if not await self.start(name):
            return await self.server.died_at(name, _HIT_S)
        provoking = asyncio.create_task(self._provoke(name.split(".")[1]), name=f"storm provokes {name}")
        try:
            died = await self.server.died_at(name, _HIT_S)
        finally:
            self.access.up.clear()
            provoking.cancel()
            with suppress(asyncio.CancelledError):
                await provoking
        if not died:
            await self.server.kill()
        return died

    async def _provoke(self, verb: str) -> None:
        """Do what makes the store execute a verb, again and again."""
        acts: dict[str, Callable[[], Awaitable[None]]] = {
            "add_key": self._make_a_key,
            "revoke_key": self._make_a_key,
            "delete_session": self._delete_a_session,
        }
        act = acts.get(verb, self._act)
        while True:
            with suppress(HoldfastError):
                await act()
            await asyncio.sleep(0.05)

    async def _act(self) -> None:
        await self.load.act()

    async def _make_a_key(self) -> None:
        body = {"principal": "nobody", "role": "user", "label": "made by a storm"}
        answer = await self.admin.request("POST", "/v1/keys", body=body)
        key_id = msgspec.json.decode(answer.content)["key"]["key_id"]
        await self.admin.request("DELETE", f"/v1/keys/{key_id}")

    async def _delete_a_session(self) -> None:
        """A session outside the history: what is deleted cannot be read back."""
        session = self.admin.session(ids.message_id())
        await session.send("{}", agent=None)
        await session.delete()

    async def watch(self, seconds: float) -> None:
        """Look at the processes until the time is over. Raises what broke in the load."""
        end = system_clock.monotonic() + seconds
        while (left := end - system_clock.monotonic()) > 0:
            await asyncio.sleep(min(0.5, left))
            await note_processes(self.recorder, self.storm)
            if self.load.broken is not None:
                raise self.load.broken

    async def figures(self, moment: str) -> None:
        tree = await self.admin.tree(everybody=True)
        self.recorder.note(
            StatisticsRead,
            incarnation=self.server.incarnation,
            moment=moment,
            running=len([run for session in tree.children for run in session.children]),
            in_tree=in_tree(tree),
            **process_figures(self.server.pid),
        )


def registered_failpoints() -> tuple[str, ...]:
    """All failpoints that a server has: those of everything it imports."""
    import holdfast.server
    import holdfast.storage.sqlite  # noqa: F401

    return failpoints.names()


async def kill_storm(
    *,
    sessions: int,
    seconds: float,
    kill_every_s: float,
    seed: int,
    progress: Progress,
    rate: float | None = None,
    points: Iterable[str] | None = None,
) -> list[Record]:
    """Run a storm over a server of its own and return its history.

    Parameters:
        sessions: how many sessions are driven.
        seconds: how long it is killed at random; the failpoints come before.
        kill_every_s: mean time between two kills.
        seed: of all choices.
        progress: told what goes on.
        rate: actions per second over all sessions.
        points: the failpoints to kill at; by default all that are registered.

    Raises:
        ServerUnreachable: the server cannot be started.
    """
    recorder = Recorder()
    chance = random.Random(seed)
    storm = ids.node_id()
    names = registered_failpoints() if points is None else tuple(points)
    recorder.note(
        Opened,
        seed=seed,
        mode="kill",
        sees=("clients", "stamps", "processes", "kills", "drain", "host", "principals"),
        limits=LIMITS,
        failpoints=names,
    )
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-storm-")))
        settings = msgspec.structs.replace(
            SETTINGS, port=free_port(), store=f"sqlite:///{folder / 'storm.db'}", principal_rate_per_s=0.0
        )
        keys = await _make_keys(settings.store)
        server = OwnServer(folder, recorder, LIMITS, storm, settings)
        access = await stack.enter_async_context(RemoteAccess(server.url, {name: keys[name] for name in PRINCIPALS}))
        admin = await stack.enter_async_context(Client(server.url, keys["admin"], retry_s=0.0))
        load = Load(access, recorder, LIMITS, sessions=sessions, rate=rate or min(150.0, 3.0 * sessions), seed=seed)
        own = _KillStorm(recorder, server, access, load, admin)
        try:
            await _storm(own, names, seconds, kill_every_s, chance, progress)
        finally:
            if server.alive:
                await server.kill()
        recorder.records.extend(read_stamps(server.stamps))
    return recorder.records


async def _storm(
    own: _KillStorm,
    names: tuple[str, ...],
    seconds: float,
    kill_every_s: float,
    chance: random.Random,
    progress: Progress,
) -> None:
    load, server = own.load, own.server
    await own.start()
    await warm_up(own.access, load, "warm-1")
    await own.figures("baseline")
    progress("fairness: one greedy principal among polite ones")
    await load.contend(places=SETTINGS.max_runs, greedy=60, polite=15, span_s=2.0)
    load.start()
    await own.watch(1.0)
    await own.kill()
    await _kill_at_failpoints(own, names, progress)
    await own.start()
    end = system_clock.monotonic() + seconds
    while (left := end - system_clock.monotonic()) > 0:
        progress(f"killing at random: incarnation {server.incarnation}, {left:.0f} s left")
        await own.watch(min(left, chance.uniform(0.2, 2 * kill_every_s - 0.2)))
        if chance.random() < 0.5:
            await load.linger(4, kill_every_s)
        await own.kill()
        await note_processes(own.recorder, own.storm)
        await own.start()
    progress("clean shutdown in the middle of the load")
    await own.watch(1.0)
    await load.linger(8, 3.0)
    await server.end()
    own.access.up.clear()
    await own.start()
    await own.watch(1.0)
    await load.stop()
    progress("coming to rest")
    await load.rest()
    await asyncio.sleep(0.5)
    await note_processes(own.recorder, own.storm)
    await own.figures("quiet")
    progress("reading everything back")
    await load.read_back()
    await server.end()
    await until_gone(own.recorder, own.storm, LIMITS.death_s)


async def _kill_at_failpoints(own: _KillStorm, names: tuple[str, ...], progress: Progress) -> None:
    missed = []
    for number, name in enumerate(names, 1):
        progress(f"killing at failpoint {number} of {len(names)}: {name}")
        if not await own.hit(name):
            missed.append(name)
        if own.load.broken is not None:
            raise own.load.broken
    for name in missed:
        progress(f"once more, as it was not reached: {name}")
        await own.hit(name)


async def _make_keys(store_url: str) -> dict[str, str]:
    """A key for each principal and one for the storm itself, in a store that no server has open."""
    store = open_store(store_url)
    at = system_clock.now()
    await store.open(node_id=ids.node_id(), at=at)
    secrets: dict[str, str] = {}
    try:
        for principal in (*PRINCIPALS, "admin"):
            record, secret = make_key(
                principal=principal, role="admin" if principal == "admin" else "user", label="storm", at=at
            )
            await store.add_key(record)
            secrets[principal] = secret
    finally:
        await store.close()
    return secrets
