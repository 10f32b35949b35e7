"""Test concurrent code deterministically: explore its schedules, run it on virtual time."""

from holdfast.testing.clock import ManualClock, VirtualClock
from holdfast.testing.explore import Report, explore, run_virtual
from holdfast.testing.failures import NotExplorable, ScheduleFailure
from holdfast.testing.replay import Replay

__all__ = [
    "ManualClock",
    "NotExplorable",
    "Replay",
    "Report",
    "ScheduleFailure",
    "VirtualClock",
    "explore",
    "run_virtual",
]
