"""The suite of agents passes for agents that keep the promises, and each check fails for one that does not."""

from __future__ import annotations

from typing import Any
from unittest import SkipTest

import pytest

from holdfast import Agent, Run, tool
from holdfast.agents.scripted import ScriptedAnswer, ScriptedModel
from holdfast.protocol.model import CallPart, ModelRequest, ToolMessage, UserMessage
from holdfast.testing import AGENT_CHECKS, AgentSubject, run_agent_check
from holdfast.testing.suites import agent_driver
from tests.testing.suites.agent_faults import FAULTS


def plain(step: Any) -> Any:
    async def work(run: Run) -> str:
        return str(await run.call(step, run.text))

    return work


def bare(step: Any) -> Any:
    async def work(run: Run) -> str:
        await run.emit("I ask: ")
        return str(await step(run.text))

    return work


def with_model(step: Any) -> Agent:
    def script(request: ModelRequest) -> ScriptedAnswer:
        last = request.messages[-1]
        if isinstance(last, ToolMessage):
            return last.content
        assert isinstance(last, UserMessage)
        return CallPart(name="step", arguments={"text": last.content.rpartition("\n\n")[2]})  # after one without answer

    return Agent(name="built-in", model=ScriptedModel(script), tools=[tool(step)])


def repeats() -> Any:
    async def work(run: Run) -> str:
        return " / ".join(entry.content for entry in [*await run.history()]) + run.text

    return work


def remembers() -> Agent:
    def script(request: ModelRequest) -> ScriptedAnswer:
        return " / ".join(message.content for message in request.messages if isinstance(message, UserMessage))

    return Agent(name="built-in", model=ScriptedModel(script))


SUBJECTS = {
    "plain": AgentSubject(make=plain, recall=repeats),
    "bare": AgentSubject(make=bare, steps="async", recall=repeats),
    "built-in": AgentSubject(make=with_model, recall=remembers),
}
NOT_OF_BARE = [check for check in AGENT_CHECKS if "plain_step" in check.__name__]
"""It awaits its step, so that there are no plain ones."""


@pytest.mark.parametrize(
    ("check", "subject"),
    [
        pytest.param(check, subject, id=f"{name}-{check.__name__}")
        for name, subject in SUBJECTS.items()
        for check in AGENT_CHECKS
        if name != "bare" or check not in NOT_OF_BARE
    ],
)
def test_an_agent_of_ours_conforms(check: Any, subject: AgentSubject) -> None:
    run_agent_check(check, subject)


def test_what_a_framework_does_not_have_is_skipped_and_named() -> None:
    assert len(NOT_OF_BARE) == 4
    for check in NOT_OF_BARE:
        with pytest.raises(SkipTest, match="the subject does not support: plain functions"):
            run_agent_check(check, SUBJECTS["bare"])
    (recalling,) = (check for check in AGENT_CHECKS if check.__name__ == "the_next_run_knows_what_was_said")
    with pytest.raises(SkipTest, match="the subject does not support: conversation history in later runs"):
        run_agent_check(recalling, AgentSubject(make=bare))


@pytest.mark.parametrize("check", AGENT_CHECKS, ids=lambda check: check.__name__)
def test_the_check_finds_an_agent_with_the_fault(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_driver, "_PATIENCE_S", 0.5)
    with pytest.raises(AssertionError) as failed:
        run_agent_check(check, FAULTS[check.__name__])
    assert any("the rule that is broken" in note for note in failed.value.__notes__)
