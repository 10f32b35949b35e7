"""The program in the forked child of a reaper, until its exec. The zygote imports this module.

Invariants:

- The child reports the failure of a step to the reaper and exits; the exec closes the report, which means success.
- The program gets its own descriptors and no other one, and a new session. A terminal as its standard input becomes its
  controlling terminal.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import marshal
import os
import signal

from holdfast.runtime.processes.program_cgroup import CgroupSpec, ProgramCgroup
from holdfast.runtime.walls.build import IDLE_NICENESS, Outside, build_wall, close_wall
from holdfast.runtime.walls.kernel import clone_child, run_in_child, set_dumpable
from holdfast.runtime.walls.scratch import make_scratch, remove_scratch
from holdfast.runtime.walls.spec import WallSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from typing import Any, NoReturn

__all__ = ["IGNORED_SIGNALS", "ChildProgram"]

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
_TIOCSCTTY = 0x540E
_MOVED_FD = 32
"""Descriptors that the child still needs are moved here or above, out of the way of the program's own."""
_CLOSE_RANGE, _CLOSE_RANGE_CLOEXEC = 436, 4
_HIGHEST_FD = 0xFFFFFFFF
_FAILED = 127


class ChildProgram:
    """A program to start.

    Parameters:
        argv: program and arguments; a program name without a slash is looked up in the PATH of ``environment``.
        environment: complete environment.
        directory: working directory.
        wall: the packed `WallSpec`; None starts the program without a wall.
        cgroup: the cgroup of the program's owner; None leaves the program in that of this process.
        passed: descriptors that become the program's descriptors 0, 1, 2, ….
        kept: kept namespaces of the wall; see `holdfast.runtime.walls.kept_namespaces`.
        outbox: socket to the zygote, for namespaces to keep.
    """

    def __init__(
        self,
        argv: list[bytes],
        environment: dict[bytes, bytes],
        directory: bytes,
        wall: dict[str, Any] | None,
        cgroup: CgroupSpec | None,
        *,
        passed: list[int],
        kept: list[int],
        outbox: int,
    ) -> None:
        self.wall = None if wall is None else WallSpec.unpack(wall)
        self.scratch = make_scratch() if self.wall is not None and not self.wall.namespaces else b""
        self.cgroup = None if cgroup is None else ProgramCgroup(cgroup)
        self._argv = argv
        self._environment = environment | ({b"TMPDIR": self.scratch} if self.scratch else {})
        self._directory = directory
        self._passed = passed
        self._kept = kept
        self._outbox = outbox

    def clean_up(self) -> None:
        """Remove the program's cgroup and temporary files, after its last process is gone."""
        if self.cgroup is not None:
            self.cgroup.remove()
        if self.scratch:
            remove_scratch(self.scratch)

    @property
    def has_init(self) -> bool:
        """Whether the program has a namespace of processes, and so a parent of its own inside of it."""
        return self.wall is not None and self.wall.namespaces

    def close(self) -> None:
        """Close this process's copies of the program's descriptors, after the fork."""
        for fd in (*self._passed, *self._kept, self._outbox):
            os.close(fd)
        if self.cgroup is not None:
            self.cgroup.close()

    def start(
        self, libc: ctypes.CDLL, *, reaper: int, report: int, channel: _socket.socket | None, niceness: int
    ) -> int:
        """Start a child that executes the program or, with `has_init`, starts its init; return the child's pid.

        The child reports a failure to the reaper.

        Raises:
            OSError: the child, or its cgroup, could not be created.
        """
        group = -1
        if self.cgroup is not None:
            self.cgroup.make()
            group = self.cgroup.fd
        if self.wall is not None and channel is not None and self.has_init:
            wall, outside = self.wall, Outside(channel, self._outbox, self._kept, self._passed, group)
            return run_in_child(lambda: self._build(wall, libc, reaper, report, outside, niceness))
        child = clone_child(group)
        if child == 0:
            signal.set_wakeup_fd(-1)
            try:
                if self.wall is not None and channel is not None:
                    outside = Outside(channel, self._outbox, (), self._passed, -1)
                    self._build(self.wall, libc, reaper, report, outside, niceness)
                elif _follow(libc, reaper):
                    self._execute(report, niceness)
            finally:
                os._exit(_FAILED)
        return child

    def _build(
        self, wall: WallSpec, libc: ctypes.CDLL, reaper: int, report: int, outside: Outside, niceness: int
    ) -> int:
        """Build the wall, and return the exit status of this process."""

        def become(ruleset: int) -> NoReturn:
            self._execute(report, IDLE_NICENESS if wall.idle else niceness, ruleset)

        try:
            if _follow(libc, reaper):
                build_wall(wall, self.scratch, self._environment, outside, become)
                return 0
        except OSError as error:
            _report(report, "wall", error)
        finally:
            set_dumpable(False)
        return _FAILED

    def _execute(self, report: int, niceness: int, ruleset: int = -1) -> NoReturn:
        stage = "start"
        try:
            os.setsid()
            for signum in (*IGNORED_SIGNALS, signal.SIGCHLD):
                signal.signal(signum, signal.SIG_DFL)
            report = fcntl.fcntl(report, fcntl.F_DUPFD_CLOEXEC, _MOVED_FD)
            if ruleset >= 0:
                ruleset = fcntl.fcntl(ruleset, fcntl.F_DUPFD_CLOEXEC, _MOVED_FD)
            self._take_descriptors()
            stage = "chdir"
            os.chdir(self._directory)
            if self.wall is not None:
                stage = "wall"
                close_wall(self.wall, ruleset)
            stage = "exec"
            os.setpriority(os.PRIO_PROCESS, 0, niceness)  # last: at a low priority, each step may take long
            _exec(self._argv, self._environment)
        except OSError as error:
            _report(report, stage, error)
        finally:
            os._exit(_FAILED)

    def _take_descriptors(self) -> None:
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _MOVED_FD) for fd in self._passed]
        for target, fd in enumerate(moved):
            if self.wall is not None and target == self.wall.listen_fd:
                os.dup2(moved[0], target, inheritable=False)  # not the program's: only the number stays in use
            else:
                os.dup2(fd, target)
        number, highest = ctypes.c_uint(len(moved)), ctypes.c_uint(_HIGHEST_FD)
        ctypes.CDLL(None).syscall(_CLOSE_RANGE, number, highest, _CLOSE_RANGE_CLOEXEC)  # from Linux 5.11 on
        if os.isatty(0):
            try:
                fcntl.ioctl(0, _TIOCSCTTY, 0)
            except OSError:  # it is the terminal of another session, such as the host's
                return


def _follow(libc: ctypes.CDLL, reaper: int) -> bool:
    """Make the kernel kill this child when the reaper ends; return whether the reaper was still there."""
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return os.getppid() == reaper


def _report(report: int, stage: str, error: OSError) -> None:
    if stage == "wall" and error.filename:
        stage = f"wall: {os.fsdecode(error.filename)}"
    os.write(report, marshal.dumps((stage, error.errno)))


def _exec(argv: list[bytes], environment: dict[bytes, bytes]) -> None:
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
