"""The storm's probe of walls: it finds what is open without a wall, and nothing behind one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast import Host, Run, Settings, agent
from holdfast.proof.storm.wall_probe import WallProbe, can_build_walls
from holdfast.tools.sandbox.choice import BackendName


async def _reached(tmp_path: Path, *, sandbox: BackendName = "auto") -> tuple[str, ...]:
    """Run the probe in the sessions of two principals, one after the other; return what the second one reached."""
    (tmp_path / "stamps").write_text("what the storm knows")
    probe = WallProbe(tmp_path, port=0)
    reached: list[tuple[str, ...]] = []

    @agent
    async def prober(run: Run) -> None:
        reached.append(await probe.run(run))

    async with Host(prober, store="memory://", settings=Settings(sandbox=sandbox)) as host:
        for principal in ("ann", "bob"):
            await host.session("s", principal=principal).ask("go")
    return reached[-1]


def test_a_walled_program_reaches_nothing_of_the_storm_or_of_another_principal(tmp_path: Path) -> None:
    if not can_build_walls():
        pytest.skip("this machine has neither user namespaces nor Landlock")
    assert asyncio.run(_reached(tmp_path)) == ()


def test_the_probe_finds_what_is_open_without_a_wall(tmp_path: Path) -> None:
    reached = asyncio.run(_reached(tmp_path, sandbox="none"))
    assert "the workspace of ann/s" in reached
    assert {"the file stamps", "the file stamps for writing"} <= set(reached)
