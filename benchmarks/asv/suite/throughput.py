"""Throughput of the reactive bridge, for asv; the same measurements as in `benchmarks.bench_reactive`."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # asv knows this folder only

from benchmarks.bench_reactive import bare, bridged, bridged_in_order

__all__ = ["Share", "Throughput"]

ITEMS = 10_000


class Throughput:
    """How long 10,000 items take."""

    timeout = 60.0

    def time_bare_tasks(self) -> None:
        assert asyncio.run(bare()) == ITEMS

    def time_bridge(self) -> None:
        assert asyncio.run(bridged()) == ITEMS

    def time_bridge_in_order(self) -> None:
        assert asyncio.run(bridged_in_order()) == ITEMS


class Share:
    """The bridge against bare tasks: a figure that does not depend on the machine."""

    unit = "x"
    timeout = 60.0

    def track_share_of_bare_tasks(self) -> float:
        shares = []
        for _ in range(5):
            began = time.perf_counter()
            asyncio.run(bare())
            between = time.perf_counter()
            asyncio.run(bridged())
            shares.append((between - began) / (time.perf_counter() - between))
        return sorted(shares)[2]
