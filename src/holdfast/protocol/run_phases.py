"""The phases of a run in its host's memory.

The store keeps a run's state (`holdfast.protocol.states`). The run's phase determines what the host still has to do:
run the agent, unload the run or write the end of the run. The phase is never stored, because it is meaningless once the
host has died.

- ``running``: the agent runs, or waits for people.
- ``unloading``: the run only waits for people's answers, so its work is being stopped to free memory.
- ``releasing``: all work has stopped. The rest of the output is being written; then the run is unloaded.
- ``committing``: all work has stopped. The run's end is being written.
- ``lost``: another holder has the session, so nothing more is written.
- ``unloaded``: no longer in memory, but not ended; a later claim or the next start resumes the run.
- ``ended``: no longer in memory; the store has the end, another holder has the run, or the host gave up writing.
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
    """Return the phase after `event`. Raises `IllegalTransition` if `PHASE_TABLE` does not list the change."""
    try:
        return PHASE_TABLE[phase, event]
    except KeyError:
        raise illegal_transition("run in memory", PHASE_TABLE, phase, event) from None
