"""Drain a host: accept no new work, let runs finish until the deadline, then unload or stop the rest."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from holdfast.host.statistics import DrainReport

if TYPE_CHECKING:
    from holdfast.host.context import HostContext
    from holdfast.host.live_session import LiveRun, LiveSession
    from holdfast.host.run_launcher import RunLauncher
    from holdfast.host.scheduler import Scheduler
    from holdfast.host.session_directory import SessionDirectory
    from holdfast.host.slot_queue import SlotQueue
    from holdfast.protocol.stopping import StopReceipt
    from holdfast.runtime import Scope

__all__ = ["Drain"]

STORE_S = 5.0
"""Additional time that a drain waits for the store to commit the stopped runs, in seconds."""


class Drain:
    """Drains a host. Use it on the host's loop only."""

    __slots__ = ("_context", "_cut", "_deadline", "_directory", "_ended", "_launcher", "_queue", "_scheduler")

    def __init__(
        self,
        context: HostContext,
        directory: SessionDirectory,
        queue: SlotQueue,
        launcher: RunLauncher,
        scheduler: Scheduler,
    ) -> None:
        self._context = context
        self._directory = directory
        self._queue = queue
        self._launcher = launcher
        self._scheduler = scheduler
        self._ended = 0
        self._cut: dict[LiveRun, asyncio.Future[StopReceipt]] = {}
        self._deadline: asyncio.Timeout | None = None

    async def run(self, deadline_s: float) -> DrainReport:
        """Drain the host; see `Host.drain`."""
        context, live = self._context, self._launcher.live
        began = context.loop.time()
        context.lifecycle.draining = True
        self._queue.close()
        self._scheduler.close()
        at_first = self._ended
        for run in list(live.values()):
            if run.is_quiescent:
                self._cut_short(run)
        await self._until_unused(deadline_s)
        finished = self._ended - at_first
        context.lifecycle.past_deadline = True
        for run in list(live.values()):
            self._cut_short(run)
        stops: list[asyncio.Future[StopReceipt]] = []
        ended_background: list[str] = []
        for actor in list(self._directory.live.values()):
            for scope in list(actor.background):
                ended_background += _background_work(actor, scope)
                stop = scope.stop(cause=context.shutdown_cause())
                stops.append(context.start_task(stop, "stop background"))
        await self._until_unused(context.settings.grace_s + context.settings.abandon_after_s + STORE_S)
        unwritten = tuple(f"run {run_id}: the store did not accept its end" for run_id in live)
        for run in list(live.values()):
            run.give_up()
        receipts = [await stop for stop in (*self._cut.values(), *stops)]  # each is bounded by its grace period
        orphans = (*(name for receipt in receipts for name in _survivors(receipt)), *unwritten)
        unloaded = tuple(run.run_id for run in self._cut if run.phase == "unloaded")
        ended_by_itself = [run for run in self._cut if run.status in ("completed", "failed")]  # it finished first
        others = (run for run in self._cut if run.phase != "unloaded" and run not in ended_by_itself)
        interrupted = tuple(run.run_id for run in others)
        finished += len(ended_by_itself)
        self._cut.clear()
        context.incidents.promises.kept["P12"] += finished + len(unloaded) + len(interrupted)
        context.incidents.promises.broken["P12"] += len(orphans)
        return DrainReport(
            finished=finished,
            suspended=unloaded,
            interrupted=interrupted,
            waiting=self._queue.admission.waiting,
            orphans=orphans,
            ended_background=tuple(ended_background),
            elapsed_s=context.loop.time() - began,
        )

    def hasten(self) -> None:
        """Make the drain's deadline expire now."""
        if not self._context.lifecycle.past_deadline and self._deadline is not None:
            self._deadline.reschedule(self._context.loop.time())

    def on_started(self, run: LiveRun) -> None:
        """Unload or stop the run if the drain's deadline has already expired."""
        if self._context.lifecycle.past_deadline:
            self._cut_short(run)

    def on_quiescent(self, run: LiveRun) -> None:
        """Unload a quiescent run if possible. If the run cannot be unloaded, it is stopped only during a drain."""
        if self._context.lifecycle.draining:
            self._cut_short(run)
        else:
            run.unload()

    def on_ended(self, run: LiveRun) -> None:
        """Count a run that has ended, unless the drain stopped it or it was unloaded."""
        if run not in self._cut and run.phase != "unloaded":
            self._ended += 1

    async def _until_unused(self, deadline_s: float) -> None:
        """Wait up to `deadline_s` seconds until every run has ended.

        This includes runs that a pending send or claim is about to start.
        """
        try:
            async with asyncio.timeout(deadline_s) as self._deadline:
                await self._queue.unused()
        except TimeoutError:
            pass  # the drain continues with the remaining runs
        finally:
            self._deadline = None

    def _cut_short(self, run: LiveRun) -> None:
        """Unload a run if possible, otherwise stop it."""
        if run in self._cut:
            return
        if run.phase in ("unloading", "releasing") or (run.is_quiescent and run.unload()):
            self._cut[run] = run.follow()
        else:
            run.unload_on_stop()
            self._cut[run] = run.stop(self._context.shutdown_cause())


def _background_work(actor: LiveSession, scope: Scope) -> list[str]:
    """Return descriptions of the programs in a scope of background work, or of the work itself if it has none."""
    where = f"session {actor.key}"
    return [f"process {name!r} of {where}" for name in _programs(scope)] or [f"task {scope.name!r} of {where}"]


def _programs(scope: Scope) -> list[str]:
    own = [member.name for member in scope.members() if member.kind == "process"]
    return own + [name for child in scope.children() for name in _programs(child)]


def _survivors(receipt: StopReceipt) -> list[str]:
    """Return descriptions of the abandoned members and surviving processes in a receipt."""
    threads = [f"{left.kind} {left.name} of {receipt.scope}" for left in receipt.abandoned]
    return threads + [f"process {pid} of {receipt.scope}" for pid in receipt.survivors]
