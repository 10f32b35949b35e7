"""Histories of several hosts: one that was stopped may lose its runs, but must notice it; takeovers are timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import pytest

from holdfast.proof.checker.facts import Facts
from holdfast.proof.checker.judgement import UNFINISHED, judge
from holdfast.proof.checker.takeovers import cluster_figures
from holdfast.proof.history import (
    DrainRequested,
    HostAbsent,
    HostKilled,
    Lost,
    Opened,
    Record,
    SendAcknowledged,
    SendAttempted,
    Stamp,
    StopAnswered,
)
from holdfast.protocol.stopping import NOT_ENDED
from tests.proof.checker.history_model import LIMITS, World

B = ("bob", "b")
replace = msgspec.structs.replace


def story(*, frozen: bool = True, replayable: bool = True) -> tuple[list[Record], float, float]:
    """A run whose host is stopped for four seconds, and which another host takes over. When that began and ended."""
    made = World(failpoints=())
    made.start_host()
    made.send(B, replayable=replayable)
    made.branch(B, "task")
    made.tick(B)
    began = made.now
    made.now += 4.0
    made.start_host()
    made.now += 1.0
    if frozen:
        made.note(HostAbsent, incarnation=1, began_at=began)
    back = made.now
    records = made.settle()
    if frozen:
        begun = next(r for r in records if isinstance(r, Stamp) and r.what == "start")
        records.append(replace(begun, at=back + 0.1, what="finish"))
    return records, began, back


def opened(records: Sequence[Record], **limits: Any) -> list[Record]:
    """The records of a storm that tells the time of day."""
    return [replace(r, zero=1e-9, limits=replace(LIMITS, **limits)) if isinstance(r, Opened) else r for r in records]


def broken(records: list[Record], promise: str) -> list[str]:
    return [violation.what for violation in judge(records).of(promise).violations]


def worked(records: list[Record], at: float) -> Stamp:
    """A stamp of the work that the first host still does at `at`."""
    stamp = next(r for r in records if isinstance(r, Stamp) and r.what == "tick")
    return replace(stamp, at=at)


@pytest.mark.parametrize("replayable", [True, False])
def test_a_run_of_a_stopped_host_may_be_taken_over(replayable: bool) -> None:
    records, _, _ = story(replayable=replayable)
    assert judge(records).of("P4").verdict == "kept"
    assert [j.promise for j in judge(records).judgements if j.verdict == "broken"] == []


def test_a_run_of_a_living_host_may_not_be_taken_over() -> None:
    records, _, _ = story(frozen=False)
    assert broken(records, "P4")[0] == "a run was attempted again though its host lived on"
    assert "two agents of one session ran at the same time" in broken(records, "P4")


def test_a_drained_host_may_hand_a_run_over_before_it_exits_but_not_before_its_agent_has_ended() -> None:
    records, began, _ = story(frozen=False)
    begun = next(r for r in records if isinstance(r, Stamp) and r.what == "start")
    drained = [*records, DrainRequested(at=began + 0.1, incarnation=1, deadline_s=3.0)]
    ended = replace(begun, at=began + 0.2, what="finish")
    assert broken([*drained, ended], "P4") == []
    assert broken([*records, ended], "P4") == ["a run was attempted again though its host lived on"]
    again = next(r for r in records if isinstance(r, Stamp) and r.what == "start" and r.attempt == 2)
    late = replace(begun, at=again.at + 0.1, what="finish")
    assert "two agents of one session ran at the same time" in broken([*drained, late], "P4")


def test_a_host_that_is_cut_off_must_end_its_run_before_another_one_begins_it() -> None:
    records, began, back = story(frozen=False)
    begun = next(r for r in records if isinstance(r, Stamp) and r.what == "start")
    cut = [*records, HostAbsent(at=back, incarnation=1, began_at=began, why="cut off")]
    assert broken([*cut, replace(begun, at=began + 0.2, what="finish")], "P4") == []
    again = next(r for r in records if isinstance(r, Stamp) and r.what == "start" and r.attempt == 2)
    late = replace(begun, at=again.at + 0.1, what="finish")
    assert "two agents of one session ran at the same time" in broken([*cut, late], "P4")
    assert cluster_figures(Facts(opened([*cut, late]))).takeovers == 1


def test_a_host_that_was_stopped_may_work_on_for_a_moment_only() -> None:
    records, _, back = story()
    soon = worked(records, back + LIMITS.fence_s - 0.1)
    assert [j.promise for j in judge([*records, soon]).judgements if j.verdict == "broken"] == []
    late = worked(records, back + LIMITS.fence_s + 0.1)
    assert "a run was at work after its successor had begun" in broken([*records, late], "P4")


def test_a_takeover_is_timed_and_has_a_bound() -> None:
    records, began, _ = story()
    takeover_s = cluster_figures(Facts(opened(records))).longest_takeover_s
    assert 4.0 <= takeover_s <= 4.1
    assert broken(opened(records, takeover_s=4.2), "P11") == []
    late = f"a run was taken over after {takeover_s:.2f} s, the bound is 3.9 s"
    assert broken(opened(records, takeover_s=3.9), "P11") == [late]
    killed = [HostKilled(at=began, incarnation=1) if isinstance(r, HostAbsent) else r for r in records]
    assert cluster_figures(Facts(opened(killed))).takeovers == 1
    assert any("the bound is" in what for what in broken(opened(killed, takeover_s=3.9), "P11"))


def test_figures_count_what_is_lost_and_doubled() -> None:
    records, _, _ = story()
    figures = cluster_figures(Facts(opened(records)))
    assert (figures.accepted, figures.lost, figures.doubled, figures.takeovers) == (1, 0, 0, 1)
    sent = next(r for r in records if isinstance(r, SendAcknowledged))
    unknown = replace(sent, message_id="m-unknown")
    lost = [unknown if r is sent else r for r in records]
    assert cluster_figures(Facts(opened(lost))).lost == 1
    start = next(r for r in records if isinstance(r, Stamp) and r.what == "start")
    effects = [replace(start, what="effect", effect="pay", at=start.at + n) for n in (0.1, 0.2)]
    assert cluster_figures(Facts(opened([*records, *effects]))).doubled == 1


def test_other_hosts_accept_messages_after_a_drain_and_answer_for_a_lost_one() -> None:
    records, began, back = story()
    asked = SendAttempted(
        at=began + 0.1, token="t-lost", principal="bob", session="b", idempotency_key="k", content="c-lost"
    )
    lost = Lost(at=back - 0.1, token="t-lost")
    assert broken([*records, asked, lost], "P9") == [], "it may have gone to the host that was stopped"
    drained = [*records, DrainRequested(at=back + 0.001, incarnation=1, deadline_s=3.0)]
    assert "a message was accepted after the drain" not in broken(drained, "P12")


def test_only_the_promises_asked_for_are_judged() -> None:
    records, _, _ = story()
    report = judge(records, only=UNFINISHED)
    assert {judged.promise for judged in report.judgements} == UNFINISHED
    assert [judged.promise for judged in report.judgements if judged.verdict == "broken"] == []


def test_a_host_that_is_cut_off_may_stop_its_run_for_another_reason_than_an_interrupt_that_it_does_not_know() -> None:
    made = World(failpoints=())
    made.start_host()
    made.send(B)
    made.branch(B, "task")
    began = made.now
    made.interrupt(B)
    records = made.settle()
    told = [r for r in records if isinstance(r, Stamp) and r.what == "told"]
    others = [r for r in records if r not in told]
    lost = [replace(stamp, cause="the host could not renew its lease") for stamp in told]
    assert len(lost) > 0
    assert "a branch saw a cause that the log does not have" in broken([*others, *lost], "P1")
    absent = HostAbsent(at=told[-1].at + 0.1, incarnation=1, began_at=began, why="cut off")
    assert broken([*others, *lost, absent], "P1") == []
    earlier = replace(absent, at=told[0].at - 0.01)
    assert "a branch saw a cause that the log does not have" in broken([*others, *lost, earlier], "P1")


def given_up(stops: int) -> list[Record]:
    """Stops of runs of living hosts; each was given up by the host that was asked."""
    made = World(failpoints=())
    made.start_host()
    for _ in range(stops):
        made.send(B)
        made.branch(B, "task")
        made.interrupt(B)
    left = (f"the run ({NOT_ENDED} 10 s)",)
    return [
        replace(record, receipt=dataclasses.replace(record.receipt, outcome="unknown", unattributed=left))
        if isinstance(record, StopAnswered)
        else record
        for record in made.settle()
    ]


def test_no_more_than_the_stated_number_of_stops_may_be_given_up_while_their_hosts_live() -> None:
    allowed = LIMITS.given_up
    assert broken(given_up(allowed), "P9") == []
    (what,) = broken(given_up(allowed + 1), "P9")
    assert what.startswith(f"{allowed + 1} stops were given up although the hosts that had the runs were alive")


@pytest.mark.parametrize("gone", ["killed", "stopped", "cut off"])
def test_a_stop_may_be_given_up_whose_host_was_gone_meanwhile(gone: Literal["killed", "stopped", "cut off"]) -> None:
    records = given_up(LIMITS.given_up + 1)
    answer = next(record for record in records if isinstance(record, StopAnswered))
    fault: Record = HostKilled(at=answer.at - 0.001, incarnation=1)
    if gone != "killed":
        fault = HostAbsent(at=answer.at + 5, incarnation=1, began_at=answer.at - 0.001, why=gone)
    assert broken([*records, fault], "P9") == []
