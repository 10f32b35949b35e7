"""A revoked key and an expired token end what is open under them: streams, waits, and requests on their way."""

from __future__ import annotations

import array
import asyncio
import fcntl
import json
import socket
import termios
import time
from collections.abc import MutableMapping
from typing import Any

import jwt
import msgspec
import pytest

from holdfast import Client, Host, Run
from holdfast.clock import SystemClock
from holdfast.errors import Unauthenticated
from holdfast.server.auth import KeyRing
from holdfast.server.caller import Caller
from holdfast.server.credentials import LOOK_EVERY_S, CredentialsInUse
from holdfast.server.delivery import CUT
from holdfast.server.request import Request
from holdfast.server.streams import Streams
from holdfast.storage.port import KeyRecord
from holdfast.testing.clock import ManualClock
from tests.server.live import AGENTS, GUARD_S, Live, Stopwatch, live, served

SECRET = "a secret of a good many characters, not to be guessed"
WITHIN_S = 1.0
"""The promise: nothing is sent later than this after the end of a credential."""


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


async def two_keys(server: Live) -> tuple[dict[str, str], dict[str, str], str]:
    """Headers of an admin and of alice, and the id of her key."""
    _, ops = await server.app.keys.create(principal="ops", role="admin")
    record, secret = await server.app.keys.create(principal="alice", role="user")
    return bearer(ops), bearer(secret), record.key_id


async def frames_of(server: Live, path: str, headers: dict[str, str], opened: asyncio.Event) -> list[str]:
    """What an event stream sends until it ends."""
    got: list[str] = []
    async with server.http.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200
        async for piece in answer.aiter_text():
            got.append(piece)
            if "message.settled" in piece or "text.delta" in piece:
                opened.set()
    return got


def last_frame(got: list[str]) -> tuple[str, dict[str, Any]]:
    lines = "".join(got).strip().splitlines()
    event = next(line for line in reversed(lines) if line.startswith("event: "))
    data = next(line for line in reversed(lines) if line.startswith("data: "))
    return event.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_a_revoked_key_ends_its_stream_with_unauthorized_and_nothing_follows() -> None:
    async def scenario(server: Live) -> None:
        ops, alice, key_id = await two_keys(server)
        await server.http.post("/v1/sessions/s/messages?wait=60", json={"content": "hi"}, headers=alice)
        opened = asyncio.Event()
        reading = asyncio.create_task(frames_of(server, "/v1/sessions/s/events", alice, opened))
        await opened.wait()
        answer = await server.http.delete(f"/v1/keys/{key_id}", headers=ops)
        assert answer.status_code == 200
        since = Stopwatch()
        await server.host.session("s", principal="alice").ask("the host goes on with it")
        got = await reading
        assert since.elapsed_s < WITHIN_S
        assert last_frame(got)[0] == "closed"
        assert last_frame(got)[1]["reason"] == "unauthorized"
        assert "goes on with it" not in "".join(got)

    served(scenario)


def test_a_revoked_key_ends_its_wait_for_a_session() -> None:
    async def scenario(server: Live) -> None:
        ops, alice, key_id = await two_keys(server)
        reading = asyncio.create_task(frames_of(server, "/v1/sessions/s/events", alice, asyncio.Event()))
        while not server.host.readers:
            await asyncio.sleep(0.01)
        assert (await server.http.delete(f"/v1/keys/{key_id}", headers=ops)).status_code == 200
        await server.host.session("s", principal="alice").ask("a message that comes too late for it")
        got = await reading
        assert (last_frame(got)[0], last_frame(got)[1]["reason"]) == ("closed", "unauthorized")
        assert "too late" not in "".join(got)

    served(scenario)


def test_an_expired_token_ends_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead_s = 0.0
    monkeypatch.setattr(SystemClock, "now", staticmethod(lambda: time.time() + ahead_s))

    async def scenario(server: Live) -> None:
        nonlocal ahead_s
        token = jwt.encode({"sub": "alice", "exp": time.time() + 3600.0}, SECRET)
        await server.http.post("/v1/sessions/s/messages?wait=60", json={"content": "hi"}, headers=bearer(token))
        opened = asyncio.Event()
        reading = asyncio.create_task(frames_of(server, "/v1/sessions/s/events", bearer(token), opened))
        await opened.wait()
        ahead_s = 3000.0
        await asyncio.sleep(2 * LOOK_EVERY_S)
        assert not reading.done(), "it has ten minutes left"
        ahead_s, since = 3600.0, Stopwatch()
        got = await reading
        assert since.elapsed_s < WITHIN_S
        assert last_frame(got)[1]["reason"] == "unauthorized"

    served(scenario, jwt_secret=SECRET)


WAITS = {
    "a send": ("POST", "/v1/sessions/{s}/messages?wait=60", {"content": "again", "agent": "endless"}),
    "a message": ("GET", "/v1/sessions/{s}/messages/{m}?wait=60", None),
    "a stop": ("POST", "/v1/sessions/{s}/interrupt?wait=60", {}),
    "a body": ("POST", "/v1/sessions/{s}/messages", "half"),
}


async def raw(server: Live, method: str, path: str, headers: dict[str, str], body: Any) -> bytes:
    """Send a request, of a body called ``half`` no more than the beginning, and read the answer."""
    content = b"" if body is None else b'{"content": ' if body == "half" else json.dumps(body).encode()
    size = 100 if body == "half" else len(content)
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"]
    lines += [f"content-length: {size}", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    writer.write("\r\n".join(lines).encode() + content)
    answer = await reader.readuntil(b"}}")
    writer.close()
    return answer


async def stubborn(run: Run) -> None:
    """Need longer to stop than anybody waits here."""
    await run.emit("waiting")
    try:
        await run.interrupt.wait()
    finally:
        await asyncio.sleep(5)


@pytest.mark.parametrize("what", WAITS)
def test_a_revoked_key_ends_its_waits(what: str) -> None:
    method, path, body = WAITS[what]
    agent = "stubborn" if what == "a stop" else "endless"

    async def main() -> None:
        async with asyncio.timeout(GUARD_S), live(*AGENTS, stubborn, grace_s=8.0) as server:
            ops, alice, key_id = await two_keys(server)
            sent = await server.http.post(
                "/v1/sessions/s/messages", json={"content": "go", "agent": agent}, headers=alice
            )
            receipt = sent.json()
            async for event in server.host.session("s", principal="alice").events(after=receipt["cursor"]):
                if event.kind == "text.delta":
                    break
            address = path.format(s="s", m=receipt["message_id"])

            waiting = asyncio.create_task(raw(server, method, address, alice, body))
            while server.app.keys.in_use.count == 0:
                await asyncio.sleep(0.01)
            await server.http.delete(f"/v1/keys/{key_id}", headers=ops)
            answer = await waiting
            assert server.host.live, "the wait was ended, not what it waited for"
            assert answer.startswith(b"HTTP/1.1 401 "), answer
            assert b"revoked" in answer
            assert server.app.keys.in_use.count == 0
            for run in list(server.host.live.values()):
                run.give_up()

    asyncio.run(main())


def test_a_revoked_trusted_key_ends_the_streams_of_those_it_acted_for() -> None:
    async def scenario(server: Live) -> None:
        ops, _, _ = await two_keys(server)
        record, secret = await server.app.keys.create(principal="front", role="trusted")
        bob = {**bearer(secret), "x-holdfast-user": "bob"}
        await server.http.post("/v1/sessions/s/messages?wait=60", json={"content": "hi"}, headers=bob)
        opened = asyncio.Event()
        reading = asyncio.create_task(frames_of(server, "/v1/sessions/s/events", bob, opened))
        await opened.wait()
        await server.http.delete(f"/v1/keys/{record.key_id}", headers=ops)
        assert last_frame(await reading)[1]["reason"] == "unauthorized"

    served(scenario)


def test_the_first_key_ends_what_was_opened_without_one() -> None:
    async def scenario(server: Live) -> None:
        await server.post("s", query="?wait=60")
        opened = asyncio.Event()
        reading = asyncio.create_task(frames_of(server, "/v1/sessions/s/events", {}, opened))
        await opened.wait()
        made = await server.http.post("/v1/keys", json={"principal": "ops", "role": "admin"})
        assert made.status_code == 201, "the request that makes the first key is answered"
        assert last_frame(await reading)[1]["reason"] == "unauthorized"

    served(scenario)


def test_whoever_revokes_the_own_key_gets_the_answer() -> None:
    async def scenario(server: Live) -> None:
        record, secret = await server.app.keys.create(principal="ops", role="admin")
        answer = await server.http.delete(f"/v1/keys/{record.key_id}", headers=bearer(secret))
        assert answer.status_code == 200
        assert (await server.http.get("/v1/keys", headers=bearer(secret))).status_code == 401

    served(scenario)


def test_a_key_that_is_revoked_while_others_are_made_stays_revoked() -> None:
    """Two reads of the keys may come back in another order than they were asked."""

    async def scenario(server: Live) -> None:
        keys = server.app.keys
        _, admin = await keys.create(principal="ops", role="admin")
        record, secret = await keys.create(principal="alice", role="user")
        store = server.host.store
        original = store.keys
        first = True

        async def slow_first() -> Any:
            nonlocal first
            found = await original()
            if first:
                first = False
                await asyncio.sleep(0.2)
            return found

        store.keys = slow_first  # type: ignore[method-assign]
        await asyncio.gather(keys.create(principal="bob", role="user"), keys.revoke(record.key_id))
        assert (await server.http.get("/v1/sessions", headers=bearer(secret))).status_code == 401
        assert (await server.http.get("/v1/sessions", headers=bearer(admin))).status_code == 200

    served(scenario)


def test_a_revocation_counts_also_where_its_caller_is_cancelled_before_it_is_written() -> None:
    class SlowStore:
        """Writes what was submitted whatever becomes of the caller, as the real ones do."""

        def __init__(self) -> None:
            self.records: dict[str, KeyRecord] = {}
            self.may_write = asyncio.Event()
            self.submitted = asyncio.Event()
            self.written = asyncio.Event()

        async def add_key(self, record: KeyRecord) -> None:
            self.records[record.key_id] = record

        async def keys(self) -> list[KeyRecord]:
            return list(self.records.values())

        async def revoke_key(self, key_id: str, *, at: float) -> bool:
            async def write() -> bool:
                await self.may_write.wait()
                self.records[key_id] = msgspec.structs.replace(self.records[key_id], revoked_at=at)
                self.written.set()
                return True

            writing = asyncio.create_task(write())
            self.submitted.set()
            return await asyncio.shield(writing)

    async def main() -> None:
        store = SlowStore()
        ring = KeyRing(store)
        record, secret = await ring.create(principal="alice", role="user")
        revoking = asyncio.create_task(ring.revoke(record.key_id))
        await store.submitted.wait()
        revoking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await revoking
        store.may_write.set()
        await store.written.wait()
        async with asyncio.timeout(GUARD_S):
            while True:
                try:
                    ring.find(secret.encode())
                except Unauthenticated:
                    break
                await asyncio.sleep(0)

    asyncio.run(main())


def test_the_client_raises_and_does_not_come_back_for_ever() -> None:
    async def scenario(server: Live) -> None:
        record, secret = await server.app.keys.create(principal="alice", role="user")
        async with Client(server.url, secret) as client:
            session = client.session("s")
            await session.ask("hi")
            streams = asyncio.Event()

            async def follow() -> None:
                async for event in session.events():
                    if event.kind == "message.settled":
                        streams.set()

            following = asyncio.create_task(follow())
            await streams.wait()
            await server.app.keys.revoke(record.key_id)
            async with asyncio.timeout(30):
                with pytest.raises(Unauthenticated, match="no longer valid"):
                    await following
                with pytest.raises(Unauthenticated):
                    await session.ask("and this?")

    served(scenario)


def test_a_stalled_reader_of_a_revoked_key_is_cut() -> None:
    """What its connection had not taken yet is dropped: no byte comes from the server any more."""

    async def chatty(run: Run) -> None:
        for _ in range(40):
            await run.emit("x" * 500_000)
        await run.interrupt.wait()

    async def main() -> None:
        async with asyncio.timeout(GUARD_S), live(*AGENTS, chatty) as server:
            _, _, key_id = await two_keys(server)
            record, secret = await server.app.keys.create(principal="bob", role="user")
            del key_id
            await server.http.post(
                "/v1/sessions/s/messages", json={"content": "go", "agent": "chatty"}, headers=bearer(secret)
            )
            connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            head = f"GET /v1/sessions/s/events HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {secret}\r\n\r\n"
            connection.sendall(head.encode())
            while server.app.context.streams.open == 0:
                await asyncio.sleep(0.01)
            while (await server.host.session("s", principal="bob").info()).seq < 30:
                await asyncio.sleep(0.05)
            await server.app.keys.revoke(record.key_id)
            since = Stopwatch()
            while server.app.context.streams.open:
                await asyncio.sleep(0.01)
            assert since.elapsed_s < WITHIN_S + 1
            connection.settimeout(GUARD_S)
            size = 0
            with pytest.raises(ConnectionResetError):
                while piece := await asyncio.to_thread(connection.recv, 65_536):
                    size += len(piece)
            assert size < 8_000_000
            connection.close()

    asyncio.run(main())


def test_a_reader_that_does_not_take_the_last_frame_is_cut() -> None:
    """It stalls behind the last piece that was taken: what waits there would follow whenever it reads again."""

    async def main() -> None:
        stalled, cut = asyncio.Event(), asyncio.Event()
        in_use = CredentialsInUse(ManualClock())

        async def take(message: MutableMapping[str, Any]) -> None:
            if stalled.is_set():
                await asyncio.Event().wait()
            if b"message.settled" in message.get("body", b""):
                stalled.set()

        async def give() -> dict[str, Any]:
            await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        async with asyncio.timeout(GUARD_S), Host(*AGENTS[:1], store="memory://") as host:
            session = host.session("s")
            await session.ask("hi")

            async def stream() -> None:
                request = Request(
                    {CUT: cut.set, "query_string": b""},
                    give,
                    take,
                    headers={},
                    caller=Caller("local", "user"),
                    settings=host.settings,
                    path={},
                    use=in_use.hold("k_1", None),
                    agents=None,
                    budgets=host.budgets,
                )
                await Streams(host.budgets).serve_sse(request, session, after=None, follow=None)

            streaming = asyncio.create_task(stream())
            await stalled.wait()
            in_use.end_all_but((), "the key was revoked")
            await streaming
            assert cut.is_set()

    asyncio.run(main())


async def slowly(server: Live, secret: str, path: str, *, takes: int) -> socket.socket:
    """Ask on a connection that takes so many bytes at a time."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, takes)
    connection.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    connection.sendall(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {secret}\r\n\r\n".encode())
    connection.settimeout(GUARD_S)
    return connection


async def still_comes(server: Live, connection: socket.socket) -> int:
    """How many bytes can still be read once the server has let the connection of bob go; it is reset after them."""
    since = Stopwatch()
    while server.host.budgets.connections.held("bob"):
        await asyncio.sleep(0.01)
    assert since.elapsed_s < WITHIN_S
    size = 0
    with connection, pytest.raises(ConnectionResetError):
        while piece := await asyncio.to_thread(connection.recv, 65_536):
            size += len(piece)
    return size


def test_what_a_slow_reader_has_not_taken_when_its_key_is_revoked_never_comes() -> None:
    """Its stream does not stall: everything was written, and lies in the transport and in the kernel."""

    async def wordy(run: Run) -> None:
        await run.emit("x" * 30_000)

    async def main() -> None:
        async with asyncio.timeout(GUARD_S), live(*AGENTS, wordy) as server:
            record, secret = await server.app.keys.create(principal="bob", role="user")
            session = server.host.session("s", principal="bob")
            for _ in range(5):
                await session.ask("go", agent="wordy")
            connection = await slowly(server, secret, "/v1/sessions/s/events", takes=4096)
            there = array.array("i", [0])
            while there[0] < 1500 or server.host.budgets.memory.used:  # its buffer is full, and all is written
                fcntl.ioctl(connection, termios.FIONREAD, there)
                await asyncio.sleep(0.01)
            await server.app.keys.revoke(record.key_id)
            assert await still_comes(server, connection) < 50_000

    asyncio.run(main())


def test_a_large_answer_under_way_is_cut() -> None:
    """Its reader is slow: what it has not taken when the key is revoked never comes."""

    async def main() -> None:
        async with asyncio.timeout(GUARD_S), live(*AGENTS) as server:
            record, secret = await server.app.keys.create(principal="bob", role="user")
            session = server.host.session("s", principal="bob")
            kept = await session.attach(b"x" * 15_000_000, media_type="text/plain")
            await session.ask("hi", attachments=[kept])
            connection = await slowly(server, secret, "/v1/sessions/s/export", takes=65_536)
            assert (await asyncio.to_thread(connection.recv, 1000)).startswith(b"HTTP/1.1 200")
            await server.app.keys.revoke(record.key_id)
            assert await still_comes(server, connection) < 15_000_000

    asyncio.run(main())


# ── Clocks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def opened(clock: ManualClock, expires_at: float) -> tuple[CredentialsInUse, asyncio.Task[None]]:
    in_use = CredentialsInUse(clock)

    async def work() -> None:
        with in_use.hold("jwt", expires_at):
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    assert in_use.count == 1
    return in_use, task


@pytest.mark.parametrize(
    ("monotonic", "wall", "ends"),
    [
        (59.0, 59.0, False),
        (60.5, 60.5, True),
        (0.0, 61.0, True),  # the clock was set forward
        (60.5, -3600.0, True),  # it was set back, and the time of the token is over all the same
        (30.0, -3600.0, False),
    ],
)
def test_clocks_that_jump_end_a_stream_early_and_never_late(monotonic: float, wall: float, ends: bool) -> None:
    async def main() -> None:
        clock = ManualClock()
        in_use, task = await opened(clock, clock.now() + 60.0)
        clock.advance(monotonic)
        clock.jump(wall - monotonic)
        in_use.look()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert task.done() == ends
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert in_use.count == 0

    asyncio.run(main())


def test_there_is_one_timer_and_none_without_an_expiry() -> None:
    async def main() -> None:
        clock = ManualClock()
        in_use = CredentialsInUse(clock)
        with in_use.hold("k_1", None):
            assert not in_use.ticking
            with in_use.hold("jwt", clock.now() + 1), in_use.hold("jwt", clock.now() + 9):
                assert in_use.ticking
        in_use.look()
        assert not in_use.ticking
        assert in_use.count == 0

    asyncio.run(main())


def test_hosts_without_a_server_know_nothing_of_it() -> None:
    async def main() -> None:
        async with Host(*AGENTS[:1], store="memory://") as host:
            assert await host.session("s").ask("hi") == "echo hi"

    asyncio.run(main())
