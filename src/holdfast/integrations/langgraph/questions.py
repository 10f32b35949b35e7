"""Support for `interrupt()` in graphs: ask people questions about the value passed to it, and return the answers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.agents.fanout import run_parallel
from holdfast.agents.journal import CallPath, current_call_path
from holdfast.agents.journaled_calls import written
from holdfast.agents.questions import wait_for_answer
from holdfast.errors import ConfigurationError
from holdfast.integrations.langgraph.messages import as_json, readable
from holdfast.protocol.events import plain
from holdfast.protocol.messages import Answer, Question

if TYPE_CHECKING:
    from holdfast.agents.context import RunContext
    from holdfast.integrations.langgraph.hosted_graph import GraphAgent

__all__ = ["ask_all", "questions_of", "resume_of"]

_EXPIRED = "the question expired"


def questions_of(agent: GraphAgent, value: Any) -> list[Question]:
    """Return the questions for a value that was passed to `interrupt()`; the questions have empty ids.

    Raises:
        ConfigurationError: if the agent's `ask` function returns neither text nor a `Question`.
    """
    if agent.ask is not None:
        question = agent.ask(value)
        if isinstance(question, str):
            question = Question(question_id="", kind="question", text=question)
        if not isinstance(question, Question):
            raise ConfigurationError(
                f"ask() of the graph {agent.name!r} returned a {type(question).__name__}",
                hint="return text, or a holdfast.protocol.messages.Question",
            )
        return [question]
    if actions := _actions(value):
        return [_approval(action) for action in actions]
    return [Question(question_id="", kind="question", text=plain(value if isinstance(value, str) else as_json(value)))]


def resume_of(agent: GraphAgent, value: Any, answers: Sequence[Answer]) -> Any:
    """Return the result of an `interrupt()`, built from the answers to its questions."""
    if agent.resume is not None:
        return agent.resume(answers[0], value)
    if agent.ask is None and _actions(value):
        if isinstance(value, Mapping) and "action_requests" in value:
            return {"decisions": [_decision(answer) for answer in answers]}
        replies = [_reply(answer) for answer in answers]
        return replies if isinstance(value, Sequence) else replies[0]
    match answers[0].decision:
        case "answered":
            return answers[0].text
        case "expired" if questions_of(agent, value)[0].kind == "question":
            return None
        case decision:
            return decision == "approved"


def _actions(value: Any) -> list[Mapping[str, Any]]:
    """Return the calls to approve in a LangChain review request, or an empty list for any other value."""
    if isinstance(value, Mapping) and isinstance(value.get("action_requests"), Sequence):
        found = list(value["action_requests"])
    else:
        wanted = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        found = [one.get("action_request") if isinstance(one, Mapping) else None for one in wanted]
    return found if all(isinstance(action, Mapping) for action in found) else []


def _approval(action: Mapping[str, Any]) -> Question:
    name = str(action.get("name") or action.get("action") or "this")
    arguments = action.get("args", action.get("arguments"))
    return Question(
        question_id="",
        kind="approval",
        text=str(action.get("description") or f"May {name} be called?"),
        tool=name,
        arguments=readable(arguments),
    )


def _decision(answer: Answer) -> dict[str, Any]:
    if answer.decision == "approved":
        return {"type": "approve"}
    return {"type": "reject", "message": answer.text or (_EXPIRED if answer.decision == "expired" else "denied")}


def _reply(answer: Answer) -> dict[str, Any]:
    if answer.decision == "approved":
        return {"type": "accept", "args": None}
    return {"type": "response", "args": answer.text or (_EXPIRED if answer.decision == "expired" else "denied")}


async def ask_all(context: RunContext, questions: Sequence[Question]) -> list[Answer]:
    """Open all questions in order, then wait for all answers. Answers of an earlier attempt are read from the journal.

    Raises the same errors as `Run.ask_user`.
    """
    with context.deadlines_held():
        for question in questions:
            if context.journal.answer(question.question_id) is None:
                written(context, [question.text, question.arguments], "the words of the question")
                await context.host.suspend(question)
        ids = [question.question_id for question in questions]
        if len(ids) == 1:
            return [await _answered(context, ids[0])]
        token = current_call_path.set(CallPath(f"{ids[0]}.all"))
        try:
            answers = [functools.partial(_answered, context, question_id) for question_id in ids]
            return await run_parallel(context, answers)
        finally:
            current_call_path.reset(token)


async def _answered(context: RunContext, question_id: str) -> Answer:
    known = context.journal.answer(question_id)
    if known is not None:
        return known
    return await wait_for_answer(context, question_id)
