"""A deleted session over HTTP: every address of it answers 410, at once, and tells nothing of its contents."""

from __future__ import annotations

from tests.server.live import Live, served

SECRET = "xylophone"


def test_every_address_of_a_deleted_session_answers_gone() -> None:
    async def scenario(server: Live) -> None:
        sent = await server.post("alice", SECRET, query="?wait=10", agent="echo")
        outcome = sent.json()
        assert SECRET in outcome["text"]
        session = "/v1/sessions/alice"
        paths = [
            "",
            "/transcript",
            "/export",
            "/runs",
            f"/runs/{outcome['run_id']}",
            "/events",
            f"/events?after={outcome['receipt']['cursor']}",
            "/mailbox",
            "/tree",
            "/approvals",
            f"/messages/{outcome['message_id']}",
        ]
        for path in paths:
            if not path.startswith("/events"):
                assert (await server.http.get(session + path)).status_code == 200, path
        assert (await server.http.delete(session)).status_code == 200
        for path in paths:
            answer = await server.http.get(session + path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (410, "session_deleted"), path
            assert SECRET not in answer.text
        for path in ("/undo", "/retry", "/compact", "/interrupt", "/stop"):
            assert (await server.http.post(session + path, json={})).status_code == 410, path
        assert (await server.http.get("/v1/sessions/bob/transcript")).status_code == 404

    served(scenario)
