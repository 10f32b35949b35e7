"""Versions of agents: a run continues only where the version of its agent is the one with which it began."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

import holdfast
from holdfast.cli.doctor import _database
from holdfast.errors import ConfigurationError
from holdfast.host import cluster_watch
from holdfast.settings import Settings
from holdfast.storage.port import NotReady
from holdfast.storage.postgres import PostgresStore
from tests.host.test_cluster import end_lease

begun: list[tuple[str, int]] = []
"""Version and attempt of each run that has begun."""


def host_of(url: str, version: str, *, replayable: bool = True, **settings: Any) -> holdfast.Host:
    """A host with this version of the agent ``worker``, which waits in its first attempt and then ends."""

    async def work(run: holdfast.Run) -> str:
        begun.append((version, run.attempt))
        if run.text != "next" and run.attempt == 1:
            await run.interrupt.wait()
        return f"ended by {version!r}"

    worker = holdfast.Agent(name="worker", work=work, replayable=replayable, version=version)
    chosen = Settings(**{"cluster_poll_s": 0.05, "drain_timeout_s": 0.0, "grace_s": 1.0, **settings})
    return holdfast.Host(agents=[worker], store=PostgresStore(url, lease_s=20.0), settings=chosen)


@pytest.fixture(autouse=True)
def nothing_begun() -> None:
    begun.clear()


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main(), 40))


async def started(host: holdfast.Host) -> str:
    """Start a run; return the id of its message."""
    receipt = await host.session("alice").send("go")
    while not begun:
        await asyncio.sleep(0.005)
    return receipt.message_id


async def offered(host: holdfast.Host, version: str) -> list[int]:
    """The numbers of the sessions that the store offers a host with this version."""
    cluster = host.store.cluster
    assert cluster is not None
    found = await cluster.ready(agents={"worker": version}, at=host.context.now(), limit=9)
    return [ready.session for ready in found]


@pytest.mark.parametrize("how", ["drained", "gone"])
def test_a_run_goes_on_only_with_the_version_with_which_it_began(postgres_url: str, how: str) -> None:
    async def main() -> None:
        poll_s = 60.0 if how == "gone" else 0.05  # or else it claims its run again
        url = f"{postgres_url}&signals=off"
        async with host_of(url, "1", cluster_poll_s=poll_s) as old, host_of(url, "2") as new:
            message_id = await started(old)
            if how == "drained":
                await old.drain()
            else:
                end_lease(postgres_url, old)
                await new.parts.recovery.take_over()
            while not (waiting := await offered(new, "1")):
                await asyncio.sleep(0.01)
            assert await offered(new, "2") == []
            at = new.context.now()
            refused = await new.store.claim(waiting[0], run_id="r_x", at=at, served={"worker": "2"})
            assert isinstance(refused, NotReady)
            async with host_of(url, "1") as again:
                assert (await again.session("alice").wait(message_id)).text == "ended by '1'"
            assert begun == [("1", 1), ("1", 2)]
            after = await new.session("alice").send("next")
            assert (await new.session("alice").wait(after.message_id)).text == "ended by '2'", "a new run takes any"

    run(main)


def test_a_run_without_a_version_goes_on_anywhere(postgres_url: str) -> None:
    async def main() -> None:
        async with host_of(postgres_url, "") as old, host_of(postgres_url, "2") as new:
            message_id = await started(old)
            await old.drain()
            assert (await new.session("alice").wait(message_id)).text == "ended by '2'"

    run(main)


def test_a_host_with_another_version_ends_a_waiting_run_that_is_interrupted(postgres_url: str) -> None:
    async def main() -> None:
        async with host_of(postgres_url, "1") as old, host_of(postgres_url, "2") as new:
            message_id = await started(old)
            await old.drain()
            receipt = await new.session("alice").interrupt("enough")
            assert receipt.outcome == "gone"
            assert (await new.session("alice").wait(message_id)).state == "interrupted"
            assert begun == [("1", 1)]

    run(main)


def test_runs_that_wait_for_a_version_are_reported(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster_watch, "WAITED_LONG_S", 0.05)

    async def main() -> None:
        async with host_of(postgres_url, "1") as old, host_of(postgres_url, "2") as new:
            await started(old)
            await old.drain()
            await old.close()
            while not any(incident.kind == "agent" for incident in new.incidents.newest):
                await asyncio.sleep(0.01)
            looks = 0
            cluster: Any = new.store.cluster
            look = cluster.runs_without_agent

            async def counted(**parameters: Any) -> Any:
                nonlocal looks
                found = await look(**parameters)
                looks += 1
                return found

            monkeypatch.setattr(cluster, "runs_without_agent", counted)
            while looks < 3:
                await asyncio.sleep(0.01)
            (told,) = [incident.text for incident in new.incidents.newest if incident.kind == "agent"]
            assert told.startswith("runs wait for a host with agent 'worker', version '1' and a free slot (1 now)")

    with caplog.at_level(logging.WARNING, "holdfast.host"):
        run(main)
    assert "version '1'" in caplog.text


def test_doctor_names_the_version_that_runs_wait_for(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.storage.postgres.inspection.WAITED_LONG_S", -1.0)

    async def main() -> None:
        async with host_of(postgres_url, "1") as old:
            await started(old)

    run(main)
    check = _database(Settings(store=postgres_url))
    assert check.state == "advice"
    assert "agent 'worker', version '1' (1 run)" in check.found


@pytest.mark.parametrize("version", ["a b", "x" * 65, "1@2", "ü"])
def test_a_version_that_cannot_be_one_is_refused(version: str) -> None:
    with pytest.raises(ConfigurationError, match="version"):
        holdfast.Agent(name="worker", work=print, version=version)
