"""Messages, stops and looks over HTTP do what the session interface promises."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.live import JSON, Live, echo, served


def test_a_send_that_waits_is_answered_with_the_outcome() -> None:
    async def scenario(server: Live) -> None:
        answer = await server.post("alice", "hello", query="?wait=60")
        assert answer.status_code == 200
        outcome = answer.json()
        assert (outcome["status"], outcome["text"], outcome["cause"]) == ("completed", "echo hello", None)
        assert outcome["receipt"]["disposition"] == "started"
        assert outcome["receipt"]["message_id"] == outcome["message_id"]

    served(scenario)


def test_a_send_whose_wait_ends_first_is_answered_with_its_receipt() -> None:
    async def scenario(server: Live) -> None:
        answer = await server.post("alice", "go", query="?wait=0.05", agent="endless")
        assert answer.status_code == 202
        receipt = answer.json()
        assert set(receipt) == {"session", "seq", "message_id", "disposition", "cursor", "run_id"}
        open_ = (await server.http.get(f"/v1/sessions/alice/messages/{receipt['message_id']}?wait=0.01")).json()
        assert open_["state"] in ("accepted", "taken")

    served(scenario)


def test_a_failed_run_is_an_outcome_and_not_an_error() -> None:
    async def scenario(server: Live) -> None:
        answer = await server.post("alice", "x", query="?wait=60", agent="failing")
        assert answer.status_code == 200
        assert answer.json()["status"] == "failed"
        assert "it broke" in answer.json()["error"]

    served(scenario)


def test_100_messages_at_once_are_all_answered_in_order_by_one_run_at_a_time() -> None:
    async def scenario(server: Live) -> None:
        answers = await asyncio.gather(*(server.post("alice", str(n), query="?wait=60") for n in range(100)))
        assert all(answer.status_code == 200 for answer in answers)
        by_seq = sorted((answer.json() for answer in answers), key=lambda outcome: outcome["receipt"]["seq"])
        entries = (await server.http.get("/v1/sessions/alice/transcript")).json()["entries"]
        said = [entry["content"] for entry in entries if entry["role"] == "assistant"]
        assert said == [outcome["text"] for outcome in by_seq]
        running = 0
        async for event in server.host.session("alice").events(follow=by_seq[-1]["message_id"]):
            running += {"run.started": 1, "run.finished": -1}.get(event.kind, 0)
            assert running in (0, 1)

    served(scenario)


def test_an_idempotency_key_runs_once_and_refuses_another_body() -> None:
    async def scenario(server: Live) -> None:
        first = await server.post("alice", "once", query="?wait=60", idempotency_key="k1")
        again = await server.post("alice", "once", query="?wait=60", idempotency_key="k1")
        assert again.status_code == 200
        assert again.json()["message_id"] == first.json()["message_id"]
        assert again.json()["receipt"]["disposition"] == "duplicate"
        other = await server.post("alice", "other", idempotency_key="k1")
        assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_mismatch")
        assert len((await server.http.get("/v1/sessions/alice/runs")).json()["runs"]) == 1

    served(scenario)


def test_reject_meets_a_run_and_stores_nothing() -> None:
    async def scenario(server: Live) -> None:
        await server.begun("alice")
        refused = await server.post("alice", "x", policy="reject")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "busy")
        assert (await server.http.get("/v1/sessions/alice")).json()["waiting"] == 0

    served(scenario)


def test_a_full_mailbox_is_refused_with_a_time_to_come_back() -> None:
    async def scenario(server: Live) -> None:
        await server.begun("alice")
        assert [(await server.post("alice")).status_code for _ in range(2)] == [202, 202]
        refused = await server.post("alice")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "mailbox_full")
        assert int(refused.headers["retry-after"]) >= 1

    served(scenario, mailbox_limit=2)


def test_a_waiting_message_can_be_withdrawn_once_and_a_settled_one_not() -> None:
    async def scenario(server: Live) -> None:
        await server.begun("alice")
        waiting = (await server.post("alice")).json()["message_id"]
        items = (await server.http.get("/v1/sessions/alice/mailbox")).json()["items"]
        assert [item["message"]["message_id"] for item in items] == [waiting]
        for _ in range(2):
            withdrawn = await server.http.delete(f"/v1/sessions/alice/messages/{waiting}")
            assert (withdrawn.status_code, withdrawn.json()["state"]) == (200, "withdrawn")
        settled = (await server.post("bob", query="?wait=60")).json()["message_id"]
        refused = await server.http.delete(f"/v1/sessions/bob/messages/{settled}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "already_settled")

    served(scenario)


def test_an_interrupt_answers_with_a_receipt_and_the_next_message_runs() -> None:
    async def scenario(server: Live) -> None:
        receipt = await server.begun("alice")
        queued = (await server.post("alice", "next", agent="echo")).json()
        stopped = await server.http.post("/v1/sessions/alice/interrupt", json={"reason": "enough"})
        assert stopped.status_code == 200
        assert stopped.json()["outcome"] == "gone"
        assert stopped.json()["cause"]["reason"] == "enough"
        ended = (await server.http.get(f"/v1/sessions/alice/messages/{receipt['message_id']}?wait=60")).json()
        assert (ended["state"], ended["text"]) == ("interrupted", "waiting")
        after = (await server.http.get(f"/v1/sessions/alice/messages/{queued['message_id']}?wait=60")).json()
        assert after["state"] == "completed"

    served(scenario)


def test_an_interrupt_of_a_run_that_has_ended_does_not_hit_the_next() -> None:
    async def scenario(server: Live) -> None:
        old = (await server.post("alice", query="?wait=60")).json()["run_id"]
        new = await server.begun("alice")
        stopped = await server.http.post("/v1/sessions/alice/interrupt", json={"run_id": old})
        assert stopped.status_code == 200
        state = (await server.http.get(f"/v1/sessions/alice/runs/{new['run_id']}")).json()["state"]
        assert state == "running"

    served(scenario)


def test_an_interrupt_needs_no_body_but_a_json_content_type() -> None:
    async def scenario(server: Live) -> None:
        await server.begun("alice")
        assert (await server.http.post("/v1/sessions/alice/interrupt", headers=JSON)).status_code == 200
        refused = await server.http.post("/v1/sessions/alice/interrupt")
        assert refused.status_code == 415

    served(scenario)


def test_a_stop_that_takes_longer_than_its_wait_has_an_id_to_ask_for() -> None:
    release = asyncio.Event()

    async def slow_to_stop(run: Any) -> None:
        await run.emit("waiting")
        try:
            await run.interrupt.wait()
        finally:
            await release.wait()

    async def scenario(server: Live) -> None:
        receipt = (await server.post("alice", "go", agent="slow_to_stop")).json()
        async for event in server.host.session("alice").events(after=receipt["cursor"]):
            if event.kind == "text.delta":
                break
        pending = await server.http.post("/v1/sessions/alice/stop?wait=0.01", json={"reason": "enough"})
        assert pending.status_code == 202
        path = pending.headers["location"]
        assert path == f"/v1/sessions/alice/stops/{pending.json()['stop_id']}"
        elsewhere = await server.http.get(path.replace("alice", "bob"))
        assert elsewhere.json()["error"]["code"] == "unknown_stop"
        assert (await server.http.get(path)).status_code == 202
        release.set()
        while (done := await server.http.get(path)).status_code == 202:
            assert done.json()["stop_id"] == pending.json()["stop_id"]
        assert done.status_code == 200
        assert done.json()["receipt"]["outcome"] == "gone"

    served(scenario, echo, slow_to_stop, grace_s=20.0)


def test_a_stop_withdraws_what_waits_and_a_later_message_runs() -> None:
    async def scenario(server: Live) -> None:
        await server.begun("alice")
        waiting = (await server.post("alice", "wait for it")).json()["message_id"]
        stopped = (await server.http.post("/v1/sessions/alice/stop", json={})).json()
        assert [message["message_id"] for message in stopped["withdrawn"]] == [waiting]
        assert (await server.post("alice", "later", query="?wait=60", agent="echo")).json()["text"] == "echo later"

    served(scenario)


def test_a_deleted_session_answers_gone_and_its_stream_ends() -> None:
    async def scenario(server: Live) -> None:
        await server.begun("alice")
        async with server.http.stream("GET", "/v1/sessions/alice/events") as stream:
            deleted = await server.http.delete("/v1/sessions/alice")
            assert deleted.json()["receipt"]["outcome"] == "gone"
            text = (await stream.aread()).decode()
        assert text.rstrip().splitlines()[-2] == "event: session.deleted"
        refused = await server.post("alice")
        assert (refused.status_code, refused.json()["error"]["code"]) == (410, "session_deleted")

    served(scenario)


@pytest.mark.parametrize("key", ["ü nicode", "a.b-c_d~e", "100%", "?#&=+", "x" * 200])
def test_a_key_may_be_any_printable_text(key: str) -> None:
    async def scenario(server: Live) -> None:
        from urllib.parse import quote

        quoted = quote(key, safe="")
        assert (await server.post(quoted, query="?wait=60")).json()["receipt"]["session"] == key
        assert (await server.http.get(f"/v1/sessions/{quoted}")).json()["key"] == key

    served(scenario)


def test_lists_and_trees_show_what_is_alive() -> None:
    async def scenario(server: Live) -> None:
        receipt = await server.begun("alice")
        await server.post("bob", query="?wait=60")
        sessions = (await server.http.get("/v1/sessions")).json()["sessions"]
        assert {view["key"]: view["state"] for view in sessions} == {"alice": "running", "bob": "idle"}
        first = (await server.http.get("/v1/sessions?limit=1")).json()
        second = (await server.http.get("/v1/sessions", params={"limit": 1, "before": first["next"]})).json()
        last = (await server.http.get("/v1/sessions", params={"limit": 1, "before": second["next"]})).json()
        assert {page["sessions"][0]["key"] for page in (first, second)} == {"alice", "bob"}
        assert last == {"sessions": [], "next": None}
        tree = (await server.http.get("/v1/tree")).json()
        assert [child["name"] for child in tree["children"]] == ["alice"]
        below = (await server.http.get("/v1/sessions/alice/tree")).json()
        assert below["children"][0]["name"] == receipt["run_id"]
        assert (await server.http.get("/v1/sessions/alice/runs")).json()["runs"][0]["state"] == "running"

    served(scenario)


def test_every_json_answer_ends_its_line() -> None:
    """So that a terminal's prompt stands below what `curl` printed."""

    async def scenario(server: Live) -> None:
        large = "x" * 60_000
        for key in ("a", "b", "c"):
            for _ in range(8):
                await server.post(key, large, query="?wait=60")
        paths = [
            "/v1/sessions",
            "/v1/sessions/a",
            "/v1/sessions/none",
            "/v1/nothing",
            "/v1/sessions/a/transcript",
            "/v1/sessions/a/transcript?limit=1",
            "/v1/sessions/a/export",
            "/openapi.json",
            "/healthz",
        ]
        answers = [await server.http.get(path) for path in paths]
        answers += [await server.post("a", "hi"), await server.http.post("/v1/sessions/a/messages", content=b"{")]
        for answer in answers:
            body = answer.content
            assert (body[-1:], body[-2:-1]) == (b"\n", b"}"), answer.url
            assert answer.headers.get("content-length", str(len(body))) == str(len(body)), answer.url
            answer.json()

    served(scenario)
