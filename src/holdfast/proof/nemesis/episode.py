"""One episode of a nemesis: a dedicated server under the storm's load, into which one fault is injected.

Every episode has the same steps: a warm-up, a baseline, load, the injections of the fault, quiescence, a final read of
all sessions, and a clean shutdown. The observations of clients, readers and agents form one history, which the storm's
checker judges. Checks that are specific to the fault are recorded in a `Tally`.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from holdfast import ids
from holdfast.client import Client
from holdfast.clock import system_clock
from holdfast.errors import HoldfastError, ServerUnreachable, StorageError, WaitExpired, format_error
from holdfast.proof.history import Opened, Source, StatisticsRead
from holdfast.proof.nemesis.disk import Disk, open_disk
from holdfast.proof.nemesis.server_faults import (
    CLOCK_VARIABLE,
    DISK_VARIABLE,
    LEVERS_VARIABLE,
    Levers,
    ServerCounts,
    socket_path,
)
from holdfast.proof.nemesis.startup_failure import StartupFailure, read_startup_failure
from holdfast.proof.storm.access import Progress, RemoteAccess
from holdfast.proof.storm.bounds import LIMITS, PRINCIPALS, SETTINGS
from holdfast.proof.storm.killing import make_keys
from holdfast.proof.storm.load import Load
from holdfast.proof.storm.plan import Plan, encode_plan
from holdfast.proof.storm.recorder import StormRecorder
from holdfast.proof.storm.server import OwnServer, free_port
from holdfast.proof.storm.stamps import read_stamps
from holdfast.proof.storm.watch import in_tree, note_processes, process_figures, until_gone
from holdfast.settings import Settings

__all__ = ["Episode", "EpisodePlan", "Tally", "open_episode"]

_PROGRAM = """\
from holdfast.proof.nemesis.server_faults import expose
expose()
from holdfast.cli import main
main()
"""
_SEES: tuple[Source, ...] = ("clients", "stamps", "processes", "drain", "host", "principals")
_SEES_OF_OTHERS: tuple[Source, ...] = ("clients", "drain", "host", "principals")
_GOES_ON_S = 10.0
_RESENDS = 20


class EpisodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of every episode.

    Parameters:
        sessions: number of sessions that the load drives.
        span_s: approximate duration of one phase of a fault, in seconds.
        connections: number of connections that the fault ``connections`` opens and drops.
        seed: random seed.
        agents: agents to serve, as ``module:name``; if empty, the storm's own agents are served.
        say: first part of each message to the agents named in `agents`; not used for the storm's own agents.
    """

    sessions: int = 12
    span_s: float = 1.5
    connections: int = 10_000
    seed: int = 0
    agents: tuple[str, ...] = ()
    say: str = "stream 10"


class _Statistics(msgspec.Struct):
    event_subscribers: int


class _Server(msgspec.Struct):
    """The parts of the server's report that are used here."""

    statistics: _Statistics


class Tally:
    """Results of a fault: the number of injections of each kind, the number of checks, and the findings."""

    def __init__(self) -> None:
        self.injected: Counter[str] = Counter()
        self.checked = 0
        self.found: list[str] = []

    def check(self, holds: bool, otherwise: str) -> bool:
        """Count one check, and return `holds`. If the check failed, record the finding `otherwise`."""
        self.checked += 1
        if not holds:
            self.found.append(otherwise)
        return holds

    def check_alive(self, task: asyncio.Task[Any]) -> None:
        """Check that a task, which should run until it is cancelled, is still running."""
        error = task.exception() if task.done() and not task.cancelled() else None
        self.check(
            not task.done(), f"the {task.get_name()} died{'' if error is None else f' of {format_error(error)}'}"
        )


class Episode:
    """An episode, as described in the module docstring. Create it with `open_episode`; use it on one event loop."""

    def __init__(
        self,
        ask: EpisodePlan,
        folder: Path,
        recorder: StormRecorder,
        settings: Settings,
        server: OwnServer,
        access: RemoteAccess,
        admin: Client,
        admin_key: str,
        load: Load,
        disk: Disk,
        progress: Progress,
    ) -> None:
        self.ask = ask
        self.folder = folder
        self.recorder = recorder
        self.settings = settings
        self.server = server
        self.access = access
        self.admin = admin
        self.admin_key = admin_key
        self.load = load
        self.disk = disk
        self.progress = progress
        self.tally = Tally()
        self.chance = random.Random(ask.seed)
        self.levers = Levers()
        self._effects: Counter[str] = Counter()
        self._alone: list[str] = []
        self._ending = False

    # ── the server ───────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> bool:
        """Start the next server with the current clock offset; return False if the server exited instead."""
        environment = {CLOCK_VARIABLE: str(self.levers.clock_s)}
        if self.disk.keeper is not None:
            environment[DISK_VARIABLE] = str(self.disk.keeper)
        self.levers = Levers(clock_s=self.levers.clock_s)
        self._effects.clear()
        ready = await self.server.start(environment=environment)
        if ready:
            self.access.up.set()
        return ready

    async def start_again(self, after: str) -> None:
        """Start the next server. Raises `ServerUnreachable` if the server does not start."""
        if self.tally.check(await self.start(), f"no start after {after}"):
            return
        refusal = await self.refused()
        raise ServerUnreachable(f"the server did not start after {after}: {refusal.message}", hint=refusal.hint)

    async def refused(self) -> StartupFailure:
        """Record the exit of a server that did not start, and return the reason for the failed start."""
        return read_startup_failure(await self.server.refused(), self.server.tail())

    def set_clock(self, clock_s: float) -> None:
        """Set the offset of the next server's wall clock, in seconds."""
        self.levers = Levers(clock_s=clock_s)

    def is_alive(self) -> bool:
        """Check that the server is still running. Once the clean shutdown has started, always return True."""
        if self._ending:
            return True
        return self.tally.check(self.server.alive, f"the server ended by itself: {self.server.tail()}")

    async def kill(self) -> None:
        """Kill the server with SIGKILL."""
        self.access.up.clear()
        await self.server.kill()

    async def pull(self, **changes: Any) -> None:
        """Change the server's levers (see `Levers`), and count the effects of the levers since the last call."""
        levers = msgspec.structs.replace(self.levers, **changes)
        self.levers = msgspec.structs.replace(levers, hints=0)
        with socket_path(str(self.folder / "levers")) as path:
            reader, writer = await asyncio.open_unix_connection(path)
        try:
            writer.write(msgspec.json.encode(levers) + b"\n")
            async with asyncio.timeout(LIMITS.answer_s):
                line = await reader.readline()
            if not line:
                raise ServerUnreachable("the server exited while a lever was being set")
            counts = msgspec.json.decode(line, type=ServerCounts)
        finally:
            writer.close()
        for name, effects in counts.effects.items():
            self.tally.injected[name] += effects - self._effects[name]
            self._effects[name] = effects

    # ── the load ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def watch(self, seconds: float) -> None:
        """Let the load run for `seconds`, then record the list of processes. If the load fails, raise its error."""
        end = system_clock.monotonic() + seconds
        while (left := end - system_clock.monotonic()) > 0:
            await asyncio.sleep(min(0.25, left))
            if self.load.broken is not None:
                raise self.load.broken
        if not self.ask.agents:
            await note_processes(self.recorder, self.server.storm)

    def content(self, *pieces: Any, span_s: float = 0.05) -> str:
        """Return unique message content for the served agents; only the storm's own agents execute `pieces`."""
        name = ids.message_id()
        if self.ask.agents:
            return f"{self.ask.say} [{name}]"
        return encode_plan(Plan(name=name, pieces=pieces, span_s=span_s))

    async def send_alone(self, count: int) -> None:
        """Send one message to each of `count` new sessions, which get no further messages.

        If the store fails, the same message is sent again. Each message is sent at most 20 times.
        """
        for _ in range(count):
            key = ids.message_id()
            self._alone.append(key)
            session, content = self.admin.session(key), self.content("emit", span_s=0.0)
            for _ in range(_RESENDS):
                try:
                    await session.send(content, idempotency_key=key, agent=None)
                    break
                except StorageError:
                    continue

    async def nobody_is_left(self, after: str) -> None:
        """Check that every session that `send_alone` created since the last check is idle within 10 seconds."""
        deadline = system_clock.monotonic() + _GOES_ON_S
        alone, self._alone = self._alone, []
        for key in alone:
            while True:
                try:
                    view = await self.admin.session(key).info()
                except HoldfastError as error:
                    told = error.code
                else:
                    told = f"{view.state} with {view.waiting} waiting"
                    if view.run_id is None and not view.waiting:
                        told = ""
                        break
                if system_clock.monotonic() > deadline:
                    break
                await asyncio.sleep(0.05)
            self.tally.check(not told, f"a session whose one message was sent during {after} is {told}")

    async def goes_on(self, after: str) -> None:
        """Check that a message to a new session completes within 10 seconds. `after` describes what happened before."""
        session = self.admin.session(f"after-{ids.message_id()}")
        self.progress(f"after {after}: checking a new message")
        told = "not at all"
        try:
            async with asyncio.timeout(_GOES_ON_S):
                while True:
                    try:
                        receipt = await session.send(self.content("emit", "call"), idempotency_key="on", agent=None)
                        settled = await session.wait(receipt.message_id, timeout_s=_GOES_ON_S)
                        told = settled.state
                        break
                    except (ServerUnreachable, WaitExpired):
                        raise
                    except HoldfastError as error:
                        told = error.code
                        await asyncio.sleep(0.2)
        except (TimeoutError, HoldfastError) as error:
            told = f"{told}, {type(error).__name__}"
        self.tally.check(told == "completed", f"after {after} a new message is not answered: {told}")

    async def figures(self, moment: str) -> None:
        """Record the server's statistics."""
        tree = await self.admin.tree(everybody=True)
        self.recorder.note(
            StatisticsRead,
            incarnation=self.server.incarnation,
            moment=moment,
            running=len([run for session in tree.children for run in session.children]),
            in_tree=in_tree(tree),
            **process_figures(self.server.pid),
        )

    # ── from beginning to end ────────────────────────────────────────────────────────────────────────────────────

    async def begin(self) -> None:
        """Start the first server, record its baseline, and start the load.

        Raises `ServerUnreachable` if the server does not start.
        """
        if not await self.start():
            refusal = await self.refused()
            raise ServerUnreachable(
                f"the server under test did not start: {refusal.message}",
                hint=refusal.hint or "check that 'holdfast serve' starts with the same agent, in the same folder",
            )
        if not self.ask.agents:
            await self.load.warm_up()
        await self.goes_on("the start")
        await self.figures("baseline")
        self.load.start()
        await self.watch(0.3)

    async def finish(self) -> None:
        """Stop the load, wait for quiescence, read all sessions once more, and shut the server down cleanly."""
        await self.load.stop()
        await self.load.complete()
        self.progress("coming to rest")
        await self.load.rest()
        await self._quiet()
        await self._nobody_reads()
        await self.figures("quiet")
        await self.load.read_back()
        self._ending = True
        await self.server.end()
        if not self.ask.agents:
            await until_gone(self.recorder, self.server.storm, LIMITS.death_s)

    async def _quiet(self) -> None:
        """Wait up to ``death_s`` until the server's tree shows no live work; the final statistics show what remains."""
        deadline = system_clock.monotonic() + LIMITS.death_s
        while in_tree(await self.admin.tree(everybody=True)) and system_clock.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    async def _nobody_reads(self) -> None:
        """Check that the server holds no readers after all readers have disconnected."""
        deadline = system_clock.monotonic() + LIMITS.death_s
        while True:
            readers = (await self.admin.read("/v1/server", _Server)).statistics.event_subscribers
            if not readers or system_clock.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        self.tally.check(not readers, f"the server holds {readers} readers when all have gone")


@asynccontextmanager
async def open_episode(
    ask: EpisodePlan,
    recorder: StormRecorder,
    folder: Path,
    changes: Mapping[str, Any],
    *,
    kills: bool,
    small: bool,
    progress: Progress,
) -> AsyncIterator[Episode]:
    """Yield an episode whose server has not been started yet; at the end, kill the server and remove the disk.

    Parameters:
        recorder: recorder of the history.
        folder: empty folder for all files of the episode.
        changes: server settings that override those of the storm.
        kills: whether the fault kills the server.
        small: whether the store is on a separate small disk, if the machine allows that.
    """
    sees = _SEES_OF_OTHERS if ask.agents else _SEES
    recorder.note(Opened, seed=ask.seed, mode="kill", sees=(*sees, "kills") if kills else sees, limits=LIMITS)
    seed = folder / "storm.db"
    keys = await make_keys(f"sqlite:///{seed}")
    async with AsyncExitStack() as stack:
        place = folder / "disk"
        os.mkdir(place)
        disk = await open_disk(place, seed, small=small)
        stack.push_async_callback(disk.close)
        settings = msgspec.structs.replace(
            SETTINGS, port=free_port(), store=f"sqlite:///{disk.path}", principal_rate_per_s=0.0, **changes
        )
        server = OwnServer(folder, recorder, LIMITS, ids.node_id(), settings, agents=ask.agents, program=_PROGRAM)
        server.export(LEVERS_VARIABLE, str(folder / "levers"))
        access = await stack.enter_async_context(RemoteAccess(server.url, {name: keys[name] for name in PRINCIPALS}))
        admin = await stack.enter_async_context(Client(server.url, keys["admin"], retry_s=0.0))
        own: dict[str, Any] = {}
        if ask.agents:
            own = {"agents": (None,), "content": lambda plan: f"{ask.say} [{plan.name}]"}
        load = Load(access, recorder, LIMITS, sessions=ask.sessions, rate=3.0 * ask.sessions, seed=ask.seed, **own)
        episode = Episode(ask, folder, recorder, settings, server, access, admin, keys["admin"], load, disk, progress)
        try:
            yield episode
        finally:
            await load.abandon()
            if server.alive:
                await server.kill()
            if server.stamps.exists():
                stamps = read_stamps(server.stamps)
                recorder.records.extend(stamp for stamp in stamps if stamp.principal in PRINCIPALS)
