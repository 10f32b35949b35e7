"""Build the answer of a composite agent from the answers of its branches."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from holdfast.agents.children import delegate
from holdfast.agents.output import require_text
from holdfast.protocol.supervision import BranchResult
from holdfast.protocol.transcript import STEP_BREAK

if TYPE_CHECKING:
    from holdfast.agents.children import ChildTask
    from holdfast.agents.run import Run
    from holdfast.protocol.events import ChildFinished

__all__ = ["Join", "emit_rest", "hand_over", "joined", "result_of", "texts_in_order"]

Join: TypeAlias = Callable[[Sequence[BranchResult]], "str | Awaitable[str]"]


def texts_in_order(results: Sequence[BranchResult]) -> str:
    """Join the answers of the completed branches in order, separated by blank lines; omit empty answers."""
    return STEP_BREAK.join(result.text for result in results if result.completed and result.text)


async def joined(join: Join, results: Sequence[BranchResult]) -> str:
    """Return the text that `join` makes from the results. Raises the errors of `join`, and `TypeError` if `join` does
    not return text."""
    text = join(results)
    if inspect.isawaitable(text):
        text = await text
    require_text(text, "what join() returns")
    return text


def result_of(name: str, finished: ChildFinished) -> BranchResult:
    """Convert a child's recorded outcome to the `BranchResult` of the branch with this name."""
    return BranchResult(
        name=name, status=finished.status, text=finished.text, error=finished.error, cause=finished.cause
    )


async def hand_over(run: Run, task: ChildTask) -> None:
    """Run a child and make its answer the answer of `run`. Raises the same errors as `Run.delegate`."""
    await emit_rest(run, await delegate(run.context, task))


async def emit_rest(run: Run, text: str) -> None:
    """Emit the part of the answer that was not streamed; an answer that was read from the log is emitted whole."""
    emitted = run.transcript.text
    if text.startswith(emitted) and len(text) > len(emitted):
        await run.emit(text[len(emitted) :])
