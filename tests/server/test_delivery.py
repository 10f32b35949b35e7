"""What is large is charged from before it is in memory until its reader has it, and no reader keeps it for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from holdfast.host.budgets import FREE_BYTES, Budgets
from holdfast.server.caller import Caller
from holdfast.server.credentials import CredentialsInUse
from holdfast.server.delivery import CUT
from holdfast.server.request import Request
from holdfast.server.response import Response
from holdfast.settings import Settings
from holdfast.testing.clock import ManualClock
from tests.server.live import GUARD_S

LARGE = 10 * FREE_BYTES
STALL_S = 0.2


class Client:
    """The other side of one request: the pieces of its body, and what it takes of the answer.

    Parameters:
        pieces: of the request's body, in order; more are waited for behind the last one.
        length: what its head says of the body's length.
        takes_after_s: how long it waits before it takes each message of the answer.
    """

    def __init__(self, pieces: Iterable[bytes] = (), *, length: int | None = None, takes_after_s: float = 0.0) -> None:
        self.budgets = Budgets(Settings(stream_stall_s=STALL_S))
        self.request = Request(
            {CUT: lambda: self.cut.append(True), "query_string": b""},
            self._give,
            self._take,
            headers={b"content-type": b"application/json"}
            | ({} if length is None else {b"content-length": str(length).encode()}),
            caller=Caller("alice", "user"),
            settings=Settings(stream_stall_s=STALL_S, body_limit_bytes=LARGE),
            path={},
            use=CredentialsInUse(ManualClock()).hold("k_1", None),
            agents=None,
            budgets=self.budgets,
        )
        self.cut: list[bool] = []
        self.taken = 0
        self.charged: list[int] = []
        """What the principal was charged whenever a message went either way."""
        self._pieces = list(pieces)
        self._takes_after_s = takes_after_s

    async def _give(self) -> dict[str, Any]:
        self.charged.append(self.budgets.memory.held("alice"))
        if not self._pieces:
            await asyncio.Event().wait()
        piece = self._pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}

    async def _take(self, message: Any) -> None:
        self.charged.append(self.budgets.memory.held("alice"))
        await asyncio.sleep(self._takes_after_s)
        self.taken += len(message.get("body", b""))


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(GUARD_S):
            await scenario()

    asyncio.run(bounded())


@asynccontextmanager
async def ended(client: Client) -> AsyncIterator[Request]:
    """The request until it has ended; then nothing is charged any more."""
    try:
        yield client.request
    finally:
        client.request.release()
        assert client.budgets.memory.used == 0


async def answer_whole(request: Request) -> None:
    await request.respond(Response(200, b"x" * LARGE))


async def answer_as_the_page_does(request: Request) -> None:
    await request.send({"type": "http.response.start", "status": 200, "headers": []})
    await request.send({"type": "http.response.body", "body": b"x" * LARGE})


@pytest.mark.parametrize("give", [answer_whole, answer_as_the_page_does])
def test_a_large_answer_is_charged_until_the_request_has_ended(give: Any) -> None:
    async def scenario() -> None:
        client = Client()
        async with ended(client) as request:
            await give(request)
            assert client.taken in (LARGE, LARGE + 1), "the last line break of a JSON answer"
            assert client.charged[-1] == LARGE == client.budgets.memory.held("alice")

    run(scenario)


def test_a_large_body_is_charged_twice_before_its_first_byte_is_read() -> None:
    async def scenario() -> None:
        body = b'"%b"' % (b"x" * (LARGE - 2))
        client = Client([body[:FREE_BYTES], body[FREE_BYTES:]], length=LARGE)
        async with ended(client) as request:
            assert len(await request.read_json(msgspec.json.Decoder(str))) == LARGE - 2
            assert client.charged == [2 * LARGE] * 2

    run(scenario)


def test_a_body_without_a_length_is_charged_as_it_grows() -> None:
    async def scenario() -> None:
        pieces = [b"x" * FREE_BYTES] * 9
        client = Client(pieces)
        async with ended(client) as request:
            await request.read_bytes(limit_bytes=LARGE)
            held = [FREE_BYTES * number for number in range(len(pieces))]
            assert all(charged >= kept for charged, kept in zip(client.charged[2:], held[2:], strict=True))

    run(scenario)


def test_small_bodies_and_answers_cost_nothing() -> None:
    async def scenario() -> None:
        client = Client([b'"hi"'], length=4)
        async with ended(client) as request:
            await request.read_json(msgspec.json.Decoder(str))
            await request.respond(Response(200, b"{}"))
            assert set(client.charged) == {0}

    run(scenario)


@pytest.mark.parametrize("size", [2, LARGE])
@pytest.mark.parametrize("takes_after_s", [1e9])
def test_an_answer_that_nobody_takes_is_cut(size: int, takes_after_s: float) -> None:
    async def scenario() -> None:
        client = Client(takes_after_s=takes_after_s)
        async with ended(client) as request:
            with pytest.raises(TimeoutError):
                await request.respond(Response(200, b"x" * size))
            assert client.cut

    run(scenario)


def test_a_reader_that_takes_a_piece_now_and_then_is_cut_too() -> None:
    """Each piece comes in time; together they take far longer than a reader may."""

    async def scenario() -> None:
        client = Client(takes_after_s=STALL_S * 0.4)
        async with ended(client) as request:
            with pytest.raises(TimeoutError):
                for _ in range(200):
                    await request.write(b"x" * 10)
            assert client.cut

    run(scenario)


def test_large_messages_of_one_principal_go_to_the_store_a_few_at_a_time_and_hold_up_nobody_else() -> None:
    async def main() -> None:
        client = Client()
        request, writes = client.request, client.budgets.writes
        first = await request.take_write(writes.share * 3 // 4)
        second = asyncio.create_task(request.take_write(writes.share // 2))
        other = await writes.wait_for("bob", writes.share, within_s=0)
        while not writes._lined_up:
            await asyncio.sleep(0.001)
        assert not second.done()
        assert client.budgets.memory.held("alice") == writes.share // 2, "a message that waits is charged as memory"
        first.release()
        (await second).release()
        larger_than_all = await request.take_write(10 * writes.share)
        assert larger_than_all.amount == writes.share
        larger_than_all.release()
        other.release()
        assert (writes.used, client.budgets.memory.used) == (0, 0)

    asyncio.run(main())
