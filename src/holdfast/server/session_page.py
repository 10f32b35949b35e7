"""The page of one session: its state, its newest entries and its task tree, with forms for its owner."""

from __future__ import annotations

from dataclasses import asdict
from html import escape

from holdfast import ids
from holdfast.host import Host, Session
from holdfast.protocol.messages import Entry, SessionStop, SessionView
from holdfast.server.activity import current_activity
from holdfast.server.caller import Caller
from holdfast.server.page_form import TEXT_CHARACTERS
from holdfast.server.page_parts import (
    REFRESH_S,
    document,
    error_box,
    escape_visibly,
    how_long_ago,
    session_path,
    tree_section,
)
from holdfast.server.page_runs import run_article
from holdfast.server.stop_tickets import StopTicket

__all__ = ["render_session"]

_ENTRIES = 50
_ENTRY_CHARACTERS = 2_000
"""Maximum length of a displayed entry."""


async def render_session(
    host: Host,
    session: Session,
    caller: Caller,
    *,
    approval_key_required: bool,
    writes: bool = False,
    ticket: StopTicket | None = None,
    error: str = "",
    draft: str = "",
) -> str:
    """Render the page of a session as HTML.

    Only the owner of the session gets forms. While a run is active the page refreshes itself, unless it shows a field
    that a person may be filling in.

    Parameters:
        host: host of the session.
        session: the session.
        caller: caller that views the page.
        approval_key_required: whether an approval also requires an approval key.
        writes: whether to show the field for a message even while a run is active.
        ticket: stop whose result is shown.
        error: error of the form that was just submitted; empty if no form was submitted.
        draft: text of the message that was just refused, to be sent again; empty otherwise.

    Raises:
        UnknownSession, SessionDeleted: if the session does not exist or was deleted.
        BudgetExceeded, HostBusy: if the wait for memory times out.
    """
    view = await session.info()
    mine = session.principal == caller.principal
    run, asked = "", False
    if view.run_id is not None:
        now = await current_activity(host, view, reader=caller.principal)
        asked = mine and bool(now.questions)
        article = run_article(view, now, reader=caller.principal, with_key=approval_key_required)
        run = f"<section><h2>Active run</h2>{article}</section>"
    refreshed = view.run_id is not None and not (asked or writes or error)
    tree = tree_section(await session.tree())
    entries, charge = await session.newest_entries(_ENTRIES, reader=caller.principal)
    with charge:
        parts = [
            _head(view, mine=mine, refreshed=refreshed, lacks_host=view.workspace_pool in host.missing_pools),
            error_box(error),
            _stop_result(ticket) if ticket is not None else "",
            run,
            _stop_form(view) if mine else "",
            _transcript(entries),
            _message_form(view, draft, folded=refreshed) if mine else "",
            tree,
        ]
        return document(f"{view.key} · Holdfast", parts, refreshed=refreshed)


def _head(view: SessionView, *, mine: bool, refreshed: bool, lacks_host: bool) -> str:
    style = {"running": "busy", "suspended": "busy", "stopping": "bad"}.get(view.state, "ok")
    path = escape(session_path(view.key, principal=None if mine else view.principal))
    refresh = f"refreshes every {REFRESH_S} s" if refreshed else f'<a href="{path}">refresh</a>'
    facts = [escape_visibly(view.agent), f"{view.waiting:,} queued", f"changed {how_long_ago(view.updated_at)}"]
    if lacks_host:
        pool = escape_visibly(view.workspace_pool or "")
        facts.append(f'<span class="bad">waits for a host with the files: workspace_pool = {pool}</span>')
    owner = "" if mine else f" of {escape_visibly(view.principal)} (read only)"
    return (
        f'<header><a href="/">Holdfast</a><h1>{escape_visibly(view.key)}</h1><span class="{style}">{view.state}</span>'
        f'<span class="soft">{owner} {" · ".join(facts)} · {refresh}</span></header>'
    )


def _stop_result(ticket: StopTicket) -> str:
    if not ticket.result.done():
        return '<section role="status" class="busy">Stopping: the work has not ended yet.</section>'
    if ticket.result.cancelled():
        return error_box("the server shut down before the stop ended")
    if (error := ticket.result.exception()) is not None:
        return error_box(str(error))
    result = ticket.result.result()
    stop = isinstance(result, SessionStop)
    receipt = result.receipt if isinstance(result, SessionStop) else result
    counts = ", ".join(f"{name} {count:,}" for name, count in asdict(receipt.stopped).items() if count)
    nothing = "nothing was running" if receipt.outcome == "gone" else "nothing ended"
    lines = [f"{receipt.outcome} after {receipt.elapsed_s * 1000:.0f} ms: {counts or nothing}"]
    if isinstance(result, SessionStop) and result.withdrawn:
        lines.append(f"withdrawn messages: {len(result.withdrawn):,}")
    if receipt.forced:
        reasons = receipt.force_reasons or ("",) * len(receipt.forced)
        forced = (
            f"{name} ({reason})" if reason else name for name, reason in zip(receipt.forced, reasons, strict=False)
        )
        lines.append(f"forced: {', '.join(forced)}")
    lines += [f"abandoned: {one.kind} {one.name}" for one in receipt.abandoned]
    if receipt.survivors:
        lines.append(f"not proven dead: pid {', '.join(map(str, receipt.survivors))}")
    told = "<br>".join(map(escape_visibly, lines))
    return f'<section role="status"><h2>{"Stop" if stop else "Interrupt"}</h2>{told}</section>'


def _stop_form(view: SessionView) -> str:
    interrupt = effects = ""
    if view.run_id is not None:
        interrupt = '<button name="action" value="interrupt">Interrupt</button>'
        effects = "Interrupt ends the active run, and queued messages run next. "
    return (
        f'<section><form method="post" action="/">{_hidden("session", view.key)}{_hidden("run_id", view.run_id or "")}'
        f'<div class="row">{interrupt}<button name="action" value="stop">Stop</button></div>'
        f'<p class="soft">{effects}Stop ends the run and background work, and withdraws queued messages.</p>'
        "</form></section>"
    )


def _message_form(view: SessionView, draft: str, *, folded: bool) -> str:
    """Render the form for a message. Its idempotency key makes the server accept it once, however often it is sent."""
    if folded:
        path = escape(session_path(view.key, write="true"))
        return f'<section><a href="{path}">Write a message</a> <span class="soft">(pauses the refresh)</span></section>'
    return (
        f'<section><form method="post" action="/">{_hidden("action", "send")}{_hidden("session", view.key)}'
        f"{_hidden('idempotency_key', ids.message_id())}"
        f'<textarea name="text" rows="3" maxlength="{TEXT_CHARACTERS}" aria-label="message" required>\n'
        f"{escape(draft)}</textarea>"
        '<div class="row"><button class="go">Send</button></div></form></section>'
    )


def _hidden(name: str, value: str) -> str:
    return f'<input type="hidden" name="{name}" value="{escape(value)}">'


def _transcript(entries: list[Entry]) -> str:
    shown = "".join(map(_entry, entries)) or '<p class="soft">The transcript is empty.</p>'
    note = f'<p class="soft">Newest {len(entries)} only.</p>' if entries and entries[0].n > 1 else ""
    return f"<section><h2>Transcript</h2>{note}{shown}</section>"


def _entry(entry: Entry) -> str:
    name = f" <b>{escape_visibly(entry.name)}</b>" if entry.name else ""
    marks: list[str] = [entry.status] if entry.status != "ok" else []
    marks += ["partial"] if entry.partial else []
    marks += [f"ended by {entry.ended_by}"] if entry.ended_by else []
    bad = f' <span class="bad">{escape(", ".join(marks))}</span>' if marks else ""
    files = "".join(
        f'<p class="soft">attached: {escape_visibly(one.name or one.digest)}</p>' for one in entry.attachments
    )
    more = len(entry.content) - _ENTRY_CHARACTERS
    rest = f'<p class="soft">{more:,} more characters: holdfast transcript</p>' if more > 0 else ""
    return (
        f'<article><span class="soft">{entry.role.replace("_", " ")}</span>{name}{bad}'
        f'<p class="text">{escape_visibly(entry.content[:_ENTRY_CHARACTERS])}</p>{rest}{files}</article>'
    )
