"""Each shape, interrupted and failing at each point in time: nothing is left, no answer is lost, causes are told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from holdfast.testing import explore, run_virtual
from tests.compose.kit import SHAPES, STEP_S, Ledger, check, echo, host, send, settled

THOROUGH = [False, pytest.param(True, marks=pytest.mark.nightly, id="thorough")]


def scenario(
    name: str, meanwhile: Callable[[Any], Awaitable[object]], **faults: Any
) -> Callable[[], Coroutine[Any, Any, None]]:
    """One run of the shape, and what happens beside it."""

    async def play() -> None:
        ledger = Ledger(**faults)
        async with host([ledger.outer(SHAPES[name](ledger)), echo]) as one:
            message_id = await send(one)
            await meanwhile(one)
            await check(one, ledger, message_id)

    return play


async def nothing(_: Any) -> None:
    """The run is left alone."""


@pytest.mark.parametrize("thorough", THOROUGH)
@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_that_is_left_alone_completes_under_every_schedule(name: str, thorough: bool) -> None:
    async def play() -> None:
        ledger = Ledger()
        async with host([ledger.outer(SHAPES[name](ledger)), echo]) as one:
            message_id = await send(one)
            assert (await settled(one, message_id)).state == "completed"
            await check(one, ledger, message_id)

    schedules = 30 if thorough else 3
    explore(play, schedules=schedules)
    explore(play, schedules=schedules // 3, chooser="pct", late_s=STEP_S)
    explore(play, schedules=schedules // 3, tasks="eager")


@pytest.mark.parametrize("thorough", THOROUGH)
@pytest.mark.parametrize("name", SHAPES)
def test_an_interrupt_at_any_time_ends_all_of_it_and_loses_no_answer(name: str, thorough: bool) -> None:
    for quarter in range(0, 40, 2 if thorough else 9):

        async def interrupt(one: Any, at_s: float = quarter * STEP_S / 4) -> None:
            await asyncio.sleep(at_s)
            await one.session("s").interrupt("enough")

        explore(scenario(name, interrupt), schedules=3 if thorough else 2, seed=quarter)


@pytest.mark.parametrize("thorough", THOROUGH)
@pytest.mark.parametrize("name", SHAPES)
def test_a_failure_at_any_step_of_any_branch_ends_or_restarts_what_it_should(name: str, thorough: bool) -> None:
    for who in ("item",) if name.startswith("map") else ("a", "b", "b's child", "c"):
        for step in range(4):
            for times in (1, 1_000_000):
                play = scenario(name, nothing, fails=(who, step), times=times)
                if thorough:
                    explore(play, schedules=2, seed=step)
                elif times == 1 or step == 1:
                    run_virtual(play())


@pytest.mark.parametrize("name", ["all", "sequence"])
def test_a_branch_that_ends_at_the_moment_of_the_interrupt_has_ended_or_was_interrupted_but_not_both(name: str) -> None:
    async def interrupt(one: Any) -> None:
        await asyncio.sleep(STEP_S * 2.5)  # when the first one is done
        await one.session("s").interrupt("enough")

    explore(scenario(name, interrupt), schedules=40)
