"""A storm over an embedded host: load, a drain during the load, and a second host on the same store."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from holdfast import ids
from holdfast.clock import system_clock
from holdfast.host import Host
from holdfast.proof.history import Drained, DrainRequested, HostExited, HostReady, HostStarted
from holdfast.proof.storm.access import EmbeddedAccess, Progress
from holdfast.proof.storm.agent import agents
from holdfast.proof.storm.bounds import LIMITS, PRINCIPALS, SETTINGS
from holdfast.proof.storm.contention import contend
from holdfast.proof.storm.load import Load
from holdfast.proof.storm.recorder import StormRecorder
from holdfast.proof.storm.stamps import Stamps, read_stamps
from holdfast.proof.storm.watch import note_processes, own_figures, until_gone

__all__ = ["embedded_storm"]


class _Hosts:
    """The incarnations of an embedded host."""

    def __init__(
        self, access: EmbeddedAccess, recorder: StormRecorder, folder: Path, stamps: Stamps, storm: str
    ) -> None:
        self._access = access
        self._recorder = recorder
        self._folder = folder
        self._stamps = stamps
        self._storm = storm
        self.incarnation = 0

    @property
    def number(self) -> int:
        """The host's number in the history: the pid combined with the incarnation, as all hosts share this process."""
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
        """Drain and close the host while readers and senders use it."""
        host = self._access.host
        self._recorder.note(DrainRequested, incarnation=self.incarnation, deadline_s=deadline_s)
        report = await host.drain(deadline_s=deadline_s)
        self._recorder.note(
            Drained,
            incarnation=self.incarnation,
            elapsed_s=report.elapsed_s,
            finished=report.finished,
            interrupted=report.interrupted,
            parked=report.suspended,
            orphans=report.orphans,
        )
        self._access.up.clear()
        await host.close()
        self._recorder.note(HostExited, incarnation=self.incarnation)

    async def close(self) -> None:
        """Close the newest host. This is called at the end of the storm, even if the storm failed."""
        await self._access.host.close()


async def embedded_storm(
    recorder: StormRecorder,
    *,
    folder: Path,
    sessions: int,
    seconds: float,
    seed: int,
    progress: Progress,
    rate: float | None = None,
) -> None:
    """Run a storm over a host in this process.

    Parameters:
        recorder: recorder of the history, which already has the opening record.
        folder: existing empty folder for the store and the stamps.
        sessions: number of sessions that the load drives.
        seconds: duration of the load before the drain, in seconds.
        seed: random seed.
        progress: called with progress messages.
        rate: actions per second over all sessions; None selects a rate that suits a small machine.
    """
    storm = ids.node_id()
    access = EmbeddedAccess(PRINCIPALS)
    stamps = Stamps(folder / "stamps")
    hosts = _Hosts(access, recorder, folder, stamps, storm)
    load = Load(access, recorder, LIMITS, sessions=sessions, rate=rate or min(200.0, 4.0 * sessions), seed=seed)
    try:
        await hosts.start()
        access.up.set()
        await load.warm_up()
        hosts.figures("baseline")
        progress("fairness: one greedy principal among polite ones")
        await contend(load, places=SETTINGS.max_runs, greedy=60, polite=15, span_s=1.0)
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
        await load.complete()
        progress("coming to rest")
        await load.rest()
        await note_processes(recorder, storm)
        hosts.figures("quiet")
        progress("reading everything back")
        await load.read_back()
        await hosts.drain(5.0)
        await until_gone(recorder, storm, LIMITS.death_s)
    finally:
        await load.abandon()
        await hosts.close()
        stamps.close()
        recorder.records.extend(read_stamps(folder / "stamps"))


async def _watch(
    load: Load, hosts: _Hosts, recorder: StormRecorder, storm: str, seconds: float, progress: Progress
) -> None:
    end = system_clock.monotonic() + seconds
    while (left := end - system_clock.monotonic()) > 0:
        await asyncio.sleep(min(0.5, left))
        await note_processes(recorder, storm)
        hosts.figures("busy")
        if load.broken is not None:
            raise load.broken
        progress(f"{len(recorder.records):,} records, {left:.0f} s left")
