"""Marble tests: the bridge between observables and observers of the virtual scheduler.

The virtual clock of reactivex and the virtual clock of the loop go in step: a tick of one is a second of the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from reactivex import Observable
from reactivex.notification import OnError, OnNext
from reactivex.observable.marbles import parse
from reactivex.testing import ReactiveTest, TestScheduler
from reactivex.testing.mockobserver import MockObserver

from holdfast.integrations.reactive import Outcome, ReactiveBridge
from holdfast.testing import run_virtual
from tests.integrations.reactive.watching import gone

END = 20
ERROR = ValueError("#")

Operator = Callable[[ReactiveBridge, TestScheduler], Callable[[Observable[Any]], Observable[Any]]]


async def played(
    scheduler: TestScheduler, source: Observable[Any], operator: Operator, *, disposed: int = END, **shape: Any
) -> MockObserver[Any]:
    """What an observer is told, and when."""
    observer: MockObserver[Any] = scheduler.create_observer()
    async with ReactiveBridge(**shape) as bridge:
        subscription = source.pipe(operator(bridge, scheduler)).subscribe(observer, scheduler=scheduler)
        for tick in range(1, END + 1):
            scheduler.advance_to(float(tick))
            if tick == disposed:
                subscription.dispose()
            for part in (0.25, 0.5, 0.75, 1):
                await asyncio.sleep(0.25)  # what happens in this part of the tick
                if part < 1:
                    scheduler.advance_to(tick + part)  # and what it asked the scheduler to emit
        subscription.dispose()
    gone(bridge)
    return observer


def told(marbles: str, values: Mapping[str | float, Any] | None = None) -> list[Any]:
    """A line of marbles, one tick each, as it is told; ``(…)`` is told in one tick."""
    messages = []
    for time, notification in parse(marbles, timespan=1.0, lookup=values, error=ERROR):
        assert isinstance(time, float)
        tick = int(time)
        if isinstance(notification, OnNext):
            messages.append(ReactiveTest.on_next(tick, notification.value))
        elif isinstance(notification, OnError):
            messages.append(ReactiveTest.on_error(tick, ERROR))
        else:
            messages.append(ReactiveTest.on_completed(tick))
    return messages


def ticks(observer: MockObserver[Any]) -> list[Any]:
    """What was told, with whole ticks."""
    return [type(message)(int(message.time), message.value) for message in observer.messages]


async def work(item: Any) -> Any:
    """Digits take so many ticks; letters none, and ``x`` fails."""
    if item == "x":
        raise ERROR
    if isinstance(item, int):
        await asyncio.sleep(item + 0.0005)
    return item


def plain(bridge: ReactiveBridge, _: TestScheduler) -> Any:
    return bridge.each(work)


def scheduled(bridge: ReactiveBridge, scheduler: TestScheduler) -> Any:
    return bridge.each(work, scheduler=scheduler)


DROPPING = {"concurrency": 1, "buffer": 1, "overflow": "drop"}
LINES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("values pass", "-a-b-c-|", "-a-b-c-|", {}),
    ("an empty one completes", "--|", "--|", {}),
    ("an error passes", "-a-b-#", "-a-b-#", {}),
    ("an error comes before what is at work", "-6-#", "---#", {}),
    ("completion waits for what is at work", "-6-1-|", "----1--(6,|)", {}),
    ("results come as they are ready", "-6-1---------|", "----1--6-----|", {}),
    ("or in the order of the items", "-6-1---------|", "-------(6,1)-|", {"ordered": True}),
    ("work that fails ends the stream", "-a-x-b-|", "-a-#", {}),
    ("and interrupts what is at work", "-6-1-x---|", "----1#", {}),
    ("in its turn where the order counts", "-6-1-x---|", "-------(6,1,#)", {"ordered": True}),
    ("two at a time", "-3-3-|", "----3-(3,|)", {"concurrency": 2}),
    ("one at a time", "-3-3-|", "----3--(3,|)", {"concurrency": 1}),
    (
        "what finds no room is dropped",
        "-6-a-b-|",
        "-------(6,a,|)",
        {"concurrency": 1, "buffer": 1, "overflow": "drop"},
    ),
    ("items after the end are not heard", "-a-|-b-", "-a-|", {}),
]


@pytest.mark.parametrize("operator", [plain, scheduled])
@pytest.mark.parametrize(("marbles", "wanted", "shape"), [line[1:] for line in LINES], ids=[line[0] for line in LINES])
def test_marbles(marbles: str, wanted: str, shape: dict[str, Any], operator: Operator) -> None:
    async def main() -> None:
        scheduler = TestScheduler()
        source = scheduler.create_hot_observable(told(marbles))
        observer = await played(scheduler, source, operator, **shape)
        assert ticks(observer) == told(wanted)
        assert [(one.subscribe, one.unsubscribe < END) for one in source.subscriptions] == [(0, True)]

    run_virtual(main())


def test_outcomes_pass_in_the_place_of_errors() -> None:
    async def main() -> None:
        scheduler = TestScheduler()
        source = scheduler.create_hot_observable(told("-a-x-1--|"))
        observer = await played(scheduler, source, plain, outcomes=True)
        a, x, one = (
            Outcome(index=0, item="a", settled="done", value="a"),
            Outcome(index=1, item="x", settled="failed", error=ERROR),
            Outcome(index=2, item=1, settled="done", value=1),
        )
        assert ticks(observer) == told("-a-x--o-|", {"a": a, "x": x, "o": one})

    run_virtual(main())


@pytest.mark.parametrize("operator", [plain, scheduled])
def test_nothing_is_told_after_the_disposal_and_the_source_is_left(operator: Operator) -> None:
    async def main() -> None:
        scheduler = TestScheduler()
        source = scheduler.create_hot_observable(told("-a-6-b-c-d-|"))
        observer = await played(scheduler, source, operator, disposed=6)
        assert ticks(observer) == told("-a---b-")
        assert [(one.subscribe, one.unsubscribe) for one in source.subscriptions] == [(0, 6)]

    run_virtual(main())


def test_a_cold_observable_is_played_for_each_subscription() -> None:
    async def main() -> None:
        scheduler = TestScheduler()
        source = scheduler.create_cold_observable(told("-a-2---|"))
        for _ in range(2):
            scheduler._clock = 0.0
            observer = await played(scheduler, source, plain)
            assert ticks(observer) == told("-a---2-|")
        assert len(source.subscriptions) == 2

    run_virtual(main())
