"""Stop the runs of a host that cannot renew its lease, before another host may take them over.

The runs are stopped on the host's loop. Programs in scopes are also killed by their reapers, when `_PROGRAM_MARGIN` of
the lease is left, because the loop of a frozen host does nothing.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from holdfast.clock import system_clock
from holdfast.protocol.stopping import LEASE_LOST, Cause
from holdfast.runtime.process_host import process_host

if TYPE_CHECKING:
    from holdfast.host.context import HostContext
    from holdfast.host.run_launcher import RunLauncher
    from holdfast.runtime.processes.program_lease import ProgramLease

__all__ = ["LeaseGuard"]

_LOOKS: Final = 20
"""Looks at the lease in its duration."""
_MARGIN: Final = 0.4
"""Part of the lease that is left when the runs are stopped."""
_PROGRAM_MARGIN: Final = 0.1
"""Part of the lease that is left when programs that still run are killed."""
_ABANDON_AFTER: Final = 0.1
"""Part of the lease after which a stopped run that does not end is abandoned; its grace period is as long again."""


class LeaseGuard:
    """Watches the lease of a host's store. Use it on the host's loop only.

    Parameters:
        monotonic: clock of `StoreHealth.lease_ends_at`.
    """

    def __init__(
        self, context: HostContext, launcher: RunLauncher, *, monotonic: Callable[[], float] = system_clock.monotonic
    ) -> None:
        self._context = context
        self._launcher = launcher
        self._monotonic = monotonic
        self._lease_s = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopping = False
        self._programs: ProgramLease | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Watch the lease, if the store has one. Call this before the first program is started."""
        self._lease_s = self._context.store.health().lease_s
        if not math.isinf(self._lease_s):
            self._arm()
        if self._context.store.cluster is not None:
            self._programs = process_host().lease  # not earlier: a forked child has another one
            self._context.store.cluster.watch_lease(self._keep_programs)

    def close(self) -> None:
        """Stop watching the runs."""
        if self._timer is not None:
            self._timer.cancel()

    def release_programs(self) -> None:
        """Let programs run without the lease. Call this when the store is closed."""
        with self._lock:
            programs, self._programs = self._programs, None
        if programs is not None:
            programs.release(self)

    def _keep_programs(self, ends_at: float) -> None:
        """Let the programs run until shortly before this monotonic time. Called in a thread of the store."""
        with self._lock:
            if self._programs is not None:
                self._programs.renew(self, ends_at - self._lease_s * _PROGRAM_MARGIN)

    def _left_s(self) -> float:
        return self._context.store.health().lease_ends_at - self._monotonic()

    def _arm(self) -> None:
        self._timer = self._context.loop.call_later(self._lease_s / _LOOKS, self._look, context=self._context.variables)

    def _look(self) -> None:
        self._arm()
        if self._left_s() > self._lease_s * _MARGIN:
            self._is_stopping = False
            return
        runs = [run for run in self._launcher.live.values() if not run.ended]
        if runs and not self._is_stopping:
            self._context.report(
                "lease_lost", f"the lease cannot be renewed, so {len(runs)} runs are stopped: the store does not answer"
            )
        self._is_stopping = True
        after_s = self._lease_s * _ABANDON_AFTER
        cause = Cause(
            kind="lease_lost",
            reason=LEASE_LOST,
            origin=self._context.node_id,
            at=self._context.now(),
        )
        for run in runs:  # again at each look: a run may have started since
            run.request_stop(cause, grace_s=after_s, abandon_after_s=after_s)
