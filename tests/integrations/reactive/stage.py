"""A bridge on a loop in a thread of its own, moved from outside: for the scenarios of Behave and Robot Framework."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from reactivex import Subject
from reactivex.scheduler import EventLoopScheduler, ThreadPoolScheduler

from holdfast import Host, Run
from holdfast.integrations.reactive import ReactiveBridge
from holdfast.protocol.stopping import StopReceipt
from tests.integrations.reactive.watching import Busy, Watcher, accounted

__all__ = ["Item", "Stage"]

T = TypeVar("T")
WAIT_S = 20.0


class Item:
    """Something that is pushed, and must not be kept."""

    def __init__(self, number: int) -> None:
        self.number = number


class Stage:
    """One bridge, its sources, and what came out. All methods are called on a thread that runs no loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="loop", daemon=True)
        self.thread.start()
        self.bridge: ReactiveBridge
        self.host: Host | None = None
        self.subject: Subject[Any] = Subject()
        self.busy = Busy()
        self.watcher = Watcher()
        self.subscription: Any = None
        self.receipt: StopReceipt | None = None
        self.refused: Exception | None = None
        self.items: weakref.WeakSet[Item] = weakref.WeakSet()
        self.rings: list[EventLoopScheduler] = []
        self.pools: list[ThreadPoolScheduler] = []

    def do(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do it on the loop."""
        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(WAIT_S)

    def open(self, **shape: Any) -> None:
        """A new bridge, on the loop."""

        async def opened() -> ReactiveBridge:
            return ReactiveBridge(grace_s=2, **shape).open()

        self.bridge = self.do(opened)

    def scheduler(self, name: str | None) -> Any:
        """A scheduler by its name: ``pool``, ``event loop`` or None."""
        if name == "pool":
            self.pools.append(ThreadPoolScheduler(2))
            return self.pools[-1]
        if name == "event loop":
            self.rings.append(EventLoopScheduler(exit_if_empty=True))
            return self.rings[-1]
        return None

    def subscribe(self, work: Callable[[Any], Any] | None = None, *, emit_on: str | None = None, **shape: Any) -> None:
        """Subscribe to the results of the work on what is pushed."""
        self.watcher = Watcher()
        operator = self.bridge.each(work or self.busy, scheduler=self.scheduler(emit_on), **shape)
        self.subscription = self.subject.pipe(operator).subscribe(self.watcher)

    def push(self, count: int, *, threads: int = 1, text: bool = False) -> None:
        """Push so many items from so many threads, and wait until they are in."""

        def push(first: int) -> None:
            for number in range(first, count, threads):
                item = Item(number)
                self.items.add(item)
                self.subject.on_next(str(number) if text else item)

        pushing = [threading.Thread(target=push, args=(first,)) for first in range(threads)]
        for thread in pushing:
            thread.start()
        for thread in pushing:
            thread.join(WAIT_S)
            assert not thread.is_alive()

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until it holds."""

        async def wait() -> None:
            async with asyncio.timeout(WAIT_S):
                while not condition():
                    await asyncio.sleep(0.001)

        self.do(wait)

    def clean_up(self) -> None:
        """The sync clean-up, on this thread."""
        self.receipt = self.bridge.cleanup()

    def clean_up_on_the_loop(self) -> None:
        """The sync clean-up on the loop's own thread, which must not wait."""

        async def clean_up() -> StopReceipt | None:
            return self.bridge.cleanup()

        assert self.do(clean_up) is None
        self.until(lambda: self.bridge.scope.closed and not self.bridge.streams)

    def close(self) -> None:
        """The async clean-up."""
        self.receipt = self.do(self.bridge.aclose)

    def drain(self) -> None:
        """Let what is there finish."""
        self.receipt = self.do(self.bridge.drain)

    def start_host(self) -> None:
        """A host whose agent answers with the session's key and the text."""

        async def start() -> Host:
            async def echo(run: Run) -> str:
                await asyncio.sleep(1000 if run.text == "long" else 0)
                return f"{run.session_key}: {run.text}"

            host = Host(echo, store="memory://")
            await host.__aenter__()
            return host

        self.host = self.do(start)

    def nothing_left(self) -> None:
        """No task, no subscription, no item is kept, and all are accounted for."""
        bridge = self.bridge
        assert bridge.scope.closed
        assert (bridge.scope.members(), bridge.streams, self.busy.alive) == ((), 0, 0)
        assert not self.subject.observers
        accounted(bridge.statistics())
        self.watcher.values.clear()
        self.watcher.error = None  # its traceback refers to the item
        gc.collect()
        assert len(self.items) == 0

    def end(self) -> None:
        """Take the stage down."""
        if not self.bridge.scope.closed:
            self.close()
        if self.host is not None:
            self.do(self.host.close)
        for ring in self.rings:
            ring.dispose()
        for pool in self.pools:
            pool.executor.shutdown()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(WAIT_S)
        self.loop.close()
