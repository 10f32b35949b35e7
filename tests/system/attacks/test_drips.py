"""Clients that stay within each bound and waste what they can: drops that come slowly, answers that nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from holdfast.proof.raw_connection import RawConnection
from tests.system.attacks.harness import ATTACKER, AttackedServer, attacked_server
from tests.system.attacks.test_large_answers import attach, fill

HEAD = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n"
BODY = b'{"content":"' + b"x" * 998_986 + b'"}'
LENGTH = b"content-length: 0\r\n"
UNREAD = (
    "/v1/sessions/s/events",
    "/v1/sessions/s/transcript",
    "/v1/sessions/s/export",
    "/v1/sessions/s/runs",
    "/v1/sessions?limit=1000",
    "/v1/tree",
    "/metrics",
    "/openapi.json",
    "/",
)


KINDS = 9 + len(UNREAD)


def chunks(size: int, count: int) -> bytes:
    """A part of a body in chunks."""
    return (b"%x\r\n%b\r\n" % (size, b"x" * size)) * count


def attacks(line: RawConnection) -> dict[str, tuple[bytes, bytes]]:
    """For each attack what is said at once, and what is said again and again behind it, a piece at a time."""
    post, _ = line.request("POST", "/v1/sessions/drip/messages")
    in_chunks = post.replace(LENGTH, b"transfer-encoding: chunked\r\n")
    return {
        "a head, byte by byte": (HEAD + b"a: ", b"b"),
        "a head of 65,536 bytes that has no end": ((HEAD + b"a: ").ljust(65_536, b"b"), b""),
        "a hundred fields and no end": (HEAD + b"".join(b"f%d: v\r\n" % n for n in range(99)), b""),
        "a body, byte by byte": (post.replace(LENGTH, b"content-length: 1000000\r\n") + BODY[:12], b"x"),
        "a body that lacks a byte": (post.replace(LENGTH, b"content-length: %d\r\n" % len(BODY)) + BODY[:-1], b""),
        "a body in 256 chunks of a byte": (in_chunks + chunks(1, 256), b""),
        "a body in chunks of 64 bytes": (in_chunks + chunks(64, 1), chunks(64, 100)),
        "sixteen requests": ((HEAD + b"\r\n") * 16, b""),
        "a stream, and bytes behind it": (line.request("GET", "/v1/sessions/s/events")[0], b"\r\n"),
        **{f"{path}, unread": (line.request("GET", path)[0] * 4, b"") for path in UNREAD},
    }


async def drip(line: RawConnection, drop: bytes) -> None:
    """Say it again and again until the server closes."""
    while drop and await line.say(drop):
        await asyncio.sleep(0.2)


@asynccontextmanager
async def dripping(server: AttackedServer, rounds: int) -> AsyncIterator[None]:
    """Every attack on that many connections each, with the key and without one in turn; nobody reads."""
    lines: list[RawConnection] = []
    tasks: list[asyncio.Task[None]] = []
    for number in range(rounds * KINDS):
        line = await server.line(ATTACKER if number % 2 else None, small=True)
        lines.append(line)
        at_once, drop = list(attacks(line).values())[number // 2 % KINDS]
        tasks.append(asyncio.create_task(begin(line, at_once, drop)))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for line in lines:
            line.drop()


async def begin(line: RawConnection, at_once: bytes, drop: bytes) -> None:
    if await line.say(at_once):
        await drip(line, drop)


async def attack(folder: Path, *, rounds: int, sends: int) -> None:
    async with attacked_server(folder) as server:
        await fill(server, messages=10, size=500_000)
        await attach(server, count=1, size=10_000_000)
        async with dripping(server, rounds), server.bystander(sends=sends, stops=3 if sends < 1000 else 20):
            pass
        await server.check(latency=sends >= 2000)


def test_drips_within_every_bound_and_answers_that_nobody_reads_keep_nobody_out(tmp_path):
    asyncio.run(attack(tmp_path, rounds=4, sends=100))


@pytest.mark.nightly
@pytest.mark.alone
def test_floods_of_drips_within_every_bound_slow_nobody(tmp_path):
    asyncio.run(attack(tmp_path, rounds=40, sends=2000))


def test_a_body_that_drips_is_given_up_and_so_is_a_reader_that_takes_little_at_a_time(tmp_path):
    async def main() -> None:
        settings = {"head_timeout_s": 0.5, "body_timeout_s": 1.0, "stream_stall_s": 1.0}
        async with attacked_server(tmp_path, settings=settings) as server:
            await fill(server, messages=8, size=900_000)
            for name in ("a head, byte by byte", "a body, byte by byte", "a body that lacks a byte"):
                line = await server.line(ATTACKER)
                at_once, drop = attacks(line)[name]
                dripping = asyncio.create_task(begin(line, at_once, drop))
                answer = await line.take(4096)
                assert answer.split()[1:2] in ([b"400"], [b"422"]), (name, answer)
                dripping.cancel()
                line.drop()
            for path in ("/v1/sessions/s/events", "/v1/sessions/s/transcript"):
                line = await server.line(ATTACKER, small=True)
                await line.say(line.request("GET", path)[0])
                while await line.take(64):
                    await asyncio.sleep(0.05)
                line.drop()
            async with server.bystander(sends=20):
                pass
            await server.check()

    asyncio.run(main())
