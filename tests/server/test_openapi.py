"""The OpenAPI document is valid, lists every route, and the routes answer as it says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import jsonschema  # type: ignore[import-untyped]
from openapi_spec_validator import validate

from holdfast import Agent
from holdfast.agents.scripted import ScriptedModel
from holdfast.protocol.events import RunSuspended
from holdfast.server.openapi import document
from holdfast.server.routes import PAGE_ROUTES, ROUTES
from tests.server.live import AGENTS, JSON, Live, served
from tests.server.test_grants import ask, worker

Ask = Callable[[Live], Awaitable[httpx2.Response]]
BODIES: dict[str, dict[str, Any]] = {
    "messages": {"content": "x"},
    "fork": {"key": "other"},
    "import": {"key": "x", "agent": "echo"},
    "approvals/{question_id}": {"decision": "approve"},
}
"""What the operations take that take more than nothing."""


def test_the_document_is_valid_and_lists_every_operation() -> None:
    made = document(ROUTES)
    validate(made)
    listed = {(method.upper(), path) for path, item in made["paths"].items() for method in item}
    assert listed == {(route.method, route.path) for route in ROUTES}
    assert len(listed) == len(ROUTES)
    for route in ROUTES:
        assert route.doc, f"{route.name} has no description"


def test_every_operation_is_known_to_the_dispatch() -> None:
    async def scenario(server: Live) -> None:
        found: set[tuple[str, str]] = set()

        def walk(node: Any) -> None:
            found.update((route.method, route.path) for route in node.methods.values())
            for child in [*node.children.values(), node.any_child]:
                if child is not None:
                    walk(child)

        walk(server.app._routes._root)
        shell = {(route.method, route.path) for route in PAGE_ROUTES}
        assert found | shell == {(route.method, route.path) for route in ROUTES}
        served_document = (await server.http.get("/openapi.json")).json()
        assert served_document == json.loads(json.dumps(document(ROUTES)))

    served(scenario)


def test_every_operation_answers_as_the_document_says() -> None:
    release = asyncio.Event()

    async def slow(run: Any) -> None:
        await run.emit("waiting")
        try:
            await run.interrupt.wait()
        finally:
            await release.wait()

    async def asker(run: Any) -> str:
        return str((await run.ask_user("which colour?")).text)

    async def scenario(server: Live) -> None:
        made = (await server.http.get("/openapi.json")).json()
        covered: set[tuple[str, str, int]] = set()

        async def check(method: str, path: str, status: int, answer: httpx2.Response) -> Any:
            assert answer.status_code == status, answer.text
            spec = made["paths"][path][method.lower()]["responses"][str(status)]["content"]
            media_type = answer.headers["content-type"].partition(";")[0]
            assert media_type in spec or "*/*" in spec
            covered.add((method, path, status))
            if media_type != "application/json":
                return answer.content
            schema = {**spec[media_type]["schema"], "components": made["components"]}
            body = answer.json()
            if schema.get("type") != "string":
                jsonschema.validate(body, schema, cls=jsonschema.Draft202012Validator)
            return body

        http = server.http
        base, one = "/v1/sessions", "/v1/sessions/{key}"
        messages, message = f"{one}/messages", f"{one}/messages/{{message_id}}"
        receipt = await check("POST", messages, 202, await server.post("alice", "go", agent="slow"))
        async for event in server.host.session("alice").events(after=receipt["cursor"]):
            if event.kind == "text.delta":
                break
        waiting = await check("POST", messages, 202, await server.post("alice"))
        await check("GET", base, 200, await http.get(base))
        await check("GET", one, 200, await http.get(f"{base}/alice"))
        for part in ("transcript", "mailbox", "tree", "runs"):
            await check("GET", f"{one}/{part}", 200, await http.get(f"{base}/alice/{part}"))
        await check("GET", f"{one}/runs/{{run_id}}", 200, await http.get(f"{base}/alice/runs/{receipt['run_id']}"))
        await check("GET", message, 200, await http.get(f"{base}/alice/messages/{waiting['message_id']}"))
        await check("DELETE", message, 200, await http.delete(f"{base}/alice/messages/{waiting['message_id']}"))
        path = f"{base}/alice/interrupt?wait=0.01"
        pending = await check("POST", f"{one}/interrupt", 202, await http.post(path, json={"grace_s": 20}))
        stop = f"{base}/alice/stops/{pending['stop_id']}"
        await check("GET", f"{one}/stops/{{stop_id}}", 202, await http.get(stop))
        release.set()
        while (done := await http.get(stop)).status_code == 202:
            pass
        await check("GET", f"{one}/stops/{{stop_id}}", 200, done)
        await check("POST", f"{one}/interrupt", 200, await http.post(f"{base}/alice/interrupt", json={}))
        for action, method in (("stop", "POST"), ("", "DELETE")):
            started = (await server.post("alice", "go", agent="slow")).json()
            async for event in server.host.session("alice").events(after=started["cursor"]):
                if event.kind == "text.delta":
                    break
            where = f"{one}/{action}".rstrip("/")
            path = f"{base}/alice/{action}".rstrip("/")
            if method == "POST":
                release.clear()
                await check(method, where, 202, await http.post(f"{path}?wait=0.01", json={"grace_s": 20}))
                release.set()
                await check(method, where, 200, await http.post(path, json={}))
            else:
                await check(method, where, 200, await http.delete(path))
        await check("POST", messages, 200, await server.post("bob", query="?wait=60", agent="echo"))
        followed = (await server.post("bob", agent="echo")).json()
        events = f"{base}/bob/events?follow={followed['message_id']}"
        await check("GET", f"{one}/events", 200, await http.get(events))
        exported = await check("GET", f"{one}/export", 200, await http.get(f"{base}/bob/export"))
        await check("POST", f"{one}/import", 201, await http.post(f"{base}/carl/import", json=exported))
        await check("POST", f"{one}/fork", 201, await http.post(f"{base}/bob/fork", json={"key": "dora"}))
        retried = await check("POST", f"{one}/retry", 202, await http.post(f"{base}/bob/retry", headers=JSON))
        await server.host.session("bob").wait(retried["message_id"])
        await check("POST", f"{one}/undo", 200, await http.post(f"{base}/bob/undo", headers=JSON))
        await server.host.session("erna").ask("hi", agent="writer")
        await check("POST", f"{one}/compact", 200, await http.post(f"{base}/erna/compact", json={"keep": 0}))
        started = (await server.post("fred", agent="asker")).json()
        async for event in server.host.session("fred").events(after=started["cursor"]):
            if event.kind == "run.suspended":
                break
        open_ = await check("GET", f"{one}/approvals", 200, await http.get(f"{base}/fred/approvals"))
        path = f"{base}/fred/approvals/{open_['questions'][0]['question_id']}"
        form = {"session": "fred", "question": "none", "decision": "answer", "text": "x"}
        origin = {"origin": server.url}
        await check("POST", "/", 200, await http.post("/", data=form, headers=origin))
        given = await http.post(path, json={"decision": "answer", "text": "blue"})
        await check("POST", f"{one}/approvals/{{question_id}}", 200, given)
        started = (await server.post("gina", agent="asker")).json()
        async for event in server.host.session("gina").events(after=started["cursor"]):
            if isinstance(event, RunSuspended):
                form.update(session="gina", question=event.question.question_id)
                break
        answered = await http.post("/", data=form, headers=origin)
        assert answered.status_code == 303 and answered.headers["location"] == "/"
        await ask(server, key="hugo")
        question = (await server.host.session("hugo").questions())[0]
        granted = await server.host.session("hugo").approve(question, scope="session")
        await check("GET", "/v1/grants", 200, await http.get("/v1/grants?session=hugo"))
        revoked = await http.delete(f"/v1/grants/{granted.grant_id}")
        await check("DELETE", "/v1/grants/{grant_id}", 200, revoked)
        uploaded = await http.post("/v1/attachments?name=a.png", content=b"png", headers={"content-type": "image/png"})
        kept = await check("POST", "/v1/attachments", 201, uploaded)
        found = await http.get(f"/v1/attachments/{kept['digest']}")
        assert await check("GET", "/v1/attachments/{digest}", 200, found) == b"png"
        timed = {"session": "bob", "text": "tick", "every_s": 3600, "schedule_id": "hourly"}
        schedules, schedule = "/v1/schedules", "/v1/schedules/{schedule_id}"
        await check("POST", schedules, 201, await http.post(schedules, json=timed))
        await check("GET", schedules, 200, await http.get(f"{schedules}?session=bob"))
        await check("PATCH", schedule, 200, await http.patch(f"{schedules}/hourly", json={"paused": True}))
        await check("POST", f"{schedule}/run", 202, await http.post(f"{schedules}/hourly/run", headers=JSON))
        await check("GET", schedule, 200, await http.get(f"{schedules}/hourly"))
        await check("DELETE", schedule, 200, await http.delete(f"{schedules}/hourly"))
        await check("GET", "/v1/tree", 200, await http.get("/v1/tree"))
        await check("GET", "/v1/server", 200, await http.get("/v1/server"))
        await check("GET", "/sessions/{key}", 200, await http.get("/sessions/bob"))
        for page in ("/", "/healthz", "/readyz", "/metrics", "/openapi.json"):
            await check("GET", page, 200, await http.get(page))
        created = await check(
            "POST", "/v1/keys", 201, await http.post("/v1/keys", json={"principal": "x", "role": "admin"})
        )
        http.headers["authorization"] = f"Bearer {created['secret']}"
        await check("GET", "/v1/keys", 200, await http.get("/v1/keys"))
        other = (await http.post("/v1/keys", json={"principal": "y"})).json()["key"]["key_id"]
        await check("DELETE", "/v1/keys/{key_id}", 200, await http.delete(f"/v1/keys/{other}"))
        await check("POST", "/v1/drain", 200, await http.post("/v1/drain", headers=JSON))
        await check("GET", "/readyz", 503, await http.get("/readyz"))
        refusal = await server.post("bob")
        await check("POST", messages, 503, refusal)
        everything = {(o.method, o.path, status) for o in ROUTES for status in o.responses}
        assert everything - covered == {
            ("DELETE", one, 202),  # it takes no wait, and nothing here stops slowly enough
            ("POST", "/", 303),  # it has no body
        }
        await server.end()

    served(scenario, *AGENTS, slow, asker, worker(), Agent(name="writer", model=ScriptedModel("a summary")))


def test_a_deleted_session_is_documented_wherever_it_is_refused() -> None:
    async def scenario(server: Live) -> None:
        await server.post("gone")
        assert (await server.http.delete("/v1/sessions/gone")).status_code == 200
        paths = (await server.http.get("/openapi.json")).json()["paths"]
        for path, methods in paths.items():
            if "{key}" not in path:
                continue
            for method, operation in methods.items():
                where = path.replace("{key}", "gone").replace("{message_id}", "m").replace("{run_id}", "r")
                body = None if method != "post" else BODIES.get(path.rpartition("{key}/")[2], {})
                where = where.replace("{stop_id}", "s").replace("{question_id}", "q")
                answer = await server.http.request(method, where, json=body)
                assert str(answer.status_code) in operation["responses"], (method, path, answer.status_code)
        for method, path in (("delete", "messages/{message_id}"), ("get", "stops/{stop_id}")):
            assert "410" in paths["/v1/sessions/{key}/" + path][method]["responses"]

    served(scenario)


def test_the_document_says_what_fits_a_parameter() -> None:
    async def scenario(server: Live) -> None:
        paths = (await server.http.get("/openapi.json")).json()["paths"]
        found = {one["name"]: one["schema"] for one in paths["/v1/sessions"]["get"]["parameters"]}
        assert found["limit"] == {"type": "integer", "minimum": 1, "maximum": 1000}
        found = {one["name"]: one["schema"] for one in paths["/v1/sessions/{key}/messages"]["post"]["parameters"]}
        assert found["wait"]["minimum"] == 0
        assert found["key"]["minLength"] == 1
        assert found["key"]["maxLength"] == 200
        stream = paths["/v1/sessions/{key}/events"]["get"]["responses"]["200"]["content"]
        assert stream == {"text/event-stream": {}}, "its frames are described in words: a string is what they are not"

    served(scenario)
