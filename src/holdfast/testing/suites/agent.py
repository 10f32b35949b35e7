"""Conformance suite for agents: run it on an adapter for another framework.

With pytest::

    SUBJECT = AgentSubject(make=lambda step: my_adapter(MyGraph(step)))

    @pytest.mark.parametrize("check", AGENT_CHECKS, ids=lambda check: check.__name__)
    def test_my_adapter_conforms(check):
        run_agent_check(check, SUBJECT)

Each check gives the agent a step, which may wait, fail, block a thread or start a program, and then tests that
Holdfast's promises hold. Each check creates its own hosts, on in-memory stores.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence

from holdfast.protocol.events import RunFinished, TextDelta, ToolFinished
from holdfast.runtime import current_interrupt, current_scope
from holdfast.testing.detectors.leaks import Inventory
from holdfast.testing.suites.agent_crashes import CRASH_CHECKS
from holdfast.testing.suites.agent_driver import AgentSubject, Bench, hosted, said, until, within
from holdfast.testing.suites.agent_stops import STOP_CHECKS
from holdfast.testing.suites.check_runner import not_offered, run_check

__all__ = ["AGENT_CHECKS", "AgentCheck", "run_agent_check"]

AgentCheck = Callable[[AgentSubject], Awaitable[None]]
"""A function that checks one rule for agents and raises `AssertionError` if the agent breaks the rule."""

_CHECKS: list[AgentCheck] = []
_MANY = 20
_SESSIONS = 5
_PATIENCE_S = 20.0


def run_agent_check(check: AgentCheck, subject: AgentSubject) -> None:
    """Run one check on a new event loop, for at most 30 seconds.

    Raises:
        AssertionError: if the agent breaks one of Holdfast's promises; a note on the error names the promise.
        TimeoutError: if the check takes longer.
        unittest.SkipTest: if the framework lacks the feature under test; test runners report the check as skipped.
    """
    run_check(check, subject, port="docs/how-to/conformance-suites.md")


def _check(check: AgentCheck) -> AgentCheck:
    _CHECKS.append(check)
    return check


@_check
async def a_message_is_answered_with_what_the_step_returned(subject: AgentSubject) -> None:
    """The step is called once for a message, with the message's text, and the answer ends with the step's result."""
    asked: list[str] = []

    async def step(text: str) -> str:
        asked.append(text)
        return said(text)

    async with hosted(subject.agent(step)) as bench:
        answer = await within(bench.session().ask("hello"), "the message should be answered")
        assert answer.endswith("result of hello"), f"the answer {answer!r} does not end with what the step returned"
        assert asked == ["hello"], f"the step got {asked}; one message 'hello' was sent"
        await bench.goes_on()


@_check
async def a_plain_step_runs_in_a_thread_of_the_run(subject: AgentSubject) -> None:
    """A step that is a plain function does not block the loop, and can read the run's interrupt."""
    loop_went_on = threading.Event()
    seen: list[object] = []

    def step(text: str) -> str:
        seen.append(current_interrupt())
        return said(text) if loop_went_on.wait(_PATIENCE_S) else "the loop stood still"

    async with hosted(subject.agent(step)) as bench:
        sent = await bench.session().send("hello")
        await until(lambda: bool(seen), "the step should begin")
        loop_went_on.set()
        settled = await within(bench.session().wait(sent.message_id), "the message should be answered")
        assert settled.text.endswith("result of hello"), f"the answer is {settled.text!r}"
        assert seen[0] is not None, "the step's thread sees no interrupt; carry the context into it (contextvars)"


@_check
async def the_log_says_what_the_answer_says(subject: AgentSubject) -> None:
    """The text pieces in the log add up to the run's answer, and every tool call that started has ended."""

    async def step(text: str) -> str:
        return said(text)

    async with hosted(subject.agent(step)) as bench:
        answer = await within(bench.session().ask("hello"), "the message should be answered")
        events = await bench.log()
        [finished] = [event for event in events if isinstance(event, RunFinished)]
        pieces = "".join(e.text for e in events if isinstance(e, TextDelta) and e.run_id == finished.run_id)
        assert pieces == answer == finished.text, f"readers saw {pieces!r}, the run's text is {finished.text!r}"
        started = sum(event.kind == "tool.started" for event in events)
        ended = [event for event in events if isinstance(event, ToolFinished)]
        assert len(ended) == started, f"{started} calls began and {len(ended)} ended"
        await bench.sound()


@_check
async def an_error_of_the_step_is_told_and_hurts_nothing_else(subject: AgentSubject) -> None:
    """If a step fails, the log contains its error, the run's message is settled, and the next run works."""

    async def step(text: str) -> str:
        if text == "fail":
            raise ValueError("the step is broken")
        return said(text)

    async with hosted(subject.agent(step)) as bench:
        sent = await bench.session().send("fail")
        settled = await within(bench.session().wait(sent.message_id), "the message should be settled")
        told = [str(getattr(event, "error", None) or "") for event in await bench.log()]
        assert any("the step is broken" in one for one in told), "the log does not contain the step's error"
        assert settled.state in ("failed", "completed"), f"the message is {settled.state}"
        await bench.goes_on()


@_check
async def messages_that_come_at_once_are_all_answered_one_after_the_other(subject: AgentSubject) -> None:
    """If many messages are sent to one session concurrently, none is lost, none runs twice, and no two runs overlap."""
    inside: set[str] = set()
    done: list[str] = []

    async def step(text: str) -> str:
        inside.add(text)
        assert len(inside) == 1, f"steps of one session at the same time: {sorted(inside)}"
        await asyncio.sleep(0.001)
        inside.discard(text)
        done.append(text)
        return said(text)

    async with hosted(subject.agent(step)) as bench:
        sends = (bench.session().send(f"number {n}") for n in range(_MANY))
        receipts = await within(asyncio.gather(*sends), "all messages should be accepted")
        waits = (bench.session().wait(receipt.message_id) for receipt in receipts)
        settled = await within(asyncio.gather(*waits), "all messages should be settled")
        assert [one.state for one in settled] == ["completed"] * _MANY, f"they are {[one.state for one in settled]}"
        in_order = [f"number {n}" for n, _ in sorted(enumerate(receipts), key=lambda one: one[1].seq)]
        assert done == in_order, f"the steps ran for {done}; accepted: {in_order}"
        for n, one in enumerate(settled):
            assert one.text.endswith(f"result of number {n}"), f"message {n} got the answer {one.text!r}"
        await bench.sound()


@_check
async def sessions_do_not_wait_for_one_another(subject: AgentSubject) -> None:
    """Runs of different sessions overlap in time, and each gets its own answer."""
    inside: set[str] = set()
    release = asyncio.Event()

    async def step(text: str) -> str:
        inside.add(text)
        await release.wait()
        return said(text)

    async with hosted(subject.agent(step)) as bench:
        sent = [await bench.session(f"s{n}").send(f"number {n}") for n in range(_SESSIONS)]
        await until(lambda: len(inside) == _SESSIONS, f"{_SESSIONS} sessions should work at the same time")
        release.set()
        for n, receipt in enumerate(sent):
            settled = await within(bench.session(f"s{n}").wait(receipt.message_id), "all should be answered")
            assert settled.text.endswith(f"result of number {n}"), f"session {n} got the answer {settled.text!r}"


@_check
async def what_a_step_starts_belongs_to_its_run(subject: AgentSubject) -> None:
    """A task that the step leaves running ends with the run."""
    left: list[asyncio.Task[bool]] = []
    scopes: list[object] = []

    async def step(text: str) -> str:
        scopes.append(current_scope())
        if text == "leave":
            left.append(asyncio.create_task(asyncio.sleep(1000.0, True), name="left behind"))
        return said(text)

    async with hosted(subject.agent(step)) as bench:
        await within(bench.session().ask("leave"), "the message should be answered")
        assert scopes[0] is not None, "the step runs outside of its run's scope; keep the context (contextvars)"
        assert left[0].done(), "the run has ended, but a task that its step started has not"
        await bench.goes_on()


@_check
async def runs_leave_nothing_behind(subject: AgentSubject) -> None:
    """Ended and interrupted runs leave no task, thread, descriptor or process behind."""

    async def step(text: str) -> str:
        if text == "wait":
            await asyncio.sleep(1000.0)
        return said(text)

    async def use(bench: Bench) -> None:
        await within(bench.session().ask("hello"), "the message should be answered")
        await bench.session().send("wait")
        await within(bench.session().interrupt("enough"), "the interrupt should answer")

    agent = subject.agent(step)
    async with hosted(agent) as bench:  # warm-up: makes what exists once per process
        await use(bench)
    before = Inventory(("tasks", "threads", "fds", "processes"))
    async with hosted(agent) as bench:
        for _ in range(5):
            await use(bench)
    left = await asyncio.to_thread(before.left_since, patience_s=5.0)
    assert not left, "left behind: " + "; ".join(left)


@_check
async def the_next_run_knows_what_was_said(subject: AgentSubject) -> None:
    """Later runs of a session see the session's conversation; runs of other sessions do not."""
    if subject.recall is None:
        raise not_offered("conversation history in later runs")
    async with hosted(subject.recall()) as bench:
        await within(bench.session("one").ask("the word is lighthouse"), "the message should be answered")
        answer = await within(bench.session("one").ask("what was it?"), "the message should be answered")
        assert "lighthouse" in answer, f"the next run answers {answer!r}, without the earlier 'lighthouse'"
        other = await within(bench.session("two").ask("what was it?"), "the message should be answered")
        assert "lighthouse" not in other, "another session's run sees the conversation of the first"
        await bench.sound("one")


AGENT_CHECKS: Sequence[AgentCheck] = (*_CHECKS, *STOP_CHECKS, *CRASH_CHECKS)
