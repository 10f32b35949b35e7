"""Agents with a scripted model for tests, hosts for them on virtual time, and what must hold of any session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from holdfast import Agent, Host, Settings, tool
from holdfast.agents import Call
from holdfast.agents.scripted import Pause, ScriptedAnswer, ScriptedModel
from holdfast.errors import UnknownQuestion
from holdfast.host.session import Session
from holdfast.protocol.events import Event, decode_event
from holdfast.protocol.messages import Entry
from holdfast.protocol.model import CallPart, ModelRequest, UserMessage, conversation, with_user
from holdfast.storage import MemoryStore
from holdfast.storage.port import Store
from holdfast.testing import VirtualClock, run_virtual
from tests.protocol.rules import check_request

QUICK = Settings(
    grace_s=1.0, abandon_after_s=1.0, quiet_s=0.01, max_wait_s=0.05, drain_timeout_s=60.0, question_ttl_s=3600.0
)


def call(name: str, **arguments: Any) -> CallPart:
    """A call in a model's answer."""
    return CallPart(name=name, arguments=arguments)


def model(script: Any, **options: Any) -> ScriptedModel:
    """A scripted model that refuses requests which real providers would refuse."""

    def answer(request: ModelRequest) -> ScriptedAnswer:
        check_request(request.messages)
        found: ScriptedAnswer = steps(script)(request) if not callable(script) else script(request)
        return found

    return ScriptedModel(answer, **options)


def steps(answers: Iterable[Any]) -> Callable[[ModelRequest], ScriptedAnswer]:
    """Give these answers one after the other, from the last thing that the user said on; then a last word."""
    listed = list(answers)

    def answer(request: ModelRequest) -> ScriptedAnswer:
        said = 0
        for message in reversed(request.messages):
            if isinstance(message, UserMessage):
                break
            said += type(message).__name__ == "AssistantMessage"
        return listed[said] if said < len(listed) else "That is all."

    return answer


@tool(idempotent=True)
async def nap(number: int = 0) -> str:
    """Takes a moment."""
    await asyncio.sleep(0.01)
    return f"napped {number}"


@tool(idempotent=True)
async def nested(call: Call) -> str:
    """Makes a call of its own, says something, and cleans up when it is stopped."""
    try:
        await call.output("working")
        first = await call.run.call(nap.work, 1, name="inner", idempotent=True)
        await asyncio.sleep(0.005)
    finally:
        await asyncio.sleep(0.001)
    return f"nested {first}"


@tool(idempotent=True)
async def failing() -> None:
    """Fails."""
    await asyncio.sleep(0.002)
    raise ValueError("it failed")


@tool(idempotent=True, approval=True)
async def careful(text: str) -> str:
    """Needs approval."""
    await asyncio.sleep(0.002)
    return f"careful with {text}"


def busy_agent() -> tuple[Agent, list[ScriptedModel]]:
    """An agent that uses all that the loop has, and its models."""
    child_model = model(
        [[Pause(0.001), "I call. ", call("nap", number=7)], [Pause(0.001), "The child is done."]], name="child model"
    )
    child = Agent(name="child", model=child_model, tools=[nap], description="A child.")
    script = [
        [
            Pause(0.001),
            "First ",
            "this.",
            call("nap", number=1),
            call("nested"),
            call("nothing"),
            CallPart(name="nap", arguments="{broken"),
            call("failing"),
        ],
        [Pause(0.001), call("child", task="do it"), call("child", task="and this"), call("nap", number=2)],
        [Pause(0.001), "Done", Pause(0.001), "."],
    ]
    own = model(script, name="own model")
    return Agent(name="busy", model=own, tools=[nap, nested, failing, child]), [own, child_model]


def on_host(
    scenario: Callable[[Host], Coroutine[Any, Any, None]],
    *agents: Agent,
    store: Store | None = None,
    settings: Settings = QUICK,
) -> None:
    """Run the scenario on a host with these agents, in memory and on virtual time."""

    async def main() -> None:
        async with Host(agents=agents, store=store or MemoryStore(), settings=settings, clock=VirtualClock()) as host:
            await scenario(host)

    run_virtual(main())


async def log_of(host: Host, key: str) -> list[Event]:
    """All events of a session."""
    number = (await host.session(key).info()).number
    return [decode_event(event) for event in await host.store.read_events(number, after=0, limit=100_000)]


async def approve_all(session: Session) -> None:
    """Approve whatever is asked, until the session has nothing to do."""
    while True:
        view = await session.info()
        if view.state in ("idle", "deleted") and not view.waiting:
            return
        for question in await session.questions():
            try:
                await session.approve(question)
            except UnknownQuestion:
                pass
        await asyncio.sleep(0.05)


def check_entries(entries: list[Entry]) -> None:
    """Each call has one result, after it; the next request is valid."""
    open_calls: list[str | None] = []
    for entry in entries:
        if entry.role == "tool_call":
            assert entry.call_id not in open_calls
            open_calls.append(entry.call_id)
        elif entry.role == "tool_result":
            open_calls.remove(entry.call_id)
    assert not open_calls, "a call without a result"
    check_request(with_user(conversation(entries), UserMessage(content="next")))
