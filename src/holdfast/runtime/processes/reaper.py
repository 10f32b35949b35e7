"""The reaper: a small process that is the parent of one program and can kill the program's whole process tree.

The zygote forks one reaper for each program. Invariants:

- The reaper is a child subreaper: whatever a descendant does (new session, double fork, wiped environment), it becomes
  a child of the reaper when its parent ends. So "the reaper has no children" proves "nothing of the tree is left".
- Only the reaper reaps its children, so the pid of a child that it has not reaped is not reused; all other descendants
  are signalled through a pidfd.
- The reaper holds no end of the program's pipes and never waits for a pipe's end of file.
- If the control socket reaches end of file or the host process ends, the reaper kills everything and exits. So the tree
  dies with the host, however the host died, with or without the zygote.
- If the host's lease ends (`holdfast.runtime.processes.program_lease`), the reaper kills a leased program, even if the
  host is frozen.
- The reaper exits when the tree is gone, never before.
- The reaper is outside of a walled program's wall, and is the parent of the wall's init
  (`holdfast.runtime.walls.build`). If a signal stops the init, the reaper continues it. To kill the tree, it kills the
  init.

Messages are marshalled tuples on a ``SOCK_SEQPACKET`` socket. The host sends ``("kill", term_first_s, bound_s)``,
``("signal", signum)``, and ``("wake",)`` if the lease ends sooner than expected. If the start fails, the reaper sends
``("failed", stage, errno)``. Otherwise it sends ``("started", pid, reaper pid)``, ``("lease ended",)`` if it kills the
program for that, ``("out of memory",)`` if the kernel killed the program for the limit of its cgroup, ``("exited",
returncode)`` when the program has ended, ``("survivors", killed, survivors, found)`` if a kill exceeds its time limit,
and last ``("gone", killed, found)``. ``found`` is the number of processes that got a signal of a kill.
"""

from __future__ import annotations

import _socket
import errno
import marshal
import os
import select
import signal
import struct
import time

from holdfast.runtime.processes import procfs
from holdfast.runtime.processes.program_lease import is_lease_over, read_lease
from holdfast.runtime.walls.build import IDLE_NICENESS

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    from typing import Any

    from holdfast.runtime.processes.program_cgroup import ProgramCgroup
    from holdfast.runtime.processes.program_child import ChildProgram

__all__ = ["LONGEST_POLL_S", "Reaper", "Wakeup", "name_process", "receive", "send"]

_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_RESTRIKE_S = 0.02
_RESTRIKE_LIMIT_S = 1.0
LONGEST_POLL_S = 3600.0
"""Limit of one ``poll``, which rejects timeouts over 24 days; the grace period of a stop may be longer."""

_YIELD_AGAIN_S = 0.15
_YIELD_LIMIT_S = 5.0
_MESSAGE_BYTES = 65536
_REPORT_BYTES = 4096
_CREDENTIALS = struct.Struct("iII")
"""Pid, user and group of a message's sender."""


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
        lease: descriptor of the lease with which the program must end; None if it may outlive the lease.
        libc: the C library, loaded once by the zygote.
        niceness: niceness of the host and its programs; the reaper itself may run at a higher priority.
    """

    def __init__(self, control: _socket.socket, host: int, lease: int | None, libc: ctypes.CDLL, niceness: int) -> None:
        self._control = control
        self._host = host
        self._lease = lease
        self._libc = libc
        self._niceness = niceness
        self._wakeup = Wakeup()
        self._poll = select.poll()
        self._main = 0
        self._builder = 0
        self._init = 0
        self._inside: _socket.socket | None = None
        self._cgroup: ProgramCgroup | None = None
        self._status: int | None = None
        self._ended = False
        self._starting: int | None = None
        self._failed = False
        self._host_lost = False
        self._killing = False
        self._kill_at = 0.0
        self._report_at: float | None = None
        self._restrike_at = 0.0
        self._restrike_s = _RESTRIKE_S
        self._idle = False
        self._yield_at: float | None = None
        self._yield_again_s = _YIELD_AGAIN_S
        self._struck: set[int] = set()
        self._killed: list[int] = []
        self._found: set[int] = set()

    def run(self, program: ChildProgram) -> None:
        """Start the program, and return when the program and all its descendants are gone.

        The reaper closes its copies of the program's descriptors after the fork.
        """
        if self._is_lease_over():
            program.clean_up()
            send(self._control, ("failed", "lease", errno.ECANCELED))
            return
        os.setsid()
        become_subreaper(self._libc)
        name_process(self._libc, "holdfast-reaper")
        read, write = os.pipe2(os.O_CLOEXEC)
        channel: _socket.socket | None = None
        if program.wall is not None:
            self._idle = program.wall.idle
            self._inside, channel = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0)
            self._inside.setsockopt(_socket.SOL_SOCKET, _socket.SO_PASSCRED, 1)
        me = os.getpid()
        try:
            child = program.start(self._libc, reaper=me, report=write, channel=channel, niceness=self._niceness)
        except OSError as error:
            program.clean_up()
            send(self._control, ("failed", os.fsdecode(error.filename or "fork"), error.errno))
            return
        os.close(write)
        program.close()
        self._cgroup = program.cgroup
        self._starting = read
        if channel is None or not program.has_init:
            self._main = child
        else:
            self._builder = child
        if channel is not None:
            channel.close()
        for fd in (read, self._control.fileno(), self._host, self._wakeup.fd):
            self._poll.register(fd, select.POLLIN)
        if self._inside is not None:
            self._poll.register(self._inside.fileno(), select.POLLIN)
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
                elif self._inside is not None and fd == self._inside.fileno():
                    self._hear_inside()
            self._look_at_lease()
            self._report_end()
            if not self._reap():
                break
            self._yield_to_sessions()
            if self._killing:
                self._kill()
        program.clean_up()
        if not self._failed:
            send(self._control, ("gone", self._killed, len(self._found)))

    def _timeout_ms(self) -> float | None:
        dues = [] if self._yield_at is None else [self._yield_at]
        if self._killing:
            dues.append(min(self._kill_at, self._restrike_at))
        if self._lease is not None:
            dues.append(read_lease(self._lease))
        if not dues:
            return None
        left_s = max(0.0, min(dues) - time.monotonic())
        return min(left_s, LONGEST_POLL_S) * 1000 + 1

    def _lose_host(self) -> None:
        if not self._host_lost:
            self._host_lost = True
            self._poll.unregister(self._host)
            self._poll.unregister(self._control.fileno())
        self._report_at = None
        self._kill_now()

    def _look_at_lease(self) -> None:
        """Kill the program when the host's lease has ended, even if the host is frozen and asks for nothing."""
        if self._is_lease_over():
            self._lease = None
            self._kill_now()
            send(self._control, ("lease ended",))

    def _is_lease_over(self) -> bool:
        return self._lease is not None and is_lease_over(self._lease)

    def _kill_now(self) -> None:
        self._killing = True
        self._kill_at = self._restrike_at = time.monotonic()

    def _obey(self, message: tuple[Any, ...] | None) -> None:
        match message:
            case None:
                self._lose_host()
            case ("kill", float(term_first_s), float(bound_s)):
                now = time.monotonic()
                if term_first_s > 0 and not self._killing:
                    self._kill_at = now + term_first_s
                    for pid in procfs.descendants(os.getpid()):
                        if pid not in (self._init, self._builder) and self._strike(pid, signal.SIGTERM):
                            self._found.add(pid)
                        self._strike(pid, signal.SIGCONT)
                elif term_first_s <= 0:
                    self._kill_at = now
                self._restrike_at = self._kill_at
                self._report_at = self._kill_at + bound_s
                self._killing = True
            case ("signal", int(signum)):
                if self._main:
                    self._strike(self._main, signum)

    def _learn_start(self) -> None:
        """Send either ``started`` or ``failed``, before any other message but ``lease ended``."""
        assert self._starting is not None
        self._poll.unregister(self._starting)
        data = os.read(self._starting, _REPORT_BYTES)
        os.close(self._starting)
        self._starting = None
        self._hear_inside()
        if not data and not self._main:
            data = marshal.dumps(("wall: its first process was killed", errno.ECHILD))
        if data:
            stage, number = marshal.loads(data)
            self._failed = True
            send(self._control, ("failed", stage, number))
        else:
            send(self._control, ("started", self._main, os.getpid()))
            self._yield_at = 0.0 if self._idle else None

    def _yield_to_sessions(self) -> None:
        """Lower the priority of a walled program's session, where the kernel schedules sessions against each other.

        There, a niceness counts only within its session. The kernel accepts ten such changes per second from all
        ordinary users together, so a refused one is tried again until the program ends.
        """
        now = time.monotonic()
        if self._yield_at is None or now < self._yield_at:
            return
        self._yield_at = None
        if not self._main:
            return
        try:
            with open(f"/proc/{self._main}/autogroup", "wb", buffering=0) as file:
                if self._strike(self._main, 0):  # the file is that of the program, not of a later one with its pid
                    file.write(b"%d" % IDLE_NICENESS)
        except BlockingIOError:
            self._yield_at = now + self._yield_again_s
            self._yield_again_s = min(self._yield_again_s * 1.5, _YIELD_LIMIT_S)
        except OSError:  # no such file: the kernel knows no sessions; or the program has ended
            return

    def _reap(self) -> bool:
        """Reap all ended children; return False if no child is left, and so no descendant."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | (0 if self._inside is None else os.WUNTRACED))
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if os.WIFSTOPPED(status):
                if pid in (self._init, self._builder):
                    os.kill(pid, signal.SIGCONT)
                continue
            self._struck.discard(pid)
            if pid == self._builder:
                self._builder = 0
            elif pid == self._main or (pid == self._init and self._status is None):
                self._hear_inside()
                self._status = status if self._status is None else self._status
                self._report_end()

    def _hear_inside(self) -> None:
        """Read the messages of a walled program's builder, its init and itself; see `holdfast.runtime.walls.build`."""
        while self._inside is not None:
            try:
                data, ancillary, _, _ = self._inside.recvmsg(
                    _MESSAGE_BYTES, _socket.CMSG_SPACE(_CREDENTIALS.size), _socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            if not data:
                self._poll.unregister(self._inside.fileno())
                self._inside.close()
                self._inside = None
                return
            match marshal.loads(data):
                case ("init", int(pid)):
                    self._init = pid
                case ("main",):
                    # 0: the program has ended, and its init has reaped it; the init's pid stands for it.
                    self._main = _CREDENTIALS.unpack(ancillary[0][2])[0] or self._init
                case ("ended", int(status)):
                    self._status = status

    def _report_end(self) -> None:
        """Report once that the program has ended, after its start: as its init reports, or with the init, if killed."""
        if self._status is None or self._ended:
            return
        if self._starting is not None:
            self._learn_start()
        self._ended = True
        self._main = 0
        if self._failed:
            return
        if self._cgroup is not None and self._cgroup.has_run_out_of_memory():
            send(self._control, ("out of memory",))
        send(self._control, ("exited", os.waitstatus_to_exitcode(self._status)))

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
                if pid == self._init:
                    self._kill_inside()
                    continue
                kids = procfs.children_once(pid)  # read before it dies: after that they are no longer listed under it
                if self._strike(pid, signal.SIGKILL) and pid not in self._struck:
                    self._struck.add(pid)
                    self._killed.append(pid)
                    self._found.add(pid)
                below.extend(kid for kid in kids if kid not in seen)
                seen.update(kids)
            frontier = below
        if self._cgroup is not None:
            self._cgroup.kill()  # what was forked during the pass, too
        if self._report_at is not None and now >= self._report_at:
            living = procfs.living(procfs.descendants(os.getpid()))
            if living:  # otherwise only exit statuses are left to read
                self._report_at = None
                send(self._control, ("survivors", self._killed, living, len(self._found)))

    def _kill_inside(self) -> None:
        """Kill the init of a walled program: the kernel then kills all processes inside, which are counted first."""
        for pid in procfs.living(procfs.descendants(self._init)):
            if pid not in self._struck:
                self._struck.add(pid)
                self._killed.append(pid)
                self._found.add(pid)
        self._strike(self._init, signal.SIGKILL)
        self._struck.add(self._init)
