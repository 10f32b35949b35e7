"""Test concurrent code deterministically: explore its schedules, run it on virtual time.

Names are loaded on first use, so the pytest plugin costs nothing in projects that do not explore.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.testing.clock import ManualClock, VirtualClock
    from holdfast.testing.explorer.explore import Report, explore, run_virtual
    from holdfast.testing.explorer.failures import NotExplorable, ScheduleFailure
    from holdfast.testing.explorer.patching import start_thread
    from holdfast.testing.explorer.replay import Replay
    from holdfast.testing.suites.agent import AGENT_CHECKS, run_agent_check
    from holdfast.testing.suites.agent_driver import AgentSubject
    from holdfast.testing.suites.channel import CHANNEL_CHECKS, Copy, Network, run_channel_check
    from holdfast.testing.suites.model import MODEL_CHECKS, run_model_check
    from holdfast.testing.suites.model_provider import ModelSubject, Provider, served_model, unscripted_model
    from holdfast.testing.suites.store import STORE_CHECKS, run_store_check

_HOME_OF = {
    "CHANNEL_CHECKS": "suites.channel",
    "Copy": "suites.channel",
    "Network": "suites.channel",
    "run_channel_check": "suites.channel",
    "AGENT_CHECKS": "suites.agent",
    "AgentSubject": "suites.agent_driver",
    "run_agent_check": "suites.agent",
    "MODEL_CHECKS": "suites.model",
    "ModelSubject": "suites.model_provider",
    "Provider": "suites.model_provider",
    "run_model_check": "suites.model",
    "served_model": "suites.model_provider",
    "unscripted_model": "suites.model_provider",
    "STORE_CHECKS": "suites.store",
    "run_store_check": "suites.store",
    "ManualClock": "clock",
    "VirtualClock": "clock",
    "Report": "explorer.explore",
    "explore": "explorer.explore",
    "run_virtual": "explorer.explore",
    "NotExplorable": "explorer.failures",
    "ScheduleFailure": "explorer.failures",
    "Replay": "explorer.replay",
    "start_thread": "explorer.patching",
}

__all__ = [
    "AGENT_CHECKS",
    "CHANNEL_CHECKS",
    "MODEL_CHECKS",
    "STORE_CHECKS",
    "AgentSubject",
    "Copy",
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
