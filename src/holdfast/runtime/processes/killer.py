"""Requests to the zygote to kill programs that foreign code started."""

from __future__ import annotations

import marshal
import socket
from collections.abc import Callable
from typing import Any

from holdfast.runtime.processes.zygote_link import ZygoteLink

__all__ = ["Killed", "Killer"]

Killed = dict[int, tuple[list[int], list[int]]]
"""Killed and surviving pids by tag."""


class Killer:
    """A fork of the zygote that kills foreign code's programs in some scopes and reports the result for each scope.

    Parameters:
        told: callback that is called in the host's reading thread with the killed and surviving pids by tag, and with
            None after the last report.
    """

    def __init__(
        self,
        link: ZygoteLink,
        spec: tuple[Any, ...],
        told: Callable[[Killed | None], object],
    ) -> None:
        self.told = told
        self.ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link = link
        self._spec = spec

    def submit(self) -> bool:
        """Submit the request to the zygote; return False if the zygote already has too many requests."""
        try:
            sent = self._link.submit("kill", self._spec, [self._theirs.fileno()])
        except BrokenPipeError:  # the zygote was killed: the end of our socket is the answer
            sent = True
        if sent:
            self._theirs.close()
        return sent

    def read(self) -> Killed | None:
        """Return the next report, or None after the last report."""
        data = self.ours.recv(1 << 20)
        if not data:
            return None
        _, done = marshal.loads(data)
        return dict(done)
