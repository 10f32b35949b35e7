"""Faults of shapes: branches that are left, answers that are lost, deadlines that are never read."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = (
    Mutant(
        name="deadline of a branch never read",
        of="R0",
        breaks="a branch that never returns blocks the whole shape, whatever its deadline",
        file="agents/children.py",
        old="self.scope = around.child(task.label, deadline_s=task.deadline_s)",
        new="self.scope = around.child(task.label)",
        tests=(
            "tests/compose/test_shapes.py::test_the_deadline_of_a_branch_counts_from_its_own_beginning_and_ends_it",
        ),
    ),
    Mutant(
        name="losers of a race run on",
        of="R0 P3",
        breaks="branches that lost the race keep calling models",
        file="agents/child_group.py",
        old="            child.scope.request_stop(cause)",
        new="            pass",
        tests=(
            "tests/compose/test_shapes.py::test_the_first_answer_wins_and_the_others_are_gone_with_a_cause_that_says_so",
        ),
    ),
    Mutant(
        name="branches are not waited for",
        of="R2 P8",
        breaks="a shape has ended and its branches are still cleaning up",
        file="agents/child_group.py",
        old="""
            async with self.scope:
                return await drive()
""",
        new="""
            self.scope.open()
            return await drive()
""",
        tests=("tests/compose/test_shapes_explored.py",),
    ),
    Mutant(
        name="an answer is lost to an interrupt that came too late for it",
        of="P6",
        breaks="a branch that had finished counts as interrupted",
        file="agents/children.py",
        old='(scope.ended_by == "members" or not handle.cancels)',
        new='scope.ended_by == "members"',
        tests=(
            "tests/compose/test_shapes_explored.py"
            "::test_a_branch_that_ends_at_the_moment_of_the_interrupt_has_ended_or_was_interrupted_but_not_both",
        ),
    ),
    Mutant(
        name="answers are lost when a branch fails",
        of="P6",
        breaks="the finished answers of the other branches are lost",
        file="agents/compose/parallel.py",
        old="""
        if text and not self._context.closed:
            _ = self._run.emit(text)
""",
        new="",
        tests=("tests/compose/test_shapes.py::test_the_answers_that_were_there_are_the_text_of_a_parallel_that_fails",),
    ),
    Mutant(
        name="branches run again after a crash",
        of="P11",
        breaks="a branch that had ended makes its effects a second time",
        file="agents/compose/parallel.py",
        old="""
            past = recorded_outcome(self._context, self._tasks[number])
""",
        new="            past = None",
        tests=("tests/compose/test_shapes_crashed.py",),
    ),
    Mutant(
        name="siblings of a failed branch go on",
        of="R0",
        breaks="one branch has failed, and the others spend money for an hour",
        file="agents/compose/parallel.py",
        old='(verdict == "lost" and self._work.interrupts)',
        new="False",
        tests=(
            "tests/compose/test_shapes.py::test_a_branch_that_fails_interrupts_the_others_with_a_cause_that_names_it",
        ),
    ),
    Mutant(
        name="restarts without end",
        of="P9",
        breaks="a branch that cannot work is restarted forever",
        file="protocol/supervision.py",
        old="        return len(times) <= self.limit",
        new="        return True",
        tests=("tests/compose/test_shapes.py::test_too_many_restarts_end_it_with_all_that_is_known",),
    ),
    Mutant(
        name="agents in a circle",
        of="P9",
        breaks="two agents ask each other the same until an unrelated limit ends it",
        file="agents/children.py",
        old="        if _same(above.agent, task.agent) and above.text == task.text:",
        new="        if False:",
        tests=("tests/compose/test_shapes.py::test_agents_in_a_circle_are_refused_with_the_chain",),
    ),
    Mutant(
        name="one item's context in the next one",
        of="P2",
        breaks="one item reads the context variable that another one set",
        file="agents/bounded_map.py",
        old="        context = contextvars.copy_context()",
        new="        context = _SHARED",
        also=(("_AT_ONCE = 32", "_AT_ONCE = 32\n_SHARED = contextvars.copy_context()"),),
        tests=("tests/compose/test_lanes.py::test_what_one_sets_the_next_does_not_see_whether_it_waits_or_not",),
    ),
    Mutant(
        name="one item's cancellation in the next one",
        of="P2",
        breaks="an item that cancelled its task ends the one after it",
        file="agents/bounded_map.py",
        old="        return task is not None and task.cancelling() > 0",
        new="        return False",
        tests=("tests/compose/test_lanes.py::test_one_that_cancels_its_own_task_and_goes_on_does_not_touch_the_next",),
    ),
    Mutant(
        name="all items at once",
        of="P9",
        breaks="ten thousand items open ten thousand connections",
        file="agents/bounded_map.py",
        old="            if self._over or self._waiter.busy >= self._room or isinstance(self._items, AsyncIterable):",
        new="            if self._over or isinstance(self._items, AsyncIterable):",
        tests=(
            "tests/compose/test_map.py::test_results_come_in_the_order_of_the_items_and_no_more_than_so_many_are_at_work",
        ),
    ),
    Mutant(
        name="one run takes all threads of its principal",
        of="P13",
        breaks="a run that fans out in threads holds up all other runs of the same user",
        file="host/run_execution.py",
        old="            sharer=claim.lease.run_id,",
        new="",
        tests=(
            "tests/compose/test_map.py"
            "::test_a_parallel_of_many_sync_agents_leaves_the_other_runs_of_its_principal_their_turn",
        ),
    ),
)
