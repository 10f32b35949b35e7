"""The host's side of the zygote: start it, and send it requests with descriptors."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import marshal
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from holdfast.runtime.processes import procfs, seal
from holdfast.runtime.processes import tags as process_tags
from holdfast.runtime.processes.environment import start_environment
from holdfast.runtime.processes.program_child import IGNORED_SIGNALS
from holdfast.runtime.processes.program_lease import ProgramLease
from holdfast.runtime.processes.spec import host_marker

__all__ = ["ZygoteLink", "identity", "lost_helpers", "supported"]

_BOOT = """\
import sys, types
for name, path in (("holdfast", {top!r}), ("holdfast.runtime", {runtime!r}), ("holdfast.runtime.processes", {here!r})):
    package = types.ModuleType(name)
    package.__path__ = [path]
    sys.modules[name] = package
from holdfast.runtime.processes.zygote import main
main(3, 4, 5)
"""

_posix_spawn = os.posix_spawn  # before adoption wraps it: a scope must not own the zygote that its first program starts


zygotes: set[int] = set()
"""Pids of this process's zygotes; the `ZygoteLink` of each zygote reaps it."""


class ZygoteLink:
    """Connection of the host to its zygote.

    Parameters:
        lease: the lease of the host's programs.
    """

    def __init__(self, lease: ProgramLease) -> None:
        end = lease.open()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        host = procfs.pidfd_open(os.getpid())
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (theirs.fileno(), host, end)]
        here = os.path.dirname(os.path.abspath(__file__))
        runtime = os.path.dirname(here)
        try:
            self.pid = _posix_spawn(
                sys.executable,
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-c",
                    _BOOT.format(top=os.path.dirname(runtime), runtime=runtime, here=here),
                ],
                {**start_environment(), os.fsdecode(procfs.HOST_MARKER): os.fsdecode(host_marker())},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_DUP2, high[0], 3),
                    (os.POSIX_SPAWN_DUP2, high[1], 4),
                    (os.POSIX_SPAWN_DUP2, high[2], 5),
                ],
                setpgroup=0,  # what stops the host's group, such as SIGSTOP, must not stop the zygote
                setsigmask=IGNORED_SIGNALS,  # until it ignores them: the terminal sends its Ctrl-C to the zygote, too
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            for fd in (host, end, *high):
                os.close(fd)
        zygotes.add(self.pid)
        seal.current().put(self.pid, _helpers_tag())
        self.socket = ours
        self.socket.setblocking(False)
        self.pidfd = procfs.pidfd_open(self.pid)
        self.identity = identity()
        self.alive = True
        self._kept: set[bytes] = set()

    def submit(self, kind: str, spec: tuple[Any, ...], fds: Sequence[int], *, key: bytes = b"") -> bool:
        """Send a request; return False if too many requests are already waiting in the socket.

        The specification goes through a file in memory, which only the fork that the zygote makes for it reads.

        Parameters:
            key: name of the kept namespaces that the program of the request enters.

        Raises:
            BrokenPipeError: the zygote has ended.
        """
        if key:
            self._kept.add(key.partition(b"\0")[0])
        file = os.memfd_create("holdfast-request", os.MFD_CLOEXEC)
        try:
            with open(file, "wb", closefd=False) as content:
                content.write(marshal.dumps(spec))
            socket.send_fds(self.socket, [marshal.dumps((kind, key))], [*fds, file])
        except BlockingIOError:
            return False
        except OSError as error:
            if self.socket.fileno() < 0 or error.errno == errno.ECONNRESET:  # its end was, or will be, reported
                raise BrokenPipeError(errno.EPIPE, "the zygote has ended") from error
            raise
        finally:
            os.close(file)
            self.wake()
        return True

    def wake(self) -> None:
        """Continue the zygote if a signal has stopped it."""
        here = os.getpid()
        procfs.strike(self.pid, signal.SIGCONT, lambda stat: stat.state == "T" and stat.parent == here)

    def bury(self) -> None:
        """Reap the zygote, which has ended. Runs in the reading thread."""
        with contextlib.suppress(ChildProcessError):  # other code waited for any child
            os.waitpid(self.pid, 0)
        zygotes.discard(self.pid)
        self.close_pidfd()

    def close_pidfd(self) -> None:
        """Close the pidfd once, as its number may be reused. Runs in the reading thread or in a forked child."""
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def forget_walls(self, session: str) -> None:
        """Make the zygote drop the namespaces that it keeps for a session; a busy zygote drops them later by itself.

        Costs nothing for a session without walled programs.
        """
        name = session.encode()
        if name in self._kept:
            self._kept.discard(name)
            self.tell(("forget", name))

    def tell(self, message: tuple[Any, ...]) -> None:
        """Send a message without descriptors; do nothing if the zygote is busy or has ended."""
        with contextlib.suppress(OSError):
            self.socket.send(marshal.dumps(message))

    def end(self) -> None:
        """Make the zygote exit when its last child is gone."""
        self.tell(("end", None))
        with contextlib.suppress(OSError):  # the zygote has ended, and the socket with it
            self.socket.shutdown(socket.SHUT_RDWR)


def lost_helpers() -> list[int]:
    """Return children of this process that a killed zygote left behind: reapers, and programs of killed reapers.

    Only this process can reap them.
    """
    carrier = seal.current().carrier
    if carrier is None:
        return []
    tag = _helpers_tag()
    return [
        pid for pid in procfs.children(os.getpid()) if pid not in zygotes and process_tags.tag_of(pid, carrier) == tag
    ]


def _helpers_tag() -> int:
    return process_tags.make_tag(os.getpid(), procfs.start_time(os.getpid()) or 0, process_tags.HELPERS)


def identity() -> tuple[Any, ...]:
    """Return the user and group ids of this process and whether it is sealed: a change requires a new zygote."""
    return (os.getresuid(), os.getresgid(), tuple(os.getgroups()), seal.current().sealed)


@functools.cache
def supported() -> bool:
    """Whether this platform supports the zygote and reapers."""
    return sys.platform == "linux" and procfs.supported()
