"""Agents with one fault each: how foreign frameworks are hosted wrongly. Each names the check that finds it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any

from holdfast import Agent, Run
from holdfast import agent as made
from holdfast.protocol.events import ToolStarted
from holdfast.runtime import detached
from holdfast.testing import AgentSubject

FAULTS: dict[str, AgentSubject] = {}

Work = Callable[[Any, Run], Any]


def found_by(*checks: str, **more: Any) -> Callable[[Work], Work]:
    """The checks that find it."""

    def note(work: Work) -> Work:
        def make(step: Any) -> Agent:
            @made(**more)
            async def agent(run: Run) -> Any:
                return await work(step, run)

            return agent

        FAULTS.update(dict.fromkeys(checks, AgentSubject(make=make)))
        return work

    return note


@found_by("a_message_is_answered_with_what_the_step_returned")
async def forgets_to_answer(step: Any, run: Run) -> str:
    await run.call(step, run.text)
    return "done"


@found_by(
    "a_plain_step_runs_in_a_thread_of_the_run",
    "an_interrupt_is_seen_in_a_plain_step",
    "a_plain_step_that_does_not_listen_is_named_and_counts_no_more",
    "programs_of_a_plain_step_die_with_its_run",
)
async def keeps_threads_of_its_own(step: Any, run: Run) -> str:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[str] = loop.create_future()

    def answer(text: str) -> None:
        if not done.done():
            done.set_result(text)

    def work() -> None:
        text = step(run.text)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(answer, text)

    with detached():
        thread = threading.Thread(target=contextvars.Context().run, args=(work,), daemon=True)
        contextvars.Context().run(thread.start)
    return await done


@found_by("the_log_says_what_the_answer_says")
async def begins_calls_that_never_end(step: Any, run: Run) -> str:
    run.context.write(ToolStarted(run_id=run.run_id, call_id=f"{run.run_id}.0", name="step"))
    return str(await step(run.text))


@found_by("an_error_of_the_step_is_told_and_hurts_nothing_else")
async def swallows_errors(step: Any, run: Run) -> str:
    try:
        return str(await step(run.text))
    except ValueError:
        return ""


@found_by("messages_that_come_at_once_are_all_answered_one_after_the_other")
async def does_it_twice(step: Any, run: Run) -> str:
    await step(run.text)
    return str(await step(run.text))


_lock: list[asyncio.Lock] = []


@found_by("sessions_do_not_wait_for_one_another")
async def works_under_a_lock(step: Any, run: Run) -> str:
    _lock[:] = _lock or [asyncio.Lock()]
    async with _lock[0]:
        return str(await step(run.text))


@found_by(
    "what_a_step_starts_belongs_to_its_run",
    "an_interrupt_ends_an_async_step_at_once",
    "an_interrupt_at_any_turn_of_the_loop_ends_everything",
    "programs_of_an_async_step_die_with_its_run",
)
async def has_a_loop_of_tasks_of_its_own(step: Any, run: Run) -> str:
    with detached():
        task = asyncio.create_task(step(run.text), context=contextvars.Context())
    return str(await asyncio.shield(task))


_kept: list[asyncio.Task[None]] = []


@found_by("runs_leave_nothing_behind")
async def keeps_a_task_for_each_run(step: Any, run: Run) -> str:
    with detached():
        _kept.append(asyncio.create_task(asyncio.sleep(0), context=contextvars.Context()))
        _kept.append(asyncio.create_task(_for_ever(), context=contextvars.Context()))
    return str(await step(run.text))


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()


_working: set[asyncio.Task[Any]] = set()


@found_by("an_interrupt_of_one_session_leaves_the_others_alone")
async def cancels_everybody(step: Any, run: Run) -> str:
    task = asyncio.current_task()
    assert task is not None
    _working.add(task)
    try:
        return str(await step(run.text))
    except asyncio.CancelledError:
        for other in _working - {task}:
            other.cancel()
        raise
    finally:
        _working.discard(task)


_first: dict[str, str] = {}


@found_by("a_newer_message_takes_the_place_of_a_run")
async def answers_with_what_it_was_asked_first(step: Any, run: Run) -> str:
    return str(await step(_first.setdefault(run.session_key, run.text)))


@found_by("a_run_that_is_over_its_time_is_interrupted")
async def holds_its_deadline(step: Any, run: Run) -> str:
    with run.scope.hold_deadline():
        return str(await step(run.text))


@found_by("a_crash_at_any_event_settles_the_message_and_repeats_no_effect", replayable=True)
async def forgets_its_journal(step: Any, run: Run) -> str:
    if run.attempt > 1:
        return str(await step(run.text))
    return str(await run.call(step, run.text))


@found_by("a_host_that_closes_in_a_run_leaves_a_session_that_goes_on", replayable=True)
async def cannot_begin_again(step: Any, run: Run) -> str:
    if run.attempt > 1:
        raise RuntimeError("this run was begun before")
    return str(await step(run.text))


def _forgets(run: Run) -> str:
    return run.text


FAULTS["the_next_run_knows_what_was_said"] = AgentSubject(make=lambda step: _forgets, recall=lambda: _forgets)
