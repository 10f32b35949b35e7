"""Programs whose whole process tree can be stopped, and dies with this process.

Each program runs under a reaper (`holdfast.runtime.reaper`) that the zygote (`holdfast.runtime.zygote`) forks.
Invariants:

- One daemon thread per `ProcessHost` reads what zygote and reapers say, and it alone closes their sockets; any thread
  or loop may send.
- A process is named dead only because its reaper reported that it has no descendant left (or because the zygote killed
  the orphans of a reaper that was killed). What is not reported so makes `TreeResult.proven` false.
- No lock is held across an await or while user code runs.
- Descriptors of a tree are closed when it is gone, whether anybody awaits it or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final, Generic, Protocol, TypeVar

from holdfast.runtime import procfs

__all__ = [
    "DEVNULL",
    "PIPE",
    "STDOUT",
    "Completed",
    "Orphan",
    "Process",
    "ProcessHost",
    "ProcessHostStatistics",
    "TreeResult",
    "host_marker",
    "orphans",
    "process_host",
]

PIPE: Final = subprocess.PIPE
STDOUT: Final = subprocess.STDOUT
DEVNULL: Final = subprocess.DEVNULL

Argument = str | bytes | os.PathLike[str] | os.PathLike[bytes]

Stream = int | IO[Any] | None
"""`PIPE`, `DEVNULL`, `STDOUT` (stderr only), a descriptor, an open file, or None for the default."""

_KILL_BOUND_S = 2.0
_ESCALATE_S = 0.5
_INLINE_BYTES = 32768
_START_S = 30.0
_TICK_S = 1.0
_BOOT = """\
import sys, types
for name, path in (("holdfast", {top!r}), ("holdfast.runtime", {runtime!r})):
    package = types.ModuleType(name)
    package.__path__ = [path]
    sys.modules[name] = package
from holdfast.runtime.zygote import main
main(3, 4)
"""

T = TypeVar("T")

_Specification = tuple[list[bytes], dict[bytes, bytes], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeResult:
    """What became of a process tree.

    Parameters:
        killed: pids that were alive and were killed, in the order they were found.
        survivors: pids that were still there when the bound was over (they are killed on, but not waited for).
        unattributed: ``<pid> <command>`` of processes that may belong to the tree, but could not be attributed; they
            were left alone.
        proven: True when it is certain that nothing else of the tree is left.
    """

    killed: tuple[int, ...] = ()
    survivors: tuple[int, ...] = ()
    unattributed: tuple[str, ...] = ()
    proven: bool = True

    @property
    def outcome(self) -> str:
        """``gone`` when the tree is proven dead, else ``unknown``."""
        return "gone" if self.proven and not self.survivors and not self.unattributed else "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHostStatistics:
    """A snapshot of a `ProcessHost`.

    Parameters:
        started: programs started so far.
        live: programs whose tree is not gone yet.
        killed: processes killed so far.
        survivors: processes that outlived the bound of a kill, so far.
        reapers: reapers that run now.
    """

    started: int
    live: int
    killed: int
    survivors: int
    reapers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """What `ProcessHost.run_blocking` collected.

    Parameters:
        returncode: exit code; negative for the signal that ended it.
        stdout, stderr: all that was written.
        tree: what was left of the tree and had to be killed.
    """

    returncode: int
    stdout: bytes
    stderr: bytes
    tree: TreeResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """A process that outlived its host.

    Parameters:
        pid: its number.
        host: the number that its host had.
        command: its command line, shortened.
    """

    pid: int
    host: int
    command: str


class _Once(Generic[T]):
    """A value that is set once and can be awaited by tasks of any loop and by threads."""

    __slots__ = ("_callbacks", "_lock", "value")

    def __init__(self) -> None:
        self.value: T | None = None
        self._callbacks: list[Callable[[], object]] | None = []
        self._lock = threading.Lock()

    def set(self, value: T) -> bool:
        with self._lock:
            callbacks, self._callbacks = self._callbacks, None
            if callbacks is None:
                return False
            self.value = value
        for callback in callbacks:
            callback()
        return True

    def add(self, callback: Callable[[], object]) -> bool:
        """Have ``callback`` called from the thread that sets the value; False when it is set already."""
        with self._lock:
            if self._callbacks is None:
                return False
            self._callbacks.append(callback)
            return True

    def discard(self, callback: Callable[[], object]) -> None:
        with self._lock:
            if self._callbacks is not None and callback in self._callbacks:
                self._callbacks.remove(callback)

    async def wait(self) -> T:
        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        def callback() -> None:
            with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(wake)

        if self.add(callback):
            try:
                await woken
            finally:
                self.discard(callback)
        return self._get()

    def wait_blocking(self, timeout_s: float | None = None) -> T:
        """As `wait`, for a thread.

        Raises:
            TimeoutError: it was not set in time.
        """
        woken = threading.Event()
        if self.add(woken.set):
            try:
                if not woken.wait(timeout_s):
                    raise TimeoutError
            finally:
                self.discard(woken.set)
        return self._get()

    def _get(self) -> T:
        assert self.value is not None
        return self.value


class _Tree:
    """The host's side of one reaper."""

    def __init__(
        self,
        control: socket.socket,
        link: _ZygoteLink,
        name: str,
        spec: _Specification,
        theirs: socket.socket,
        fds: Sequence[int],
    ) -> None:
        self.name = name
        self.link = link
        self.started: _Once[int | tuple[str, int]] = _Once()
        self.exited: _Once[int] = _Once()
        self.gone: _Once[TreeResult] = _Once()
        self.control: socket.socket | None = control
        self.reaper = 0
        self._spec = spec
        self._theirs = theirs
        self._fds = fds
        self._answers: list[_Once[TreeResult]] = []
        self._lock = threading.Lock()

    def submit(self) -> bool:
        """Ask the zygote for the reaper; False when it has too many requests already."""
        packed = marshal.dumps(("spawn", self._spec))
        fds = [self._theirs.fileno(), *self._fds]
        try:
            if len(packed) <= _INLINE_BYTES:
                sent = self.link.request(packed, fds)
            else:
                with tempfile.TemporaryFile() as file:
                    file.write(marshal.dumps(self._spec))
                    file.flush()
                    sent = self.link.request(marshal.dumps(("spawn", None)), [*fds, file.fileno()])
        except BrokenPipeError:  # the zygote was killed; what is waited for is set when its end is heard
            sent = True
        if sent:
            self._theirs.close()
        return sent

    def tell(self, message: tuple[Any, ...]) -> None:
        """Send to the reaper; nothing when it is gone."""
        with self._lock:  # against the reading thread's close: the number may be another file's afterwards
            if self.control is not None:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self.control.send(marshal.dumps(message))

    def close(self) -> None:
        """Only for the reading thread."""
        with self._lock:
            control, self.control = self.control, None
        if control is not None:
            control.close()

    def ask_kill(self, term_first_s: float, bound_s: float) -> _Once[TreeResult]:
        """Have the tree killed; what is returned is set when it is gone or the bound is over."""
        answer: _Once[TreeResult] = _Once()
        with self._lock:
            if self.gone.value is None:
                self._answers.append(answer)
        if self.gone.value is not None:
            answer.set(self.gone.value)
        self.tell(("kill", float(term_first_s), float(bound_s)))
        return answer

    def report(self, result: TreeResult) -> None:
        """Answer those who asked for the kill."""
        with self._lock:
            answers, self._answers = self._answers, []
        for answer in answers:
            answer.set(result)

    def finish(self, result: TreeResult) -> bool:
        """The tree is gone, or at least its reaper is; False when that was known."""
        self._theirs.close()
        self.started.set(("reaper", errno.ECHILD))
        self.exited.set(-signal.SIGKILL)  # its parent-death signal, when the reaper did not live to tell
        first = self.gone.set(result)
        self.report(result)
        return first

    def force(self, signum: signal.Signals) -> None:
        """Signal the reaper itself: it does not answer."""
        if self.reaper:
            procfs.strike(self.reaper, signum, lambda stat: stat.parent == self.link.pid)


class _Killer:
    """A fork of the zygote that kills foreign trees once and answers."""

    def __init__(self, link: _ZygoteLink, packet: bytes) -> None:
        self.answer: _Once[TreeResult] = _Once()
        self.ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link = link
        self._packet = packet

    def submit(self) -> bool:
        """Ask the zygote; False when it has too many requests already."""
        try:
            sent = self._link.request(self._packet, [self._theirs.fileno()])
        except BrokenPipeError:  # the zygote was killed: the end of our socket is the answer
            sent = True
        if sent:
            self._theirs.close()
        return sent

    def read(self) -> TreeResult:
        data = self.ours.recv(1 << 20)
        self.ours.close()
        if not data:
            return TreeResult(proven=False)
        _, killed, survivors = marshal.loads(data)
        return TreeResult(killed=tuple(killed), survivors=tuple(survivors), proven=not survivors)


class _ZygoteLink:
    """The host's side of the zygote."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        host = procfs.pidfd_open(os.getpid())
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (theirs.fileno(), host)]
        runtime = os.path.dirname(os.path.abspath(__file__))
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-c",
                    _BOOT.format(top=os.path.dirname(runtime), runtime=runtime),
                ],
                {**os.environb, procfs.HOST_MARKER: host_marker()},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_DUP2, high[0], 3),
                    (os.POSIX_SPAWN_DUP2, high[1], 4),
                ],
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            for fd in (host, *high):
                os.close(fd)
        self.socket = ours
        self.socket.setblocking(False)
        self.pidfd = procfs.pidfd_open(self.pid)
        self.identity = _identity()
        self.alive = True

    def request(self, packet: bytes, fds: Sequence[int]) -> bool:
        """Send a request; False when the zygote has too many already.

        Raises:
            BrokenPipeError: it has ended.
        """
        try:
            socket.send_fds(self.socket, [packet], fds)
        except BlockingIOError:
            return False
        return True

    def end(self) -> None:
        """Have it end when its last child is gone."""
        with contextlib.suppress(OSError):  # it has ended, and the socket with it
            self.socket.send(marshal.dumps(("end", None)))
            self.socket.shutdown(socket.SHUT_RDWR)


def _identity() -> tuple[Any, ...]:
    """Whom the zygote acts as; another identity needs another zygote."""
    return (os.getresuid(), os.getresgid(), tuple(os.getgroups()))


class ProcessHost:
    """Starts programs under reapers; one per process is enough, see `process_host`.

    All methods may be called from any thread. After a fork the child's copy is empty: it starts its own zygote when
    it needs one, and does not keep the parent's trees alive.
    """

    def __init__(self) -> None:
        self._reset()
        reference = weakref.ref(self)

        def forget() -> None:
            host = reference()
            if host is not None:
                host._leave_to_parent()

        os.register_at_fork(after_in_child=forget)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._zygote: _ZygoteLink | None = None
        self._links: dict[int, _ZygoteLink] = {}
        self._trees: dict[int, _Tree] = {}
        self._poll: select.epoll | None = None
        self._live: set[_Held] = set()
        self._watched: dict[int, Callable[[], object]] = {}
        self._tick: Callable[[], object] | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._started = 0
        self._killed = 0
        self._survivors = 0

    def _leave_to_parent(self) -> None:
        for tree in self._trees.values():
            if tree.control is not None:
                tree.control.close()
                tree.control = None
        for link in self._links.values():
            link.socket.close()
            with contextlib.suppress(OSError):
                os.close(link.pidfd)
        if self._poll is not None:
            self._poll.close()
        self._reset()

    def start(self) -> None:
        """Start the zygote now, so that the first program need not wait for it. Idempotent.

        Raises:
            OSError: the interpreter cannot be started again.
        """
        if _supported():
            self._link()

    def _link(self) -> _ZygoteLink:
        with self._lock:
            link = self._zygote
            if link is not None and link.alive and link.identity == _identity():
                return link
            if self._thread is None:
                self._closing = False
                self._poll = select.epoll()
                self._thread = threading.Thread(
                    target=self._listen, args=(self._poll,), name="holdfast-processes", daemon=True
                )
                self._thread.start()
            assert self._poll is not None
            fresh = _ZygoteLink()
            self._zygote = fresh
            self._links[fresh.socket.fileno()] = fresh
            self._links[fresh.pidfd] = fresh
            self._poll.register(fresh.socket.fileno(), select.EPOLLIN)
            self._poll.register(fresh.pidfd, select.EPOLLIN)
        if link is not None and link.alive:  # of another identity: it ends when its last tree is gone
            link.end()
        return fresh

    # -- the reading thread

    def _listen(self, poll: select.epoll) -> None:
        while not (self._closing and not self._links and not self._trees):
            for fd, _ in poll.poll(None if self._tick is None else _TICK_S):
                watcher = self._watched.get(fd)
                if watcher is not None:
                    watcher()
                    continue
                tree = self._trees.get(fd)
                if tree is not None:
                    self._hear_reaper(fd, tree)
                    continue
                link = self._links.get(fd)
                if link is not None:
                    self._hear_zygote(fd, link)
            if self._tick is not None:
                self._tick()
        poll.close()

    def _watch(self, fd: int, watcher: Callable[[], object]) -> None:
        """Have ``watcher`` called in the reading thread whenever ``fd`` is readable."""
        self._link()
        assert self._poll is not None
        self._watched[fd] = watcher
        self._poll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        """No more; before ``fd`` is closed."""
        if self._watched.pop(fd, None) is not None and self._poll is not None and not self._poll.closed:
            with contextlib.suppress(OSError):  # a fork or a close came between
                self._poll.unregister(fd)

    def _set_tick(self, tick: Callable[[], object] | None) -> None:
        """Have ``tick`` called about once a second in the reading thread, and after whatever else it does."""
        self._tick = tick
        wakeup = os.eventfd(1)

        def wake() -> None:
            self._unwatch(wakeup)
            os.close(wakeup)

        self._watch(wakeup, wake)

    def _send_killer(self, tags: list[int], roots: list[tuple[int, int]], bound_s: float) -> _Killer:
        """Prepare a fork of the zygote that kills what foreign code started in these scopes."""
        link = self._link()
        killer = _Killer(link, marshal.dumps(("kill", (os.getpid(), tags, roots, bound_s))))

        def hear() -> None:
            self._unwatch(killer.ours.fileno())
            result = killer.read()
            self._killed += len(result.killed)
            self._survivors += len(result.survivors)
            killer.answer.set(result)

        self._watch(killer.ours.fileno(), hear)
        return killer

    def _hear_reaper(self, fd: int, tree: _Tree) -> None:
        control = tree.control
        if control is None:
            return
        try:
            data = control.recv(1 << 20)
        except (BlockingIOError, ConnectionResetError):  # reset: it left a message of ours unread; its own come next
            return
        if not data:
            self._drop(fd, tree)
            if not tree.link.alive or not tree.reaper:  # else the zygote tells when it has killed the orphans
                self._finish(tree, TreeResult(proven=False))
            return
        match marshal.loads(data):
            case ("started", int(pid), int(reaper)):
                tree.reaper = reaper
                tree.started.set(pid)
            case ("failed", str(stage), int(number)):
                tree.started.set((stage, number))
                self._drop(fd, tree)
                self._finish(tree, TreeResult())
            case ("exited", int(returncode)):
                tree.exited.set(returncode)
            case ("survivors", list(killed), list(survivors)):
                self._survivors += len(survivors)
                tree.report(TreeResult(killed=tuple(killed), survivors=tuple(survivors), proven=False))
            case ("gone", list(killed)):
                self._drop(fd, tree)
                self._finish(tree, TreeResult(killed=tuple(killed)))

    def _drop(self, fd: int, tree: _Tree) -> None:
        assert self._poll is not None
        self._poll.unregister(fd)
        del self._trees[fd]
        tree.close()

    def _finish(self, tree: _Tree, result: TreeResult) -> None:
        self._live.discard(tree)
        if tree.finish(result):
            self._killed += len(result.killed)

    def _hear_zygote(self, fd: int, link: _ZygoteLink) -> None:
        if fd == link.pidfd:
            self._bury(link)
            return
        try:
            data = link.socket.recv(1 << 20)
        except (BlockingIOError, ConnectionResetError):  # reset: it left a message of ours unread; its own come next
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
                    if isinstance(tree, _Tree) and tree.link is link and tree.reaper == reaper:
                        self._survivors += len(survivors)
                        self._finish(
                            tree,
                            TreeResult(killed=tuple(killed), survivors=tuple(survivors), proven=not survivors),
                        )

    def _bury(self, link: _ZygoteLink) -> None:
        """The zygote has ended."""
        assert self._poll is not None
        self._poll.unregister(link.pidfd)
        del self._links[link.pidfd]
        link.alive = False
        for tree in list(self._live):
            if isinstance(tree, _Tree) and tree.link is link and tree.control is None:
                self._finish(tree, TreeResult(proven=False))
        with contextlib.suppress(ChildProcessError):  # somebody waited for any child
            os.waitpid(link.pid, 0)
        os.close(link.pidfd)

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
    ) -> Process:
        """Start a program under a reaper of its own, in a session of its own.

        When the awaiting task is cancelled meanwhile, the tree is killed before the cancellation goes on.

        Parameters:
            argv: the program, looked up in PATH of ``env``, and its arguments.
            stdin: `PIPE` (then ``process.stdin``), a descriptor or file, or None for no input.
            stdout, stderr: `PIPE` (then ``process.stdout``), a descriptor or file, `DEVNULL`, or None for this
                process's own; ``stderr`` may be `STDOUT`.
            cwd: where it starts; None for the current directory.
            env: its whole environment; None for this process's. A marker that names this host is added.
            name: for people; None for the program's file name.

        Raises:
            FileNotFoundError, PermissionError, NotADirectoryError, OSError: the program or ``cwd`` cannot be used.
            TimeoutError: the program did not start within 30 s.
            ValueError: ``argv`` is empty, or something holds a NUL byte.
        """
        spec = _specification(argv, cwd, env)
        with _Descriptors(stdin, stdout, stderr) as descriptors:
            tree = self._begin(spec, name, descriptors.theirs)
            try:
                if isinstance(tree, _Tree):
                    for pause_s in _backlog_pauses():
                        if tree.submit():
                            break
                        await asyncio.sleep(pause_s)
                descriptors.close_theirs()
                async with asyncio.timeout(_START_S):
                    started = await tree.started.wait()
                process = Process(tree, _pid_or_error(started, argv, cwd))
                await process._connect(descriptors)
            except BaseException:
                await asyncio.shield(_kill(tree, 0.0, _KILL_BOUND_S))
                raise
        return process

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
    ) -> Process:
        """As `spawn`, for a thread; `PIPE` is not taken: give descriptors or files of your own.

        Raises:
            As `spawn`; ValueError also for `PIPE`.
        """
        if PIPE in (stdin, stdout, stderr):
            raise ValueError("spawn_blocking() takes descriptors or files, not PIPE; its streams would need a loop")
        spec = _specification(argv, cwd, env)
        with _Descriptors(stdin, stdout, stderr) as descriptors:
            tree = self._begin(spec, name, descriptors.theirs)
            try:
                if isinstance(tree, _Tree):
                    for pause_s in _backlog_pauses():
                        if tree.submit():
                            break
                        time.sleep(pause_s)
                started = tree.started.wait_blocking(_START_S)
                return Process(tree, _pid_or_error(started, argv, cwd))
            except BaseException:
                _kill_blocking(tree, 0.0, _KILL_BOUND_S)
                raise

    def run_blocking(
        self,
        argv: Sequence[Argument],
        *,
        input: bytes = b"",
        timeout_s: float | None = None,
        cwd: Argument | None = None,
        env: Mapping[str, str] | None = None,
        name: str | None = None,
    ) -> Completed:
        """Run a program to its end from a thread, collect what it writes, and kill what it leaves behind.

        What it writes goes through unnamed files, so neither a full pipe nor a stray that holds one can block this.

        Raises:
            TimeoutError: it did not end in ``timeout_s`` seconds; its tree was killed.
            OSError: as `spawn`.
        """
        with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            source.write(input)
            source.seek(0)
            process = self.spawn_blocking(argv, stdin=source, stdout=out, stderr=err, cwd=cwd, env=env, name=name)
            try:
                returncode = process.wait_blocking(timeout_s)
            finally:
                tree = process.kill_tree_blocking()
            out.seek(0)
            err.seek(0)
            return Completed(returncode=returncode, stdout=out.read(), stderr=err.read(), tree=tree)

    def _begin(self, spec: _Specification, name: str | None, fds: Sequence[int]) -> _Held:
        name = name or os.fsdecode(os.path.basename(spec[0][0]))
        held: _Held
        if not _supported():
            held = _Group(spec, name, fds)
            held.gone.add(lambda: self._live.discard(held))
        else:
            link = self._link()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            held = _Tree(ours, link, name, spec, theirs, fds)
            assert self._poll is not None
            self._trees[ours.fileno()] = held
            self._poll.register(ours.fileno(), select.EPOLLIN)
        self._live.add(held)
        self._started += 1
        return held

    def close(self) -> None:
        """Kill every tree and end the zygote; returns when they are gone, at most after a few seconds. Idempotent.

        The host may be used again afterwards.
        """
        for held in list(self._live):
            held.ask_kill(0.0, _KILL_BOUND_S)
        deadline = time.monotonic() + _KILL_BOUND_S
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
            thread.join(_KILL_BOUND_S)

    def statistics(self) -> ProcessHostStatistics:
        """A snapshot; safe from any thread."""
        return ProcessHostStatistics(
            started=self._started,
            live=len(self._live),
            killed=self._killed,
            survivors=self._survivors,
            reapers=len(self._trees),
        )


class Process:
    """A program that runs, and the tree below it. Made by `ProcessHost.spawn`; usable from any thread or loop of the
    process that made it, but its streams only on the loop of ``spawn``.

    Attributes:
        pid: of the program itself.
        name: for people.
        stdin, stdout, stderr: asyncio streams where `PIPE` was asked for, else None.
    """

    def __init__(self, held: _Held, pid: int) -> None:
        self._held = held
        self._readers: list[tuple[asyncio.ReadTransport, asyncio.StreamReader]] = []
        self.pid = pid
        self.name = held.name
        self.stdin: asyncio.StreamWriter | None = None
        self.stdout: asyncio.StreamReader | None = None
        self.stderr: asyncio.StreamReader | None = None

    def __repr__(self) -> str:
        return f"<Process {self.name} pid={self.pid} returncode={self.returncode}>"

    @property
    def returncode(self) -> int | None:
        """The program's exit code, negative for the signal that ended it; None while it runs."""
        return self._held.exited.value

    @property
    def gone(self) -> bool:
        """True when nothing of the tree is left, as far as can be known; see `kill_tree` for proof."""
        return self._held.gone.value is not None

    async def wait(self) -> int:
        """The program's exit code, once it has ended. Strays of it may live on, see `kill_tree`."""
        return await self._held.exited.wait()

    def wait_blocking(self, timeout_s: float | None = None) -> int:
        """As `wait`, for a thread.

        Raises:
            TimeoutError: it did not end within ``timeout_s`` seconds.
        """
        return self._held.exited.wait_blocking(timeout_s)

    async def wait_gone(self) -> TreeResult:
        """What became of the tree, once nothing of it is left. Strays of the program may keep it for long."""
        return await self._held.gone.wait()

    def signal(self, signum: int) -> None:
        """Signal the program itself; nothing when it has ended."""
        self._held.tell(("signal", int(signum)))

    async def kill_tree(self, *, term_first_s: float = 0.0, bound_s: float = _KILL_BOUND_S) -> TreeResult:
        """Kill the program and everything it ever started; when the tree is gone already, say so at once.

        Concurrent callers get the same result. Cancelling the wait does not take the kill back.

        Parameters:
            term_first_s: send SIGTERM first and leave the tree this long to end by itself.
            bound_s: how long to wait for processes to die after SIGKILL.
        """
        return await _kill(self._held, term_first_s, bound_s)

    def kill_tree_blocking(self, *, term_first_s: float = 0.0, bound_s: float = _KILL_BOUND_S) -> TreeResult:
        """As `kill_tree`, for a thread."""
        return _kill_blocking(self._held, term_first_s, bound_s)

    async def _connect(self, descriptors: _Descriptors) -> None:
        loop = asyncio.get_running_loop()
        if (fd := descriptors.take("stdin")) is not None:
            sink = asyncio.StreamReaderProtocol(asyncio.StreamReader(loop=loop), loop=loop)
            writing, _ = await loop.connect_write_pipe(lambda: sink, os.fdopen(fd, "wb", 0))
            self.stdin = asyncio.StreamWriter(writing, sink, None, loop)
        self.stdout = await self._connect_reader(descriptors.take("stdout"))
        self.stderr = await self._connect_reader(descriptors.take("stderr"))
        if self.stdin is not None or self._readers:

            def settle() -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed, and its transports with it
                    loop.call_soon_threadsafe(self._settle_streams)

            if not self._held.gone.add(settle):
                self._settle_streams()

    async def _connect_reader(self, fd: int | None) -> asyncio.StreamReader | None:
        if fd is None:
            return None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(fd, "rb", 0))
        self._readers.append((transport, reader))
        return reader

    def _settle_streams(self) -> None:
        """The tree is gone: take what is left in the pipes into memory (at most a pipe's capacity) and close them."""
        if self.stdin is not None and not self.stdin.transport.is_closing():
            self.stdin.transport.abort()
        for transport, reader in self._readers:
            if transport.is_closing():
                continue
            fd = transport.get_extra_info("pipe").fileno()
            with contextlib.suppress(BlockingIOError):  # held by a process outside the tree: left to the transport
                while data := os.read(fd, 65536):
                    reader.feed_data(data)
                transport.close()
        self._readers.clear()


class _Held(Protocol):
    """What keeps a tree: a reaper where there can be one, else a process group."""

    name: str
    started: _Once[int | tuple[str, int]]
    exited: _Once[int]
    gone: _Once[TreeResult]

    def tell(self, message: tuple[Any, ...]) -> None: ...

    def ask_kill(self, term_first_s: float, bound_s: float) -> _Once[TreeResult]: ...

    def force(self, signum: signal.Signals) -> None: ...


def _escalation(term_first_s: float, bound_s: float) -> Iterator[tuple[float, signal.Signals | None]]:
    """How long to wait for the reaper's answer, and what to do to the reaper when it does not come."""
    yield term_first_s + bound_s + _ESCALATE_S, signal.SIGCONT
    yield _ESCALATE_S, signal.SIGKILL
    yield bound_s + _ESCALATE_S, None


async def _kill(held: _Held, term_first_s: float, bound_s: float) -> TreeResult:
    answer = held.ask_kill(term_first_s, bound_s)
    for wait_s, signum in _escalation(term_first_s, bound_s):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                return await answer.wait()
        if signum is not None:
            held.force(signum)
    return TreeResult(proven=False)


def _kill_blocking(held: _Held, term_first_s: float, bound_s: float) -> TreeResult:
    answer = held.ask_kill(term_first_s, bound_s)
    for wait_s, signum in _escalation(term_first_s, bound_s):
        with contextlib.suppress(TimeoutError):
            return answer.wait_blocking(wait_s)
        if signum is not None:
            held.force(signum)
    return TreeResult(proven=False)


class _Group:
    """Where there is no reaper: a process group. Who leaves the group is not found, so nothing is ever proven."""

    def __init__(self, spec: _Specification, name: str, fds: Sequence[int]) -> None:
        self.name = name
        self.started: _Once[int | tuple[str, int]] = _Once()
        self.exited: _Once[int] = _Once()
        self.gone: _Once[TreeResult] = _Once()
        argv, environment, directory = spec
        self._program = subprocess.Popen(
            argv,
            stdin=fds[0],
            stdout=fds[1],
            stderr=fds[2],
            cwd=directory,
            env=environment,
            start_new_session=True,
        )
        self.started.set(self._program.pid)
        threading.Thread(target=self._attend, name=f"holdfast-wait-{name}", daemon=True).start()

    def _attend(self) -> None:
        self.exited.set(self._program.wait())

    def tell(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("signal", int(signum)):
                self._program.send_signal(signum)

    def ask_kill(self, term_first_s: float, bound_s: float) -> _Once[TreeResult]:
        def end() -> None:
            with contextlib.suppress(ProcessLookupError):
                if term_first_s > 0:
                    os.killpg(self._program.pid, signal.SIGTERM)
                    with contextlib.suppress(TimeoutError):
                        self.exited.wait_blocking(term_first_s)
                os.killpg(self._program.pid, signal.SIGKILL)
            survivors: tuple[int, ...] = ()
            try:
                self.exited.wait_blocking(bound_s)
            except TimeoutError:
                survivors = (self._program.pid,)
            self.gone.set(TreeResult(killed=(self._program.pid,), survivors=survivors, proven=False))

        threading.Thread(target=end, name=f"holdfast-kill-{self.name}", daemon=True).start()
        return self.gone

    def force(self, signum: signal.Signals) -> None:
        """There is no reaper."""


class _Descriptors:
    """The descriptors of one start: what the program gets, and our ends of its pipes. Closes what nobody took."""

    def __init__(self, stdin: Stream, stdout: Stream, stderr: Stream) -> None:
        self.theirs: list[int] = []
        self._opened: list[int] = []
        self._ours: dict[str, int] = {}
        try:
            self._add("stdin", DEVNULL if stdin is None else stdin)
            self._add("stdout", 1 if stdout is None else stdout)
            if stderr == STDOUT:
                self.theirs.append(self.theirs[1])
            else:
                self._add("stderr", 2 if stderr is None else stderr)
        except BaseException:
            self.close()
            raise

    def _add(self, name: str, stream: int | IO[Any]) -> None:
        if stream == PIPE:
            read, write = os.pipe2(os.O_CLOEXEC)
            theirs, self._ours[name] = (read, write) if name == "stdin" else (write, read)
            self._opened.append(theirs)
        elif stream == DEVNULL:
            theirs = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            self._opened.append(theirs)
        elif isinstance(stream, int):
            if stream < 0:
                raise ValueError(f"{name} cannot be {stream}: give PIPE, DEVNULL, a descriptor or an open file")
            theirs = stream
        else:
            theirs = stream.fileno()
        self.theirs.append(theirs)

    def take(self, name: str) -> int | None:
        return self._ours.pop(name, None)

    def close_theirs(self) -> None:
        while self._opened:
            os.close(self._opened.pop())

    def close(self) -> None:
        self.close_theirs()
        while self._ours:
            os.close(self._ours.popitem()[1])

    def __enter__(self) -> _Descriptors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _specification(argv: Sequence[Argument], cwd: Argument | None, env: Mapping[str, str] | None) -> _Specification:
    if isinstance(argv, str | bytes) or not argv:
        raise ValueError("argv must be a sequence of the program and its arguments, as in ['ls', '-l']")
    words = [os.fsencode(word) for word in argv]
    if env is None:
        environment = dict(os.environb)
    else:
        environment = {os.fsencode(key): os.fsencode(value) for key, value in env.items()}
    environment[procfs.HOST_MARKER] = host_marker()
    if any(b"\0" in word for word in (*words, *environment, *environment.values())):
        raise ValueError("neither arguments nor environment may hold a NUL byte")
    if cwd is not None:
        directory = os.fsencode(os.path.abspath(cwd))
    else:
        directory = os.getcwdb()
    return words, environment, directory


def _pid_or_error(started: int | tuple[str, int], argv: Sequence[Argument], cwd: Argument | None) -> int:
    if isinstance(started, int):
        return started
    stage, number = started
    match stage:
        case "chdir":
            raise OSError(number, os.strerror(number), os.fspath(cwd) if cwd is not None else os.getcwd())
        case "exec":
            raise OSError(number, os.strerror(number), os.fspath(argv[0]))
        case _:
            raise OSError(number, f"cannot start {os.fsdecode(argv[0])} ({stage}): {os.strerror(number)}")


def _backlog_pauses() -> Iterator[float]:
    """Pauses until the zygote has worked some requests off, seconds in all."""
    deadline = time.monotonic() + _START_S
    pause_s = 0.0005
    while time.monotonic() < deadline:
        yield pause_s
        pause_s = min(pause_s * 2, 0.02)
    raise TimeoutError(errno.ETIMEDOUT, "the zygote takes no more requests; is it stopped?")


@functools.cache
def _supported() -> bool:
    return sys.platform == "linux" and procfs.supported()


_marker: tuple[int, bytes] = (0, b"")


def host_marker() -> bytes:
    """What programs of this process carry in their environment: its pid and start time."""
    global _marker
    pid = os.getpid()
    if _marker[0] != pid:
        _marker = (pid, b"%d.%d" % (pid, procfs.start_time(pid) or 0))
    return _marker[1]


def orphans() -> tuple[Orphan, ...]:
    """Processes that carry the marker of a Holdfast host which no longer lives; for ``holdfast doctor``.

    Only processes of this user (all for root) can be judged; a program that wiped its environment is not found.
    """
    if not _supported():
        return ()
    found = []
    for pid in procfs.all_pids():
        marker = procfs.environment_value(pid, procfs.HOST_MARKER)
        if marker is None:
            continue
        owner, _, started = marker.partition(b".")
        if not (owner.isdigit() and started.isdigit()):
            continue
        if not procfs.lives(int(owner), int(started)):
            found.append(Orphan(pid=pid, host=int(owner), command=procfs.command(pid)))
    return tuple(found)


@functools.cache
def process_host() -> ProcessHost:
    """The one `ProcessHost` of this process; its zygote starts with the first program or with ``start()``."""
    return ProcessHost()
