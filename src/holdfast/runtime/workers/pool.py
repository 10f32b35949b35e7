"""A pool of Python processes for isolated calls: it lends them to calls, keeps idle ones, and discards unclean ones.

Invariants
- A worker is in exactly one place: idle in the pool, or lent to one call. The call that borrows a worker must give it
  back, or close its descriptors and end its process.
- A worker serves one owner, in the environment (variables, directory, path, user) in which it was started.
- A worker is kept only if it reported that its last call left nothing behind, and if ``/proc`` confirms this: no other
  process in its tree, no more threads, and the same number of descriptors as before the function was called.
- The pool limits the number of idle workers. Idle workers exit by themselves after a timeout, so the host needs no
  timer.
- The process tree of a worker dies with the host, like every tree under a reaper.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import resource
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.protocol.stopping import Cause
from holdfast.runtime.processes import procfs
from holdfast.runtime.processes.environment import start_environment
from holdfast.runtime.processes.tree import KILL_BOUND_S, ReaperTree, TreeResult
from holdfast.runtime.processes.zygote_link import identity
from holdfast.runtime.workers.main import CAUSE, frame

if TYPE_CHECKING:
    from holdfast.runtime.processes.process import Process
    from holdfast.runtime.processes.spec import Argument, Stream

__all__ = ["Worker", "WorkerPool", "WorkerPoolStatistics"]

_BOOT = "import sys; sys.path[:] = {path!r}; from holdfast.runtime.workers.main import main; main({idle_s!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPoolStatistics:
    """A snapshot of a `WorkerPool`.

    Parameters:
        idle: number of idle workers.
        lent: number of workers that run a call.
        started: number of workers started so far.
        calls: number of calls given to workers so far.
        discarded: number of workers discarded after a call so far.
    """

    idle: int
    lent: int
    started: int
    calls: int
    discarded: int


class Starter(Protocol):
    """Interface that the pool needs from a `ProcessHost`."""

    async def spawn(
        self,
        argv: Sequence[Argument],
        *,
        stdin: Stream = None,
        stdout: Stream = None,
        env: Mapping[str, str] | None = None,
        name: str | None = None,
        leased: bool = False,
        on_cut: Callable[[asyncio.Task[TreeResult]], object] | None = None,
    ) -> Process:
        """Start a program; see `ProcessHost.spawn`."""
        ...


class Worker:
    """One worker process, as the host sees it.

    Attributes:
        process: process of the worker, under a reaper.
        control: connection to the worker; owned by the worker's current holder.
        output: descriptor of the worker's streamed output; owned by the worker's current holder.
        baseline: numbers of threads, descriptors and bytes of memory just before the last call's function began.
    """

    def __init__(self, process: Process, control: socket.socket, output: int, owner: str, environment: object) -> None:
        self.process = process
        self.control = control
        self.output = output
        self.owner = owner
        self.environment = environment
        self.calls = 0
        self.baseline: tuple[int, int, int] | None = None
        self._first_bytes: int | None = None
        self._lock = threading.Lock()
        self._open = True
        if not process.tree.exited.add(self.hang_up):
            self.hang_up()

    def hang_up(self) -> None:
        """Stop receiving from the process, for example after its exit.

        Data already sent can still be read, but a child that holds the connection open is cut off.
        """
        with self._lock:
            if self._open:
                with contextlib.suppress(OSError):
                    self.control.shutdown(socket.SHUT_RD)

    def send_cause(self, cause: Cause | None) -> None:
        """Send the cause of the stop; the SIGTERM that follows interrupts the call."""
        with self._lock, contextlib.suppress(OSError):
            if self._open and cause is not None:
                self.control.send(frame(CAUSE, pickle.dumps(cause)))

    def is_clean(self, growth_bytes: int) -> bool:
        """Return whether ``/proc`` shows that the last call left no processes, threads or descriptors behind.

        Parameters:
            growth_bytes: maximum growth of the process's memory, in bytes, since just before its first call.
        """
        held, pid = self.process.tree, self.process.pid
        if self.baseline is None or not isinstance(held, ReaperTree) or held.exited.value is not None:
            return False
        threads, descriptors, began_bytes = self.baseline
        if self._first_bytes is None:
            self._first_bytes = began_bytes
        stat = procfs.read_text(f"/proc/{pid}/stat")
        if not stat:
            return False
        fields = stat[stat.rindex(b")") + 2 :].split()
        now = procfs.descriptor_count(pid)
        grown = int(fields[21]) * resource.getpagesize() - self._first_bytes
        alone = procfs.descendants(held.reaper) == [pid]
        return alone and int(fields[17]) <= threads and now == descriptors and grown <= growth_bytes

    def close(self) -> None:
        """Close the descriptors. This ends the process if it is alive; see also `kill`."""
        with self._lock:
            if self._open:
                self._open = False
                self.control.close()
                os.close(self.output)

    def kill(self) -> None:
        """Request a kill of the worker's process tree, without waiting for the result, and close the descriptors."""
        self.process.tree.ask_kill(0.0, KILL_BOUND_S)
        self.close()


class WorkerPool:
    """Lends workers to calls. All methods are callable from any thread; created by `ProcessHost.workers`.

    Parameters:
        processes: process host that starts the workers.
        idle_limit: maximum number of idle workers; the worker that has been idle for longest is discarded first.
        owner_limit: maximum number of idle workers per owner.
        idle_s: idle timeout after which a worker exits, in seconds.
        calls_limit: maximum number of calls per worker.
        growth_bytes: maximum growth of a worker's memory, in bytes, since just before its first call.

    Attributes:
        variables: names or patterns of environment variables that workers get in addition to what an interpreter needs.
            A worker that was started with a different environment is discarded.
    """

    def __init__(
        self,
        processes: Starter,
        *,
        idle_limit: int = 16,
        owner_limit: int = 8,
        idle_s: float = 60.0,
        calls_limit: int = 1000,
        growth_bytes: int = 1 << 28,
    ) -> None:
        self.idle_limit = idle_limit
        self.owner_limit = owner_limit
        self.idle_s = idle_s
        self.calls_limit = calls_limit
        self.growth_bytes = growth_bytes
        self.variables: tuple[str, ...] = ()
        self._processes = processes
        self._lock = threading.Lock()
        self._idle: dict[Worker, None] = {}  # longest idle first
        self._lent: set[Worker] = set()
        self._counts: Counter[str] = Counter()

    def acquire(self, owner: str) -> Worker | None:
        """Return an idle worker of this owner for one call; None if the owner has no usable idle worker.

        After the call, give the worker back with `release` or `discard`.
        """
        environment = self._environment()
        stale = []
        found = None
        with self._lock:
            for worker in reversed(list(self._idle)):  # most recently used first
                if worker.owner != owner:
                    continue
                del self._idle[worker]
                if worker.environment == environment:
                    found = worker
                    self._lend(worker)
                    break
                stale.append(worker)
        for worker in stale:
            worker.kill()
        return found

    async def start(
        self, owner: str, name: str, on_cut: Callable[[asyncio.Task[TreeResult]], object] | None = None
    ) -> Worker:
        """Start a worker for one call.

        For ``name``, ``on_cut`` and the errors raised, see `ProcessHost.spawn`.
        """
        environment = self._environment()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(write, True)
        boot = _BOOT.format(path=list(sys.path), idle_s=self.idle_s)
        try:
            process = await self._processes.spawn(
                [sys.executable, "-c", boot],
                stdin=theirs.fileno(),
                stdout=write,
                env=start_environment(self.variables),
                name=name,
                on_cut=on_cut,
                leased=True,
            )
        except BaseException:
            ours.close()
            os.close(read)
            raise
        finally:
            theirs.close()
            os.close(write)
        worker = Worker(process, ours, read, owner, environment)
        with self._lock:
            self._counts["started"] += 1
            self._lend(worker)
        process.tree.gone.add(lambda: self._forget(worker))
        return worker

    def _lend(self, worker: Worker) -> None:
        worker.calls += 1
        worker.baseline = None
        self._lent.add(worker)
        self._counts["calls"] += 1

    def release(self, worker: Worker) -> bool:
        """Take a worker back for later calls; return False if the worker is unfit.

        If the worker is unfit, the caller still holds the worker and must end its process and `discard` it.
        """
        if worker.calls >= self.calls_limit or not worker.is_clean(self.growth_bytes):
            return False
        surplus = []
        with self._lock:
            self._lent.discard(worker)
            self._idle[worker] = None
            of_owner = [other for other in self._idle if other.owner == worker.owner]
            if len(of_owner) > self.owner_limit or len(self._idle) > self.idle_limit:
                surplus.append(of_owner[0] if len(of_owner) > self.owner_limit else next(iter(self._idle)))
                del self._idle[surplus[0]]
        for other in surplus:
            other.kill()
        if worker.process.gone:  # it exited meanwhile, and nothing else would notice
            self._forget(worker)
        return True

    def discard(self, worker: Worker) -> None:
        """Forget a lent worker after the call has ended the worker's process."""
        with self._lock:
            self._lent.discard(worker)
            self._counts["thrown_away"] += 1
        worker.close()

    def _forget(self, worker: Worker) -> None:
        """Forget a worker that has exited. If it is lent, its call will notice."""
        with self._lock:
            idle = self._idle.pop(worker, worker) is None
        if idle:
            worker.close()

    def close(self) -> None:
        """Kill the idle workers, but not workers that are lent to calls. The pool stays usable."""
        with self._lock:
            idle, self._idle = list(self._idle), {}
        for worker in idle:
            worker.kill()

    def leave_to_parent(self) -> None:
        """Close the workers in a forked child, because they belong to the parent."""
        for worker in (*self._idle, *self._lent):
            worker._lock = threading.Lock()
            worker.close()

    def statistics(self) -> WorkerPoolStatistics:
        """Return a snapshot of the pool."""
        with self._lock:
            counts = self._counts
            return WorkerPoolStatistics(
                idle=len(self._idle),
                lent=len(self._lent),
                started=counts["started"],
                calls=counts["calls"],
                discarded=counts["thrown_away"],
            )

    def _environment(self) -> tuple[Any, ...]:
        """Return the path, directory, variables and identity of a new worker; workers that differ are not reused."""
        return (list(sys.path), os.getcwd(), start_environment(self.variables), identity())
