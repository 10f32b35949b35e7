"""The faults of the five reports, put back into Holdfast."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = (
    Mutant(
        name="notify one",
        of="R0 P1",
        breaks="a stop wakes one of many waiters; the others keep running forever",
        file="runtime/interrupt/dispatch.py",
        old="""
def _wake_group(group: FutureGroup) -> None:
    _wake(list(group))
""",
        new="""
def _wake_group(group: FutureGroup) -> None:
    _wake(list(group)[:1])
""",
        also=(
            (
                """
        for future in list(group):
            if not
""",
                """
        for future in list(group)[:1]:
            if not
""",
            ),
        ),
        tests=("tests/reports/test_r0_broadcast.py",),
    ),
    Mutant(
        name="park without a second look",
        of="R0 P1",
        breaks="a stop between the check and the park of a task is missed",
        file="runtime/interrupt/interrupt.py",
        old="""
                if not self._latch:
                    # The trigger
""",
        new="""
                if future:
                    # The trigger
""",
        tests=(
            "tests/runtime/interrupt/test_interrupt.py::test_a_trigger_between_the_check_and_the_park_of_a_task_is_not_lost",
        ),
    ),
    Mutant(
        name="branches are not reached",
        of="R0 P1",
        breaks="the stop of a run does not reach its parallel branches, nodes and children",
        file="runtime/interrupt/interrupt.py",
        old="        reached = [self, *self._latch_below(cause)]",
        new="        reached = [self]",
        tests=("tests/reports/test_r0_broadcast.py", "tests/runtime/interrupt/test_interrupt.py"),
    ),
    Mutant(
        name="one event for all",
        of="R1 P2",
        breaks="a stop in one chat kills the tools of all chats",
        file="runtime/interrupt/interrupt.py",
        old="        self._latch: dict[str, tuple[Cause]] = {}",
        new="        self._latch: dict[str, tuple[Cause]] = _everybodys",
        also=(
            (
                '_FILE = "file"',
                """
_FILE = "file"
_everybodys: dict[str, tuple[Cause]] = {}
""",
            ),
        ),
        tests=("tests/reports/test_r1_isolation.py",),
    ),
    Mutant(
        name="clear on start",
        of="R1 P1",
        breaks="a new run forgets the stop that was meant for it",
        file="runtime/scope/state.py",
        old="""
        self.interrupt.check()
        parent = self.parent
""",
        new="""
        self.interrupt._latch.clear()
        parent = self.parent
""",
        tests=("tests/reports/test_r1_isolation.py", "tests/runtime/scope/test_scope.py"),
    ),
    Mutant(
        name="threads do not know whose they are",
        of="R1 P1",
        breaks="a helper thread never sees the interrupt of the run that it works for",
        file="runtime/thread_pool.py",
        old="            contextvars.copy_context() if context is None else context,",
        new="            contextvars.Context(),",
        tests=("tests/reports/test_r1_isolation.py", "tests/runtime/test_thread_pool.py"),
    ),
    Mutant(
        name="clean-up misses what comes meanwhile",
        of="R2 P1",
        breaks="a task that starts during the cleanup has no owner and never ends",
        file="runtime/scope/state.py",
        old="""
            if self.phase != "open" or self.loop is None:
                self.check_open()
            self.members[member] = None
""",
        new="            self.members[member] = None",
        tests=("tests/reports/test_r2_tasks.py",),
    ),
    Mutant(
        name="tracked after it was started",
        of="R2 P1",
        breaks="a task that ends at once is tracked forever, or a stop misses it",
        file="runtime/scope/scope.py",
        old="""
        try:
            core.enter(handle)
        except ScopeClosed:
            coroutine.close()
            raise
        if asyncio._get_running_loop() is core.loop:
            handle.start()
        else:
            core.on_loop(handle.start)
        return handle
""",
        new="""
        if asyncio._get_running_loop() is core.loop:
            handle.start()
        else:
            core.on_loop(handle.start)
        core.enter(handle)
        return handle
""",
        tests=("tests/reports/test_r2_tasks.py", "tests/runtime/scope/test_scope.py"),
    ),
    Mutant(
        name="tasks are made off their loop's thread",
        of="R2 P1",
        breaks="a thread that starts a task races with the loop: tasks hang or are lost",
        file="runtime/scope/scope.py",
        old="""
        if asyncio._get_running_loop() is core.loop:
            handle.start()
        else:
            core.on_loop(handle.start)
""",
        new="        handle.start()",
        tests=(
            "tests/runtime/scope/test_scope.py::test_a_stop_from_another_loop_and_a_spawn_from_another_thread_work",
        ),
    ),
    Mutant(
        name="check, await, claim",
        of="R3 P4",
        breaks="two quick messages start two agents on one transcript",
        file="storage/transactions/messages.py",
        old="occupancy(run_id=target, waiting=waiting, room=room, policy=policy)",
        new="occupancy(run_id=None, waiting=waiting, room=room, policy=policy)",
        tests=("tests/reports/test_r3_one_run.py",),
    ),
    Mutant(
        name="reject looks first and sends afterwards",
        of="R3 P4",
        breaks="of many simultaneous sends that must be the only one, several are accepted",
        file="host/message_sender.py",
        old="        done = context.store.send(request)",
        new="""
        if policy == "reject":
            found = await context.store.find_session(principal, key)
            if found is None or found[1].state == "idle":
                import msgspec

                request = msgspec.structs.replace(request, policy="queue")
        done = context.store.send(request)
""",
        tests=(
            "tests/host/test_sessions_explored.py::test_of_simultaneous_sends_that_must_be_alone_exactly_one_is_accepted",
        ),
    ),
    Mutant(
        name="the claim is acted upon by the caller",
        of="R3 P5",
        breaks="a sender that disconnects after its message was accepted leaves a session that never runs",
        file="host/message_sender.py",
        old="""
        done.add_done_callback(
            functools.partial(self._dispatcher.on_send_committed, request), context=context.variables
        )
        try:
            result = await asyncio.shield(done)
""",
        new="""
        try:
            result = await asyncio.shield(done)
            self._dispatcher.on_send_committed(request, done)
""",
        tests=("tests/host/test_adversarial_schedules.py",),
    ),
    Mutant(
        name="free without fence",
        of="R3 P4 P11",
        breaks="the end of an old run frees the slot of the new one, and a third run starts beside it",
        file="storage/transactions/runs.py",
        old="""
    if row is None or row.run_id != lease.run_id or row.fence != lease.fence:
        ended
""",
        new="""
    if row is None or row.run_id != lease.run_id:
        ended
""",
        tests=("tests/storage/test_conformance.py",),
    ),
    Mutant(
        name="one consumer takes all",
        of="R4 P13",
        breaks="of three consumers of one output, one gets everything and the others starve",
        file="runtime/queues/fair.py",
        old="""
            next_one = next((waiter for waiter in line.waiting if self._consumers[waiter] not in self._served), None)
""",
        new="            next_one = next(iter(line.waiting), None)",
        tests=("tests/runtime/queues/test_fair.py", "tests/reports/test_r4_agent.py"),
    ),
    Mutant(
        name="two appends in flight",
        of="R4 P7",
        breaks="an agent's output reaches the log in another order, or not at all",
        file="host/event_writer.py",
        old="""
        if self.in_flight or self._mode == "closed":
            return
        if not self._batch:
""",
        new="""
        if self._mode == "closed":
            return
        if not self._batch or self.buffer:
""",
        tests=("tests/reports/test_r4_agent.py", "tests/host/test_reading.py", "tests/host/test_adversarial_store.py"),
    ),
    Mutant(
        name="the stream ends when the first token is slow",
        of="R4 P7",
        breaks="an event stream ends silently when idle for a while",
        file="host/log_reader.py",
        old="""
                        continue  # the sink has taken events in the meantime
                    return None
""",
        new="""
                        continue  # the sink has taken events in the meantime
                    break
""",
        tests=("tests/server/test_streams.py::test_an_idle_stream_is_kept_alive",),
    ),
    Mutant(
        name="a reader is offered events across a hole",
        of="R4 P7",
        breaks="a reader silently misses the events that its host never learned of",
        file="runtime/queues/broadcast.py",
        old="        if self._on_publish is None or self._cursor + 1 != first or waiter.done():",
        new="        if self._on_publish is None or waiter.done():",
        tests=("tests/runtime/queues/test_broadcast.py",),
    ),
    Mutant(
        name="a reader that is being ended is offered events",
        of="P14 P7",
        breaks="a client gets events after its key was revoked",
        file="runtime/queues/broadcast.py",
        old="        if self._on_publish is None or self._cursor + 1 != first or waiter.done():",
        new="        if self._on_publish is None or self._cursor + 1 != first:",
        tests=("tests/runtime/queues/test_broadcast.py",),
    ),
    Mutant(
        name="one failed flush holds up the beat",
        of="P13",
        breaks="a run whose flush fails keeps the output of the others from the log",
        file="host/flush_beat.py",
        old="            except Exception as error:",
        new="            except ZeroDivisionError as error:",
        tests=("tests/host/test_flush_beat.py",),
    ),
    Mutant(
        name="one refused append refuses those of the same beat",
        of="P13 P14",
        breaks="a run over its quota keeps the output of others from the log, and ends them",
        file="storage/transactions/runs.py",
        old="        except HoldfastError as refusal:",
        new="        except ZeroDivisionError as refusal:",
        tests=("tests/storage/test_conformance.py", "tests/host/test_flush_beat.py"),
    ),
    Mutant(
        name="one broken reader keeps the appends of a beat from the others",
        of="P7 P13",
        breaks="the runs of other sessions never hear that their output is stored, and do not end",
        file="host/flush_beat.py",
        old="            except Exception as failure:",
        new="            except ZeroDivisionError as failure:",
        tests=("tests/host/test_flush_beat.py",),
    ),
    Mutant(
        name="events are written to a client that does not read",
        of="P9",
        breaks="a client that reads nothing fills the memory with written events",
        file="server/write_coalescing.py",
        old="        if cycle is None or self.flow.write_paused or cycle.disconnected or self.transport.is_closing():",
        new="        if cycle is None or cycle.disconnected or self.transport.is_closing():",
        tests=("tests/server/test_streams.py",),
    ),
    Mutant(
        name="an end restores an older state",
        of="R4 P10",
        breaks="an interrupted run is shown and settled as if it had failed by itself",
        file="storage/transactions/runs.py",
        old='            return "failed" if next_run_state(state, "fail") == "failed" else "interrupted"',
        new='            return "failed"',
        tests=("tests/storage/test_conformance.py",),
    ),
    Mutant(
        name="a call without a deadline",
        of="R4 P3",
        breaks="an agent that asks another one, or a tool, waits forever",
        file="agents/journaled_calls.py",
        old="    scope = around.child(name, deadline_s=None if deadline_s == math.inf else deadline_s)",
        new="    scope = around.child(name)",
        tests=("tests/host/test_bad_agents.py::test_a_call_that_does_not_end_times_out_and_the_run_goes_on",),
    ),
)
