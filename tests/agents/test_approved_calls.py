"""A call inside another one that needs approval is made only if it is the one that a person saw."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast import tool
from holdfast.agents.questions import require_approval
from holdfast.errors import ToolFailed
from holdfast.protocol.call_hash import hash_call
from holdfast.protocol.messages import Answer, Question


@tool(approval=True)
def erase(name: str) -> str:
    """Erase something."""
    return f"{name} is erased"


def question(name: str) -> Question:
    text = "May erase be called?"
    return Question(question_id="c1", kind="approval", text=text, tool="erase", arguments={"name": name})


@pytest.mark.parametrize(("seen", "made"), [("a", True), ("b", False)])
def test_an_answer_in_the_journal_counts_for_the_call_that_was_shown_alone(seen: str, made: bool) -> None:
    """After a restart the agent may ask for something else under the same id."""
    answer = Answer(question_id="c1", decision="approved", call_hash=hash_call(question(seen)))
    context: Any = SimpleNamespace(
        journal=SimpleNamespace(answer=lambda call_id: answer, was_asked=lambda call_id: True)
    )
    if made:
        asyncio.run(require_approval(context, "c1", erase, {"name": "a"}))
    else:
        with pytest.raises(ToolFailed, match="for a different call; this call was not made"):
            asyncio.run(require_approval(context, "c1", erase, {"name": "a"}))
