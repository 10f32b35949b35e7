"""All models, by item, and how many schedules of each are run."""

from __future__ import annotations

from collections.abc import Iterator

from tests.explored import (
    of_clusters,
    of_hosts,
    of_interrupts,
    of_mailboxes,
    of_queues,
    of_scopes,
    of_sessions,
    of_writers,
)
from tests.explored.model import TASKS, Covered, Model, Tasks

__all__ = ["FEW", "ITEMS", "MANY", "MODELS", "WHOLE", "planned", "run_all"]

MODELS: tuple[Model, ...] = (
    *of_interrupts.MODELS,
    *of_scopes.MODELS,
    *of_mailboxes.MODELS,
    *of_queues.MODELS,
    *of_sessions.MODELS,
    *of_hosts.MODELS,
    *of_writers.MODELS,
    *of_clusters.MODELS,
)
ITEMS = tuple(dict.fromkeys(model.item for model in MODELS))
FEW = 2_000
"""Schedules of each item in an ordinary run of the tests, for those that do not end."""
MANY = 100_000
"""The same at night."""
WHOLE = 150_000
"""A model that has no more schedules than this is run to its end at night."""


def planned(model: Model, in_all: int, *, whole: int) -> int:
    """How many schedules of a model are run with each task factory, when its item owes so many in all."""
    owing = [other for other in MODELS if other.item == model.item and not 0 < other.ends <= whole]
    if model not in owing:
        return model.ends
    return -(-int(in_all * model.share / sum(other.share for other in owing)) // len(TASKS))


def run_all(item: str, in_all: int, *, whole: int) -> Iterator[tuple[Model, Tasks, Covered]]:
    """Run all models of an item, with both task factories."""
    for model in MODELS:
        if model.item == item:
            for tasks in TASKS:
                yield model, tasks, model.run(planned(model, in_all, whole=whole), tasks=tasks, whole=whole)
