"""Hosts make the garbage collector run less often, and only if the program has not set its thresholds itself."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from holdfast import Host, Run, agent
from holdfast.host.garbage_collection import ACTIVE_THRESHOLDS

PYTHONS = (700, 10, 10)


@agent
async def noop(run: Run) -> str:
    return "ok"


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_thresholds_change_while_hosts_are_active() -> None:
    async def main() -> None:
        gc.set_threshold(*PYTHONS)
        async with Host(noop, store="memory://"):
            assert gc.get_threshold() == ACTIVE_THRESHOLDS
            async with Host(noop, store="memory://"):
                assert gc.get_threshold() == ACTIVE_THRESHOLDS
            assert gc.get_threshold() == ACTIVE_THRESHOLDS
        assert gc.get_threshold() == PYTHONS

    asyncio.run(main())


@pytest.mark.parametrize("own", [(500, 5, 5), (0, 10, 10), (50_000, 10, 10)])
def test_thresholds_of_the_program_stay(own: tuple[int, int, int]) -> None:
    async def main() -> None:
        gc.set_threshold(*own)
        async with Host(noop, store="memory://"):
            assert gc.get_threshold() == own
        assert gc.get_threshold() == own

    asyncio.run(main())


def test_thresholds_set_while_a_host_is_active_stay() -> None:
    async def main() -> None:
        gc.set_threshold(*PYTHONS)
        async with Host(noop, store="memory://"):
            gc.set_threshold(1000, 10, 10)
        assert gc.get_threshold() == (1000, 10, 10)

    asyncio.run(main())


def test_runs_leave_no_cyclic_garbage() -> None:
    async def main() -> None:
        async with Host(noop, store="memory://") as host:
            session = host.session("s")
            await session.ask("x")
            gc.collect()
            gc.disable()
            try:
                for _ in range(20):
                    await session.ask("x")
                assert gc.collect() == 0
            finally:
                gc.enable()

    asyncio.run(main())
