"""However many connections somebody opens, everybody else gets in, tools start, and an operator learns who it was."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from holdfast.proof.raw_connection import RawConnection
from tests.system.attacks.harness import ATTACKER, AttackedServer, attacked_server

MANY = 1000


async def opened(server: AttackedServer, said: bytes, count: int = MANY) -> list[RawConnection]:
    """That many connections, each of which has said this and nothing more."""
    lines = []
    for _ in range(count):
        with suppress(OSError):
            line = await server.line()
            lines.append(line)
            await line.say(said)
    return lines


async def streams(server: AttackedServer) -> list[RawConnection]:
    """A thousand event streams of the attacker, as far as the server lets it."""
    async with server.http(ATTACKER) as http:
        (await http.post("/v1/sessions/s/messages?wait=5", json={"content": "hi"})).raise_for_status()
    lines = []
    for _ in range(MANY):
        line = await server.line(ATTACKER)
        lines.append(line)
        await line.say(line.request("GET", "/v1/sessions/s/events")[0])
    return lines


def drop(lines: list[RawConnection]) -> None:
    for line in lines:
        line.drop()


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\nhost: loc", b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"],
    ids=["idle", "half a head", "between requests"],
)  # fmt: skip
def test_a_thousand_connections_without_a_key_keep_nobody_out(tmp_path, said):
    async def main() -> None:
        async with attacked_server(tmp_path) as server:
            lines = await opened(server, said)
            async with server.bystander(sends=100):
                pass
            assert server.descriptors < 1024 * 3 // 4
            await server.check(accused="peer 127.0.0.1")
            drop(lines)
            assert "peer 127.0.0.1" in server.log()

    asyncio.run(main())


def test_a_thousand_streams_of_one_user_keep_nobody_out(tmp_path):
    async def main() -> None:
        async with attacked_server(tmp_path) as server:
            lines = await streams(server)
            idle = await opened(server, b"")
            async with server.bystander(sends=100):
                pass
            await server.check(accused=f"principal {ATTACKER}")
            drop(lines + idle)

    asyncio.run(main())


def test_heads_that_are_not_whole_are_closed_after_their_time(tmp_path):
    async def main() -> None:
        async with attacked_server(tmp_path, settings={"head_timeout_s": 0.5}) as server:
            lines = await opened(server, b"GET / HTTP/1.1\r\na: b", count=20)
            for line in lines:
                said = await line.take(4096)
                assert said.startswith(b"HTTP/1.1 400"), said
                assert b"in time" in said
            silent = await server.line()
            assert await silent.take(100) == b""
            silent.drop()
            drop(lines)

    asyncio.run(main())


@pytest.mark.nightly
@pytest.mark.alone
def test_the_worst_connections_at_once_slow_nobody(tmp_path):
    async def main() -> None:
        async with attacked_server(tmp_path) as server:
            lines = await streams(server)
            async with server.bystander(sends=2000, stops=20), asyncio.TaskGroup() as group:
                flood = group.create_task(keep_opening(server))
                await asyncio.sleep(5)
                flood.cancel()
            await server.check(accused=f"principal {ATTACKER}", latency=True)
            drop(lines)

    asyncio.run(main())


async def keep_opening(server: AttackedServer) -> None:
    """Open connections with heads of 60 kB that never end, as fast as it goes, and keep the newest."""
    lines: list[RawConnection] = []
    try:
        while True:
            with suppress(OSError):
                lines.append(await server.line())
                await lines[-1].say(b"GET / HTTP/1.1\r\na: " + b"b" * 60_000)
            if len(lines) > 800:
                lines.pop(0).drop()
    finally:
        drop(lines)
