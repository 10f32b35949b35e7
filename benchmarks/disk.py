"""How fast the disk is: the figure that stands beside every durable one."""

from __future__ import annotations

import os
import statistics
import tempfile
import time

__all__ = ["sync_latency_s"]

ROUNDS = 200


def sync_latency_s() -> float:
    """The median time of an 8 KiB append and its fdatasync, in seconds, where the databases of the benchmarks lie."""
    with tempfile.TemporaryFile() as file:
        times = []
        for number in range(ROUNDS):
            os.pwrite(file.fileno(), b"x" * 8192, number * 8192)
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    return statistics.median(times)
