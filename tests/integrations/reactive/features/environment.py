"""A new stage for each scenario."""

from __future__ import annotations

from typing import Any

from tests.integrations.reactive.stage import Stage


def before_scenario(context: Any, scenario: Any) -> None:
    context.stage = Stage()


def after_scenario(context: Any, scenario: Any) -> None:
    context.stage.end()
