"""The model server refuses what real providers refuse, tells what became of each answer, and ends whatever is open."""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest

from holdfast.agents.scripted import ScriptedModel
from holdfast.protocol.model import CallPart, ModelRequest, ToolMessage, UserMessage
from holdfast.testing.model_server import ModelServer, Reply, Script
from holdfast.testing.model_server.wires import ChatWire, MessagesWire, ResponsesWire, WireFormat

CHAT = {
    "model": "m",
    "stream": True,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "add"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "3"},
    ],
}
RESPONSES = {
    "model": "m",
    "stream": True,
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": "add"},
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "3"},
    ],
}
MESSAGES = {
    "model": "m",
    "stream": True,
    "max_tokens": 100,
    "system": "Be brief.",
    "messages": [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "add", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "3"}]},
    ],
}
GOOD: dict[type[WireFormat], dict[str, Any]] = {ChatWire: CHAT, ResponsesWire: RESPONSES, MessagesWire: MESSAGES}
PATHS = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/messages": MESSAGES}


def put(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The body with another value at a path such as ``messages.0.content``; `...` takes it away."""
    changed = copy.deepcopy(body)
    place: Any = changed
    *names, last = [int(name) if name.lstrip("-").isdigit() else name for name in path.split(".")]
    for name in names:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return changed


@pytest.mark.parametrize("kind", GOOD, ids=lambda kind: kind.__name__)
def test_a_good_request_is_read_alike_in_all_protocols(kind: type[WireFormat]) -> None:
    wire = kind(GOOD[kind], 1)
    assert wire.objection() is None
    request = wire.request()
    assert request.instructions == "Be brief."
    user, asked, result = request.messages
    assert isinstance(user, UserMessage) and user.content == "add"
    assert [(call.name, call.arguments) for call in getattr(asked, "calls", ())] == [("add", {})]
    assert isinstance(result, ToolMessage) and (result.name, result.content) == ("add", "3")


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        (ChatWire, "stream", False),
        (ChatWire, "messages", []),
        (ChatWire, "messages.3", ...),
        (ChatWire, "messages.2", ...),
        (ChatWire, "messages.3.tool_call_id", "b"),
        (ChatWire, "messages.2.tool_calls.0.id", "x" * 41),
        (ChatWire, "messages.2.tool_calls.0.function.name", "a b"),
        (ChatWire, "messages.2.tool_calls.0.function.arguments", '{"a": '),
        (ChatWire, "messages.2.tool_calls.0.function.arguments", "[1]"),
        (ChatWire, "messages.2.tool_calls", []),
        (ChatWire, "messages.1.content", ""),
        (ChatWire, "messages.1.role", "nobody"),
        (ChatWire, "messages.1", {"content": "no role"}),
        (ResponsesWire, "input", []),
        (ResponsesWire, "input.2", ...),
        (ResponsesWire, "input.1", ...),
        (ResponsesWire, "input.1.arguments", "no"),
        (ResponsesWire, "input.1.name", "a b"),
        (ResponsesWire, "input.1.call_id", "x" * 65),
        (ResponsesWire, "input.0", {"type": "reasoning", "id": "rs", "summary": []}),
        (ResponsesWire, "input.0.content", ""),
        (MessagesWire, "max_tokens", ...),
        (MessagesWire, "messages.2", ...),
        (MessagesWire, "messages.1", ...),
        (MessagesWire, "messages.0", ...),
        (MessagesWire, "messages.0.content", "  "),
        (MessagesWire, "messages.1.content.0.id", "a.b"),
        (MessagesWire, "messages.1.content.0.input", "{}"),
        (MessagesWire, "messages.1.content.0", {"type": "thinking", "thinking": "…"}),
        (MessagesWire, "messages.2.content.0.tool_use_id", "b"),
    ],
)
def test_what_a_provider_refuses_is_refused(kind: type[WireFormat], path: str, value: Any) -> None:
    objection = kind(put(GOOD[kind], path, value), 1).objection()
    assert objection is not None


def with_client(
    work: Callable[[ModelServer, httpx2.AsyncClient], Awaitable[None]], script: Script, **options: Any
) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), ModelServer(script, **options) as server:
            async with httpx2.AsyncClient(base_url=server.url, trust_env=False) as client:
                await work(server, client)

    asyncio.run(main())


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_is_a_stream_of_events_that_are_json(path: str) -> None:
    async def work(server: ModelServer, client: httpx2.AsyncClient) -> None:
        answer = await client.post(path, json=PATHS[path])
        assert answer.headers["content-type"] == "text/event-stream"
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert all(json.loads(event) for event in events if event != "[DONE]")
        assert "Good" in answer.text and "day" in answer.text
        assert (server.exchanges[0].ended, server.exchanges[0].body) == ("whole", PATHS[path])

    with_client(work, [Reply(text="Good day.", piece=4)])


def test_a_model_may_be_the_script_and_a_function_too() -> None:
    async def work(server: ModelServer, client: httpx2.AsyncClient) -> None:
        assert "noon" in (await client.post("/v1/messages", json=MESSAGES)).text

    with_client(work, ScriptedModel(["It is noon.", "It is noon."]))
    with_client(work, lambda request: Reply(text=f"noon, {len(request.messages)}"))

    async def called(server: ModelServer, client: httpx2.AsyncClient) -> None:
        assert '"name":"add"' in (await client.post("/v1/chat/completions", json=CHAT)).text

    def answer(request: ModelRequest) -> CallPart:
        return CallPart(name="add", arguments={})

    with_client(called, ScriptedModel(answer))


def test_a_script_that_raises_is_told_of() -> None:
    def script(request: ModelRequest) -> Reply:
        raise LookupError("mine")

    async def refused(server: ModelServer, client: httpx2.AsyncClient) -> None:
        answer = await client.post("/v1/messages", json=MESSAGES)
        assert (answer.status_code, "LookupError: mine" in answer.text) == (500, True)

    with_client(refused, script)

    async def broken(server: ModelServer, client: httpx2.AsyncClient) -> None:
        answer = await client.post("/v1/messages", json=MESSAGES)
        assert "some words" in answer.text and "LookupError: mine" in answer.text

    with_client(broken, ScriptedModel([["some words", LookupError("mine")]] * 2))


def test_what_cannot_be_answered_has_a_status_that_says_why() -> None:
    async def work(server: ModelServer, client: httpx2.AsyncClient) -> None:
        key = {"authorization": "Bearer right"}
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 401
        assert (await client.post("/v1/chat/completions", content=b"[", headers=key)).status_code == 400
        assert (
            await client.post("/v1/chat/completions", json={**CHAT, "messages": []}, headers=key)
        ).status_code == 400
        assert (await client.get("/v1/models", headers=key)).status_code == 404
        used_up = await client.post("/v1/chat/completions", json=CHAT, headers=key)
        assert used_up.status_code == 500
        assert "all were given" in used_up.json()["error"]["message"]

    with_client(work, [], key="right")


@pytest.mark.parametrize("reply", [Reply(headers_s=math.inf), Reply(text="never", pace_s=math.inf)])
def test_it_ends_while_a_client_waits(reply: Reply) -> None:
    async def work(server: ModelServer, client: httpx2.AsyncClient) -> None:
        asking.append(asyncio.create_task(client.post("/v1/messages", json=MESSAGES)))
        await server.requests(1)
        assert server.connected == 1

    asking: list[asyncio.Task[httpx2.Response]] = []

    async def main() -> None:
        async with asyncio.timeout(60), httpx2.AsyncClient(trust_env=False) as client:
            async with ModelServer([reply]) as server:
                client.base_url = httpx2.URL(server.url)
                await work(server, client)
            assert server.connected == 0
            with pytest.raises(httpx2.TransportError):
                await asking[0]

    asyncio.run(main())


def test_a_wait_for_what_does_not_come_ends() -> None:
    async def work(server: ModelServer, client: httpx2.AsyncClient) -> None:
        with pytest.raises(TimeoutError):
            await server.requests(1, limit_s=0)

    with_client(work, [])
