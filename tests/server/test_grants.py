"""Grants over HTTP, from the client and on the page: who gives them, who sees them, who takes them back."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from holdfast import Agent, Client
from holdfast.agents.scripted import ScriptedModel
from holdfast.agents.tool import SessionIdentity, Tool, tool
from holdfast.errors import AlreadyAnswered, InvalidRequest, UnknownGrant
from holdfast.local_token import keep_token
from holdfast.protocol.access import AccessRequest, describe, read_access
from holdfast.protocol.messages import Access
from holdfast.protocol.model import CallPart, ToolMessage
from holdfast.tools.files.toolset import Files
from holdfast.tools.programs.python import Python
from tests.server.live import Live, echo, served
from tests.server.test_bad_input import refused

HOST = "api.example.org:443"
ACCESS = Access(hosts=(HOST,))


def reach_request(session: SessionIdentity, arguments: dict[str, Any]) -> AccessRequest:
    access = read_access({"hosts": arguments.get("hosts", [])})
    return AccessRequest(access=access, text=describe(access))


@tool(access=reach_request)
def reach(hosts: list[str]) -> str:
    """Reach hosts."""
    return f"reached {' and '.join(hosts)}"


@tool(approval=True)
def erase(name: str) -> str:
    """Erase something."""
    return f"{name} is erased"


def answer(request: Any) -> Any:
    last = request.messages[-1]
    if isinstance(last, ToolMessage):
        return last.content
    if last.content.startswith("erase"):
        return CallPart(name="erase", arguments={"name": "a"})
    return CallPart(name="reach", arguments={"hosts": last.content.split()})


def worker(*tools: Any) -> Agent:
    own: list[Tool] = [reach, erase]
    return Agent(name="worker", model=ScriptedModel(answer), tools=[*own, *tools])


async def ask(server: Live, text: str = HOST, *, key: str = "s", principal: str = "local") -> tuple[str, Any]:
    """Have a run ask for hosts; the message's id and the question."""
    session = server.host.session(key, principal=principal)
    message_id = (await session.send(text, agent="worker")).message_id
    while not (found := await session.questions()):
        await asyncio.sleep(0.01)
    return message_id, found[0]


async def bearer(server: Live, principal: str, role: Any = "user") -> dict[str, str]:
    return {"authorization": f"Bearer {(await server.app.keys.create(principal=principal, role=role))[1]}"}


async def decide(server: Live, question: Any, headers: dict[str, str] | None = None, **body: Any) -> Any:
    path = f"/v1/sessions/s/approvals/{question.question_id}"
    body = {"decision": "approve", "call_hash": question.call_hash, **body}
    return await server.http.post(path, json=body, headers=headers or {})


def test_a_grant_is_given_listed_used_and_revoked_with_the_client() -> None:
    async def scenario(server: Live) -> None:
        async with Client(server.url) as client:
            message_id, _ = await ask(server)
            session = client.session("s")
            [question] = await session.questions()
            assert question.access == ACCESS
            assert question.text == f"May reach be called and reach {HOST}?"
            given = await session.approve(question, scope="session")
            assert await session.approve(question, scope="session") == given, "the same again has no effect"
            with pytest.raises(AlreadyAnswered):
                await session.approve(question, scope="principal")
            assert (await server.host.session("s").wait(message_id)).text == f"reached {HOST}"
            assert await session.ask(HOST, agent="worker") == f"reached {HOST}", "nobody is asked again"
            [grant] = await client.grants()
            assert (grant.grant_id, grant.by, grant.via, grant.tool) == (given.grant_id, "local", "local", "reach")
            assert (grant.question_id, grant.call_hash) == (question.question_id, question.call_hash)
            assert await session.grants() == [grant]
            assert await client.grants(session="s") == [grant]
            await client.session("other").ask("hi", agent="echo")
            assert await client.session("other").grants() == []
            assert await client.revoke_grant(grant.grant_id) == grant
            with pytest.raises(UnknownGrant):
                await client.revoke_grant(grant.grant_id)
            await ask(server)
            await session.interrupt()

    served(scenario, echo, worker())


def test_only_what_was_asked_can_be_granted() -> None:
    async def scenario(server: Live) -> None:
        _, plain = await ask(server, "erase it")
        refused(await decide(server, plain, scope="session"), 422, "invalid_request")
        refused(await decide(server, plain, scope="everyone"), 422, "invalid_request")
        forged: dict[str, Any] = {
            "access": {"hosts": ["evil.example.org:443"]},
            "grant_id": "g_forged",
            "scope": "principal",
        }
        refused(await decide(server, plain, **forged), 422, "invalid_request")
        assert (await decide(server, plain)).status_code == 200
        assert await server.host.grants() == []
        with pytest.raises(InvalidRequest):
            await server.host.session("s").approve(plain, scope="everyone")  # type: ignore[arg-type]

    served(scenario, echo, worker())


def test_a_grant_is_its_principal_s_alone() -> None:
    async def scenario(server: Live) -> None:
        alice, bob = await bearer(server, "alice"), await bearer(server, "bob")
        _, question = await ask(server, principal="alice")
        refused(await decide(server, question, bob, scope="principal"), 404, "unknown_session")
        given = (await decide(server, question, alice, scope="principal")).json()
        mine = (await server.http.get("/v1/grants", headers=alice)).json()["grants"]
        assert [grant["grant_id"] for grant in mine] == [given["grant_id"]]
        assert (await server.http.get("/v1/grants", headers=bob)).json() == {"grants": []}
        refused(await server.http.get("/v1/grants?session=s", headers=bob), 404, "unknown_session")
        refused(await server.http.delete(f"/v1/grants/{given['grant_id']}", headers=bob), 404, "unknown_grant")
        assert len(await server.host.grants(principal="alice")) == 1
        assert (await server.http.delete(f"/v1/grants/{given['grant_id']}", headers=alice)).status_code == 200

    served(scenario, echo, worker())


@pytest.mark.parametrize("text", [" ".join(f"h{n}.example.org" for n in range(17)), "*", "a" * 300, "x.org:0", "1.2.3"])
def test_absurd_requests_are_refused_without_a_question(text: str) -> None:
    async def scenario(server: Live) -> None:
        if text == "1.2.3":  # a name like any other; where it leads is the proxy's decision
            await ask(server, text)
            return
        said = await server.host.session("s").ask(text, agent="worker", timeout_s=25)
        assert said.startswith("invalid arguments"), said

    served(scenario, echo, worker())


def test_a_grant_covers_no_more_than_it_says() -> None:
    async def scenario(server: Live) -> None:
        message_id, question = await ask(server)
        await server.host.session("s").approve(question, scope="session")
        await server.host.session("s").wait(message_id)
        for more in (f"{HOST} other.example.org", "api.example.org:80", "www.api.example.org", "example.org"):
            _, asked = await ask(server, more)
            assert asked.access.hosts != (HOST,)
            await server.host.session("s").interrupt()

    served(scenario, echo, worker())


def test_the_local_token_approves_nothing_where_tools_touch_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where programs cannot read it: who approves is a person."""
    kept: list[tuple[str, Path]] = []

    def keep(store: str) -> tuple[str, Path]:
        kept.append(keep_token(store))
        return kept[-1]

    monkeypatch.setattr("holdfast.server.lifecycle.keep_token", keep)

    async def scenario(server: Live) -> None:
        server.http.headers["authorization"] = f"Bearer {kept[-1][0]}"
        _, question = await ask(server)
        for key in ("", "hfa_" + "0" * 32):
            answered = await decide(server, question, scope="principal", approval_key=key)
            refused(answered, 403, "approval_key_required")
        for role in ("approver", "admin", "user"):
            made = await server.http.post("/v1/keys", json={"principal": "local", "role": role})
            refused(made, 403, "approval_key_required")
        assert await server.host.grants() == []
        given = await decide(server, question, scope="session", approval_key=server.app.keys.show_approver())
        assert given.status_code == 200
        [grant] = await server.host.grants()
        assert grant.approval_key == "shown by serve"

    served(scenario, echo, worker(Files()))


def test_where_programs_run_no_stored_key_grants_anything_walled_or_not() -> None:
    async def scenario(server: Live) -> None:
        admin = await bearer(server, "local", "admin")
        _, question = await ask(server)
        refused(await decide(server, question, admin, scope="principal"), 403, "approval_key_required")
        assert await server.host.grants() == []

    served(scenario, echo, worker(Python()))


def test_the_page_lets_a_person_choose_what_an_access_holds_for() -> None:
    async def scenario(server: Live) -> None:
        message_id, question = await ask(server)
        html = (await server.http.get("/")).text
        assert f"<li>reach <code>{HOST}</code></li>" in html
        assert re.findall(r'<option value="(\w+)">', html) == ["call", "session", "principal"]
        form = {"session": "s", "question": question.question_id, "decision": "approve", "scope": "session"}
        form["call_hash"] = question.call_hash
        done = await server.http.post("/", data=form, headers={"origin": server.url})
        assert done.status_code == 303
        assert [grant.scope for grant in await server.host.grants()] == ["session"]
        await server.host.session("s").wait(message_id)
        await ask(server, "erase it", key="plain")
        assert "<option" not in (await server.http.get("/")).text, "without access there is nothing to choose"

    served(scenario, echo, worker())


def test_the_page_says_precisely_what_a_call_asks_for() -> None:
    access = Access(
        read=("/srv/manuals",),
        write=("/srv/notes & <b>more</b>",),
        hosts=("api.example.org:443",),
        secrets=("TOKEN",),
    )

    def ask_for_all(session: SessionIdentity, arguments: dict[str, Any]) -> AccessRequest:
        return AccessRequest(access=access, text=f"{describe(access)} (the command is not known to be harmless)")

    @tool(access=ask_for_all)
    def act(command: str) -> str:
        """Act."""
        return command

    model = ScriptedModel([CallPart(name="act", arguments={"command": "make publish"}), "done"])

    async def scenario(server: Live) -> None:
        await server.host.session("s").send("go", agent="actor")
        while not await server.host.session("s").questions():
            await asyncio.sleep(0.01)
        for path in ("/", "/sessions/s"):
            html = (await server.http.get(path)).text
            assert re.findall(r"<li>(.*?)</li>", html)[:4] == [
                "read <code>/srv/manuals</code>",
                "write to <code>/srv/notes &amp; &lt;b&gt;more&lt;/b&gt;</code>, which this session did not make",
                "reach <code>api.example.org:443</code>",
                "get the secret <code>TOKEN</code>",
            ]
            assert "Note: the command is not known to be harmless." in html
            assert "make publish" in html

    served(scenario, echo, Agent(name="actor", model=model, tools=[act]))


def test_the_page_lists_grants_and_revokes_only_the_readers_own() -> None:
    async def scenario(server: Live) -> None:
        _, question = await ask(server, principal="alice")
        await server.host.session("s", principal="alice").approve(question, scope="principal")
        [of_alice] = await server.host.grants(principal="alice")
        message_id, question = await ask(server)
        await server.host.session("s").approve(question, scope="session")
        await server.host.session("s").wait(message_id)
        [mine] = await server.host.grants()

        html = (await server.http.get("/")).text
        assert f"<li>reach <code>{HOST}</code></li>" in html and "session s</td>" in html
        assert mine.grant_id in html and of_alice.grant_id not in html
        headers = {"origin": server.url}
        form = {"action": "revoke", "grant": of_alice.grant_id}
        refused_one = await server.http.post("/", data=form, headers=headers)
        assert "no such grant" in refused_one.text
        assert (await server.http.post("/", data={**form, "grant": mine.grant_id})).status_code == 403
        assert len(await server.host.grants()) == len(await server.host.grants(principal="alice")) == 1
        done = await server.http.post("/", data={**form, "grant": mine.grant_id}, headers=headers)
        assert done.status_code == 303
        assert await server.host.grants() == []
        assert "<h2>Grants</h2>" not in (await server.http.get("/")).text

    served(scenario, echo, worker())
