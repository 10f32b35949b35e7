"""Faults of the reactive bridge: tasks that nobody owns, and streams that break their rules."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

FLOW = "integrations/reactive/subscription.py"
INTAKE = "integrations/reactive/intake.py"
OUTLET = "integrations/reactive/outlet.py"
BRIDGE = "integrations/reactive/bridge.py"
TESTS = "tests/integrations/reactive"

MUTANTS = (
    Mutant(
        name="a disposed stream works on",
        of="R2 P1",
        breaks="the subscription is gone, but its tasks keep running",
        file=FLOW,
        old="""
            scope.interrupt.trigger("the subscription was disposed", kind="stop")
        self._wake()
""",
        new="""
            pass
        self._wake()
""",
        tests=(f"{TESTS}/test_operator.py::test_disposing_interrupts_with_a_cause_and_emits_nothing_more",),
    ),
    Mutant(
        name="a stream that was stopped before it began is forgotten",
        of="R2 P8",
        breaks="items that arrive during the bridge's cleanup are never counted, and their observer never hears of it",
        file=BRIDGE,
        old="            flow.settle(flow.cut_off(self.scope.interrupt.cause))",
        new="            pass",
        tests=(f"{TESTS}/test_explored.py",),
    ),
    Mutant(
        name="items in flight are not settled",
        of="R2 P8",
        breaks="items whose task was stopped before its first step stay in flight forever",
        file=INTAKE,
        old="""
            self._counts["interrupted"] += self._counts["in_flight"]
            self._counts["in_flight"] = 0
""",
        new="""
            pass
""",
        tests=(f"{TESTS}/test_explored.py",),
    ),
    Mutant(
        name="an item is tracked without the lock",
        of="R2 P10",
        breaks="pushing threads, the loop and the cleanup lose or duplicate items",
        file=INTAKE,
        old="""
        taken: list[Any] = []
        let_in: list[_Blocked] = []
        with self._lock:
""",
        new="""
        taken: list[Any] = []
        let_in: list[_Blocked] = []
        if True:
""",
        tests=(f"{TESTS}/test_threads.py::test_an_item_is_in_one_place_however_threads_meet_at_the_intake",),
    ),
    Mutant(
        name="the source is not left",
        of="R2 P8",
        breaks="a source keeps pushing into a stream that has ended, and keeps all of it alive",
        file=FLOW,
        old="            self._source.dispose()",
        new="            pass",
        tests=(f"{TESTS}/test_marbles.py::test_nothing_is_told_after_the_disposal_and_the_source_is_left",),
    ),
    Mutant(
        name="a blocked thread is left behind",
        of="R2 P9",
        breaks="a thread that waits for room keeps waiting after its stream has ended",
        file=INTAKE,
        old="""
            self._line.clear()
        self._release(let_in)
""",
        new="""
            self._line.clear()
""",
        tests=(f"{TESTS}/test_threads.py::test_a_blocked_producer_is_let_go_when_its_stream_ends",),
    ),
    Mutant(
        name="the loop is blocked by its own stream",
        of="P9",
        breaks="a full buffer stops the loop's own thread, which alone could make room",
        file=INTAKE,
        old='self._overflow == "block" and asyncio._get_running_loop() is None',
        new='self._overflow == "block"',
        tests=(
            f"{TESTS}/test_operator.py::test_a_full_buffer_on_the_loops_own_thread_is_an_error_and_never_blocks_it",
        ),
    ),
    Mutant(
        name="one item more at a time",
        of="P9",
        breaks="more items are processed at a time than configured",
        file=FLOW,
        old="min(self._shape.concurrency - self._working,",
        new="min(self._shape.concurrency + 1 - self._working,",
        tests=(f"{TESTS}/test_operator.py::test_no_more_items_are_worked_on_at_a_time_than_asked_for",),
    ),
    Mutant(
        name="the end is told too early",
        of="R2 P3",
        breaks="an observer learns that the stream has failed while its tasks still run",
        file=FLOW,
        old="""
                through = True
                self.stop_source()
""",
        new="""
                through = True
                self.outlet.end(error)
                self.stop_source()
""",
        tests=(
            f"{TESTS}/test_operator.py"
            "::test_an_observer_hears_of_an_error_when_nothing_of_the_stream_is_at_work_any_more",
        ),
    ),
    Mutant(
        name="notifications overlap",
        of="R2 P7",
        breaks="an observer on a pool gets two notifications at the same time, or one after the end",
        file=OUTLET,
        old="""
            self._end = (error,)
            start = not self._active
""",
        new="""
            self._end = (error,)
            start = True
""",
        tests=(f"{TESTS}/test_threads.py::test_an_end_that_comes_while_a_value_is_told_waits_for_it",),
    ),
    Mutant(
        name="messages are left behind",
        of="R2 P1",
        breaks="the stream that asked is gone, but its runs and waiting messages continue",
        file="integrations/reactive/sessions.py",
        old="""
                if scope.interrupt.triggered:
                    await self._take_back(letter, scope)
""",
        new="""
                pass
""",
        tests=(f"{TESTS}/test_sessions.py",),
    ),
)
