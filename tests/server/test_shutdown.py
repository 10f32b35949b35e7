"""Shutting down: work ends or is parked, waits are answered, new work is refused, and nothing hangs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.server import lifecycle
from tests.server.live import AGENTS, GUARD_S, Live, live, served
from tests.server.test_bad_input import refused


def test_a_draining_server_refuses_new_work_and_still_shows_the_old() -> None:
    async def scenario(server: Live) -> None:
        done = (await server.post("alice", query="?wait=60")).json()
        await server.begun("bob")
        report = await server.http.post("/v1/drain", json={"deadline_s": 0.05})
        assert report.status_code == 200
        assert len(report.json()["interrupted"]) == 1
        assert report.json()["orphans"] == []
        again = await server.http.post("/v1/drain", json={})
        assert again.json() == report.json(), "a drain happens once"
        answer = await server.post("alice")
        refused(answer, 503, "draining")
        assert int(answer.headers["retry-after"]) >= 1
        ready = await server.http.get("/readyz")
        assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
        assert (await server.http.get("/healthz")).status_code == 200
        assert (await server.http.get(f"/v1/sessions/alice/messages/{done['message_id']}")).json()[
            "state"
        ] == "completed"
        assert "draining" in (await server.http.get("/")).text
        await server.end()

    served(scenario)


def test_a_run_that_finishes_in_time_is_finished_and_its_wait_answered() -> None:
    release = asyncio.Event()

    async def soon(run: Any) -> str:
        await release.wait()
        return "just in time"

    async def main() -> None:
        async with asyncio.timeout(GUARD_S), live(*AGENTS, soon, drain_timeout_s=10.0) as server:
            waiting = asyncio.create_task(server.post("alice", query="?wait=60", agent="soon"))
            while not server.host.statistics().running:
                await asyncio.sleep(0.01)
            ending = asyncio.create_task(server.end())
            while not server.host.draining:
                await asyncio.sleep(0.01)
            release.set()
            report = await ending
            assert report.finished == 1
            assert (await waiting).json()["text"] == "just in time"

    asyncio.run(main())


def test_a_wait_for_a_message_that_stays_in_its_mailbox_ends_with_its_receipt() -> None:
    async def main() -> None:
        async with asyncio.timeout(GUARD_S), live() as server:
            begun = await server.begun("alice")
            queued = asyncio.create_task(server.post("alice", "later", query="?wait=100"))
            asked = asyncio.create_task(server.http.get(f"/v1/sessions/alice/messages/{begun['message_id']}?wait=100"))
            while (await server.http.get("/v1/sessions/alice")).json()["waiting"] != 1:
                await asyncio.sleep(0.01)
            report = await server.end()
            assert len(report.interrupted) == 1
            answer = await queued
            assert (answer.status_code, answer.json()["disposition"]) == (202, "queued")
            settled = await asked
            assert (settled.status_code, settled.json()["state"]) == (200, "interrupted")

    asyncio.run(main())


def test_an_idle_server_ends_at_once_and_with_open_connections() -> None:
    async def main() -> None:
        async with asyncio.timeout(GUARD_S), live() as server:
            port = int(server.url.rpartition(":")[2])
            connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            for _, writer in connections[:10]:
                writer.write(b"POST /v1/sessions/a/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{")
            await server.post("alice", query="?wait=60")
            report = await server.end()
            assert (report.finished, report.interrupted, report.orphans) == (0, (), ())
            for _, writer in connections:
                writer.close()

    asyncio.run(main())


def test_a_request_that_outlasts_the_shutdown_is_told_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits for its principal's turn, which does not come."""
    monkeypatch.setattr(lifecycle, "_CONNECTIONS_S", 0.1)

    async def scenario(server: Live) -> None:
        turn = server.host.budgets.listings.charge("local")
        asked = asyncio.create_task(server.http.get("/v1/sessions"))
        while not server.host.budgets.listings._lined_up:
            await asyncio.sleep(0.01)
        await server.end()
        refused(await asked, 503, "draining")
        turn.release()

    served(scenario)
    assert "Exception in ASGI application" not in caplog.text
