"""The suite of models passes for ours, over three protocols and by scripts, and fails for models with a fault."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any
from unittest import SkipTest

import pytest

from holdfast.agents.demo_model import demo_model
from holdfast.agents.model import Model
from holdfast.agents.providers.models import pydantic_model
from holdfast.agents.scripted import Pause, ScriptedModel
from holdfast.errors import HoldfastError, ModelFailed
from holdfast.protocol.model import EndPart
from holdfast.testing import MODEL_CHECKS, run_model_check, served_model, unscripted_model
from holdfast.testing.model_server import ModelServer, Reply
from holdfast.testing.suites import model
from holdfast.testing.suites.model_provider import ModelSubject, Provider
from tests.testing.suites.model_faults import FAULTS

NAMES = ("openai-chat:gpt-test", "openai-responses:gpt-test", "anthropic:claude-test")


def over_http(name: str, monkeypatch: pytest.MonkeyPatch) -> ModelSubject:
    def make(server: ModelServer) -> Any:
        for variable, value in server.environment.items():
            monkeypatch.setenv(variable, value)
        return pydantic_model(name)

    return served_model(make)


class Scripted:
    """A `Provider` whose model is the scripted one."""

    def __init__(self, script: Sequence[Reply]) -> None:
        given = iter(script)
        self.asked = ScriptedModel(lambda request: answer(next(given)), chunk=8)
        self.model: Model = self.asked
        self.scripted = True

    @property
    def requests(self) -> int:
        return len(self.asked.requests)

    async def begun(self, pieces: int) -> None:
        while not self.asked.open:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)

    async def quiet(self) -> None:
        while self.asked.open:
            await asyncio.sleep(0)


def answer(reply: Reply) -> Any:
    """A reply as the scripted model takes it."""
    if reply.status != 200:
        again = reply.retry_after_s if reply.retry_after_s is not None else 0.5 if reply.status >= 429 else None
        return [ModelFailed("scripted error", provider_status=reply.status, retry_after_s=again)]
    pause = Pause(reply.headers_s) if reply.headers_s else Pause(reply.pace_s)
    *parts, end = reply.parts()
    pieces = [piece for part in parts for piece in (pause, part)]
    if reply.fault == "stall":
        return [*pieces[: 2 * reply.after], Pause(math.inf)]
    if reply.fault is not None:
        return [*pieces[: 2 * reply.after], ModelFailed(f"a {reply.fault} answer", retry_after_s=0.5)]
    assert isinstance(end, EndPart)
    reason = "calls" if reply.calls and end.reason == "stop" else end.reason
    return [pause, *pieces, EndPart(usage=end.usage, reason=reason)]


@contextlib.asynccontextmanager
async def scripted(script: Sequence[Reply]) -> AsyncIterator[Provider]:
    yield Scripted(script)


@pytest.mark.parametrize("check", MODEL_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", NAMES, ids=["chat", "responses", "anthropic"])
def test_a_model_of_pydantic_ai_conforms(check: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_model_check(check, over_http(name, monkeypatch))


@pytest.mark.parametrize("check", MODEL_CHECKS, ids=lambda check: check.__name__)
def test_the_scripted_model_conforms(check: Any) -> None:
    run_model_check(check, scripted)


SCRIPTED_ONLY = {
    "what_a_request_cost_is_told",
    "calls_come_whole_and_in_order",
    "broken_arguments_come_as_they_were_written",
    "why_an_answer_ended_is_told",
    "reasoning_is_no_part_of_the_answer",
    "a_cancel_closes_the_connection_at_once",
    "an_interrupt_ends_a_request_and_asks_nothing_again",
    "a_failure_says_whether_to_try_again_and_is_not_repeated_here",
}
"""Checks for which a model has to say what it is told to."""


@pytest.mark.parametrize("check", MODEL_CHECKS, ids=lambda check: check.__name__)
def test_the_demo_model_conforms_and_what_takes_a_script_is_skipped(check: Any) -> None:
    demo = unscripted_model(demo_model(pace_s=0.001))
    if check.__name__ in SCRIPTED_ONLY:
        with pytest.raises(SkipTest, match="the subject does not support: scripted answers"):
            run_model_check(check, demo)
    else:
        run_model_check(check, demo)


@pytest.mark.parametrize("check", MODEL_CHECKS, ids=lambda check: check.__name__)
def test_the_check_finds_a_model_with_the_fault(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_AT_ONCE_S", 0.2)

    @contextlib.asynccontextmanager
    async def faulty(script: Sequence[Reply]) -> AsyncIterator[Provider]:
        provider = Scripted(script)
        provider.model = FAULTS[check.__name__](provider.model)
        yield provider

    with pytest.raises((AssertionError, HoldfastError)) as failed:
        run_model_check(check, faulty)
    assert any("the rule that is broken" in note for note in failed.value.__notes__)
