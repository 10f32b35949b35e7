"""Hints of errors as commands of ``holdfast``, or as slash commands of its chat."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from holdfast.errors import HoldfastError, ServerUnreachable, SessionBusy

__all__ = ["command_hint"]

_KEY = (
    "pass a key: export HOLDFAST_KEY=… or --key KEY; for a server that was started in another folder, its token: "
    "export HOLDFAST_KEY=$(cat FOLDER/.holdfast/holdfast.db-token)"
)
_COMMANDS: Mapping[str, str] = {
    "already_settled": "a run has taken the message; to stop that run: holdfast interrupt -s {session}",
    "busy": "wait for the run to end, or interrupt it: holdfast interrupt -s {session}",
    "draining": "start the server again: holdfast serve AGENT",
    "forbidden": "use a key that may: holdfast keys create NAME --role admin (or, for --user, --role trusted)",
    "mailbox_full": "wait, or withdraw a message: holdfast withdraw -s {session}",
    "server_unreachable": "start a server: holdfast serve AGENT; or pass the URL of a running one: --url URL",
    "session_agent_missing": "continue with another agent: holdfast chat -s {session} --agent NAME{available}; "
    "or start a new session: -s NEW",
    "session_deleted": "name another session: -s NAME; a deleted one keeps its name for a week (tombstone_s)",
    "unauthenticated": _KEY,
    "unknown_agent": "choose one: --agent NAME{available}",
    "unknown_message": "'holdfast ps' shows how many are queued; the receipt of 'holdfast send' has the id of each",
    "unknown_question": "list them: holdfast questions -s {session}",
    "unknown_session": "'holdfast ps' lists your sessions; the first message creates one: "
    'holdfast ask -s {session} "…"',
    "wait_expired": "it continues; to follow it: holdfast tail -s {session}",
}
_CHAT: Mapping[str, str] = {
    "already_settled": "a run has taken the message; to stop that run: /interrupt",
    "busy": "wait for the run to end, or interrupt it: /interrupt",
    "draining": "start the server again: holdfast serve AGENT",
    "forbidden": "use a key that may: holdfast keys create NAME --role admin",
    "mailbox_full": "wait, or interrupt the run: /interrupt",
    "not_supported": "use an agent with a model (/agent lists them), or shorten the history: /undo, /fork KEY",
    "server_unreachable": "start a server: holdfast serve AGENT",
    "session_agent_missing": "continue with another agent: /agent NAME{available}; or start a new session: /new NAME",
    "session_deleted": "switch to another session: /new NAME, or holdfast chat -s NAME",
    "unauthenticated": _KEY,
    "unknown_agent": "choose one: /agent NAME{available}",
    "unknown_question": "no run of this session asks now; /status shows what it does",
    "unknown_session": "the first message creates it",
    "wait_expired": "it continues; its answer appears here",
}
_SPECIFIC = (ServerUnreachable, SessionBusy)
"""Errors whose own hint, unless it is the usual one, is about another cause: a server that hangs, a session in use."""


def command_hint(error: HoldfastError, *, session: str | None, chat: bool = False) -> str:
    """Return what to do about an error in terms of commands, or the error's own hint if no command helps.

    Parameters:
        error: the error, whose own hint is written for users of the HTTP API or of Python.
        session: key of the session that the command is about; None if it is about no session.
        chat: whether to name slash commands of the chat.
    """
    hint = (_CHAT if chat else _COMMANDS).get(error.code)
    if isinstance(error, _SPECIFIC) and error.hint != type(error).default_hint:
        return error.hint
    if hint is None or ("{session}" in hint and session is None):
        return error.hint
    listed = re.search(r"available: ([^;)]+)", error.hint)
    available = f" (available: {listed[1]})" if listed else ""
    return hint.format(session=shlex.quote(session or ""), available=available)
