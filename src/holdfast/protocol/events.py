"""The closed union of log events, and the wire form of events.

The body of a stored event does not contain the event's number. The store assigns the number, and `wire()` adds it to
the body.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from holdfast.errors import InvalidCursor
from holdfast.protocol.messages import Answer, Attachment, HistoryEdit, Policy, Question, SettledAs, Usage
from holdfast.protocol.model import ToolCall
from holdfast.protocol.stopping import Cause, StopReceipt

__all__ = [
    "EVENT_KINDS",
    "START",
    "ChildFinished",
    "ChildStarted",
    "Event",
    "Gap",
    "HistoryEdited",
    "MessageAccepted",
    "MessageSettled",
    "MessageSteered",
    "ReasoningDelta",
    "RunFinished",
    "RunRestarted",
    "RunResumed",
    "RunRolledBack",
    "RunStarted",
    "RunStopping",
    "RunSuspended",
    "SessionDeletedEvent",
    "StepFinished",
    "StepStarted",
    "Stored",
    "TextDelta",
    "ToolFinished",
    "ToolOutput",
    "ToolStarted",
    "decode_event",
    "encode_event",
    "encode_json",
    "format_cursor",
    "number_in",
    "parse_cursor",
    "plain",
    "shown",
    "wire",
]


class EventBase(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", gc=False):
    """Base of all events: ``at`` (seconds since the epoch), and ``seq`` once stored."""

    seq: int = 0
    at: float = 0.0

    @property
    def kind(self) -> str:
        """The event's kind, such as ``text.delta``."""
        tag = self.__struct_config__.tag
        assert isinstance(tag, str)
        return tag


class MessageAccepted(EventBase, frozen=True, kw_only=True, tag="message.accepted"):
    """A message was stored durably in the mailbox."""

    message_id: str
    content: str
    policy: Policy = "queue"
    attachments: tuple[Attachment, ...] = ()


class MessageSteered(EventBase, frozen=True, kw_only=True, tag="message.steered"):
    """A message was given to a running agent before the named step."""

    message_id: str
    run_id: str
    step: int


class MessageSettled(EventBase, frozen=True, kw_only=True, tag="message.settled"):
    """A message reached its final state. Written exactly once."""

    message_id: str
    state: SettledAs
    run_id: str | None = None


class RunStarted(EventBase, frozen=True, kw_only=True, tag="run.started"):
    """A run took messages from the mailbox."""

    run_id: str
    agent: str
    messages: tuple[str, ...]


class RunRestarted(EventBase, frozen=True, kw_only=True, tag="run.restarted"):
    """A run resumes after a crash; readers discard the run's text from seq ``discard_from`` (inclusive) on.

    An agent with a model resumes after its last complete step; any other agent repeats its output.
    """

    run_id: str
    attempt: int
    discard_from: int


class RunSuspended(EventBase, frozen=True, kw_only=True, tag="run.suspended"):
    """A run asked a person a question and is suspended; one event for each question."""

    run_id: str
    question: Question


class RunResumed(EventBase, frozen=True, kw_only=True, tag="run.resumed"):
    """A question was answered or expired; the run resumes once ``waiting``, the number of its open questions, is 0."""

    run_id: str
    answer: Answer
    waiting: int = 0


class RunStopping(EventBase, frozen=True, kw_only=True, tag="run.stopping"):
    """An interrupt of the run was stored durably.

    ``grace_s`` is the grace period of the request, if it came to another host than the one that has the run.
    """

    run_id: str
    cause: Cause
    grace_s: float | None = None


class RunFinished(EventBase, frozen=True, kw_only=True, tag="run.finished"):
    """The terminal event of a run."""

    run_id: str
    status: Literal["completed", "failed", "interrupted"]
    text: str = ""
    cause: Cause | None = None
    error: str | None = None
    receipt: StopReceipt | None = None
    usage: Usage = Usage()


class RunRolledBack(EventBase, frozen=True, kw_only=True, tag="run.rolled_back"):
    """A run's entries were removed from the transcript; ``not_undone`` lists external effects that remain."""

    run_id: str
    not_undone: tuple[str, ...] = ()


class StepStarted(EventBase, frozen=True, kw_only=True, tag="step.started"):
    """An agent began a step."""

    run_id: str
    step: int
    label: str = ""


class StepFinished(EventBase, frozen=True, kw_only=True, tag="step.finished"):
    """The model's complete answer in a step; its calls start after this event is durable.

    Parameters:
        run_id: id of the run or child that the step belongs to.
        step: number of the step in that run, from 1. A number below 1 marks a summary, which only the model sees: 0
            for a summary of the history before the run, -n for a summary of the run's messages before step n.
        text: text of the answer, which readers have already received in pieces.
        calls: calls that the model requested, with ids assigned by the agent loop.
        usage: usage of the step's request.
        model: name of the model, as reported by the provider.
        state: opaque data that a later step or attempt needs, such as a model's signatures; hidden from readers.
    """

    run_id: str
    step: int
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    usage: Usage = Usage()
    model: str = ""
    state: Any = None


class TextDelta(EventBase, frozen=True, kw_only=True, tag="text.delta"):
    """A piece of the answer."""

    run_id: str
    text: str


class ReasoningDelta(EventBase, frozen=True, kw_only=True, tag="reasoning.delta"):
    """A piece of the model's reasoning."""

    run_id: str
    text: str


class ToolStarted(EventBase, frozen=True, kw_only=True, tag="tool.started"):
    """A call is about to start; the event is durable before the call has any effect.

    Pass ``call_id`` to external services as the idempotency key.
    """

    run_id: str
    call_id: str
    name: str
    arguments: Any = None
    idempotent: bool = False


class ToolOutput(EventBase, frozen=True, kw_only=True, tag="tool.output"):
    """A piece of a call's output."""

    run_id: str
    call_id: str
    text: str


class ToolFinished(EventBase, frozen=True, kw_only=True, tag="tool.finished"):
    """The result of a call.

    ``status`` ``interrupted`` marks a call that was interrupted before it had a result. ``failed`` marks a call that
    returned normally, but whose program failed, such as one with a nonzero exit code.
    """

    run_id: str
    call_id: str
    status: Literal["ok", "error", "interrupted"]
    result: Any = None
    error: str | None = None
    failed: bool = False


class ChildStarted(EventBase, frozen=True, kw_only=True, tag="child.started"):
    """A run started a child. ``name`` is the name of its branch, if it has one."""

    run_id: str
    child_id: str
    agent: str
    text: str = ""
    name: str = ""


class ChildFinished(EventBase, frozen=True, kw_only=True, tag="child.finished"):
    """A child ended. ``cause`` is set if the child was interrupted and its parent was not."""

    run_id: str
    child_id: str
    status: Literal["completed", "failed", "interrupted"]
    text: str = ""
    error: str | None = None
    cause: Cause | None = None


class HistoryEdited(EventBase, frozen=True, kw_only=True, tag="history.edited"):
    """The transcript was edited while no run was active.

    Entries with n ≥ ``from_n`` were removed, then ``added`` entries were appended. ``from_n`` is 0 if nothing was
    removed.
    """

    edit: HistoryEdit
    from_n: int = 0
    added: int = 0


class SessionDeletedEvent(EventBase, frozen=True, kw_only=True, tag="session.deleted"):
    """The last event of a session."""

    reason: str = ""


Event = (
    MessageAccepted
    | MessageSteered
    | MessageSettled
    | RunStarted
    | RunRestarted
    | RunSuspended
    | RunResumed
    | RunStopping
    | RunFinished
    | RunRolledBack
    | StepStarted
    | StepFinished
    | TextDelta
    | ReasoningDelta
    | ToolStarted
    | ToolOutput
    | ToolFinished
    | ChildStarted
    | ChildFinished
    | HistoryEdited
    | SessionDeletedEvent
)


class Gap(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="gap"):
    """A frame that is not an event of the log: the reader missed the events with ``after`` < seq ≤ ``until``."""

    after: int
    until: int
    reason: Literal["pruned", "foreign_cursor", "slow_reader"]

    @property
    def kind(self) -> str:
        """Always ``gap``, so that a gap has a kind like an event."""
        return "gap"


class Stored(NamedTuple):
    """An event as stored in the log: its number, its kind, and its JSON without the number."""

    seq: int
    kind: str
    body: bytes


EVENT_KINDS: tuple[str, ...] = tuple(str(member.__struct_config__.tag) for member in Event.__args__)

_kinds: dict[type, str] = {member: str(member.__struct_config__.tag) for member in Event.__args__}
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
_step_decoder = msgspec.json.Decoder(StepFinished)
_STEP_FINISHED = _kinds[StepFinished]


def plain(text: str) -> str:
    """Return the text with lone surrogates, which UTF-8 cannot encode, replaced by escape sequences."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


def encode_json(value: object) -> bytes:
    """Return a value as one line of JSON. Text that UTF-8 cannot encode is passed through `plain`."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        return _encoder.encode(_all_plain(msgspec.to_builtins(value)))


def encode_event(event: Event) -> tuple[str, bytes]:
    """Return the kind and the JSON of an event that has no number yet."""
    try:
        return _kinds[type(event)], _encoder.encode(event)
    except UnicodeEncodeError:
        return _kinds[type(event)], encode_json(event)


def _all_plain(value: Any) -> Any:
    match value:
        case str():
            return plain(value)
        case dict():
            return {_all_plain(key): _all_plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_all_plain(item) for item in value]
        case _:
            return value


def wire(stored: Stored) -> bytes:
    """Return the JSON of a stored event, including its number, as sent after ``data:``."""
    return b'{"seq":%d,%b' % (stored.seq, stored.body[1:])


def shown(events: Sequence[Stored]) -> list[Stored]:
    """Return the events without `StepFinished.state`, which is hidden from readers."""
    return [_without_state(event) if event.kind == _STEP_FINISHED else event for event in events]


def _without_state(stored: Stored) -> Stored:
    step = _step_decoder.decode(stored.body)
    if step.state is None:
        return stored
    return stored._replace(body=_encoder.encode(msgspec.structs.replace(step, state=None)))


def decode_event(stored: Stored) -> Event:
    """Return the decoded event. Raises `msgspec.ValidationError` if the stored event is malformed."""
    return _decoder.decode(wire(stored))


START = "0"
"""The cursor before the first event of any session, including a session that does not exist yet."""


def format_cursor(seq: int, number: int) -> str:
    """Return the cursor after the event `seq` of the session with this number."""
    return f"{seq}-{number}"


def number_in(cursor: str) -> int:
    """Return the number of the session that a cursor made by `format_cursor` belongs to."""
    return int(cursor.partition("-")[2])


def parse_cursor(cursor: str, number: int) -> int:
    """Return the event number that a cursor contains.

    Raises `InvalidCursor` if `cursor` is malformed or belongs to a session with a different number.
    """
    if cursor == START:
        return 0
    seq, dash, owner = cursor.partition("-")
    if not (dash and seq.isascii() and seq.isdigit() and owner.isascii() and owner.isdigit() and len(seq) < 19):
        raise InvalidCursor(f"{cursor[:50]!r} is not a cursor")
    if int(owner) != number:
        raise InvalidCursor(f"{cursor!r} belongs to another session")
    return int(seq)
