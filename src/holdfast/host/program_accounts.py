"""Accounts of the programs of each principal: quotas from the settings, incidents, and usage as budgets.

The quotas themselves are in `holdfast.host.program_quotas`. An ended program is counted each time, and reported at
most once a minute for each principal and resource.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from holdfast.host.budgets import BudgetUsage
from holdfast.host.program_quotas import PROGRAM_RESOURCES, ProgramLimits, ProgramQuotas
from holdfast.runtime.processes.cgroup_delegation import ProgramCgroups, take_cgroups
from holdfast.tools.sandbox.choice import are_programs_unwalled

if TYPE_CHECKING:
    from holdfast.host.context import HostContext
    from holdfast.settings import Settings

__all__ = ["program_limits", "program_quotas", "program_usage"]

_SHOWN = 20
_HOST = "(host)"
"""Name shown for programs that serve the host."""


def program_limits(settings: Settings) -> ProgramLimits:
    """Return the quotas that the settings give to each principal; 0 for memory means half of this machine's."""
    return ProgramLimits(
        memory_bytes=settings.principal_program_memory_bytes or _machine_memory() // 2,
        processes=settings.principal_program_processes,
        files=settings.principal_program_files,
        disk_bytes=settings.principal_disk_bytes,
        inodes=settings.principal_inodes,
        reserve_bytes=settings.disk_reserve_bytes,
    )


def _machine_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def program_quotas(context: HostContext) -> ProgramQuotas:
    """Return the accounts of a host. They report on the host's loop what they end, and count walled programs."""

    def tell(principal: str, resource: str, text: str) -> None:
        context.incidents.counts[f"programs_ended_{resource}"] += 1
        context.budgets.tell(principal, text, kind=f"programs: {resource}")

    def report(principal: str, resource: str, text: str) -> None:
        if not context.loop.is_closed():
            context.loop.call_soon_threadsafe(tell, principal, resource, text)

    def count() -> None:
        if not are_programs_unwalled():
            context.incidents.promises.kept["P16"] += 1

    cgroups = take_cgroups()
    return ProgramQuotas(
        program_limits(context.settings),
        report,
        on_start=count,
        cgroups=cgroups if isinstance(cgroups, ProgramCgroups) else None,
    )


def program_usage(quotas: ProgramQuotas, principal: str | None) -> dict[str, BudgetUsage]:
    """Return the usage of each resource as a budget, for `principal`; None covers the whole host.

    The limit is that of each principal; refusals are programs that were ended.
    """
    found: dict[str, BudgetUsage] = {}
    used = {
        resource: {name or _HOST: amount for name, amount in one.items()}
        for resource, one in quotas.usage(principal).items()
    }
    for resource in PROGRAM_RESOURCES:
        limit = quotas.limits.of(resource)
        if principal is None:
            most = dict(sorted(used[resource].items(), key=lambda one: -one[1])[:_SHOWN])
            total, ended = sum(used[resource].values()), quotas.ended[resource]
        else:
            most = {principal: used[resource].get(principal, 0)}
            total, ended = most[principal], 0
        found[f"program_{resource}"] = BudgetUsage(
            used=total, limit=limit, share=limit, refused=ended, principals=dict(most)
        )
    return found
