"""Report R2, tasks that nobody owns: the model shows each fault, and a scope has none of them."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import frontrun  # type: ignore[import-untyped]
import pytest

from holdfast.errors import Interrupted, ScopeClosed
from holdfast.runtime.adoption.tasks import install
from holdfast.runtime.scope.handle import Handle
from holdfast.runtime.scope.scope import Scope
from holdfast.runtime.scope.task_handle import TaskHandle
from holdfast.testing import ScheduleFailure, explore
from tests.reports.models_r2 import Bridge, Tracked

THREADS = 8
MESSAGES = 200


@pytest.fixture
def threads_explored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `frontrun` work in an ordinary run of pytest: it makes locks cooperative for the exploration only."""
    monkeypatch.setenv("FRONTRUN_ACTIVE", "1")


# The faults


class Streams:
    """A message arrives on a pool thread while clean-up runs on another."""

    def __init__(self) -> None:
        self.bridge = Bridge(None)  # type: ignore[arg-type]  # the loop is not used here
        self.early, self.late = Tracked("early"), Tracked("late")
        self.bridge.track(self.early)
        self.errors: list[Exception] = []

    def message(self) -> None:
        self.bridge.track(self.late)

    def cleanup(self) -> None:
        try:
            self.bridge.cancel_all()
        except RuntimeError as error:
            self.errors.append(error)


@pytest.mark.usefixtures("threads_explored")
def test_the_model_drops_a_task_or_breaks_when_clean_up_meets_a_message() -> None:
    result = frontrun.explore(
        Streams,
        [Streams.message, Streams.cleanup],
        lambda streams: not streams.errors and (streams.late.cancelled or streams.late in streams.bridge.tasks),
        max_executions=200,
    )
    assert not result.property_holds


async def late_messages(bridge: Bridge) -> None:
    async def work() -> None:
        await asyncio.sleep(1)

    async def stream() -> None:
        for _ in range(3):
            bridge.on_message(work)
            await asyncio.sleep(0)

    source = asyncio.create_task(stream())
    await asyncio.sleep(0)
    await bridge.cleanup()
    await source
    assert not bridge.tasks


def test_the_model_misses_what_arrives_during_clean_up() -> None:
    with pytest.raises(ScheduleFailure):
        explore(lambda: late_messages(Bridge(asyncio.get_running_loop())))


def test_the_model_makes_tasks_off_the_loops_thread() -> None:
    errors: list[BaseException] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_debug(True)
        bridge = Bridge(loop)
        made = asyncio.sleep(0)

        def message() -> None:
            try:
                bridge.on_message(lambda: made)
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=message)
        thread.start()
        await loop.run_in_executor(None, thread.join)
        made.close()

    asyncio.run(main())
    assert "Non-thread-safe operation" in str(errors)


# The same on a scope


async def late_messages_in_a_scope() -> None:
    scope = Scope("bridge", parent=None).open()

    async def work() -> None:
        await asyncio.sleep(1)

    async def stream() -> None:
        for _ in range(3):
            try:
                scope.spawn(work())
            except ScopeClosed:
                return
            await asyncio.sleep(0)

    source = asyncio.create_task(stream())
    await asyncio.sleep(0)
    await scope.stop("clean-up")
    await source
    assert scope.members() == ()


def test_a_scope_misses_nothing_that_arrives_during_clean_up() -> None:
    explore(late_messages_in_a_scope)
    explore(late_messages_in_a_scope, chooser="pct")
    explore(late_messages_in_a_scope, tasks="eager")


class Gate:
    """A foreign thread enters a member while the scope closes: the part of both that foreign threads can meet in."""

    def __init__(self) -> None:
        self.scope = Scope("bridge", parent=None)
        self.scope.core.loop = object()  # type: ignore[assignment]  # only its presence is asked for
        self.handle: TaskHandle[None] = TaskHandle(self.scope.core, "message", None)
        self.accepted: bool | None = None
        self.closed = False

    def message(self) -> None:
        try:
            self.scope.core.enter(self.handle)
        except ScopeClosed:
            self.accepted = False
        else:
            self.accepted = True

    def close(self) -> None:
        self.closed = self.scope.core.shut()

    def sound(self) -> bool:
        return self.accepted is not None and self.accepted != self.closed


class Open:
    """No gate at all."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exc_info: object) -> None: ...


class NoGate(Gate):
    def __init__(self) -> None:
        super().__init__()
        self.scope.core.gate = Open()  # type: ignore[assignment]


@pytest.mark.usefixtures("threads_explored")
def test_a_member_is_either_refused_or_keeps_the_scope_open() -> None:
    workers = [Gate.message, Gate.close]
    result = frontrun.explore(Gate, workers, Gate.sound, strategy="random", max_attempts=200, seed=1)
    assert result.property_holds, result.explanation
    without = frontrun.explore(NoGate, workers, Gate.sound, strategy="random", max_attempts=200, seed=1)
    assert not without.property_holds


class Payload:
    """Something that work refers to, and that must not outlive it."""


async def _flood(
    scope: Scope, *, until_refused: bool
) -> tuple[list[Handle[Any]], list[weakref.ref[Payload]], list[int]]:
    """Spawn from 8 foreign threads."""
    handles: list[Handle[Any]] = []
    payloads: list[weakref.ref[Payload]] = []
    alive = [0]
    refused = threading.Barrier(THREADS + 1) if until_refused else None

    async def work(payload: Payload) -> None:
        alive[0] += 1
        try:
            await asyncio.sleep(1000 if until_refused else 0)
            assert payload is not None
        finally:
            alive[0] -= 1

    def stream() -> None:
        sent = 0
        while until_refused or sent < MESSAGES:
            payload = Payload()
            try:
                handle = scope.spawn(work, payload)
            except ScopeClosed:
                break
            payloads.append(weakref.ref(payload))
            handles.append(handle)
            sent += 1
        if refused is not None:
            refused.wait(timeout=30)

    threads = [threading.Thread(target=stream) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    if refused is not None:
        while len(handles) < THREADS * 5:
            await asyncio.sleep(0)
        await scope.stop("clean-up")
        assert alive == [0]
        refused.wait(timeout=30)
    for thread in threads:
        while thread.is_alive():
            await asyncio.sleep(0.001)
    return handles, payloads, alive


def test_what_8_foreign_threads_spawn_during_a_stop_is_owned_and_gone() -> None:
    async def main() -> None:
        for _ in range(5):
            scope = Scope("bridge", parent=None).open()
            handles, payloads, alive = await _flood(scope, until_refused=True)
            assert scope.receipt is not None
            assert scope.receipt.outcome == "gone"
            # What was entered before the stop, but not yet begun, is born interrupted: on the loop's next turn.
            await asyncio.sleep(0)
            assert all(handle.done() for handle in handles)
            assert all(isinstance(handle.exception(), Interrupted) for handle in handles)
            assert scope.members() == ()
            assert alive == [0]
            del handles
            gc.collect()
            assert not [ref for ref in payloads if ref() is not None]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_nothing_is_kept_of_what_completed_under_load() -> None:
    async def main() -> None:
        async with Scope("bridge", parent=None) as scope:
            handles, payloads, alive = await _flood(scope, until_refused=False)
            assert len(handles) == THREADS * MESSAGES
            for handle in handles:
                await handle
            del handle
            assert scope.members() == ()
            assert alive == [0]
            kept = [weakref.ref(one) for one in handles]
            del handles
            gc.collect()
            assert not [ref for ref in kept if ref() is not None]
            assert not [ref for ref in payloads if ref() is not None]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_task_made_off_the_loops_thread_is_refused_loudly() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with install(loop):
            async with Scope("bridge") as scope:
                made = asyncio.sleep(0)

                def message() -> str:
                    with pytest.raises(RuntimeError) as caught:
                        asyncio.ensure_future(made, loop=loop)  # noqa: RUF006  # it is refused
                    return str(caught.value)

                assert "use scope.spawn()" in await scope.spawn(message, on="thread")

    asyncio.run(asyncio.wait_for(main(), 60))
