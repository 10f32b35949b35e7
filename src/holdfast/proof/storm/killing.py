"""A storm over a dedicated server, which is killed once at every failpoint, then at random moments."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import msgspec

from holdfast import failpoints, ids
from holdfast.client import Client
from holdfast.clock import system_clock
from holdfast.errors import HoldfastError
from holdfast.proof.history import PeopleSettled
from holdfast.proof.storm.access import Progress, RemoteAccess
from holdfast.proof.storm.admin import AdminLoad
from holdfast.proof.storm.bounds import HOSTILE, HOSTILE_BOUNDS, LIMITS, PRINCIPALS, SETTINGS
from holdfast.proof.storm.contention import contend
from holdfast.proof.storm.hostile import Hostile
from holdfast.proof.storm.human_in_the_loop import People
from holdfast.proof.storm.load import Load
from holdfast.proof.storm.recorder import StormRecorder
from holdfast.proof.storm.schedules import ScheduleLoad
from holdfast.proof.storm.server import OwnServer, free_port
from holdfast.proof.storm.stamps import read_stamps
from holdfast.proof.storm.wall_probe import can_build_walls
from holdfast.proof.storm.watch import note_processes, server_figures, until_gone
from holdfast.server.auth import make_key
from holdfast.storage import open_store

__all__ = ["kill_storm", "make_keys", "registered_failpoints"]

_HIT_S = 60.0
_LARGE_BYTES = 1 << 19
"""Size of an attachment. About thirty of them fill the write-ahead log, so that it is reused."""
_OF_STOPS = ("interrupt", "stop_session")
"""Verbs of the store that must be called while a run is active."""

_QUIET_S = 2.0
"""Time for which a server's memory must have been stable before it is compared, so that the load's own use does not
count."""
_GROWTH_BYTES = 1_000_000
_SETTLE_LONGEST_S = 20.0
_BESIEGED_S = 8.0
"""Minimum time that a hostile principal acts before the first kill."""
_BESIEGED_LONGEST_S = 60.0
_HOSTILE_SESSIONS, _HOSTILE_RATE = 3, 10.0
_STAND_BY_S = 3.0
"""Duration of the programs of bystanders, which run one after the other beside a hostile principal."""
_AT_START = ("restart", "rescue")
"""Verbs of the store that a start calls to recover from a kill."""


class _KillStorm:
    """One storm: its server, its clients, its load and its watchers."""

    def __init__(
        self,
        recorder: StormRecorder,
        server: OwnServer,
        access: RemoteAccess,
        load: Load,
        admin: Client,
        chance: random.Random,
    ) -> None:
        self.recorder = recorder
        self.server = server
        self.access = access
        self.load = load
        self.admin = admin
        self.people = People(admin, chance)
        self.timed = ScheduleLoad(admin)
        self.upkeep = AdminLoad(admin)
        self.storm = server.storm
        self.chance = chance
        self.hostile: Hostile | None = None

    async def start(self, failpoint: str | None = None) -> bool:
        ready = await self.server.start(failpoint)
        if ready:
            self.access.up.set()
        return ready

    async def kill(self) -> None:
        self.access.up.clear()
        await self.server.kill()

    async def begin(self, progress: Progress, *, contention: bool) -> None:
        """Start the first server, record its baseline, start the load, and kill the server.

        If `contention` is set, count each principal's runs under contention before the load starts. If the storm has a
        hostile principal, the principal acts before the kill.
        """
        await self.start()
        await self.load.warm_up()
        await self.figures("baseline")
        if contention:
            progress("fairness: one greedy principal among polite ones")
            await contend(self.load, places=SETTINGS.max_runs, greedy=60, polite=15, span_s=2.0)
        self.load.start()
        await self.watch(0.5)
        if self.hostile is not None:
            await self.besiege(self.hostile, progress)
        await self.kill()

    async def besiege(self, hostile: Hostile, progress: Progress) -> None:
        """Let a hostile principal act until all its actions have had an effect, for at most 60 seconds.

        Read the server's resources before this and after the principal has released everything. Then let the principal
        act again, during the kills.
        """
        progress("a hostile principal beside the others")
        await self.settle_memory()
        hostile.read_holdings("before")
        await hostile.prepare()
        hostile.begin()
        began = stood_by_at = system_clock.monotonic()
        while (spent_s := system_clock.monotonic() - began) < _BESIEGED_LONGEST_S:
            if spent_s >= _BESIEGED_S and not hostile.unfelt():
                break
            if system_clock.monotonic() >= stood_by_at:
                await self.load.stand_by(_STAND_BY_S)
                stood_by_at = system_clock.monotonic() + _STAND_BY_S
            await self.watch(0.5)
        await hostile.let_go()
        await self.settle_memory()
        hostile.read_holdings("after")
        hostile.begin()

    async def until_felt(self, hostile: Hostile) -> None:
        """Wait until all actions of a hostile principal have had an effect, for at most 60 seconds.

        Beside a load that takes the whole machine, programs at the lowest priority may not reach their quotas.
        """
        began = system_clock.monotonic()
        while hostile.unfelt() and system_clock.monotonic() - began < _BESIEGED_LONGEST_S:
            await self.watch(0.5)

    async def settle_memory(self) -> None:
        """Wait up to about 20 seconds until the server's memory stops growing under the current load."""
        most, quiet_s, began = 0, 0.0, system_clock.monotonic()
        while quiet_s < _QUIET_S and system_clock.monotonic() - began < _SETTLE_LONGEST_S:
            await self.watch(0.5)
            memory = self.server.memory
            quiet_s = 0.0 if memory > most + _GROWTH_BYTES else quiet_s + 0.5
            most = max(most, memory)

    async def kill_at_failpoints(self, names: Sequence[str], progress: Progress) -> None:
        """Kill the server once at each failpoint, and retry once each failpoint that was not reached."""
        missed = []
        for number, name in enumerate(names, 1):
            progress(f"killing at failpoint {number} of {len(names)}: {name}")
            if not await self.hit(name):
                missed.append(name)
            self.raise_broken()
        for name in missed:
            progress(f"once more, as it was not reached: {name}")
            await self.hit(name)

    async def kill_at_random(self, seconds: float, every_s: float, progress: Progress) -> None:
        """Kill the server at random moments for `seconds`, and leave a server running afterwards."""
        await self.start()
        end = system_clock.monotonic() + seconds
        while (left := end - system_clock.monotonic()) > 0:
            progress(f"killing at random: incarnation {self.server.incarnation}, {left:.0f} s left")
            await self.watch(min(left, self.chance.uniform(0.1 * every_s, 1.9 * every_s)))
            if self.chance.random() < 0.5:
                await self.load.linger(4, every_s)
            cuts = [asyncio.create_task(self.load.cut(stop=bool(number % 2)), name="storm cut") for number in range(3)]
            await asyncio.sleep(self.chance.uniform(0.6, 0.9))
            await self.kill()
            await note_processes(self.recorder, self.storm)
            await self.start()
            await asyncio.gather(*cuts)

    async def finish(self, progress: Progress) -> None:
        """Shut down cleanly in the middle of the load, start again, and read everything for the last time."""
        progress("clean shutdown in the middle of the load")
        await self.watch(0.5)
        await self.load.linger(8, 3.0)
        await self.server.end()
        self.access.up.clear()
        await self.start()
        await self.watch(0.5)
        await self.load.stop()
        await self.load.complete()
        if self.hostile is not None:
            await self.until_felt(self.hostile)
            await self.hostile.end()
        progress("coming to rest")
        await self.load.rest()
        if self.hostile is not None:
            await self.hostile.load.rest()
        looked_after = (self.people, self.timed, self.upkeep)
        wrong = [problem for one in looked_after for problem in await one.settle()]
        checked = sum(one.checked for one in looked_after)
        runs = self.people.runs | self.timed.runs | (set() if self.hostile is None else self.hostile.runs)
        self.recorder.note(PeopleSettled, checked=checked, wrong=tuple(wrong), runs=tuple(sorted(runs)))
        await note_processes(self.recorder, self.storm)
        await self.figures("quiet")
        progress("reading everything back")
        await self.load.read_back()
        if self.hostile is not None:
            await self.hostile.load.read_back()
        await self.server.end()
        await until_gone(self.recorder, self.storm, LIMITS.death_s)

    async def hit(self, name: str) -> bool:
        """Let the next incarnation kill itself at a failpoint under load, and return whether it did.

        The previous incarnation must be dead.
        """
        if name.split(".")[1] in _AT_START:
            await self.start()
            await self.load.linger(8, 5.0)
            await self.kill()
        self.load.calm = name.split(".")[1] in _OF_STOPS
        if not await self.start(name):
            return await self.server.died_at(name, _HIT_S)
        provoking = asyncio.create_task(self._provoke(name.split(".")[1]), name=f"storm provokes {name}")
        try:
            died = await self.server.died_at(name, _HIT_S)
        finally:
            self.access.up.clear()
            self.load.calm = False
            provoking.cancel()
            with suppress(asyncio.CancelledError):
                await provoking
        if not died:
            await self.server.kill()
        return died

    async def _provoke(self, verb: str) -> None:
        """Repeat the action that makes the host call a verb of the store, until cancelled."""
        acts: dict[str, Callable[[], Awaitable[None]]] = {
            "add_key": self.upkeep.make_a_key,
            "revoke_key": self.upkeep.make_a_key,
            "delete_session": self.upkeep.delete_a_session,
            "interrupt": partial(self.load.cut, stop=False),
            "stop_session": partial(self.load.cut, stop=True),
            "steer": self.people.steer,
            "suspend": self.people.ask,
            "answer": self.people.ask,
            "park": self.people.ask,
            "revoke_grant": self.people.grant,
            "edit_history": self.people.edit,
            "add_attachment": self.people.attach,
            "checkpoint": partial(self.people.attach, _LARGE_BYTES),
            "put_schedule": self.timed.change,
            "pause_schedule": self.timed.change,
            "delete_schedule": self.timed.change,
            "fire_schedule": self.timed.tick,
        }
        act = acts.get(verb, self.load.act)
        while True:
            with suppress(HoldfastError):
                await act()
            await asyncio.sleep(0.05)

    async def watch(self, seconds: float) -> None:
        """Record the storm's processes for `seconds`. Raises the error with which the load failed, if any."""
        end = system_clock.monotonic() + seconds
        while (left := end - system_clock.monotonic()) > 0:
            await asyncio.sleep(min(0.5, left))
            await note_processes(self.recorder, self.storm)
            if self.hostile is not None:
                self.hostile.read_holdings()
            self.raise_broken()

    def raise_broken(self) -> None:
        """Raise the error with which the load failed, if any. Such an error is a fault of the storm itself."""
        broken = self.load.broken or (None if self.hostile is None else self.hostile.broken)
        if broken is not None:
            raise broken

    async def figures(self, moment: str) -> None:
        await server_figures(self.admin, self.server.incarnation, self.server.pid, moment, self.recorder)


def registered_failpoints() -> tuple[str, ...]:
    """Return the failpoints of a server with a SQLite store.

    Other modules register theirs, too: for relocating a store, which a server never does, and for PostgreSQL.
    """
    import holdfast.server
    import holdfast.storage.sqlite  # noqa: F401

    return tuple(name for name in failpoints.names() if not name.startswith(("relocation.", "postgres.")))


async def kill_storm(
    recorder: StormRecorder,
    *,
    folder: Path,
    sessions: int,
    seconds: float,
    kill_every_s: float,
    seed: int,
    points: Sequence[str],
    progress: Progress,
    rate: float | None = None,
    prefix: str = "s",
    first: int = 1,
    contention: bool = True,
    hostile: bool = False,
) -> None:
    """Run a storm over a dedicated server.

    Parameters:
        recorder: recorder of the history, which already has the opening record.
        folder: existing empty folder for the store, the stamps and the server's stderr.
        sessions: number of sessions that the load drives.
        seconds: duration of the random kills, which follow the kills at failpoints, in seconds.
        kill_every_s: mean time between two random kills, in seconds.
        seed: random seed.
        points: names of the failpoints at which the server is killed.
        progress: called with progress messages.
        rate: actions per second over all sessions; None selects a rate by the number of sessions.
        prefix: prefix of all names, which must differ from that of any other storm in the same history.
        first: number of the first incarnation.
        contention: whether to also count each principal's runs while all run slots are in use.
        hostile: whether to add a hostile principal, which acts until the load is stopped.

    Raises:
        ServerUnreachable: if the server cannot be started.
    """
    async with AsyncExitStack() as stack:
        settings = msgspec.structs.replace(
            SETTINGS, port=free_port(), store=f"sqlite:///{folder / 'storm.db'}", principal_rate_per_s=0.0
        )
        if hostile:
            settings = msgspec.structs.replace(settings, **HOSTILE_BOUNDS)
        keys = await make_keys(settings.store)
        server = OwnServer(folder, recorder, LIMITS, ids.node_id(), settings, first=first)
        access = await stack.enter_async_context(RemoteAccess(server.url, {name: keys[name] for name in PRINCIPALS}))
        admin = await stack.enter_async_context(Client(server.url, keys["admin"], retry_s=0.0))
        load = Load(
            access,
            recorder,
            LIMITS,
            sessions=sessions,
            rate=rate or min(150.0, 3.0 * sessions),
            seed=seed,
            prefix=prefix,
        )
        own = _KillStorm(recorder, server, access, load, admin, random.Random(seed))
        if hostile:
            walled = can_build_walls()
            if not walled:
                progress("no bombs are thrown: programs run without walls here")
            enemy = RemoteAccess(server.url, {HOSTILE: keys[HOSTILE]}, up=access.up)
            own.hostile = Hostile(
                recorder,
                server,
                await stack.enter_async_context(enemy),
                admin,
                key=keys[HOSTILE],
                port=settings.port,
                streams=settings.principal_streams,
                load=Load(
                    enemy,
                    recorder,
                    LIMITS,
                    sessions=_HOSTILE_SESSIONS,
                    rate=_HOSTILE_RATE,
                    seed=seed,
                    prefix=f"{prefix}-{HOSTILE}-",
                    limited=True,
                ),
                bombs=walled,
                seed=seed,
            )
        try:
            await own.begin(progress, contention=contention)
            await own.kill_at_failpoints(points, progress)
            await own.kill_at_random(seconds, kill_every_s, progress)
            await own.finish(progress)
        finally:
            if own.hostile is not None:
                await own.hostile.abandon()
            await load.abandon()
            if server.alive:
                await server.kill()
            if server.stamps.exists():
                stamps = read_stamps(server.stamps)
                recorder.records.extend(stamp for stamp in stamps if stamp.principal in (*PRINCIPALS, HOSTILE))


async def make_keys(store_url: str) -> dict[str, str]:
    """Create a user key for each principal, including the hostile one, and a key for the administrator ``admin``.

    Returns the keys by principal. No server may have the store open meanwhile.
    """
    store = open_store(store_url)
    at = system_clock.now()
    await store.open(node_id=ids.node_id(), at=at)
    secrets: dict[str, str] = {}
    try:
        for principal in (*PRINCIPALS, HOSTILE, "admin"):
            record, secret = make_key(
                principal=principal, role="admin" if principal == "admin" else "user", label="storm", at=at
            )
            await store.add_key(record)
            secrets[principal] = secret
    finally:
        await store.close()
    return secrets
