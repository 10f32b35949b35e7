"""The status page at ``/``: active runs, open questions, queued messages, schedules, promise counters and snippets.

The page contains no scripts and loads no other files. It refreshes itself, unless it shows a form that a person may be
filling in.
"""

from __future__ import annotations

from html import escape

from holdfast.host import PROMISES, Host, HostStatistics, Incident
from holdfast.protocol.messages import SessionView
from holdfast.protocol.schedules import ScheduleView
from holdfast.server.activity import Activity, current_activity
from holdfast.server.caller import Caller
from holdfast.server.page_grants import grants_section
from holdfast.server.page_parts import (
    REFRESH_S,
    document,
    error_box,
    how_long_ago,
    session_link,
    tree_section,
)
from holdfast.server.page_runs import run_article

__all__ = ["render"]

_SHOWN = 100
_RUNS_SHOWN = 20
_USUAL_ADDRESS = "http://127.0.0.1:8420"


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
        address: URL of the server as the caller requested it; the snippets contain this URL.
        keys_required: whether the snippets must send a key or the local token.
        approval_key_required: whether an approval also requires an approval key.
        told: error of the form that was just submitted; empty if no form was submitted.
    """
    everybody = caller.role == "admin"
    principal = None if everybody else caller.principal
    statistics = host.statistics()
    sessions = await host.sessions(principal=principal, limit=_SHOWN)
    schedules = await host.schedules(principal=principal, limit=_SHOWN)
    at_work = [view for view in sessions if view.run_id is not None][:_RUNS_SHOWN]
    runs = [(view, await current_activity(host, view, reader=caller.principal)) for view in at_work]
    asked = any(now.questions for view, now in runs if view.principal == caller.principal)
    refreshed = not (asked or told)
    parts = [
        _head(statistics, refreshed=refreshed, everybody=everybody),
        error_box(told),
        _figures(statistics, sessions) if everybody else "",
        _runs(runs, caller.principal, with_key=approval_key_required),
        _sessions(sessions, caller.principal, everybody),
        grants_section(await host.grants(principal=caller.principal)),
        _schedules(schedules, everybody),
        tree_section(host.tree(principal=principal)),
        _incidents(list(host.incidents.newest)[-10:]) if everybody else "",
        _promises(statistics) if everybody else "",
        _lines(address, with_key=keys_required),
    ]
    return document("Holdfast", parts, refreshed=refreshed)


def _head(statistics: HostStatistics, *, refreshed: bool, everybody: bool) -> str:
    state = '<span class="bad">draining</span>' if statistics.draining else '<span class="ok">running</span>'
    since = how_long_ago(statistics.started_at)
    renews = f"refreshes every {REFRESH_S} s" if refreshed else 'automatic refresh paused: <a href="/">refresh</a>'
    whole = f"pid {statistics.pid} · started {since} · " if everybody else ""
    return f'<header><h1>Holdfast</h1>{state}<span class="soft">{whole}{renews}</span></header>'


def _figures(statistics: HostStatistics, sessions: list[SessionView]) -> str:
    waiting = sum(view.waiting for view in sessions)
    broken = sum(count.broken for count in statistics.promises.values())
    figures = (
        (statistics.running, "active runs", "busy" if statistics.running else ""),
        (waiting, "queued messages", ""),
        (statistics.awaiting_slot, "sessions awaiting a slot", ""),
        *([(statistics.awaiting_pool, "sessions awaiting a pool", "bad")] if statistics.awaiting_pool else ()),
        (statistics.sessions_live, "sessions in memory", ""),
        (statistics.event_subscribers, "event subscribers", ""),
        (broken, "broken promises", "bad" if broken else "ok"),
    )
    cells = "".join(f'<div><b class="{style}">{value:,}</b><span>{text}</span></div>' for value, text, style in figures)
    return f'<section class="figures">{cells}</section>'


def _runs(runs: list[tuple[SessionView, Activity]], reader: str, *, with_key: bool) -> str:
    """Render the active runs. Runs with open questions are first, with a form if the reader may answer them."""
    if not runs:
        return ""
    ordered = sorted(runs, key=lambda run: not run[1].questions)
    shown = "".join(run_article(view, now, reader=reader, with_key=with_key) for view, now in ordered)
    return f"<section><h2>Active runs</h2>{shown}</section>"


def _sessions(sessions: list[SessionView], reader: str, everybody: bool) -> str:
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
            f'<tr><td class="key">{session_link(view, reader)}</td>{cell}<td class="{style}">{escape(view.state)}</td>'
            f'<td class="n">{view.waiting:,}</td><td class="n wide">{view.seq:,}</td>'
            f'<td class="wide">{escape(view.agent)}</td><td class="n">{how_long_ago(view.updated_at)}</td></tr>'
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
        due = view.state if view.next_at is None else how_long_ago(view.next_at)
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


def _incidents(incidents: list[Incident]) -> str:
    if not incidents:
        return ""
    rows = "".join(
        f'<tr><td class="n">{how_long_ago(one.at)}</td><td class="bad">{escape(one.kind)}</td>'
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
    """Return a shell snippet and a Python snippet that send a first message to the server at `address`.

    The message fits any agent.
    """
    auth = ' -H "authorization: Bearer $HOLDFAST_KEY"' if with_key else ""
    argument = ', key=os.environ["HOLDFAST_KEY"]' if with_key else ""
    imports = "import asyncio, os, holdfast" if with_key else "import asyncio, holdfast"
    curl = (
        f"curl -s '{address}/v1/sessions/first/messages?wait=30'{auth} \\\n"
        "  -H 'content-type: application/json' -d '{\"content\": \"hello\"}'"
    )
    python = (
        f"{imports}\n\nasync def main():\n"
        f'    async with holdfast.Client("{address}"{argument}) as client:\n'
        '        print(await client.session("first").ask("hello"))\n\nasyncio.run(main())'
    )
    return curl, python


def _lines(address: str, *, with_key: bool) -> str:
    curl, python = paste_lines(address, with_key=with_key)
    chat = "holdfast chat" if address == _USUAL_ADDRESS else f"holdfast chat --url {address}"
    return (
        f'<section><h2>Try it</h2><p class="soft">From a terminal</p><pre>{escape(chat)}</pre>'
        f'<p class="soft">With curl</p><pre>{escape(curl)}</pre>'
        f'<p class="soft">From Python</p><pre>{escape(python)}</pre>'
        '<p class="soft">More: <a href="/openapi.json">OpenAPI document</a>, <a href="/metrics">metrics</a>, '
        '<a href="/healthz">health</a>, <a href="/readyz">readiness</a></p></section>'
    )
