"""Streams are honest: every event in order, or a gap; a cursor resumes; a slow or vanished reader holds nothing up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast import Run
from holdfast.protocol.sse import Frame, FrameDecoder
from holdfast.server.delivery import PIECE_BYTES
from holdfast.server.write_coalescing import CoalescingProtocol
from tests.server.live import AGENTS, Live, served


async def frames(server: Live, path: str, **headers: str) -> AsyncIterator[Frame]:
    """The frames of a stream, as they come."""
    decoder = FrameDecoder()
    async with server.http.stream("GET", path, headers=headers) as stream:
        assert stream.status_code == 200, await stream.aread()
        assert stream.headers["content-type"].startswith("text/event-stream")
        async for chunk in stream.aiter_raw():
            for frame in decoder.feed(chunk):
                yield frame


async def all_frames(server: Live, path: str, **headers: str) -> list[Frame]:
    """The frames of a stream that ends."""
    return [frame async for frame in frames(server, path, **headers)]


def test_a_followed_message_ends_its_stream_with_its_settlement() -> None:
    async def scenario(server: Live) -> None:
        receipt = (await server.post("alice", "50", agent="counting")).json()
        path = f"/v1/sessions/alice/events?after={receipt['cursor']}&follow={receipt['message_id']}"
        found = await all_frames(server, path)
        events = [json.loads(frame.data) for frame in found]
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        assert [frame.id for frame in found] == [f"{event['seq']}-1" for event in events]
        assert [frame.event for frame in found] == [event["kind"] for event in events]
        assert "".join(event.get("text", "") for event in events if event["kind"] == "text.delta") == "".join(
            f"{n} " for n in range(50)
        )
        assert events[-1]["kind"] == "message.settled"
        assert await all_frames(server, path) == found, "a settled message can be read again"
        past = f"/v1/sessions/alice/events?after={found[-1].id}&follow={receipt['message_id']}"
        assert await all_frames(server, past) == [], "and after it nothing comes"

    served(scenario)


def test_a_reader_that_is_cut_off_resumes_anywhere_without_loss_or_repeat() -> None:
    async def scenario(server: Live) -> None:
        receipt = (await server.post("alice", "40", agent="counting")).json()
        path = f"/v1/sessions/alice/events?follow={receipt['message_id']}"
        whole = await all_frames(server, path)
        for cut in range(0, len(whole), 7):
            by_header = await all_frames(server, path, **{"last-event-id": whole[cut].id})
            assert by_header == whole[cut + 1 :]
            by_query = await all_frames(server, f"{path}&after={whole[cut].id}")
            assert by_query == whole[cut + 1 :]
        newest = await all_frames(server, f"{path}&after={whole[0].id}", **{"last-event-id": whole[5].id})
        assert newest == whole[6:], "a browser that comes back sends both: the header is newer"

    served(scenario)


def test_readers_before_during_and_after_a_run_see_the_same() -> None:
    async def scenario(server: Live) -> None:
        receipt = (await server.post("alice", "300", agent="counting")).json()
        path = f"/v1/sessions/alice/events?after={receipt['cursor']}&follow={receipt['message_id']}"
        seen = await asyncio.gather(*(all_frames(server, path) for _ in range(20)))
        assert all(one == seen[0] for one in seen)
        assert len(seen[0]) >= 4

    served(scenario)


def test_what_was_pruned_is_told_as_a_gap() -> None:
    async def scenario(server: Live) -> None:
        first = (await server.post("alice", query="?wait=60")).json()
        now = server.host.clock.now() + 1000
        await server.host.store.prune(events_before=now, tombstones_before=0.0, idempotency_before=0.0)
        last = (await server.post("alice", query="?wait=60")).json()
        path = f"/v1/sessions/alice/events?follow={last['message_id']}"
        found = await all_frames(server, path)
        gap = json.loads(found[0].data)
        assert (found[0].event, gap["after"], gap["reason"]) == ("gap", 0, "pruned")
        assert found[0].id == f"{gap['until']}-1"
        assert json.loads(found[1].data)["seq"] == gap["until"] + 1
        assert gap["until"] >= first["receipt"]["seq"]

    served(scenario)


def test_an_idle_stream_is_kept_alive() -> None:
    async def scenario(server: Live) -> None:
        await server.post("alice", query="?wait=60")
        async with server.http.stream("GET", "/v1/sessions/alice/events") as stream:
            text = b""
            async for chunk in stream.aiter_raw():
                text += chunk
                if text.count(b": keep-alive\n\n") == 2:
                    break
            assert text.count(b": keep-alive\n\n") == 2, "the stream goes on though nothing happens"

    served(scenario, keepalive_s=0.05)


def test_a_reader_that_leaves_is_let_go_and_its_run_goes_on() -> None:
    async def scenario(server: Live) -> None:
        receipt = await server.begun("alice")
        for _ in range(20):
            async for _frame in frames(server, "/v1/sessions/alice/events"):
                break
        while server.app.context.streams.open or server.host.statistics().event_subscribers:
            await asyncio.sleep(0.01)
        run = (await server.http.get(f"/v1/sessions/alice/runs/{receipt['run_id']}")).json()
        assert run["state"] == "running", "a disconnect interrupts nothing"

    served(scenario)


async def unread(server: Live, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A reader that asks for a stream and takes nothing of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]), limit=1024)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
    await writer.drain()
    return reader, writer


async def big(run: Run) -> None:
    """Say more than any buffer on the way holds."""
    for _ in range(400):
        await run.emit("x" * 50_000)


def test_a_reader_that_takes_nothing_holds_neither_the_run_nor_others_up_and_is_let_go() -> None:
    async def scenario(server: Live) -> None:
        receipt = (await server.post("alice", "go", agent="big")).json()
        _, writer = await unread(server, "/v1/sessions/alice/events")
        path = f"/v1/sessions/alice/events?after={receipt['cursor']}&follow={receipt['message_id']}"
        assert (await all_frames(server, path))[-1].event == "message.settled"
        while server.app.context.streams.open:
            await asyncio.sleep(0.01)
        writer.close()

    # The reader of this test shares the loop with the server, and must not count as stalled when the machine is busy.
    served(scenario, *AGENTS, big, stream_stall_s=3.0, keepalive_s=0.1)


def test_a_reader_that_pauses_is_written_no_more_and_then_reads_each_event_once() -> None:
    servers: list[Live] = []

    async def paced(run: Run) -> None:
        live = next(live for live in servers[0].host.directory.live.values() if live.key == run.session_key)
        for _ in range(200):
            before = live.log.next_seq
            await run.emit("x" * 50_000)
            while live.log.next_seq == before:  # so that each is published by itself, in one write
                await asyncio.sleep(0.001)

    async def scenario(server: Live) -> None:
        servers.append(server)
        waiting: list[int] = []
        write_part = CoalescingProtocol.write_part

        def watched(protocol: CoalescingProtocol, data: bytes) -> bool:
            written = write_part(protocol, data)
            waiting.append(protocol.transport.get_write_buffer_size())
            return written

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CoalescingProtocol, "write_part", watched)
            reader, writer = await unread(server, "/v1/sessions/alice/events?after=0")
            await has_readers(server, 1)
            receipt = (await server.post("alice", "go", agent="paced")).json()
            settled = await server.host.session("alice").wait(receipt["message_id"])
            assert settled.state == "completed", settled.error
            assert max(waiting) > 0, "the reader fell behind"
            assert max(waiting) < 4 * PIECE_BYTES, "what is written waits in the store, not in the server"
            await reader.readuntil(b"\r\n\r\n")
            decoder, seqs = FrameDecoder(), list[int]()
            kinds: list[str] = []
            while "message.settled" not in kinds:
                size = int(await reader.readline(), 16)
                found = decoder.feed(await reader.readexactly(size))
                assert await reader.readexactly(2) == b"\r\n"
                seqs += [json.loads(frame.data)["seq"] for frame in found]
                kinds += [frame.event for frame in found]
        assert seqs == list(range(1, len(seqs) + 1))
        assert kinds.count("text.delta") == 200
        writer.close()

    served(scenario, paced, stream_stall_s=60.0)


def test_a_reader_that_takes_nothing_does_not_hold_the_shutdown_up() -> None:
    async def scenario(server: Live) -> None:
        receipt = (await server.post("alice", "go", agent="big")).json()
        await server.http.get(f"/v1/sessions/alice/messages/{receipt['message_id']}?wait=60")
        _, writer = await unread(server, "/v1/sessions/alice/events")
        while not server.app.context.streams.open:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(15):
            await server.end()
        writer.close()

    served(scenario, *AGENTS, big)


def test_when_the_server_ends_every_stream_says_where_to_go_on() -> None:
    async def scenario(server: Live) -> None:
        await server.begun("alice")
        await server.post("bob", query="?wait=60")
        readers = [
            asyncio.create_task(all_frames(server, f"/v1/sessions/{key}/events")) for key in ("alice", "bob") * 5
        ]
        while server.app.context.streams.open < len(readers):
            await asyncio.sleep(0.01)
        await server.end()
        for reader in readers:
            *events, closed = await reader
            assert closed.event == "closed"
            assert json.loads(closed.data) == {"kind": "closed", "reason": "shutdown", "cursor": closed.id}
            assert closed.id == events[-1].id, "behind the last event that it was given"
            assert events[-1].event == "message.settled"

    served(scenario)


def test_a_websocket_is_refused_with_the_name_of_what_serves_it() -> None:
    async def scenario(server: Live) -> None:
        await server.post("alice", query="?wait=60")
        upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
        for path in ("/v1/sessions/alice/events", "/"):
            answer = await server.http.get(path, headers={**upgrade, "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA=="})
            assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_request")
            assert "Server-Sent Events" in answer.json()["error"]["hint"]
            assert answer.headers["connection"] == "close"

    served(scenario)


def test_an_upgrade_to_a_protocol_that_is_not_spoken_here_is_ignored() -> None:
    async def scenario(server: Live) -> None:
        upgrade = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQAAP__"}
        answer = await server.http.get("/v1/sessions", headers=upgrade)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        answer = await server.http.post("/v1/sessions/alice/messages", json={"content": "hi"}, headers=upgrade)
        assert (answer.status_code, answer.json()["error"]["hint"]) == (422, "omit the header Upgrade")

    served(scenario)


# ── Before the first message ─────────────────────────────────────────────────────────────────────────────────────────


async def has_readers(server: Live, count: int) -> None:
    """Return once so many readers are there."""
    while server.host.readers < count:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("query", ["", "?after=0"])
@pytest.mark.parametrize("store", ["memory://", "sqlite://"])
def test_a_stream_waits_for_the_first_message_of_its_session(query: str, store: str, tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        stream = frames(server, f"/v1/sessions/alice/events{query}")
        first = asyncio.ensure_future(anext(stream))
        await has_readers(server, 1)
        assert (await server.http.get("/v1/sessions")).json()["sessions"] == [], "reading makes no rows"
        refused = await server.http.get("/v1/sessions/alice/events?after=0-1")
        assert refused.status_code == 404, "a cursor names a session, and there is none"
        receipt = (await server.post("alice", query="?wait=60")).json()["receipt"]
        assert (await first).id == "1-1"
        while (frame := await anext(stream)).event != "message.settled":
            pass
        assert json.loads(frame.data)["message_id"] == receipt["message_id"]
        await stream.aclose()  # type: ignore[attr-defined]
        while server.host.readers:
            await asyncio.sleep(0.01)

    served(scenario, store=store if store == "memory://" else f"sqlite:///{tmp_path}/store.db")


def test_a_stream_that_waits_is_kept_alive_and_told_of_the_shutdown() -> None:
    async def scenario(server: Live) -> None:
        async with server.http.stream("GET", "/v1/sessions/alice/events") as stream:
            pieces = stream.aiter_text()
            assert "keep-alive" in (await anext(pieces)) + (await anext(pieces))
            ending = asyncio.create_task(server.end())
            rest = "".join([piece async for piece in pieces])
        await ending
        last = list(FrameDecoder().feed(rest.encode()))[-1]
        assert (last.event, last.id, json.loads(last.data)["reason"]) == ("closed", "0", "shutdown")

    served(scenario, keepalive_s=0.1)


def test_streams_that_wait_count_as_streams() -> None:
    async def scenario(server: Live) -> None:
        async with server.http.stream("GET", "/v1/sessions/one/events") as first:
            assert first.status_code == 200
            assert (await server.http.get("/v1/sessions/two/events")).status_code == 429
        while server.app.context.streams.open:
            await asyncio.sleep(0.01)
        assert not server.host.directory.awaited, "nothing is kept of a reader that went"
        async with server.http.stream("GET", "/v1/sessions/two/events") as again:
            assert again.status_code == 200

    served(scenario, principal_streams=1)


def test_a_browser_that_waited_comes_back_with_the_cursor_it_was_given() -> None:
    async def scenario(server: Live) -> None:
        await server.post("alice", query="?wait=60")
        first = await anext(frames(server, "/v1/sessions/alice/events", **{"last-event-id": "0"}))
        assert first.id == "1-1"

    served(scenario)
