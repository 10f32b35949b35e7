"""Test concurrent code deterministically: explore its schedules, or run it in virtual time.

Names are imported on first use, so that pytest loads the plugin quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lazy import lazy_names

if TYPE_CHECKING:
    from holdfast.testing.clock import ManualClock, VirtualClock
    from holdfast.testing.explorer.explore import ExplorationReport, explore, run_virtual
    from holdfast.testing.explorer.failures import NotExplorable, ScheduleFailure
    from holdfast.testing.explorer.patching import start_thread
    from holdfast.testing.explorer.replay import Replay
    from holdfast.testing.model_server import ModelServer, Reply
    from holdfast.testing.suites.agent import AGENT_CHECKS, run_agent_check
    from holdfast.testing.suites.agent_driver import AgentSubject
    from holdfast.testing.suites.channel import CHANNEL_CHECKS, Copy, Network, run_channel_check
    from holdfast.testing.suites.model import MODEL_CHECKS, run_model_check
    from holdfast.testing.suites.model_provider import ModelSubject, Provider, served_model, unscripted_model
    from holdfast.testing.suites.sandbox import SANDBOX_CHECKS, run_sandbox_check
    from holdfast.testing.suites.store import STORE_CHECKS, run_store_check

__all__ = [
    "AGENT_CHECKS",
    "CHANNEL_CHECKS",
    "MODEL_CHECKS",
    "SANDBOX_CHECKS",
    "STORE_CHECKS",
    "AgentSubject",
    "Copy",
    "ExplorationReport",
    "ManualClock",
    "ModelServer",
    "ModelSubject",
    "Network",
    "NotExplorable",
    "Provider",
    "Replay",
    "Reply",
    "ScheduleFailure",
    "VirtualClock",
    "explore",
    "run_agent_check",
    "run_channel_check",
    "run_model_check",
    "run_sandbox_check",
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
            "clock": ("ManualClock", "VirtualClock"),
            "explorer.explore": ("ExplorationReport", "explore", "run_virtual"),
            "explorer.failures": ("NotExplorable", "ScheduleFailure"),
            "explorer.patching": ("start_thread",),
            "explorer.replay": ("Replay",),
            "model_server": ("ModelServer", "Reply"),
            "suites.agent": ("AGENT_CHECKS", "run_agent_check"),
            "suites.agent_driver": ("AgentSubject",),
            "suites.channel": ("CHANNEL_CHECKS", "Copy", "Network", "run_channel_check"),
            "suites.model": ("MODEL_CHECKS", "run_model_check"),
            "suites.model_provider": ("ModelSubject", "Provider", "served_model", "unscripted_model"),
            "suites.sandbox": ("SANDBOX_CHECKS", "run_sandbox_check"),
            "suites.store": ("STORE_CHECKS", "run_store_check"),
        },
    )
