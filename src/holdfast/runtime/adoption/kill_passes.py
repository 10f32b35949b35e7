"""Batched kills of foreign programs: one pass over all processes serves every scope that has requested a kill.

As in a group commit, a request that arrives during a pass is served by the next pass, which begins as soon as the
running pass has done its first scan. So N scopes that stop at the same time cost a few passes, not N. A scope whose
processes do not die does not delay other scopes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from holdfast.runtime.oneshot import Oneshot
from holdfast.runtime.process_host import ProcessHost
from holdfast.runtime.processes.killer import Killed, Killer
from holdfast.runtime.processes.seal import Seal
from holdfast.runtime.processes.tree import TreeResult

__all__ = ["KillPasses"]

_AGAIN_S = 0.005

_Roots = Mapping[int, Sequence[tuple[int, int]]]


class _Asked:
    """A request to kill the processes with certain tags."""

    __slots__ = ("answer", "bound_s", "killed", "left", "survivors", "tags")

    def __init__(self, tags: _Roots, bound_s: float) -> None:
        self.tags = tags
        self.bound_s = bound_s
        self.left = set(tags)
        self.killed: list[int] = []
        self.survivors: list[int] = []
        self.answer: Oneshot[TreeResult] = Oneshot()

    def hear(self, done: Mapping[int, tuple[list[int], list[int]]]) -> bool:
        """Record results by tag; return True if the results of all tags of this request are known."""
        for tag in self.left & done.keys():
            self.left.discard(tag)
            self.killed += done[tag][0]
            self.survivors += done[tag][1]
        return not self.left

    def result(self) -> TreeResult:
        return TreeResult(
            killed=tuple(self.killed), survivors=tuple(self.survivors), proven=not (self.left or self.survivors)
        )


class KillPasses:
    """Accepts kill requests from any thread, and answers them in the reading thread of the process host.

    Parameters:
        processes: host whose zygote does the kills.
        seal: sets the tags of processes.
        prepare: called before each pass, in whichever thread starts the pass.
        conclude: called in the reading thread with the finished tags, before the requests are answered.
    """

    def __init__(
        self,
        processes: ProcessHost,
        seal: Seal,
        prepare: Callable[[], object],
        conclude: Callable[[frozenset[int]], object],
    ) -> None:
        self._processes = processes
        self._seal = seal
        self._prepare = prepare
        self._conclude = conclude
        self._lock = threading.Lock()
        self._waiting: list[_Asked] = []
        self._looking = False

    def ask(self, tags: _Roots, bound_s: float) -> Oneshot[TreeResult]:
        """Request a kill of all processes with one of these tags, and of the programs listed under the tags.

        The returned `Oneshot` is set when the outcome for all tags is known, or when no zygote is available.

        Parameters:
            tags: tags to kill, each with the pids and start times of programs that may have lost the tag.
            bound_s: time limit in seconds.
        """
        asked = _Asked(tags, bound_s)
        with self._lock:
            self._waiting.append(asked)
        self._begin()
        return asked.answer

    def _begin(self) -> None:
        """Start a pass for all waiting requests, unless one is still doing its first scan."""
        with self._lock:
            if self._looking or not self._waiting:
                return
            self._looking = True
            taken, self._waiting = self._waiting, []
        self._prepare()
        tags: dict[int, list[tuple[int, int]]] = {}
        for asked in taken:
            for tag, roots in asked.tags.items():
                tags.setdefault(tag, []).extend(roots)
        first = [True]

        def told(done: Killed | None) -> None:
            if first:
                first.clear()
                with self._lock:
                    self._looking = False
            self._hear(taken, done)
            self._begin()

        bound_s = max(asked.bound_s for asked in taken)
        try:
            killer = self._processes.new_killer(self._seal.carrier, self._seal.sealed, tags, bound_s, told)
        except OSError:  # out of descriptors
            with self._lock:
                self._looking = False
            for asked in taken:
                asked.answer.set(TreeResult(proven=False))
            return
        self._submit(killer)

    def _submit(self, killer: Killer) -> None:
        if not killer.submit():  # the zygote already has too many requests
            timer = threading.Timer(_AGAIN_S, self._submit, (killer,))
            timer.daemon = True
            timer.start()

    def _hear(self, taken: list[_Asked], done: Killed | None) -> None:
        if done is None:
            finished = list(taken)
        else:
            finished = [asked for asked in taken if asked.hear(done)]
        if not finished:
            return
        taken[:] = [] if done is None else [asked for asked in taken if asked.left]
        try:
            self._conclude(frozenset(tag for asked in finished for tag in asked.tags))
        finally:
            for asked in finished:
                asked.answer.set(asked.result())
