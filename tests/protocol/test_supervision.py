"""When enough branches have completed, and when one was started again too often."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigurationError
from holdfast.protocol.stopping import Cause
from holdfast.protocol.supervision import BranchResult, Intensity, Need, Quorum, told_results


@given(st.data(), st.integers(1, 8))
def test_a_verdict_is_final_and_comes_at_the_latest_with_the_last_end(data: st.DataObject, total: int) -> None:
    need: Need = data.draw(st.one_of(st.sampled_from(["all", "first", "some"]), st.integers(1, total)))
    quorum = Quorum(need, total)
    completed, verdict = 0, "open"
    for ended in range(1, total + 1):
        completed += data.draw(st.booleans())
        now = quorum.verdict(completed, ended)
        if verdict != "open":
            assert now == verdict
        verdict = now
    assert verdict == ("met" if completed >= quorum.required else "lost")


def test_first_is_decided_by_the_first_answer_and_some_by_the_last_end() -> None:
    assert Quorum("first", 3).verdict(1, 1) == "met"
    assert Quorum("some", 3).verdict(1, 2) == "open"
    assert Quorum("some", 3).verdict(1, 3) == "met"
    assert Quorum(2, 3).verdict(0, 2) == "lost"
    assert Quorum("all", 3).verdict(0, 1) == "lost"


@pytest.mark.parametrize(("need", "total"), [("most", 3), (0, 3), (4, 3), (True, 3), (1.5, 3), ("all", 0)])
def test_what_cannot_be_needed_is_refused(need: object, total: int) -> None:
    with pytest.raises(ConfigurationError):
        Quorum(need, total)  # type: ignore[arg-type]


@given(st.lists(st.floats(0, 100), max_size=30), st.integers(0, 5), st.floats(0.1, 50))
def test_a_restart_is_one_too_many_exactly_when_the_window_before_it_holds_more(
    times: list[float], limit: int, within_s: float
) -> None:
    intensity = Intensity(limit, within_s)
    seen: list[float] = []
    for at in sorted(times):
        seen.append(at)
        assert intensity.restart(at) == (sum(at - one <= within_s for one in seen) <= limit)


def test_a_clock_that_goes_back_makes_no_room() -> None:
    intensity = Intensity(1, 5.0)
    assert intensity.restart(100.0)
    assert not intensity.restart(10.0)


@pytest.mark.parametrize(("limit", "within_s"), [(-1, 1.0), (1, 0.0), (1, float("nan"))])
def test_an_intensity_that_cannot_be_is_refused(limit: int, within_s: float) -> None:
    with pytest.raises(ConfigurationError):
        Intensity(limit, within_s)


def test_what_went_wrong_is_told_first_and_in_bounded_length() -> None:
    cause = Cause(kind="stop", reason="branch 'b0' did not complete")
    results = [
        BranchResult(name="idle", status="not_begun"),
        BranchResult(name="stopped", status="interrupted", error="child stopped was interrupted", cause=cause),
        BranchResult(name="ok", status="completed"),
        *(BranchResult(name=f"b{n}", status="failed", error=f"error {n}") for n in range(12)),
    ]
    told = told_results(results, decided=cause)
    assert told.startswith("error 0; error 1; ")
    assert told.endswith("error 9; and 2 more; interrupted as a result: stopped; not started: idle")
    many = [BranchResult(name=f"b{n}", status="not_begun") for n in range(2000)]
    assert told_results(many).endswith("b9 and 1,990 more")


def test_a_branch_that_was_stopped_for_a_reason_of_its_own_went_wrong() -> None:
    own = Cause(kind="stop", reason="its task was cancelled")
    result = BranchResult(name="b", status="interrupted", error="child b was interrupted (stop)", cause=own)
    assert told_results([result], decided=Cause(kind="stop", reason="'b' did not complete")) == result.error
