"""The meter: a fork of the zygote that measures what the programs of each principal use.

Two meters run while programs are watched, one for programs and one for folders, so that a slow file system delays no
look at memory. They are processes of their own, because a thread of the host would wait for the interpreter lock at
each of its system calls, just when the host is busy. Invariants:

- A meter looks every `INTERVAL_S`, and never takes more than a fifth of one processor: after a long look it waits four
  times as long.
- A meter only measures and reports. The host ends the program, through the program's reaper.
- A meter ends if its host does, and by itself after `IDLE_S` without anything to watch.

Messages are marshalled tuples on a ``SOCK_SEQPACKET`` socket. The host sends ``("watch", watch, owner, reaper, started,
scratch, place)``, ``("unwatch", watch)`` and, for folders, ``("measure", owner, place, number)``; a place is a path
with its limits. A meter sends ``("usage", {owner: sums})``, ``("over", watch, resource, used)`` and ``("folder", owner,
path, bytes, inodes, fault, number)``, with the number of the latest order to measure before the walk began.
"""

from __future__ import annotations

import _socket
import select
import time

from holdfast.runtime.processes.folder_meter import FolderMeter
from holdfast.runtime.processes.program_meter import ProgramMeter
from holdfast.runtime.processes.reaper import receive, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["IDLE_S", "INTERVAL_S", "run_meter"]

INTERVAL_S = 0.1
"""Time between two looks."""
IDLE_S = 2.0
"""Time without anything to watch after which a meter ends."""
_WAIT_FACTOR = 4


def run_meter(control: _socket.socket, host: int, spec: tuple[Any, ...]) -> None:
    """Measure until the host has ended or closed the socket, or until nothing was watched for `IDLE_S`."""
    kind, *limits = spec
    meter = ProgramMeter(*limits) if kind == "programs" else FolderMeter(*limits)
    poll = select.poll()
    for fd in (control.fileno(), host):
        poll.register(fd, select.POLLIN)
    next_look = 0.0
    idle_since = time.monotonic()
    while True:
        now = time.monotonic()
        if meter.busy:
            idle_since = now
        wait_s = max(0.0, next_look - now) if meter.busy else idle_since + IDLE_S - now
        if wait_s < 0:
            return
        ready = [fd for fd, _ in poll.poll(wait_s * 1000)]
        if host in ready:
            return
        if ready:
            message = receive(control)
            if message is None:
                return
            meter.obey(message)
        began = time.monotonic()
        if meter.busy and began >= next_look:
            for report in meter.look(began):
                send(control, report)
            ended = time.monotonic()
            next_look = max(began + INTERVAL_S, ended + _WAIT_FACTOR * (ended - began))
