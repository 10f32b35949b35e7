"""Build a wall in the forked child of a reaper, in the order that keeps it closed. The zygote imports this module.

With namespaces, there are two processes behind the wall. The *init* is the first process of a namespace of processes;
it is a child of the reaper, reaps orphans, reports how the program ended, and ends after the last process inside. When
it ends for any reason, the kernel kills all processes inside. The *program* is its child. With Landlock alone, the
program is a child of the reaper, as without a wall. Invariants:

- Everything irrevocable is done before the program is executed: an error on the way means that it is not started.
- The init has no capability either, ignores the signals of a stop, and holds nothing of the reaper or the program open.
- The program gets descriptors 0, 1, 2 and those named for it; everything else is closed at its exec.
"""

from __future__ import annotations

import _socket
import marshal
import os
import signal

from holdfast.runtime.walls import landlock, limits, loopback, namespaces
from holdfast.runtime.walls.kept_namespaces import hand_over
from holdfast.runtime.walls.kernel import (
    CLONE_NEWCGROUP,
    check,
    clone_beside,
    clone_child,
    close_others,
    libc,
    set_dumpable,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from holdfast.runtime.walls.spec import WallPath, WallSpec

    _Rule = tuple[bytes | WallPath, int]

__all__ = ["IDLE_NICENESS", "Outside", "build_wall", "close_wall"]

IDLE_NICENESS = 19
"""Niceness of walled programs. Their init keeps the reaper's, so that no fork bomb delays the report of the end."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_HARMLESS = tuple(
    b"/proc/" + name
    for name in (b"cpuinfo", b"filesystems", b"loadavg", b"meminfo", b"stat", b"sys", b"uptime", b"version")
)
"""Files of ``/proc`` that tell nothing of other processes."""


class Outside:
    """Descriptors from outside of a wall that the child which builds it uses.

    Parameters:
        channel: socket to the reaper, for the messages ``("init", pid)``, ``("main",)`` and ``("ended", status)``.
        outbox: socket to the zygote, for namespaces to keep.
        kept: descriptors of kept namespaces; empty makes new ones.
        passed: the program's descriptors 0, 1, 2, …, as numbers of this process.
        cgroup: the cgroup for everything inside; -1 means that of this process.
    """

    __slots__ = ("cgroup", "channel", "kept", "outbox", "passed")

    def __init__(
        self, channel: _socket.socket, outbox: int, kept: Sequence[int], passed: Sequence[int], cgroup: int
    ) -> None:
        self.cgroup = cgroup
        self.channel = channel
        self.outbox = outbox
        self.kept = kept
        self.passed = passed


def build_wall(
    wall: WallSpec, scratch: bytes, environment: dict[bytes, bytes], outside: Outside, become: Callable[[int], NoReturn]
) -> None:
    """Build the part of a wall that needs privileges, and run the program behind it.

    With namespaces, it returns when the init exists; this process, which may use the memory of the reaper, then exits.
    Otherwise, and in the init, it does not return.

    Parameters:
        scratch: folder for the program's temporary files; empty behind namespaces, which have their own.
        environment: environment of the program, to which the proxy's address is added.
        become: continues in the program's process; it calls `close_wall` with its argument before the exec.

    Raises:
        OSError: a step failed; the program is not started.
    """
    set_dumpable(True)  # otherwise the file belongs to root
    limits.prefer_for_kill()
    set_dumpable(False)
    if not wall.namespaces:
        become(_prepare(wall, scratch))
    made: Sequence[int] = ()
    if outside.kept:
        namespaces.enter(outside.kept)
    else:
        made = namespaces.create(share_network=wall.share_network)
    if wall.listen_fd >= 0:
        url = loopback.listen(outside.passed[wall.listen_fd])
        environment.update(dict.fromkeys(wall.proxy_variables, url))
    init = clone_beside(outside.cgroup)
    if init > 0:
        outside.channel.send(marshal.dumps(("init", init)))
        return
    signal.set_wakeup_fd(-1)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    outside.channel.send(marshal.dumps(("ready",)))  # fails if the reaper ended before the line above
    if outside.cgroup >= 0:  # the program sees no path of its cgroup
        check(libc.unshare(CLONE_NEWCGROUP), "unshare")
    if made:
        namespaces.make_template(wall)
    if made and wall.key:
        hand_over(outside.outbox, wall.key, made)
    namespaces.make_private_mounts(wall, copy=bool(wall.key))
    namespaces.protect(wall.protected, wall.writable)
    if wall.processes:
        limits.limit_processes(wall.processes + 1)
    ruleset = _prepare(wall, b"")  # here, because each step of the program's process copies pages of this one
    program = clone_child()
    if program == 0:
        outside.channel.send(marshal.dumps(("main",)))  # the kernel adds the pid, as the reaper sees it
        become(ruleset)
    _attend(program, wall, outside)


def _attend(program: int, wall: WallSpec, outside: Outside) -> NoReturn:
    """Be the init: reap until no process is left inside, and report how the program ended."""
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):
        os.dup2(nothing, fd)
    held = {0, 1, 2, outside.channel.fileno()}
    if wall.listen_fd >= 0:
        held.add(outside.passed[wall.listen_fd])  # its end tells the proxy that the last program has ended
    close_others(held)
    libc.prctl(_PR_SET_NAME, b"holdfast-wall", 0, 0, 0)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    limits.drop_capabilities()
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            os._exit(0)
        if pid == program:
            outside.channel.send(marshal.dumps(("ended", status)))


def _prepare(wall: WallSpec, scratch: bytes) -> int:
    """Give up what no process behind the wall needs, and return the Landlock ruleset for `close_wall`."""
    limits.renounce_capabilities()
    limits.forbid_privileges()
    if not wall.landlock:
        return -1
    return landlock.make_ruleset(_inside(wall) if wall.namespaces else _alone(wall, scratch), tcp=wall.namespaces)


def close_wall(wall: WallSpec, ruleset: int) -> None:
    """Give up all privileges, in the program's process right before its exec.

    Parameters:
        ruleset: descriptor of the Landlock ruleset; -1 without one.

    Raises:
        OSError: a step failed; the program must not be started.
    """
    limits.limit(wall.limits)
    limits.drop_capabilities()
    if wall.landlock:
        landlock.restrict(ruleset)
    limits.install_filter(wall.call_filter)


def _inside(wall: WallSpec) -> list[_Rule]:
    """Return the rules inside namespaces, where everything visible may be read."""
    rules: list[_Rule] = [(b"/", landlock.READ)]
    rules += [(path, landlock.ALL) for path in wall.writable]
    rules += [(path, landlock.ALL) for path in namespaces.SCRATCH]
    return rules + [(path, landlock.USE) for path in (*namespaces.DEVICES, b"/dev/pts")]


def _alone(wall: WallSpec, scratch: bytes) -> list[_Rule]:
    """Return the rules on the file system of the host."""
    rules: list[_Rule] = [(path, landlock.READ) for path in wall.readable]
    rules += [(path, landlock.ALL) for path in wall.writable] + [(scratch, landlock.ALL)]
    rules += [(path, landlock.READ) for path in _HARMLESS]
    return rules + [(path, landlock.USE) for path in namespaces.DEVICES]
