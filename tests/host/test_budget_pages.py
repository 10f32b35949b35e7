"""Pages are charged before they are read, by what they turn out to weigh."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from holdfast.errors import BudgetExceeded
from holdfast.host.budgets import PAGE_BYTES, Budgets
from holdfast.settings import Settings

SHARE = 8_000_000
COPIES = 3
"""A page is in memory as it was read, as events or entries, and encoded."""


def budgets() -> Budgets:
    return Budgets(Settings(principal_memory_bytes=SHARE, memory_limit_bytes=2 * SHARE, stream_stall_s=0.05))


def read(one: Budgets, weight: int) -> tuple[Callable[[], Awaitable[int]], list[int]]:
    """A page of that weight, and what was charged at each time that it was read."""
    charged: list[int] = []

    async def page() -> int:
        charged.append(one.memory.held("alice"))
        return weight

    return page, charged


@pytest.mark.parametrize("weight", [0, 1, PAGE_BYTES - 1, PAGE_BYTES])
def test_a_usual_page_is_charged_before_it_is_read_and_then_by_its_weight(weight: int) -> None:
    async def case() -> None:
        one = budgets()
        page, charged = read(one, weight)
        found, charge = await one.read_page("alice", page, lambda given: given)
        assert (found, charged) == (weight, [COPIES * PAGE_BYTES])
        assert one.memory.held("alice") == charge.amount == COPIES * weight
        charge.release()
        assert one.memory.used == 0

    asyncio.run(case())


def test_a_heavy_page_is_read_again_once_there_is_room_for_it() -> None:
    async def case() -> None:
        one = budgets()
        page, charged = read(one, 1_000_000)
        _, charge = await one.read_page("alice", page, lambda given: given)
        assert charged == [COPIES * PAGE_BYTES, COPIES * 1_000_000]
        assert charge.amount == COPIES * 1_000_000
        charge.release()

    asyncio.run(case())


def test_a_page_beyond_the_share_takes_all_of_it() -> None:
    async def case() -> None:
        one = budgets()
        page, charged = read(one, SHARE)
        _, charge = await one.read_page("alice", page, lambda given: given)
        assert charged[-1] == charge.amount == SHARE
        charge.release()

    asyncio.run(case())


def test_a_heavy_page_waits_for_room_and_holds_none_meanwhile() -> None:
    async def case() -> None:
        one = budgets()
        with one.memory.charge("alice", SHARE - COPIES * PAGE_BYTES):
            page, _ = read(one, 1_000_000)
            with pytest.raises(BudgetExceeded):
                await one.read_page("alice", page, lambda given: given)
            assert one.memory.held("alice") == SHARE - COPIES * PAGE_BYTES
        assert one.memory.used == 0

    asyncio.run(case())


@pytest.mark.parametrize("error", [RuntimeError("no"), asyncio.CancelledError()])
def test_a_read_that_fails_gives_its_charge_back(error: BaseException) -> None:
    async def case() -> None:
        one = budgets()

        async def page() -> int:
            raise error

        with pytest.raises(type(error)):
            await one.read_page("alice", page, lambda given: given)
        assert one.memory.used == 0

    asyncio.run(case())
