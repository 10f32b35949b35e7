"""Report R1: an interrupt belongs to one session. The reported form and its fix each fail where Holdfast holds."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import frontrun  # type: ignore[import-untyped]
import pytest

from holdfast.errors import Interrupted
from holdfast.runtime.interrupt.interrupt import Interrupt, check_interrupt, current_interrupt, use
from holdfast.testing import ScheduleFailure, explore
from tests.reports.models_r1 import ByInterrupt, ByThreadId, Flags, GlobalEvent, OldCallersProxy, run_code

PATIENCE_S = 10.0


class Steps:
    """Lets a test hold two threads at named points."""

    def __init__(self) -> None:
        self._reached: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def _event(self, name: str) -> threading.Event:
        with self._lock:
            return self._reached.setdefault(name, threading.Event())

    def reach(self, name: str) -> None:
        self._event(name).set()

    def wait_for(self, name: str) -> None:
        assert self._event(name).wait(PATIENCE_S), f"nobody reached {name!r}"


def finish(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


# Scenarios: each returns whether its property held


def a_stop_is_not_seen_in_another_session(flags: Flags) -> bool:
    steps, results = Steps(), {}

    def tool(session: str) -> None:
        def step(number: int) -> None:
            steps.reach(f"{session} works")
            steps.wait_for("a is interrupted")

        results[session] = run_code(flags, 2, step)["status"]

    threads = [threading.Thread(target=flags.inside(name, functools.partial(tool, name))) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    steps.wait_for("a works")
    steps.wait_for("b works")
    flags.interrupt("a")
    steps.reach("a is interrupted")
    finish(*threads)
    return results == {"a": "interrupted", "b": "success"}


def clearing_one_does_not_clear_another(flags: Flags) -> bool:
    steps, results = Steps(), {}

    def tool(session: str) -> None:
        def step(number: int) -> None:
            steps.reach(f"{session} works")
            steps.wait_for("a is cleared")

        results[session] = run_code(flags, 2, step)["status"]

    threads = [threading.Thread(target=flags.inside(name, functools.partial(tool, name))) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    steps.wait_for("a works")
    steps.wait_for("b works")
    flags.interrupt("a")
    flags.interrupt("b")
    flags.clear("a")
    steps.reach("a is cleared")
    finish(*threads)
    return results["b"] == "interrupted"


def a_helper_thread_sees_the_stop_of_its_run(flags: Flags) -> bool:
    steps, results = Steps(), []

    def helper() -> None:
        steps.reach("helper works")
        steps.wait_for("a is interrupted")
        results.append(flags.is_interrupted())

    def tool() -> None:
        thread = threading.Thread(target=flags.carried(helper))
        thread.start()
        finish(thread)

    run = threading.Thread(target=flags.inside("a", tool))
    run.start()
    steps.wait_for("helper works")
    flags.interrupt("a")
    steps.reach("a is interrupted")
    finish(run)
    return results == [True]


def a_tool_on_a_pool_is_not_stopped_for_the_one_before(flags: Flags) -> bool:
    """The run of `a` was interrupted, abandoned and never cleared. Its pool thread serves another session next."""
    results: list[bool] = []
    with ThreadPoolExecutor(1) as pool:
        tool_of_a = flags.inside("a", lambda: None)
        pool.submit(tool_of_a).result(PATIENCE_S)
        flags.interrupt("a")
        pool.submit(flags.carried(lambda: results.append(flags.is_interrupted()))).result(PATIENCE_S)
    return results == [False]


def a_thread_is_not_born_interrupted(flags: Flags) -> bool:
    """A thread ends, its run is interrupted late, and its id is given to a new thread of somebody else."""
    for attempt in range(1, 51):
        old: list[int] = []
        seen: dict[int, bool] = {}
        all_there = threading.Barrier(8 * min(attempt, 8))

        def run(old: list[int] = old) -> None:
            old.append(threading.get_ident())

        def stranger(seen: dict[int, bool] = seen, all_there: threading.Barrier = all_there) -> None:
            seen[threading.get_ident()] = flags.is_interrupted()
            all_there.wait(PATIENCE_S)

        thread = threading.Thread(target=flags.inside("a", run))
        thread.start()
        finish(thread)
        flags.interrupt("a")
        # As many at once as to use up the ids that are free.
        strangers = [threading.Thread(target=flags.carried(stranger)) for _ in range(all_there.parties)]
        for thread in strangers:
            thread.start()
        finish(*strangers)
        if old[0] in seen:
            return not seen[old[0]]
        flags.clear("a")
    raise AssertionError("no thread id was recycled in 50 rounds")


SCENARIOS = [
    a_stop_is_not_seen_in_another_session,
    clearing_one_does_not_clear_another,
    a_helper_thread_sees_the_stop_of_its_run,
    a_tool_on_a_pool_is_not_stopped_for_the_one_before,
    a_thread_is_not_born_interrupted,
]


@pytest.mark.parametrize(
    "scenario", [s for s in SCENARIOS if s is not a_helper_thread_sees_the_stop_of_its_run], ids=lambda s: s.__name__
)
def test_the_global_event_stops_everybody(scenario: Callable[[Flags], bool]) -> None:
    assert not scenario(GlobalEvent())


@pytest.mark.parametrize("scenario", SCENARIOS[2:], ids=lambda s: s.__name__)
def test_thread_ids_miss_helpers_and_hit_strangers(scenario: Callable[[Flags], bool]) -> None:
    assert not scenario(ByThreadId())


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_an_interrupt_reaches_its_session_and_no_other(scenario: Callable[[Flags], bool]) -> None:
    assert scenario(ByInterrupt())


def test_the_proxy_for_old_callers_interrupts_whoever_calls() -> None:
    """`set()` on the gateway's thread was to stop the run; behind the proxy it stops the gateway."""
    flags = ByThreadId()
    proxy = OldCallersProxy(flags)
    run = threading.Thread(target=flags.inside("a", lambda: None))
    run.start()
    finish(run)
    proxy.set()
    assert proxy.is_set()


# Coroutines that share one loop


async def two_sessions_on_one_loop(flags: ByThreadId | None) -> None:
    """Two runs as coroutines of one loop; one of them is interrupted."""
    results: dict[str, str] = {}
    runs = {name: Interrupt(name=name) for name in ("a", "b")}

    async def run(name: str) -> None:
        if flags is not None:
            flags.begin(name)
        with use(runs[name]):
            try:
                for _ in range(4):
                    await asyncio.sleep(0)
                    if flags is None:
                        check_interrupt()
                    elif flags.is_interrupted():
                        raise RuntimeError("interrupted")
            except (Interrupted, RuntimeError):
                results[name] = "interrupted"
            else:
                results[name] = "success"

    tasks = [asyncio.create_task(run(name), name=name) for name in runs]
    await asyncio.sleep(0)
    if flags is None:
        runs["a"].trigger()
    else:
        flags.interrupt("a")
    await asyncio.gather(*tasks)
    assert results["b"] == "success"


def test_with_thread_ids_all_coroutines_of_a_loop_share_one_interrupt() -> None:
    with pytest.raises(ScheduleFailure):
        explore(lambda: two_sessions_on_one_loop(ByThreadId()))


def test_coroutines_of_one_loop_are_interrupted_one_by_one() -> None:
    explore(lambda: two_sessions_on_one_loop(None))
    explore(lambda: two_sessions_on_one_loop(None), tasks="eager")


# Parents, children, and the run after


def test_a_parent_reaches_its_child_agent_from_another_thread() -> None:
    parent = Interrupt(name="parent agent")
    steps, results = Steps(), []

    def step(number: int) -> None:
        steps.reach("child works")
        steps.wait_for("interrupted")

    def child_agent() -> None:
        with use(parent.child(name="child agent")):
            results.append(run_code(ByInterrupt(), 3, step))

    thread = threading.Thread(target=child_agent)
    thread.start()
    steps.wait_for("child works")
    stopper = threading.Thread(target=parent.trigger, args=("a follow-up message",), kwargs={"message_id": "m-2"})
    stopper.start()
    finish(stopper)
    steps.reach("interrupted")
    finish(thread)
    assert results == [{"status": "interrupted", "steps": 1}]
    late = parent.child()
    assert late.cause is not None
    assert (late.cause.kind, late.cause.message_id) == ("parent", "m-2")


def test_nothing_stale_greets_the_next_run() -> None:
    flags = ByInterrupt()
    with ThreadPoolExecutor(1) as pool:
        results: list[dict[str, object]] = []
        for number in range(4):
            tool = flags.inside("a", lambda: results.append(run_code(flags, 1, lambda _: None)))
            if number % 2 == 0:
                flags.interrupt("a")
            pool.submit(tool).result(PATIENCE_S)
            assert current_interrupt() is None
    assert [result["status"] for result in results] == ["interrupted", "success"] * 2


# A stop that meets the start of the run


class StartMeetsStop:
    """The run starts on its thread while the gateway stops it: who was told that it worked must be right."""

    make: Callable[[], Flags] = ByThreadId

    def __init__(self) -> None:
        self.flags = type(self).make()
        self.told: bool | None = None
        self.seen: bool | None = None
        self.stopped = threading.Event()
        self.body = self.flags.inside("a", self.look)

    def look(self) -> None:
        self.stopped.wait()
        self.seen = self.flags.is_interrupted()

    def run(self) -> None:
        self.body()

    def stop(self) -> None:
        self.told = self.flags.interrupt("a")
        self.stopped.set()

    def honest(self) -> bool:
        return self.told == self.seen


class StartMeetsStopShipped(StartMeetsStop):
    make = ByInterrupt


@pytest.fixture
def threads_explored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `frontrun` work in an ordinary run of pytest."""
    monkeypatch.setenv("FRONTRUN_ACTIVE", "1")


def explored(kind: type[StartMeetsStop]) -> Any:
    return frontrun.explore(
        kind, [kind.run, kind.stop], kind.honest, strategy="random", max_attempts=150, seed=1, detect_io=False
    )


@pytest.mark.usefixtures("threads_explored")
def test_with_thread_ids_a_stop_at_the_start_of_a_run_is_lost() -> None:
    assert not explored(StartMeetsStop).property_holds


@pytest.mark.usefixtures("threads_explored")
def test_a_stop_at_the_start_of_a_run_is_seen() -> None:
    result = explored(StartMeetsStopShipped)
    assert result.property_holds, result.explanation
