"""Parts of HTML that the status page and the session pages share, and the headers of both."""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from html import escape
from urllib.parse import quote, urlencode

from holdfast import clock, logs
from holdfast.protocol.messages import SessionView, TreeNode

__all__ = [
    "HEADERS",
    "REFRESH_S",
    "document",
    "error_box",
    "escape_visibly",
    "how_long_ago",
    "session_link",
    "session_path",
    "show_invisible",
    "tree_section",
]

REFRESH_S = 5
"""Seconds after which a page without a form loads itself again."""

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
.text { white-space: pre-wrap; overflow-wrap: anywhere; margin: .1rem 0; }
textarea { width: 100%; resize: vertical; }
input { flex: 1 1 12rem; min-width: 0; } input, textarea, select, button { font: inherit; color: inherit;
  padding: .35rem .8rem; border: 1px solid var(--line); border-radius: .4rem; background: var(--bg); }
button { cursor: pointer; } button.go { background: var(--ok); border-color: var(--ok); color: var(--card); }
button:focus-visible, input:focus-visible, textarea:focus-visible,
select:focus-visible, a:focus-visible { outline: 2px solid var(--busy); outline-offset: 2px; }
a { color: var(--busy); }
ul.access, section > ul.access { list-style: disc; margin: .25rem 0; padding-left: 1.25rem; }
td > ul.access { margin: 0; } td > form { border: 0; margin: 0; padding: 0; }
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


def document(title: str, parts: list[str], *, refreshed: bool) -> str:
    """Return an HTML document with these parts as its body."""
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_S}">' if refreshed else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape_visibly(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{refresh}'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>"
    )


def error_box(error: str) -> str:
    """Return a section with the error of the form that was just submitted; or an empty string."""
    return f'<section class="bad" role="alert">{escape_visibly(error)}</section>' if error else ""


def session_path(key: str, *, principal: str | None = None, **query: str) -> str:
    """Return the path of a session's page. Only admins may name the `principal` of the session."""
    named = query if principal is None else {"user": principal, **query}
    return f"/sessions/{quote(key, safe='')}" + (f"?{urlencode(named)}" if named else "")


def session_link(view: SessionView, reader: str) -> str:
    """Return a link to the session's page, for a reader who acts as this principal."""
    path = session_path(view.key, principal=None if view.principal == reader else view.principal)
    return f'<a href="{escape(path)}">{escape_visibly(view.key)}</a>'


def escape_visibly(text: str) -> str:
    """Return the text as HTML, with invisible characters, such as bidirectional controls, spelled out."""
    return escape(show_invisible(text))


def show_invisible(text: str) -> str:
    """Return the text with invisible characters spelled out."""
    return logs.visible("".join(c if c.isprintable() or c in "\n\t" else f"\\u{ord(c):04x}" for c in text))


def tree_section(node: TreeNode) -> str:
    """Render a task tree; empty if the tree has only a root."""
    if not node.children:
        return ""
    branches = "".join(_branch(child) for child in node.children)
    return f"<section><h2>Task tree</h2><ul>{branches}</ul></section>"


def _branch(node: TreeNode) -> str:
    pid = f" pid {node.pid}" if node.pid is not None else ""
    processes = f" {node.processes} processes" if node.processes > 1 else ""
    age = f" {node.age_s:.1f} s" if node.age_s else ""
    state = f" {escape(node.state)}" if node.state else ""
    kind = "program" if node.kind == "process" else node.kind
    text = f'{escape(kind)} <b>{escape(node.name)}</b><span class="soft">{state}{pid}{processes}{age}</span>'
    below = f"<ul>{''.join(_branch(child) for child in node.children)}</ul>" if node.children else ""
    return f"<li>{text}{below}</li>"


def how_long_ago(at: float) -> str:
    """Return an age such as ``5 min ago``, or the time itself after an hour."""
    age = clock.system_clock.now() - at
    if 0 <= age < 60:
        return f"{age:.0f} s ago"
    if 60 <= age < 3600:
        return f"{age / 60:.0f} min ago"
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
