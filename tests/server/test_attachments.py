"""Attachments over HTTP: bounded by their own limit, and nothing that a browser would run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.server.live import Live, served

LIMIT = {"attachment_limit_bytes": 3_000_000, "body_limit_bytes": 10_000}


def test_a_large_attachment_is_taken_where_a_large_body_is_not() -> None:
    body = bytes(range(256)) * 10_000

    async def scenario(server: Live) -> None:
        answer = await server.http.post("/v1/attachments", content=body, headers={"content-type": "audio/wav"})
        assert answer.status_code == 201, answer.text
        kept = answer.json()
        assert (kept["media_type"], kept["size_bytes"]) == ("audio/wav", len(body))
        assert (await server.http.get(f"/v1/attachments/{kept['digest']}")).content == body
        refused = await server.post("s", "x" * 20_000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")

    served(scenario, **LIMIT)


@pytest.mark.parametrize("chunked", [False, True])
def test_an_attachment_over_its_limit_is_refused_as_it_comes_in(chunked: bool) -> None:
    async def scenario(server: Live) -> None:
        async def pieces() -> object:
            for _ in range(40):
                yield b"x" * 100_000

        content = pieces() if chunked else b"x" * 4_000_000
        answer = await server.http.post("/v1/attachments", content=content, headers={"content-type": "text/plain"})  # type: ignore[arg-type]
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")

    served(scenario, **LIMIT)


def test_a_browser_saves_what_it_gets_and_runs_nothing_of_it() -> None:
    async def scenario(server: Live) -> None:
        html = b"<script>alert(1)</script>"
        headers = {"content-type": "text/html; charset=utf-8"}
        kept = (await server.http.post("/v1/attachments?name=a%22%0Ab.html", content=html, headers=headers)).json()
        assert kept["error"]["code"] == "invalid_request", "a line break is in no file name"
        kept = (await server.http.post("/v1/attachments?name=a%22;%C3%A9.html", content=html, headers=headers)).json()
        answer = await server.http.get(f"/v1/attachments/{kept['digest']}")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''a%22%3B%C3%A9.html"
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert "sandbox" in answer.headers["content-security-policy"]

    served(scenario)


def test_an_attachment_belongs_to_its_principal() -> None:
    async def scenario(server: Live) -> None:
        kept = (await server.http.post("/v1/attachments", content=b"secret", headers={"content-type": "a/b"})).json()
        path = f"/v1/attachments/{kept['digest']}"
        other = {"x-holdfast-user": "mallory"}
        assert (await server.http.get(path, headers=other)).status_code == 404
        named = {"content": "x", "attachments": [kept["digest"]]}
        assert (await server.http.post("/v1/sessions/s/messages", json=named, headers=other)).status_code == 404
        sent = await server.http.post("/v1/sessions/s/messages?wait=60", json=named)
        assert sent.json()["status"] == "completed"
        entry = (await server.http.get("/v1/sessions/s/transcript")).json()["entries"][0]
        assert entry["attachments"] == [kept], "a digest alone is filled in"

    served(scenario)


def test_large_bodies_under_way_are_bounded_in_bytes_and_others_have_their_own() -> None:
    async def scenario(server: Live) -> None:
        go_on = asyncio.Event()
        large = b"x" * 200_000

        async def slow(first: bytes) -> AsyncIterator[bytes]:
            yield first
            await go_on.wait()
            yield large

        headers = {"content-type": "a/b", "content-length": str(1 + len(large))}
        memory = server.app.host.budgets.memory
        async with asyncio.TaskGroup() as group:
            uploads = [
                group.create_task(server.http.post("/v1/attachments", content=slow(bytes([n])), headers=headers))
                for n in range(2)
            ]
            while memory.held("local") < 4 * len(large):
                await asyncio.sleep(0.01)
            answer = await server.http.post("/v1/attachments", content=large, headers={"content-type": "a/b"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "budget_exceeded")
            assert "retry-after" in answer.headers
            other = {"content-type": "a/b", "x-holdfast-user": "bob"}
            assert (await server.http.post("/v1/attachments", content=large, headers=other)).status_code == 201
            assert (await server.http.post("/v1/attachments", content=b"y", headers=other)).status_code == 201
            assert (await server.post("s", query="?wait=60")).status_code == 200, "messages go on"
            go_on.set()
        assert {upload.result().status_code for upload in uploads} == {201}
        assert memory.used == 0, "everything is given back"
        assert (
            await server.http.post(
                "/v1/attachments", content=large, headers=headers | {"content-length": str(len(large))}
            )
        ).status_code == 201

    served(scenario, principal_memory_bytes=1_000_000)


def test_what_one_principal_keeps_is_bounded() -> None:
    async def scenario(server: Live) -> None:
        headers = {"content-type": "a/b"}
        answers = [
            await server.http.post("/v1/attachments", content=bytes([n]) * 600, headers=headers) for n in range(2)
        ]
        assert [answer.status_code for answer in answers] == [201, 429]
        assert answers[1].json()["error"]["code"] == "limit_exceeded"

    served(scenario, principal_attachments_bytes=1000)
