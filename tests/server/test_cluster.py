"""Two servers on one database: a client may talk to either, and what is revoked at one ends at the other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast import Run
from holdfast.host.node_requests import NodeRequests
from holdfast.protocol.messages import Access, Grant
from holdfast.storage.postgres import PostgresStore
from tests.server.live import Live, live
from tests.storage.postgres.pools import leave_session


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main(), 100))


def server(url: str) -> Any:
    return live(store=PostgresStore(url), cluster_poll_s=0.05)


async def events(
    of: Live, key: str, receipt: dict[str, Any], headers: dict[str, str], *, begun: asyncio.Future[None]
) -> str:
    """The events after a receipt, until the stream ends; `begun` resolves once the run's own event has been read."""
    path = f"/v1/sessions/{key}/events?after={receipt['cursor']}"
    text = ""
    async with of.http.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200
        async for part in answer.aiter_text():
            text += part
            if "waiting" in text and not begun.done():
                begun.set_result(None)
    return text


def test_a_message_to_one_server_is_read_awaited_and_interrupted_at_the_other(postgres_url: str) -> None:
    async def main() -> None:
        async with server(postgres_url) as one, server(postgres_url) as two:
            receipt = await one.begun("alice")
            answer = await two.http.get(f"/v1/sessions/alice/messages/{receipt['message_id']}")
            assert answer.json()["state"] == "taken"
            waiting = asyncio.ensure_future(two.post("alice", "afterwards", query="?wait=60", agent="echo"))
            while len((await one.http.get("/v1/sessions/alice/mailbox")).json()["items"]) == 0:
                await asyncio.sleep(0.01)
            stopped = (await two.http.post("/v1/sessions/alice/interrupt", json={"reason": "enough"})).json()
            assert (stopped["outcome"], stopped["proof"], stopped["scope"]) == ("gone", "observed", receipt["run_id"])
            assert (await waiting).json()["text"] == "echo afterwards"

    run(main)


def test_a_key_that_is_made_or_revoked_at_one_server_holds_at_the_other_within_a_poll(postgres_url: str) -> None:
    async def main() -> None:
        async with server(f"{postgres_url}&signals=off") as one, server(f"{postgres_url}&signals=off") as two:
            _, admin = await one.app.keys.create(principal="root", role="admin")
            record, secret = await one.app.keys.create(principal="alice", role="user")
            headers = {"authorization": f"Bearer {secret}"}
            while (await two.http.get("/v1/sessions")).status_code != 401:  # keys are required everywhere
                await asyncio.sleep(0.01)
            while (await two.http.get("/v1/sessions", headers=headers)).status_code != 200:
                await asyncio.sleep(0.01)
            path = "/v1/sessions/s/messages"
            sent = await two.http.post(path, json={"content": "go", "agent": "endless"}, headers=headers)
            begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            stream = asyncio.ensure_future(events(two, "s", sent.json(), headers, begun=begun))
            await begun
            await one.app.keys.revoke(record.key_id)
            assert '"reason":"unauthorized"' in await stream
            answer = await two.http.get("/v1/sessions", headers=headers)
            assert answer.status_code == 401
            assert admin

    run(main)


def test_a_grant_that_is_revoked_at_one_server_is_gone_for_calls_at_the_other(postgres_url: str) -> None:
    async def main() -> None:
        async with server(f"{postgres_url}&signals=off") as one, server(f"{postgres_url}&signals=off") as two:
            grant = Grant(
                grant_id="g1", principal="local", scope="principal", session="s", access=Access(write=("/x",))
            )
            await one.host.store.backend.write("test", lambda tables: tables.grants.add(0, grant))
            told: list[str] = []
            grants = two.host.parts.grants
            stop = grants.watch("local", told.append)
            try:
                assert await grants.for_call("local", 1) == (grant,)
                await one.host.revoke_grant("g1")
                while not told:
                    await asyncio.sleep(0.01)
                assert told == ["g1"]
            finally:
                stop()

    run(main)


def test_readiness_metrics_and_the_page_count_sessions_that_wait_for_files_of_another_host(postgres_url: str) -> None:
    async def main() -> None:
        await leave_session(postgres_url, "a", key="alice", queued=False)
        async with server(postgres_url) as one:
            assert (await one.http.get("/readyz")).json() == {"status": "ready"}
            assert "sessions awaiting a pool" not in (await one.http.get("/")).text
            sent = await one.post("alice", "hello", agent="echo")
            assert sent.json()["disposition"] == "queued"
            while "awaiting_pool" not in (answer := await one.http.get("/readyz")).json():
                await asyncio.sleep(0.01)
            assert (answer.status_code, answer.json()) == (200, {"status": "ready", "awaiting_pool": 1})
            assert "\nholdfast_sessions_awaiting_pool 1\n" in (await one.http.get("/metrics")).text
            assert "sessions awaiting a pool" in (await one.http.get("/")).text
            assert (
                "waits for a host with the files: workspace_pool = a<" in (await one.http.get("/sessions/alice")).text
            )
            assert (await one.http.get("/v1/sessions/alice")).json()["workspace_pool"] == "a"
            await one.post("bob", "hello", agent="echo")
            assert "waits for a host" not in (await one.http.get("/sessions/bob")).text

    run(main)


async def endless(run: Run) -> None:
    """Take a minute to end."""
    await run.emit("waiting")
    try:
        await run.interrupt.wait()
    finally:
        await asyncio.shield(asyncio.sleep(60))


def test_a_slow_stop_is_awaited_at_any_server(postgres_url: str) -> None:
    def slow() -> Any:
        return live(endless, store=PostgresStore(postgres_url), cluster_poll_s=0.05)

    async def main() -> None:
        async with slow() as one, slow() as two:
            receipt = await one.begun("alice")
            answer = await one.http.post("/v1/sessions/alice/stop?wait=0", json={"grace_s": 60})
            assert answer.status_code == 202
            at = answer.headers["location"]
            for server_ in (one, two):
                assert (await server_.http.get(at)).status_code == 202
            assert (await two.http.get(at.replace("alice", "bob"))).status_code == 404
            hasten = await one.http.post("/v1/sessions/alice/interrupt", json={"grace_s": 0.1})
            assert hasten.status_code == 200
            while (result := await two.http.get(at)).status_code == 202:
                await asyncio.sleep(0.01)
            assert result.status_code == 200
            assert result.json() == (await one.http.get(at)).json()
            assert result.json()["receipt"]["scope"] == receipt["run_id"]

    run(main)


def test_a_stop_of_a_server_that_is_gone_is_unknown(postgres_url: str) -> None:
    async def main() -> None:
        async with server(postgres_url) as two:
            gone: Any = PostgresStore(postgres_url)
            await gone.open(node_id="gone", at=1.0)
            await gone.cluster.save_stop("s_1", "local", "alice", None)
            await gone.cluster.save_stop("s_2", "local", "alice", b"")
            at = "/v1/sessions/alice/stops"
            assert (await two.http.get(f"{at}/s_1")).status_code == 202
            answer = await two.http.get(f"{at}/s_2")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_stop"), "it failed"
            await gone.close()
            assert (await two.http.get(f"{at}/s_1")).status_code == 404

    run(main)


def test_other_servers_know_a_stop_without_the_contents_of_the_messages_that_it_withdrew(postgres_url: str) -> None:
    async def main() -> None:
        async with live(endless, store=PostgresStore(postgres_url)) as one, server(postgres_url) as two:
            await one.begun("alice")
            await one.post("alice", "a secret")
            at = (await one.http.post("/v1/sessions/alice/stop?wait=0", json={"grace_s": 60})).headers["location"]
            await one.http.post("/v1/sessions/alice/interrupt", json={"grace_s": 0.1})
            while (told := await two.http.get(at)).status_code == 202:
                await asyncio.sleep(0.01)
            ((own,), (other,)) = ((await one.http.get(at)).json()["withdrawn"], told.json()["withdrawn"])
            assert own["content"] == "a secret"
            assert other == {**own, "content": ""}

    run(main)


def test_a_stop_is_answered_although_it_takes_long_to_share_it(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.server.stop_tickets._SHARE_S", 0.05)

    async def main() -> None:
        async with server(postgres_url) as one:
            await one.begun("alice")
            cluster = one.host.store.cluster
            assert cluster is not None
            shared: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            monkeypatch.setattr(cluster, "save_stop", lambda *_: shared)
            answer = await one.http.post("/v1/sessions/alice/stop?wait=0", json={})
            assert answer.status_code in (200, 202)
            shared.set_result(None)

    run(main)


def test_the_newest_stops_of_a_principal_are_kept(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.storage.postgres.cluster._STOPS", 3)

    async def main() -> None:
        store: Any = PostgresStore(postgres_url)
        await store.open(node_id="n", at=1.0)
        for principal in ("alice", "bob"):
            for n in range(5):
                await store.cluster.save_stop(f"{principal} {n}", principal, "s", b"x")
        for principal in ("alice", "bob"):
            found = [await store.cluster.find_stop(f"{principal} {n}", principal, "s") for n in range(5)]
            assert found == [None, None, b"x", b"x", b"x"]
        assert await store.cluster.find_stop("alice 4", "bob", "s") is None
        await store.cluster.sweep()
        assert await store.cluster.find_stop("alice 4", "alice", "s") == b"x"
        await store.close()

    run(main)


def test_a_shutdown_waits_for_no_host_that_does_not_answer(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def works(run: Run) -> None:
        run.background(lambda: asyncio.sleep(1000), name="server")

    async def main() -> None:
        async with live(works, store=PostgresStore(postgres_url), grace_s=5.0) as holder:
            await holder.post("alice", "go", query="?wait=20")
            async with live(works, store=PostgresStore(postgres_url), grace_s=5.0) as other:
                monkeypatch.setattr(NodeRequests, "look", lambda _: None)
                stopping = asyncio.ensure_future(other.http.post("/v1/sessions/alice/stop?wait=0", json={}))
                await stopping
                async with asyncio.timeout(20):  # the limit of the request would be 32 s
                    await other.end()

    run(main)
