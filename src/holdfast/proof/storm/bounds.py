"""Principals of a storm, settings of the storm's hosts, and bounds that the checker applies."""

from __future__ import annotations

import msgspec

from holdfast.proof.limits import Limits
from holdfast.proof.storm.bombs import QUOTAS
from holdfast.settings import Settings

__all__ = ["HOSTILE", "HOSTILE_BOUNDS", "LIMITS", "LIMITS_WITH_HOSTILE", "PRINCIPALS", "SETTINGS"]

PRINCIPALS = ("ann", "bob", "eve", "dan")
HOSTILE = "mallory"
"""Name of the hostile principal, in a storm that has a hostile principal."""

SETTINGS = Settings(
    grace_s=0.4,
    abandon_after_s=0.3,
    drain_timeout_s=2.0,
    max_runs=48,
    principal_runs=32,
    principal_threads=32,
    mailbox_limit=12,
    restart_limit=3,
    evict_after_s=2.0,
    public_agents=("*",),
)
"""Settings with short timeouts and low limits, so that a storm reaches them."""

LIMITS = Limits(
    answer_s=30.0,
    stop_s=30.0,
    mailbox=SETTINGS.mailbox_limit,
    attempts=SETTINGS.restart_limit + 1,
    principal_runs=SETTINGS.principal_runs,
    thread_slack=SETTINGS.principal_threads * len(PRINCIPALS),
    descriptor_slack=64,
)

HOSTILE_BOUNDS = {"principal_rate_per_s": 200.0, "principal_streams": 200, **QUOTAS}
"""Additional limits of a server with a hostile principal, which are low enough for the principal to reach."""

LIMITS_WITH_HOSTILE = msgspec.structs.replace(LIMITS, thread_slack=SETTINGS.principal_threads * (len(PRINCIPALS) + 1))
