"""One installation of program adoption: find the owner of each start, and record, find and kill programs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from holdfast.runtime.adoption.adopted_programs import AdoptedPrograms
from holdfast.runtime.adoption.kill_passes import KillPasses
from holdfast.runtime.adoption.stranger_search import StrangerSearch
from holdfast.runtime.adoption.tag_inheritance import TagInheritance
from holdfast.runtime.process_host import ProcessHost
from holdfast.runtime.processes.foreign_process import Owner
from holdfast.runtime.processes.seal import Seal
from holdfast.runtime.processes.tree import KILL_BOUND_S

__all__ = ["ProgramAdoption"]


class ProgramAdoption:
    """State of one installation, used by threads that start programs and by the host's reading thread.

    Parameters:
        current, processes, home, lingers: see `holdfast.runtime.adoption.processes.install`.
        seal: seal that sets the tags of processes.
    """

    def __init__(
        self,
        current: Callable[[], Owner | None],
        processes: ProcessHost,
        seal: Seal,
        home: Callable[[int], Owner | None],
        lingers: Callable[[], bool],
    ) -> None:
        self.seal = seal
        self.ended = False
        self.tags = TagInheritance(seal)
        self.programs = AdoptedPrograms(processes, self.tags, self._claim_late)
        self.strangers = StrangerSearch(self.programs, self.tags, home, self._kill_late)
        self.passes = KillPasses(processes, seal, self.strangers.claim, self.programs.conclude)
        self._current = current
        self._lingers = lingers

    def _claim_late(self) -> None:
        """Assign programs that abandoned threads of ended scopes have started meanwhile."""
        if self._lingers():
            self.strangers.claim()

    def _kill_late(self, tag: int) -> None:
        self.passes.ask({tag: []}, KILL_BOUND_S)

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child: such a child adopts no programs, as a lock may be held forever."""
        return os.getpid() != self.tags.pid

    def off(self) -> bool:
        """Return True if programs started now are not adopted: in a forked child, or after the installation has ended.

        Even after the installation has ended, a thread that an ended scope abandoned may start no program.

        Raises:
            ScopeClosed: the scope has ended.
        """
        if self.forked:
            return True
        if self.ended:
            self._current()
        return self.ended

    def owner(self) -> Owner | None:
        """Return the scope that owns a program started now; None outside any scope and in a forked child."""
        return None if self.forked else self._current()

    def unadopted(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for a start that `off` excludes; the program is not adopted and may outlive this
        process."""
        return contextlib.nullcontext() if self.forked else self.tags.bequeath(None)
