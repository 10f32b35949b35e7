"""Specification of a wall: what a program may see, change and use up, as plain values for the zygote.

The zygote imports this module, so its imports must be cheap. Invariants:

- A `WallSpec` decides nothing: paths are absolute and real, and each has the identity (device and inode) of the file
  that the caller checked. A path that leads to another file when the wall is built makes the start fail.
- `key` covers everything that kept namespaces depend on, so that equal keys mean equal file systems.
"""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

__all__ = ["WallPath", "WallSpec", "wall_path"]

WallPath = tuple[bytes, int, int, bool]
"""An absolute path without links, the device and inode of its file, and whether the file is a folder."""

_FIELDS = (
    "key",
    "namespaces",
    "landlock",
    "share_network",
    "readable",
    "writable",
    "links",
    "hidden",
    "protected",
    "scratch_bytes",
    "processes",
    "limits",
    "call_filter",
    "listen_fd",
    "proxy_variables",
    "idle",
)


class WallSpec:
    """One program's wall.

    Parameters:
        key: name under which the zygote keeps the namespaces for later programs with an equal file system and network;
            empty keeps none. The part before the first NUL byte names the session, for `ProcessHost.forget_walls`.
        namespaces: whether to enter namespaces of users, files, processes, IPC, host name and, unless `share_network`,
            of the network.
        landlock: whether to restrict files with Landlock. At least one of the two layers must be True.
        share_network: whether the program uses the host's network; needs namespaces.
        readable, writable: paths that the program sees read-only, or may change.
        links: symbolic links of the visible file system, each with its target.
        hidden: paths below visible ones that are covered with an empty file or folder.
        protected: existing paths below `writable` that stay read-only; needs namespaces.
        scratch_bytes: size of the program's own ``/tmp`` and ``/dev/shm``. Without namespaces, it gets a folder of its
            own instead, named in ``TMPDIR``, without a limit of its size.
        processes: maximum number of processes and threads; 0 sets no limit.
        limits: resource limits by number; a hard limit is never raised.
        call_filter: the system call filter, as returned by `call_filter.call_filter`; empty installs none.
        listen_fd: descriptor of the program (3 or higher) that is a Unix socket. The wall listens on a free loopback
            port of the program's own network and sends the listening socket over `listen_fd`. The other end reads end
            of file when the program's last process is gone. -1 listens on no port.
        proxy_variables: environment variables that are set to the URL of that port.
        idle: whether the program yields the processor to everything else.
    """

    __slots__ = _FIELDS

    def __init__(
        self,
        *,
        key: bytes = b"",
        namespaces: bool = True,
        landlock: bool = True,
        share_network: bool = False,
        readable: Sequence[WallPath] = (),
        writable: Sequence[WallPath] = (),
        links: Sequence[tuple[bytes, bytes]] = (),
        hidden: Sequence[WallPath] = (),
        protected: Sequence[WallPath] = (),
        scratch_bytes: int = 64 << 20,
        processes: int = 0,
        limits: Mapping[int, int] | None = None,
        call_filter: bytes = b"",
        listen_fd: int = -1,
        proxy_variables: Sequence[bytes] = (),
        idle: bool = True,
    ) -> None:
        if not (namespaces or landlock):
            raise ValueError("a wall needs namespaces or Landlock; choose at least one")
        if not namespaces and (share_network or protected or listen_fd >= 0):
            raise ValueError("network access and protected paths need namespaces")
        self.key = key
        self.namespaces = namespaces
        self.landlock = landlock
        self.share_network = share_network
        self.readable = list(readable)
        self.writable = list(writable)
        self.links = list(links)
        self.hidden = list(hidden)
        self.protected = list(protected)
        self.scratch_bytes = scratch_bytes
        self.processes = processes
        self.limits = dict(limits or {})
        self.call_filter = call_filter
        self.listen_fd = listen_fd
        self.proxy_variables = list(proxy_variables)
        self.idle = idle

    def pack(self) -> dict[str, Any]:
        """Return the specification as values that ``marshal`` accepts."""
        return {name: getattr(self, name) for name in _FIELDS}

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> WallSpec:
        """Return the specification that `pack` packed."""
        return cls(**packed)


def wall_path(path: str | bytes) -> WallPath:
    """Return an absolute path without links together with the identity of its file; no link is followed.

    Raises:
        OSError: if the path does not exist, or contains a link.
    """
    real = os.fsencode(path)
    fd = os.open(real, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if stat.S_ISLNK(found.st_mode) or os.readlink(b"/proc/self/fd/%d" % fd) != real:
            raise OSError(errno.ELOOP, "a part of the path was replaced with a link", os.fsdecode(real))
    finally:
        os.close(fd)
    return real, found.st_dev, found.st_ino, stat.S_ISDIR(found.st_mode)
