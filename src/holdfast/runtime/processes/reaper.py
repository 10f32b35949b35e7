"""The reaper: a small process that is the parent of one program and can kill the program's whole process tree.

The zygote forks one reaper for each program. Invariants:

- The reaper is a child subreaper: whatever a descendant does (new session, double fork, wiped environment), it becomes
  a child of the reaper when its parent ends. So "the reaper has no children" proves "nothing of the tree is left".
- Only the reaper reaps its children, so the pid of a child that it has not reaped is not reused; all other descendants
  are signalled through a pidfd.
- The reaper holds no end of the program's pipes and never waits for a pipe's end of file.
- If the control socket reaches end of file or the host process ends, the reaper kills everything and exits. So the tree
  dies with the host, however the host died, with or without the zygote.
- The reaper exits when the tree is gone, never before.

Messages are marshalled tuples on a ``SOCK_SEQPACKET`` socket. The host sends ``("kill", term_first_s, bound_s)`` and
``("signal", signum)``. If the start fails, the reaper sends ``("failed", stage, errno)``. Otherwise it sends
``("started", pid, reaper pid)``, ``("exited", returncode)`` when the program has ended, ``("survivors", killed,
survivors, found)`` if a kill exceeds its time limit, and last ``("gone", killed, found)``. ``found`` is the number of
processes that got a signal of a kill.
"""

from __future__ import annotations

import _socket
import errno
import marshal
import os
import select
import signal
import time

from holdfast.runtime.processes import procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    from typing import Any, NoReturn

__all__ = ["IGNORED_SIGNALS", "Reaper", "Wakeup", "name_process", "receive", "send"]

IGNORED_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGPIPE,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGXFSZ,
)
"""Signals that may be sent to a whole process group: reapers ignore these signals, but their programs do not."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_RESTRIKE_S = 0.02
_RESTRIKE_LIMIT_S = 1.0
_LONGEST_POLL_S = 3600.0
"""Limit of one ``poll``, which rejects timeouts over 24 days; the grace period of a stop may be longer."""

_MESSAGE_BYTES = 65536


def name_process(libc: ctypes.CDLL, name: str) -> None:
    """Show ``name`` (at most 15 characters) in process lists."""
    libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def become_subreaper(libc: ctypes.CDLL) -> None:
    """Become the process that adopts orphaned descendants."""
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(errno.EINVAL, "this kernel does not support child subreapers")


def send(control: _socket.socket, message: tuple[Any, ...]) -> None:
    """Send a message; do nothing if the peer is gone, because the code that reads messages handles end of file."""
    try:
        control.send(marshal.dumps(message))
    except (BrokenPipeError, ConnectionResetError):
        return


def receive(control: _socket.socket) -> tuple[Any, ...] | None:
    """Return the next message; None at end of file."""
    try:
        data = control.recv(_MESSAGE_BYTES)
    except ConnectionResetError:  # it left a message of ours unread; its own messages come next
        data = control.recv(_MESSAGE_BYTES)
    return tuple(marshal.loads(data)) if data else None


class Wakeup:
    """Signals the end of a child through a descriptor for ``poll``."""

    __slots__ = ("fd",)

    def __init__(self) -> None:
        self.fd, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
        inherited = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if inherited >= 0:
            os.close(inherited)

    def clear(self) -> None:
        """Empty the descriptor, so that ``poll`` waits for the next signal."""
        try:
            while len(os.read(self.fd, 4096)) == 4096:
                pass
        except BlockingIOError:
            return


class Reaper:
    """Runs one program as a child of the current process, which must be single-threaded.

    Parameters:
        control: socket to the host.
        host: pidfd of the host process.
        libc: the C library, loaded once by the zygote.
        niceness: niceness of the host and its programs; the reaper itself may run at a higher priority.
    """

    def __init__(self, control: _socket.socket, host: int, libc: ctypes.CDLL, niceness: int) -> None:
        self._control = control
        self._host = host
        self._libc = libc
        self._niceness = niceness
        self._wakeup = Wakeup()
        self._poll = select.poll()
        self._main = 0
        self._starting: int | None = None
        self._failed = False
        self._host_lost = False
        self._killing = False
        self._kill_at = 0.0
        self._report_at: float | None = None
        self._restrike_at = 0.0
        self._restrike_s = _RESTRIKE_S
        self._struck: set[int] = set()
        self._killed: list[int] = []
        self._found: set[int] = set()

    def run(
        self, argv: list[bytes], environment: dict[bytes, bytes], directory: bytes | None, standard: list[int]
    ) -> None:
        """Start the program, and return when the program and all its descendants are gone.

        Parameters:
            argv: program and arguments; a program name without a slash is looked up in the PATH of ``environment``.
            environment: complete environment.
            directory: working directory; None uses the zygote's.
            standard: descriptors that become the program's descriptors 0, 1 and 2; the reaper closes its copies after
                the fork.
        """
        os.setsid()
        become_subreaper(self._libc)
        name_process(self._libc, "holdfast-reaper")
        read, write = os.pipe2(os.O_CLOEXEC)
        me = os.getpid()
        try:
            self._main = os.fork()
        except OSError as error:
            send(self._control, ("failed", "fork", error.errno))
            return
        if self._main == 0:
            _become(argv, environment, directory, standard, write, me, self._libc, self._niceness)
        os.close(write)
        for fd in standard:
            os.close(fd)
        self._starting = read
        for fd in (read, self._control.fileno(), self._host, self._wakeup.fd):
            self._poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in self._poll.poll(self._timeout_ms()):
                if fd == self._wakeup.fd:
                    self._wakeup.clear()
                elif fd == self._control.fileno():
                    self._obey(receive(self._control))
                elif fd == self._host:
                    self._lose_host()
                elif fd == self._starting:
                    self._learn_start()
            if not self._reap():
                break
            if self._killing:
                self._kill()
        if not self._failed:
            send(self._control, ("gone", self._killed, len(self._found)))

    def _timeout_ms(self) -> float | None:
        if not self._killing:
            return None
        left_s = max(0.0, min(self._kill_at, self._restrike_at) - time.monotonic())
        return min(left_s, _LONGEST_POLL_S) * 1000 + 1

    def _lose_host(self) -> None:
        if not self._host_lost:
            self._host_lost = True
            self._poll.unregister(self._host)
            self._poll.unregister(self._control.fileno())
        self._killing = True
        self._kill_at = 0.0
        self._restrike_at = 0.0
        self._report_at = None

    def _obey(self, message: tuple[Any, ...] | None) -> None:
        match message:
            case None:
                self._lose_host()
            case ("kill", float(term_first_s), float(bound_s)):
                now = time.monotonic()
                if term_first_s > 0 and not self._killing:
                    self._kill_at = now + term_first_s
                    for pid in procfs.descendants(os.getpid()):
                        if self._strike(pid, signal.SIGTERM):
                            self._found.add(pid)
                        self._strike(pid, signal.SIGCONT)
                elif term_first_s <= 0:
                    self._kill_at = now
                self._restrike_at = self._kill_at
                self._report_at = self._kill_at + bound_s
                self._killing = True
            case ("signal", int(signum)):
                if self._main:
                    os.kill(self._main, signum)  # not reaped yet, so the pid is still its own

    def _learn_start(self) -> None:
        """Send either ``started`` or ``failed``, before any other message."""
        assert self._starting is not None
        self._poll.unregister(self._starting)
        data = os.read(self._starting, 64)
        os.close(self._starting)
        self._starting = None
        if data:
            stage, number = marshal.loads(data)
            self._failed = True
            send(self._control, ("failed", stage, number))
        else:
            send(self._control, ("started", self._main, os.getpid()))

    def _reap(self) -> bool:
        """Reap all ended children; return False if no child is left, and so no descendant."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            self._struck.discard(pid)
            if pid == self._main:
                if self._starting is not None:
                    self._learn_start()
                self._main = 0
                if not self._failed:
                    send(self._control, ("exited", os.waitstatus_to_exitcode(status)))

    def _strike(self, pid: int, signum: int) -> bool:
        me = os.getpid()
        return procfs.strike(pid, signum, lambda stat: procfs.branch_below(stat, me) is not None) == "hit"

    def _kill(self) -> None:
        """Make one pass: kill every descendant not signalled yet, and signal the others again with back-off."""
        now = time.monotonic()
        if now < self._kill_at:
            return
        again = now >= self._restrike_at
        if again:
            self._restrike_at = now + self._restrike_s
            self._restrike_s = min(self._restrike_s * 1.5, _RESTRIKE_LIMIT_S)
        frontier = procfs.children_once(os.getpid())
        seen = set(frontier)
        while frontier:
            below: list[int] = []
            for pid in frontier:
                if pid in self._struck and not again:
                    continue
                kids = procfs.children_once(pid)  # read before it dies: after that they are no longer listed under it
                if self._strike(pid, signal.SIGKILL) and pid not in self._struck:
                    self._struck.add(pid)
                    self._killed.append(pid)
                    self._found.add(pid)
                below.extend(kid for kid in kids if kid not in seen)
                seen.update(kids)
            frontier = below
        if self._report_at is not None and now >= self._report_at:
            living = procfs.living(procfs.descendants(os.getpid()))
            if living:  # otherwise only exit statuses are left to read
                self._report_at = None
                send(self._control, ("survivors", self._killed, living, len(self._found)))


def _become(
    argv: list[bytes],
    environment: dict[bytes, bytes],
    directory: bytes | None,
    standard: list[int],
    report: int,
    reaper: int,
    libc: ctypes.CDLL,
    niceness: int,
) -> NoReturn:
    """Execute the program in the forked child, or report the failure to the reaper. Never returns."""
    stage = "start"
    try:
        os.setsid()
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != reaper:  # it ended before the line above
            os._exit(127)
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
        signal.set_wakeup_fd(-1)
        for signum in (*IGNORED_SIGNALS, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)
        for target, fd in enumerate(standard):
            os.dup2(fd, target)
        if directory is not None:
            stage = "chdir"
            os.chdir(directory)
        stage = "exec"
        _execute(argv, environment)
    except OSError as error:
        os.write(report, marshal.dumps((stage, error.errno)))
    finally:
        os._exit(127)


def _execute(argv: list[bytes], environment: dict[bytes, bytes]) -> None:
    """Replace this process; look up the program as the shell does."""
    program = argv[0]
    if b"/" in program:
        os.execve(program, argv, environment)
    failure: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    for folder in environment.get(b"PATH", os.defpath.encode()).split(b":"):
        try:
            os.execve(folder + b"/" + program if folder else program, argv, environment)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            failure = error
    raise failure
