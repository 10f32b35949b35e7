"""Reports of ended runs for the listeners of a host, such as the terminal of ``holdfast serve``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal, Protocol, cast

import msgspec

from holdfast.logs import log_failure
from holdfast.protocol.events import RunFinished, decode_event
from holdfast.protocol.stopping import Cause
from holdfast.user_code import raised_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.host.context import HostContext
    from holdfast.host.statistics import DrainReport
    from holdfast.storage.port import Claim, Committed

__all__ = ["RunListener", "RunReport", "RunReports", "session_label"]


_log = logging.getLogger("holdfast.host")


def session_label(principal: str, key: str) -> str:
    """Return the name of a session for the operator: its key, after its owner unless that is ``local``."""
    return key if principal == "local" else f"{principal}/{key}"


def agent_label(name: str, version: str) -> str:
    """Return an agent for the operator: its name, and its version if it has one."""
    return f"agent {name!r}, version {version!r}" if version else f"agent {name!r}"


class RunReport(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How a run ended.

    Parameters:
        at: time of the end, in seconds since the epoch.
        principal, session: owner and key of the session.
        run_id, agent: id of the run, and name of its agent.
        status: final status of the run; a run that was rolled back counts as interrupted.
        elapsed_s: time since this host started or resumed the run, in seconds; 0 if it never started.
        error: error of a failed run, in one line without secrets.
        raised_at: file and line of the user's code that raised the error; None if unknown.
        cause: why the run was interrupted.
        abandoned: kind and name of each task or thread that the stop could not end.
    """

    at: float
    principal: str
    session: str
    run_id: str
    agent: str
    status: Literal["completed", "failed", "interrupted"]
    elapsed_s: float
    error: str | None = None
    raised_at: str | None = None
    cause: Cause | None = None
    abandoned: tuple[str, ...] = ()


class RunListener(Protocol):
    """Interface of an object that watches the runs of a host. All methods are called on the host's loop; none waits."""

    def on_run(self, report: RunReport) -> None:
        """Handle the end of a run, which the store has accepted."""

    def on_drained(self, report: DrainReport) -> None:
        """Handle the end of a drain."""


class RunReports:
    """Makes reports of runs for the listeners of a host. Without listeners, every method returns at once."""

    __slots__ = ("_context", "_listeners", "_raised_at", "_started_at")

    def __init__(self, context: HostContext) -> None:
        self._context = context
        self._listeners: list[RunListener] = []
        self._started_at: dict[str, float] = {}
        self._raised_at: dict[str, str | None] = {}

    def add(self, listener: RunListener) -> Callable[[], None]:
        """Call `listener` for each run that ends from now on. Return a function that removes it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def started(self, run_id: str) -> None:
        """Note the start of a run."""
        if self._listeners:
            self._started_at[run_id] = self._context.loop.time()

    def raised(self, run_id: str, error: BaseException) -> None:
        """Note the first error that a run raised."""
        if self._listeners and run_id not in self._raised_at:
            self._raised_at[run_id] = raised_at(error)

    def ended(self, claim: Claim, status: str, committed: Committed) -> None:
        """Report a committed run to the listeners."""
        if not self._listeners:
            return
        run_id = claim.lease.run_id
        began = self._started_at.get(run_id)
        settled = committed.settled[0] if committed.settled else None
        report = RunReport(
            at=self._context.now(),
            principal=claim.principal,
            session=claim.key,
            run_id=run_id,
            agent=claim.agent,
            status=cast("Literal['completed', 'failed', 'interrupted']", status),
            elapsed_s=0.0 if began is None else self._context.loop.time() - began,
            error=None if settled is None else settled.error,
            raised_at=self._raised_at.get(run_id),
            cause=None if settled is None else settled.cause,
            abandoned=_abandoned(committed) if status == "interrupted" else (),
        )
        for listener in tuple(self._listeners):
            try:
                listener.on_run(report)
            except Exception as error:
                log_failure(_log, "a listener of runs failed", error, principal=claim.principal, session=claim.key)

    def forget(self, run_id: str) -> None:
        """Forget a run that has ended here or was unloaded."""
        if self._started_at or self._raised_at:
            self._started_at.pop(run_id, None)
            self._raised_at.pop(run_id, None)

    def drained(self, report: DrainReport) -> None:
        """Report a finished drain to the listeners."""
        for listener in tuple(self._listeners):
            try:
                listener.on_drained(report)
            except Exception as error:
                log_failure(_log, "a listener of runs failed", error)


def _abandoned(committed: Committed) -> tuple[str, ...]:
    for stored in committed.events:
        if stored.kind == "run.finished":
            event = decode_event(stored)
            if isinstance(event, RunFinished) and event.receipt is not None:
                return tuple(f"{left.kind} {left.name}" for left in event.receipt.abandoned)
    return ()
