"""Every model of the core under many schedules; each model sees the faults that it is there for."""

from __future__ import annotations

import pytest

from tests.explored.catalogue import FEW, ITEMS, MANY, MODELS, WHOLE, planned
from tests.explored.model import TASKS, Fault, Model, Tasks

SEEN = [(model, fault) for model in MODELS for fault in model.faults]


@pytest.mark.parametrize("tasks", TASKS)
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_no_schedule_breaks_a_promise(model: Model, tasks: Tasks) -> None:
    model.run(planned(model, FEW, whole=3_000), tasks=tasks)


@pytest.mark.parametrize(("model", "fault"), SEEN, ids=lambda value: getattr(value, "name", ""))
def test_the_model_sees_the_fault(model: Model, fault: Fault) -> None:
    assert model.seek(fault) <= FEW


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_each_model_has_seen_a_fault(model: Model) -> None:
    assert model.faults, "a model that was never red proves nothing: put in a fault, or take the model out"


@pytest.mark.parametrize("item", ITEMS)
def test_each_item_ends_or_gets_very_many_schedules_at_night(item: str) -> None:
    models = [model for model in MODELS if model.item == item]
    in_all = sum(planned(model, MANY, whole=WHOLE) * len(TASKS) for model in models if not 0 < model.ends <= WHOLE)
    assert in_all >= MANY or all(0 < model.ends <= WHOLE for model in models)


@pytest.mark.nightly
@pytest.mark.parametrize("tasks", TASKS)
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_no_schedule_of_very_many_breaks_a_promise(model: Model, tasks: Tasks) -> None:
    model.run(planned(model, MANY, whole=WHOLE), tasks=tasks, whole=WHOLE)
