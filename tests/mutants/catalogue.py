"""All mutants, the five reports' first."""

from __future__ import annotations

from tests.mutants import (
    of_agents,
    of_budgets,
    of_cluster,
    of_guards,
    of_hosts,
    of_identity,
    of_programs,
    of_reports,
    of_runtime,
    of_schedules,
    of_shapes,
    of_stores,
    of_streams,
    of_tools,
    of_walls,
)
from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS: tuple[Mutant, ...] = (
    *of_reports.MUTANTS,
    *of_runtime.MUTANTS,
    *of_stores.MUTANTS,
    *of_hosts.MUTANTS,
    *of_cluster.MUTANTS,
    *of_budgets.MUTANTS,
    *of_identity.MUTANTS,
    *of_programs.MUTANTS,
    *of_guards.MUTANTS,
    *of_agents.MUTANTS,
    *of_shapes.MUTANTS,
    *of_schedules.MUTANTS,
    *of_streams.MUTANTS,
    *of_tools.MUTANTS,
    *of_walls.MUTANTS,
)
