"""Journaled calls: the intent is stored before the function starts, and the result after the function has ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from holdfast.agents.call_context import CallContext, start_call
from holdfast.agents.placement import Placement, placement_of
from holdfast.agents.results import summarize_error
from holdfast.errors import CallFailed, Interrupted, LimitExceeded
from holdfast.protocol.events import ToolFinished, ToolStarted
from holdfast.protocol.messages import Usage

if TYPE_CHECKING:
    from holdfast.agents.context import RunContext

__all__ = ["CallRequest", "begin_call", "end_call", "make_call", "written"]

_ONE_CALL = Usage(tool_calls=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """A requested call; see `Run.call`.

    Parameters:
        name: display name of the function; the journal stores it too.
        arguments: arguments in the form that the log and the journal store.
    """

    name: str
    work: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    arguments: Any = None
    idempotent: bool = False
    timeout_s: float | None = None
    on: Placement | None = None
    exclusive: bool = False


async def make_call(call: CallContext, wanted: CallRequest) -> Any:
    """Make the call, or return its result if the journal has one. Raises the same errors as `Run.call`."""
    context = call.context
    past = begin_call(context, call.call_id, wanted.name, wanted.arguments, idempotent=wanted.idempotent)
    if past is not None:
        if past.status == "error":
            raise CallFailed(past.error or f"{wanted.name} failed")
        return past.result
    await context.recorder.written()
    status: Literal["ok", "error", "interrupted"] = "interrupted"
    result: Any = None
    error: str | None = None
    try:
        outcome = await _in_scope(call, wanted)
        result = written(context, outcome, f"the result of {wanted.name}")
        status = "ok"
    except Exception as problem:
        status, error = "error", summarize_error(problem)
        context.log_failure(f"call {wanted.name!r} failed", problem)
        raise
    finally:
        end_call(context, call.call_id, status, result, error, failed=call.failed)
    return result


def begin_call(
    context: RunContext, call_id: str, name: str, arguments: Any, *, idempotent: bool
) -> ToolFinished | None:
    """Return the call's result from an earlier attempt; if none is recorded, write the intent and return None."""
    past = context.journal.past(call_id, name, arguments)
    started = ToolStarted(
        run_id=context.root_id, call_id=call_id, name=name, arguments=arguments, idempotent=idempotent, at=context.now()
    )
    context.charge(_ONE_CALL)
    if past is not None:
        context.charge(context.journal.used_inside(call_id))
        context.transcript.feed(started)
        context.transcript.feed(past)
        return past
    context.write(started)
    context.journal.begun(started)
    return None


def end_call(
    context: RunContext,
    call_id: str,
    status: Literal["ok", "error", "interrupted"],
    result: Any,
    error: str | None,
    *,
    failed: bool = False,
) -> ToolFinished:
    """Return the event that records the result of a call; write the event unless the run has ended.

    Parameters:
        failed: whether what the call ran has failed although the call returned a result.
    """
    finished = ToolFinished(
        run_id=context.root_id,
        call_id=call_id,
        status=status,
        result=result,
        error=error,
        failed=failed and status == "ok",
        at=context.now(),
    )
    if not context.closed:
        context.write(finished)
        context.journal.ended(finished)
    return finished


async def _in_scope(call: CallContext, wanted: CallRequest) -> Any:
    name = wanted.name
    deadline_s = call.context.limits.call_timeout_s if wanted.timeout_s is None else wanted.timeout_s
    around = call.context.innermost_scope()
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
        call.close()


def written(context: RunContext, value: Any, what: str) -> Any:
    """Return the value after a round trip through JSON.

    Parameters:
        what: name of the value in error messages.

    Raises:
        TypeError: if JSON cannot represent the value.
        LimitExceeded: if the JSON of the value exceeds `RunLimits.result_limit_bytes`.
    """
    try:
        encoded = msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(f"{what} cannot be encoded as JSON: {error}") from None
    limit = context.limits.result_limit_bytes
    if len(encoded) > limit:
        raise LimitExceeded(
            f"{what}: {len(encoded):,} bytes of JSON exceed the limit of {limit:,}",
            hint="write large data to a file and pass its name",
        )
    return msgspec.json.decode(encoded)
