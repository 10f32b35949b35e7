"""A running call as its function sees it, and how that is started: on the loop, in a thread, or in a process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.agents.journal import Branch, Recorder
from holdfast.agents.placing import Placement, importable, placed
from holdfast.agents.tool import wants_call
from holdfast.errors import RunClosed
from holdfast.protocol.events import ToolOutput
from holdfast.protocol.messages import check_text
from holdfast.runtime import IsolatedCall

if TYPE_CHECKING:
    from holdfast.agents.run import Run
    from holdfast.runtime import Handle, Scope

__all__ = ["Call", "Emission", "check_said", "start_call"]


class Emission:
    """What `Run.emit` gives: the text is taken already; awaiting it waits while the log is behind."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __await__(self) -> Generator[Any, None, None]:
        if self._recorder.behind:
            yield from self._recorder.room().__await__()


class Call:
    """The running call, for functions that want to stream output, or to name the call to outside services.

    Parameters:
        run: the run it belongs to. What it calls through `Run.call` is in the log and the journal, but no part of the
            transcript; what it starts with ``current_scope()`` ends with the call, with ``run.scope`` with the run.
        call_id: the same in every attempt: the idempotency key to give to outside services.
    """

    __slots__ = ("_over", "call_id", "run")

    def __init__(self, run: Run, call_id: str) -> None:
        self.run = run
        self.call_id = call_id
        self._over = False

    def output(self, text: str) -> Emission:
        """Stream a piece of the call's output. From any thread. Raises as `Run.emit` does, also after the call."""
        check_said(text, "output()")
        run = self.run
        if self._over:
            run._recorder.late()
            raise RunClosed(f"call {self.call_id} has ended", hint="what it says after its end does not count")
        run._write(ToolOutput(run_id=run.root_id, call_id=self.call_id, text=text, at=run.now()))
        return Emission(run._recorder)

    def _end(self) -> None:
        """From now on nothing that it says counts."""
        self._over = True


def start_call(
    call: Call,
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
        exclusive: the run is not over before the function has really ended; see `Run.released`.
    """
    run = call.run
    if where == "process":
        given = (IsolatedCall(call.call_id), *args) if wants_call(work) else args
        isolated = functools.partial(importable(work), *given, **kwargs)
        return scope.spawn(isolated, on="process", name=name, output=call.output)
    given = (call, *args) if wants_call(work) else args
    bound = functools.partial(work, *given, **kwargs)

    def begun() -> Any:
        """Where the function runs. One that is stopped before it begins holds nothing."""
        if exclusive:
            run._exclusive[call.call_id] = name
        return bound()

    def ended() -> None:
        """After its scope it was given up, and what it gives comes too late."""
        if scope.closed:
            run._recorder.late()
        if exclusive:
            run._soon(functools.partial(run._release, call.call_id))

    begun.__name__ = name
    return scope.spawn(placed(begun, Branch(call.call_id), where, ended), on=where, name=name)


def check_said(text: object, what: str) -> None:
    """Raise for what is no text, or text that UTF-8 cannot hold."""
    if not isinstance(text, str):
        raise TypeError(f"{what} takes text (str), not {type(text).__name__}")
    if not text.isascii():
        check_text(text)
