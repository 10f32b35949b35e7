"""Checks of the agents' suite for crashes and restarts: the host may end after any event of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from holdfast.clock import system_clock
from holdfast.protocol.events import Event, ToolFinished, ToolStarted, encode_event
from holdfast.storage import MemoryStore
from holdfast.storage.port import Send
from holdfast.testing.suites.agent_driver import AgentSubject, hosted, said, until, within

__all__ = ["CRASH_CHECKS"]

_CHECKS: list[Callable[[AgentSubject], Awaitable[None]]] = []
_OF_THE_HOST = ("message.", "run.")
"""Prefixes of the kinds of events that the host writes, not the agent."""


def _check(check: Callable[[AgentSubject], Awaitable[None]]) -> Callable[[AgentSubject], Awaitable[None]]:
    _CHECKS.append(check)
    return check


async def _crashed(agent: str, run_id: str, written: Sequence[Event]) -> MemoryStore:
    """Return a store whose host ended in the middle of a run that had written the events in ``written``."""
    store = MemoryStore()
    at = system_clock.now()
    await store.open(node_id="n_gone", at=at)
    sent = await store.send(
        Send(
            principal="local",
            key="s",
            agent=agent,
            default_agent=agent,
            message_id="m_first",
            content="first",
            policy="queue",
            at=at,
            run_id=run_id,
        )
    )
    assert sent.claim is not None
    if written:
        await store.append(sent.claim.lease, [encode_event(event) for event in written])
    await store.close()
    return store


@_check
async def a_crash_at_any_event_settles_the_message_and_repeats_no_effect(subject: AgentSubject) -> None:
    """After a crash at any event, the message is settled once, no step with a logged result is repeated, and the
    session keeps working."""
    made: list[str] = []

    async def step(text: str) -> str:
        made.append(text)
        return said(text)

    agent = subject.agent(step)
    async with hosted(agent) as bench:
        sent = await bench.session().send("first")
        whole = await within(bench.session().wait(sent.message_id), "the message should be settled")
        assert sent.run_id is not None
        events = [event for event in await bench.log() if not event.kind.startswith(_OF_THE_HOST)]
    for cut in range(len(events) + 1):
        made.clear()
        written = events[:cut]
        place = f"after a crash behind {written[-1].kind if written else 'run.started'} (event {cut} of {len(events)})"
        store = await _crashed(agent.name, sent.run_id, written)
        async with hosted(agent, store=store) as bench:
            settled = await within(bench.session().wait("m_first"), f"{place} the message should be settled")
            assert settled.state in ("completed", "interrupted"), f"{place} the message is {settled.state}"
            if settled.state == "completed":
                assert agent.replayable, f"{place} the run was resumed, but its agent is not replayable"
                assert settled.text.endswith("result of first"), f"{place} the answer is {settled.text!r}"
            begun = [event for event in written if isinstance(event, ToolStarted) and not event.idempotent]
            ended = [event for event in written if isinstance(event, ToolFinished)]
            if begun or ended:
                assert not made, f"{place} the step was repeated although it had begun"
            if cut == len(events) and agent.replayable:
                assert settled.state == "completed", f"{place} nothing was left to do, but the message is interrupted"
                assert settled.text == whole.text, f"{place} the answer is {settled.text!r}, not {whole.text!r}"
            made.clear()
            await bench.goes_on()


@_check
async def a_host_that_closes_in_a_run_leaves_a_session_that_goes_on(subject: AgentSubject) -> None:
    """A drain suspends or interrupts the run; the next host settles the run's message and accepts new messages."""
    inside: list[str] = []
    wait = True

    async def step(text: str) -> str:
        inside.append(text)
        if wait:
            await asyncio.sleep(1000.0)
        return said(text)

    agent = subject.agent(step)
    store = MemoryStore()
    async with hosted(agent, store=store, drain_timeout_s=0.0) as bench:
        sent = await bench.session().send("first")
        await until(lambda: bool(inside), "the step should begin")
    wait = False
    async with hosted(agent, store=store) as bench:
        settled = await within(bench.session().wait(sent.message_id), "the message should be settled after the restart")
        assert settled.state in ("completed", "interrupted"), f"after the restart the message is {settled.state}"
        await bench.goes_on()


CRASH_CHECKS: Sequence[Callable[[AgentSubject], Awaitable[None]]] = tuple(_CHECKS)
