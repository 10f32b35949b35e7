"""Test bench for the checks of agents (`holdfast.testing.suites.agent`): the subject and a host that runs it."""

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
from holdfast.testing.suites.check_runner import not_offered

__all__ = ["AgentSubject", "Bench", "Step", "hosted", "said", "until", "within"]

Step = Callable[[str], Any]
"""A sync or async function that takes the message's text and returns the answer; the agent calls this function."""

_PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSubject:
    """Factory for the agents that a suite tests.

    Parameters:
        make: called with a step, a function named ``step`` with one parameter ``text: str``; returns an agent. The
            agent must call the step once for each message, with the message's text, and its answer must end with the
            step's result.
        steps: ``async`` if the framework accepts only async functions; ``both`` if it also accepts plain functions.
        recall: returns an agent whose answer contains the whole earlier conversation of the session. None means that
            the framework keeps no conversation.
    """

    make: Callable[[Step], AgentLike]
    steps: Literal["async", "both"] = "both"
    recall: Callable[[], AgentLike] | None = None

    def agent(self, step: Step) -> Agent:
        """Return the agent for a step. Raise `unittest.SkipTest` if the step is plain but steps must be async."""
        if self.steps == "async" and not inspect.iscoroutinefunction(step):
            raise not_offered("plain functions")
        return as_agent(self.make(step))


@contextlib.asynccontextmanager
async def hosted(agent: AgentLike, *, store: Store | None = None, **settings: Any) -> AsyncIterator[Bench]:
    """Yield a `Bench` with a host that runs ``agent``; ``store`` defaults to a new in-memory store."""
    chosen = Settings(**{"grace_s": 2.0, "abandon_after_s": 1.0, "drain_timeout_s": 0.0, **settings})
    async with Host(agent, store=store or MemoryStore(), settings=chosen) as host:
        yield Bench(host)


class Bench:
    """Host with one agent, whose sessions a check can use and inspect."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def session(self, key: str = "s") -> Session:
        """Return the default principal's session with this key."""
        return self.host.session(key)

    async def log(self, key: str = "s") -> list[Event]:
        """Check that the session's events are consistent, and return all events, oldest first."""
        found = await self.host.store.find_session("local", key)
        if found is None:
            return []
        events = [decode_event(one) for one in await self.host.store.read_events(found[0], after=0, limit=10_000)]
        _check_log(events)
        return events

    async def sound(self, key: str = "s") -> None:
        """Check that the session's log and transcript are valid."""
        await self.log(key)
        entries = await self.session(key).transcript()
        for n, entry in enumerate(entries):
            if entry.role == "tool_call":
                results = [one for one in entries[n:] if one.role == "tool_result" and one.call_id == entry.call_id]
                assert len(results) == 1, f"the call {entry.call_id} has {len(results)} results in the transcript"
            assert entry.n == n + 1, f"entry {n + 1} of the transcript has the number {entry.n}"

    async def goes_on(self, key: str = "s") -> None:
        """Check that the session's next run answers and that the session's log and transcript are valid."""
        text = await within(self.session(key).ask("again"), "the session's next run should answer")
        assert text.endswith("result of again"), (
            f"the next run's answer {text!r} does not end with what the step returned"
        )
        await self.sound(key)


def said(text: str) -> str:
    """Return the default result of a step."""
    return f"result of {text}"


async def until(seen: Callable[[], bool], what: str) -> None:
    """Wait until `seen()` returns true. Raise `AssertionError` with the text `what` after a timeout."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE_S):
            while not seen():  # noqa: ASYNC110 - what it looks at may be changed by a thread
                await asyncio.sleep(0.002)
    assert seen(), f"{what}; timed out after {_PATIENCE_S:g} s"


async def within(answer: Awaitable[Any], what: str) -> Any:
    """Await and return the answer. Raise `AssertionError` if awaiting it times out or raises a `HoldfastError`."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await answer
    except TimeoutError:
        raise AssertionError(f"{what}; timed out after {_PATIENCE_S:g} s") from None
    except HoldfastError as error:
        raise AssertionError(f"{what}; got {type(error).__name__}: {error}") from error


def _check_log(events: list[Event]) -> None:
    """Check that runs do not overlap and end once, messages are settled once, and results belong to calls."""
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
                assert on is None, f"run {event.run_id} starts while run {on} is active"
                on = event.run_id
            case RunRestarted():
                calls.clear()
            case RunFinished():
                assert on == event.run_id, f"run {event.run_id} ends while {on} is active"
                on = None
                calls.clear()
            case ToolStarted():
                assert event.call_id not in calls, f"call {event.call_id} begins twice"
                calls.add(event.call_id)
            case ToolFinished():
                assert event.call_id in calls, f"call {event.call_id} ends twice, or without having begun"
                calls.discard(event.call_id)
            case TextDelta():
                mine = on is not None and event.run_id.startswith(on)  # a child's id begins with its run's
                assert mine, f"run {event.run_id} emits {event.text!r} while {on} is active"
            case _:
                pass
