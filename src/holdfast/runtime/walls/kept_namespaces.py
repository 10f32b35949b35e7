"""Namespaces that the zygote keeps for sessions, so that their next programs start fast.

The zygote imports this module. Invariants:

- At most `KEPT_LIMIT` sets of namespaces are kept; the least recently used is dropped first. A kept set has
  descriptors, but no process.
- A forked child keeps descriptors of the set that it enters, and closes all others.
- Descriptors arrive from children of the zygote before they run foreign code, on a socket that no program inherits.
"""

from __future__ import annotations

import _socket
import array
import marshal
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["KEPT_LIMIT", "KeptNamespaces", "hand_over"]

KEPT_LIMIT = 16

_KEY_BYTES = 4096
_MAX_FDS = 8


class KeptNamespaces:
    """The kept sets of namespaces by the key of their walls, least recently used first."""

    def __init__(self) -> None:
        self._kept: dict[bytes, list[int]] = {}
        self.inbox, self.outbox = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0)

    def receive(self) -> None:
        """Take over one set of namespaces from a child."""
        data, ancillary, _, _ = self.inbox.recvmsg(
            _KEY_BYTES, _socket.CMSG_SPACE(_MAX_FDS * 4), _socket.MSG_CMSG_CLOEXEC | _socket.MSG_DONTWAIT
        )
        fds = array.array("i")
        for _, _, raw in ancillary:
            fds.frombytes(raw)
        key: bytes = marshal.loads(data)
        if key in self._kept:  # two programs of a new session were started at once
            _close(fds)
            return
        self._kept[key] = list(fds)
        while len(self._kept) > KEPT_LIMIT:
            self._drop(next(iter(self._kept)))

    def use(self, key: bytes) -> None:
        """Note that a program of this key starts now."""
        fds = self._kept.pop(key, None)
        if fds is not None:
            self._kept[key] = fds

    def take(self, key: bytes) -> list[int]:
        """In a forked child: return the namespaces of this key, and close all others. Empty if none are kept."""
        taken = self._kept.pop(key, [])
        self.inbox.close()
        for one in list(self._kept):
            self._drop(one)
        return taken

    def forget(self, session: bytes) -> None:
        """Drop the namespaces of a session."""
        for key in [key for key in self._kept if key.partition(b"\0")[0] == session]:
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        _close(self._kept.pop(key))


def hand_over(outbox: int, key: bytes, namespaces: Sequence[int]) -> None:
    """Send namespaces to the zygote, and close this process's descriptors."""
    connection = _socket.socket(fileno=outbox)
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", namespaces).tobytes())
    try:
        connection.sendmsg([marshal.dumps(key)], [rights], _socket.MSG_DONTWAIT | _socket.MSG_NOSIGNAL)
    except OSError:  # the zygote is busy or gone: the next program makes namespaces anew
        pass
    finally:
        connection.detach()
    _close(namespaces)


def _close(fds: Sequence[int] | array.array[int]) -> None:
    for fd in fds:
        os.close(fd)
