"""The phases of a run in its host's memory.

The store knows a run's state (`holdfast.protocol.states`). The phase is what the host still has to do for the run:
run its agent, unload it, write its end. A host that dies takes the phase with it, so it is never stored.

- ``running``: the agent runs, or waits for people.
- ``unloading``: the run waits only for people, so its work is being stopped in order to free the memory.
- ``releasing``: all work has stopped. The rest of the output is written; then the run leaves memory without an end.
- ``committing``: all work has stopped. The end is being written.
- ``lost``: another holder has the session, so nothing more is written.
- ``unloaded``: out of memory without an end; a later claim or the next start resumes the run.
- ``ended``: out of memory; the store has the end, another holder has the run, or the host gave up writing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from holdfast.protocol.states import illegal_transition

__all__ = ["PHASE_TABLE", "TERMINAL_PHASES", "PhaseInput", "RunPhase", "next_phase"]

RunPhase = Literal["running", "unloading", "releasing", "committing", "lost", "unloaded", "ended"]
PhaseInput = Literal["unload", "release", "commit", "lose", "end"]

PHASE_TABLE: Mapping[tuple[RunPhase, PhaseInput], RunPhase] = {
    ("running", "unload"): "unloading",
    ("running", "release"): "releasing",
    ("running", "commit"): "committing",
    ("running", "lose"): "lost",
    ("running", "end"): "ended",
    ("unloading", "release"): "releasing",
    ("unloading", "commit"): "committing",
    ("unloading", "lose"): "lost",
    ("unloading", "end"): "ended",
    ("releasing", "commit"): "committing",
    ("releasing", "lose"): "lost",
    ("releasing", "end"): "unloaded",
    ("committing", "lose"): "lost",
    ("committing", "end"): "ended",
    ("lost", "end"): "ended",
}

TERMINAL_PHASES: frozenset[RunPhase] = frozenset(("unloaded", "ended"))


def next_phase(phase: RunPhase, event: PhaseInput) -> RunPhase:
    """Return the phase after `event`. Raises `IllegalTransition`."""
    try:
        return PHASE_TABLE[phase, event]
    except KeyError:
        raise illegal_transition("run in memory", PHASE_TABLE, phase, event) from None
