"""Bad input: each gets a status, a code and a next step, and nothing else is disturbed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

from tests.server.live import JSON, Live, served

MESSAGES = "/v1/sessions/alice/messages"
DEEP = "[" * 100_000 + "]" * 100_000

BODIES: dict[str, tuple[bytes, int, str]] = {
    "nothing": (b"", 400, "malformed_body"),
    "not JSON": (b"hello", 400, "malformed_body"),
    "cut JSON": (b'{"content": "hi', 400, "malformed_body"),
    "trailing bytes": (b'{"content": "hi"} {}', 400, "malformed_body"),
    "not UTF-8": (b'{"content": "\xff\xfe"}', 400, "malformed_body"),
    "a lone surrogate": (b'{"content": "\\ud800"}', 400, "malformed_body"),
    "a NUL byte": (b'{"content": "a\\u0000b"}', 422, "invalid_request"),
    "a NUL byte in the key": (b'{"content": "x", "idempotency_key": "a\\u0000b"}', 422, "invalid_request"),
    "a list": (b"[]", 422, "invalid_request"),
    "null": (b"null", 422, "invalid_request"),
    "no content": (b"{}", 422, "invalid_request"),
    "a number as content": (b'{"content": 1}', 422, "invalid_request"),
    "null as content": (b'{"content": null}', 422, "invalid_request"),
    "an unknown field": (b'{"content": "x", "contents": "y"}', 422, "invalid_request"),
    "a deep value": (f'{{"content": {DEEP}}}'.encode(), 422, "invalid_request"),
    "a deep unknown value": (f'{{"other": {DEEP}}}'.encode(), 422, "invalid_request"),
    "deep JSON": (DEEP.encode(), 422, "invalid_request"),
    "an unknown policy": (b'{"content": "x", "policy": "hurry"}', 422, "unknown_policy"),
    "an unknown attachment": (b'{"content": "x", "attachments": ["00"]}', 404, "unknown_attachment"),
    "an attachment that is none": (b'{"content": "x", "attachments": [7]}', 422, "invalid_request"),
    "an unknown agent": (b'{"content": "x", "agent": "nobody"}', 404, "unknown_agent"),
    "an empty idempotency key": (b'{"content": "x", "idempotency_key": ""}', 422, "invalid_request"),
    "a long idempotency key": (
        json.dumps({"content": "x", "idempotency_key": "k" * 201}).encode(),
        422,
        "invalid_request",
    ),
    "a negative time": (b'{"content": "x", "policy": "collect", "quiet_s": -1}', 422, "invalid_request"),
    "an endless time": (b'{"content": "x", "policy": "collect", "max_wait_s": 1e300}', 422, "invalid_request"),
    "not a number": (b'{"content": "x", "quiet_s": NaN}', 400, "malformed_body"),
}


def refused(answer: Any, status: int, code: str) -> None:
    """The answer is that error, in the documented shape, with a next step."""
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    assert set(answer.json()["error"]) == {"code", "message", "hint"}
    assert answer.json()["error"]["message"]
    assert answer.json()["error"]["hint"], "an error says what to do next"
    assert "Traceback" not in answer.text


def test_a_body_that_does_not_fit_is_refused_and_nothing_is_stored() -> None:
    async def scenario(server: Live) -> None:
        for what, (body, status, code) in BODIES.items():
            print(what)
            refused(await server.http.post(MESSAGES, content=body, headers=JSON), status, code)
            missing = await server.http.get("/v1/sessions/alice")
            assert missing.json()["error"]["code"] == "unknown_session", "nothing was stored"

    served(scenario)


def test_an_odd_key_is_refused() -> None:
    async def scenario(server: Live) -> None:
        for path in ("a%2Fb", "a%00b", "%0a", "x" * 201, "%7f", "%e2%80%8b", "%1b%5b31m"):
            for answer in (await server.post(path), await server.http.get(f"/v1/sessions/{path}")):
                refused(answer, 422, "invalid_key")

    served(scenario)


def test_a_key_that_is_not_utf8_is_refused() -> None:
    async def scenario(server: Live) -> None:
        refused(await server.post("%ff"), 422, "invalid_request")

    served(scenario)


def test_an_unknown_address_is_refused() -> None:
    async def scenario(server: Live) -> None:
        for path in (
            "/v1/",
            "/v1/sessions/",
            "/v1/sessions//messages",
            "/v1/nothing",
            "/v2",
            "/V1/sessions",
            "/favicon",
        ):
            refused(await server.http.get(path), 404, "unknown_route")

    served(scenario)


def test_another_method_is_refused_with_those_that_are_allowed() -> None:
    async def scenario(server: Live) -> None:
        for method, path, allowed in (
            ("PUT", MESSAGES, "POST"),
            ("GET", MESSAGES, "POST"),
            ("POST", "/v1/sessions/alice", "GET, DELETE"),
            ("POST", "/healthz", "GET"),
            ("DELETE", "/", "GET, POST"),
            ("OPTIONS", "/", "GET, POST"),
        ):
            answer = await server.http.request(method, path)
            refused(answer, 405, "method_not_allowed")
            assert answer.headers["allow"] == allowed

    served(scenario)


def test_a_query_that_does_not_fit_is_refused() -> None:
    many = "&".join(f"x{n}=1" for n in range(50))

    async def scenario(server: Live) -> None:
        for query in ("wait=soon", "wait=-1", "wait=nan", "wait=inf", "wait=301", "weight=3", "wait=%ff", many):
            refused(await server.post("alice", query=f"?{query}"), 422, "invalid_request")
        for query in ("limit=0", "limit=many", "limit=100000", "all=maybe", "before=x", "before=nan-1", "before=1.0-0"):
            refused(await server.http.get(f"/v1/sessions?{query}"), 422, "invalid_request")

    served(scenario)


def test_a_write_that_a_plain_web_form_could_send_is_refused() -> None:
    forms = ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx")

    async def scenario(server: Live) -> None:
        for media_type in forms:
            headers = {"content-type": media_type} if media_type else {}
            for path in (MESSAGES, "/v1/sessions/alice/interrupt", "/v1/sessions/alice/stop", "/v1/drain", "/v1/keys"):
                answer = await server.http.post(path, content=b'{"content": "x"}', headers=headers)
                refused(answer, 415, "unsupported_media_type")

    served(scenario)


def test_a_body_that_is_too_large_is_refused_by_its_length_and_while_it_comes() -> None:
    async def scenario(server: Live) -> None:
        fits = json.dumps({"content": "x" * 1900}).encode()
        assert (await server.http.post(MESSAGES, content=fits, headers=JSON)).status_code == 202
        big = json.dumps({"content": "x" * 3000}).encode()
        refused(await server.http.post(MESSAGES, content=big, headers=JSON), 413, "body_too_large")

        async def endless() -> AsyncIterator[bytes]:
            yield b'{"content": "'
            for _ in range(300):
                yield b"x" * 65_536

        refused(await server.http.post(MESSAGES, content=endless(), headers=JSON), 413, "body_too_large")

    served(scenario, body_limit_bytes=2048)


def test_a_body_that_never_ends_is_refused_while_it_comes() -> None:
    async def scenario(server: Live) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        head = f"POST {MESSAGES} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        for _ in range(3):
            writer.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
        assert b" 413 " in await reader.readline()
        writer.close()

    served(scenario, body_limit_bytes=2048)


def test_a_body_that_does_not_come_is_given_up() -> None:
    async def scenario(server: Live) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        head = f"POST {MESSAGES} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: 10\r\n\r\n{{".encode())
        status = await reader.readline()
        length = re.search(rb"content-length: (\d+)", await reader.readuntil(b"\r\n\r\n"))
        assert length is not None
        error = json.loads(await reader.readexactly(int(length[1])))["error"]
        assert (status.split()[1], error["code"]) == (b"422", "invalid_request")
        writer.close()

    served(scenario, body_timeout_s=0.1)


def test_an_unknown_thing_of_a_known_session_is_named() -> None:
    async def scenario(server: Live) -> None:
        await server.post("alice", query="?wait=60")
        base = "/v1/sessions/alice"
        refused(await server.http.get(f"{base}/messages/m_none"), 404, "unknown_message")
        refused(await server.http.get(f"{base}/messages/m_none?wait=5"), 404, "unknown_message")
        refused(await server.http.delete(f"{base}/messages/m_none"), 404, "unknown_message")
        refused(await server.http.get(f"{base}/runs/r_none"), 404, "unknown_run")
        refused(await server.http.get(f"{base}/stops/s_none"), 404, "unknown_stop")
        refused(await server.http.get(f"{base}/events?follow=m_none"), 404, "unknown_message")
        refused(await server.http.delete("/v1/keys/k_none"), 404, "unknown_key")

    served(scenario)


def test_an_unknown_session_is_named_everywhere() -> None:
    async def scenario(server: Live) -> None:
        runs = ("/runs", "/runs/r_x")
        for path in ("", "/transcript", "/mailbox", "/tree", *runs, "/messages/m_x", "/events?after=0-1"):
            refused(await server.http.get(f"/v1/sessions/nobody{path}"), 404, "unknown_session")
        for path in ("interrupt", "stop"):
            refused(await server.http.post(f"/v1/sessions/nobody/{path}", json={}), 404, "unknown_session")
        refused(await server.http.delete("/v1/sessions/nobody"), 404, "unknown_session")
        refused(await server.http.delete("/v1/sessions/nobody/messages/m_x"), 404, "unknown_session")

    served(scenario)


def test_a_cursor_that_is_none_or_lies_ahead_is_refused() -> None:
    async def scenario(server: Live) -> None:
        await server.post("alice", query="?wait=60")
        for cursor in ("x", "-1", "1", "1-", "-", "1-1-1", "99999999999999999999-1", "1.5-1", "１-1", "999-1"):
            refused(await server.http.get("/v1/sessions/alice/events", params={"after": cursor}), 400, "invalid_cursor")
            if cursor.isascii():
                headers = {"last-event-id": cursor}
                refused(await server.http.get("/v1/sessions/alice/events", headers=headers), 400, "invalid_cursor")

    served(scenario)


def test_a_cursor_of_another_session_is_told_apart() -> None:
    async def scenario(server: Live) -> None:
        await server.post("alice", query="?wait=60")
        await server.post("bob", query="?wait=60")
        other = (await server.post("bob", query="?wait=60")).json()["receipt"]["cursor"]
        refused(await server.http.get(f"/v1/sessions/alice/events?after={other}"), 400, "invalid_cursor")

    served(scenario)


def test_bytes_that_are_no_http_do_not_hurt() -> None:
    async def scenario(server: Live) -> None:
        port = int(server.url.rpartition(":")[2])
        for junk in (
            b"\x16\x03\x01\x02\x00",
            b"GET\r\n\r\n",
            b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n",
            b"\0" * 100,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(junk)
            writer.write_eof()
            await reader.read()
            writer.close()
        assert (await server.post("alice", query="?wait=60")).status_code == 200

    served(scenario)


def test_a_query_that_is_not_meant_so_is_refused() -> None:
    async def scenario(server: Live) -> None:
        await server.post("alice")
        for query in ("?bogus", "?bogus=", "?limit=1&limit=2", "?limit=1.5", "?limit=1_0", "?limit=+1", "?limit=1e2"):
            refused(await server.http.get(f"/v1/sessions{query}"), 422, "invalid_request")
        for query in ("?wait=1_0", "?wait=%201", "?wait=%D9%A1"):
            refused(await server.post("alice", query=query), 422, "invalid_request")
        for query in ("?limit", "?limit=", "?limit=2&all=true"):
            assert (await server.http.get(f"/v1/sessions{query}")).status_code == 200
        for query in ("?wait=1e1", "?wait=.5", "?wait=1."):
            assert (await server.post("alice", query=query)).status_code == 200

    served(scenario)
