"""Faults of agents: the journal, the loop, transcripts, budgets, models."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = (
    Mutant(
        name="effect before intent",
        of="P11",
        breaks="a call has its effect, and after a crash no record shows that it was made",
        file="agents/journaled_calls.py",
        old="""
        return past.result
    await context.recorder.written()
""",
        new="        return past.result",
        tests=("tests/agents/test_run.py",),
    ),
    Mutant(
        name="step answer and intent not durable before their calls",
        of="P11",
        breaks="a model's tool takes effect before the step and the call are in the log",
        file="agents/model_loop.py",
        old="""
        if fresh:
            await context.recorder.written()
""",
        new="",
        tests=(
            "tests/agents/test_model_loop.py::test_a_step_and_its_calls_are_in_the_store_before_a_call_has_its_effect",
        ),
    ),
    Mutant(
        name="journal result ignored at replay",
        of="P11",
        breaks="a call that has its result is made a second time after a restart",
        file="agents/journal.py",
        old="""
        result = self._results.get(call_id)
        if result is not None:
            self.replayed += 1
""",
        new="        result = None",
        tests=("tests/host/test_recovery.py",),
    ),
    Mutant(
        name="an open call is taken for replayable",
        of="P11",
        breaks="a call whose effect may be there is made again",
        file="agents/journal.py",
        old="        return not self._open",
        new="        return True",
        tests=("tests/host/test_recovery.py",),
    ),
    Mutant(
        name="transcript without result for open calls",
        of="P6",
        breaks="after a stop in the middle of a tool every later request is refused by the provider",
        file="protocol/transcript.py",
        old="""
        for call_id in list(self._open):
            self._result(call_id, NO_RESULT, "interrupted")
""",
        new="",
        tests=("tests/protocol/test_transcript.py", "tests/protocol/test_agent_loop.py"),
    ),
    Mutant(
        name="partial answer is not marked",
        of="P6",
        breaks="an answer that was cut off looks whole to the next run",
        file="protocol/transcript.py",
        old='        self._flush(partial=status != "completed")',
        new="        self._flush(partial=False)",
        tests=("tests/protocol/test_transcript.py",),
    ),
    Mutant(
        name="late result accepted",
        of="P1",
        breaks="an abandoned tool keeps writing to the log",
        file="agents/call_context.py",
        old='''
        """Reject further output and programs. The run closes a call when it has ended."""
        self.closed = True
''',
        new='        """Reject further output and programs. The run closes a call when it has ended."""',
        tests=(
            "tests/agents/test_model_loop.py::test_a_call_that_was_given_up_says_nothing_more_while_its_run_goes_on",
        ),
    ),
    Mutant(
        name="an ended run can be used",
        of="P1",
        breaks="a task that was abandoned still speaks for a run that is over",
        file="agents/context.py",
        old='''
        """Reject all further use with `RunClosed`."""
        self.closed = True
''',
        new='        """Reject all further use with `RunClosed`."""',
        tests=("tests/host/test_bad_agents.py", "tests/host/test_adversarial_agents.py"),
    ),
    Mutant(
        name="budget not applied",
        of="P9",
        breaks="a model that goes in circles spends without limit",
        file="protocol/agent_loop.py",
        old="""
        if problem := self._limits.exceeded(used, asked=len(step.calls)):
            return [self._exceed(problem)]
""",
        new="",
        tests=("tests/protocol/test_agent_loop.py", "tests/agents/test_model_loop.py"),
    ),
    Mutant(
        name="children spend for free",
        of="P9",
        breaks="usage of child agents does not count towards the parent run's budget",
        file="agents/context.py",
        old="            above.usage += used",
        new="",
        tests=("tests/agents/test_model_loop.py::test_children_are_bounded_in_depth_and_number_and_share_the_budget",),
    ),
    Mutant(
        name="all calls at once",
        of="P9",
        breaks="a model that asks for a thousand calls gets a thousand threads",
        file="protocol/agent_loop.py",
        old="        while self._waiting and self._running < self._limits.calls_at_once:",
        new="        while self._waiting:",
        tests=("tests/protocol/test_agent_loop.py",),
    ),
    Mutant(
        name="a denied call is made",
        of="P6",
        breaks="a call that a person denied is made all the same",
        file="protocol/agent_loop.py",
        old="""
        if approval:
            self._requests[call.call_id] = request
""",
        new="""
        if approval is None:
            self._requests[call.call_id] = request
""",
        tests=("tests/protocol/test_agent_loop.py",),
    ),
    Mutant(
        name="asked again after it has spoken",
        of="P6",
        breaks="a model whose answer broke off is asked again, and the user reads it twice",
        file="protocol/agent_loop.py",
        old="        if self._begun or retry_after_s is None or",
        new="        if retry_after_s is None or",
        tests=("tests/protocol/test_agent_loop.py",),
    ),
    Mutant(
        name="model connection not closed",
        of="P1",
        breaks="a stopped request to the model stays open and keeps billing",
        file="agents/model.py",
        old="""
            async with aclosing(parts):
                yield parts
""",
        new="            yield parts",
        tests=(
            "tests/agents/test_model_loop.py::test_what_a_model_layer_leaves_open_is_closed_with_its_request_by_the_task_that_read_it",
        ),
    ),
    Mutant(
        name="what was steered is forgotten at a restart",
        of="P5",
        breaks="a run that resumes after a crash acts as if it had not been steered",
        file="agents/context.py",
        old="""
        taken = [self._steered_before.pop(i) for i in self.journal.steered(step) if i in self._steered_before]
""",
        new="        taken: list[Message] = []",
        tests=("tests/host/test_steering.py::test_a_steered_message_is_given_again_at_its_step_after_a_crash",),
    ),
    Mutant(
        name="a scripted model keeps every request",
        of="F9 P9",
        breaks="a server with a scripted model grows with each message",
        file="agents/scripted.py",
        old="        if len(self.requests) > self._keep_requests:\n            del self.requests[0]",
        new="        assert self._keep_requests >= 0",
        tests=("tests/host/test_spawned_coroutines.py",),
    ),
    Mutant(
        name="a coroutine cannot be spawned",
        of="F12",
        breaks="run.spawn(work()) fails with words about something else",
        file="agents/subtasks.py",
        old="    if isinstance(work, CoroutineType):\n        return",
        new="    if isinstance(work, CoroutineType) and not work:\n        return",
        tests=("tests/host/test_spawned_coroutines.py",),
    ),
    Mutant(
        name="the explorer does not switch inside a lock",
        of="F11",
        breaks="a lock that is found taken is never explored",
        file="testing/explorer/thread_primitives.py",
        old="            if self._found_held and self.is_locked:\n                strands.pause()",
        new="            assert strands",
        tests=("tests/testing/explorer/test_explored_primitives.py",),
    ),
    Mutant(
        name="the explorer does not switch at a queue",
        of="F11",
        breaks="a race over a queue is never found",
        file="testing/explorer/thread_primitives.py",
        old="        self.explored_strands.pause()\n        super().put(item)",
        new="        super().put(item)",
        tests=("tests/testing/explorer/test_explored_primitives.py",),
    ),
    Mutant(
        name="a lock stays taken in the next schedule",
        of="F11",
        breaks="a repaired race is reported as a deadlock",
        file="testing/explorer/thread_primitives.py",
        old="        self.strands, self.is_locked, self.owner, self.waiting = here, False, None, {}",
        new="        self.strands, self.waiting = here, {}",
        tests=("tests/testing/explorer/test_explored_primitives.py",),
    ),
)
