"""What the sentences of the scenarios mean."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import asyncio
import threading
from typing import Any

from behave import given, then, when  # type: ignore[import-untyped]
from reactivex import Subject

from tests.integrations.reactive.stage import Item
from tests.integrations.reactive.watching import Busy, Watcher


@given("a bridge that works on {count:d} items at a time")
def a_bridge(context: Any, count: int) -> None:
    context.stage.open(concurrency=count)


@given("a bridge that works on {count:d} items at a time, with room for {room:d}")
def a_small_bridge(context: Any, count: int, room: int) -> None:
    context.stage.open(concurrency=count, buffer=room)


@given("a host")
def a_host(context: Any) -> None:
    context.stage.start_host()


@given("a subscription")
@when("a subscription is made")
def a_subscription(context: Any) -> None:
    context.stage.busy = Busy()
    context.stage.subject = Subject()
    context.stage.subscribe()


@given("an ordered subscription")
def an_ordered_subscription(context: Any) -> None:
    context.stage.subscribe(ordered=True)


@given("a subscription to work that takes for ever")
def a_subscription_for_ever(context: Any) -> None:
    context.stage.busy = Busy(wait_s=1000)
    context.stage.subscribe()


@given("a subscription to work that fails on item {number:d}")
def a_subscription_that_fails(context: Any, number: int) -> None:
    busy = context.stage.busy

    async def work(item: Item) -> Any:
        if item.number == number:
            raise ValueError(number)
        return await busy(item)

    context.stage.subscribe(work)


@given("a subscription that is told on the {scheduler}")
def a_subscription_told_elsewhere(context: Any, scheduler: str) -> None:
    context.stage.subscribe(emit_on=scheduler)


@given('a subscription that asks session "{key}"')
def a_subscription_that_asks(context: Any, key: str) -> None:
    stage = context.stage
    stage.subject, stage.watcher = Subject(), Watcher()
    asked = stage.subject.pipe(stage.bridge.ask(stage.host.session(key)))
    stage.subscription = asked.subscribe(stage.watcher)


@when("{count:d} items are pushed by {threads:d} thread")
@when("{count:d} items are pushed by {threads:d} threads")
def items_are_pushed(context: Any, count: int, threads: int) -> None:
    context.stage.push(count, threads=threads)


@when("{count:d} texts are pushed")
def texts_are_pushed(context: Any, count: int) -> None:
    context.stage.push(count, text=True)


@when("the source completes")
def the_source_completes(context: Any) -> None:
    context.stage.subject.on_completed()


@when("{count:d} items are at work")
def items_are_at_work(context: Any, count: int) -> None:
    context.stage.until(lambda: context.stage.busy.alive == count)


@when("the bridge is cleaned up from another thread")
def the_bridge_is_cleaned_up(context: Any) -> None:
    context.stage.clean_up()
    assert context.stage.receipt.outcome == "gone"


@when("the bridge is cleaned up on its loop")
def the_bridge_is_cleaned_up_on_its_loop(context: Any) -> None:
    context.stage.clean_up_on_the_loop()


@when("the bridge is closed")
def the_bridge_is_closed(context: Any) -> None:
    context.stage.close()
    assert context.stage.receipt.outcome == "gone"


@when("threads go on pushing while the bridge is cleaned up")
def threads_go_on_pushing(context: Any) -> None:
    stage = context.stage
    over = threading.Event()

    def push() -> None:
        while not over.is_set():
            item = Item(0)
            stage.items.add(item)
            stage.subject.on_next(item)

    threads = [threading.Thread(target=push) for _ in range(4)]
    for thread in threads:
        thread.start()
    stage.until(lambda: stage.busy.alive == 10)
    stage.clean_up()
    over.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert stage.receipt.outcome == "gone"


@when("the subscription is disposed")
def the_subscription_is_disposed(context: Any) -> None:
    stage = context.stage
    stage.watcher.disposed = True
    stage.subscription.dispose()
    stage.until(lambda: not stage.bridge.streams)


@when("a long question is asked and its subscription disposed")
def a_long_question(context: Any) -> None:
    stage = context.stage
    a_subscription_that_asks(context, "ann")
    stage.subject.on_next("long")
    session = stage.host.session("ann")

    async def running() -> None:
        async with asyncio.timeout(20):
            while not [run for run in await session.runs() if run.state == "running"]:
                await asyncio.sleep(0.001)

    stage.do(running)
    the_subscription_is_disposed(context)


@then("the stream completes with {count:d} results")
def the_stream_completes(context: Any, count: int) -> None:
    stage = context.stage
    stage.until(lambda: stage.watcher.ended)
    assert stage.watcher.error is None, stage.watcher.error
    assert len(stage.watcher.values) == count
    assert stage.watcher.breaches == []


@then("the stream completes with {count:d} results in order")
def the_stream_completes_in_order(context: Any, count: int) -> None:
    the_stream_completes(context, count)
    assert [item.number for item in context.stage.watcher.values] == list(range(count))


@then('the stream fails with "{name}"')
def the_stream_fails(context: Any, name: str) -> None:
    stage = context.stage
    stage.until(lambda: stage.watcher.ended)
    assert type(stage.watcher.error).__name__ == name


@then('a later subscription fails with "{name}"')
def a_later_subscription_fails(context: Any, name: str) -> None:
    context.stage.subscribe()
    the_stream_fails(context, name)


@then("the stream has told nothing")
def the_stream_has_told_nothing(context: Any) -> None:
    watcher = context.stage.watcher
    assert (watcher.values, watcher.ended, watcher.breaches) == ([], False, [])


@then("never were more than {count:d} items worked on at a time")
def never_more(context: Any, count: int) -> None:
    assert context.stage.busy.most <= count


@then("{count:d} items were interrupted")
def items_were_interrupted(context: Any, count: int) -> None:
    counts = context.stage.bridge.statistics()
    assert counts.interrupted == count, counts
    assert context.stage.busy.alive == 0


@then("none was dropped")
def none_was_dropped(context: Any) -> None:
    assert context.stage.bridge.statistics().dropped == 0


@then("no rule of Rx was broken")
def no_rule_was_broken(context: Any) -> None:
    assert context.stage.watcher.breaches == []


@then("nothing is left")
def nothing_is_left(context: Any) -> None:
    context.stage.nothing_left()


@then("after a drain nothing is left")
def after_a_drain_nothing_is_left(context: Any) -> None:
    context.stage.drain()
    context.stage.nothing_left()


@then('the session "{key}" is idle')
def the_session_is_idle(context: Any, key: str) -> None:
    stage = context.stage

    async def idle() -> None:
        async with asyncio.timeout(20):
            while (await stage.host.session(key).info()).state != "idle":
                await asyncio.sleep(0.001)

    stage.do(idle)
