"""The tag that a new program inherits from this process. It is set during a start; only one start runs at a time."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from holdfast.runtime.processes import procfs
from holdfast.runtime.processes import tags as process_tags
from holdfast.runtime.processes.seal import Seal

__all__ = ["TagInheritance"]


class TagInheritance:
    """Tags of this process, and the tag that the next program inherits. Usable from any thread.

    Parameters:
        seal: sets the tags of processes.
    """

    def __init__(self, seal: Seal) -> None:
        self.seal = seal
        self.pid = os.getpid()
        self.started = procfs.start_time(self.pid) or 0

    @property
    def own(self) -> int:
        """Tag of this process, and so of programs that C code starts in it."""
        return self.of_scope(process_tags.UNCLAIMED)

    @property
    def outside(self) -> int:
        """Tag of programs started outside scopes."""
        return self.of_scope(process_tags.OUTSIDE)

    def of_scope(self, number: int) -> int:
        """Return the tag of the scope with this number."""
        return process_tags.make_tag(self.pid, self.started, number)

    def read(self, pid: int) -> int | None:
        """Return the tag that a process carries; None if it carries no tag or has ended."""
        return None if self.seal.carrier is None else process_tags.tag_of(pid, self.seal.carrier)

    def read_or_marked(self, pid: int) -> int | None:
        """Return the tag that a process carries, if any.

        If tags are not sealed and the process carries no scope's tag, return the tag in its environment, if any.
        """
        tag = self.read(pid)
        if not self.seal.sealed and (tag is None or process_tags.scope_of_tag(tag) == process_tags.UNCLAIMED):
            tag = process_tags.marked_tag_of(pid) or tag
        return tag

    @contextlib.contextmanager
    def bequeath(self, tag: int | None) -> Iterator[None]:
        """Let programs started in the block inherit this tag; None means the tag of programs started outside scopes.

        Programs inherit the limits of this process, so they have the tag from the beginning. Only one thread can be in
        the block at a time, so that no program gets the tag of another start.
        """
        with _inheritance:
            limits = self.seal.limits()
            self.seal.put(0, self.outside if tag is None else tag)
            try:
                yield
            finally:
                if limits is not None and os.getpid() == self.pid:  # a forked child keeps it
                    self.seal.restore(0, limits)

    @contextlib.contextmanager
    def bequeath_by(self, pid: int, tag: int) -> Iterator[None]:
        """Let programs that the process ``pid`` forks during the block inherit this tag; see `bequeath`."""
        with _inheritance:
            self.seal.put(pid, tag)
            try:
                yield
            finally:
                self.seal.put(pid, self.outside)

    def restore(self, limits: tuple[int, int]) -> None:
        """Restore the resource limits that this process had before its tag was set."""
        with _inheritance:
            self.seal.restore(0, limits)


_inheritance = threading.RLock()
"""Lock held around each start, by every installation, because all share the limit that is inherited."""


def _renew_lock() -> None:
    global _inheritance
    _inheritance = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)  # its holder may not exist in the child
