"""Large answers cost what is in memory of them: exports, transcripts, and streams of people who never read."""

from __future__ import annotations

import asyncio
import contextlib
import os

import pytest

from tests.system.attacks.harness import ATTACKER, AttackedServer, attacked_server


async def fill(server: AttackedServer, *, messages: int, size: int) -> None:
    """Give the attacker's session ``s`` a log and a transcript of large messages and answers."""
    async with server.http(ATTACKER) as http:
        for number in range(messages):
            body = {"content": f"{number:06}" + "x" * size}
            answer = await http.post("/v1/sessions/s/messages?wait=30", json=body)
            assert answer.status_code == 200, answer.text


async def attach(server: AttackedServer, *, count: int, size: int) -> None:
    """Give it a message with attachments."""
    async with server.http(ATTACKER) as http:
        digests = []
        for _ in range(count):
            answer = await http.post("/v1/attachments", content=os.urandom(size), headers={"content-type": "a/b"})
            assert answer.status_code == 201, answer.text
            digests.append(answer.json()["digest"])
        body = {"content": "look", "attachments": digests}
        assert (await http.post("/v1/sessions/s/messages?wait=30", json=body)).status_code == 200


async def unread(server: AttackedServer, path: str, count: int) -> list[asyncio.StreamWriter]:
    """Ask that often, and read nothing."""
    head = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {server.keys[ATTACKER]}\r\n\r\n"
    writers = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(head.encode())
        writers.append(writer)
    return writers


async def read_whole(server: AttackedServer, path: str) -> int:
    """Ask once and read all; how many bytes came."""
    size = 0
    async with server.http(ATTACKER) as http:
        with contextlib.suppress(Exception):
            async with http.stream("GET", path, timeout=120) as answer:
                async for piece in answer.aiter_raw():
                    size += len(piece)
    return size


def test_unread_streams_and_transcripts_of_large_messages_take_no_memory(tmp_path):
    async def main() -> None:
        async with attacked_server(tmp_path) as server:
            await fill(server, messages=20, size=950_000)
            async with server.bystander():
                writers = await unread(server, "/v1/sessions/s/events", 100)
                writers += await unread(server, "/v1/sessions/s/transcript", 12)
            await server.check(accused=ATTACKER)
            for writer in writers:
                writer.transport.abort()

    asyncio.run(main())


def test_exports_at_the_same_time_take_no_memory_and_are_whole(tmp_path):
    async def main() -> None:
        async with attacked_server(tmp_path) as server:
            await attach(server, count=4, size=19_500_000)
            async with server.bystander():
                sizes = await asyncio.gather(*(read_whole(server, "/v1/sessions/s/export") for _ in range(4)))
            assert min(sizes) > 4 * 19_500_000 * 4 // 3, "nobody's is cut"
            await server.check(accused=ATTACKER)

    asyncio.run(main())


async def fill_mailbox(server: AttackedServer, session: str, *, messages: int, size: int) -> list[int]:
    """Send that often behind a run that never ends; the statuses."""
    async with server.http(ATTACKER) as http:
        begun = await http.post(f"/v1/sessions/{session}/messages", json={"content": "hold", "agent": "endless"})
        assert begun.status_code in (200, 202), begun.text
        statuses = []
        for number in range(messages):
            body = {"content": f"{number:06}" + "x" * size, "agent": "endless"}
            statuses.append((await http.post(f"/v1/sessions/{session}/messages", json=body)).status_code)
        return statuses


@pytest.mark.nightly
def test_large_messages_that_wait_take_no_memory(tmp_path):
    async def main() -> None:
        async with attacked_server(tmp_path) as server:
            async with server.bystander(), asyncio.TaskGroup() as group:
                filling = [
                    group.create_task(fill_mailbox(server, f"s{lane}", messages=100, size=950_000)) for lane in range(8)
                ]
            assert all(429 in task.result() for task in filling), "a session's mailbox has an end"
            async with server.bystander():
                for session in range(8, 40):
                    await fill_mailbox(server, f"s{session}", messages=8, size=950_000)
            await server.check()
            async with server.http(ATTACKER) as http:
                stopped = await http.post("/v1/sessions/s39/stop?wait=30", json={})
            withdrawn = stopped.json()["withdrawn"]
            assert [len(message["content"]) for message in withdrawn] == [950_006] * 8

    asyncio.run(main())


@pytest.mark.nightly
@pytest.mark.alone
def test_four_exports_of_fifty_attachments_take_no_memory(tmp_path):
    async def main() -> None:
        async with attacked_server(tmp_path) as server:
            await attach(server, count=50, size=19_500_000)
            async with server.bystander(sends=2000, stops=20):
                await asyncio.gather(*(read_whole(server, "/v1/sessions/s/export") for _ in range(4)))
            await server.check(accused=ATTACKER, latency=True)

    asyncio.run(main())


@pytest.mark.nightly
@pytest.mark.alone
def test_large_bodies_on_many_connections_take_no_memory(tmp_path):
    async def main() -> None:
        async with attacked_server(tmp_path) as server:
            body = os.urandom(19_500_000)

            async def upload(number: int) -> None:
                async with server.http(ATTACKER) as http:
                    with contextlib.suppress(Exception):
                        await http.post(
                            "/v1/attachments", content=body + bytes([number]), headers={"content-type": "a/b"}
                        )

            async with server.bystander(sends=2000, stops=20):
                await asyncio.gather(*(upload(number) for number in range(40)))
            await server.check(latency=True)

    asyncio.run(main())
