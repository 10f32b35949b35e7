"""Calls with the journal: the intent is written down, then comes the effect, then the result is written down."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from holdfast.agents.call import Call, start_call
from holdfast.agents.placing import Placement, placement_of
from holdfast.agents.results import told_briefly
from holdfast.errors import CallFailed, Interrupted, LimitExceeded, ToolFailed
from holdfast.protocol.call_hash import is_for_another_call
from holdfast.protocol.events import ToolFinished, ToolStarted
from holdfast.protocol.messages import Question, Usage

if TYPE_CHECKING:
    from holdfast.agents.run import Run
    from holdfast.agents.tool import Tool

__all__ = ["Wanted", "approved", "begin_call", "end_call", "make_call", "written"]

_ONE_CALL = Usage(tool_calls=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A call that is to be made; see `Run.call`.

    Parameters:
        call_id: its place in the program.
        arguments: what the log and the journal show of its arguments.
    """

    call_id: str
    name: str
    work: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    arguments: Any = None
    idempotent: bool = False
    timeout_s: float | None = None
    on: Placement | None = None
    exclusive: bool = False


async def make_call(run: Run, wanted: Wanted) -> Any:
    """Make the call, or take its result from the journal. Raises as `Run.call` does."""
    past = begin_call(run, wanted.call_id, wanted.name, wanted.arguments, idempotent=wanted.idempotent)
    if past is not None:
        if past.status == "error":
            raise CallFailed(past.error or f"{wanted.name} failed")
        return past.result
    await run._recorder.written()
    status: Literal["ok", "error", "interrupted"] = "interrupted"
    result: Any = None
    error: str | None = None
    try:
        outcome = await _in_scope(run, wanted)
        result = written(run, outcome, f"the result of {wanted.name}")
        status = "ok"
    except Exception as problem:
        status, error = "error", told_briefly(problem)
        run._log_failure(f"call {wanted.name!r} failed", problem)
        raise
    finally:
        end_call(run, wanted.call_id, status, result, error)
    return result


def begin_call(run: Run, call_id: str, name: str, arguments: Any, *, idempotent: bool) -> ToolFinished | None:
    """Note that a call is made; what it came to in an earlier attempt, if it did."""
    past = run._journal.past(call_id, name, arguments)
    started = ToolStarted(
        run_id=run.root_id, call_id=call_id, name=name, arguments=arguments, idempotent=idempotent, at=run.now()
    )
    run._charge(_ONE_CALL)
    if past is not None:
        run._charge(run._journal.used_inside(call_id))
        run.transcript.feed(started)
        run.transcript.feed(past)
        return past
    run._write(started)
    run._journal.begun(started)
    return None


def end_call(
    run: Run, call_id: str, status: Literal["ok", "error", "interrupted"], result: Any, error: str | None
) -> ToolFinished:
    """Note what a call came to, if that still counts."""
    finished = ToolFinished(
        run_id=run.root_id, call_id=call_id, status=status, result=result, error=error, at=run.now()
    )
    if not run._closed:
        run._write(finished)
        run._journal.ended(finished)
    return finished


async def _in_scope(run: Run, wanted: Wanted) -> Any:
    call = Call(run, wanted.call_id)
    name = wanted.name
    deadline_s = run._limits.call_s if wanted.timeout_s is None else wanted.timeout_s
    around = run._around()
    scope = around.child(name, deadline_s=None if deadline_s == math.inf else deadline_s)
    where = wanted.on or placement_of(wanted.work)
    try:
        async with scope:
            return await start_call(
                call, scope, wanted.work, wanted.args, wanted.kwargs, name=name, where=where, exclusive=wanted.exclusive
            )
    except Interrupted as interrupted:
        if interrupted.cause.kind == "deadline" and not around.interrupt.triggered:
            raise TimeoutError(f"{name} did not end within {deadline_s:g} s") from None
        raise
    finally:
        call._end()


async def approved(run: Run, call_id: str, tool: Tool, arguments: dict[str, Any]) -> None:
    """Ask a person for leave to make a call inside of another one. Raises `ToolFailed` if there is none."""
    answer = run._journal.answer(call_id)
    question = Question(
        question_id=call_id,
        kind="approval",
        text=f"May {tool.name} be called?",
        tool=tool.name,
        arguments=arguments,
    )
    if answer is None:
        with run._deadlines_held():
            await run._surroundings.suspend(question)
            answer = await run._surroundings.answered(call_id)
    if is_for_another_call(answer, question):
        raise ToolFailed("the approval is for a different call; this call was not made")
    match answer.decision:
        case "approved":
            return
        case "expired":
            raise ToolFailed("nobody approved this call in time; it was not made")
        case _:
            reason = f": {answer.text}" if answer.text else ""
            raise ToolFailed(f"a person denied this call{reason}; it was not made")


def written(run: Run, value: Any, what: str) -> Any:
    """The value as JSON holds it. Raises `TypeError` for what JSON cannot hold, `LimitExceeded` for too much of it."""
    try:
        encoded = msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(f"{what} cannot be written down as JSON: {error}") from None
    limit = run._limits.result_limit_bytes
    if len(encoded) > limit:
        raise LimitExceeded(
            f"{what} take {len(encoded):,} bytes of JSON, more than {limit:,}",
            hint="write large data to a file and pass its name",
        )
    return msgspec.json.decode(encoded)
