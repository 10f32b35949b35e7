"""The handle of a running call, and the start of a call on the loop, in a thread or in a process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.agents.journal import CallPath
from holdfast.agents.output import Emission, require_text
from holdfast.agents.placement import Placement, importable, placed
from holdfast.agents.programs import start_program
from holdfast.agents.tool import wants_call
from holdfast.errors import RunClosed
from holdfast.protocol.access import NO_REQUEST, join
from holdfast.protocol.events import ToolOutput
from holdfast.runtime import IsolatedCall

if TYPE_CHECKING:
    from holdfast.agents.context import RunContext
    from holdfast.protocol.messages import Access
    from holdfast.runtime import Handle, Process, Scope

__all__ = ["CallContext", "start_call"]


class CallContext:
    """The state of a running call. Functions receive a `Call`, a subclass that also has the call's `Run`.

    Parameters:
        context: context of the run that the call belongs to.
        call_id: id of the call, the same in every attempt.
    """

    __slots__ = ("approved", "call_id", "closed", "context", "failed", "scope")

    scope: Scope
    """The scope that owns everything that the call starts; it ends with the call. Set when the call's function starts.
    """

    def __init__(self, context: RunContext, call_id: str) -> None:
        self.context = context
        self.call_id = call_id
        self.approved = NO_REQUEST.access
        """Access beyond the call's wall that a person approved for this call."""
        self.closed = False
        """Whether the call has ended, so that its output no longer counts."""
        self.failed = False
        """Set this if what the call ran has failed although the call returns a result, such as the output of a program
        with a nonzero exit code. Clients then show the call as failed."""

    async def granted(self) -> Access:
        """Return all access beyond its wall that the call has now.

        This is what a person approved for this call, and what earlier grants give to the session and its principal.
        Call this method on the run's event loop.
        """
        standing = await self.context.host.grants()
        return join(self.approved, *[grant.access for grant in standing])

    def output(self, text: str) -> Emission:
        """Stream a piece of the call's output, from any thread.

        Raises the same errors as `Run.emit`; also raises `RunClosed` if the call has ended.
        """
        require_text(text, "output()")
        context = self.context
        self._check_open("produce all output before the call ends")
        context.write(ToolOutput(run_id=context.root_id, call_id=self.call_id, text=text, at=context.now()))
        return Emission(context.recorder)

    async def process(self, argv: Sequence[str], *, sandbox: object = None, **options: Any) -> Process:
        """Start a program in the call's scope; see `Scope.process`. Its process tree does not outlive the call.

        A call that fails, is stopped or reaches its deadline ends the program. A call whose function has returned waits
        for the program, until the deadline. Call this method on the run's event loop.

        Parameters:
            sandbox: see `Run.process`.

        Raises:
            RunClosed, ScopeClosed: if the call has ended or is being stopped.
            OSError, ValueError: if the program fails to start.
        """
        self._check_open("start all programs before the call ends")
        return await start_program(self.context, self.scope, argv, sandbox, options)

    def _check_open(self, hint: str) -> None:
        if self.closed:
            self.context.recorder.late()
            raise RunClosed(f"call {self.call_id} has ended", hint=hint)

    def close(self) -> None:
        """Reject further output and programs. The run closes a call when it has ended."""
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
        exclusive: whether the run waits until the function has returned, even if the call was abandoned; see
            `ExclusiveCalls`.
    """
    context = call.context
    call.scope = scope
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
