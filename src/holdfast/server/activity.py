"""Current activity of a session, derived from the last events of its log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.host.log_reader import events_bytes
from holdfast.protocol.events import (
    ReasoningDelta,
    RunStarted,
    StepStarted,
    TextDelta,
    ToolFinished,
    ToolOutput,
    ToolStarted,
    decode_event,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.host import Host
    from holdfast.protocol.events import Event
    from holdfast.protocol.messages import Question, SessionView, Usage

__all__ = ["ActiveCall", "Activity", "current_activity", "read_activity"]

_LOOK_BACK = 300
_TAIL = 160


@dataclass(slots=True)
class ActiveCall:
    """An active tool call: the tool's name, its shortened arguments, the start time and the last part of its output."""

    name: str
    arguments: str = ""
    began_at: float = 0.0
    output: str = ""


@dataclass(slots=True)
class Activity:
    """Current activity of a run, derived from the last events of the session's log.

    Parameters:
        agent: name of the run's agent.
        step: number of the current step; 0 before the first step.
        calls: active calls by id.
        done: number of finished calls.
        said: last part of the text or reasoning that the run has produced.
        usage: usage of the run; None if the run is not in the memory of this process.
        questions: open questions of the run.
    """

    agent: str = ""
    step: int = 0
    calls: dict[str, ActiveCall] = field(default_factory=dict)
    done: int = 0
    said: str = ""
    usage: Usage | None = None
    questions: list[Question] = field(default_factory=list)


def read_activity(events: Iterable[Event]) -> Activity:
    """Return the activity of the newest run in `events`."""
    now = Activity()
    speaker = None
    for event in events:
        match event:
            case RunStarted():
                now = Activity(agent=event.agent)
            case StepStarted():
                now.step = event.step
            case TextDelta() | ReasoningDelta():
                between = "\n" if now.said and event.run_id != speaker else ""  # texts of parallel branches interleave
                now.said = _tail(now.said + between + event.text)
                speaker = event.run_id
            case ToolStarted():
                now.calls[event.call_id] = ActiveCall(event.name, _short(event.arguments), event.at)
            case ToolOutput():
                call = now.calls.setdefault(event.call_id, ActiveCall("a call"))
                call.output = _tail(call.output + event.text)
            case ToolFinished():
                now.calls.pop(event.call_id, None)
                now.done += 1
    return now


async def current_activity(host: Host, view: SessionView, *, reader: str) -> Activity:
    """Return the current activity of a session that has a run.

    Parameters:
        host: host of the session.
        view: state of the session.
        reader: principal that requests the activity, and is charged for the memory of the events while they are read.
    """
    found = await host.store.find_session(view.principal, view.key)
    if found is None:
        return Activity(agent=view.agent)
    row, view = found
    start = max(0, view.seq - _LOOK_BACK)
    stored, charge = await host.budgets.read_page(
        reader, lambda: host.store.read_events(row, after=start, limit=_LOOK_BACK), events_bytes
    )
    with charge:
        now = read_activity(map(decode_event, stored))
    now.agent = now.agent or view.agent
    live = host.live.get(view.run_id or "")
    if live is not None:
        now.usage = live.run.usage
    if view.state == "suspended":
        now.questions = await host.session(view.key, principal=view.principal).questions()
    return now


def _tail(text: str) -> str:
    """Return the end of a text, which starts at the beginning of a line or word if possible."""
    if len(text) <= _TAIL:
        return text
    end = text[-_TAIL:]
    at = end.find("\n") + 1 or end.find(" ") + 1
    return end[at:]


def _short(arguments: Any) -> str:
    if not arguments:
        return ""
    text = msgspec.json.encode(arguments).decode()
    return text if len(text) <= _TAIL else f"{text[:_TAIL]}…"
