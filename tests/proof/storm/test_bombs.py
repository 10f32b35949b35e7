"""The storm's bombs: quotas end them and say so, without quotas they go too far, and nothing of them is left."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast import Host, Run, Settings, agent
from holdfast.proof.limits import Limits
from holdfast.proof.storm.bombs import BOMBS, QUOTAS, Bomb, StormPrograms
from holdfast.proof.storm.bounds import HOSTILE
from holdfast.proof.storm.hostile import ACTS, Hostile
from holdfast.proof.storm.wall_probe import ProbeEnded, WallProbe, can_build_walls
from holdfast.proof.storm.watch import list_processes

needs_walls = pytest.mark.skipif(not can_build_walls(), reason="this machine has neither user namespaces nor Landlock")
STORM = "storm-of-a-test"
LIMITED = [bomb for bomb in BOMBS if bomb.setting]


async def thrown(folder: Path, bombs: Sequence[Bomb], settings: Settings) -> tuple[list[str], int]:
    """Throw bombs at once, each of a principal of its own; return the tools' results, and the most processes seen."""
    programs = StormPrograms(folder)

    @agent
    async def bomber(run: Run) -> None:
        await run.emit(await programs.throw(run, run.text, f"{STORM} {run.principal} s {run.root_id} 1"))

    most = 0
    async with Host(bomber, store="memory://", settings=settings) as host:
        asked = [
            asyncio.create_task(host.session("s", principal=f"{HOSTILE}{number}").ask(bomb.name))
            for number, bomb in enumerate(bombs)
        ]
        while not all(one.done() for one in asked):
            await asyncio.sleep(0.05)
            most = max(most, len(list_processes(STORM)))
        assert list_processes(STORM) == []
        return [await one for one in asked], most


@needs_walls
@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb.name.replace(" ", "-"))
def test_a_bomb_is_ended_within_the_bound_of_the_checker_and_told_and_leaves_nothing(
    tmp_path: Path, bomb: Bomb
) -> None:
    (text,), most = asyncio.run(thrown(tmp_path, [bomb], msgspec.structs.replace(Settings(), **QUOTAS)))
    peak, told = bomb.result(text)
    assert told, text[-500:]
    assert 0.9 * bomb.quota <= peak <= bomb.quota + Limits().bomb_slack * bomb.overshoot
    assert most > 0, "its processes are not marked"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.nightly
@pytest.mark.alone  # on a busy machine, a bomb of lowest priority takes too little in its time
@needs_walls
def test_a_bomb_that_nothing_ends_goes_beyond_the_bound_of_the_checker_and_ends_by_itself(tmp_path: Path) -> None:
    texts, _ = asyncio.run(thrown(tmp_path, LIMITED, Settings()))
    for bomb, text in zip(LIMITED, texts, strict=True):
        peak, told = bomb.result(text)
        assert not told
        assert peak > bomb.quota + Limits().bomb_slack * bomb.overshoot, bomb.name
        assert "\n[exit code 0" in text
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@needs_walls
def test_a_bystander_that_is_ended_is_told_apart_from_one_that_is_not(tmp_path: Path) -> None:
    programs, probe = StormPrograms(tmp_path), WallProbe(tmp_path, port=0)
    told: list[str] = []

    @agent
    async def bystander(run: Run) -> None:
        told.append(await programs.hold(run, 1.0))
        try:
            told.append(str(await probe.run(run)))
        except ProbeEnded as error:
            told.append(str(error))

    async def stood_by(settings: Settings) -> None:
        async with Host(bystander, store="memory://", settings=settings) as host:
            await host.session("s", principal="ann").ask("go")

    asyncio.run(stood_by(Settings()))
    assert told == ["", "()"]
    told.clear()
    asyncio.run(stood_by(Settings(principal_program_processes=1)))
    assert told[0].startswith("user ann's programs had")


def test_a_hostile_principal_throws_no_bombs_where_programs_run_without_walls() -> None:
    def unfelt(*, bombs: bool) -> list[str]:
        load: Any = SimpleNamespace(prefix="h", others=[], sessions=[])
        nothing: Any = None
        return Hostile(
            nothing, nothing, nothing, nothing, key="", port=0, streams=1, load=load, bombs=bombs, seed=1
        ).unfelt()

    names = {bomb.name for bomb in BOMBS}
    assert unfelt(bombs=True) == list(ACTS)
    assert unfelt(bombs=False) == [name for name in ACTS if name not in names]
