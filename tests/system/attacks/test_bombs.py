"""Bombs of one principal's commands: they are ended and told, and others hardly notice (P13)."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.runtime.processes import procfs
from tests.system.attacks.harness import ATTACKER, AttackedServer, attacked_server

pytestmark = pytest.mark.skipif(not procfs.supported(), reason="programs are watched only on Linux")

_NOISE = 1.15
"""Factor by which two measurements of a p99 may differ without a reason."""

_AGENTS = tuple(f"tests.system.attacks.agents:{name}" for name in ("echo", "endless", "command"))
_QUOTAS = {
    "principal_program_memory_bytes": 300_000_000,
    "principal_program_processes": 150,
    "principal_program_files": 1000,
    "principal_disk_bytes": 50_000_000,
    "principal_inodes": 5000,
    "disk_reserve_bytes": 100_000_000,
}

BOMBS = {
    "forks": "bomb() { bomb | bomb & }; bomb; sleep 20",
    "forks that burn": "for n in $(seq 400); do (while :; do :; done) & done; wait",
    "memory": f"{sys.executable} -I -S -c 'kept = []\nwhile True: kept.append(b\"x\" * (1 << 20))'",
    "memory in files": "for n in $(seq 200); do for d in /tmp /dev/shm; do head -c 2M /dev/zero >$d/$n; done; done",
    "disk": "for n in $(seq 200); do head -c 1M /dev/zero >$n; done; sleep 20",
    "inodes": f"{sys.executable} -I -S -c 'for n in range(50_000): open(str(n), \"w\").close()'; sleep 20",
    "descriptors": f"{sys.executable} -I -S -c 'import os, time\nos.fork(); os.fork()\n"
    'for n in range(400): os.open("/dev/null", 0)\ntime.sleep(20)\'',
    "output": "timeout 5 yes no end; sleep 1",
}


async def throw(server: AttackedServer, names: list[str]) -> dict[str, Any]:
    """Run these bombs at once, each in a session of its own; return the last answer of each tool."""
    answers: dict[str, Any] = {}

    async def one(name: str) -> None:
        async with server.http(ATTACKER) as http:
            path = f"/v1/sessions/bomb-{list(BOMBS).index(name)}"
            body = {"content": BOMBS[name], "agent": "command"}
            answer = await http.post(f"{path}/messages", params={"wait": "40"}, json=body)
            assert answer.status_code in (200, 202), answer.text
            transcript = (await http.get(f"{path}/transcript")).text
            answers[name] = transcript

    await asyncio.gather(*map(one, names))
    return answers


async def bombed(folder: Path, names: list[str]) -> None:
    """Run bombs one after the other while a bystander works; each has to be ended, and told once."""
    async with attacked_server(folder, agents=_AGENTS, settings=_QUOTAS) as server:
        async with server.bystander(sends=60, stops=1):
            answers = {name: (await throw(server, [name]))[name] for name in names}
        await server.check(accused=ATTACKER)
        assert server.quiet is not None
        assert server.attacked is not None
        print(f"p99 {server.attacked.p99_s * 1000:.1f} ms, {server.quiet.p99_s * 1000:.1f} ms in quiet")
        for name, answer in answers.items():
            assert ("bytes omitted" if name == "output" else "[ended: ") in answer, answer[-2000:]
        incidents = {one["text"] for one in await server.incidents() if one["kind"] == "budget"}
        assert len(incidents) == len(set(names) - {"output"}), incidents
        async with server.http("admin") as http:
            metrics = (await http.get("/metrics")).text
        assert ("programs_ended_" in metrics) is bool(incidents)


def test_bombs_of_one_principal_are_ended_and_others_are_served(tmp_path: Path) -> None:
    asyncio.run(bombed(tmp_path, ["forks", "memory", "disk", "output"]))


@pytest.mark.nightly
@pytest.mark.alone  # on a busy machine, a bomb of lowest priority does not even reach its quota
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_of_one_principal_is_ended_and_others_are_served(tmp_path: Path, bomb: str) -> None:
    asyncio.run(bombed(tmp_path, [bomb]))


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.parametrize(
    ("bombs", "floor_s"),
    [
        pytest.param(("forks", "forks that burn"), 0.020, id="forks"),
        pytest.param(tuple(BOMBS), 0.100, id="all"),  # they share memory and the disk with the bystander's commits
    ],
)
def test_a_bystander_hardly_notices_bombs_at_once(tmp_path: Path, bombs: tuple[str, ...], floor_s: float) -> None:
    async def body() -> None:
        async with attacked_server(tmp_path, agents=_AGENTS) as server:
            async with server.bystander(sends=2000, stops=3):
                for _ in range(3):
                    await throw(server, list(bombs))
            await server.check()
            assert server.quiet is not None
            assert server.attacked is not None
            print(f"p99 {server.attacked.p99_s * 1000:.1f} ms, {server.quiet.p99_s * 1000:.1f} ms in quiet")
            allowed = max(5 * server.quiet.p99_s, floor_s) * _NOISE
            assert server.attacked.p99_s <= allowed, (server.attacked.p99_s, server.quiet.p99_s, os.cpu_count())

    asyncio.run(body())
