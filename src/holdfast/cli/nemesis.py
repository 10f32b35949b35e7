"""``holdfast storm --nemesis``: inject faults into a server under load, and report the findings for each fault."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli.exit_codes import Exit, exit_of
from holdfast.cli.output import note, say, say_error, say_json, say_table
from holdfast.errors import ConfigurationError, HoldfastError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.proof.nemesis import EpisodePlan, FaultOutcome

__all__ = ["nemesis"]

_FOUND = 5
_FAULT_S = 20.0
_KILL_S = 120.0
"""For the estimate: the time of a fault, and of ``kill``, which kills a server at every failpoint."""


def nemesis(
    names: str,
    ask: EpisodePlan,
    *,
    as_json: bool,
    history: str | None,
    progress: Callable[[str], None],
) -> Exit:
    """Inject faults, report the findings, and return the exit code.

    The exit code is 1 if a promise was broken, another problem was found, or a fault was never injected.

    Parameters:
        names: ``all``, or names of faults separated by commas.
        ask: plan of the episode in which each fault is injected.
        as_json: whether to print the findings as JSON.
        progress: callback, called with each line of progress.
        history: folder in which to save the history of each fault; None saves no history.
    """
    from holdfast.proof.history import write_history
    from holdfast.proof.nemesis import chosen, run_faults

    try:
        faults = chosen(names)
        folder = None if history is None else _made(Path(history))
        estimate_s = sum(_KILL_S if fault == "kill" else _FAULT_S for fault in faults)
        note(f"nemesis: seed {ask.seed}; about {estimate_s:.0f} s: {', '.join(faults)}")
        done = asyncio.run(run_faults(faults, ask, progress))
        if folder is not None:
            for outcome, recorder in done:
                write_history(folder / f"{outcome.fault}.jsonl", recorder.records)
    except HoldfastError as error:
        say_error(error, as_json=as_json)
        return exit_of(error)
    except KeyboardInterrupt:
        note("nemesis: interrupted; no verdict")
        return Exit.INTERRUPTED
    outcomes = [outcome for outcome, _ in done]
    passed = all(outcome.passed for outcome in outcomes)
    if as_json:
        say_json({"passed": passed, "seed": ask.seed, "faults": [_figures(outcome) for outcome in outcomes]})
    else:
        _say(outcomes, passed)
    return Exit.OK if passed else Exit.FAILED


def _made(folder: Path) -> Path:
    """Create a folder before a long run and return it. Raises `ConfigurationError` if the folder is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigurationError(
            f"{folder} is not a writable folder: {error.strerror}", hint="with --nemesis, pass a folder to --history"
        ) from None


def _figures(outcome: FaultOutcome) -> dict[str, object]:
    return {
        "fault": outcome.fault,
        "passed": outcome.passed,
        "how": outcome.how,
        "injected": outcome.injected,
        "never": outcome.never,
        "observations": outcome.observations,
        "checked": outcome.checked,
        "broken": outcome.broken,
        "found": outcome.found,
        "seconds": round(outcome.seconds, 1),
    }


def _say(outcomes: Sequence[FaultOutcome], passed: bool) -> None:
    say_table(
        ("fault", "injected", "observations", "other checks", "found"),
        (
            (
                one.fault,
                ", ".join(f"{kind} {times:,}" for kind, times in one.injected.items()),
                f"{one.observations:,}",
                f"{one.checked:,}",
                f"BROKEN {one.broken:,}" if one.broken else "NEVER INJECTED" if one.never else "nothing",
            )
            for one in outcomes
        ),
    )
    for one in outcomes:
        for kind in one.never:
            say(f"\n{one.fault}: never injected: {kind}")
        for what in one.found[:_FOUND]:
            say(f"\n{one.fault}: {what}")
    say("\nevery promise was kept" if passed else "\nnot every promise was kept")
