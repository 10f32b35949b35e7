"""Calls on threads as members of a scope: asked through their interrupt, abandoned if they do not respond."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.protocol.stopping import Abandoned
from holdfast.runtime.interrupt import Interrupt
from holdfast.runtime.members import Handle, Member, MemberKind

if TYPE_CHECKING:
    from holdfast.runtime.membership import Membership
    from holdfast.runtime.threads import Call

__all__ = ["ThreadHandle"]

T = TypeVar("T")


class ThreadHandle(Handle[T]):
    """A member that is a call on a thread."""

    __slots__ = ("call",)

    kind: MemberKind = "thread"

    def __init__(self, scope: Membership, name: str, *, adopted: bool = False) -> None:
        super().__init__(scope, name, adopted=adopted)
        self.call: Call | None = None

    def _start(self, fn: Callable[..., T], values: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Submit the call to the pool. Callable from any thread, after the member was entered."""
        scope = self.scope
        assert self._context is not None
        self._context.run(self.interrupt.make_current)
        self.call = scope._threads.submit(
            fn,
            *values,
            kwargs=kwargs,
            context=self._context,
            on_done=self._on_done,
            name=self.name,
            owner=scope.owner,
            sharer=scope.sharer,
        )
        if self._done:
            self.call = None
        elif self.due and not self.adopted:
            self.scope._on_loop(self._ask)

    def _on_done(self, result: T | None, error: BaseException | None) -> None:
        """Handle the end of the call, on its thread."""
        self.scope._on_loop(self._finish, result, error)

    def _finish(self, result: T | None, error: BaseException | None) -> None:
        if isinstance(error, asyncio.CancelledError):
            error = self._stopped("its call was cancelled")
        if self._settle(result, error):
            self.scope._discard(self, None if self.adopted else error)
            self.call = None

    def _watch(self, interrupt: Interrupt) -> None:
        """Do nothing: a thread checks its interrupt itself."""

    def _ask(self) -> None:
        call = self.call
        if call is not None and call.cancel():
            self._withdrawn()
            self._finish(None, self._stopped("its scope was stopped before it began"))

    def _withdrawn(self) -> None:
        """Called when the call was withdrawn before it began."""

    def _press(self) -> None:
        self._ask()

    def _living(self) -> threading.Thread | None:
        return None if self.call is None else self.call.thread

    def _abandon(self) -> Abandoned:
        call = self.call
        stack: tuple[str, ...] = ()
        if call is not None:
            stack = call.stack()
            call.abandon()
        self._settle(None, self._stopped("it did not end and was abandoned"))
        return Abandoned(kind="thread", name=self.name, stack=stack)

    def _snapshot(self) -> Member:
        thread = self.call.thread if self.call is not None else None
        state = "starting" if thread is None else "stopping" if self.due else "running"
        return Member(
            kind="thread",
            name=self.name,
            started_at=self.started_at,
            state=state,
            thread=None if thread is None else thread.name,
            adopted=self.adopted,
        )
