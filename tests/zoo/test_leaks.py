"""After many runs with hostile tools nothing is left of them: no task, thread, descriptor, process, object, memory."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import random
import resource
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import Host
from holdfast.host.statistics import Incident
from holdfast.runtime.process_host import process_host
from holdfast.runtime.processes import procfs
from tests.runtime.processes_zoo import await_condition
from tests.zoo.hostile import ZOO, Fate
from tests.zoo.test_zoo import AT_ONCE, SEED, hosted, of_nobody, one_round

pytestmark = pytest.mark.skipif(not procfs.supported(), reason="process trees are proven dead only on Linux")

KEPT = 40
"""Objects of a class, or threads of the pools, by which two moments may differ: what waits for its next use."""
MEMORY_BYTES = 1 << 27
"""What the allocator may keep of the long logs that the rounds read: it levels off at 100 MB after 2,000 rounds."""


class Inventory:
    """What there is in this process when everything is at rest."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.tasks = len(asyncio.all_tasks())
        self.threads = Counter(thread.name.partition("-")[0] for thread in threading.enumerate())
        self.descriptors = len(os.listdir("/proc/self/fd"))
        kinds = (type(one) for one in gc.get_objects())
        self.objects = Counter(
            f"{kind.__module__}.{kind.__qualname__}"
            for kind in kinds
            if str(kind.__module__).startswith(("holdfast.runtime", "holdfast.agents", "holdfast.host"))
            and kind is not Incident  # the last hundred or so are kept
        )
        pages = (procfs.read_text("/proc/self/statm") or b"0 0").split()[1]
        self.memory_bytes = int(pages) * resource.getpagesize()

    def growth(self, before: Inventory) -> dict[str, int]:
        """What there is too much of."""
        found = {
            "tasks": self.tasks - before.tasks,
            "descriptors": self.descriptors - before.descriptors,
            "memory": max(0, self.memory_bytes - before.memory_bytes - MEMORY_BYTES),
        }
        for name, count in (self.objects - before.objects).items():
            found[name] = max(0, count - KEPT)
        for name, count in (self.threads - before.threads).items():
            found[f"threads {name}"] = max(0, count - AT_ONCE)
        return {name: count for name, count in found.items() if count > 0}


async def at_rest(others: set[int]) -> Inventory:
    """End what is only kept for its next use, and look. ``others`` were there before: of a test that failed."""
    process_host().workers.close()
    async with asyncio.timeout(60):
        while not others.issuperset(of_nobody()) or process_host().statistics().live:
            await asyncio.sleep(0.01)
    return Inventory()


async def runs(hosts: dict[Fate, Host], count: int, folder: Path, serial: Iterator[int]) -> None:
    order = list(ZOO.items())
    for batch in range(0, count, AT_ONCE):
        async with asyncio.TaskGroup() as group:
            for place in range(min(AT_ONCE, count - batch)):
                number = next(serial)
                fn, (_, fate) = order[number % len(order)]
                session = hosts[fate].session(f"s{place}")
                token = f"zoo-{os.getpid()}-leak-{number}"
                chance = random.Random(SEED * 1_000_000 + number)
                group.create_task(one_round(session, fn.__name__, fate, chance, folder, token))


def look_for_leaks(count: int, folder: Path) -> None:
    others = set(of_nobody())

    async def main() -> None:
        serial = iter(range(1_000_000))
        # On disk, as a log in memory grows by what was said.
        stores = [f"sqlite:///{folder}/{name}.db" for name in ("patient", "quick")]
        async with hosted("gone", stores[0]) as patient, hosted("quarantined", stores[1]) as quick:
            hosts: dict[Fate, Host] = {"gone": patient, "quarantined": quick}
            await runs(hosts, len(ZOO), folder, serial)
            before = await at_rest(others)
            await runs(hosts, count, folder, serial)
            give_up_at = time.monotonic() + 20
            while (growth := (await at_rest(others)).growth(before)) and time.monotonic() < give_up_at:
                await asyncio.sleep(0.1)  # what another thread has open for a moment is no leak
            assert growth == {}

    asyncio.run(main())
    await_condition(lambda: others.issuperset(of_nobody()), "nothing lives on")


def test_a_hundred_runs_with_hostile_tools_leave_nothing(tmp_path: Path) -> None:
    look_for_leaks(100, tmp_path)


@pytest.mark.nightly
def test_a_thousand_runs_with_hostile_tools_leave_nothing(tmp_path: Path) -> None:
    look_for_leaks(1000, tmp_path)
