"""Test concurrent code deterministically: explore its schedules, run it on virtual time.

Names are loaded on first use, so the pytest plugin costs nothing in projects that do not explore.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.testing.agent_driver import AgentSubject
    from holdfast.testing.agent_suite import AGENT_CHECKS, run_agent_check
    from holdfast.testing.channel_suite import CHANNEL_CHECKS, Network, run_channel_check
    from holdfast.testing.clock import ManualClock, VirtualClock
    from holdfast.testing.exploring import Report, explore, run_virtual
    from holdfast.testing.failures import NotExplorable, ScheduleFailure
    from holdfast.testing.model_provider import ModelSubject, Provider, served_model, unscripted_model
    from holdfast.testing.model_suite import MODEL_CHECKS, run_model_check
    from holdfast.testing.replay import Replay
    from holdfast.testing.store_suite import STORE_CHECKS, run_store_check
    from holdfast.testing.swapped import start_thread

_HOME_OF = {
    "CHANNEL_CHECKS": "channel_suite",
    "Network": "channel_suite",
    "run_channel_check": "channel_suite",
    "AGENT_CHECKS": "agent_suite",
    "AgentSubject": "agent_driver",
    "run_agent_check": "agent_suite",
    "MODEL_CHECKS": "model_suite",
    "ModelSubject": "model_provider",
    "Provider": "model_provider",
    "run_model_check": "model_suite",
    "served_model": "model_provider",
    "unscripted_model": "model_provider",
    "STORE_CHECKS": "store_suite",
    "run_store_check": "store_suite",
    "ManualClock": "clock",
    "VirtualClock": "clock",
    "Report": "exploring",
    "explore": "exploring",
    "run_virtual": "exploring",
    "NotExplorable": "failures",
    "ScheduleFailure": "failures",
    "Replay": "replay",
    "start_thread": "swapped",
}

__all__ = [
    "AGENT_CHECKS",
    "CHANNEL_CHECKS",
    "MODEL_CHECKS",
    "STORE_CHECKS",
    "AgentSubject",
    "ManualClock",
    "ModelSubject",
    "Network",
    "NotExplorable",
    "Provider",
    "Replay",
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


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
