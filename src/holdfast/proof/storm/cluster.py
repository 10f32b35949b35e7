"""A storm over several servers on one PostgreSQL: one is killed, stopped or drained, or the database fails, in turn.

- Only one fault is in effect at a time, so that its effect is not that of another one.
- Clients send each request to a server that should answer, chosen at random: any server serves any session.
- After each fault, the promises that allow it are judged on everything seen so far. The rest is judged at the end.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import msgspec

from holdfast import ids
from holdfast.client import Client
from holdfast.clock import system_clock
from holdfast.errors import HoldfastError
from holdfast.proof.checker.facts import Facts
from holdfast.proof.checker.judgement import UNFINISHED, Report, judge
from holdfast.proof.checker.takeovers import takeovers
from holdfast.proof.history import (
    HostAbsent,
    Lost,
    Opened,
    ReaderClosed,
    ReaderReceived,
    Record,
    Refused,
    SendAcknowledged,
    Source,
    Stamp,
    StopAnswered,
    WithdrawAnswered,
)
from holdfast.proof.storm.access import ClusterAccess, Progress, RemoteAccess
from holdfast.proof.storm.bounds import LIMITS, PRINCIPALS, SETTINGS
from holdfast.proof.storm.database_link import DatabaseLink
from holdfast.proof.storm.killing import make_keys
from holdfast.proof.storm.load import Load
from holdfast.proof.storm.nats_server import NatsServer
from holdfast.proof.storm.postgres_server import PostgresServer
from holdfast.proof.storm.recorder import StormRecorder
from holdfast.proof.storm.server import OwnServer, free_port
from holdfast.proof.storm.stamps import read_stamps
from holdfast.proof.storm.wall_probe import can_build_walls
from holdfast.proof.storm.watch import note_processes, server_figures, until_gone
from holdfast.server.routes.host import ServerView

__all__ = ["FAULTS", "ClusterCounts", "cluster_storm"]

FAULTS = (
    "kill",
    "freeze 3",
    "database crash",
    "freeze 0.5",
    "cut off 2",
    "drain",
    "lost replies",
    "freeze 1",
    "cut signals",
    "failover",
)
"""The faults, in the order of their first round. A number is the duration in leases."""

_SEES: tuple[Source, ...] = ("clients", "stamps", "processes", "kills", "drain", "principals")
_TAKEOVER_SLACK_S = 1.0
_AFTER_TAKEOVER_S = 0.5
_CALM_S = (1.0, 2.5)
_LONGER_S = 15.0
"""Time by which a run is longer than two leases, so that a stop of it is given up before it ends by itself."""
_CUTS = 4
_CUT_EVERY_S = 0.4
_LINGERING = 6
_ANSWERS = (SendAcknowledged, StopAnswered, WithdrawAnswered, Refused, Lost, ReaderReceived, ReaderClosed)


class ClusterCounts(msgspec.Struct, kw_only=True):
    """Counts of a storm over several servers, and of these servers.

    Parameters:
        faults: number of faults, by name.
        stale_writes_refused: writes of servers for runs that others had taken over, which the store refused.
        runs_lost: runs that servers gave up because others had taken them over.
        runs_taken_over: runs that servers took over.
        broken_live: promises that were found broken by a server or a judgement during the storm.
    """

    faults: Counter[str] = msgspec.field(default_factory=Counter)
    stale_writes_refused: int = 0
    runs_lost: int = 0
    runs_taken_over: int = 0
    broken_live: tuple[str, ...] = ()


class _Node:
    """One of the servers: its process, how clients reach it, and what it has counted."""

    def __init__(self, number: int, server: OwnServer, access: RemoteAccess, admin: Client, link: DatabaseLink) -> None:
        self.name = f"node {number}"
        self.server = server
        self.link = link
        self.access = access
        self.admin = admin
        self.counts: dict[str, int] = {}
        self.broken: dict[str, int] = {}
        self._counts_before: Counter[str] = Counter()
        """Counts of its earlier incarnations."""

    async def start(self) -> None:
        await self.server.start()
        self.access.up.set()

    async def end(self) -> None:
        self.access.up.clear()
        await self.count()
        await self.server.end()
        self._keep_counts()

    async def kill(self) -> None:
        self.access.up.clear()
        await self.server.kill()
        self._keep_counts()

    def _keep_counts(self) -> None:
        self._counts_before.update(self.counts)
        self.counts = {}

    def total(self, name: str) -> int:
        return self._counts_before[name] + self.counts.get(name, 0)

    async def count(self) -> None:
        """Read what the server has counted, if it answers."""
        with suppress(HoldfastError):
            statistics = (await self.admin.read("/v1/server", ServerView)).statistics
            if statistics is not None:
                self.counts = dict(statistics.counts)
                self.broken = {promise: count.broken for promise, count in statistics.promises.items() if count.broken}


class _ClusterStorm:
    """One storm: its database, its servers and its load."""

    def __init__(
        self,
        recorder: StormRecorder,
        database: PostgresServer,
        nodes: Sequence[_Node],
        access: ClusterAccess,
        load: Load,
        *,
        storm: str,
        lease_s: float,
        chance: random.Random,
        progress: Progress,
        stack: AsyncExitStack,
        carrier: NatsServer | None,
    ) -> None:
        self._stack = stack
        self._carrier = carrier
        self.recorder = recorder
        self.database = database
        self.nodes = nodes
        self.access = access
        self.load = load
        self.storm = storm
        self.lease_s = lease_s
        self.chance = chance
        self.progress = progress
        self.counts = ClusterCounts()
        self._last: _Node | None = None

    async def run(self, seconds: float, faults: Sequence[str]) -> None:
        """Inject faults in turn for `seconds`, but each of them at most as often as the time allows; then check all."""
        await asyncio.gather(*(node.start() for node in self.nodes))
        self.access.up.set()
        await self.load.warm_up()
        await self._figures(self.nodes[0], "baseline")
        self.load.start()
        self.progress(f"load: {len(self.load.sessions)} sessions on {len(self.nodes)} nodes")
        await self._stop_elsewhere()
        end = system_clock.monotonic() + seconds
        for fault in itertools.cycle(faults):
            await self.watch(self.chance.uniform(*_CALM_S))
            await self._inject(fault)
            if not await self._judge_live() or system_clock.monotonic() >= end:
                break
        await self._stop_elsewhere()
        await self._finish()

    async def _stop_elsewhere(self) -> None:
        """Start a long run on each server, and stop it at the next server.

        What ends such a run in time is only that its server learns of the interrupt.
        """
        self.progress("stops at other nodes")
        span_s = 2 * self.lease_s + _LONGER_S
        following = (*self.nodes[1:], self.nodes[0])
        await asyncio.gather(
            *(
                self.load.cut_elsewhere(begin.access, end.access, span_s)
                for begin, end in zip(self.nodes, following, strict=True)
            )
        )

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _inject(self, fault: str) -> None:
        name, _, leases = fault.rpartition(" ") if fault[-1].isdigit() else (fault, "", "")
        node = self.chance.choice([node for node in self.nodes if node is not self._last])
        lasts_s = self.lease_s * float(leases or 0)
        acts: dict[str, Callable[[], Awaitable[None]]] = {
            "kill": partial(self._kill, node),
            "freeze": partial(self._freeze, node, lasts_s),
            "cut off": partial(self._cut_off, node, lasts_s),
            "drain": partial(self._drain, node),
            "database crash": self._crash_database,
            "lost replies": self._lose_replies,
            "cut signals": self._cut_signals,
            "failover": self._fail_over,
        }
        span_s = max(self.lease_s, lasts_s)  # the others still run what a host had when it continues
        self.access.only = node.access
        await self.load.linger(_LINGERING, span_s, apart=True)
        self.access.only = None
        await self.watch(0.3)
        self.counts.faults[fault] += 1
        await acts[name]()

    async def _kill(self, node: _Node) -> None:
        self._last = node
        await node.count()
        self.progress(f"{node.name}: killed")
        await node.kill()
        await self.watch(self.lease_s + _TAKEOVER_SLACK_S + _AFTER_TAKEOVER_S)
        await node.start()

    async def _freeze(self, node: _Node, seconds: float) -> None:
        self._last = node
        self.progress(f"{node.name}: stopped for {seconds:g} s, {seconds / self.lease_s:g} of its lease")
        node.access.up.clear()
        node.server.freeze()
        try:
            await self.watch(seconds)
        finally:
            node.server.thaw()
        await self.watch(1.0)
        node.access.up.set()

    async def _cut_off(self, node: _Node, seconds: float) -> None:
        self._last = node
        self.progress(
            f"{node.name}: cut off from the database for {seconds:g} s, {seconds / self.lease_s:g} of its lease"
        )
        node.access.up.clear()
        began_at = system_clock.monotonic()
        node.link.cut()
        try:
            await self.watch(seconds)
        finally:
            node.link.heal()
            self.recorder.note(HostAbsent, incarnation=node.server.incarnation, began_at=began_at, why="cut off")
        await self.watch(1.0)
        node.access.up.set()

    async def _lose_replies(self) -> None:
        self.progress("database: replies are lost, again and again, though the requests were executed")
        for _ in range(_CUTS):
            for node in self.nodes:
                node.link.lose_replies()
            await self.watch(_CUT_EVERY_S)
        await self.watch(1.0)

    async def _drain(self, node: _Node) -> None:
        self._last = node
        self.progress(f"{node.name}: drained and restarted")
        await node.end()
        await node.start()

    async def _crash_database(self) -> None:
        self.progress("database: restarted in immediate mode")
        await asyncio.to_thread(self.database.crash)
        await self.watch(1.0)

    async def _fail_over(self) -> None:
        """Lose the database's machine, and promote a synchronous standby, which has everything that was committed."""
        self.progress("database: a synchronous standby is connected, the primary is lost, and the standby is promoted")
        before = self.database
        place = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-pg-"))
        standby = await asyncio.to_thread(PostgresServer, Path(place), standby_of=before)
        self._stack.push_async_callback(asyncio.to_thread, standby.stop)
        await asyncio.to_thread(standby.start)
        await asyncio.to_thread(before.wait_for_standby)
        await self.watch(1.0)
        await asyncio.to_thread(before.stop, at_once=True)
        await asyncio.to_thread(standby.promote)
        self.database = standby
        for node in self.nodes:
            node.link.redirect(standby.folder)
        await self.watch(1.0)

    async def _cut_signals(self) -> None:
        self.progress("signals: the connections that listen are ended, again and again")
        for _ in range(_CUTS):
            if self._carrier is None:
                await asyncio.to_thread(self.database.cut_listeners)
            else:
                await asyncio.to_thread(self._carrier.stop)
                await self.watch(_CUT_EVERY_S)
                await asyncio.to_thread(self._carrier.start)
            await self.watch(_CUT_EVERY_S)

    # ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def watch(self, seconds: float) -> None:
        """Record the storm's processes for `seconds`. Raises the error with which the load failed, if any."""
        end = system_clock.monotonic() + seconds
        while (left := end - system_clock.monotonic()) > 0:
            await asyncio.sleep(min(0.5, left))
            await note_processes(self.recorder, self.storm)
            if self.load.broken is not None:
                raise self.load.broken

    def stamps(self) -> list[Stamp]:
        """Return what the agents have stamped so far."""
        files = [node.server.stamps for node in self.nodes if node.server.stamps.exists()]
        return [stamp for file in files for stamp in read_stamps(file) if stamp.principal in PRINCIPALS]

    async def _judge_live(self) -> bool:
        """Judge what has been seen so far, tell it, and return whether no promise was broken.

        What the logs are compared with must have happened before they are read, and what explains them is read after.
        """
        stamps = await asyncio.to_thread(self.stamps)
        seen = len(self.recorder.records)
        try:
            await self.load.read_logs()
        except (HoldfastError, TimeoutError) as error:
            self.progress(f"the logs could not be read, so nothing is judged now: {error}")
            return True
        later = [record for record in self.recorder.records[seen:] if not isinstance(record, _ANSWERS)]
        records: list[Record] = [*self.recorder.records[:seen], *later, *stamps]
        report, taken_s = await asyncio.to_thread(_judge, records)
        await asyncio.gather(*(node.count() for node in self.nodes))
        broken = [f"{judged.promise} {judged.violations[0].what}" for judged in report.judgements if judged.violations]
        broken += [f"{promise} by {node.name}'s own count" for node in self.nodes for promise in node.broken]
        self.counts.broken_live = tuple(broken)
        self._add_up()
        accepted = sum(isinstance(r, SendAcknowledged) and r.disposition != "duplicate" for r in records)
        self.progress(
            f"messages {accepted:,}; taken over {len(taken_s)}, longest {max(taken_s, default=0.0):.2f} s; stale "
            f"writes refused {self.counts.stale_writes_refused}; promises broken: {'; '.join(broken) or 'none'}"
        )
        return not broken

    def _add_up(self) -> None:
        for name in ("stale_writes_refused", "runs_lost", "runs_taken_over"):
            setattr(self.counts, name, sum(node.total(name) for node in self.nodes))

    async def _figures(self, node: _Node, moment: str) -> None:
        await server_figures(node.admin, node.server.incarnation, node.server.pid, moment, self.recorder)

    async def _finish(self) -> None:
        """Stop the load, let everything come to rest, read it for the last time, and end the servers."""
        await self.watch(0.5)
        await self.load.stop()
        await self.load.complete()
        self.progress("coming to rest")
        await self.load.rest()
        await note_processes(self.recorder, self.storm)
        for node in self.nodes:
            await node.count()
            await self._figures(node, "quiet")
        self.progress("reading everything back")
        await self.load.read_back()
        await asyncio.gather(*(node.end() for node in self.nodes))
        self._add_up()
        await until_gone(self.recorder, self.storm, LIMITS.death_s)


def _judge(records: Sequence[Record]) -> tuple[Report, list[float]]:
    return judge(records, only=UNFINISHED), [takeover.took_s for takeover in takeovers(Facts(records))]


async def cluster_storm(
    recorder: StormRecorder,
    *,
    folder: Path,
    nodes: int,
    sessions: int,
    seconds: float,
    lease_s: float,
    seed: int,
    progress: Progress,
    rate: float = 30.0,
    faults: Sequence[str] = FAULTS,
    nats: bool = False,
    pooler: Callable[[Path], AbstractContextManager[Path]] | None = None,
) -> ClusterCounts:
    """Run a storm over `nodes` servers on a PostgreSQL of its own, and return what was counted.

    Parameters:
        recorder: recorder of the history, to which the storm adds the opening record.
        folder: existing empty folder for the stamps and the servers' stderr.
        nodes: number of servers.
        sessions, seconds, seed, rate: number of sessions, duration in seconds, random seed, and actions per second over
            all sessions.
        lease_s: lease of the servers, in seconds.
        progress: called with progress messages.
        faults: the faults to inject in turn; see `FAULTS`. Each one that has begun is waited for.
        nats: whether the servers exchange signals over a NATS server of the storm's own.
        pooler: starts a pgbouncer in front of the database whose socket is in this folder, and yields the folder of its
            own socket; None for no pgbouncer. It does not follow a failover.

    Raises:
        MissingExtra: if the packages for a PostgreSQL or NATS server are not installed.
        ServerUnreachable: if a server cannot be started.
    """
    limits = msgspec.structs.replace(
        LIMITS, takeover_s=lease_s + _TAKEOVER_SLACK_S, fence_s=lease_s, stop_s=LIMITS.stop_s + 2 * lease_s
    )
    recorder.note(
        Opened,
        seed=seed,
        mode="cluster",
        sees=(*_SEES, "walls") if await asyncio.to_thread(can_build_walls) else _SEES,
        limits=limits,
        zero=time.time() - time.monotonic(),
    )
    async with AsyncExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-pg-"))
        database = await asyncio.to_thread(PostgresServer, Path(place))
        stack.push_async_callback(asyncio.to_thread, database.stop)
        await asyncio.to_thread(database.start)
        front, options = database.folder, ""
        if pooler is not None:
            front = await asyncio.to_thread(stack.enter_context, pooler(database.folder))
            options = "&prepared_statements=off"
        carrier = None if not nats else await asyncio.to_thread(stack.enter_context, NatsServer())
        keys = await make_keys(database.url())
        settings = msgspec.structs.replace(SETTINGS, principal_rate_per_s=0.0, lease_s=lease_s, cluster_poll_s=0.5)
        storm, numbers = ids.node_id(), itertools.count(1)
        users = {name: keys[name] for name in PRINCIPALS}
        own: list[_Node] = []
        for number in range(1, nodes + 1):
            home = folder / f"node{number}"
            home.mkdir()
            way = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-link-"))
            link = await stack.enter_async_context(DatabaseLink(Path(way), front))
            direct = database.url() if pooler is not None else ""
            of_node = msgspec.structs.replace(
                settings,
                store=link.url() + options,
                store_direct=direct,
                nats="" if carrier is None else carrier.url(),
                port=free_port(),
            )
            server = OwnServer(home, recorder, limits, storm, of_node, numbers=numbers)
            access = await stack.enter_async_context(RemoteAccess(server.url, users))
            admin = await stack.enter_async_context(Client(server.url, keys["admin"], retry_s=0.0))
            own.append(_Node(number, server, access, admin, link))
        chance = random.Random(seed)
        cluster = ClusterAccess([node.access for node in own], chance)
        load = Load(cluster, recorder, limits, sessions=sessions, rate=rate, seed=seed)
        running = _ClusterStorm(
            recorder, database, own, cluster, load, storm=storm, lease_s=lease_s, chance=chance, progress=progress,
            stack=stack, carrier=carrier,
        )  # fmt: skip
        try:
            await running.run(seconds, faults)
        finally:
            await load.abandon()
            for node in own:
                if node.server.alive:
                    await node.server.kill()
            recorder.records.extend(running.stamps())
        return running.counts
