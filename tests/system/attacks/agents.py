"""What an attacked server serves unless a test brings its own: an agent that answers and one that never ends."""

from __future__ import annotations

from holdfast import Run


async def echo(run: Run) -> str:
    """Answer with the text."""
    return run.text


async def endless(run: Run) -> None:
    """Wait until it is interrupted."""
    await run.interrupt.wait()
