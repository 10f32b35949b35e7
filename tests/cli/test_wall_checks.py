"""The section of ``holdfast doctor`` about walls: a real wall holds, and a missing one is found."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from holdfast.cli.check_result import Check
from holdfast.cli.wall_checks import check_walls
from holdfast.errors import NotSupported
from holdfast.settings import Settings
from holdfast.tools.sandbox import choice
from holdfast.tools.sandbox.backends.unwalled import UnwalledBackend
from holdfast.tools.sandbox.plan import WallPlan
from holdfast.tools.sandbox.port import SandboxBackend

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="walls need Linux")


class Pretends(UnwalledBackend):
    """Says that it builds walls, and builds none."""

    layers: tuple[str, ...] = ("paper",)


class Fails(Pretends):
    """Builds no wall that a program could start behind."""

    def launch(self, plan: WallPlan, argv: Sequence[str]) -> NoReturn:
        raise NotSupported("the engine does not answer", hint="check it")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(store=f"sqlite:///{tmp_path}/holdfast.db")


def use(monkeypatch: pytest.MonkeyPatch, backend: SandboxBackend) -> None:
    """Make a backend the one that this machine supports."""
    monkeypatch.setattr(choice, "_find", lambda _: choice.BackendChoice(backend=backend, rejected={}))


def look(settings: Settings) -> dict[str, Check]:
    return {
        check.found.partition(":")[0] if check.name == "wall" else check.name: check for check in check_walls(settings)
    }


def test_every_attempt_to_break_through_the_wall_of_this_machine_is_held(settings: Settings) -> None:
    try:
        found = choice.find_choice("auto")
    except NotSupported as error:
        pytest.skip(f"this machine builds no wall: {error}")
    checks = look(settings)
    assert len(checks) == 9
    assert checks.pop("walls").state == ("advice" if found.lacks else "ok")
    assert {check.state for check in checks.values()} == {"ok"}, checks


def test_a_wall_that_does_not_hold_is_a_fault(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Pretends())
    checks = look(settings)
    broken = {name for name, check in checks.items() if check.state == "fault"}
    assert broken >= {
        "read the store",
        "read the local token",
        "reach the API on loopback",
        "signal the server",
        "read another workspace",
        "write to the system",
    }
    assert checks["read the store"].found == "read the store: A PROGRAM CAN"
    assert not list(Path(sys.prefix).glob(".holdfast-doctor-*")), "the attempts leave nothing"


def test_attempts_that_do_not_run_are_a_fault(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Fails())
    checks = look(settings)
    assert checks["wall attempts"].state == "fault"
    assert "the engine does not answer" in checks["wall attempts"].found


def test_programs_without_a_wall_are_shown(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, UnwalledBackend())
    checks = look(settings)
    assert [(check.name, check.state) for check in checks.values()] == [("walls", "advice")]
