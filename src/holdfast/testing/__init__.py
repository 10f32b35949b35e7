"""Test concurrent code deterministically: explore its schedules, run it on virtual time.

Names are loaded on first use, so that the pytest plugin is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lazy import lazy_names

if TYPE_CHECKING:
    from holdfast.testing.agent_driver import AgentSubject
    from holdfast.testing.agent_suite import AGENT_CHECKS, run_agent_check
    from holdfast.testing.channel_suite import CHANNEL_CHECKS, Copy, Network, run_channel_check
    from holdfast.testing.clock import ManualClock, VirtualClock
    from holdfast.testing.exploring import Report, explore, run_virtual
    from holdfast.testing.failures import NotExplorable, ScheduleFailure
    from holdfast.testing.model_provider import ModelSubject, Provider, served_model, unscripted_model
    from holdfast.testing.model_server import ModelServer, Reply
    from holdfast.testing.model_suite import MODEL_CHECKS, run_model_check
    from holdfast.testing.replay import Replay
    from holdfast.testing.store_suite import STORE_CHECKS, run_store_check
    from holdfast.testing.swapped import start_thread

__all__ = [
    "AGENT_CHECKS",
    "CHANNEL_CHECKS",
    "MODEL_CHECKS",
    "STORE_CHECKS",
    "AgentSubject",
    "Copy",
    "ManualClock",
    "ModelServer",
    "ModelSubject",
    "Network",
    "NotExplorable",
    "Provider",
    "Replay",
    "Reply",
    "Report",
    "ScheduleFailure",
    "VirtualClock",
    "explore",
    "run_agent_check",
    "run_channel_check",
    "run_model_check",
    "run_store_check",
    "run_virtual",
    "served_model",
    "start_thread",
    "unscripted_model",
]

if not TYPE_CHECKING:  # or else type checkers would accept any name
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "agent_driver": ("AgentSubject",),
            "agent_suite": ("AGENT_CHECKS", "run_agent_check"),
            "channel_suite": ("CHANNEL_CHECKS", "Copy", "Network", "run_channel_check"),
            "clock": ("ManualClock", "VirtualClock"),
            "exploring": ("Report", "explore", "run_virtual"),
            "failures": ("NotExplorable", "ScheduleFailure"),
            "model_provider": ("ModelSubject", "Provider", "served_model", "unscripted_model"),
            "model_server": ("ModelServer", "Reply"),
            "model_suite": ("MODEL_CHECKS", "run_model_check"),
            "replay": ("Replay",),
            "store_suite": ("STORE_CHECKS", "run_store_check"),
            "swapped": ("start_thread",),
        },
    )
