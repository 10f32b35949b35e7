"""A stop's receipt in words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from holdfast.cli.output import clean, counted, say

if TYPE_CHECKING:
    from holdfast.protocol.stopping import StopCounts, StopReceipt

__all__ = ["counts_in_words", "receipt_lines", "say_receipt"]


_NOTHING = "nothing was running"
_LATE_S = 2.0
"""Time between a stop's request and its begin from which the receipt mentions it."""
_THREADS = (
    "a thread cannot be ended from outside: call holdfast.runtime.check_interrupt() in it, "
    'or run it in a process (tools: isolation="process", run.call: on="process")'
)


def say_receipt(receipt: StopReceipt, *, waited_s: float) -> None:
    """Print a receipt in a few lines on stdout. See `receipt_lines`."""
    for line in receipt_lines(receipt, waited_s=waited_s):
        say(line)


def receipt_lines(receipt: StopReceipt, *, waited_s: float = 0.0) -> list[str]:
    """Return the lines that describe a receipt: its outcome first, then what was forced and what is left.

    Parameters:
        receipt: the receipt.
        waited_s: time since the stop was requested, which is longer than the stop itself if an agent blocked the loop
            of the server; 0 if unknown.
    """
    ended = counts_in_words(receipt.stopped)
    if receipt.outcome != "gone":  # or else the counts seem to be of what is left
        ended = "nothing ended" if ended == _NOTHING else f"{ended} ended"
    took = f"{receipt.elapsed_s * 1000:.0f} ms"
    if waited_s - receipt.elapsed_s >= _LATE_S:
        took = f"{waited_s:.1f} s ({took} after the server took the request)"
    lines = [f"{receipt.outcome} after {took}: {ended}"]
    if receipt.forced:
        lines.append(f"forced: {', '.join(_forced(receipt))}")
    lines += [f"abandoned: {left.kind} {clean(left.name)}; its output no longer counts" for left in receipt.abandoned]
    if any(left.kind == "thread" for left in receipt.abandoned):
        lines.append(_THREADS)
    if receipt.survivors:
        lines.append(f"not proven dead: pid {', '.join(map(str, receipt.survivors))}")
    return lines


def _forced(receipt: StopReceipt) -> Iterator[str]:
    for name, reason in itertools.zip_longest(receipt.forced, receipt.force_reasons):
        yield f"{clean(name)} ({clean(reason)})" if reason else clean(name)


def counts_in_words(stopped: StopCounts) -> str:
    """Return what a stop ended in words, such as ``1 task, 1 program (8 processes)``."""
    counts = ((stopped.tasks, "task"), (stopped.threads, "thread"), (stopped.programs, "program"))
    parts = [counted(count, name) for count, name in counts if count]
    if stopped.processes > stopped.programs:
        processes = counted(stopped.processes, "process")
        if stopped.programs:
            parts[-1] += f" ({processes})"
        else:  # a receipt of an older version
            parts.append(processes)
    return ", ".join(parts) or _NOTHING
