"""The port to the adopter of foreign code's programs. `holdfast.runtime.adoption` sets it; handles and stops use it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from holdfast.runtime.processes.foreign_process import ForeignProcess, Owner
    from holdfast.runtime.processes.tree import TreeResult

__all__ = ["ProgramAdopter", "program_adopter", "set_program_adopter"]


class ProgramAdopter(Protocol):
    """Adopts programs that foreign code starts in scopes. `holdfast.runtime.adoption.processes` implements it."""

    def may_have_started(self, owner: Owner, /) -> bool:
        """Whether foreign code was observed to start a program in this scope."""
        ...

    def strangers(self, since: float, /) -> int:
        """Return the number of live processes that may belong to a scope opened at ``since``, but are unclaimed."""
        ...

    def look_soon(self, loop: asyncio.AbstractEventLoop, since: float, tell: Callable[[int], object], /) -> None:
        """Call ``tell`` on ``loop`` with the result of `strangers`."""
        ...

    async def kill_trees(self, roots: Sequence[ForeignProcess], owner: Owner, bound_s: float, /) -> TreeResult:
        """Kill adopted programs and everything else that foreign code started in the scope."""
        ...


_adopter: ProgramAdopter | None = None


def program_adopter() -> ProgramAdopter | None:
    """Return the adopter of this process; None if no adopter was set, and so no program was adopted."""
    return _adopter


def set_program_adopter(adopter: ProgramAdopter) -> None:
    """Make this the adopter of the process."""
    global _adopter
    _adopter = adopter
