"""The interface of a session, the same on a `Host` in this process and through a `Client` over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from holdfast.errors import MessageWithdrawn, RunFailed, RunInterrupted
from holdfast.protocol.events import Event, Gap
from holdfast.protocol.messages import (
    Entry,
    MailboxItem,
    Policy,
    Receipt,
    RunView,
    SessionStop,
    SessionView,
    Settlement,
    TreeNode,
)
from holdfast.protocol.stopping import StopReceipt

__all__ = ["SessionLike", "answer"]


class SessionLike(Protocol):
    """A session: getting one does no I/O, and any number may be in use for the same key at the same time.

    Every method may raise `AccessDenied`, `StorageError` and, over HTTP, `ServerUnreachable` and `RateLimited`.
    """

    @property
    def key(self) -> str:
        """The session's key."""
        ...

    async def send(
        self,
        content: str,
        *,
        policy: Policy = "queue",
        idempotency_key: str | None = None,
        agent: str | None = None,
        quiet_s: float | None = None,
        max_wait_s: float | None = None,
    ) -> Receipt:
        """Put a message into the mailbox; when this returns it is durable.

        Parameters:
            content: the text.
            policy: what to do if a run is on.
            idempotency_key: the same key is accepted once; a repeat gets the first one's receipt.
            agent: the agent of a new session, or a change for runs that start later.
            quiet_s, max_wait_s: for ``collect``, in seconds.

        Raises:
            SessionBusy, MailboxFull, IdempotencyMismatch, SessionDeleted, UnknownAgent, UnknownPolicy,
            PolicyUnavailable, InvalidRequest, Draining: nothing was stored.
        """
        ...

    async def wait(self, message_id: str, *, timeout_s: float | None = None) -> Settlement:
        """Wait until a message is settled.

        Raises:
            WaitExpired: it is not settled after `timeout_s` seconds; the work goes on.
            UnknownMessage, UnknownSession: there is none.
        """
        ...

    async def ask(
        self,
        content: str,
        *,
        timeout_s: float | None = None,
        policy: Policy = "queue",
        idempotency_key: str | None = None,
        agent: str | None = None,
        quiet_s: float | None = None,
        max_wait_s: float | None = None,
    ) -> str:
        """Send, wait, and return the answer.

        Raises:
            RunFailed, RunInterrupted, MessageWithdrawn: what became of the message instead.
            WaitExpired: no settlement after `timeout_s` seconds.
            WaitsForItself: called in a run of this session.
        """
        ...

    def events(self, *, after: str | None = None, follow: str | None = None) -> AsyncIterator[Event | Gap]:
        """The session's events in order, each once, or a `Gap` for what was missed.

        Parameters:
            after: a cursor, such as a receipt's; None starts at the beginning.
            follow: a message id: the stream ends after the event that settles it.

        Raises:
            InvalidCursor: not a cursor of this session.
            UnknownSession, UnknownMessage: there is none.
        """
        ...

    async def interrupt(
        self, reason: str = "", *, run_id: str | None = None, grace_s: float | None = None
    ) -> StopReceipt:
        """End the run that is on, or exactly `run_id`; what waits runs afterwards. An idle session answers at once."""
        ...

    async def stop(self, reason: str = "", *, grace_s: float | None = None) -> SessionStop:
        """End the session's whole activation: its run, its background work, and what waits is withdrawn."""
        ...

    async def withdraw(self, message_id: str) -> Settlement:
        """Take a waiting message back. Raises `AlreadySettled`, `UnknownMessage`."""
        ...

    async def message(self, message_id: str) -> Settlement:
        """What became of a message so far. Raises `UnknownMessage`."""
        ...

    async def info(self) -> SessionView:
        """The session as it stands. Raises `UnknownSession`."""
        ...

    async def transcript(self) -> list[Entry]:
        """What the model sees, in order."""
        ...

    async def mailbox(self) -> list[MailboxItem]:
        """What waits, in order."""
        ...

    async def tree(self) -> TreeNode:
        """The tasks, threads and processes that are alive for this session."""
        ...

    async def run(self, run_id: str) -> RunView:
        """A run. Raises `UnknownRun`."""
        ...

    async def runs(self) -> list[RunView]:
        """The session's newest runs, the newest first."""
        ...

    async def delete(self) -> SessionStop:
        """Stop the session and delete it; its key answers `SessionDeleted` until the tombstone is purged."""
        ...


def answer(settlement: Settlement) -> str:
    """The text of a completed message. Raises `RunFailed`, `RunInterrupted` or `MessageWithdrawn` for any other."""
    match settlement.state:
        case "completed":
            return settlement.text
        case "failed":
            raise RunFailed(settlement.error or "the agent failed", hint="its events and the host's log say more")
        case "withdrawn":
            raise MessageWithdrawn("the message was withdrawn before a run took it")
        case _:
            cause = settlement.cause
            why = f"{cause.kind}{f': {cause.reason}' if cause.reason else ''}" if cause else settlement.state
            raise RunInterrupted(f"the run was interrupted ({why})", hint="its partial answer is in the transcript")
