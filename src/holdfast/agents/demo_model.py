"""``scripted:demo``: a small rule-based model that does real work with the assistant's tools; it needs no API key.

The model chooses each answer from the last user message and the results of the calls since that message. If the
agent lacks a tool, the model skips the calls of that tool or answers that the tool is missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from holdfast.agents.scripted import ScriptedAnswer, ScriptedModel
from holdfast.protocol.model import CallPart, ModelRequest, ToolMessage, UserMessage

__all__ = ["HELP", "demo_model"]

HELP = """\
I am the demo model: a few rules instead of a mind, but the tools are real. Ask me for:

  report             a report about the files here, with the terminal, Python and a child agent
  run <command>      a command in the terminal
  python <script>    a Python script
  start <command>    a process that continues in the background
  delegate <task>    hand the task to a child agent
  fetch <address>    read a web page
  ask <question>     ask you something and wait for the answer
  wait <s>           sleep in the terminal, to try a stop on
"""

_CHUNK = 12

_COUNT = """\
import collections, pathlib

folder = pathlib.Path(".")
found = collections.Counter()
size = collections.Counter()
for path in sorted(folder.rglob("*")):
    if path.is_file() and not any(part.startswith(".") for part in path.parts):
        kind = path.suffix or "no suffix"
        found[kind] += 1
        size[kind] += path.stat().st_size
    if sum(found.values()) >= 2000:
        break
lines = [
    f"{kind}: {number} file{'' if number == 1 else 's'}, {size[kind]:,} bytes" for kind, number in found.most_common(8)
]
print("\\n".join(lines) or "no files")
"""
_SHOWN = 1500


def demo_model(*, pace_s: float = 0.02) -> ScriptedModel:
    """Return a new demo model.

    Parameters:
        pace_s: delay before each piece of an answer, in seconds.
    """
    return ScriptedModel(_answer, name="scripted:demo", chunk=_CHUNK, delay_s=pace_s, keep_requests=0)


class _Task:
    """The last user message, the results of the calls since that message, and the names of the agent's tools."""

    def __init__(self, request: ModelRequest) -> None:
        messages = request.messages
        at = max((n for n, message in enumerate(messages) if isinstance(message, UserMessage)), default=-1)
        asked = messages[at] if at >= 0 else None
        self.text = asked.content.strip() if isinstance(asked, UserMessage) else ""
        self.results = [message for message in messages[at + 1 :] if isinstance(message, ToolMessage)]
        self.tools = {tool.name for tool in request.tools}

    def result(self, name: str) -> str | None:
        """Return the shortened result of the newest call of the tool `name`; None if that tool has no result."""
        found = next((message for message in reversed(self.results) if message.name == name), None)
        if found is None:
            return None
        text = found.content.removesuffix("[exit code 0]").strip() or "(nothing)"
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}\n[…]"


def _answer(request: ModelRequest) -> ScriptedAnswer:
    task = _Task(request)
    word, _, rest = task.text.partition(" ")
    rule = _RULES.get(word.lower())
    if rule is not None:
        return list(rule(task, rest.strip()))
    if re.search(r"\b(report|files)\b", task.text, re.IGNORECASE):
        return list(_report(task, rest))
    return HELP


def _one(tool: str, parameter: str, begin: str = "") -> Callable[[_Task, str], Iterator[Any]]:
    """Return a rule that calls `tool` once and answers with the call's result."""

    def rule(task: _Task, rest: str) -> Iterator[Any]:
        if tool not in task.tools:
            yield f"I have no tool {tool!r} here."
        elif not rest:
            yield HELP
        elif (found := task.result(tool)) is None:
            yield from [begin] if begin else []
            yield CallPart(name=tool, arguments={parameter: rest})
        else:
            yield found

    return rule


def _wait(task: _Task, rest: str) -> Iterator[Any]:
    seconds = rest.split(" ")[0].removesuffix("s")
    if not seconds.replace(".", "", 1).isdigit():
        yield HELP
    elif (found := task.result("terminal")) is None:
        yield f"I sleep for {seconds} s."
        yield CallPart(name="terminal", arguments={"command": f"sleep {seconds} && echo slept"})
    else:
        yield found


def _report(task: _Task, rest: str) -> Iterator[Any]:
    """List the files in the terminal, count them with Python while a child reads, then write and return a report."""
    listing, counted, read = (task.result(name) for name in ("terminal", "python", "delegate"))
    if "terminal" in task.tools and listing is None:
        yield "I look at what is here first."
        yield CallPart(name="terminal", arguments={"command": "ls -p | head -50"})
        return
    calls: Sequence[CallPart] = [
        CallPart(name=name, arguments=arguments)
        for name, arguments, done in (
            ("python", {"script": _COUNT}, counted),
            ("delegate", {"task": "run head -n 5 README* 2>/dev/null || echo there is no README"}, read),
        )
        if name in task.tools and done is None
    ]
    if calls:
        yield "Now I count with Python, while a child agent reads the README."
        yield from calls
        return
    report = _text(listing, counted, read)
    if "write_file" in task.tools and task.result("write_file") is None:
        yield "I write the report down."
        yield CallPart(name="write_file", arguments={"path": "report.md", "content": report})
        return
    written = task.result("write_file")
    yield report
    if written is not None:
        yield f"\n(written to report.md: {written.splitlines()[0] if written else 'done'})\n"


def _text(listing: str | None, counted: str | None, read: str | None) -> str:
    parts = ["# The files here"]
    for title, found in (("What is here", listing), ("By kind", counted), ("From the README", read)):
        if found:
            parts.append(f"## {title}\n\n```\n{found}\n```")
    return "\n\n".join(parts) + "\n"


_RULES: dict[str, Callable[[_Task, str], Iterator[Any]]] = {
    "report": _report,
    "run": _one("terminal", "command"),
    "python": _one("python", "script"),
    "start": _one("start_process", "command", "I start it in the background."),
    "delegate": _one("delegate", "task", "I hand it to a child agent."),
    "fetch": _one("fetch", "url", "I read the page."),
    "ask": _one("ask_user", "question", "I need to know something."),
    "wait": _wait,
}
