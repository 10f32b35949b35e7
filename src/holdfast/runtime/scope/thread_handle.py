"""Calls on threads as members of a scope; a stop interrupts each call, and abandons a call that does not end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.protocol.stopping import Abandoned
from holdfast.runtime.interrupt.interrupt import Interrupt
from holdfast.runtime.scope.handle import Handle, Member, MemberKind, ScopeOwner

if TYPE_CHECKING:
    from holdfast.runtime.thread_pool import ThreadCall

__all__ = ["ThreadHandle"]

T = TypeVar("T")


class ThreadHandle(Handle[T]):
    """A member that is a call on a thread."""

    __slots__ = ("call",)

    kind: MemberKind = "thread"

    def __init__(self, owner: ScopeOwner, name: str, *, adopted: bool = False, scope: object = None) -> None:
        super().__init__(owner, name, adopted, scope)
        self.call: ThreadCall | None = None

    def start(self, fn: Callable[..., T], values: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Submit the call to the pool. Callable from any thread, after the member was added to the scope."""
        owner = self.owner
        assert self.started_in is not None
        self.started_in.run(self.interrupt.make_current)
        self.call = owner.threads.submit(
            fn,
            *values,
            kwargs=kwargs,
            context=self.started_in,
            on_done=self._on_done,
            name=self.name,
            owner=owner.owner,
            sharer=owner.sharer,
        )
        if self.done():
            self.call = None
        elif self.due and not self.adopted:
            owner.on_loop(self.ask)

    def _on_done(self, result: T | None, error: BaseException | None) -> None:
        """Handle the end of the call; called on the thread that ran it."""
        self.owner.on_loop(self._finish, result, error)

    def _finish(self, result: T | None, error: BaseException | None) -> None:
        if isinstance(error, asyncio.CancelledError):
            error = self.stop_error("its call was cancelled")
        if self.settle(result, error):
            self.owner.discard(self, None if self.adopted else error)
            self.call = None

    def listen_to(self, interrupt: Interrupt) -> None:
        """Do nothing, because code on a thread checks its interrupt itself."""

    def ask(self) -> None:
        """Withdraw the call if no thread has started it."""
        call = self.call
        if call is not None and call.cancel():
            self.on_withdrawn()
            self._finish(None, self.stop_error("its scope was stopped before it began"))

    def on_withdrawn(self) -> None:
        """Override to handle a call that was withdrawn before it started."""

    def ask_again(self) -> None:
        """Withdraw the call if no thread has started it, like `ask`."""
        self.ask()

    def overdue(self, grace: str) -> str:
        """Return in words why the member had to be forced."""
        return f"did not check its interrupt for {grace}"

    def running(self) -> threading.Thread | None:
        """Return the thread that runs the call now, if any."""
        return None if self.call is None else self.call.thread

    def abandon(self) -> Abandoned:
        """Abandon the call and replace its thread."""
        call = self.call
        stack: tuple[str, ...] = ()
        if call is not None:
            stack = call.stack()
            call.abandon()
        self.settle(None, self.stop_error("it did not end and was abandoned"))
        return Abandoned(kind="thread", name=self.name, stack=stack)

    def snapshot(self) -> Member:
        """Return a snapshot of the member."""
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
