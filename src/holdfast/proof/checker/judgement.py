"""The history checker: judges a recorded history promise by promise, P1 to P14 and P16, with evidence.

A judgement is ``broken`` when any rule found a violation, ``kept`` when there was at least one observation and no
violation, and ``not observed`` otherwise. Each rule in `holdfast.proof.checker` documents its observations and
violations. The rules allow for concurrency: a call without an answer may have had its effect, and a kill makes outcomes
unknown. The rules accept every history that keeps the promises, so load or chance never causes a violation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal

import msgspec

from holdfast.proof.checker.bounds import bounded, fair, private, walled
from holdfast.proof.checker.facts import Facts
from holdfast.proof.checker.ledger import Ledger, Violation
from holdfast.proof.checker.recovery import clean_shutdown, crash_safe
from holdfast.proof.checker.sessions import atomic_state, no_message_lost, one_run, valid_transcript
from holdfast.proof.checker.stopping import broadcast, isolation, no_leaks, stopped_means_stopped
from holdfast.proof.checker.streams import honest_streams
from holdfast.proof.history import HostileAct, Record, Source

__all__ = ["PROMISES", "UNFINISHED", "Judgement", "Promise", "Report", "Violation", "judge", "judge_facts"]

Verdict = Literal["kept", "broken", "not observed"]


class Promise(msgspec.Struct, frozen=True):
    """A promise: its number, name and rule, and the sources needed to observe it."""

    number: str
    name: str
    rule: Callable[[Facts, Ledger], None]
    needs: tuple[Source, ...] = ("clients",)


PROMISES: tuple[Promise, ...] = (
    Promise("P1", "broadcast", broadcast, ("stamps",)),
    Promise("P2", "isolation", isolation),
    Promise("P3", "stopped means stopped", stopped_means_stopped),
    Promise("P4", "one run per session", one_run),
    Promise("P5", "no message lost", no_message_lost),
    Promise("P6", "valid transcript", valid_transcript),
    Promise("P7", "honest streams", honest_streams),
    Promise("P8", "no leaks", no_leaks, ("processes",)),
    Promise("P9", "bounded", bounded),
    Promise("P10", "atomic state", atomic_state),
    Promise("P11", "crash-safe", crash_safe, ("kills",)),
    Promise("P12", "clean shutdown", clean_shutdown, ("drain",)),
    Promise("P13", "fair", fair, ("places",)),
    Promise("P14", "private", private, ("principals",)),
    Promise("P16", "walled", walled, ("walls",)),
)

UNFINISHED = frozenset(("P2", "P3", "P4", "P10", "P14", "P16"))
"""Promises that can be judged during a storm: nothing that is unfinished breaks them."""


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome for one promise.

    Parameters:
        promise, name: number and name of the promise.
        verdict: ``kept``, ``broken`` or ``not observed``, as defined in the module docstring.
        observations: number of observations.
        broken: number of violations.
        violations: the first violations, with evidence.
        demanded: whether the recorder could observe the promise; if so, ``not observed`` is a failure.
    """

    promise: str
    name: str
    verdict: Verdict
    observations: int
    broken: int = 0
    violations: tuple[Violation, ...] = ()
    demanded: bool = True

    @property
    def passed(self) -> bool:
        """Whether the promise was kept, or the recorder could not observe it."""
        return self.verdict == "kept" or (self.verdict == "not observed" and not self.demanded)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a history.

    Parameters:
        judgements: one judgement for each promise, in order of their numbers.
        records: number of judged records.
        failpoints: whether each required failpoint was hit, by name.
        hostile: actions of the hostile principal; empty if the storm had none.
        bombs: whether the storm could see what becomes of bombs; False where programs run without walls.
    """

    judgements: tuple[Judgement, ...]
    records: int
    failpoints: Mapping[str, bool]
    hostile: tuple[HostileAct, ...] = ()
    bombs: bool = False

    @property
    def passed(self) -> bool:
        """Whether every promise passed, every failpoint was hit, and every action of a hostile principal had an
        effect."""
        return (
            all(judgement.passed for judgement in self.judgements)
            and all(self.failpoints.values())
            and all(act.felt for act in self.hostile)
        )

    def of(self, promise: str) -> Judgement:
        """Return the judgement of a promise by number, such as ``P5``. Raises `KeyError` if the number is unknown."""
        for judgement in self.judgements:
            if judgement.promise == promise:
                return judgement
        raise KeyError(promise)


def judge(records: Iterable[Record], *, only: Collection[str] | None = None) -> Report:
    """Judge a history; the records may come in any order. Raises `ValueError` if the opening record is missing.

    Parameters:
        only: numbers of the promises to judge; None judges all.
    """
    return judge_facts(Facts(records), only=only)


def judge_facts(facts: Facts, *, only: Collection[str] | None = None) -> Report:
    """Judge an indexed history. See `judge`."""
    judgements = []
    for promise in PROMISES:
        if only is not None and promise.number not in only:
            continue
        ledger = Ledger()
        promise.rule(facts, ledger)
        verdict: Verdict = "broken" if ledger.broken_count else "kept" if ledger.observations else "not observed"
        judgements.append(
            Judgement(
                promise=promise.number,
                name=promise.name,
                verdict=verdict,
                observations=ledger.observations,
                broken=ledger.broken_count,
                violations=tuple(ledger.violations),
                demanded=all(source in facts.opened.sees for source in promise.needs),
            )
        )
    return Report(
        judgements=tuple(judgements),
        records=len(facts.records),
        failpoints={name: name in facts.hits for name in facts.opened.failpoints},
        hostile=tuple(facts.hostile_acts) or ((HostileAct(name="any act"),) if facts.opened.hostile else ()),
        bombs="bombs" in facts.opened.sees,
    )
