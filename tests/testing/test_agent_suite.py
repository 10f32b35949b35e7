"""The suite of agents passes for agents that keep the promises, and each check fails for one that does not."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import Agent, Run, tool
from holdfast.agents.scripted import ScriptedAnswer, ScriptedModel
from holdfast.protocol.model import CallPart, ModelRequest, ToolMessage, UserMessage
from holdfast.testing import AGENT_CHECKS, AgentSubject, agent_driver, run_agent_check
from tests.testing.agent_faults import FAULTS


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


SUBJECTS = {
    "plain": AgentSubject(make=plain, recall=repeats),
    "bare": AgentSubject(make=bare, steps="async"),
    "built-in": AgentSubject(make=with_model),
}


@pytest.mark.parametrize("check", AGENT_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_an_agent_of_ours_conforms(check: Any, subject: AgentSubject) -> None:
    run_agent_check(check, subject)


@pytest.mark.parametrize("check", AGENT_CHECKS, ids=lambda check: check.__name__)
def test_the_check_finds_an_agent_with_the_fault(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_driver, "_PATIENCE_S", 0.5)
    with pytest.raises(AssertionError) as failed:
        run_agent_check(check, FAULTS[check.__name__])
    assert any("the rule that is broken" in note for note in failed.value.__notes__)
