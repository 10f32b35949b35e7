"""The status page at ``/``: active runs, open questions, queued messages, schedules, promise counters and snippets.

The page has no scripts and loads no other files. It refreshes itself, except while it shows a form that a person may be
filling in.
"""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from html import escape
from typing import NamedTuple
from urllib.parse import parse_qsl

import msgspec

from holdfast import clock, logs
from holdfast.errors import InvalidRequest
from holdfast.host import PROMISES, Host, HostStatistics, Incident
from holdfast.protocol.http import DecisionBody
from holdfast.protocol.messages import Question, SessionView, TreeNode, Usage
from holdfast.protocol.schedules import ScheduleView
from holdfast.server.activity import ActiveCall, Activity, current_activity
from holdfast.server.caller import Caller

__all__ = ["HEADERS", "Form", "read_form", "render"]

_SHOWN = 100
_RUNS_SHOWN = 20
_REFRESH_S = 5
_SHOWN_CHARS = 20_000
"""Maximum length of a displayed call. A longer call cannot be approved on the page, because it is not shown in full."""
_USUAL_ADDRESS = "http://127.0.0.1:8420"

_STYLE = """
:root { color-scheme: light dark; --line: #d5d9e0; --soft: #667085; --card: #fff; --bg: #f5f6f8; --text: #1b1f27;
  --ok: #12805c; --busy: #175cd3; --bad: #b42318; --code: #eef0f4; }
@media (prefers-color-scheme: dark) { :root { --line: #2c323d; --soft: #98a2b3; --card: #171b22; --bg: #0e1116;
  --text: #e6e9ee; --ok: #4ac397; --busy: #84adff; --bad: #f97066; --code: #0b0e13; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 64rem; background: var(--bg); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: .25rem 1rem; margin-bottom: 1rem; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1rem; margin: 0 0 .5rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .9rem 1rem;
  margin-bottom: 1rem; overflow-x: auto; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(7rem, 1fr)); gap: .75rem; }
.figures b { display: block; font-size: 1.5rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.soft, .figures span { color: var(--soft); font-size: .85rem; }
table { width: 100%; border-collapse: collapse; font-size: .92rem; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: .8rem; }
th, td { padding: .3rem .75rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.key { overflow-wrap: anywhere; min-width: 6rem; }
.ok { color: var(--ok); } .busy { color: var(--busy); } .bad { color: var(--bad); font-weight: 600; }
pre { background: var(--code); border-radius: .4rem; padding: .6rem .75rem; margin: .4rem 0; overflow-x: auto;
  font: 13px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
article { padding: .5rem 0; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
article:last-child { border-bottom: 0; padding-bottom: 0; }
article > p, form > p { margin: .25rem 0; }
code, q { font: 13px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
q { quotes: none; display: block; color: var(--soft); white-space: pre-wrap; max-height: 4.4em; overflow: hidden; }
form { border-left: 3px solid var(--busy); padding-left: .75rem; margin: .5rem 0 .25rem; }
.row { display: flex; flex-wrap: wrap; gap: .5rem; margin-top: .4rem; }
input { flex: 1 1 12rem; min-width: 0; } input, button { font: inherit; color: inherit; padding: .35rem .8rem;
  border: 1px solid var(--line); border-radius: .4rem; background: var(--bg); }
button { cursor: pointer; } button.go { background: var(--ok); border-color: var(--ok); color: var(--card); }
button:focus-visible, input:focus-visible, a:focus-visible { outline: 2px solid var(--busy); outline-offset: 2px; }
a { color: var(--busy); }
ul { list-style: none; margin: 0; padding-left: 1rem; overflow-wrap: anywhere; } section > ul { padding-left: 0; }
@media (max-width: 34rem) { .wide { display: none; } body { padding: .6rem; } }
"""

_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # with no-referrer, browsers submit the page's own forms without an origin
    "cache-control": "no-store",
}


class Form(NamedTuple):
    """The fields of a submitted form."""

    session: str
    question: str
    body: DecisionBody


def read_form(body: bytes) -> Form:
    """Parse a submitted form. Raises `InvalidRequest` if the form is invalid."""
    try:
        fields = dict(parse_qsl(body.decode("ascii"), strict_parsing=True, errors="strict", max_num_fields=10))
        given = {name: fields[name] for name in ("decision", "text", "call_hash", "approval_key") if name in fields}
        decision = msgspec.convert(given, DecisionBody)
    except (ValueError, msgspec.ValidationError):
        raise InvalidRequest("invalid form", hint="reload the page and retry") from None
    return Form(fields.get("session", ""), fields.get("question", ""), decision)


async def render(
    host: Host,
    caller: Caller,
    *,
    address: str,
    keys_required: bool,
    approval_key_required: bool = False,
    told: str = "",
) -> str:
    """Render the status page as HTML.

    An admin sees all sessions and the host's statistics. Other callers see only their own sessions.

    Parameters:
        host: host whose status is shown.
        caller: caller that views the page.
        address: URL of the server as requested, which is used in the snippets.
        keys_required: whether the snippets must send a key or the local token.
        approval_key_required: whether an approval also requires an approval key.
        told: result of the form that was just submitted; empty if no form was submitted.
    """
    everybody = caller.role == "admin"
    principal = None if everybody else caller.principal
    statistics = host.statistics()
    sessions = await host.sessions(principal=principal, limit=_SHOWN)
    schedules = await host.schedules(principal=principal, limit=_SHOWN)
    at_work = [view for view in sessions if view.run_id is not None][:_RUNS_SHOWN]
    runs = [(view, await current_activity(host, view, reader=caller.principal)) for view in at_work]
    asked = any(now.questions for view, now in runs if view.principal == caller.principal)
    parts = [
        _head(statistics, renewed=not (asked or told), everybody=everybody),
        f'<section class="bad" role="alert">{escape(told)}</section>' if told else "",
        _figures(statistics, sessions) if everybody else "",
        _runs(runs, caller.principal, everybody, with_key=approval_key_required),
        _sessions(sessions, everybody),
        _schedules(schedules, everybody),
        _tree(host.tree(principal=principal)),
        _incidents(list(host.incidents.newest)[-10:]) if everybody else "",
        _promises(statistics) if everybody else "",
        _lines(address, with_key=keys_required),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Holdfast</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        + ("" if asked or told else f'<meta http-equiv="refresh" content="{_REFRESH_S}">')
        + f"<style>{_STYLE}</style></head><body>"
        + "".join(parts)
        + "</body></html>"
    )


def _head(statistics: HostStatistics, *, renewed: bool, everybody: bool) -> str:
    state = '<span class="bad">draining</span>' if statistics.draining else '<span class="ok">running</span>'
    since = _time(statistics.started_at)
    renews = f"refreshes every {_REFRESH_S} s" if renewed else 'automatic refresh paused: <a href="/">refresh</a>'
    whole = f"pid {statistics.pid} · started {since} · " if everybody else ""
    return f'<header><h1>Holdfast</h1>{state}<span class="soft">{whole}{renews}</span></header>'


def _figures(statistics: HostStatistics, sessions: list[SessionView]) -> str:
    waiting = sum(view.waiting for view in sessions)
    broken = sum(count.broken for count in statistics.promises.values())
    figures = (
        (statistics.running, "active runs", "busy" if statistics.running else ""),
        (waiting, "queued messages", ""),
        (statistics.awaiting_slot, "sessions awaiting a slot", ""),
        (statistics.sessions_live, "sessions in memory", ""),
        (statistics.event_subscribers, "event subscribers", ""),
        (broken, "broken promises", "bad" if broken else "ok"),
    )
    cells = "".join(f'<div><b class="{style}">{value:,}</b><span>{text}</span></div>' for value, text, style in figures)
    return f'<section class="figures">{cells}</section>'


def _runs(runs: list[tuple[SessionView, Activity]], principal: str, everybody: bool, *, with_key: bool) -> str:
    """Render the active runs. Runs with open questions are first, with a form if the caller may answer them."""
    if not runs:
        return ""
    ordered = sorted(runs, key=lambda run: not run[1].questions)
    shown = "".join(
        _run(view, now, mine=view.principal == principal, everybody=everybody, with_key=with_key)
        for view, now in ordered
    )
    return f"<section><h2>Active runs</h2>{shown}</section>"


def _run(view: SessionView, now: Activity, *, mine: bool, everybody: bool, with_key: bool) -> str:
    owner = f'<span class="soft"> of {escape(view.principal)}</span>' if everybody and not mine else ""
    style = "bad" if view.state == "stopping" else "busy"
    facts = [escape(now.agent)]
    if now.step:
        facts.append(f"step {now.step}")
    if now.usage is not None:
        facts += _usage(now.usage)
    head = (
        f'<b>{escape(view.key)}</b>{owner} <span class="{style}">{escape(view.state)}</span> '
        f'<span class="soft">{" · ".join(facts)}</span>'
    )
    asked = "".join(_question(view.key, question, mine=mine, with_key=with_key) for question in now.questions)
    calls = "".join(map(_call, now.calls.values())) if not now.questions else ""
    said = f"<q>{escape(now.said)}</q>" if now.said and not now.calls else ""
    return f"<article>{head}{asked}{calls}{said}</article>"


def _usage(usage: Usage) -> list[str]:
    found = []
    if usage.tool_calls:
        found.append(f"{usage.tool_calls:,} call{'' if usage.tool_calls == 1 else 's'}")
    if usage.input_tokens or usage.output_tokens:
        found.append(f"{usage.input_tokens:,} + {usage.output_tokens:,} tokens")
    if usage.cost_usd:
        found.append(f"${usage.cost_usd:.4f}")
    return found


def _call(call: ActiveCall) -> str:
    since = f' <span class="soft">{_time(call.began_at)}</span>' if call.began_at else ""
    output = f"<q>{escape(call.output)}</q>" if call.output.strip() else ""
    return f"<p>{escape(call.name)} <code>{escape(call.arguments)}</code>{since}</p>{output}"


def _question(key: str, question: Question, *, mine: bool, with_key: bool) -> str:
    """Render a question, with a form if the caller may answer the question."""
    arguments = "" if question.arguments is None else _visible(msgspec.json.encode(question.arguments).decode())
    what = escape(_visible(question.text))
    if question.kind == "approval":
        told = f"<br>{what}" if what and question.text != f"May {question.tool} be called?" else ""
        tool = escape(_visible(question.tool or ""))
        what = f"Allow <b>{tool}</b> <code>{escape(arguments[:_SHOWN_CHARS])}</code>?{told}"
        if len(arguments) > _SHOWN_CHARS:
            what += (
                f' <span class="bad">{len(arguments) - _SHOWN_CHARS:,} more characters not shown; '
                "approve on the command line, which shows the whole call</span>"
            )
    since = f' <span class="soft">asked {_time(question.asked_at)}</span>'
    if not mine:
        return f"<p>{what}{since}</p>"
    if question.kind == "approval":
        # Enter submits the form's first button: a disabled one, or typing a reason to deny would approve.
        approve = ""
        if len(arguments) <= _SHOWN_CHARS:
            approve = '<button class="go" name="decision" value="approve">Approve</button>'
            if with_key:
                approve += (
                    '<input name="approval_key" type="password" aria-label="approval key" '
                    'placeholder="approval key (required to approve)" autocomplete="off">'
                )
        fields = (
            f"<button disabled hidden></button>{approve}"
            '<button name="decision" value="deny">Deny</button>'
            '<input name="text" aria-label="reason" placeholder="reason, for the model" autocomplete="off">'
        )
    else:
        fields = (
            '<input name="text" aria-label="answer" required autocomplete="off">'
            '<button class="go" name="decision" value="answer">Answer</button>'
        )
    hidden = (
        f'<input type="hidden" name="session" value="{escape(key)}">'
        f'<input type="hidden" name="question" value="{escape(question.question_id)}">'
        f'<input type="hidden" name="call_hash" value="{escape(question.call_hash)}">'
    )
    return f'<form method="post" action="/"><p>{what}{since}</p>{hidden}<div class="row">{fields}</div></form>'


def _visible(text: str) -> str:
    """Return the text with invisible characters, such as bidirectional controls, escaped."""
    return logs.visible("".join(c if c.isprintable() or c in "\n\t" else f"\\u{ord(c):04x}" for c in text))


def _sessions(sessions: list[SessionView], everybody: bool) -> str:
    if not sessions:
        return (
            '<section><h2>Sessions</h2><p class="soft">No sessions yet. Start one with a snippet below.</p></section>'
        )
    owner = '<th class="wide">Principal</th>' if everybody else ""
    rows = []
    for view in sessions:
        style = {"running": "busy", "suspended": "busy", "stopping": "bad", "deleted": "soft"}.get(view.state, "")
        cell = f'<td class="wide key">{escape(view.principal)}</td>' if everybody else ""
        rows.append(
            f'<tr><td class="key">{escape(view.key)}</td>{cell}<td class="{style}">{escape(view.state)}</td>'
            f'<td class="n">{view.waiting:,}</td><td class="n wide">{view.seq:,}</td>'
            f'<td class="wide">{escape(view.agent)}</td><td class="n">{_time(view.updated_at)}</td></tr>'
        )
    note = f'<p class="soft">Newest {_SHOWN} only.</p>' if len(sessions) == _SHOWN else ""
    return (
        f"<section><h2>Sessions</h2><table><tr><th>Session</th>{owner}<th>State</th>"
        '<th class="n">Waiting</th><th class="n wide">Events</th><th class="wide">Agent</th>'
        '<th class="n">Changed</th></tr>' + "".join(rows) + f"</table>{note}</section>"
    )


def _schedules(schedules: list[ScheduleView], everybody: bool) -> str:
    if not schedules:
        return ""
    rows = []
    for view in schedules:
        owner = f'<span class="soft"> of {escape(view.principal)}</span>' if everybody else ""
        when = f"every {view.every_s:g} s" if view.every_s is not None else f"{view.cron} ({view.timezone})"
        when = "" if view.state == "broken" else when
        due = view.state if view.next_at is None else _time(view.next_at)
        problem = f'<br><span class="bad">{escape(view.problem)}</span>' if view.problem else ""
        rows.append(
            f'<tr><td class="key">{escape(view.schedule_id)}{owner}{problem}</td>'
            f'<td class="key">{escape(view.session)}</td><td>{escape(when)}</td><td>{due}</td>'
            f'<td class="n">{view.fired:,}</td>'
            f'<td class="n wide">{view.missed:,}</td><td class="n wide">{view.refused:,}</td></tr>'
        )
    note = f'<p class="soft">First {_SHOWN} only.</p>' if len(schedules) == _SHOWN else ""
    return (
        "<section><h2>Schedules</h2><table><tr><th>Schedule</th><th>Session</th><th>When</th><th>Next</th>"
        '<th class="n">Fired</th><th class="n wide">Missed</th><th class="n wide">Refused</th></tr>'
        + "".join(rows)
        + f"</table>{note}</section>"
    )


def _tree(node: TreeNode) -> str:
    if not node.children:
        return ""
    branches = "".join(_branch(child) for child in node.children)
    return f"<section><h2>Task tree</h2><ul>{branches}</ul></section>"


def _branch(node: TreeNode) -> str:
    pid = f" pid {node.pid}" if node.pid is not None else ""
    age = f" {node.age_s:.1f} s" if node.age_s else ""
    state = f" {escape(node.state)}" if node.state else ""
    text = f'{escape(node.kind)} <b>{escape(node.name)}</b><span class="soft">{state}{pid}{age}</span>'
    below = f"<ul>{''.join(_branch(child) for child in node.children)}</ul>" if node.children else ""
    return f"<li>{text}{below}</li>"


def _incidents(incidents: list[Incident]) -> str:
    if not incidents:
        return ""
    rows = "".join(
        f'<tr><td class="n">{_time(one.at)}</td><td class="bad">{escape(one.kind)}</td>'
        f'<td class="key">{escape(one.text)}</td></tr>'
        for one in reversed(incidents)
    )
    return f"<section><h2>Incidents</h2><table>{rows}</table></section>"


def _promises(statistics: HostStatistics) -> str:
    rows = []
    for number, count in statistics.promises.items():
        name, kept, broken = PROMISES[number]
        style = "bad" if count.broken else "ok" if count.kept else "soft"
        worse = "bad" if count.broken else "soft"
        rows.append(
            f'<tr><td>{escape(number)} {escape(name)}</td><td class="n {style}">{count.kept:,}</td>'
            f'<td class="wide soft">{escape(kept)}</td><td class="n {worse}">{count.broken:,}</td>'
            f'<td class="wide soft">{escape(broken)}</td></tr>'
        )
    return (
        '<section><h2>Promises since start</h2><table><tr><th>Promise</th><th class="n">Kept</th>'
        '<th class="wide"></th><th class="n">Broken</th><th class="wide"></th></tr>'
        + "".join(rows)
        + "</table></section>"
    )


def paste_lines(address: str, *, with_key: bool) -> tuple[str, str]:
    """Return a shell snippet and a Python snippet that send a first message to the server at `address`."""
    auth = ' -H "authorization: Bearer $HOLDFAST_KEY"' if with_key else ""
    argument = ', key=os.environ["HOLDFAST_KEY"]' if with_key else ""
    imports = "import asyncio, os, holdfast" if with_key else "import asyncio, holdfast"
    curl = (
        f"curl -s '{address}/v1/sessions/alice/messages?wait=30'{auth} \\\n"
        "  -H 'content-type: application/json' -d '{\"content\": \"help\"}'"
    )
    python = (
        f"{imports}\n\nasync def main():\n"
        f'    async with holdfast.Client("{address}"{argument}) as client:\n'
        '        print(await client.session("alice").ask("help"))\n\nasyncio.run(main())'
    )
    return curl, python


def _lines(address: str, *, with_key: bool) -> str:
    curl, python = paste_lines(address, with_key=with_key)
    chat = "holdfast chat" if address == _USUAL_ADDRESS else f"holdfast chat --url {address}"
    return (
        f'<section><h2>Try it</h2><p class="soft">From a terminal</p><pre>{escape(chat)}</pre>'
        f'<p class="soft">With curl</p><pre>{escape(curl)}</pre>'
        f'<p class="soft">From Python</p><pre>{escape(python)}</pre>'
        '<p class="soft">More: /openapi.json, /metrics, /healthz, /readyz</p></section>'
    )


def _time(at: float) -> str:
    age = clock.system_clock.now() - at
    if 0 <= age < 60:
        return f"{age:.0f} s ago"
    if 60 <= age < 3600:
        return f"{age / 60:.0f} min ago"
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
