"""Processes that outlived their host, for ``holdfast doctor``."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.runtime.processes import procfs
from holdfast.runtime.processes import tags as process_tags
from holdfast.runtime.processes.zygote_link import supported

__all__ = ["Orphan", "orphans"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """A process that outlived its host.

    Parameters:
        pid: pid of the process.
        host: pid that the host of the process had.
        command: shortened command line of the process.
    """

    pid: int
    host: int
    command: str


def orphans() -> tuple[Orphan, ...]:
    """Return processes with the marker or tag of a Holdfast host that no longer lives; for ``holdfast doctor``.

    Only root can read environments of other users' processes; anyone can read tags.
    """
    if not supported():
        return ()
    found = []
    for pid in procfs.all_pids():
        host = _marked_host(pid) or _tagged_host(pid)
        stat = procfs.read_stat(pid)
        if host is not None and stat is not None and not stat.dead:
            found.append(Orphan(pid=pid, host=host, command=procfs.command(pid)))
    return tuple(found)


def _marked_host(pid: int) -> int | None:
    """Return the host named in the environment, if it no longer lives."""
    host, _, started = (procfs.environment_value(pid, procfs.HOST_MARKER) or b"").partition(b".")
    if not (host.isdigit() and started.isdigit()) or procfs.lives(int(host), int(started)):
        return None
    return int(host)


def _tagged_host(pid: int) -> int | None:
    """Return the host in a tag, if it no longer lives and a scope of it, or C code in it, started the process."""
    for tag in process_tags.tags_of(pid):
        owner = None if process_tags.scope_of_tag(tag) == process_tags.OUTSIDE else process_tags.host_of_tag(tag)
        if owner is None:
            continue
        stat = procfs.read_stat(owner[0])
        if stat is None or stat.dead or not process_tags.is_start(owner[1], stat.started):
            return owner[0]
    return None
