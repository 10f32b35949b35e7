"""A run's questions to people. A question is durable before it is shown, and the journal keeps the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.agents.journaled_calls import written
from holdfast.agents.output import require_text
from holdfast.errors import ToolFailed
from holdfast.protocol.access import NO_REQUEST, AccessRequest, approval_question, is_covered, join
from holdfast.protocol.call_hash import is_for_another_call
from holdfast.protocol.messages import Access, Answer, Question

if TYPE_CHECKING:
    from holdfast.agents.context import RunContext
    from holdfast.agents.tool import Tool

__all__ = ["ask_user", "require_approval", "wait_for_answer"]


async def ask_user(context: RunContext, text: str) -> Answer:
    """Ask a person and wait for the answer; see `Run.ask_user`."""
    require_text(text, "suspend()")
    written(context, text, "the words of the question")
    question_id = context.next_id()
    known = context.journal.answer(question_id)
    if known is not None:
        return known
    with context.deadlines_held():
        await context.host.suspend(Question(question_id=question_id, kind="question", text=text))
        return await wait_for_answer(context, question_id)


async def wait_for_answer(context: RunContext, question_id: str) -> Answer:
    """Return the answer to an open question when it arrives. While this call waits, the run may be quiescent."""
    context.activity.remove()
    try:
        return await context.host.answered(question_id)
    finally:
        context.activity.add()


async def require_approval(context: RunContext, call_id: str, tool: Tool, arguments: dict[str, Any]) -> Access:
    """Ask a person to approve a call inside another call, if the tool's rules or the call's access require it.

    Return the access that was approved for this call.

    Raises:
        InvalidArguments: if the call asks for access that cannot be granted.
        ToolFailed: if the call is not approved.
    """
    journal = context.journal
    request = tool.request_of(context, arguments)
    if not (journal.was_asked(call_id) or tool.needs_approval(arguments) or not await _is_granted(context, request)):
        return NO_REQUEST.access
    answer = journal.answer(call_id)
    question = approval_question(call_id, tool.name, arguments, request)
    if answer is None:
        with context.deadlines_held():
            await context.host.suspend(question)
            answer = await context.host.answered(call_id)
    if is_for_another_call(answer, question):
        raise ToolFailed("the approval is for a different call; this call was not made")
    match answer.decision:
        case "approved":
            return request.access
        case "expired":
            raise ToolFailed("the approval request expired; the call was not made")
        case _:
            reason = f": {answer.text}" if answer.text else ""
            raise ToolFailed(f"a person denied this call{reason}; it was not made")


async def _is_granted(context: RunContext, request: AccessRequest) -> bool:
    """Return whether earlier grants cover what a call asks for."""
    if not request.access:
        return True
    return is_covered(request.access, join(*[grant.access for grant in await context.host.grants()]))
