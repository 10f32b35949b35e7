"""The storm over an embedded host: load, a drain in the middle of it, and a second host on the same store."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from holdfast import ids
from holdfast.clock import system_clock
from holdfast.host import Host
from holdfast.settings import Settings
from holdfast.testing.history import (
    Drained,
    DrainRequested,
    HostExited,
    HostReady,
    HostStarted,
    Limits,
    Opened,
    Record,
)
from holdfast.testing.storm.access import Access, EmbeddedAccess
from holdfast.testing.storm.agent import PLAIN, agents
from holdfast.testing.storm.load import Load, StormSession
from holdfast.testing.storm.plan import Plan
from holdfast.testing.storm.recorder import Recorder
from holdfast.testing.storm.stamps import Stamps, read_stamps
from holdfast.testing.storm.watch import note_processes, own_figures, until_gone

__all__ = ["LIMITS", "PRINCIPALS", "SETTINGS", "embedded_storm", "warm_up"]

PRINCIPALS = ("ann", "bob", "eve", "dan")

SETTINGS = Settings(
    grace_s=0.4,
    kill_after_s=0.3,
    drain_s=2.0,
    max_runs=48,
    principal_runs=32,
    principal_threads=32,
    mailbox_limit=12,
    restart_limit=3,
    evict_after_s=2.0,
)
"""Short times and tight bounds, so that the storm meets them."""

LIMITS = Limits(
    answer_s=30.0,
    stop_s=30.0,
    mailbox=SETTINGS.mailbox_limit,
    attempts=SETTINGS.restart_limit + 1,
    principal_runs=SETTINGS.principal_runs,
    thread_slack=SETTINGS.principal_threads * len(PRINCIPALS),
    descriptor_slack=64,
)

_WARM_UP = Plan(
    name="warm-up", pieces=("say", "call", "task", "thread", "parallel", "child", "process", "raw"), span_s=0.02
)


class _Hosts:
    """The incarnations of an embedded host."""

    def __init__(self, access: EmbeddedAccess, recorder: Recorder, folder: Path, stamps: Stamps, storm: str) -> None:
        self._access = access
        self._recorder = recorder
        self._folder = folder
        self._stamps = stamps
        self._storm = storm
        self.incarnation = 0

    @property
    def number(self) -> int:
        """What the history calls the host: the pid with the incarnation, as all of them live in this process."""
        return os.getpid() * 1000 + self.incarnation

    async def start(self) -> None:
        self.incarnation += 1
        self._recorder.note(HostStarted, incarnation=self.incarnation, pid=self.number)
        self._access.host = Host(
            agents=agents(self._stamps, self._storm, host=self.number),
            store=f"sqlite:///{self._folder / 'storm.db'}",
            settings=SETTINGS,
        )
        await self._access.host.start()
        self._recorder.note(HostReady, incarnation=self.incarnation)

    def figures(self, moment: str) -> None:
        own_figures(self._access.host, self.incarnation, moment, self._recorder)

    async def drain(self, deadline_s: float) -> None:
        """Drain and close, with readers and senders at it."""
        host = self._access.host
        self._recorder.note(DrainRequested, incarnation=self.incarnation, deadline_s=deadline_s)
        report = await host.drain(deadline_s=deadline_s)
        self._recorder.note(
            Drained,
            incarnation=self.incarnation,
            elapsed_s=report.elapsed_s,
            finished=report.finished,
            interrupted=report.interrupted,
            parked=report.parked,
            orphans=report.orphans,
        )
        self._access.up.clear()
        await host.close()
        self._recorder.note(HostExited, incarnation=self.incarnation)


async def embedded_storm(
    *, sessions: int, seconds: float, seed: int, progress: Callable[[str], None], rate: float | None = None
) -> list[Record]:
    """Run a storm in this process and return its history.

    Parameters:
        sessions: how many sessions are driven.
        seconds: how long, until the drain.
        seed: of all choices.
        progress: told what goes on.
        rate: actions per second over all sessions; by default as much as a small machine bears.
    """
    recorder = Recorder()
    access = EmbeddedAccess(PRINCIPALS)
    storm = ids.node_id()
    recorder.note(
        Opened,
        seed=seed,
        mode="embedded",
        sees=("clients", "stamps", "processes", "drain", "host", "principals"),
        limits=LIMITS,
    )
    with tempfile.TemporaryDirectory(prefix="holdfast-storm-") as name:
        folder = Path(name)
        stamps = Stamps(folder / "stamps")
        try:
            hosts = _Hosts(access, recorder, folder, stamps, storm)
            load = Load(access, recorder, LIMITS, sessions=sessions, rate=rate or min(200.0, 4.0 * sessions), seed=seed)
            await hosts.start()
            await warm_up(access, load, "warm-1")
            hosts.figures("baseline")
            access.up.set()
            progress("fairness: one greedy principal among polite ones")
            await load.contend(places=SETTINGS.max_runs, greedy=60, polite=15, span_s=1.0)
            progress(f"load: {sessions} sessions for {seconds:g} s")
            load.start()
            await _watch(load, hosts, recorder, storm, seconds, progress)
            progress("drain in the middle of the load")
            await load.linger(8, 3.0)
            await hosts.drain(0.5)
            await hosts.start()
            access.up.set()
            await _watch(load, hosts, recorder, storm, 1.0, progress)
            await load.stop()
            progress("coming to rest")
            await load.rest()
            await _quiet(access, hosts, recorder, storm)
            progress("reading everything back")
            await load.read_back()
            await hosts.drain(5.0)
            await until_gone(recorder, storm, LIMITS.death_s)
        finally:
            stamps.close()
        recorder.records.extend(read_stamps(folder / "stamps"))
    return recorder.records


async def warm_up(access: Access, load: Load, key: str) -> None:
    """One run that touches everything, so that what is made only once is there before figures are compared."""
    access.up.set()
    for principal in access.principals:
        session = StormSession(principal, f"{key}-{principal}", PLAIN, load.chance)
        plan = Plan(name=f"{key}-{principal}", pieces=_WARM_UP.pieces, span_s=_WARM_UP.span_s)
        message = load.message(session, plan, "queue")
        await load.send(session, message)
        load.others.append(session)
        handle = access.session(principal, session.key)
        await handle.wait(message.message_id or "", timeout_s=LIMITS.answer_s)


async def _watch(
    load: Load, hosts: _Hosts, recorder: Recorder, storm: str, seconds: float, progress: Callable[[str], None]
) -> None:
    end = system_clock.monotonic() + seconds
    while (left := end - system_clock.monotonic()) > 0:
        await asyncio.sleep(min(0.5, left))
        await note_processes(recorder, storm)
        hosts.figures("busy")
        if load.broken is not None:
            raise load.broken
        progress(f"{len(recorder.records):,} records, {left:.0f} s left")


async def _quiet(access: EmbeddedAccess, hosts: _Hosts, recorder: Recorder, storm: str) -> None:
    """Note what is left when everything has come to rest; threads and descriptors get a moment to end."""
    await asyncio.sleep(0.2)
    await note_processes(recorder, storm)
    hosts.figures("quiet")
