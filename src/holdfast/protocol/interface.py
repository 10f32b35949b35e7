"""The interface of a session, the same on a `Host` in this process and through a `Client` over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from holdfast.errors import MessageWithdrawn, RunFailed, RunInterrupted
from holdfast.protocol.events import Event, Gap
from holdfast.protocol.messages import (
    Answer,
    Attachment,
    Entry,
    MailboxItem,
    Policy,
    Question,
    Receipt,
    RunView,
    SessionExport,
    SessionStop,
    SessionView,
    Settlement,
    TreeNode,
)
from holdfast.protocol.schedules import Miss, ScheduleView
from holdfast.protocol.stopping import StopReceipt

__all__ = ["ScheduleLike", "SessionLike", "answer"]


class ScheduleLike(Protocol):
    """A schedule: getting one does no I/O, and any number may be in use for the same one at the same time.

    Every method may raise `UnknownSchedule`, `AccessDenied`, `StorageError` and, over HTTP, `ServerUnreachable` and
    `RateLimited`.
    """

    @property
    def schedule_id(self) -> str:
        """Its id, among those of its principal."""
        ...

    async def info(self) -> ScheduleView:
        """The schedule as it stands: when it is next due, how many ticks were fired, missed and refused."""
        ...

    async def pause(self) -> ScheduleView:
        """Have no more ticks until it is resumed; they are not made up for. Repeated: no second effect."""
        ...

    async def resume(self) -> ScheduleView:
        """Go on with the first tick from now on. Repeated: no second effect."""
        ...

    async def run_now(self) -> Receipt:
        """Send its message now; its ticks stay where they are. It counts for ``max_runs``.

        Raises what `SessionLike.send` raises with the schedule's policy, and `ScheduleFinished`.
        """
        ...

    async def delete(self) -> ScheduleView:
        """Delete it, and return how it stood. Messages that it has sent are not withdrawn."""
        ...


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
        attachments: Sequence[Attachment] = (),
    ) -> Receipt:
        """Put a message into the mailbox; when this returns it is durable.

        Parameters:
            content: the text.
            policy: what to do if a run is on.
            idempotency_key: the same key is accepted once; a repeat gets the first one's receipt.
            agent: the agent of a new session, or a change for runs that start later.
            quiet_s, max_wait_s: for ``collect``, in seconds.
            attachments: what `attach` gave.

        Raises:
            SessionBusy, MailboxFull, IdempotencyMismatch, SessionDeleted, UnknownAgent, UnknownPolicy,
            UnknownAttachment, InvalidRequest, Draining: nothing was stored.
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
        attachments: Sequence[Attachment] = (),
    ) -> str:
        """Send, wait, and return the answer.

        A caller that is cancelled (`asyncio.timeout`, `Task.cancel`) or whose `timeout_s` is over gives up its wait,
        not the work: the message is durable, others may wait for it, and a client's connection may break at any time.
        To end the work, interrupt the session; to bound it, set the host's ``run_s`` or the agent's limits.

        Raises:
            RunFailed, RunInterrupted, MessageWithdrawn: what became of the message instead.
            WaitExpired: no settlement after `timeout_s` seconds.
            WaitsForItself: called in a run of this session.
        """
        ...

    def events(self, *, after: str | None = None, follow: str | None = None) -> AsyncIterator[Event | Gap]:
        """The session's events in order, each once, or a `Gap` for what was missed.

        Parameters:
            after: a cursor, such as a receipt's; None or ``"0"`` starts at the beginning, and waits for it if the
                session does not exist yet.
            follow: a message id: the stream ends after the event that settles it.

        Raises:
            InvalidCursor: not a cursor of this session.
            UnknownSession: there is none, and `after` or `follow` name something in it.
            UnknownMessage: there is none.
            SessionDeleted: it was deleted.
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

    async def questions(self) -> list[Question]:
        """What the suspended run waits for, oldest first; empty when it waits for nobody."""
        ...

    async def answer(self, question: Question | str, text: str) -> Answer:
        """Answer a question, given as such or by its id.

        Raises:
            UnknownQuestion, AlreadyAnswered, InvalidRequest (it is an approval).
        """
        ...

    async def approve(self, question: Question | str, *, note: str = "", call_hash: str | None = None) -> Answer:
        """Let the call be made that was shown.

        Parameters:
            question: as it was shown; or its id, with `call_hash`.
            note: for the model.
            call_hash: the ``call_hash`` of the question that was shown.

        Raises:
            CallMismatch: the question asks for another call.
            InvalidRequest: an id came without a `call_hash`, or the question is one in words.
            ApprovalKeyRequired: over HTTP, where an approval needs a key that a person typed.
            UnknownQuestion, AlreadyAnswered: as `answer` does.
        """
        ...

    async def deny(self, question: Question | str, *, reason: str = "") -> Answer:
        """Refuse the call; the model is told, with the reason. Raises as `answer` does."""
        ...

    async def schedule(
        self,
        text: str,
        *,
        every_s: float | None = None,
        cron: str | None = None,
        timezone: str = "UTC",
        schedule_id: str | None = None,
        agent: str | None = None,
        overlap: Policy = "queue",
        miss: Miss = "skip",
        initial_delay_s: float | None = None,
        jitter_s: float = 0.0,
        max_runs: int | None = None,
    ) -> ScheduleLike:
        """Send this session a message by the clock, from now on; durable when this returns.

        Parameters:
            text: the message.
            every_s, cron: when: at even distances (1 second or more), or by a cron line; one of them.
            timezone: in which the cron line is read, such as ``Europe/Berlin``.
            schedule_id: names it. Under the id of an existing one it takes that one's place: the same again changes
                nothing, another cadence begins anew, and one that is paused stays so. None makes a new one.
            agent: the agent that answers; by default the session's.
            overlap: the policy of its messages, for when a run is on; ``reject`` leaves the tick out.
            miss: what becomes of ticks that were missed, because the host was down or the clock jumped: ``skip`` leaves
                them out, ``delay`` fires once for all, ``burst`` fires each (the newest 100).
            initial_delay_s: the time to the first tick, in seconds; with a cron line no tick comes before.
            jitter_s: each tick comes later by a part of this, in seconds.
            max_runs: after so many firings it is finished.

        Raises:
            InvalidSchedule, UnknownAgent, UnknownPolicy, InvalidKey, InvalidRequest, LimitExceeded, Draining: nothing
            was stored.
        """
        ...

    async def retry(self) -> Receipt:
        """Take the last run's entries out of the transcript and send its messages again, in one transaction.

        Raises `SessionBusy`, `NothingToUndo`, `HistoryChanged`.
        """
        ...

    async def undo(self) -> list[Entry]:
        """Take the last run's entries (or the last edit's) out of the transcript, and return them.

        Raises `SessionBusy`, `NothingToUndo`.
        """
        ...

    async def compact(self, *, keep: int = 4) -> list[Entry]:
        """Let the agent's model sum up all but the last `keep` messages of a person and what followed them.

        Returns the new transcript. Raises `SessionBusy`, `HistoryChanged`, `NotSupported` (an agent without a model),
        `ModelFailed`.
        """
        ...

    async def branch(self, key: str, *, through_n: int | None = None) -> SessionView:
        """A new session with a copy of this one's transcript, up to the entry `through_n` (and the results it needs).

        Raises `SessionBusy` (that key has a history), `InvalidKey`.
        """
        ...

    async def export(self) -> SessionExport:
        """The transcript and its attachments, for `import_history` there or elsewhere."""
        ...

    async def import_history(self, export: SessionExport) -> SessionView:
        """Begin this session with the history of an export. Raises `SessionBusy` (it has one), `InvalidRequest`."""
        ...

    async def attach(self, body: bytes, *, media_type: str, name: str = "") -> Attachment:
        """Keep bytes for a message, by their hash. Raises `LimitExceeded`, `InvalidRequest`."""
        ...

    async def attachment(self, digest: str) -> tuple[Attachment, bytes]:
        """An attachment of this principal. Raises `UnknownAttachment`."""
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
            raise RunFailed(settlement.error or "the agent failed")
        case "withdrawn":
            raise MessageWithdrawn("the message was withdrawn before a run took it")
        case "superseded":
            raise RunInterrupted(
                "the run was rolled back: a newer message takes the place of this one",
                hint="nothing of it is in the transcript; the log has what it did, and what could not be undone",
            )
        case _:
            cause = settlement.cause
            why = f"{cause.kind}{f': {cause.reason}' if cause.reason else ''}" if cause else settlement.state
            raise RunInterrupted(f"the run was interrupted ({why})", hint="its partial answer is in the transcript")
