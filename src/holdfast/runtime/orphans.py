"""Processes that outlived their host, for ``holdfast doctor``."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.runtime import foreign, procfs
from holdfast.runtime.zygote_link import supported

__all__ = ["Orphan", "orphans"]


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


def orphans() -> tuple[Orphan, ...]:
    """Processes that carry the marker or the tag of a Holdfast host which no longer lives; for ``holdfast doctor``.

    Environments of other users' processes cannot be read except by root; tags can.
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
    """The host in the environment, if it no longer lives."""
    host, _, started = (procfs.environment_value(pid, procfs.HOST_MARKER) or b"").partition(b".")
    if not (host.isdigit() and started.isdigit()) or procfs.lives(int(host), int(started)):
        return None
    return int(host)


def _tagged_host(pid: int) -> int | None:
    """The host in a tag, if it no longer lives and the process was started in one of its scopes, or by C code in it."""
    for tag in foreign.tags_of(pid):
        owner = None if foreign.scope_of_tag(tag) == foreign.OUTSIDE else foreign.host_of_tag(tag)
        if owner is None:
            continue
        stat = procfs.read_stat(owner[0])
        if stat is None or stat.dead or not foreign.is_start(owner[1], stat.started):
            return owner[0]
    return None
