"""The host's side of the zygote: starts it, and sends it requests with descriptors."""

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

from holdfast.runtime import foreign, procfs, seal
from holdfast.runtime.start_environment import start_environment
from holdfast.runtime.starting import host_marker

__all__ = ["ZygoteLink", "identity", "lost_helpers", "supported"]

_BOOT = """\
import sys, types
for name, path in (("holdfast", {top!r}), ("holdfast.runtime", {runtime!r})):
    package = types.ModuleType(name)
    package.__path__ = [path]
    sys.modules[name] = package
from holdfast.runtime.zygote import main
main(3, 4)
"""

_posix_spawn = os.posix_spawn  # before adoption wraps it: a scope must not own the zygote that its first program starts


zygotes: set[int] = set()
"""Pids of the zygotes of this process; each is waited for over its link."""


class ZygoteLink:
    """The host's side of the zygote."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        host = procfs.pidfd_open(os.getpid())
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (theirs.fileno(), host)]
        runtime = os.path.dirname(os.path.abspath(__file__))
        try:
            self.pid = _posix_spawn(
                sys.executable,
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-c",
                    _BOOT.format(top=os.path.dirname(runtime), runtime=runtime),
                ],
                {**start_environment(), os.fsdecode(procfs.HOST_MARKER): os.fsdecode(host_marker())},
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
        zygotes.add(self.pid)
        seal.current().put(self.pid, _helpers_tag())
        self.socket = ours
        self.socket.setblocking(False)
        self.pidfd = procfs.pidfd_open(self.pid)
        self.identity = identity()
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
        except OSError as error:
            if self.socket.fileno() < 0 or error.errno == errno.ECONNRESET:  # its end was, or will be, heard of
                raise BrokenPipeError(errno.EPIPE, "the zygote has ended") from error
            raise
        finally:
            self.wake()
        return True

    def wake(self) -> None:
        """Have it go on, if somebody has stopped it."""
        here = os.getpid()
        procfs.strike(self.pid, signal.SIGCONT, lambda stat: stat.state == "T" and stat.parent == here)

    def bury(self) -> None:
        """It has ended: wait for it. In the reading thread."""
        with contextlib.suppress(ChildProcessError):  # somebody waited for any child
            os.waitpid(self.pid, 0)
        zygotes.discard(self.pid)
        self.close_pidfd()

    def close_pidfd(self) -> None:
        """Close it once: by the second time its number may be somebody else's. In the reading thread, or a fork."""
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def end(self) -> None:
        """Have it end when its last child is gone."""
        with contextlib.suppress(OSError):  # it has ended, and the socket with it
            self.socket.send(marshal.dumps(("end", None)))
            self.socket.shutdown(socket.SHUT_RDWR)


def lost_helpers() -> list[int]:
    """Our children that a zygote of ours had below it, and that came home when it was killed, with those that held
    them: nobody waits for them but us."""
    carrier = seal.current().carrier
    if carrier is None:
        return []
    tag = _helpers_tag()
    return [pid for pid in procfs.children(os.getpid()) if pid not in zygotes and foreign.tag_of(pid, carrier) == tag]


def _helpers_tag() -> int:
    return foreign.make_tag(os.getpid(), procfs.start_time(os.getpid()) or 0, foreign.HELPERS)


def identity() -> tuple[Any, ...]:
    """Whom the zygote acts as, and under which seal; another identity needs another zygote."""
    return (os.getresuid(), os.getresgid(), tuple(os.getgroups()), seal.current().sealed)


@functools.cache
def supported() -> bool:
    """True where there can be a zygote and reapers."""
    return sys.platform == "linux" and procfs.supported()
