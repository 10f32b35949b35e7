"""An approval is for the call that was shown, by who gave it, and never by a credential that an agent could read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast import Agent, Client, tool
from holdfast.agents.scripted import ScriptedModel
from holdfast.errors import ApprovalKeyRequired, CallMismatch, InvalidRequest
from holdfast.protocol.events import RunResumed
from holdfast.protocol.model import CallPart
from holdfast.tools.programs.terminal import Terminal
from tests.server.live import Live, echo, served
from tests.server.test_bad_input import refused

CALL_A = CallPart(name="erase", arguments={"name": "a"})
CALL_B = CallPart(name="erase", arguments={"name": "b"})


@tool(approval=True)
def erase(name: str) -> str:
    """Erase something."""
    return f"{name} is erased"


def eraser(*names: str) -> Agent:
    """Erase these, one run after the other."""
    script: list[Any] = []
    for name in names or ("a",):
        script += [CallPart(name="erase", arguments={"name": name}), "done"]
    return Agent(name="eraser", model=ScriptedModel(script), tools=[erase])


def walled() -> Agent:
    """Has tools that run programs with the rights of this user, so it could read any credential."""
    script: list[Any] = [CALL_A, "done"]
    return Agent(name="eraser", model=ScriptedModel(script), tools=[erase, Terminal()])


async def asked(server: Live, principal: str = "local", key: str = "s") -> dict[str, Any]:
    """Start a run that asks, and return its question as HTTP shows it."""
    session = server.host.session(key, principal=principal)
    await session.send("go", agent="eraser")
    while not (found := await session.questions()):
        await asyncio.sleep(0.01)
    headers = {} if principal == "local" else {"x-holdfast-user": principal}
    listed = await server.http.get(f"/v1/sessions/{key}/approvals", headers=headers)
    question: dict[str, Any] = (listed.json().get("questions") or [{}])[0]
    return question or {"question_id": found[0].question_id, "call_hash": found[0].call_hash}


async def decide(server: Live, question: dict[str, Any], headers: dict[str, str] | None = None, **body: Any) -> Any:
    path = f"/v1/sessions/s/approvals/{question['question_id']}"
    return await server.http.post(path, json={"decision": "approve", **body}, headers=headers or {})


async def result(server: Live, principal: str = "local") -> list[str]:
    """What the calls of the session came to, once it is idle."""
    session = server.host.session("s", principal=principal)
    while (await session.info()).state != "idle":
        await asyncio.sleep(0.01)
    return [entry.content for entry in await session.transcript() if entry.role == "tool_result"]


# ── The call that was shown ──────────────────────────────────────────────────────────────────────────────────────────


def test_an_approval_names_the_call_that_was_shown() -> None:
    async def scenario(server: Live) -> None:
        question = await asked(server)
        assert len(question["call_hash"]) == 32
        refused(await decide(server, question), 422, "invalid_request")
        refused(await decide(server, question, call_hash="0" * 32), 409, "call_mismatch")
        assert await server.host.session("s").questions(), "it is still open"
        given = await decide(server, question, call_hash=question["call_hash"])
        assert given.status_code == 200
        assert given.json()["call_hash"] == question["call_hash"]
        assert await result(server) == ["a is erased"]

    served(scenario, echo, eraser())


def test_a_question_that_took_the_place_of_another_is_not_approved_by_its_hash() -> None:
    """The run that asked is interrupted; the next one asks for something else."""

    async def scenario(server: Live) -> None:
        session = server.host.session("s")
        shown = await asked(server)
        await session.interrupt()
        now = await asked(server)
        assert now["call_hash"] != shown["call_hash"]
        refused(await decide(server, now, call_hash=shown["call_hash"]), 409, "call_mismatch")
        [question] = await session.questions()
        assert question.arguments == {"name": "b"}

    calls = iter((CALL_A, CALL_B))
    served(scenario, echo, Agent(name="eraser", model=ScriptedModel(lambda request: next(calls)), tools=[erase]))


def test_python_takes_the_question_itself_here_and_over_http() -> None:
    async def scenario(server: Live) -> None:
        await asked(server)
        async with Client(server.url) as client:
            for session in (server.host.session("s"), client.session("s")):
                [question] = await session.questions()
                with pytest.raises(InvalidRequest, match="not bound to a call"):
                    await session.approve(question.question_id)
                with pytest.raises(CallMismatch):
                    await session.approve(question.question_id, call_hash="0" * 32)
            await client.session("s").approve(question)
        assert await result(server) == ["a is erased"]

    served(scenario, echo, eraser())


# ── Who gave it ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_answer_is_by_who_gave_it_also_for_somebody_else() -> None:
    async def scenario(server: Live) -> None:
        record, secret = await server.app.keys.create(principal="front", role="trusted")
        question = await asked(server, "alice")
        headers = {"authorization": f"Bearer {secret}", "x-holdfast-user": "alice"}
        given = (await decide(server, question, headers, call_hash=question["call_hash"])).json()
        assert (given["by"], given["on_behalf_of"], given["via"]) == ("front", "alice", record.key_id)
        async for event in server.host.session("s", principal="alice").events():
            if isinstance(event, RunResumed):
                assert (event.answer.by, event.answer.on_behalf_of) == ("front", "alice")
                break
        record, own = await server.app.keys.create(principal="bob", role="user")
        question = await asked(server, "bob")
        given = (await decide(server, question, {"authorization": f"Bearer {own}"}, decision="deny")).json()
        assert (given["by"], given.get("on_behalf_of", ""), given["via"]) == ("bob", "", record.key_id)

    served(scenario, echo, eraser("a", "b"))


def test_an_answer_of_code_in_this_process_says_so() -> None:
    async def scenario(server: Live) -> None:
        await asked(server)
        [question] = await server.host.session("s").questions()
        given = await server.host.session("s").approve(question)
        assert (given.by, given.via, given.on_behalf_of) == ("local", "host", "")

    served(scenario, echo, eraser())


# ── No stored credential approves ────────────────────────────────────────────────────────────────────────────────────


def test_what_an_agent_could_read_approves_nothing() -> None:
    """H8: it reads the local token, or the key in its environment, and answers its own question."""

    async def scenario(server: Live) -> None:
        keys = server.app.keys
        _, admin = await keys.create(principal="local", role="admin")
        question = await asked_with(server, admin)
        for secret in (admin, (await keys.create(principal="local", role="user"))[1]):
            headers = {"authorization": f"Bearer {secret}"}
            for key in ({}, {"approval_key": ""}, {"approval_key": secret}, {"approval_key": "hfa_" + "0" * 32}):
                answer = await decide(server, question, headers, call_hash=question["call_hash"], **key)
                refused(answer, 403, "approval_key_required")
            made = await server.http.post("/v1/keys", json={"principal": "local", "role": "approver"}, headers=headers)
            assert made.status_code == 403, "it cannot make one for itself either"
        shown = keys.show_approver()
        made_up = await decide(
            server, question, headers, call_hash=question["call_hash"], approval_key=f"{shown[:-1]}{shown[-1] == '0':d}"
        )
        refused(made_up, 403, "approval_key_required")
        denied = {"authorization": f"Bearer {shown}"}
        assert (await server.http.get("/v1/sessions", headers=denied)).status_code == 401, "it opens nothing"
        given = await decide(server, question, headers, call_hash=question["call_hash"], approval_key=shown)
        assert given.status_code == 200
        assert given.json()["approval_key"] == "shown by serve"
        assert await result(server) == ["a is erased"]

    served(scenario, echo, walled())


async def asked_with(server: Live, secret: str) -> dict[str, Any]:
    session = server.host.session("s")
    await session.send("go", agent="eraser")
    while not await session.questions():
        await asyncio.sleep(0.01)
    headers = {"authorization": f"Bearer {secret}"}
    listed = await server.http.get("/v1/sessions/s/approvals", headers=headers)
    question: dict[str, Any] = listed.json()["questions"][0]
    return question


def test_an_approval_key_is_for_the_calls_of_its_principal_only() -> None:
    async def scenario(server: Live) -> None:
        keys = server.app.keys
        record, hers = await keys.create(principal="alice", role="approver")
        _, his = await keys.create(principal="bob", role="approver")
        assert (await server.http.get("/v1/sessions")).status_code != 200 or not keys.ever
        question = await asked(server, "alice")
        as_alice = {"authorization": f"Bearer {(await keys.create(principal='alice', role='user'))[1]}"}
        sent = {"call_hash": question["call_hash"]}
        with_it = {"authorization": f"Bearer {hers}"}
        assert (await server.http.get("/v1/sessions", headers=with_it)).status_code == 401, "it is for approvals only"
        refused(await decide(server, question, as_alice, **sent, approval_key=his), 403, "approval_key_required")
        given = await decide(server, question, as_alice, **sent, approval_key=hers)
        assert given.json()["approval_key"] == record.key_id

    served(scenario, echo, walled())


def test_a_revoked_approval_key_approves_nothing() -> None:
    async def scenario(server: Live) -> None:
        keys = server.app.keys
        record, hers = await keys.create(principal="alice", role="approver")
        question = await asked(server, "alice")
        _, secret = await keys.create(principal="alice", role="user")
        await keys.revoke(record.key_id)
        as_alice = {"authorization": f"Bearer {secret}"}
        answer = await decide(server, question, as_alice, call_hash=question["call_hash"], approval_key=hers)
        refused(answer, 403, "approval_key_required")

    served(scenario, echo, walled())


def test_who_guesses_approval_keys_is_told_to_the_operator_and_soon_answered_no_more() -> None:
    async def scenario(server: Live) -> None:
        keys = server.app.keys
        _, right = await keys.create(principal="alice", role="approver")
        question = await asked(server, "alice")
        as_alice = {"authorization": f"Bearer {(await keys.create(principal='alice', role='user'))[1]}"}
        sent = {"call_hash": question["call_hash"]}
        for _ in range(9):
            refused(await decide(server, question, as_alice, **sent), 403, "approval_key_required")
        for number in range(10):
            guess = await decide(server, question, as_alice, **sent, approval_key=f"hfa_{number}")
            refused(guess, 403, "approval_key_required")
        for guessed in ("hfa_x", right):
            answer = await decide(server, question, as_alice, **sent, approval_key=guessed)
            refused(answer, 429, "rate_limited")
            assert int(answer.headers["retry-after"]) <= 12
        told = [incident.text for incident in server.host.incidents.newest if "approval key" in incident.text]
        assert told == ["alice: tried a wrong approval key"], "once a minute"
        assert len(await server.host.session("s", principal="alice").questions()) == 1
        _, front = await keys.create(principal="front", role="trusted")
        as_front = {"authorization": f"Bearer {front}", "x-holdfast-user": "alice"}
        given = await decide(server, question, as_front, **sent, approval_key=right)
        assert given.status_code == 200, "another credential is not held up by the guesses of this one"

    served(scenario, echo, walled())


def test_the_client_sends_what_a_person_typed() -> None:
    async def scenario(server: Live) -> None:
        _, secret = await server.app.keys.create(principal="local", role="admin")
        await asked_with(server, secret)
        async with Client(server.url, secret) as client:
            [question] = await client.session("s").questions()
            with pytest.raises(ApprovalKeyRequired):
                await client.session("s").approve(question)
            client.approval_key = server.app.keys.show_approver()
            await client.session("s").approve(question)

    served(scenario, echo, walled())


def test_denials_answers_and_hosts_without_such_tools_need_none() -> None:
    async def scenario(server: Live) -> None:
        _, secret = await server.app.keys.create(principal="local", role="admin")
        question = await asked_with(server, secret)
        denied = await decide(server, question, {"authorization": f"Bearer {secret}"}, decision="deny")
        assert denied.status_code == 200

    served(scenario, echo, walled())


def test_the_page_asks_for_the_approval_key_and_shows_all_of_the_call() -> None:
    long = "x" * 10_000 + "\u202e; rm -rf /"

    async def scenario(server: Live) -> None:
        keys = server.app.keys
        _, secret = await keys.create(principal="local", role="admin")
        question = await asked_with(server, secret)
        auth = ("any", secret)
        text = (await server.http.get("/", auth=auth)).text
        assert "rm -rf /" in text and "\u202e" not in text and 'type="password"' in text
        form = {"session": "s", "question": question["question_id"], "decision": "approve"}
        form["call_hash"] = question["call_hash"]
        answer = await server.http.post("/", data=form, headers={"origin": server.url}, auth=auth)
        assert "approval key" in answer.text
        form["approval_key"] = keys.show_approver()
        answer = await server.http.post("/", data=form, headers={"origin": server.url}, auth=auth)
        assert answer.status_code == 303

    script: list[Any] = [CallPart(name="erase", arguments={"name": long}), "done"]
    served(scenario, echo, Agent(name="eraser", model=ScriptedModel(script), tools=[erase, Terminal()]))
