"""The fields of the forms of the status page and the session pages."""

from __future__ import annotations

from typing import Literal, NamedTuple, cast, get_args
from urllib.parse import parse_qsl

import msgspec

from holdfast.errors import InvalidRequest
from holdfast.host.budgets import SMALL_MESSAGE_CHARACTERS
from holdfast.protocol.http import DecisionBody

__all__ = ["TEXT_CHARACTERS", "PageForm", "read_form"]

TEXT_CHARACTERS = SMALL_MESSAGE_CHARACTERS
"""Maximum length of a message that a page sends; a longer one is charged, which only the API does."""

_Action = Literal["decide", "interrupt", "stop", "send", "revoke"]


class PageForm(NamedTuple):
    """A submitted form.

    Parameters:
        action: what to do with the session or the grant.
        session: key of the session.
        question: id of the question that `decision` answers.
        decision: answer to a question; None unless the action is ``decide``.
        text: message to send.
        idempotency_key: key under which the message is accepted once; None if the form has none.
        run_id: run to interrupt; None interrupts the active run.
        grant: id of the grant to revoke.
    """

    action: _Action
    session: str
    question: str
    decision: DecisionBody | None
    text: str
    idempotency_key: str | None
    run_id: str | None
    grant: str


def read_form(body: bytes) -> PageForm:
    """Parse a submitted form. Raises `InvalidRequest` if the form is invalid."""
    decision = None
    try:
        fields = dict(parse_qsl(body.decode("ascii"), strict_parsing=True, errors="strict", max_num_fields=10))
        action = fields.get("action", "decide")
        if action not in get_args(_Action):
            raise ValueError(action)
        if action == "decide":
            named = ("decision", "text", "call_hash", "scope", "approval_key")
            given = {name: fields[name] for name in named if name in fields}
            decision = msgspec.convert(given, DecisionBody)
    except (ValueError, msgspec.ValidationError):
        raise InvalidRequest("invalid form", hint="reload the page and retry") from None
    return PageForm(
        cast(_Action, action),
        fields.get("session", ""),
        fields.get("question", ""),
        decision,
        fields.get("text", "").replace("\r\n", "\n"),
        fields.get("idempotency_key"),
        fields.get("run_id"),
        fields.get("grant", ""),
    )
