"""What one connection may send ahead, and how what breaks a bound is answered."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress

import pytest

from tests.server.live import Live, served

GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
LAST = b"GET /readyz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
POST = b"POST /v1/sessions/alice/messages HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


async def said(server: Live, *pieces: bytes) -> bytes:
    """Everything that the server answers until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    try:
        for piece in pieces:
            writer.write(piece)
        with suppress(ConnectionError):
            await writer.drain()
        return await reader.read()
    finally:
        writer.close()


def test_a_few_pipelined_requests_are_answered_in_their_order() -> None:
    async def scenario(server: Live) -> None:
        for times in (1, 2, 15):
            answers = await said(server, GET * times + LAST)
            assert answers.count(b"HTTP/1.1 200 OK") == times + 1
            assert answers.count(b'"ok"') == times
            assert answers.endswith(b'{"status":"ready"}\n')

    served(scenario)


def test_too_many_pipelined_requests_are_refused_behind_the_answers_to_the_first() -> None:
    async def scenario(server: Live) -> None:
        answers = await said(server, GET * 100)
        assert answers.count(b"HTTP/1.1 200 OK") == 17
        head, _, body = answers.rpartition(b"\r\n\r\n")
        assert b"HTTP/1.1 429" in head.rpartition(b"HTTP/1.1 200")[2]
        assert b"read responses before sending more requests" in body

    served(scenario)


def test_what_comes_while_requests_wait_is_not_read_before_they_are_answered() -> None:
    """Twice as many as may wait, in two pieces: read at once, the second piece would be refused."""

    async def scenario(server: Live) -> None:
        receipt = await server.begun("alice")
        wait = f"GET /v1/sessions/alice/messages/{receipt['message_id']}?wait=60 HTTP/1.1\r\nhost: localhost\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(wait.encode() + GET * 14)
        while not server.app.context.waits.count:
            await asyncio.sleep(0.01)
        writer.write(GET * 15 + LAST)
        await server.host.session("alice").interrupt()
        answers = await reader.read()
        assert re.findall(rb"HTTP/1.1 ([0-9]+)", answers) == [b"200"] * 31
        writer.close()

    served(scenario)


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (b"no HTTP\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\n" + b"a: b\r\n" * 101 + b"\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\na: " + b"b" * 200_000, 400),
        (POST + b"transfer-encoding: chunked\r\n\r\nnot a size\r\n", 400),
    ],
    ids=["no HTTP", "fields", "a long head", "a bad chunk"],
)
def test_a_bad_request_is_answered_behind_those_before_it(bad: bytes, status: int) -> None:
    async def scenario(server: Live) -> None:
        alone = await said(server, bad)
        assert alone.startswith(b"HTTP/1.1 %d" % status)
        behind = await said(server, GET + GET, bad)
        assert re.findall(rb"HTTP/1.1 ([0-9]+)", behind) == [b"200", b"200", b"%d" % status]

    served(scenario)


@pytest.mark.parametrize(
    "body",
    [
        b"1\r\nx\r\n" * 20_000,
        b"1;" + b"e" * 100_000 + b"\r\nx\r\n",
        b"0\r\n" + b"a: b\r\n" * 20_000,
        b"0\r\na: " + b"b" * 100_000,
    ],
    ids=["chunks of a byte", "an extension", "trailers", "a trailer"],
)
def test_the_framing_of_a_body_is_bounded(body: bytes) -> None:
    async def scenario(server: Live) -> None:
        answer = await said(server, POST + b"transfer-encoding: chunked\r\n\r\n", body)
        assert answer.startswith(b"HTTP/1.1 400"), answer[:300]
        assert b"outweigh the body" in answer

    served(scenario)


def test_a_trailer_is_no_header() -> None:
    async def scenario(server: Live) -> None:
        body = b'10\r\n{"content":"hi"}\r\n0\r\nx-holdfast-user: bob\r\n\r\n'
        answer = await said(server, POST + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n" + body)
        assert answer.startswith(b"HTTP/1.1 202"), answer

    served(scenario)


def test_a_stream_whose_reader_goes_with_a_request_behind_it_ends() -> None:
    async def scenario(server: Live) -> None:
        await server.begun("alice")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(b"GET /v1/sessions/alice/events HTTP/1.1\r\nhost: localhost\r\n\r\n" + GET)
        await reader.readuntil(b"run.started")
        assert server.app.context.streams.open == 1
        writer.transport.abort()
        await server.app.context.streams.all_ended()

    served(scenario, keepalive_s=0.1)


def test_a_wait_ends_when_its_client_goes() -> None:
    async def scenario(server: Live) -> None:
        for path in ("?wait=300", ""):
            body = b'{"content": "go", "agent": "endless"}'
            _, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
            writer.write(POST.replace(b"messages ", b"messages%s " % path.encode()))
            writer.write(b"content-length: %d\r\n\r\n%s" % (len(body), body))
            await writer.drain()
            while not server.host.statistics().running:
                await asyncio.sleep(0.01)
            writer.close()
            while server.app.keys.in_use.count:
                await asyncio.sleep(0.01)

    served(scenario)


def test_a_request_after_its_connection_was_idle_for_long_needs_a_new_one() -> None:
    async def scenario(server: Live) -> None:
        assert await said(server, GET) != b""  # it is closed by the server, though the client keeps it
        assert (await server.http.get("/healthz")).status_code == 200

    served(scenario, idle_connection_timeout_s=0.2)


def test_a_principal_beyond_its_share_of_connections_is_refused_and_others_are_not() -> None:
    async def scenario(server: Live) -> None:
        keys = server.app.keys
        _, alice = await keys.create(principal="alice", role="user")
        _, bob = await keys.create(principal="bob", role="user")
        ask = "GET /v1/sessions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {}\r\n\r\n"
        held = [await answered(server, ask.format(alice)) for _ in range(3)]
        assert [status for status, _ in held] == [200, 200, 429]
        status, last = await answered(server, ask.format(bob))
        assert status == 200
        assert server.host.budgets.connections.held("alice") == 2
        assert any("principal alice" in one.text for one in server.host.incidents.newest)
        for _, writer in [*held, (0, last)]:
            writer.close()

    served(scenario, principal_connections=2)


async def answered(server: Live, request: str) -> tuple[int, asyncio.StreamWriter]:
    """The status of a request's answer; its connection stays open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    writer.write(request.encode())
    return int((await reader.readline()).split()[1]), writer
