"""One connection that sends requests without waiting for answers costs nothing but its own time."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from tests.system.attacks.harness import AttackedServer, attacked_server

GET = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


async def flood(server: AttackedServer, data: bytes, times: int) -> None:
    """Pipeline as much as the server takes, on one connection, reading nothing."""
    line = await server.line()
    with suppress(TimeoutError):
        async with asyncio.timeout(5):
            for _ in range(times):
                if not await line.say(data):
                    break
    line.drop()


def test_pipelined_requests_without_a_key_take_no_memory(tmp_path):
    async def main() -> None:
        async with attacked_server(tmp_path) as server:
            async with server.bystander():
                await flood(server, b"GET / HTTP/1.1\r\n\r\n" * 4096, 380)
            await server.check()

    asyncio.run(main())


@pytest.mark.nightly
@pytest.mark.alone
def test_pipelined_requests_on_many_connections_take_no_memory(tmp_path):
    async def main() -> None:
        async with attacked_server(tmp_path) as server:
            async with server.bystander(sends=2000, stops=20), asyncio.TaskGroup() as group:
                for _ in range(40):
                    group.create_task(flood(server, GET * 2000, 100))
            await server.check(latency=True)

    asyncio.run(main())
