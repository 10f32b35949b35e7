"""A host of a cluster is killed or stopped: others take its runs over, and what it writes later is refused."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import holdfast
from holdfast.events import Event, RunRestarted, TextDelta
from holdfast.protocol.events import decode_event
from holdfast.runtime.processes import procfs
from holdfast.settings import Settings
from holdfast.storage.postgres import PostgresStore
from tests.host.cluster_node import AGENTS

LEASE_S = 2.0
SLACK_S = 1.0
"""What a take-over may take longer than the lease."""


class Node:
    """A host in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def told(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        assert line, "the node has ended"
        return json.loads(line)  # type: ignore[no-any-return]

    async def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        return await self.told()


@asynccontextmanager
async def node(url: str, count: int) -> AsyncIterator[Node]:
    """A node with as many runs. It is killed in the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.host.cluster_node", url, str(LEASE_S), str(count),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        started = Node(process)
        assert (await started.told())["begun"] == count
        yield started
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def host(url: str, **settings: Any) -> holdfast.Host:
    chosen = Settings(cluster_poll_s=0.2, drain_timeout_s=0.0, **settings)
    return holdfast.Host(agents=AGENTS, store=PostgresStore(url, lease_s=LEASE_S), settings=chosen)


async def until(condition: Any, within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


async def log(on: holdfast.Host, key: str) -> list[Event]:
    found = await on.store.find_session("local", key)
    assert found is not None
    stored = await on.store.read_events(found[0], after=0, limit=100_000)
    assert [event.seq for event in stored] == list(range(1, len(stored) + 1))
    return [decode_event(event) for event in stored]


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main(), 90))


def test_the_runs_of_a_killed_host_go_on_elsewhere_within_its_lease_and_a_second(postgres_url: str) -> None:
    async def main() -> None:
        async with host(postgres_url) as one, host(postgres_url) as two, node(postgres_url, 8) as killed:
            killed.process.kill()
            began = time.monotonic()
            await until(lambda: len(one.live) + len(two.live) == 7)
            took_s = time.monotonic() - began
            assert took_s <= LEASE_S + SLACK_S
            assert not one.live.keys() & two.live.keys()
            taken = [each.statistics().counts.get("runs_taken_over", 0) for each in (one, two)]
            assert sorted(taken) == [0, 8], "one node's runs are taken over together"
            fragile = await two.session("s1").runs()
            assert [(view.state, view.cause and view.cause.kind) for view in fragile] == [("interrupted", "crash")]
            assert not any(promise.broken for each in (one, two) for promise in each.statistics().promises.values())

    run(main)


@pytest.mark.parametrize("key", ["s0", "s1"], ids=["replayable", "not replayable"])
def test_an_interrupt_of_a_run_whose_host_is_gone_is_proven_by_the_lease(postgres_url: str, key: str) -> None:
    async def main() -> None:
        async with host(postgres_url) as other, node(postgres_url, 2) as killed:
            killed.process.kill()
            receipt = await other.session(key).interrupt("enough")
            assert (receipt.proof, receipt.outcome) == ("lease", "unknown")
            assert receipt.elapsed_s <= LEASE_S + SLACK_S
            (view,) = await other.session(key).runs()
            assert view.state == "interrupted"
            assert (await other.session(key).send("tick")).disposition == "started"

    run(main)


def test_a_host_that_was_stopped_for_longer_than_its_lease_writes_nothing_more_for_its_runs(postgres_url: str) -> None:
    async def main() -> None:
        async with node(postgres_url, 3) as frozen, host(postgres_url) as other:
            os.kill(frozen.process.pid, signal.SIGSTOP)
            await until(lambda: len(other.live) == 2)
            os.kill(frozen.process.pid, signal.SIGCONT)
            while (told := await frozen.ask("?"))["live"]:
                await asyncio.sleep(0.01)
            assert told["lost"] == 3
            assert told["broken"] == 0
            for key in ("s0", "s2"):
                await other.session(key).interrupt("enough")
                events = await log(other, key)
                (restart,) = [n for n, event in enumerate(events) if isinstance(event, RunRestarted)]
                later = {event.text for event in events[restart:] if isinstance(event, TextDelta)}
                assert not [text for text in later if str(frozen.process.pid) in text.split()]
            assert (await frozen.ask("send"))["disposition"] == "started", "it serves again, in a new epoch"

    run(main)


def test_the_programs_of_a_stopped_host_are_dead_when_others_take_its_runs_over(postgres_url: str) -> None:
    async def main() -> None:
        async with node(postgres_url, 1) as frozen, host(postgres_url) as other:
            await frozen.ask("programs")
            told = ""
            async for event in other.session("programs").events():
                if isinstance(event, TextDelta):
                    told += event.text
                    if len(pids := [int(pid) for pid in told.split()]) == 4:
                        break
            assert sorted(procfs.living(pids)) == sorted(pids)
            os.kill(frozen.process.pid, signal.SIGSTOP)
            while (view := (await other.session("programs").runs())[0]).state == "running":
                await asyncio.sleep(0.01)
            assert not procfs.living(pids)
            assert (view.state, view.cause and view.cause.kind) == ("interrupted", "crash")

    run(main)


def test_a_host_that_is_stopped_for_a_part_of_its_lease_keeps_its_runs(postgres_url: str) -> None:
    async def main() -> None:
        async with node(postgres_url, 2) as frozen, host(postgres_url) as other:
            os.kill(frozen.process.pid, signal.SIGSTOP)
            await asyncio.sleep(LEASE_S / 4)
            os.kill(frozen.process.pid, signal.SIGCONT)
            told = await frozen.ask("?")
            assert (told["live"], told["lost"]) == (2, 0)
            assert other.statistics().counts.get("runs_taken_over", 0) == 0
            receipt = await other.session("s0").interrupt("enough")
            assert (receipt.proof, receipt.outcome) == ("observed", "gone")

    run(main)
