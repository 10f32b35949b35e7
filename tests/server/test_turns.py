"""A turn for lists, and an edit of a history, are held for as long as they are needed: not while a body comes."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from holdfast.host.budgets import Budgets
from holdfast.server.delivery import CUT, ResponseDelivery
from holdfast.settings import Settings
from tests.server.live import GUARD_S, Live, served


@pytest.mark.parametrize("what", ["compact", "fork", "undo"])
def test_half_a_body_of_an_edit_keeps_no_list_from_anybody(what: str) -> None:
    async def scenario(server: Live) -> None:
        assert (await server.post("s", query="?wait=60")).status_code == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        head = f"POST /v1/sessions/s/{what} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: 100\r\nexpect: 100-continue\r\n\r\n".encode())
        assert b"100" in await reader.readline(), "the server waits for the body"
        assert server.host.budgets.listings.used == 0
        assert (await server.http.get("/v1/sessions")).status_code == 200
        writer.close()

    served(scenario)


def test_a_small_answer_of_the_page_that_nobody_takes_is_ended() -> None:
    async def main() -> None:
        settings = Settings(stream_stall_s=0.1)
        cut: list[str] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            await asyncio.Event().wait()  # as behind answers that are unread

        scope = {CUT: lambda: cut.append("cut")}
        delivery = ResponseDelivery(scope, send, principal="alice", budgets=Budgets(settings), settings=settings)
        async with asyncio.timeout(GUARD_S):
            with pytest.raises(TimeoutError):
                await delivery.send({"type": "http.response.body", "body": b"small"})
        assert cut == ["cut"]

    asyncio.run(main())
