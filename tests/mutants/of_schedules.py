"""Faults of schedules and of agents that are asked by the clock: ticks lost, doubled or fired under a wrong clock."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = (
    Mutant(
        name="a tick without its idempotency key",
        of="P5",
        breaks="after a clock that was wrong is set back, ticks that were fired run a second time",
        file="storage/transactions/schedules.py",
        old='f"schedule:{row.schedule}:{tick_at:.3f}"',
        new='f"schedule:{request.send.message_id}"',
        tests=("tests/storage/test_conformance.py",),
    ),
    Mutant(
        name="fire whatever was read",
        of="P5",
        breaks="a schedule that was replaced meanwhile sends its old text once more",
        file="storage/transactions/schedules.py",
        old="    if row is None or row.revision != request.revision:",
        new="    if row is None:",
        tests=("tests/storage/test_conformance.py",),
    ),
    Mutant(
        name="a refused tick stops the schedule",
        of="P9",
        breaks="a tick that meets a full mailbox, or an agent that is gone, is tried again and again in a loop",
        file="storage/transactions/schedules.py",
        old="""
    row = _changed(row, progress=progress, last=last, problem=problem, updated_at=at)
    tables.save_schedule(row)
""",
        new="""
    row = _changed(row, progress=progress if sent else row.progress, last=last, problem=problem, updated_at=at)
    tables.save_schedule(row)
""",
        tests=("tests/storage/test_conformance.py",),
    ),
    Mutant(
        name="the next tick overwrites an earlier one",
        of="P9",
        breaks="a schedule that is added while the host looks for the next one fires half a minute late",
        file="host/scheduler.py",
        old="            self._next_at = min(self._next_at, again_at)",
        new="            self._next_at = again_at",
        tests=("tests/host/test_schedules.py::test_a_schedule_that_is_put_while_the_host_looks_fires_in_its_time",),
    ),
    Mutant(
        name="only the monotonic clock",
        of="P9",
        breaks="a clock that was set back is never noticed: schedules sleep until the wrong time comes",
        file="host/scheduler.py",
        old="        if now >= self._next_at or self._ahead_s < before - BACK_S:",
        new="        if now >= self._next_at:",
        tests=("tests/host/test_schedules.py::test_a_clock_that_jumps_is_noticed_and_no_tick_is_fired_twice",),
    ),
    Mutant(
        name="ticks of a time that is rounded",
        of="P5",
        breaks="a host that wakes a microsecond too early skips the tick that it woke for",
        file="protocol/schedules.py",
        old="datetime.fromtimestamp(math.floor(after), zone)",
        new="datetime.fromtimestamp(after, zone)",
        tests=("tests/protocol/test_schedules.py",),
    ),
    Mutant(
        name="the hour that comes twice",
        of="P5",
        breaks="when clocks go back a daily schedule has its next tick in the past, and fires once too often",
        file="protocol/schedules.py",
        old="            if at > after:",
        new="            if at != after:",
        tests=("tests/protocol/test_schedules.py",),
    ),
    Mutant(
        name="streamers outlive the ticks",
        of="P3",
        breaks="a streamer beside a periodic agent continues after the last tick, and the run never ends",
        file="agents/compose/periodic.py",
        old="        self._branches.stop_all(over)",
        new="        _ = over",
        tests=("tests/compose/test_periodic.py::test_what_streams_beside_it_ends_with_it",),
    ),
    Mutant(
        name="two ticks at a time",
        of="P4",
        breaks="a tick that interrupts the last one runs beside it while that one cleans up",
        file="agents/compose/periodic.py",
        old="            if self._wanted and self._child is None:",
        new="            if self._wanted:",
        tests=("tests/compose/test_periodic.py::test_a_tick_that_interrupts_the_last_one_begins_when_that_is_gone",),
    ),
)
