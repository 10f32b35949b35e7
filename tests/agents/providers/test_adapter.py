"""A model through pydantic-ai, against a server on this machine that speaks the real protocols."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from holdfast.agents.providers.models import PydanticModel, pydantic_model
from holdfast.errors import ConfigurationError, MissingExtra, ModelFailed, UnknownAttachment
from holdfast.protocol.messages import Attachment, Usage
from holdfast.protocol.model import (
    AssistantMessage,
    CallPart,
    EndPart,
    ModelRequest,
    Part,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolMessage,
    ToolSpec,
    UserMessage,
)
from holdfast.testing.model_server import ModelServer, Reply

NAMES = ("openai:gpt-test", "openai-responses:gpt-test", "anthropic:claude-test")
ASK = ModelRequest(messages=(UserMessage(content="hello"),))
ADD = ToolSpec(
    name="add",
    description="Add two numbers.",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
)


@pytest.fixture(params=NAMES, ids=["openai", "responses", "anthropic"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def provider_of(name: str) -> str:
    """How its variables begin."""
    return name.partition(":")[0].partition("-")[0].upper()


def with_server(
    work: Callable[[ModelServer, PydanticModel], Awaitable[None]],
    script: Any,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    **options: Any,
) -> ModelServer:
    """Run `work` with a server and a model that uses it; afterwards no connection is left."""
    servers = []

    async def run() -> None:
        async with asyncio.timeout(60), ModelServer(script, **options) as server:
            for variable, value in server.environment.items():
                monkeypatch.setenv(variable, value)
            servers.append(server)
            await work(server, pydantic_model(name))
            await server.disconnected()

    asyncio.run(run())
    return servers[0]


async def all_parts(model: PydanticModel, request: ModelRequest = ASK, **more: Any) -> list[Part]:
    async with model.stream(request, **more) as parts:
        return [part async for part in parts]


def text_of(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def end_of(parts: Sequence[Part]) -> EndPart:
    end = parts[-1]
    assert isinstance(end, EndPart)
    return end


# ── what goes well ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_answer_comes_in_pieces_with_its_usage(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(server: ModelServer, model: PydanticModel) -> None:
        parts = await all_parts(model)
        assert text_of(parts) == "Good morning to you."
        assert len(parts) > 2
        end = end_of(parts)
        assert (end.usage.input_tokens, end.usage.output_tokens) == (21, 7)
        assert end.reason == "stop"
        assert end.model == name.partition(":")[2]
        assert server.exchanges[0].ended == "whole"

    usage = Usage(input_tokens=21, output_tokens=7)
    with_server(work, [Reply(text="Good morning to you.", usage=usage)], name, monkeypatch)


def test_calls_come_whole_and_their_results_go_back_in_letters_that_the_provider_takes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(server: ModelServer, model: PydanticModel) -> None:
        ask = UserMessage(content="add")
        parts = await all_parts(model, ModelRequest(messages=(ask,), instructions="Be exact.", tools=(ADD,)))
        calls = [part for part in parts if isinstance(part, CallPart)]
        assert [(call.name, call.arguments) for call in calls] == [("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})]
        assert end_of(parts).reason == "calls"
        ids = ("r_1/é.1", "r_1/é.2")
        history = (
            ask,
            AssistantMessage(
                text=text_of(parts),
                calls=tuple(
                    ToolCall(call_id=i, name=c.name, arguments=c.arguments) for i, c in zip(ids, calls, strict=True)
                ),
                state=end_of(parts).state,
            ),
            ToolMessage(call_id=ids[0], name="add", content="3"),
            ToolMessage(call_id=ids[1], name="add", content="stopped", status="interrupted"),
        )
        again = await all_parts(model, ModelRequest(messages=history, instructions="Be exact.", tools=(ADD,)))
        assert text_of(again) == "3 and 7."
        seen = server.exchanges[1].body
        assert "Be exact." in str(seen)
        assert str(seen).count("'add'") >= 3

    reply = Reply(text="I add.", calls=[("add", {"a": 1, "b": 2}), ("add", '{"a": 3, "b": 4}')])
    with_server(work, [reply, Reply(text="3 and 7.")], name, monkeypatch)


@pytest.mark.parametrize("arguments", ['{"a": 1, ', "[1, 2]", "add them"])
def test_broken_arguments_come_as_text_and_do_not_spoil_the_next_request(
    arguments: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(server: ModelServer, model: PydanticModel) -> None:
        parts = await all_parts(model, ModelRequest(messages=(UserMessage(content="add"),), tools=(ADD,)))
        [call] = [part for part in parts if isinstance(part, CallPart)]
        assert call.arguments == arguments
        history = (
            UserMessage(content="add"),
            AssistantMessage(
                calls=(ToolCall(call_id="c.1", name="add", arguments=call.arguments),), state=end_of(parts).state
            ),
            ToolMessage(call_id="c.1", name="add", content="the arguments are no JSON", status="error"),
        )
        assert text_of(await all_parts(model, ModelRequest(messages=history, tools=(ADD,)))) == "Sorry."

    with_server(work, [Reply(calls=[("add", arguments)]), Reply(text="Sorry.")], name, monkeypatch)


def test_reasoning_comes_apart_and_what_signs_it_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(server: ModelServer, model: PydanticModel) -> None:
        parts = await all_parts(model, ModelRequest(messages=(UserMessage(content="add"),), tools=(ADD,)))
        assert "".join(part.text for part in parts if isinstance(part, ReasoningPart)) == "Let me think."
        state = end_of(parts).state
        history = (
            UserMessage(content="add"),
            AssistantMessage(
                text=text_of(parts), calls=(ToolCall(call_id="c", name="add", arguments={"a": 1, "b": 2}),), state=state
            ),
            ToolMessage(call_id="c", name="add", content="3"),
        )
        await all_parts(model, ModelRequest(messages=history, tools=(ADD,)))
        answer = server.exchanges[1].body["messages"][1]["content"]
        assert [block["type"] for block in answer] == ["thinking", "text", "tool_use"]
        assert answer[0]["signature"] == "signed-1-0"
        assert answer[1]["text"] == "I add."

    reply = Reply(reasoning="Let me think.", text="I add.", calls=[("add", {"a": 1, "b": 2})])
    with_server(work, [reply, Reply(text="3.")], "anthropic:claude-test", monkeypatch)


def test_sealed_reasoning_goes_back_before_the_call_that_it_led_to(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(server: ModelServer, model: PydanticModel) -> None:
        parts = await all_parts(model, ModelRequest(messages=(UserMessage(content="add"),), tools=(ADD,)))
        call = ToolCall(call_id="c", name="add", arguments={"a": 1, "b": 2})
        history = (
            UserMessage(content="add"),
            AssistantMessage(text=text_of(parts), calls=(call,), state=end_of(parts).state),
            ToolMessage(call_id="c", name="add", content="3"),
        )
        await all_parts(model, ModelRequest(messages=history, tools=(ADD,)))
        _, reasoning, asked, result = server.exchanges[1].body["input"]
        assert (reasoning["type"], reasoning["encrypted_content"]) == ("reasoning", "sealed-rs_1_0")
        assert (asked["type"], asked["id"], asked["call_id"]) == ("function_call", "fc_1_1", "call_1_0")
        assert result["call_id"] == "call_1_0"

    reply = Reply(reasoning="Let me think.", calls=[("add", {"a": 1, "b": 2})])
    with_server(work, [reply, Reply(text="3.")], "openai-responses:gpt-5", monkeypatch)


def test_attachments_go_along_and_what_the_provider_cannot_take_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"a" * 64: b"\x89PNG\r\n", "b" * 64: b"\x00\x01"}

    async def load(digest: str) -> bytes:
        if digest not in files:
            raise UnknownAttachment(digest)
        return files[digest]

    async def work(server: ModelServer, model: PydanticModel) -> None:
        image = Attachment(digest="a" * 64, media_type="image/png", name="cat.png", size_bytes=6)
        odd = Attachment(digest="b" * 64, media_type="application/x-odd", name="odd.bin", size_bytes=2)
        ask = UserMessage(content="what is this?", attachments=(image,))
        await all_parts(model, ModelRequest(messages=(ask,)), attachment=load)
        assert "iVBORw0K" in str(server.exchanges[0].body)
        gone = Attachment(digest="c" * 64, media_type="image/png", name="gone.png")
        ask = UserMessage(content="and this?", attachments=(image, odd, gone))
        await all_parts(model, ModelRequest(messages=(ask,)), attachment=load)
        seen = str(server.exchanges[1].body)
        assert "iVBORw0K" in seen
        assert "'odd.bin': application/x-odd, 2 bytes" in seen
        assert "'gone.png'" in seen

    with_server(work, [Reply(text="A cat."), Reply(text="Odd.")], name, monkeypatch)


def test_what_a_stopped_run_left_is_a_request_that_providers_take(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(server: ModelServer, model: PydanticModel) -> None:
        history = (
            UserMessage(content="  "),
            AssistantMessage(text=" \n", partial=True),
            UserMessage(content="again"),
            AssistantMessage(text="I beg", partial=True),
            UserMessage(content="one"),
            UserMessage(content="two"),
        )
        assert text_of(await all_parts(model, ModelRequest(messages=history))) == "Here."

    with_server(work, [Reply(text="Here.")], name, monkeypatch)


def test_inside_a_lifespan_a_connection_serves_several_requests(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(server: ModelServer, model: PydanticModel) -> None:
        async with model.lifespan():
            for _ in range(3):
                await all_parts(model)
            assert (server.opened, server.connected) == (1, 1)
        await server.disconnected()
        await all_parts(model)
        assert server.opened == 2

    with_server(work, [Reply(text="yes")] * 4, name, monkeypatch)


# ── interrupts ───────────────────────────────────────────────────────────────────────────────────────────────────────

WAITS = {
    "for the headers": Reply(headers_s=math.inf),
    "for the first piece": Reply(text="never", pace_s=math.inf),
    "for the next piece": Reply(text="some words and then none", fault="stall", after=2),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_cancelled_request_closes_its_connection(wait: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(server: ModelServer, model: PydanticModel) -> None:
        loop = asyncio.get_running_loop()
        asking = loop.create_task(all_parts(model))
        exchange = await server.requests(1)
        await exchange.until(pieces=WAITS[wait].after if WAITS[wait].fault else 0)
        asked_at = loop.time()
        asking.cancel()
        await exchange.until(ended=True)
        assert exchange.ended == "closed"
        assert exchange.ended_at - asked_at < 1  # the measured time is far below; it is told by the benchmark
        with pytest.raises(asyncio.CancelledError):
            await asking
        await server.disconnected()
        assert len(server.exchanges) == 1

    with_server(work, [WAITS[wait]], name, monkeypatch)


def test_leaving_between_two_pieces_closes_the_connection(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(server: ModelServer, model: PydanticModel) -> None:
        async with model.stream(ASK) as parts:
            async for _ in parts:
                break
        await server.exchanges[0].until(ended=True)
        assert server.exchanges[0].ended == "closed"

    with_server(work, [Reply(text="many words " * 100, pace_s=0.01)], name, monkeypatch)


def test_the_readers_own_error_is_not_taken_for_the_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(server: ModelServer, model: PydanticModel) -> None:
        with pytest.raises(LookupError, match="mine"):
            async with model.stream(ASK) as parts:
                async for _ in parts:
                    raise LookupError("mine")
        await server.exchanges[0].until(ended=True)
        assert server.exchanges[0].ended == "closed"

    with_server(work, [Reply(text="many words " * 100, pace_s=0.01)], name, monkeypatch)


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────────

FAILURES: dict[str, tuple[Reply, int | None, bool, str]] = {
    "too many requests": (Reply(status=429, retry_after_s=7), 429, True, "wait 7 s"),
    "a server error": (Reply(status=500), 500, True, "retry later"),
    "an overloaded server": (Reply(status=529), 529, True, "retry later"),
    "a bad request": (Reply(status=400, message="no such setting"), 400, False, "no such setting"),
    "an unknown model": (Reply(status=404), 404, False, "check the model's name"),
    "a cut stream": (Reply(text="some words", fault="cut"), None, True, "check the network"),
    "a cut call": (Reply(calls=[("add", {"a": 1})], fault="cut", after=0), None, True, "check the network"),
    "a short stream": (Reply(text="some words", fault="short"), None, True, "stopped in the middle"),
    "a short call": (Reply(calls=[("add", {"a": 1})], fault="short"), None, True, "stopped in the middle"),
    "garbage": (Reply(text="some words", fault="garbage"), None, True, "decode"),
    "garbage at once": (Reply(text="some words", fault="garbage", after=0), None, True, "decode"),
    "an error in the stream": (Reply(text="some words", fault="error"), None, True, "in the middle"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_says_what_it_was_and_whether_to_try_again_and_is_not_repeated_here(
    case: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply, status, again, words = FAILURES[case]

    async def work(server: ModelServer, model: PydanticModel) -> None:
        with pytest.raises(ModelFailed) as failed:
            await all_parts(model)
        error = failed.value
        assert name in str(error) and words in str(error), str(error)
        assert (error.retry_after_s is not None) is again, str(error)
        if status is not None:
            assert error.provider_status == status
        if reply.retry_after_s is not None:
            assert error.retry_after_s == reply.retry_after_s
        assert len(server.exchanges) == 1
        assert text_of(await all_parts(model)) == "Fine again."

    with_server(work, [reply, Reply(text="Fine again.")], name, monkeypatch)


def test_a_key_that_is_refused_names_its_variable_and_is_not_shown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(server: ModelServer, model: PydanticModel) -> None:
        variable = f"{provider_of(name)}_API_KEY"
        monkeypatch.setenv(variable, "sk-very-secret")
        with pytest.raises(ModelFailed, match=f"set {variable} to a valid key") as failed:
            await all_parts(pydantic_model(name))
        assert failed.value.provider_status == 401
        assert failed.value.retry_after_s is None
        monkeypatch.setenv(variable, "Incorrect API")  # the server's answer has these words: as if it told the key
        with pytest.raises(ModelFailed) as failed:
            await all_parts(pydantic_model(name))
        assert "Incorrect API" not in str(failed.value)

    with_server(work, [], name, monkeypatch, key="sk-the-right-one")


def test_a_server_that_is_not_there_is_a_failure_to_connect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(server: ModelServer, model: PydanticModel) -> None:
        monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
        monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://127.0.0.1:9")
        with pytest.raises(ModelFailed, match=r"connection to .* failed") as failed:
            await all_parts(pydantic_model(name))
        assert failed.value.retry_after_s is not None

    with_server(work, [], name, monkeypatch)


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_missing_key_names_its_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = provider_of(name)
    monkeypatch.delenv(f"{provider}_BASE_URL", raising=False)
    monkeypatch.delenv(f"{provider}_API_KEY", raising=False)
    with pytest.raises(ConfigurationError, match=f"set .*{provider}_API_KEY"):
        pydantic_model(name)


@pytest.mark.parametrize("wrong", ["nobody:gpt", "openai:"])
def test_a_provider_that_does_not_exist_is_named(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.agents.model_lookup import find_model

    with pytest.raises(ConfigurationError, match=wrong):
        find_model(wrong)


@pytest.mark.parametrize("missing", ["pydantic_ai.exceptions", "anthropic"])
def test_a_missing_extra_names_the_command(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "any")
    for module in [name for name in sys.modules if name.startswith(("pydantic_ai.providers.anthropic", missing))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtra, match=r"pip install 'holdfast-agents\[models\]'"):
        pydantic_model("anthropic:claude-test")


def test_a_provider_whose_package_is_missing_names_the_command() -> None:
    with pytest.raises(ConfigurationError, match=r"pip install 'pydantic-ai-slim\[mistral\]'"):
        pydantic_model("mistral:large")
