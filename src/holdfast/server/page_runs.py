"""Active runs on the pages: what they do, and the forms with which a person answers their questions."""

from __future__ import annotations

from html import escape

import msgspec

from holdfast.protocol.messages import Question, SessionView, Usage
from holdfast.server.activity import ActiveCall, Activity
from holdfast.server.page_grants import asked_access
from holdfast.server.page_parts import escape_visibly, how_long_ago, session_link, show_invisible

__all__ = ["run_article"]

_SHOWN_CHARS = 20_000
"""Maximum length of a displayed call. A longer call cannot be approved on the page, because it is not shown in full."""

_SCOPES = (
    '<select name="scope" aria-label="what the access holds for">'
    '<option value="call">for this call</option><option value="session">for this session</option>'
    '<option value="principal">for all my sessions</option></select>'
)


def run_article(view: SessionView, now: Activity, *, reader: str, with_key: bool) -> str:
    """Render an active run, and its open questions, with forms if the session belongs to the reader.

    Parameters:
        view: session of the run.
        now: current activity of the run.
        reader: principal as which the reader of the page acts.
        with_key: whether the form of an approval asks for an approval key.
    """
    mine = view.principal == reader
    owner = f'<span class="soft"> of {escape(view.principal)}</span>' if not mine else ""
    style = "bad" if view.state == "stopping" else "busy"
    facts = [escape(now.agent)]
    if now.step:
        facts.append(f"step {now.step}")
    if now.usage is not None:
        facts += _usage(now.usage)
    head = (
        f'<b>{session_link(view, reader)}</b>{owner} <span class="{style}">{escape(view.state)}</span> '
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
    since = f' <span class="soft">{how_long_ago(call.began_at)}</span>' if call.began_at else ""
    output = f"<q>{escape(call.output)}</q>" if call.output.strip() else ""
    return f"<p>{escape(call.name)} <code>{escape(call.arguments)}</code>{since}</p>{output}"


def _question(key: str, question: Question, *, mine: bool, with_key: bool) -> str:
    """Render a question, with a form if the caller may answer the question."""
    arguments = "" if question.arguments is None else show_invisible(msgspec.json.encode(question.arguments).decode())
    what = escape_visibly(question.text)
    if question.kind == "approval":
        plain = question.access or question.text in ("", f"May {question.tool} be called?")
        told = "" if plain else f"<br>{what}"
        tool = escape_visibly(question.tool or "")
        what = f"Allow <b>{tool}</b> <code>{escape(arguments[:_SHOWN_CHARS])}</code>?{told}"
        if len(arguments) > _SHOWN_CHARS:
            what += (
                f' <span class="bad">{len(arguments) - _SHOWN_CHARS:,} more characters not shown; '
                "approve on the command line, which shows the whole call</span>"
            )
    since = f' <span class="soft">asked {how_long_ago(question.asked_at)}</span>'
    access = asked_access(question)
    if not mine:
        return f"<p>{what}{since}</p>{access}"
    if question.kind == "approval":
        # Enter submits the form's first button: a disabled one, or typing a reason to deny would approve.
        approve = ""
        if len(arguments) <= _SHOWN_CHARS:
            approve = '<button class="go" name="decision" value="approve">Approve</button>'
            if question.access:
                approve += _SCOPES
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
    return f'<form method="post" action="/"><p>{what}{since}</p>{access}{hidden}<div class="row">{fields}</div></form>'
