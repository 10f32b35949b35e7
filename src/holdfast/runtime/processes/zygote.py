"""The lightweight process that forks a reaper for each program and cleans up after reapers that were killed.

The zygote runs in an interpreter that loads almost nothing. So a fork costs a fraction of a millisecond and little
memory, and never inherits a lock of the host's threads. Invariants:

- It is single-threaded and a child subreaper: if a reaper is killed, its orphans are reparented to the zygote, which
  kills them.
- It holds no descriptor of any program and no control socket of any reaper.
- If a signal stops a reaper, the zygote continues the reaper at once.
- When the host ends or closes the socket, the zygote accepts no more requests, waits until its last child is gone, and
  exits. If the host or its lease has ended, the zygote also kills what foreign code started in the host's scopes.

A request is one packet with descriptors: ``("spawn", key)`` with control socket, stdin, stdout, stderr and up to three
more, or ``("kill", b"")`` or ``("meter", b"")`` with a control socket. The last descriptor refers to a file that
contains the specification, which only the forked child reads: the environment of a program never gets into the zygote's
memory. ``key`` names the kept namespaces of the program's wall. A meter is described in
`holdfast.runtime.processes.meter`. For a kill, a fork runs `holdfast.runtime.processes.tags.kill` and sends
``("done", {tag: (killed, survivors)})`` on the control socket, in as many parts as needed. ``("forget", session)``
drops a session's kept namespaces. ``("wake", b"")`` means that the host now has a lease
(`holdfast.runtime.processes.program_lease`). ``("end", None)`` means that the host continues without this zygote.

The zygote sends ``("ready", pid)`` once, and ``("lost", reaper pid, killed, survivors)`` for a reaper that was killed,
when the reaper's orphans are dead or a time limit is reached.
"""

from __future__ import annotations

import _socket
import array
import ctypes
import gc
import marshal
import math
import os
import select
import signal
import time

from holdfast.runtime.processes import procfs
from holdfast.runtime.processes import tags as process_tags
from holdfast.runtime.processes.program_child import IGNORED_SIGNALS, ChildProgram
from holdfast.runtime.processes.program_lease import is_lease_over, read_lease
from holdfast.runtime.processes.reaper import LONGEST_POLL_S, Reaper, Wakeup, become_subreaper, name_process, send
from holdfast.runtime.walls.kept_namespaces import KeptNamespaces
from holdfast.undumpable import make_undumpable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["Zygote", "main"]

_PACKET_BYTES = 65536
_MAX_FDS = 11
"""Those of a start: the reaper's socket, three standard streams, `spec.MORE_FDS` more, and the specification."""
_CLEAR_UP_S = 10.0
_HOST_END_S = 2.0
_STRAY_BOUND_S = 2.0
_URGENCY = 10
_STRAY_PAUSE_S = 0.005
_LEASE_LOOK_S = 1.0
"""Interval at which programs of foreign code are looked for while the lease is over."""
_TOLD_TAGS = 64
_TOLD_PIDS = 200
"""Maximum number of pids per list in a message: of a longer list, only the last pids are sent."""


class Zygote:
    """The request loop.

    Parameters:
        requests: socket to the host.
        host: pidfd of the host process.
        lease: descriptor of the programs' lease.
        identity: pid and start time of the host process.
    """

    def __init__(self, requests: _socket.socket, host: int, lease: int, identity: tuple[int, int]) -> None:
        self._requests = requests
        self._host = host
        self._lease = lease
        self._clear_up_at = 0.0
        self._identity = identity
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._niceness = os.getpriority(os.PRIO_PROCESS, 0)
        self._wakeup = Wakeup()
        self._kept = KeptNamespaces()
        self._forked: set[int] = set()
        self._lost: dict[int, float] = {}
        self._stray_kills: dict[int, None] = {}  # in the order they were killed, without duplicates
        self._host_lost = False
        self._dismissed = False

    def run(self) -> None:
        """Serve requests until the host has ended or closed the socket, and no child is left."""
        become_subreaper(self._libc)
        name_process(self._libc, "holdfast-zygote")
        for signum in IGNORED_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:  # if permitted, so that no fork bomb can starve the process that is to kill it
            os.setpriority(os.PRIO_PROCESS, 0, self._niceness - _URGENCY)
        except PermissionError:
            pass
        gc.collect()
        gc.freeze()  # forks share these pages until the collector touches them
        gc.disable()
        poll = select.poll()
        for fd in (self._requests.fileno(), self._host, self._wakeup.fd, self._kept.inbox.fileno()):
            poll.register(fd, select.POLLIN)
        send(self._requests, ("ready", os.getpid()))
        strays = False
        while not (self._dismissed or self._host_lost):
            for fd, _ in poll.poll(_STRAY_PAUSE_S * 1000 if strays else self._lease_timeout_ms()):
                if fd == self._wakeup.fd:
                    self._wakeup.clear()
                elif fd == self._kept.inbox.fileno():
                    self._kept.receive()
                elif fd == self._host or not self._serve():
                    self._host_lost = True
            strays = bool(self._tend())
            self._look_at_lease()
        for closed in (self._requests, self._kept.inbox):
            poll.unregister(closed.fileno())
            closed.close()
        self._end(poll)

    def _end(self, poll: select.poll) -> None:
        """Wait for the last child. If the socket closed without ``end``, the host may be exiting: wait for that too."""
        wait_until = time.monotonic() + (0.0 if self._dismissed else _HOST_END_S)
        cleared = False
        pause_s = _STRAY_PAUSE_S
        while True:
            ready = {fd for fd, _ in poll.poll(pause_s * 1000)}
            pause_s = min(pause_s * 2, 1.0)
            self._wakeup.clear()
            if self._host in ready:
                poll.unregister(self._host)
                self._clear_up(lambda: process_tags.end_host(*self._identity, _CLEAR_UP_S))
                cleared = True
            if self._tend() is None and (cleared or time.monotonic() >= wait_until):
                return

    def _lease_timeout_ms(self) -> float | None:
        due = max(read_lease(self._lease), self._clear_up_at)
        return None if due == math.inf else min(max(0.0, due - time.monotonic()), LONGEST_POLL_S) * 1000 + 1

    def _look_at_lease(self) -> None:
        """While the lease is over, kill the programs that foreign code starts in scopes, once in a while."""
        now = time.monotonic()
        if now >= max(read_lease(self._lease), self._clear_up_at):
            self._clear_up_at = now + _LEASE_LOOK_S
            self._clear_up(lambda: process_tags.end_scopes(*self._identity, _LEASE_LOOK_S, self._is_lease_over))

    def _is_lease_over(self) -> bool:
        return is_lease_over(self._lease)

    def _clear_up(self, end: Callable[[], None]) -> None:
        """Kill the programs that foreign code started in the host.

        A fork does the killing, so that the zygote can kill strays meanwhile. If a fork bomb makes a fork impossible,
        the zygote kills the programs itself, and strays must wait.

        Parameters:
            end: kills the programs.
        """
        try:
            pid = os.fork()
        except OSError:
            end()
            return
        if pid == 0:
            try:
                self._requests.close()
                end()
            finally:
                os._exit(0)
        self._forked.add(pid)

    def _serve(self) -> bool:
        try:
            data, ancillary, _, _ = self._requests.recvmsg(
                _PACKET_BYTES, _socket.CMSG_SPACE(_MAX_FDS * 4), _socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:  # an answer of ours was never read; the end of file comes next
            return True
        if not data:
            return False
        fds = array.array("i")
        for _, _, raw in ancillary:
            fds.frombytes(raw)
        kind, key = marshal.loads(data)
        if kind == "end":
            self._dismissed = True
            return True
        if kind == "wake":
            return True
        if kind == "forget":
            self._kept.forget(key)
            return True
        self._kept.use(key)
        try:
            pid = os.fork()
        except OSError as error:
            control = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, fds.pop(0))
            send(control, ("failed", "fork", error.errno))
            control.close()
            pid = -1
        if pid == 0:
            try:
                self._become(kind, key, list(fds))
            finally:
                os._exit(1)
        if pid > 0:
            self._forked.add(pid)
        for fd in fds:
            os.close(fd)
        return True

    def _become(self, kind: str, key: bytes, fds: list[int]) -> None:
        """In the forked child: carry out the request, then exit. Never returns."""
        self._requests.close()
        os.close(self._wakeup.fd)
        control = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, fds.pop(0))
        spec: tuple[Any, ...] = tuple(marshal.loads(_read_all(fds.pop())))
        if kind == "kill":
            self._kept.take(b"")
            host, carrier, sealed, tags, bound_s = spec

            def tell(done: dict[int, tuple[list[int], list[int]]]) -> None:
                told = {tag: (killed[-_TOLD_PIDS:], left[-_TOLD_PIDS:]) for tag, (killed, left) in done.items()}
                tags = list(told)
                for first in range(0, len(tags) or 1, _TOLD_TAGS):
                    send(control, ("done", {tag: told[tag] for tag in tags[first : first + _TOLD_TAGS]}))

            process_tags.kill(host, (os.getppid(),), carrier, tags, bound_s, tell, sealed=sealed)
            os._exit(0)
        if kind == "meter":
            self._kept.take(b"")
            self._measure(control, spec)
            os._exit(0)
        argv, environment, directory, wall, cgroup, leased = spec
        kept = self._kept.take(key)
        outbox = self._kept.outbox.fileno()
        program = ChildProgram(argv, environment, directory, wall, cgroup, passed=fds, kept=kept, outbox=outbox)
        lease = self._lease if leased else None
        Reaper(control, self._host, lease, self._libc, self._niceness).run(program)
        os._exit(0)

    def _measure(self, control: _socket.socket, spec: tuple[Any, ...]) -> None:
        """In the forked child: be a meter; see `holdfast.runtime.processes.meter`."""
        from holdfast.runtime.processes.meter import run_meter

        name_process(self._libc, "holdfast-meter")
        gc.enable()
        signal.set_wakeup_fd(-1)
        if spec[0] == "folders":  # it may take long, and no program has to be ended at once for it
            os.setpriority(os.PRIO_PROCESS, 0, self._niceness)
        run_meter(control, self._host, spec)

    def _tend(self) -> bool | None:
        """Reap ended children, continue stopped ones, and kill orphans of killed reapers.

        Return True if orphans are left, False if all children are forks of the zygote, None without children.
        """
        now = time.monotonic()
        childless = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                childless = True
                break
            if pid == 0:
                break
            if os.WIFSTOPPED(status):
                os.kill(pid, signal.SIGCONT)
            elif pid in self._forked:
                self._forked.discard(pid)
                if status != 0:
                    self._lost[pid] = now + _STRAY_BOUND_S
        me = os.getpid()
        strays = [pid for pid in procfs.children(me) if pid not in self._forked]

        def is_stray(stat: procfs.ProcessStat) -> bool:
            branch = procfs.branch_below(stat, me)
            return branch is not None and branch not in self._forked

        for stray in strays:
            for pid in (stray, *procfs.descendants(stray)):
                if procfs.strike(pid, signal.SIGKILL, is_stray) == "hit":
                    self._stray_kills[pid] = None
        for reaper, bound in list(self._lost.items()):
            if not strays or now >= bound:
                del self._lost[reaper]
                send(self._requests, ("lost", reaper, list(self._stray_kills), strays))
                if not strays:
                    self._stray_kills = {}
        return None if childless else bool(strays)


def _read_all(fd: int) -> bytes:
    os.lseek(fd, 0, os.SEEK_SET)
    parts = []
    while part := os.read(fd, 1 << 20):
        parts.append(part)
    os.close(fd)
    return b"".join(parts)


def main(requests: int, host: int, lease: int) -> None:
    """Run the zygote with these descriptors: its socket to the host, a pidfd of the host, and the programs' lease."""
    make_undumpable()  # including its forks, the reapers
    os.closerange(max(requests, host, lease) + 1, os.sysconf("SC_OPEN_MAX"))
    os.chdir("/")
    for fd in (requests, host, lease):
        os.set_inheritable(fd, False)
    pid, _, started = os.environb[procfs.HOST_MARKER].partition(b".")
    control = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, requests)
    Zygote(control, host, lease, (int(pid), int(started))).run()
