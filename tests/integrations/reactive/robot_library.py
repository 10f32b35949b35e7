"""The keywords of the Robot Framework suite."""

from __future__ import annotations

from typing import Any

from reactivex import Subject
from reactivex import operators as ops

from tests.integrations.reactive.stage import Item, Stage
from tests.integrations.reactive.watching import Busy, Watcher

__all__ = ["BridgeLibrary"]


async def numbered(item: Item) -> int:
    return item.number


def doubled(number: int) -> int:
    return 2 * number


class BridgeLibrary:
    """Moves a `Stage`."""

    ROBOT_LIBRARY_SCOPE = "TEST"

    def __init__(self) -> None:
        self.stage: Stage
        self.log = Watcher()

    def set_the_stage(self) -> None:
        self.stage = Stage()

    def clear_the_stage(self) -> None:
        self.stage.end()

    def open_a_bridge(self, concurrency: int) -> None:
        self.stage.open(concurrency=concurrency)

    def start_a_host(self) -> None:
        self.stage.start_host()

    def subscribe_a_pipeline_of_two_operators(self) -> None:
        stage = self.stage
        first, second = stage.bridge.each(numbered, ordered=True), stage.bridge.each(doubled, ordered=True)
        stage.subscription = stage.subject.pipe(first, second).subscribe(stage.watcher)

    def subscribe_to_work_that_takes_for_ever(self) -> None:
        self.stage.busy = Busy(wait_s=1000)
        self.stage.subscribe()

    def subscribe_and_emit_on(self, scheduler: str) -> None:
        self.stage.busy, self.stage.subject = Busy(), Subject()
        self.stage.subscribe(emit_on=scheduler)

    def subscribe_to_answers_of_sessions(self, count: int) -> None:
        stage = self.stage
        host = stage.host
        assert host is not None
        stage.subject, stage.watcher = Subject(), Watcher()
        asked = stage.bridge.ask(lambda text: host.session(f"s{int(text) % count}"))
        stage.subscription = stage.subject.pipe(asked).subscribe(stage.watcher)

    def watch_the_log_of_session(self, key: str) -> None:
        stage = self.stage
        host = stage.host
        assert host is not None
        stage.do(lambda: host.session(key).ask("first"))
        texts = stage.bridge.events(host.session(key)).pipe(ops.filter(is_text), ops.skip(1))
        texts.subscribe(self.log)

    def push_items(self, count: int, threads: int = 1) -> None:
        self.stage.push(count, threads=threads)

    def push_texts(self, count: int) -> None:
        self.stage.push(count, text=True)

    def complete_the_source(self) -> None:
        self.stage.subject.on_completed()

    def dispose_the_subscription(self) -> None:
        stage = self.stage
        stage.watcher.disposed = True
        stage.subscription.dispose()
        stage.until(lambda: not stage.bridge.streams)

    def clean_up(self) -> None:
        self.stage.clean_up()
        assert self.stage.receipt is not None
        assert self.stage.receipt.outcome == "gone"

    def clean_up_on_the_loop(self) -> None:
        self.stage.clean_up_on_the_loop()

    def drain_the_bridge(self) -> None:
        self.stage.drain()

    def results_should_be(self, count: int) -> None:
        watcher = self.stage.watcher
        self.stage.until(lambda: watcher.ended)
        assert watcher.error is None, watcher.error
        assert len(watcher.values) == count
        assert watcher.breaches == []
        watcher.values.clear()

    def items_at_work_should_be(self, count: int) -> None:
        self.stage.until(lambda: self.stage.busy.alive == count)

    def interrupted_should_be(self, count: int) -> None:
        assert self.stage.bridge.statistics().interrupted == count

    def a_later_subscription_should_fail_with(self, name: str) -> None:
        self.stage.subscribe()
        assert type(self.stage.watcher.error).__name__ == name

    def sessions_should_have_had_runs(self, sessions: int, runs: int) -> None:
        host = self.stage.host
        assert host is not None
        for number in range(sessions):
            key = f"s{number}"
            assert len(self.stage.do(lambda key=key: host.session(key).runs())) == runs  # type: ignore[misc]

    def the_log_should_have_told_answers(self, count: int) -> None:
        self.stage.until(lambda: len(self.log.values) >= count)
        assert [event.text for event in self.log.values] == [f"s0: {number}" for number in range(count)]

    def nothing_should_be_left(self) -> None:
        self.stage.nothing_left()


def is_text(event: Any) -> bool:
    return bool(event.kind == "text.delta")
