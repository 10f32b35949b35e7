"""Start programs whose whole process tree can be stopped and dies with this process.

Each program runs under a reaper (`processes.reaper`) that the zygote (`processes.zygote`) forks. Invariants:

- One daemon thread per `ProcessHost`, the reading thread, reads messages from the zygote and the reapers; any thread or
  loop may send messages. Only the reading thread closes the descriptors that it watches, and it handles one event at a
  time: an event pending for a descriptor whose number was reused would make a living process seem dead.
- A process tree is reported dead only if its reaper reported that no process of the tree is left, or if the zygote
  killed the orphans of a killed reaper. In all other cases, `TreeResult.proven` is False.
- No lock is held across an await or user code. A tree's descriptors are closed when it is gone, awaited or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import marshal
import math
import os
import select
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, Unpack

from holdfast.runtime.processes.adopted_reapers import AdoptedReapers
from holdfast.runtime.processes.killer import Killed, Killer
from holdfast.runtime.processes.orphans import Orphan, orphans
from holdfast.runtime.processes.process import Process
from holdfast.runtime.processes.program_lease import ProgramLease
from holdfast.runtime.processes.reports import Completed, ProcessHostStatistics
from holdfast.runtime.processes.spec import (
    DEVNULL,
    PIPE,
    START_S,
    STDOUT,
    Argument,
    Descriptors,
    ProcessSpec,
    StartOptions,
    Stream,
    backlog_pauses,
    process_spec,
)
from holdfast.runtime.processes.start_errors import pid_or_error
from holdfast.runtime.processes.tree import (
    KILL_BOUND_S,
    GroupTree,
    Held,
    ReaperTree,
    TreeResult,
    end_tree,
    end_tree_blocking,
)
from holdfast.runtime.processes.zygote_link import ZygoteLink, identity, supported

if TYPE_CHECKING:
    from holdfast.runtime.processes.program_cgroup import CgroupSpec
    from holdfast.runtime.walls.spec import WallSpec
    from holdfast.runtime.workers.pool import WorkerPool

__all__ = [
    "DEVNULL",
    "PIPE",
    "STDOUT",
    "Completed",
    "Orphan",
    "Process",
    "ProcessHost",
    "ProcessHostStatistics",
    "Stream",
    "TreeResult",
    "orphans",
    "process_host",
]

_TICK_S = 1.0


class ProcessHost:
    """Starts programs under reapers. One host per Python process is enough; `process_host` returns it.

    All methods are callable from any thread, unless their description restricts the thread. After a fork, the child's
    copy is empty: it starts its own zygote when needed, and does not keep the parent's process trees alive.
    """

    def __init__(self) -> None:
        self._closers: list[Callable[[], object]] = []
        self._reset()
        reference = weakref.ref(self)

        def forget() -> None:
            host = reference()
            if host is not None:
                host._leave_to_parent()

        os.register_at_fork(after_in_child=forget)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._zygote: ZygoteLink | None = None
        self._links: dict[int, ZygoteLink] = {}
        self._trees: dict[int, ReaperTree] = {}
        self._poll: select.epoll | None = None
        self._live: set[Held] = set()
        self._endings: set[asyncio.Task[TreeResult]] = set()
        self._workers: WorkerPool | None = None
        self._watched: dict[int, Callable[[], object]] = {}
        self._tick: Callable[[], float] | None = None
        self._tick_s = _TICK_S
        self._thread: threading.Thread | None = None
        self._closing = False
        self._started = 0
        self._killed = 0
        self._survivors = 0
        self.buried_zygotes = 0
        self.lease = ProgramLease(self._wake)
        """When programs are killed that were started with ``leased=True``."""
        self._adopted = AdoptedReapers(self._register, self.unwatch)

    def _leave_to_parent(self) -> None:
        for tree in self._trees.values():
            if tree.control is not None:
                tree.control.close()
                tree.control = None
        for link in set(self._links.values()):
            link.socket.close()
            link.close_pidfd()
        self._adopted.close()
        self.lease.leave_to_parent()
        if self._poll is not None:
            self._poll.close()
        if self._workers is not None:
            self._workers.leave_to_parent()
        self._reset()

    @property
    def workers(self) -> WorkerPool:
        """Pool of worker processes for isolated calls; created on first use."""
        with self._lock:
            if self._workers is None:
                from holdfast.runtime.workers.pool import WorkerPool

                self._workers = WorkerPool(self)
            return self._workers

    def start(self) -> None:
        """Start the zygote now, so that the first program does not have to wait for the zygote. Idempotent.

        Raises:
            OSError: the zygote's interpreter failed to start.
        """
        if supported():
            self._link()

    def _link(self) -> ZygoteLink:
        with self._lock:
            link = self._zygote
            if link is not None and link.alive and link.identity == identity():
                return link
            if self._thread is None:
                self._closing = False
                self._poll = select.epoll()
                self._thread = threading.Thread(
                    target=self._listen, args=(self._poll,), name="holdfast-processes", daemon=True
                )
                self._thread.start()
            assert self._poll is not None
            fresh = ZygoteLink(self.lease)
            self._zygote = fresh
            self._links[fresh.socket.fileno()] = fresh
            self._links[fresh.pidfd] = fresh
            self._poll.register(fresh.socket.fileno(), select.EPOLLIN)
            self._poll.register(fresh.pidfd, select.EPOLLIN)
        if link is not None and link.alive:  # of another identity: it ends when its last tree is gone
            link.end()
        return fresh

    def _wake(self) -> None:
        """Make zygotes and reapers look at the lease, which ends sooner than they expect."""
        with self._lock:
            links, trees = set(self._links.values()), list(self._trees.values())
        for link in links:
            link.tell(("wake", b""))
        for tree in trees:
            with contextlib.suppress(BlockingIOError):  # it has messages to read, and looks at the lease after them
                tree.tell(("wake",))

    # -- the reading thread

    def _listen(self, poll: select.epoll) -> None:
        while not (self._closing and not self._links and not self._trees and not self._adopted):
            for fd, _ in poll.poll(None if self._tick is None else self._tick_s, 1):
                self._guard(self._hear, fd)
            if self._tick is not None:
                self._guard(self._take_tick, self._tick)
        poll.close()

    def _take_tick(self, tick: Callable[[], float]) -> None:
        self._tick_s = tick()

    def _guard(self, act: Callable[..., object], *values: Any) -> None:
        """Run one handler; if it raises, report the error and continue, so that later events are still handled."""
        try:
            act(*values)
        except Exception:
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))

    def _hear(self, fd: int) -> None:
        if (watcher := self._watched.get(fd)) is not None:
            watcher()
        elif (tree := self._trees.get(fd)) is not None:
            self._hear_reaper(fd, tree)
        elif (link := self._links.get(fd)) is not None:
            self._hear_zygote(fd, link)

    def watch(self, fd: int, watcher: Callable[[], object]) -> None:
        """Call ``watcher`` in the reading thread whenever ``fd`` is readable."""
        self._link()
        self._register(fd, watcher)

    def _register(self, fd: int, watcher: Callable[[], object]) -> None:
        assert self._poll is not None
        self._watched[fd] = watcher
        self._poll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        """Stop watching ``fd``. Call this in the reading thread only, before ``fd`` is closed."""
        if self._watched.pop(fd, None) is not None and self._poll is not None and not self._poll.closed:
            with contextlib.suppress(OSError):  # a fork or a close came between
                self._poll.unregister(fd)

    def set_tick(self, tick: Callable[[], float] | None) -> None:
        """Call ``tick`` in the reading thread after each event, and again after the number of seconds that it returns.

        None stops the calls.
        """
        self._tick = tick
        self.call_in_reading_thread(lambda: None)

    def call_in_reading_thread(self, call: Callable[[], object]) -> None:
        """Schedule one call of ``call`` in the reading thread."""
        wakeup = os.eventfd(1)

        def wake() -> None:
            self.unwatch(wakeup)
            os.close(wakeup)
            call()

        self.watch(wakeup, wake)

    def new_killer(
        self,
        carrier: int | None,
        sealed: bool,
        tags: dict[int, list[tuple[int, int]]],
        bound_s: float,
        told: Callable[[Killed | None], object],
    ) -> Killer:
        """Prepare a fork of the zygote that kills the programs that foreign code started in the scopes of ``tags``."""
        link = self._link()
        killer = Killer(link, (os.getpid(), carrier, sealed, tags, bound_s), told)

        def hear() -> None:
            done = killer.read()
            if done is None:
                self.unwatch(killer.ours.fileno())
                killer.ours.close()
            else:
                self._killed += sum(len(killed) for killed, _ in done.values())
                self._survivors += sum(len(survivors) for _, survivors in done.values())
            killer.told(done)

        self.watch(killer.ours.fileno(), hear)
        return killer

    def ask_zygote(self, kind: str, spec: tuple[Any, ...], fds: Sequence[int]) -> bool:
        """Send a request to the zygote; return False if it has too many. Raises `BrokenPipeError` if it has ended."""
        return self._link().submit(kind, spec, fds)

    def _hear_reaper(self, fd: int, tree: ReaperTree) -> None:
        control = tree.control
        if control is None:
            return
        try:
            data = control.recv(1 << 20)
        except (BlockingIOError, ConnectionResetError):  # reset: it left our message unread; its own come next
            return
        if not data:
            self._drop(fd, tree)
            if not tree.link.alive or not tree.reaper:  # otherwise the zygote reports once it has killed the orphans
                self._finish(tree, TreeResult(proven=not tree.sent))
            return
        match marshal.loads(data):
            case ("failed", str(stage), int(number)):
                tree.started.set((stage, number))
                self._drop(fd, tree)
                self._finish(tree, TreeResult())
            case ("survivors", list(killed), list(survivors), int(found)):
                self._survivors += len(survivors)
                tree.report(TreeResult(killed=tuple(killed), survivors=tuple(survivors), proven=False, found=found))
            case ("gone", list(killed), int(found)):
                self._drop(fd, tree)
                self._finish(tree, TreeResult(killed=tuple(killed), found=found))
            case message:
                tree.hear(message)

    def _drop(self, fd: int, tree: ReaperTree) -> None:
        assert self._poll is not None
        self._poll.unregister(fd)
        del self._trees[fd]
        tree.close()

    def _finish(self, tree: ReaperTree, result: TreeResult) -> None:
        tree.confirm_end(result, self._settle)

    def _settle(self, tree: ReaperTree, result: TreeResult) -> None:
        self._live.discard(tree)
        if tree.finish(result):
            self._killed += len(result.killed)

    def _hear_zygote(self, fd: int, link: ZygoteLink) -> None:
        if fd == link.pidfd:
            self._bury(link)
            return
        try:
            data = link.socket.recv(1 << 20)
        except (BlockingIOError, ConnectionResetError):  # reset: it left our message unread; its own come next
            return
        if not data:
            assert self._poll is not None
            self._poll.unregister(fd)
            del self._links[fd]
            link.alive = False
            link.socket.close()
            return
        match marshal.loads(data):
            case ("lost", int(reaper), list(killed), list(survivors)):
                for tree in list(self._live):
                    if isinstance(tree, ReaperTree) and tree.link is link and tree.reaper == reaper:
                        self._survivors += len(survivors)
                        ended = TreeResult(killed=tuple(killed), survivors=tuple(survivors), proven=not survivors)
                        self._finish(tree, ended)

    def _bury(self, link: ZygoteLink) -> None:
        """Handle the end of the zygote."""
        assert self._poll is not None
        self.buried_zygotes += 1
        self._poll.unregister(link.pidfd)
        del self._links[link.pidfd]
        link.alive = False
        for tree in list(self._live):
            if isinstance(tree, ReaperTree) and tree.link is link and tree.control is None:
                self._finish(tree, TreeResult(proven=False))
        link.bury()
        self._adopted.take_in()
        if self.lease.ends_at < math.inf:  # a zygote must end what foreign code starts
            self._link()

    # -- starting programs

    async def spawn(
        self,
        argv: Sequence[Argument],
        *,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        cwd: Argument | None = None,
        env: Mapping[str, str] | None = None,
        name: str | None = None,
        wall: WallSpec | None = None,
        pass_fds: Sequence[int] = (),
        confirm: Callable[[], bool] | None = None,
        cgroup: CgroupSpec | None = None,
        leased: bool = False,
        on_cut: Callable[[asyncio.Task[TreeResult]], object] | None = None,
    ) -> Process:
        """Start a program under its own reaper and in its own session.

        If the awaiting task is cancelled during the start, the tree is killed before `CancelledError` is raised. If the
        task is cancelled again meanwhile, it does not wait for the kill, but the tree is still killed.

        Parameters:
            argv: the program, which is looked up in the PATH of ``env``, and its arguments.
            stdin: standard input. `PIPE` opens the stream ``process.stdin``; a descriptor or file is passed to the
                program; None means no input.
            stdout, stderr: standard output and standard error. `PIPE` opens the stream ``process.stdout`` or
                ``process.stderr``; a descriptor or file is passed to the program; `DEVNULL` discards the output; None
                uses the stream of this process. For ``stderr``, `STDOUT` sends errors to standard output.
            cwd: working directory; None uses the current directory.
            env: complete environment; None uses this process's. In both cases, a marker that names this host is added.
            name: display name; None uses the program's file name.
            wall: the wall to run the program behind, on Linux; None runs it without a wall.
            pass_fds: descriptors that the program gets as 3, 4, … in this order.
            confirm: function that is called in a thread of its own when the tree is gone, and ends what runs for it
                outside of the tree. If it returns False or fails, the tree's end is not proven.
            cgroup: cgroup (v2) of the program's owner, as returned by `ProgramCgroups.spec_of`.
            leased: whether the program is killed when `lease` ends.
            on_cut: callback for a failed or cancelled start, called with the task that kills whatever was started. Not
                called if the arguments are invalid or the zygote cannot be started.

        Raises:
            FileNotFoundError, PermissionError, NotADirectoryError, OSError: the program or ``cwd`` is unusable.
            TimeoutError: the program did not start within 30 s.
            ValueError: ``argv``, ``env`` or a stream is invalid, for example an argument with a NUL byte.
        """
        spec = process_spec(argv, cwd, env, wall, cgroup, leased=leased)
        with Descriptors(stdin, stdout, stderr, pass_fds) as descriptors:
            tree = self._begin(spec, name, descriptors.theirs, confirm)
            try:
                if isinstance(tree, ReaperTree):
                    for pause_s in backlog_pauses():
                        if tree.submit():
                            break
                        await asyncio.sleep(pause_s)
                descriptors.close_theirs()
                async with asyncio.timeout(START_S):
                    started = await tree.started.wait()
                process = Process(tree, pid_or_error(started, argv, cwd))
                await process.connect(descriptors)
            except BaseException:
                ending = self._ending(tree)
                if on_cut is not None:
                    on_cut(ending)
                await asyncio.shield(ending)
                raise
        return process

    def _ending(self, tree: Held) -> asyncio.Task[TreeResult]:
        """Kill a tree in a task outside any scope, because an ended scope cancels new tasks."""
        ending = asyncio.get_running_loop().create_task(
            end_tree(tree, 0.0, KILL_BOUND_S), name=f"kill {tree.name}", context=contextvars.Context()
        )
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard, context=contextvars.Context())
        return ending

    def spawn_blocking(
        self,
        argv: Sequence[Argument],
        *,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        cwd: Argument | None = None,
        env: Mapping[str, str] | None = None,
        name: str | None = None,
        wall: WallSpec | None = None,
        pass_fds: Sequence[int] = (),
        confirm: Callable[[], bool] | None = None,
    ) -> Process:
        """Start a program like `spawn`, but block this thread until the program has started.

        `PIPE` is not supported: pass your own descriptors or files instead.

        Raises:
            ValueError: a stream is `PIPE`. The method also raises the errors of `spawn`.
        """
        if PIPE in (stdin, stdout, stderr):
            raise ValueError("spawn_blocking() does not support PIPE; pass descriptors or files")
        spec = process_spec(argv, cwd, env, wall)
        with Descriptors(stdin, stdout, stderr, pass_fds) as descriptors:
            tree = self._begin(spec, name, descriptors.theirs, confirm)
            try:
                if isinstance(tree, ReaperTree):
                    for pause_s in backlog_pauses():
                        if tree.submit():
                            break
                        time.sleep(pause_s)
                started = tree.started.wait_blocking(START_S)
                return Process(tree, pid_or_error(started, argv, cwd))
            except BaseException:
                end_tree_blocking(tree, 0.0, KILL_BOUND_S)
                raise

    def run_blocking(
        self,
        argv: Sequence[Argument],
        *,
        input: bytes = b"",
        timeout_s: float | None = None,
        **options: Unpack[StartOptions],
    ) -> Completed:
        """Run a program while blocking this thread, collect its output, and kill the descendants that still run.

        The program writes to unnamed temporary files. So this call is not blocked by a full pipe, nor by a descendant
        that keeps a pipe open.

        Parameters:
            options: see `spawn`.

        Raises:
            TimeoutError: the program did not end within ``timeout_s`` seconds; its tree was killed.
            OSError: the program failed to start; see `spawn`.
        """
        with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            source.write(input)
            source.seek(0)
            process = self.spawn_blocking(argv, stdin=source, stdout=out, stderr=err, **options)
            try:
                returncode = process.wait_blocking(timeout_s)
            finally:
                tree = process.kill_tree_blocking()
            out.seek(0)
            err.seek(0)
            return Completed(returncode=returncode, stdout=out.read(), stderr=err.read(), tree=tree)

    def _begin(
        self, spec: ProcessSpec, name: str | None, fds: Sequence[int], confirm: Callable[[], bool] | None
    ) -> Held:
        name = name or os.fsdecode(os.path.basename(spec[0][0]))
        held: Held
        if not supported():
            held = GroupTree(spec, name, fds)
            held.gone.add(lambda: self._live.discard(held))
        else:
            link = self._link()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            held = ReaperTree(ours, link, name, spec, theirs, fds)
            held.confirm = confirm
            assert self._poll is not None
            self._trees[ours.fileno()] = held
            self._poll.register(ours.fileno(), select.EPOLLIN)
        self._live.add(held)
        self._started += 1
        return held

    def on_close_idle(self, close: Callable[[], object]) -> None:
        """Register a function that ends processes which are kept for later use, if none is in use."""
        self._closers.append(close)

    def close_idle(self) -> None:
        """End the processes that are kept for later use: idle workers, and those of `on_close_idle`."""
        self.workers.close()
        for close in self._closers:
            close()

    def close(self) -> None:
        """Kill every process tree and end the zygote. Idempotent.

        Return when all of them are gone, but after a few seconds at the latest. The host stays usable.
        """
        if self._workers is not None:
            self._workers.close()
        for held in list(self._live):
            held.ask_kill(0.0, KILL_BOUND_S)
        deadline = time.monotonic() + KILL_BOUND_S
        for held in list(self._live):
            with contextlib.suppress(TimeoutError):
                held.gone.wait_blocking(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self._closing = True
            thread, self._thread = self._thread, None
            link, self._zygote = self._zygote, None
        if link is not None:
            link.end()
        if thread is not None and thread is not threading.current_thread():
            thread.join(KILL_BOUND_S)

    def forget_walls(self, session: str) -> None:
        """Drop the namespaces that the zygote keeps for a session; programs that run in them are not affected.

        Parameters:
            session: the part before the first NUL byte of the walls' keys.
        """
        link = self._zygote
        if link is not None and link.alive:
            link.forget_walls(session)

    def zygote_pids(self) -> set[int]:
        """Return the pids of the zygotes; callable from any thread."""
        return {link.pid for link in list(self._links.values())}

    def statistics(self) -> ProcessHostStatistics:
        """Return a snapshot of the host; callable from any thread."""
        return ProcessHostStatistics(
            started=self._started,
            live=len(self._live),
            killed=self._killed,
            survivors=self._survivors,
            reapers=len(self._trees),
        )


@functools.cache
def process_host() -> ProcessHost:
    """Return the shared `ProcessHost` of this Python process.

    The host's zygote is started by ``start()`` or with the first program.
    """
    return ProcessHost()
