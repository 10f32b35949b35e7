"""A walled program manages none of the escapes of the zoo, and each of them succeeds without a wall.

    make test TESTS=tests/system/escapes ARGS="-k 'linux-both-root and proc-self-root'"

All escapes of one wall run once, mostly in one start; each test looks its finding up. An escape that does not succeed
without a wall on this machine proves nothing about walls here: its tests are skipped, with the reason.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.escapes.catalog import ESCAPES
from tests.system.escapes.escape import Escape
from tests.system.escapes.runner import Finding, findings
from tests.system.escapes.walls import WALLS, Wall

EVERY_RUN = ("linux-both",)
"""The walls that are tried in every run; the others are for `make nightly`."""

Look = Callable[[Wall], dict[str, Finding]]


@pytest.fixture(scope="session")
def look(tmp_path_factory: pytest.TempPathFactory) -> Look:
    """The findings of a wall; they are made once, whichever of the test processes needs them first."""
    shared = tmp_path_factory.getbasetemp()
    folder = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    known: dict[Wall, dict[str, Finding]] = {}

    def look(wall: Wall) -> dict[str, Finding]:
        if wall not in known:
            known[wall] = _shared(folder / f"escapes-{wall}.json", wall)
        return known[wall]

    return look


def _shared(path: Path, wall: Wall) -> dict[str, Finding]:
    """Read what another process has found, or run the zoo; a failure is kept, too, as each test would repeat it."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            try:
                made = {name: dataclasses.asdict(finding) for name, finding in findings(wall, ESCAPES).items()}
            except Exception as error:
                path.write_text(json.dumps(f"{wall}: {error!r}"))
                raise
            path.write_text(json.dumps(made))
        read = json.loads(path.read_text())
    assert isinstance(read, dict), read
    return {name: Finding(**fields) for name, fields in read.items()}


def _users(escape: Escape) -> list[str]:
    return [escape.needs] if escape.needs else ["root", "user"]


UNWALLED = [
    pytest.param(Wall("none", user), escape, id=f"{user}-{escape.name}")
    for user in ("root", "user")
    for escape in ESCAPES
    if user in _users(escape)
]
WALLED = [
    pytest.param(
        wall, escape, id=f"{wall}-{escape.name}", marks=() if wall.name in EVERY_RUN else (pytest.mark.nightly,)
    )
    for wall in WALLS
    for escape in ESCAPES
    if wall.user in _users(escape)
]


@pytest.mark.parametrize(("wall", "escape"), UNWALLED)
def test_escape_succeeds_without_a_wall(look: Look, wall: Wall, escape: Escape) -> None:
    if wall.missing:
        pytest.skip(wall.missing)
    finding = look(wall)[escape.name]
    assert finding.began, finding.output
    if not finding.through and escape.may_fail:
        pytest.skip(f"not applicable: {escape.may_fail}")
    assert finding.through, finding.output


@pytest.mark.parametrize(("wall", "escape"), WALLED)
def test_escape(look: Look, wall: Wall, escape: Escape) -> None:
    if wall.missing:
        pytest.skip(wall.missing)
    if not look(wall.unwalled)[escape.name].through:
        pytest.skip(f"not applicable: {escape.may_fail}")
    finding = look(wall)[escape.name]
    assert finding.began, finding.output
    if reason := escape.reason(wall):
        assert finding.through, f"it is held now: take it off the list ({reason})"
    else:
        assert not finding.through, finding.output


def test_each_escape_has_a_name_of_its_own() -> None:
    names = [escape.name for escape in ESCAPES]
    assert len(names) == len(set(names)) >= 120
