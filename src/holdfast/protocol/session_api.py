"""The session interface, identical on a `Host` in this process and through a `Client` over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, Unpack

from holdfast.errors import MessageWithdrawn, RunFailed, RunInterrupted
from holdfast.protocol.events import Event, Gap
from holdfast.protocol.messages import (
    Answer,
    Attachment,
    Entry,
    MailboxItem,
    Question,
    Receipt,
    RunView,
    SessionExport,
    SessionStop,
    SessionView,
    Settlement,
    TreeNode,
)
from holdfast.protocol.schedules import ScheduleKeywords, ScheduleView
from holdfast.protocol.send_options import SendKeywords
from holdfast.protocol.stopping import StopReceipt

__all__ = ["ScheduleAPI", "SessionAPI", "answer"]


class ScheduleAPI(Protocol):
    """A handle to a schedule. Creating one does no I/O; several handles may refer to the same schedule.

    Every method may raise `UnknownSchedule`, `AccessDenied`, `StorageError` and, over HTTP, `ServerUnreachable` and
    `RateLimited`.
    """

    @property
    def schedule_id(self) -> str:
        """The schedule's id, unique for its principal."""
        ...

    async def info(self) -> ScheduleView:
        """Return the schedule's current state: its next due time, and its counts of fired, missed and refused ticks."""
        ...

    async def pause(self) -> ScheduleView:
        """Pause the schedule; its ticks are dropped until it is resumed. Idempotent."""
        ...

    async def resume(self) -> ScheduleView:
        """Resume with the first tick from now on. Idempotent."""
        ...

    async def run_now(self) -> Receipt:
        """Send the schedule's message now, without shifting its ticks. Counts towards ``max_runs``.

        Raises the errors of `SessionAPI.send` with the schedule's policy, and `ScheduleFinished`.
        """
        ...

    async def delete(self) -> ScheduleView:
        """Delete the schedule and return its last state. Messages that it has already sent are kept."""
        ...


class SessionAPI(Protocol):
    """A handle to a session. Creating one does no I/O; several handles may refer to the same session.

    Every method may raise `AccessDenied`, `StorageError` and, over HTTP, `ServerUnreachable` and `RateLimited`.
    """

    @property
    def key(self) -> str:
        """The session's key."""
        ...

    async def send(self, content: str, **options: Unpack[SendKeywords]) -> Receipt:
        """Put a message into the mailbox; it is durable on return.

        Parameters:
            content: the text.
            options: ``policy``, ``idempotency_key``, ``agent``, ``quiet_s``, ``max_wait_s`` and ``attachments``, as in
                `SendOptions`.

        Raises:
            SessionBusy, MailboxFull, IdempotencyMismatch, SessionDeleted, UnknownAgent, UnknownPolicy,
            UnknownAttachment, InvalidRequest, Draining: nothing was stored.
        """
        ...

    async def wait(self, message_id: str, *, timeout_s: float | None = None) -> Settlement:
        """Wait until a message is settled.

        Raises:
            WaitExpired: not settled after `timeout_s` seconds; the run continues.
            UnknownMessage, UnknownSession: not found.
        """
        ...

    async def ask(self, content: str, *, timeout_s: float | None = None, **options: Unpack[SendKeywords]) -> str:
        """Send, wait, and return the answer.

        If the caller is cancelled (`asyncio.timeout`, `Task.cancel`) or `timeout_s` expires, only the wait ends, not
        the work: the message is durable, others may wait for it, and a client's connection may break at any time.
        To end the work, interrupt the session; to bound it, set the host's ``run_timeout_s`` or the agent's limits.

        Raises:
            RunFailed, RunInterrupted, MessageWithdrawn: the message settled without an answer.
            WaitExpired: not settled after `timeout_s` seconds.
            WaitsForItself: called in a run of this session.
        """
        ...

    def events(self, *, after: str | None = None, follow: str | None = None) -> AsyncIterator[Event | Gap]:
        """Yield the session's events in order, each once, or a `Gap` for missed events.

        Parameters:
            after: a cursor, such as a receipt's; None or ``"0"`` starts at the beginning, and waits for the session to
                be created if it does not exist yet.
            follow: a message id: the stream ends after the event that settles it.

        Raises:
            InvalidCursor: not a cursor of this session.
            UnknownSession: the session does not exist, and `after` or `follow` refers to it.
            UnknownMessage: the message of `follow` does not exist.
            SessionDeleted: the session was deleted.
        """
        ...

    async def interrupt(
        self, reason: str = "", *, run_id: str | None = None, grace_s: float | None = None
    ) -> StopReceipt:
        """Interrupt the active run, or only `run_id`; queued messages run next. Returns at once if the session is idle.

        `grace_s` is the grace period for cleanup, in seconds, shorter or longer than the host's (its default). If the
        run is already stopping, it can only shorten the rest of its grace period.
        """
        ...

    async def stop(self, reason: str = "", *, grace_s: float | None = None) -> SessionStop:
        """Stop the session's run and background work, and withdraw all waiting messages.

        `grace_s` is the grace period for cleanup, as in `interrupt`.
        """
        ...

    async def withdraw(self, message_id: str) -> Settlement:
        """Withdraw a queued message. Raises `AlreadySettled`, `UnknownMessage`."""
        ...

    async def message(self, message_id: str) -> Settlement:
        """Return a message's current state. Raises `UnknownMessage`."""
        ...

    async def info(self) -> SessionView:
        """Return the session's current state. Raises `UnknownSession`."""
        ...

    async def transcript(self) -> list[Entry]:
        """Return the transcript that the model sees, in order."""
        ...

    async def mailbox(self) -> list[MailboxItem]:
        """Return the waiting messages, in order."""
        ...

    async def tree(self) -> TreeNode:
        """Return the live tasks, threads and processes of this session."""
        ...

    async def run(self, run_id: str) -> RunView:
        """Return a run. Raises `UnknownRun`."""
        ...

    async def runs(self) -> list[RunView]:
        """Return the session's most recent runs, newest first."""
        ...

    async def questions(self) -> list[Question]:
        """Return the open questions of the suspended run, oldest first; empty if it does not wait for an answer."""
        ...

    async def answer(self, question: Question | str, text: str) -> Answer:
        """Answer a question, given as an object or by its id.

        Raises:
            UnknownQuestion, AlreadyAnswered, InvalidRequest (the question is an approval).
        """
        ...

    async def approve(self, question: Question | str, *, note: str = "", call_hash: str | None = None) -> Answer:
        """Approve the call that was shown.

        Parameters:
            question: the question as shown; or its id, with `call_hash`.
            note: for the model.
            call_hash: the ``call_hash`` of the question that was shown.

        Raises:
            CallMismatch: the question is for another call.
            InvalidRequest: an id was given without a `call_hash`, or the question asks for text.
            ApprovalKeyRequired: over HTTP, if approvals need a key that a person types.
            UnknownQuestion, AlreadyAnswered: as for `answer`.
        """
        ...

    async def deny(self, question: Question | str, *, reason: str = "") -> Answer:
        """Deny the call; the model gets the reason. Raises the errors of `answer`."""
        ...

    async def schedule(
        self, text: str, *, schedule_id: str | None = None, **spec: Unpack[ScheduleKeywords]
    ) -> ScheduleAPI:
        """Send this session a message on a schedule, starting now; durable on return.

        Parameters:
            text: the message.
            schedule_id: replaces an existing schedule with this id: an identical one changes nothing, a new cadence
                starts over, and a paused schedule stays paused. None creates a new schedule.
            spec: ``every_s`` (1 second or more) or ``cron``, ``timezone``, ``agent``, ``overlap``, ``miss``,
                ``initial_delay_s``, ``jitter_s`` and ``max_runs``, as in `ScheduleSpec`.

        Raises:
            InvalidSchedule, UnknownAgent, UnknownPolicy, InvalidKey, InvalidRequest, LimitExceeded, Draining: nothing
            was stored.
        """
        ...

    async def retry(self) -> Receipt:
        """Remove the last run's entries from the transcript and resend its messages, in one transaction.

        Raises `SessionBusy`, `NothingToUndo`, `HistoryChanged`.
        """
        ...

    async def undo(self) -> list[Entry]:
        """Remove the last run's (or the last edit's) entries from the transcript, and return them.

        Raises `SessionBusy`, `NothingToUndo`.
        """
        ...

    async def compact(self, *, keep: int = 4) -> list[Entry]:
        """Have the agent's model summarize all but the last `keep` user messages and what followed them.

        Return the new transcript. Raises `SessionBusy`, `HistoryChanged`, `NotSupported` (an agent without a model),
        `ModelFailed`.
        """
        ...

    async def fork(self, key: str, *, through_n: int | None = None) -> SessionView:
        """Create a session with a copy of this transcript, up to entry `through_n` (plus the results it needs).

        Raises `SessionBusy` (the key already has a history), `InvalidKey`.
        """
        ...

    async def export(self) -> SessionExport:
        """Return the transcript and its attachments, for `import_history` on this host or another one."""
        ...

    async def import_history(self, export: SessionExport) -> SessionView:
        """Start this session with an exported history. Raises `SessionBusy` (it already has one), `InvalidRequest`."""
        ...

    async def attach(self, body: bytes, *, media_type: str, name: str = "") -> Attachment:
        """Store bytes for a message, addressed by their hash. Raises `LimitExceeded`, `InvalidRequest`."""
        ...

    async def attachment(self, digest: str) -> tuple[Attachment, bytes]:
        """Return an attachment of this principal. Raises `UnknownAttachment`."""
        ...

    async def delete(self) -> SessionStop:
        """Stop and delete the session; its key raises `SessionDeleted` until the tombstone is purged."""
        ...


def answer(settlement: Settlement) -> str:
    """Return the text of a completed message. Raises `RunFailed`, `RunInterrupted` or `MessageWithdrawn` otherwise."""
    match settlement.state:
        case "completed":
            return settlement.text
        case "failed":
            raise RunFailed(settlement.error or "the agent failed")
        case "withdrawn":
            raise MessageWithdrawn("the message was withdrawn before a run took it")
        case "superseded":
            raise RunInterrupted(
                "the run was rolled back: a newer message replaced this one",
                hint="its entries are not in the transcript; the log shows what it did and what was not undone",
            )
        case _:
            cause = settlement.cause
            why = f"{cause.kind}{f': {cause.reason}' if cause.reason else ''}" if cause else settlement.state
            raise RunInterrupted(f"the run was interrupted ({why})", hint="its partial answer is in the transcript")
