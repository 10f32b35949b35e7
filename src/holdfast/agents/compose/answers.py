"""How the answers of branches become the answer of the shape."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from holdfast.agents.call import check_said
from holdfast.protocol.branches import BranchResult
from holdfast.protocol.transcript import STEP_BREAK

if TYPE_CHECKING:
    from holdfast.agents.children import ChildTask
    from holdfast.agents.run import Run
    from holdfast.protocol.events import ChildFinished

__all__ = ["Join", "hand_over", "joined", "result_of", "say_rest", "texts_in_order"]

Join: TypeAlias = Callable[[Sequence[BranchResult]], "str | Awaitable[str]"]


def texts_in_order(results: Sequence[BranchResult]) -> str:
    """The answers, in the order of the branches, a blank line between them; those that said nothing are left out."""
    return STEP_BREAK.join(result.text for result in results if result.completed and result.text)


async def joined(join: Join, results: Sequence[BranchResult]) -> str:
    """What `join` makes of the results. Raises what it raises, and `TypeError` if that is no text."""
    text = join(results)
    if inspect.isawaitable(text):
        text = await text
    check_said(text, "what join() returns")
    return text


def result_of(name: str, finished: ChildFinished) -> BranchResult:
    """How a branch ended, for whoever asked for the shape."""
    return BranchResult(
        name=name, status=finished.status, text=finished.text, error=finished.error, cause=finished.cause
    )


async def hand_over(run: Run, task: ChildTask) -> None:
    """Let a child that speaks aloud give the answer of its parent. Raises as `Run.delegate` does."""
    await say_rest(run, await run._delegate(task))


async def say_rest(run: Run, text: str) -> None:
    """Say what of the answer was not said yet: all of it where it comes from the log."""
    said = run.transcript.text
    if text.startswith(said) and len(text) > len(said):
        await run.emit(text[len(said) :])
