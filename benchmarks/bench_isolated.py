"""What a call in a process of its own costs: in a fresh process, in one that is kept, with arguments and output.

Run it: ``python -m benchmarks.bench_isolated``.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.bench_processes import percentile
from benchmarks.rows import Row, print_rows
from holdfast.runtime.process_host import ProcessHost
from holdfast.runtime.scope.scope import Scope

__all__ = ["rows"]

COLD = 30
WARM = 1_000
TARGET_MS = 5.0


async def _times(
    scope: Scope, rounds: int, fn: Callable[..., Any], *values: Any, streamed: bool = False
) -> list[float]:
    """Milliseconds of each call."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        await scope.spawn(fn, *values, on="process", output=(lambda text: None) if streamed else None)
        taken.append((time.perf_counter() - began) * 1e3)
    return taken


async def _measure(host: ProcessHost) -> list[Row]:
    async with Scope("bench", parent=None, processes=host) as scope:
        await scope.spawn(os.getpid, on="process")
        host.workers.close()
        cold = []
        for _ in range(COLD):
            cold += await _times(scope, 1, os.getpid)
            host.workers.close()
        warm = await _times(scope, WARM, os.getpid)
        streamed = await _times(scope, WARM, print, "x" * 1000, streamed=True)
        large = await _times(scope, WARM // 10, bytes, b"x" * (1 << 20))
    p99 = percentile(warm, 0.99)
    streamed_p99 = percentile(streamed, 0.99)
    return [
        Row(name="isolated call in a fresh process, p50", value=percentile(cold, 0.5), unit="ms"),
        Row(name="warm isolated call, p50", value=percentile(warm, 0.5), unit="ms"),
        Row(
            name="warm isolated call, p99",
            value=p99,
            unit="ms",
            target=f"<= {TARGET_MS:g}",
            met=p99 <= TARGET_MS,
            note="with the look at what it left, from inside and outside",
        ),
        Row(
            name="the same, printing 1 KB that is streamed, p99",
            value=streamed_p99,
            unit="ms",
            target=f"<= {TARGET_MS:g}",
            met=streamed_p99 <= TARGET_MS,
            note=f"p50 {percentile(streamed, 0.5):.2f} ms",
        ),
        Row(name="the same with 1 MB there and back, p50", value=percentile(large, 0.5), unit="ms"),
    ]


def rows() -> list[Row]:
    """All figures; needs Linux."""
    host = ProcessHost()
    try:
        return asyncio.run(_measure(host))
    finally:
        host.close()


if __name__ == "__main__":
    print_rows(rows())
