"""Who may name which agent and see what of the host, and what becomes of a principal's work when its key is revoked."""

from __future__ import annotations

from typing import Any

import jwt
import pytest

from holdfast.errors import StoreFull
from holdfast.host import Session
from tests.server.live import Live, served
from tests.server.test_bad_input import refused
from tests.server.test_revocation import SECRET, bearer

AGENTS_NAMED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a send": ("POST", "/v1/sessions/s/messages", {"content": "hi", "agent": "counting"}),
    "a schedule": ("POST", "/v1/schedules", {"session": "s", "text": "hi", "every_s": 60, "agent": "counting"}),
}


async def key(server: Live, principal: str, role: Any = "user", agents: Any = None) -> dict[str, str]:
    return bearer((await server.app.keys.create(principal=principal, role=role, agents=agents))[1])


@pytest.mark.parametrize("what", AGENTS_NAMED)
def test_a_key_names_only_its_agents_and_others_do_not_exist_for_it(what: str) -> None:
    method, path, body = AGENTS_NAMED[what]

    async def scenario(server: Live) -> None:
        plain = await key(server, "alice")
        listed = await key(server, "bob", agents=["echo", "endless"])
        allowed = await key(server, "carol", agents=["counting"])
        for headers in (plain, listed):
            forbidden = await server.http.request(method, path, json=body, headers=headers)
            refused(forbidden, 404, "unknown_agent")
            unknown = await server.http.request(method, path, json={**body, "agent": "nonsense"}, headers=headers)
            assert forbidden.text.replace("counting", "nonsense") == unknown.text, "nothing tells that there is one"
            assert "counting" not in (await server.http.get("/v1/server", headers=headers)).text
        assert (await server.http.request(method, path, json=body, headers=allowed)).status_code in (201, 202)

    served(scenario, public_agents=())


def test_a_session_of_an_agent_that_the_key_may_not_name_does_not_answer_it() -> None:
    """It was made with another key of the same principal, or before the list was made shorter."""

    async def scenario(server: Live) -> None:
        await server.host.session("s", principal="alice").ask("2", agent="counting")
        headers = await key(server, "alice", agents=["echo"])
        send = await server.http.post("/v1/sessions/s/messages", json={"content": "3"}, headers=headers)
        refused(send, 404, "unknown_agent")
        for path, body in (("fork", {"key": "t"}), ("retry", {}), ("compact", {})):
            answer = await server.http.post(f"/v1/sessions/s/{path}", json=body, headers=headers)
            refused(answer, 404, "unknown_agent")
        export = (await server.http.get("/v1/sessions/s/export", headers=headers)).json()
        await server.http.post("/v1/sessions/new/import", json=export, headers=headers)
        assert (await server.host.session("new", principal="alice").info()).agent == "echo"
        schedule = {"session": "s", "text": "3", "every_s": 60}
        refused(await server.http.post("/v1/schedules", json=schedule, headers=headers), 404, "unknown_agent")
        again = {"content": "4", "agent": "echo"}
        assert (await server.http.post("/v1/sessions/s/messages", json=again, headers=headers)).status_code == 202

    served(scenario, public_agents=())


def test_tokens_list_agents_by_a_claim_and_admins_name_all() -> None:
    async def scenario(server: Live) -> None:
        def token(**more: Any) -> dict[str, str]:
            return bearer(jwt.encode({"sub": "alice", "exp": 4e9, **more}, SECRET))

        body = {"content": "1", "agent": "counting"}
        for headers, status in (
            (token(), 404),
            (token(holdfast_agents=["counting"]), 202),
            (token(holdfast_agents=[]), 404),
            (token(holdfast_agents="counting"), 401),
            (token(holdfast_role="admin"), 202),
        ):
            answer = await server.http.post("/v1/sessions/s/messages", json=body, headers=headers)
            assert answer.status_code == status, answer.text

    served(scenario, jwt_secret=SECRET, public_agents=())


def test_what_public_agents_lists_is_for_all_keys() -> None:
    async def scenario(server: Live) -> None:
        headers = await key(server, "alice")
        for agent, status in (("counting", 202), ("endless", 404)):
            body = {"content": "1", "agent": agent}
            answer = await server.http.post("/v1/sessions/s/messages", json=body, headers=headers)
            assert answer.status_code == status

    served(scenario, public_agents=("echo", "counting"))


# ── What others may not see ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_host_s_figures_are_for_admins() -> None:
    async def scenario(server: Live) -> None:
        user, admin = await key(server, "alice"), await key(server, "ops", "admin")
        refused(await server.http.get("/metrics", headers=user), 403, "forbidden")
        assert (await server.http.get("/metrics", headers=admin)).status_code == 200
        for headers, sees in ((user, False), (admin, True)):
            view = (await server.http.get("/v1/server", headers=headers)).json()
            assert (view["statistics"] is not None) == sees
            page = (await server.http.get("/", headers=headers)).text
            for word in ("pid ", "active runs", "sessions in memory", "P14"):
                assert (word in page) == sees, word

    served(scenario)


@pytest.mark.parametrize("claims", [{"sub": "local"}, {"aud": []}, {"aud": ""}, {"exp": 1.0}, {"exp": True}])
def test_a_token_is_not_local_nor_for_nobody_nor_over(claims: dict[str, Any]) -> None:
    async def scenario(server: Live) -> None:
        headers = bearer(jwt.encode({"sub": "alice", "exp": 4e9, **claims}, SECRET))
        refused(await server.http.get("/v1/sessions", headers=headers), 401, "unauthenticated")
        front = await key(server, "front", "trusted")
        as_local = {**front, "x-holdfast-user": "local"}
        refused(await server.http.get("/v1/sessions", headers=as_local), 403, "forbidden")

    served(scenario, jwt_secret=SECRET)


# ── The end of what a key began ──────────────────────────────────────────────────────────────────────────────────────


def test_a_revocation_names_what_goes_on_and_stop_ends_it() -> None:
    async def scenario(server: Live) -> None:
        ops = await key(server, "ops", "admin")
        record, secret = await server.app.keys.create(principal="alice", role="user")
        alice = bearer(secret)
        for name in ("one", "two"):
            body = {"content": "go", "agent": "endless"}
            await server.http.post(f"/v1/sessions/{name}/messages", json=body, headers=alice)
        schedule = {"session": "three", "text": "hi", "every_s": 60, "schedule_id": "often"}
        await server.http.post("/v1/schedules", json=schedule, headers=alice)
        await server.host.session("theirs", principal="bob").send("go", agent="endless")

        refused(await server.http.delete("/v1/keys/k_none?stop=true", headers=ops), 404, "unknown_key")
        told = (await server.http.delete(f"/v1/keys/{record.key_id}", headers=ops)).json()
        assert (sorted(told["running"]), told["active"]) == (["one", "two"], ["often"])
        assert (told["stopped"], told["paused"], told["principal"]) == ([], [], "alice")

        ended = (await server.http.delete(f"/v1/keys/{record.key_id}?stop=true", headers=ops)).json()
        assert (sorted(ended["stopped"]), ended["paused"]) == (["one", "two"], ["often"])
        assert (ended["running"], ended["active"]) == ([], [])
        assert {run.actor.principal for run in server.host.live.values()} == {"bob"}
        refused(await server.http.delete(f"/v1/keys/{record.key_id}", headers=ops), 404, "unknown_key")

    served(scenario)


def test_a_stop_that_fails_keeps_no_other_session_from_being_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Live) -> None:
        ops = await key(server, "ops", "admin")
        record, secret = await server.app.keys.create(principal="alice", role="user")
        for name in ("broken", "one", "two"):
            body = {"content": "go", "agent": "endless"}
            await server.http.post(f"/v1/sessions/{name}/messages", json=body, headers=bearer(secret))
        stop = Session.stop

        async def failing(session: Session, *given: Any, **named: Any) -> Any:
            if session.key == "broken":
                raise StoreFull("no room")
            return await stop(session, *given, **named)

        monkeypatch.setattr(Session, "stop", failing)
        ended = (await server.http.delete(f"/v1/keys/{record.key_id}?stop=true", headers=ops)).json()
        assert (sorted(ended["stopped"]), ended["running"]) == (["one", "two"], ["broken"])
        monkeypatch.setattr(Session, "stop", stop)

    served(scenario)
