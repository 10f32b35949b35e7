"""Current activity of a session, read from the end of its log: its step, its calls with their output, and its text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.host.readers import events_bytes
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

__all__ = ["CallNow", "Doing", "doing", "read_doing"]

_LOOK_BACK = 300
_TAIL = 160


@dataclass(slots=True)
class CallNow:
    """A call that is on: its tool, its arguments in short, when it began, and the end of its output."""

    name: str
    arguments: str = ""
    began_at: float = 0.0
    output: str = ""


@dataclass(slots=True)
class Doing:
    """What a run does, as far as the end of the log tells.

    Parameters:
        agent: its agent.
        step: the step it is at; 0 while it has none.
        calls: the calls that are on, by their id; the finished ones are counted in `done`.
        said: the end of what it says or thinks.
        usage: what it used, while it is in this process.
        questions: what it waits for.
    """

    agent: str = ""
    step: int = 0
    calls: dict[str, CallNow] = field(default_factory=dict)
    done: int = 0
    said: str = ""
    usage: Usage | None = None
    questions: list[Question] = field(default_factory=list)


def read_doing(events: Iterable[Event]) -> Doing:
    """What the newest run among the events does."""
    now = Doing()
    speaker = None
    for event in events:
        match event:
            case RunStarted():
                now = Doing(agent=event.agent)
            case StepStarted():
                now.step = event.step
            case TextDelta() | ReasoningDelta():
                between = "\n" if now.said and event.run_id != speaker else ""  # branches speak beside each other
                now.said = _tail(now.said + between + event.text)
                speaker = event.run_id
            case ToolStarted():
                now.calls[event.call_id] = CallNow(event.name, _short(event.arguments), event.at)
            case ToolOutput():
                call = now.calls.setdefault(event.call_id, CallNow("a call"))
                call.output = _tail(call.output + event.text)
            case ToolFinished():
                now.calls.pop(event.call_id, None)
                now.done += 1
    return now


async def doing(host: Host, view: SessionView, *, reader: str) -> Doing:
    """What the session of `view`, which has a run, does now.

    Parameters:
        reader: the principal that asks, which is charged for the events while they are read.
    """
    found = await host.store.find_session(view.principal, view.key)
    if found is None:
        return Doing(agent=view.agent)
    row, view = found
    start = max(0, view.seq - _LOOK_BACK)
    stored, charge = await host.budgets.read_page(
        reader, lambda: host.store.read_events(row, after=start, limit=_LOOK_BACK), events_bytes
    )
    with charge:
        now = read_doing(map(decode_event, stored))
    now.agent = now.agent or view.agent
    live = host.live.get(view.run_id or "")
    if live is not None:
        now.usage = live.run.usage
    if view.state == "suspended":
        now.questions = await host.session(view.key, principal=view.principal).questions()
    return now


def _tail(text: str) -> str:
    """The end of a text, from a line or word on."""
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
