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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.system.escapes.catalog import ESCAPES
from tests.system.escapes.escape import Escape
from tests.system.escapes.runner import Finding, findings
from tests.system.escapes.walls import WALLS, Wall

EVERY_RUN = ("none", "linux-both")
"""The walls that are tried in every run; the others are for `make nightly`."""

WITH_NETWORK_IN_EVERY_RUN = "linux-both-network"
OPENED = (
    *("network", "network through the proxy", "unix sockets and the bus"),
    *("memory and environments", "signals and control", "two principals"),
)
"""The classes that an open network could change. They are tried with one in every run, and by themselves."""

Look = Callable[[Wall, Escape], Finding]


@pytest.fixture(scope="session")
def look(tmp_path_factory: pytest.TempPathFactory) -> Look:
    """The finding of an escape; those of a wall are made once, whichever of the test processes needs them first."""
    shared = tmp_path_factory.getbasetemp()
    folder = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    known: dict[tuple[Wall, bool], dict[str, Finding]] = {}

    def look(wall: Wall, escape: Escape) -> Finding:
        apart = wall.has_network
        opened = apart and escape.subject in OPENED
        if (wall, opened) not in known:
            part = [one for one in ESCAPES if not apart or (one.subject in OPENED) == opened]
            name = f"escapes-{wall}{'-opened' if opened else ''}.json"
            known[wall, opened] = _shared(folder / name, wall, part)
        return known[wall, opened][escape.name]

    return look


def _shared(path: Path, wall: Wall, escapes: Sequence[Escape]) -> dict[str, Finding]:
    """Read what another process has found, or run the zoo; a failure is kept, too, as each test would repeat it."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            try:
                made = {name: dataclasses.asdict(finding) for name, finding in findings(wall, escapes).items()}
            except Exception as error:
                path.write_text(json.dumps(f"{wall}: {error!r}"))
                raise
            path.write_text(json.dumps(made))
        read = json.loads(path.read_text())
    assert isinstance(read, dict), read
    return {name: Finding(**fields) for name, fields in read.items()}


def _is_nightly(wall: Wall, escape: Escape) -> bool:
    opened = wall.name == WITH_NETWORK_IN_EVERY_RUN and escape.subject in OPENED
    return not opened and wall.name not in EVERY_RUN


def _tries(walls: Iterable[Wall]) -> list[Any]:
    return [
        pytest.param(
            wall,
            escape,
            id=f"{wall.user if wall.name == 'none' else wall}-{escape.name}",
            marks=(pytest.mark.nightly,) if _is_nightly(wall, escape) else (),
        )
        for wall in walls
        for escape in ESCAPES
        if escape.is_for(wall)
    ]


@pytest.mark.parametrize(("wall", "escape"), _tries(Wall("none", user) for user in ("root", "user")))
def test_escape_succeeds_without_a_wall(look: Look, wall: Wall, escape: Escape) -> None:
    if wall.missing:
        pytest.skip(wall.missing)
    finding = look(wall, escape)
    assert finding.began, finding.output
    if not finding.through and escape.may_fail:
        pytest.skip(f"not applicable: {escape.may_fail}")
    assert finding.through, finding.output


@pytest.mark.parametrize(("wall", "escape"), _tries(WALLS))
def test_escape(look: Look, wall: Wall, escape: Escape) -> None:
    if wall.missing:
        pytest.skip(wall.missing)
    if not look(wall.unwalled, escape).through:
        pytest.skip(f"not applicable: {escape.may_fail}")
    finding = look(wall, escape)
    assert finding.began, finding.output
    if reason := escape.reason(wall):
        assert finding.through, f"it is held now: take it off the list ({reason})"
    else:
        assert not finding.through, finding.output


def test_each_escape_has_a_name_of_its_own() -> None:
    names = [escape.name for escape in ESCAPES]
    assert len(names) == len(set(names)) >= 120


def test_the_classes_that_are_tried_with_a_network_in_every_run_exist() -> None:
    assert set(OPENED) <= {escape.subject for escape in ESCAPES}


def test_escapes_through_the_proxy_are_left_out_where_there_is_none() -> None:
    proxied = {escape.name for escape in ESCAPES if escape.proxied}
    for wall in (Wall("none", "root"), *WALLS):
        tried = {escape.name for escape in ESCAPES if escape.is_for(wall)}
        connected = ("none", "linux-both-network", "linux-namespaces-network", "bwrap-network")
        assert bool(tried & proxied) == (wall.name in connected), wall
