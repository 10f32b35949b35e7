"""The handle of a running call, and the start of a call on the loop, in a thread or in a process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.agents.journal import CallPath
from holdfast.agents.output import Emission, require_text
from holdfast.agents.placement import Placement, importable, placed
from holdfast.agents.tool import wants_call
from holdfast.errors import RunClosed
from holdfast.protocol.events import ToolOutput
from holdfast.runtime import IsolatedCall

if TYPE_CHECKING:
    from holdfast.agents.context import RunContext
    from holdfast.runtime import Handle, Scope

__all__ = ["CallContext", "start_call"]


class CallContext:
    """The state of a running call. Functions receive a `Call`, a subclass that also has the call's `Run`.

    Parameters:
        context: context of the run that the call belongs to.
        call_id: id of the call, the same in every attempt.
    """

    __slots__ = ("call_id", "closed", "context")

    def __init__(self, context: RunContext, call_id: str) -> None:
        self.context = context
        self.call_id = call_id
        self.closed = False
        """Whether the call has ended, so that its output no longer counts."""

    def output(self, text: str) -> Emission:
        """Stream a piece of the call's output, from any thread.

        Raises the same errors as `Run.emit`; also raises `RunClosed` if the call has ended.
        """
        require_text(text, "output()")
        context = self.context
        if self.closed:
            context.recorder.late()
            raise RunClosed(f"call {self.call_id} has ended", hint="output after the end of a call does not count")
        context.write(ToolOutput(run_id=context.root_id, call_id=self.call_id, text=text, at=context.now()))
        return Emission(context.recorder)

    def close(self) -> None:
        """Reject further output. The run closes a call when it has ended."""
        self.closed = True


def start_call(
    call: CallContext,
    scope: Scope,
    work: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    name: str,
    where: Placement,
    exclusive: bool = False,
) -> Handle[Any]:
    """Start a call's function in the call's own scope.

    Parameters:
        exclusive: whether the run waits until the function has returned, even if abandoned; see `ExclusiveCalls`.
    """
    context = call.context
    if where == "process":
        given = (IsolatedCall(call.call_id), *args) if wants_call(work) else args
        isolated = functools.partial(importable(work), *given, **kwargs)
        return scope.spawn(isolated, on="process", name=name, output=call.output)
    given = (call, *args) if wants_call(work) else args
    bound = functools.partial(work, *given, **kwargs)

    def begin() -> Any:
        """Run where the function runs. A call that is stopped before it begins is not counted as open."""
        if exclusive:
            context.exclusive_calls.begin(call.call_id, name)
        return bound()

    def on_end() -> None:
        """Run where the function ran. If the call's scope has closed, the call was abandoned and its result is late."""
        if scope.closed:
            context.recorder.late()
        if exclusive:
            context.call_on_loop(functools.partial(context.exclusive_calls.end, call.call_id))

    begin.__name__ = name
    return scope.spawn(placed(begin, CallPath(call.call_id), where, on_end), on=where, name=name)
