"""Access beyond the wall on the pages: what a call asks for, and the grants that hold, with a button to revoke each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from holdfast.protocol.access import access_items
from holdfast.protocol.messages import Access, Grant, Question
from holdfast.server.page_parts import escape_visibly, how_long_ago

__all__ = ["access_list", "asked_access", "grants_section"]

_SHOWN = 100
_NOTE = re.compile(r"\(([^()]+)\)\?\Z")
"""A note at the end of a question, such as that a command is not known to be harmless."""


def asked_access(question: Question) -> str:
    """Return what the call of a question asks for beyond its wall, one item a line; empty if it asks for nothing."""
    if not question.access:
        return ""
    noted = _NOTE.search(question.text)
    note = f'<p class="soft">Note: {escape_visibly(noted[1])}.</p>' if noted else ""
    return f"<p>Beyond its wall, this call would:</p>{access_list(question.access)}{note}"


def access_list(access: Access) -> str:
    """Return each item of an access as an item of a list."""
    items = "".join(
        f"<li>{verb}<code>{escape_visibly(what)}</code>{more}</li>" for verb, what, more in access_items(access)
    )
    return f'<ul class="access">{items}</ul>'


def grants_section(grants: Sequence[Grant]) -> str:
    """Return the section with the grants of the reader's principal, newest first; empty without grants."""
    if not grants:
        return ""
    rows = "".join(map(_row, grants[: -_SHOWN - 1 : -1]))
    note = f'<p class="soft">Newest {_SHOWN} only.</p>' if len(grants) > _SHOWN else ""
    return (
        '<section><h2>Grants</h2><p class="soft">What calls may do beyond their wall without asking again. Revoking a '
        "grant also ends the programs that use it.</p>"
        '<table><tr><th>Access</th><th>Holds for</th><th class="wide">Granted</th><th></th></tr>'
        f"{rows}</table>{note}</section>"
    )


def _row(grant: Grant) -> str:
    holds = f"session {escape_visibly(grant.session)}" if grant.scope == "session" else "all my sessions"
    via = escape_visibly(grant.approval_key or grant.via)
    return (
        f'<tr><td class="key">{access_list(grant.access)}</td><td class="key">{holds}</td>'
        f'<td class="wide">{how_long_ago(grant.at)}<br><span class="soft">by {escape_visibly(grant.by)} ({via}) for '
        f"{escape_visibly(grant.tool)}</span></td><td>"
        '<form method="post" action="/"><input type="hidden" name="action" value="revoke">'
        f'<input type="hidden" name="grant" value="{escape(grant.grant_id)}"><button>Revoke</button></form></td></tr>'
    )
