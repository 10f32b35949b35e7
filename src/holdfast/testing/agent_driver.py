"""What the checks of agents work with (`holdfast.testing.agent_suite`): the subject, a host around it, its log."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.agents.agent import Agent, AgentLike, as_agent
from holdfast.errors import HoldfastError
from holdfast.host import Host
from holdfast.host.session import Session
from holdfast.protocol.events import (
    Event,
    MessageAccepted,
    MessageSettled,
    RunFinished,
    RunRestarted,
    RunStarted,
    TextDelta,
    ToolFinished,
    ToolStarted,
    decode_event,
)
from holdfast.settings import Settings
from holdfast.storage import MemoryStore
from holdfast.storage.port import Store
from holdfast.testing.suite import not_offered

__all__ = ["AgentSubject", "Bench", "Step", "hosted", "said", "until", "within"]

Step = Callable[[str], Any]
"""What the agent calls, async or not: takes the run's text, and returns the answer."""

_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSubject:
    """Makes the agents that a suite tries.

    Parameters:
        make: gets a step (a function named ``step`` with one parameter ``text: str``), and returns an agent that calls
            it once for each message, with the message's text, and whose answer ends with what the step returned.
        steps: ``async`` where the framework takes no plain functions.
        recall: returns an agent that answers with everything that was said in the session before; None where the
            framework keeps no conversation.
    """

    make: Callable[[Step], AgentLike]
    steps: Literal["async", "both"] = "both"
    recall: Callable[[], AgentLike] | None = None

    def agent(self, step: Step) -> Agent:
        """The agent for a step. Raises `unittest.SkipTest` for a plain one where there are none."""
        if self.steps == "async" and not inspect.iscoroutinefunction(step):
            raise not_offered("plain functions")
        return as_agent(self.make(step))


@contextlib.asynccontextmanager
async def hosted(agent: AgentLike, *, store: Store | None = None, **settings: Any) -> AsyncIterator[Bench]:
    """A host with that agent, on a store in memory unless another is given; when a check fails it closes at once."""
    chosen = Settings(**{"grace_s": 2.0, "kill_after_s": 1.0, "drain_s": 0.0, **settings})
    async with Host(agent, store=store or MemoryStore(), settings=chosen) as host:
        yield Bench(host)


class Bench:
    """A host with one agent, and what a check asks of its sessions."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def session(self, key: str = "s") -> Session:
        """A session of the one principal."""
        return self.host.session(key)

    async def log(self, key: str = "s") -> list[Event]:
        """All events of the session, oldest first, after a look at whether they make sense."""
        found = await self.host.store.find_session("local", key)
        if found is None:
            return []
        events = [decode_event(one) for one in await self.host.store.read_events(found[0], after=0, limit=10_000)]
        _check_log(events)
        return events

    async def sound(self, key: str = "s") -> None:
        """The log and the transcript are valid."""
        await self.log(key)
        entries = await self.session(key).transcript()
        for n, entry in enumerate(entries):
            if entry.role == "tool_call":
                results = [one for one in entries[n:] if one.role == "tool_result" and one.call_id == entry.call_id]
                assert len(results) == 1, f"the call {entry.call_id} has {len(results)} results in the transcript"
            assert entry.n == n + 1, f"entry {n + 1} of the transcript has the number {entry.n}"

    async def goes_on(self, key: str = "s") -> None:
        """The session's next run works, and what is stored of it is valid."""
        text = await within(self.session(key).ask("again"), "the session's next run was to answer")
        assert text.endswith("said again"), f"the next run answers {text!r}, and the step had returned 'said again'"
        await self.sound(key)


def said(text: str) -> str:
    """What the steps of the checks return where nothing hinders them."""
    return f"said {text}"


async def until(seen: Callable[[], bool], what: str) -> None:
    """Wait until it came true. Raises `AssertionError` that says what did not."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE_S):
            while not seen():  # noqa: ASYNC110 - what it looks at may be changed by a thread
                await asyncio.sleep(0.002)
    assert seen(), f"{what}, and it did not in {_PATIENCE_S:g} s"


async def within(answer: Awaitable[Any], what: str) -> Any:
    """The answer. Raises `AssertionError` if there is none in time, or a refusal or failure of Holdfast's instead."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await answer
    except TimeoutError:
        raise AssertionError(f"{what}, and it did not in {_PATIENCE_S:g} s") from None
    except HoldfastError as error:
        raise AssertionError(f"{what}, and instead there is {type(error).__name__}: {error}") from error


def _check_log(events: list[Event]) -> None:
    """Runs do not overlap, each ends once; each message is settled once; results belong to calls."""
    on: str | None = None
    open_messages: set[str] = set()
    calls: set[str] = set()
    for event in events:
        match event:
            case MessageAccepted():
                open_messages.add(event.message_id)
            case MessageSettled():
                assert event.message_id in open_messages, f"message {event.message_id} is settled twice"
                open_messages.discard(event.message_id)
            case RunStarted():
                assert on is None, f"run {event.run_id} starts while run {on} is on"
                on = event.run_id
            case RunRestarted():
                calls.clear()
            case RunFinished():
                assert on == event.run_id, f"run {event.run_id} ends while {on} is on"
                on = None
                calls.clear()
            case ToolStarted():
                assert event.call_id not in calls, f"call {event.call_id} begins twice"
                calls.add(event.call_id)
            case ToolFinished():
                assert event.call_id in calls, f"call {event.call_id} ends, and did not begin or ended before"
                calls.discard(event.call_id)
            case TextDelta():
                mine = on is not None and event.run_id.startswith(on)  # a child's id begins with its run's
                assert mine, f"run {event.run_id} says {event.text!r} while {on} is on"
            case _:
                pass
