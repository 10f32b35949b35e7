"""The interface of a session handle, identical for a `Host` in this process and a `Client` over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, Unpack

from holdfast.errors import MessageWithdrawn, RunFailed, RunInterrupted
from holdfast.protocol.events import Event, Gap
from holdfast.protocol.messages import (
    Answer,
    Attachment,
    Entry,
    Grant,
    GrantScope,
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
    """A handle to a schedule. Creating a handle does no I/O; several handles may refer to the same schedule.

    Every method may raise `UnknownSchedule`, `AccessDenied`, `StorageError` and, over HTTP, `ServerUnreachable` and
    `RateLimited`.
    """

    @property
    def schedule_id(self) -> str:
        """The schedule's id, unique among the schedules of its principal."""
        ...

    async def info(self) -> ScheduleView:
        """Return the schedule's current state: its next due time, and its counts of fired, missed and refused ticks."""
        ...

    async def pause(self) -> ScheduleView:
        """Pause the schedule. Ticks are dropped until the schedule is resumed. Idempotent."""
        ...

    async def resume(self) -> ScheduleView:
        """Resume the schedule, which continues with the first tick after the current time. Idempotent."""
        ...

    async def run_now(self) -> Receipt:
        """Send the schedule's message now, without shifting its ticks. The message counts towards ``max_runs``.

        Raises `ScheduleFinished`, and the errors that `SessionAPI.send` raises for the schedule's policy.
        """
        ...

    async def delete(self) -> ScheduleView:
        """Delete the schedule and return its last state. Messages already sent by the schedule are kept."""
        ...


class SessionAPI(Protocol):
    """A handle to a session. Creating a handle does no I/O; several handles may refer to the same session.

    Every method may raise `AccessDenied`, `StorageError` and, over HTTP, `ServerUnreachable` and `RateLimited`.
    """

    @property
    def key(self) -> str:
        """The session's key."""
        ...

    async def send(self, content: str, **options: Unpack[SendKeywords]) -> Receipt:
        """Put a message into the session's mailbox. When the call returns, the message is durable.

        Parameters:
            content: the text of the message.
            options: ``policy``, ``idempotency_key``, ``agent``, ``quiet_s``, ``max_wait_s`` and ``attachments``, as
                described in `SendOptions`.

        Raises:
            SessionBusy, MailboxFull, IdempotencyMismatch, SessionDeleted, UnknownAgent, SessionAgentMissing,
            UnknownPolicy, UnknownAttachment, InvalidRequest, Draining: if the message was refused; nothing was stored.
        """
        ...

    async def wait(self, message_id: str, *, timeout_s: float | None = None) -> Settlement:
        """Wait until a message is settled, and return its settlement.

        Raises:
            WaitExpired: if the message is not settled after `timeout_s` seconds; its run continues.
            WaitsForItself: if called in a run of this session before the message is settled.
            UnknownMessage, UnknownSession: if the message or the session does not exist.
        """
        ...

    async def ask(self, content: str, *, timeout_s: float | None = None, **options: Unpack[SendKeywords]) -> str:
        """Send a message, wait until it is settled, and return the answer.

        If the caller is cancelled (`asyncio.timeout`, `Task.cancel`) or `timeout_s` expires, only the wait ends and
        the run continues, because the message is durable, other callers may be waiting for its answer, and a client's
        connection may break at any time. To end the run, interrupt the session; to bound its duration or cost, set the
        host's ``run_timeout_s`` or the agent's limits. This method also raises the errors of `send`.

        Raises:
            RunFailed, RunInterrupted, MessageWithdrawn: if the message was settled without an answer.
            WaitExpired: if the message is not settled after `timeout_s` seconds.
            WaitsForItself: if called in a run of this session.
        """
        ...

    def events(self, *, after: str | None = None, follow: str | None = None) -> AsyncIterator[Event | Gap]:
        """Yield the session's events in order, each exactly once, and a `Gap` in place of missed events.

        Parameters:
            after: cursor after which to start, such as the cursor of a receipt. None or ``"0"`` starts at the first
                event, and waits if the session does not exist yet.
            follow: id of a message; the stream ends after the event that settles this message. None follows the
                session indefinitely.

        Raises:
            InvalidCursor: if `after` is not a cursor of this session.
            UnknownSession: if the session does not exist and `after` or `follow` refers to it.
            UnknownMessage: if the message `follow` does not exist.
            SessionDeleted: if the session was deleted.
        """
        ...

    async def interrupt(
        self, reason: str = "", *, run_id: str | None = None, grace_s: float | None = None
    ) -> StopReceipt:
        """Interrupt the active run; queued messages run next. Return at once if the session is idle.

        If `run_id` is given, only that run is interrupted. `grace_s` is the grace period for cleanup, in seconds; None
        means the host's ``grace_s``. If the run is already stopping, `grace_s` can only shorten the remaining grace
        period.
        """
        ...

    async def stop(self, reason: str = "", *, grace_s: float | None = None) -> SessionStop:
        """Stop the session's run and background work, and withdraw all queued messages.

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
        """Return the queued messages, in order."""
        ...

    async def tree(self) -> TreeNode:
        """Return the live tasks, threads and processes of this session."""
        ...

    async def run(self, run_id: str) -> RunView:
        """Return the current state of a run. Raises `UnknownRun`."""
        ...

    async def runs(self) -> list[RunView]:
        """Return the session's most recent runs, newest first."""
        ...

    async def questions(self) -> list[Question]:
        """Return the open questions of the suspended run, oldest first; an empty list if no answer is awaited."""
        ...

    async def answer(self, question: Question | str, text: str) -> Answer:
        """Answer a question, given as a `Question` or by its id.

        Raises:
            UnknownQuestion: if the question does not exist.
            AlreadyAnswered: if the question already has a different answer or has expired.
            InvalidRequest: if the question is an approval.
        """
        ...

    async def approve(
        self,
        question: Question | str,
        *,
        note: str = "",
        call_hash: str | None = None,
        scope: GrantScope = "call",
    ) -> Answer:
        """Approve the call that a person was shown, and the access that it asks for.

        Parameters:
            question: the question that was shown, as a `Question`; or its id, which requires `call_hash`.
            note: text recorded with the approval.
            call_hash: the ``call_hash`` of the question that was shown.
            scope: what the access holds for: this ``call``, later calls of this ``session``, or all sessions of the
                session's ``principal``. The latter two are recorded as a `Grant`, until it is revoked.

        Raises:
            CallMismatch: if the question is for a different call than the approved one.
            InvalidRequest: if an id is given without a `call_hash`, if the question asks for text, or if `scope` is
                not ``call`` and the call asks for no access.
            LimitExceeded: if the principal has too many grants.
            ApprovalKeyRequired: over HTTP, if the server requires an approval key, which a person must type.
            UnknownQuestion, AlreadyAnswered: under the conditions of `answer`.
        """
        ...

    async def deny(self, question: Question | str, *, reason: str = "") -> Answer:
        """Deny the call that needs approval. The model sees the reason.

        Raises:
            InvalidRequest: if the question asks for text.
            UnknownQuestion, AlreadyAnswered: under the conditions of `answer`.
        """
        ...

    async def grants(self) -> list[Grant]:
        """Return the grants that hold in this session, oldest first, those of its principal included."""
        ...

    async def schedule(
        self, text: str, *, schedule_id: str | None = None, **spec: Unpack[ScheduleKeywords]
    ) -> ScheduleAPI:
        """Send a message to this session on a schedule, starting now. When the call returns, the schedule is durable.

        Parameters:
            text: the text of the message.
            schedule_id: id of the schedule; None creates a schedule with a new id. An existing schedule with this id is
                replaced: it stays paused if it was paused, and its ticks start over only if the cadence has changed.
            spec: ``every_s`` (1 second or more) or ``cron``, ``timezone``, ``agent``, ``overlap``, ``miss``,
                ``initial_delay_s``, ``jitter_s`` and ``max_runs``, as described in `ScheduleSpec`.

        Raises:
            InvalidSchedule, UnknownAgent, UnknownPolicy, InvalidKey, InvalidRequest, LimitExceeded, Draining: if the
            schedule was refused; nothing was stored.
        """
        ...

    async def retry(self) -> Receipt:
        """Remove the last run's entries from the transcript and resend the run's messages.

        Both happen in one transaction; several messages are resent as one message.
        Raises `SessionBusy`, `NothingToUndo`, `HistoryChanged`, `SessionAgentMissing`.
        """
        ...

    async def undo(self) -> list[Entry]:
        """Remove the entries of the last run or edit from the transcript, and return the removed entries.

        Raises `SessionBusy`, `NothingToUndo`.
        """
        ...

    async def compact(self, *, keep: int = 4) -> list[Entry]:
        """Replace the older part of the transcript with a summary that the agent's model writes.

        The last `keep` user messages and all entries after the first of these messages are kept. Return the new
        transcript.
        Raises `SessionBusy`, `HistoryChanged`, `NotSupported` (if the agent has no model), `ModelFailed`.
        """
        ...

    async def fork(self, key: str, *, through_n: int | None = None) -> SessionView:
        """Create a session `key` with a copy of this session's transcript.

        `through_n` is the number of the last entry to copy; None copies all entries. Results of copied calls are always
        copied.
        Raises `SessionBusy` (if the session `key` already has a history), `InvalidKey`.
        """
        ...

    async def export(self) -> SessionExport:
        """Return the transcript and its attachments, for `import_history` on this or another host."""
        ...

    async def import_history(self, export: SessionExport) -> SessionView:
        """Start this session with an exported history.

        Raises `SessionBusy` (if the session already has a history), `InvalidRequest`.
        """
        ...

    async def attach(self, body: bytes, *, media_type: str, name: str = "") -> Attachment:
        """Store the bytes of an attachment, addressed by their hash. Raises `LimitExceeded`, `InvalidRequest`."""
        ...

    async def attachment(self, digest: str) -> tuple[Attachment, bytes]:
        """Return an attachment of the session's principal, and its bytes. Raises `UnknownAttachment`."""
        ...

    async def delete(self) -> SessionStop:
        """Stop and delete the session.

        Until the session's tombstone is purged, use of the session's key raises `SessionDeleted`.
        """
        ...


def answer(settlement: Settlement) -> str:
    """Return the answer to a completed message.

    Raises `RunFailed`, `RunInterrupted` or `MessageWithdrawn` if the message did not complete.
    """
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
                hint="the transcript omits the run; the session's events show what the run did and what was not undone",
            )
        case _:
            cause = settlement.cause
            why = f"{cause.kind}{f': {cause.reason}' if cause.reason else ''}" if cause else settlement.state
            raise RunInterrupted(f"the run was interrupted ({why})", hint="the transcript has its partial answer")
