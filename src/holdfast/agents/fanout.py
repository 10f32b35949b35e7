"""The implementation of `Run.map` and `Run.parallel`.

`holdfast.agents.bounded_map` runs functions, and `holdfast.agents.child_group` runs agents. In both cases, the number
of active items is limited, and the next item is taken only when its work can start.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Iterable, Sequence, Sized
from contextlib import aclosing, nullcontext
from inspect import CO_COROUTINE
from types import FunctionType
from typing import TYPE_CHECKING, Any

from holdfast.agents.agent import Agent
from holdfast.agents.bounded_map import BoundedMap
from holdfast.agents.child_group import ChildGroup
from holdfast.agents.children import Child, ChildTask, recorded_outcome
from holdfast.agents.journal import CallPath, current_call_path
from holdfast.agents.output import require_text
from holdfast.agents.placement import name_of, placed, placement_of
from holdfast.errors import Interrupted, InvalidRequest, RunFailed, RunInterrupted
from holdfast.protocol.stopping import Cause
from holdfast.runtime import current_scope

if TYPE_CHECKING:
    from holdfast.agents.context import RunContext
    from holdfast.protocol.events import ChildFinished
    from holdfast.runtime import Scope

__all__ = ["run_map", "run_parallel"]

_END = object()


async def run_map(
    context: RunContext,
    work: Agent | Callable[[Any], Any],
    items: Iterable[Any] | AsyncIterable[Any],
    *,
    concurrency: int,
    name: str | None,
    timeout_s: float | None,
) -> list[Any]:
    """See `Run.map`."""
    if not isinstance(work, Agent):
        _check_function(work, "map()")
    if not isinstance(items, (AsyncIterable, Iterable)) and not hasattr(items, "__getitem__"):
        raise InvalidRequest(
            f"invalid items for map(): {items!r:.200} is not iterable",
            hint="pass a list or another iterable or async iterable; to repeat n times, pass range(n)",
        )
    async with aclosing(items) if isinstance(items, AsyncGenerator) else nullcontext():
        if isinstance(work, Agent):
            return await _AgentMap(context, work, items, concurrency, name or work.name, timeout_s).results()
        if isinstance(items, Sized):
            concurrency = max(1, min(concurrency, len(items)))
        return await _call_each(context, work, items, concurrency, name or name_of(work), timeout_s)


async def run_parallel(context: RunContext, branches: Sequence[Callable[[], Any]]) -> list[Any]:
    """See `Run.parallel`."""
    if not branches:
        return []
    for work in branches:
        _check_function(work, "parallel()")
    parent = current_call_path.get() or context.call_path
    paths = [parent.next_id() for _ in branches]
    scope = context.innermost_scope().child("parallel")
    lanes = BoundedMap(
        context,
        scope,
        label=lambda number: f"{name_of(branches[number % len(branches)])} {number + 1}",
        items=branches,
        begin=functools.partial(_begun, scope),
        place=lambda number: CallPath(paths[number]),
        room=len(branches),
    )
    return await lanes.done()


def _check_function(work: object, method: str) -> None:
    """Raise `InvalidRequest` unless `work` is callable."""
    if not callable(work):
        is_agent = isinstance(work, Agent)
        hint = "run an agent with map() or delegate()" if is_agent else "pass the function, not its result"
        raise InvalidRequest(f"{method} takes functions; {work!r:.200} is not callable", hint=hint)


async def _call_each(
    context: RunContext,
    work: Callable[[Any], Any],
    items: Iterable[Any] | AsyncIterable[Any],
    concurrency: int,
    name: str,
    timeout_s: float | None,
) -> list[Any]:
    """Call a function with each item."""
    path = context.next_id()
    scope = context.innermost_scope().child(name)
    begin: Callable[[Any], Coroutine[Any, Any, Any]] = work
    if placement_of(work) != "loop":
        # More would only queue for threads, ahead of the calls of the principal's other runs.
        concurrency = min(concurrency, scope.threads.max_threads)
        begin = functools.partial(_in_thread, scope, name, work)
    if timeout_s is not None:
        begin = functools.partial(_in_time, scope, begin, name, timeout_s)
    lanes = BoundedMap(
        context,
        scope,
        label=lambda number: f"{name} {number + 1}",
        items=items,
        begin=begin,
        place=lambda number: CallPath(f"{path}.{number + 1}"),
        room=concurrency,
    )
    return await lanes.done()


def _begun(scope: Scope, work: Callable[[], Any]) -> Coroutine[Any, Any, Any]:
    """Return the coroutine of a function, which may be sync."""
    if type(work) is FunctionType and work.__code__.co_flags & CO_COROUTINE:
        begun: Coroutine[Any, Any, Any] = work()
        return begun
    if placement_of(work) == "loop":
        begun = work()
        return begun
    return _in_thread(scope, name_of(work), work)


async def _in_thread(scope: Scope, name: str, work: Callable[..., Any], *items: Any) -> Any:
    """Call a function in a thread and return its result."""
    branch = current_call_path.get()
    assert branch is not None
    inner = (current_scope() or scope).spawn(
        placed(functools.partial(work, *items), branch, "thread"), on="thread", name=name
    )
    return await inner


async def _in_time(
    scope: Scope, begin: Callable[[Any], Coroutine[Any, Any, Any]], name: str, timeout_s: float, item: Any
) -> Any:
    """Run the coroutine of an item with a deadline."""
    try:
        async with scope.child(name, deadline_s=timeout_s):
            return await begin(item)
    except Interrupted as interrupted:
        if interrupted.cause.kind == "deadline" and not scope.interrupt.triggered:
            raise TimeoutError(f"{name} did not end within {timeout_s:g} s") from None
        raise


class _AgentMap:
    """One call of `Run.map` with an agent, which runs a child for each item."""

    def __init__(
        self,
        context: RunContext,
        agent: Agent,
        items: Iterable[Any] | AsyncIterable[Any],
        concurrency: int,
        label: str,
        timeout_s: float | None,
    ) -> None:
        self._context = context
        self._agent = agent
        self._ahead = aiter(items) if isinstance(items, AsyncIterable) else None
        self._plain = iter(()) if isinstance(items, AsyncIterable) else iter(items)
        self._waiting_scope: Scope | None = None  # around the wait for the next item
        self._concurrency = concurrency
        self._label = label
        self._timeout_s = timeout_s
        self._path = context.next_id()
        self._results: list[str] = []
        self._error: RunFailed | RunInterrupted | None = None
        self._branches = ChildGroup(context, self._take, on_closed=self._closed)

    async def results(self) -> list[str]:
        """Run the agent for all items; return the answers in the order of the items."""
        await self._branches.driven(self._drive)
        if self._error is not None:
            raise self._error
        return self._results

    async def _drive(self) -> None:
        branches = self._branches
        while self._error is None:
            if branches.busy >= self._concurrency:
                await branches.changed()
                continue
            item = await self._next()
            if item is _END:
                break
            await self._begin(item)
        while branches.busy:
            await branches.changed()

    async def _next(self) -> Any:
        """Return the next item, or `_END` after the last item or if an earlier item did not complete."""
        if self._ahead is None:
            return next(self._plain, _END)
        self._waiting_scope = self._branches.scope.child("items")
        try:
            async with self._waiting_scope:
                return await anext(self._ahead, _END)
        except Interrupted:
            self._branches.report_ends()
            if self._error is None:
                raise
            return _END
        finally:
            self._waiting_scope = None

    def _closed(self, child: Child) -> None:
        """Stop waiting for the next item if the child, whose scope has closed, did not complete."""
        if self._waiting_scope is not None and child.scope.ended_by != "members":
            self._waiting_scope.interrupt.trigger("an item did not complete", kind="stop")

    async def _begin(self, item: Any) -> None:
        require_text(item, f"an item of {self._label}")
        self._results.append("")
        number = len(self._results)
        task = ChildTask(
            agent=self._agent,
            text=item,
            branch=CallPath(f"{self._path}.{number}"),
            name=f"{self._label} {number}",
            deadline_s=self._timeout_s,
        )
        past = recorded_outcome(self._context, task)
        if past is not None:
            self._take(number, past, None)
        else:
            await self._branches.begin(task, number)

    def _take(self, number: int, finished: ChildFinished, problem: BaseException | None) -> None:
        if finished.status == "completed":
            self._results[number - 1] = finished.text
        elif finished.error is not None and self._error is None:
            self._error = (RunFailed if finished.status == "failed" else RunInterrupted)(finished.error)
            self._error.__cause__ = problem
            self._error.add_note(f"in {self._label} {number}")
            reason = f"{self._label} {number} did not complete: {finished.error}"
            self._branches.stop_all(Cause(kind="stop", reason=reason, origin=self._label, at=self._context.now()))
