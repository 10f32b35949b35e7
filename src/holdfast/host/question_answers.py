"""Validate a person's answer to a question, record it in the store, and deliver it to the run."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, NamedTuple, get_args

from holdfast import ids
from holdfast.errors import InvalidRequest
from holdfast.protocol.messages import Answer, GrantScope, check_text

if TYPE_CHECKING:
    from holdfast.host.context import HostContext
    from holdfast.host.suspension import Suspension
    from holdfast.protocol.messages import Decision

__all__ = ["Answerer", "give_answer"]


class Answerer(NamedTuple):
    """The author of an answer.

    Parameters:
        principal: the owner of the credential.
        via: the credential with which the answer was given.
        approval_key: the approval key, if one was required.
    """

    principal: str
    via: str
    approval_key: str = ""


async def give_answer(
    context: HostContext,
    suspension: Suspension,
    principal: str,
    key: str,
    question_id: str,
    decision: Decision,
    text: str,
    *,
    call_hash: str,
    scope: GrantScope,
    answerer: Answerer,
) -> Answer:
    """Answer a question of a session. Raises the errors of `SessionAPI.answer` and `SessionAPI.approve`.

    Parameters:
        principal: the owner of the session.
        key: the key of the session.
        scope: what the access of an approved call holds for.
        answerer: the author of the answer.
    """
    if scope not in get_args(GrantScope):
        raise InvalidRequest(f"unknown scope {scope!r:.100}", hint=f"choose {', '.join(get_args(GrantScope))}")
    for given_text in (question_id, text, call_hash):
        if not isinstance(given_text, str):
            raise InvalidRequest("a question's id and its answer must be text (str)")
    check_text(question_id + text + call_hash)
    if "\0" in text:
        raise InvalidRequest("the answer contains a NUL character", hint="remove it from the answer")
    given = Answer(
        question_id=question_id,
        decision=decision,
        text=text,
        by=answerer.principal,
        at=context.now(),
        on_behalf_of="" if answerer.principal == principal else principal,
        via=answerer.via,
        approval_key=answerer.approval_key,
        call_hash=call_hash,
        scope=scope,
        grant_id="" if scope == "call" else ids.grant_id(),
    )
    done = context.store.answer(principal, key, given)
    done.add_done_callback(
        functools.partial(suspension.on_answered, principal, key, question_id), context=context.variables
    )
    return (await asyncio.shield(done)).answer
