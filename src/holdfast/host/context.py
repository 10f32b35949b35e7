"""State shared by all parts of a host: loop, clock, settings, store, budgets and counters.

This is the lowest layer of the package: it does not depend on sessions, runs or the other parts.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from holdfast.clock import Clock
from holdfast.host.budgets import Budgets
from holdfast.host.statistics import Incident, IncidentKind, IncidentLog
from holdfast.logs import one_line
from holdfast.protocol.stopping import Cause
from holdfast.runtime import Scope
from holdfast.settings import Settings, stored_limit
from holdfast.storage import MemoryStore
from holdfast.storage.port import Store

__all__ = ["HostContext", "Lifecycle"]

T = TypeVar("T")

RUN_EXCESS_BYTES = 4_000_000
"""Bytes that all active runs of a principal together may write beyond its quota, so that accepted work can finish."""


class Lifecycle:
    """The shutdown state of a host. Only `Drain` changes it."""

    __slots__ = ("draining", "past_deadline")

    def __init__(self) -> None:
        self.draining = False
        """Whether the host refuses new work."""
        self.past_deadline = False
        """Whether the drain's deadline has expired, so that runs are no longer given time to finish."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostContext:
    """State shared by every part of a host. Use it on the host's loop only.

    Parameters:
        now: function that returns the wall-clock time of `clock`.
        in_memory: whether the store is kept in memory only.
        stored_limit: maximum number of bytes that a principal may have stored.
        run_stored_limit: `stored_limit` plus the extra allowance for the principal's active runs, in bytes.
    """

    settings: Settings
    clock: Clock
    now: Callable[[], float]
    store: Store
    node_id: str
    in_memory: bool
    stored_limit: int
    run_stored_limit: int
    incidents: IncidentLog
    budgets: Budgets
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """The host's own tasks that are not yet done."""
    loop: asyncio.AbstractEventLoop = field(init=False)
    variables: contextvars.Context = field(init=False)
    """The context variables of the host's callbacks and tasks, which therefore inherit nothing from a caller."""
    scope: Scope = field(init=False)
    """The parent scope of all runs."""

    @classmethod
    def of(cls, settings: Settings, clock: Clock, store: Store, node_id: str) -> HostContext:
        """Return the context of a host that has not started."""
        incidents = IncidentLog()

        def refused(text: str) -> None:
            incidents.promises.kept["P14"] += 1
            incidents.report(Incident(at=clock.now(), kind="budget", text=text))

        in_memory = isinstance(store, MemoryStore)
        limit = stored_limit(settings, in_memory=in_memory)
        return cls(
            settings=settings,
            clock=clock,
            now=clock.now,
            store=store,
            node_id=node_id,
            in_memory=in_memory,
            stored_limit=limit,
            run_stored_limit=limit + RUN_EXCESS_BYTES,
            incidents=incidents,
            budgets=Budgets(settings, clock, refused),
        )

    def bind(self, *, loop: asyncio.AbstractEventLoop, variables: contextvars.Context, scope: Scope) -> None:
        """Set the fields that are known only once the host starts. `Host.start` calls this once."""
        object.__setattr__(self, "loop", loop)
        object.__setattr__(self, "variables", variables)
        object.__setattr__(self, "scope", scope)

    def start_task(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task that belongs to the host, not to a run. The host references the task until it is done."""
        task = self.loop.create_task(coroutine, name=f"holdfast {name}", context=self.variables.copy())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def report(
        self,
        kind: IncidentKind,
        text: str,
        *,
        session: str | None = None,
        run_id: str | None = None,
        stack: tuple[str, ...] = (),
    ) -> None:
        """Record an incident. Thread-safe."""
        self.incidents.report(
            Incident(at=self.now(), kind=kind, text=text, session=session, run_id=run_id, stack=stack)
        )

    def store_failed(self, key: str | None, run_id: str | None, what: str, error: BaseException) -> None:
        """Report a failed store call as an incident; `what` names the call."""
        self.report("store", f"{what}: {one_line(error)}", session=key, run_id=run_id)

    def shutdown_cause(self) -> Cause:
        """Return the cause to record for work that the shutdown of this host stops."""
        return Cause(kind="shutdown", reason="the host is shutting down", origin=self.node_id, at=self.now())

    def session_id(self, number: int) -> str:
        """Return an id that is unique to the session with this number, even across restarts of the host.

        For an in-memory store, the id includes the node id, because each new store numbers its sessions from the
        beginning.
        """
        return f"{number}-{self.node_id}" if self.in_memory else str(number)
