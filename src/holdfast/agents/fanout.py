"""`Run.map` and `Run.parallel`: the same work for many items, or several functions, so many at a time.

Functions go through `holdfast.agents.lanes`, agents through `holdfast.agents.branches`; both bound what is at work, and
take the next one only when there is room for it.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Iterable, Sequence, Sized
from contextlib import aclosing, nullcontext
from inspect import CO_COROUTINE
from types import FunctionType
from typing import TYPE_CHECKING, Any

from holdfast.agents.agent import Agent
from holdfast.agents.branches import Branches
from holdfast.agents.call import check_said
from holdfast.agents.children import Child, ChildTask, past_end
from holdfast.agents.journal import Branch, current_branch
from holdfast.agents.lanes import Lanes
from holdfast.agents.placing import name_of, placed, placement_of
from holdfast.errors import Interrupted, InvalidRequest, RunFailed, RunInterrupted
from holdfast.protocol.stopping import Cause
from holdfast.runtime import current_scope

if TYPE_CHECKING:
    from holdfast.agents.run import Run
    from holdfast.protocol.events import ChildFinished
    from holdfast.runtime import Scope

__all__ = ["run_map", "run_parallel"]

_END = object()


async def run_map(
    run: Run,
    work: Agent | Callable[[Any], Any],
    items: Iterable[Any] | AsyncIterable[Any],
    *,
    concurrency: int,
    name: str | None,
    timeout_s: float | None,
) -> list[Any]:
    """See `Run.map`."""
    if not isinstance(work, Agent):
        _check_function(work, "map() calls a function with each item")
    if not isinstance(items, (AsyncIterable, Iterable)) and not hasattr(items, "__getitem__"):
        raise InvalidRequest(
            f"the items of map() are {items!r:.200}, which gives no items",
            hint="give a list, or anything else for which 'for' or 'async for' works; for so many times: range(n)",
        )
    async with aclosing(items) if isinstance(items, AsyncGenerator) else nullcontext():
        if isinstance(work, Agent):
            return await _Asked(run, work, items, concurrency, name or work.name, timeout_s).results()
        if isinstance(items, Sized):
            concurrency = max(1, min(concurrency, len(items)))
        return await _call_each(run, work, items, concurrency, name or name_of(work), timeout_s)


async def run_parallel(run: Run, branches: Sequence[Callable[[], Any]]) -> list[Any]:
    """See `Run.parallel`."""
    if not branches:
        return []
    for work in branches:
        _check_function(work, "parallel() calls functions")
    parent = current_branch.get() or run._branch
    paths = [parent.next_id() for _ in branches]
    scope = run._around().child("parallel")
    lanes = Lanes(
        run,
        scope,
        label=lambda number: f"{name_of(branches[number % len(branches)])} {number + 1}",
        items=branches,
        begin=functools.partial(_begun, scope),
        place=lambda number: Branch(paths[number]),
        room=len(branches),
    )
    return await lanes.done()


def _check_function(work: object, what: str) -> None:
    """Raise `InvalidRequest` for what cannot be called."""
    if not callable(work):
        hint = "an agent is asked by map() or delegate()" if isinstance(work, Agent) else "give it, not what it returns"
        raise InvalidRequest(f"{what}, and {work!r:.200} is none", hint=hint)


async def _call_each(
    run: Run,
    work: Callable[[Any], Any],
    items: Iterable[Any] | AsyncIterable[Any],
    concurrency: int,
    name: str,
    timeout_s: float | None,
) -> list[Any]:
    """A function for each item."""
    path = run._next_id()
    scope = run._around().child(name)
    begin: Callable[[Any], Coroutine[Any, Any, Any]] = work
    if placement_of(work) != "loop":
        # More would only wait for threads, in front of the calls of the principal's other runs.
        concurrency = min(concurrency, scope.threads.max_threads)
        begin = functools.partial(_in_thread, scope, name, work)
    if timeout_s is not None:
        begin = functools.partial(_in_time, scope, begin, name, timeout_s)
    lanes = Lanes(
        run,
        scope,
        label=lambda number: f"{name} {number + 1}",
        items=items,
        begin=begin,
        place=lambda number: Branch(f"{path}.{number + 1}"),
        room=concurrency,
    )
    return await lanes.done()


def _begun(scope: Scope, work: Callable[[], Any]) -> Coroutine[Any, Any, Any]:
    """The coroutine of a function, which may be sync."""
    if type(work) is FunctionType and work.__code__.co_flags & CO_COROUTINE:
        begun: Coroutine[Any, Any, Any] = work()
        return begun
    if placement_of(work) == "loop":
        begun = work()
        return begun
    return _in_thread(scope, name_of(work), work)


async def _in_thread(scope: Scope, name: str, work: Callable[..., Any], *items: Any) -> Any:
    """Call a function in a thread, and wait for it."""
    branch = current_branch.get()
    assert branch is not None
    inner = (current_scope() or scope).spawn(
        placed(functools.partial(work, *items), branch, "thread"), on="thread", name=name
    )
    return await inner


async def _in_time(
    scope: Scope, begin: Callable[[Any], Coroutine[Any, Any, Any]], name: str, timeout_s: float, item: Any
) -> Any:
    """Let it end in time, or end it."""
    try:
        async with scope.child(name, deadline_s=timeout_s):
            return await begin(item)
    except Interrupted as interrupted:
        if interrupted.cause.kind == "deadline" and not scope.interrupt.triggered:
            raise TimeoutError(f"{name} did not end within {timeout_s:g} s") from None
        raise


class _Asked:
    """An agent for each item."""

    def __init__(
        self,
        run: Run,
        agent: Agent,
        items: Iterable[Any] | AsyncIterable[Any],
        concurrency: int,
        label: str,
        timeout_s: float | None,
    ) -> None:
        self._run = run
        self._agent = agent
        self._ahead = aiter(items) if isinstance(items, AsyncIterable) else None
        self._plain = iter(()) if isinstance(items, AsyncIterable) else iter(items)
        self._asking: Scope | None = None  # around the wait for the next item
        self._concurrency = concurrency
        self._label = label
        self._timeout_s = timeout_s
        self._path = run._next_id()
        self._results: list[str] = []
        self._error: RunFailed | RunInterrupted | None = None
        self._branches = Branches(run, self._take, on_closed=self._closed)

    async def results(self) -> list[str]:
        """Ask all of them."""
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
        """The next item, or `_END`: there is none, or one that was begun does not complete."""
        if self._ahead is None:
            return next(self._plain, _END)
        self._asking = self._branches.scope.child("items")
        try:
            async with self._asking:
                return await anext(self._ahead, _END)
        except Interrupted:
            self._branches.tell()
            if self._error is None:
                raise
            return _END
        finally:
            self._asking = None

    def _closed(self, child: Child) -> None:
        """Nothing is left of a child; where it failed, the next item is not waited for."""
        if self._asking is not None and child.scope.ended_by != "members":
            self._asking.interrupt.trigger("an item did not complete", kind="stop")

    async def _begin(self, item: Any) -> None:
        check_said(item, f"an item of {self._label}")
        self._results.append("")
        number = len(self._results)
        task = ChildTask(
            agent=self._agent,
            text=item,
            branch=Branch(f"{self._path}.{number}"),
            name=f"{self._label} {number}",
            deadline_s=self._timeout_s,
        )
        past = past_end(self._run, task)
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
            self._branches.stop_all(Cause(kind="stop", reason=reason, origin=self._label, at=self._run.now()))
