"""A run's questions to people. A question is durable before it is shown, and the journal keeps the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.agents.journaled_calls import written
from holdfast.agents.output import require_text
from holdfast.errors import ToolFailed
from holdfast.protocol.call_hash import is_for_another_call
from holdfast.protocol.messages import Answer, Question

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


async def require_approval(context: RunContext, call_id: str, tool: Tool, arguments: dict[str, Any]) -> None:
    """Ask a person to approve a call inside another call. Raises `ToolFailed` if the call is not approved."""
    answer = context.journal.answer(call_id)
    question = Question(
        question_id=call_id,
        kind="approval",
        text=f"May {tool.name} be called?",
        tool=tool.name,
        arguments=arguments,
    )
    if answer is None:
        with context.deadlines_held():
            await context.host.suspend(question)
            answer = await context.host.answered(call_id)
    if is_for_another_call(answer, question):
        raise ToolFailed("the approval is for a different call; this call was not made")
    match answer.decision:
        case "approved":
            return
        case "expired":
            raise ToolFailed("the approval request expired; the call was not made")
        case _:
            reason = f": {answer.text}" if answer.text else ""
            raise ToolFailed(f"a person denied this call{reason}; it was not made")
