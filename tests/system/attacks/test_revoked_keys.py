"""A credential that ends in the middle of a request: a second later not one byte more comes, whatever was asked."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import jwt

from holdfast.proof.raw_connection import RawConnection
from tests.runtime.processes_zoo import await_condition, living
from tests.system.attacks.harness import ATTACKER, AttackedServer, attacked_server

WITHIN_S = 1.0
SECRET = "a secret of a good many characters, not to be guessed"
AGENTS = tuple(
    f"tests.system.attacks.agents:{name}" for name in ("echo", "endless", "chatty", "programs", "background")
)
SIZE = 15_000_000


@dataclass
class Reader:
    """A connection, all that came on it, and when."""

    line: RawConnection
    said: bytearray = field(default_factory=bytearray)
    times: list[float] = field(default_factory=list)

    async def read(self, *, until: bytes = b"", pause_s: float = 0.0) -> None:
        """Read until the connection ends, or until something has come."""
        while not (until and until in self.said) and (piece := await self.line.take(65_536)):
            self.said += piece
            self.times.append(time.monotonic())
            await asyncio.sleep(pause_s)


async def ask(server: AttackedServer, key: str, method: str, path: str, body: bytes = b"") -> Reader:
    """Send a request with that credential."""
    line = RawConnection(server.port, key)
    await line.open()
    assert await line.say(b"".join(line.request(method, path, body)))
    return Reader(line)


async def ask_half(server: AttackedServer, key: str, path: str, body: bytes) -> Reader:
    """Send all but the end of a request."""
    line = RawConnection(server.port, key)
    await line.open()
    head, body = line.request("POST", path, body)
    assert await line.say(head + body[: len(body) // 2])
    return Reader(line)


async def fill(server: AttackedServer) -> str:
    """Give the attacker a run that talks, one that never ends, and an attachment in a session. Returns its digest."""
    async with server.http(ATTACKER) as http:
        kept = await http.post("/v1/attachments", content=bytes(SIZE), headers={"content-type": "a/b"})
        digest = str(kept.json()["digest"])
        sent = await http.post("/v1/sessions/a/messages?wait=20", json={"content": "hi", "attachments": [digest]})
        assert sent.status_code == 200, sent.text
        for session, agent in (("talks", "chatty"), ("waits", "endless")):
            sent = await http.post(f"/v1/sessions/{session}/messages", json={"content": "go", "agent": agent})
            assert sent.status_code == 202, sent.text
        return digest


async def under_way(server: AttackedServer, key: str) -> dict[str, Reader]:
    """One request of each kind that takes long: nothing of them is done."""
    digest = await fill(server)
    message = json.dumps({"content": "x" * 1000, "agent": "endless"}).encode()
    readers = {
        "body": await ask_half(server, key, "/v1/sessions/half/messages", message),
        "wait": await ask(server, key, "POST", "/v1/sessions/waits/messages?wait=60", message),
        "events": await ask(server, key, "GET", "/v1/sessions/talks/events"),
        "idle events": await ask(server, key, "GET", "/v1/sessions/waits/events"),
        "attachment": await ask(server, key, "GET", f"/v1/attachments/{digest}"),
        "export": await ask(server, key, "GET", "/v1/sessions/a/export"),
    }
    await readers["events"].read(until=b"event: text.delta")
    await readers["idle events"].read(until=b"event: run.started")
    await readers["attachment"].read(until=b"\r\n\r\n")
    await readers["export"].read(until=b'"attachments":{')
    return readers


async def listen(reading: list[asyncio.Task[None]], ended_at: float) -> None:
    """Wait until they have read all that comes, and some time more: a connection may stay open after an answer."""
    await asyncio.wait(reading, timeout=max(0.0, ended_at - time.monotonic()) + WITHIN_S + 1.0)
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)


async def check_ended(readers: dict[str, Reader], end: Callable[[], Awaitable[float]]) -> None:
    """End the credential, of which `end` says when that was, and see what still comes."""
    reading = [
        asyncio.create_task(reader.read(pause_s=0.05 if name in ("attachment", "export") else 0.0))
        for name, reader in readers.items()
    ]
    ended_at = await end()
    await listen(reading, ended_at)
    for name, reader in readers.items():
        late = [at - ended_at for at in reader.times if at > ended_at + WITHIN_S]
        assert not late, f"{name}: {len(late)} pieces came up to {max(late):.2f} s after the end of the credential"
        reader.line.drop()
    for name in ("body", "wait"):
        said = readers[name].said
        assert said.startswith(b"HTTP/1.1 401 ") and b'"unauthenticated"' in said, (name, said)
    for name in ("events", "idle events"):
        last = readers[name].said.rpartition(b"event: ")[2]
        assert last.startswith(b"closed") and b'"reason":"unauthorized"' in last, (name, last)
    for name in ("attachment", "export"):
        assert len(readers[name].said) < SIZE, f"all of the {name} came"


def test_a_key_that_is_revoked_ends_every_request_in_its_middle(tmp_path):
    async def main() -> None:
        async with attacked_server(tmp_path, agents=AGENTS) as server:
            readers = await under_way(server, server.keys[ATTACKER])
            async with server.http("admin") as admin:
                keys = (await admin.get("/v1/keys")).json()["keys"]
                [key_id] = [key["key_id"] for key in keys if key["principal"] == ATTACKER]

                async def end() -> float:
                    assert (await admin.delete(f"/v1/keys/{key_id}")).status_code == 200
                    return time.monotonic()

                async with server.bystander(sends=100):
                    await check_ended(readers, end)
            await server.check()

    asyncio.run(main())


def test_a_wall_clock_that_jumps_forward_ends_what_came_with_a_token_and_nothing_else(tmp_path):
    async def main() -> None:
        async with attacked_server(tmp_path, agents=AGENTS, settings={"jwt_secret": SECRET}, clock=True) as server:
            await fill(server)
            token = jwt.encode({"sub": ATTACKER, "exp": time.time() + 3600}, SECRET)
            with_key = await ask(server, server.keys[ATTACKER], "GET", "/v1/sessions/talks/events")
            await with_key.read(until=b"event: text.delta")
            with_token = await ask(server, token, "GET", "/v1/sessions/talks/events")
            await with_token.read(until=b"event: text.delta")

            async def end() -> float:
                server.set_clock(2 * 3600)
                return time.monotonic()

            async with server.bystander(sends=100):
                await check_token_ended(with_token, end)
            async with server.http(ATTACKER) as http:
                assert (await http.get("/v1/sessions")).status_code == 200, "keys do not expire"
            with_key.said.clear()
            async with asyncio.timeout(10):
                await with_key.read(until=b"event: text.delta")
            with_key.line.drop()
            await server.check()

    asyncio.run(main())


def test_a_wall_clock_that_jumps_back_lengthens_no_stream_of_a_token(tmp_path):
    async def main() -> None:
        async with attacked_server(tmp_path, agents=AGENTS, settings={"jwt_secret": SECRET}, clock=True) as server:
            await fill(server)
            expires_at = time.time() + 4.0
            token = jwt.encode({"sub": ATTACKER, "exp": expires_at}, SECRET)
            with_token = await ask(server, token, "GET", "/v1/sessions/talks/events")
            await with_token.read(until=b"event: text.delta")
            server.set_clock(-86_400.0)

            async def end() -> float:
                return time.monotonic() + expires_at - time.time()

            async with server.bystander(sends=100):
                await check_token_ended(with_token, end)
            await server.check()

    asyncio.run(main())


async def check_token_ended(reader: Reader, end: Callable[[], Awaitable[float]]) -> None:
    ended_at = await end()
    await listen([asyncio.create_task(reader.read())], ended_at)
    assert reader.times[-1] < ended_at + WITHIN_S
    last = reader.said.rpartition(b"event: ")[2]
    assert last.startswith(b"closed") and b'"reason":"unauthorized"' in last, last
    reader.line.drop()


def test_keys_revoke_stop_ends_runs_schedules_and_background_programs(tmp_path):
    words = [str(random.randrange(10_000_000, 99_999_999)) for _ in range(2)]

    async def main() -> None:
        async with attacked_server(tmp_path, agents=AGENTS) as server:
            async with server.http(ATTACKER) as http:
                for agent, word in zip(("programs", "background"), words, strict=True):
                    sent = await http.post(f"/v1/sessions/{agent}/messages", json={"content": word, "agent": agent})
                    assert sent.status_code == 202, sent.text
                schedule = {"session": "often", "text": "hi", "every_s": 1, "schedule_id": "often"}
                assert (await http.post("/v1/schedules", json=schedule)).status_code == 201
            await asyncio.to_thread(await_condition, lambda: len(living(words[0])) == 2, "both programs of the run run")
            await asyncio.to_thread(await_condition, lambda: len(living(words[1])) >= 1, "the background program runs")
            async with server.http("admin") as admin:
                keys = (await admin.get("/v1/keys")).json()["keys"]
                [key_id] = [key["key_id"] for key in keys if key["principal"] == ATTACKER]
                async with server.bystander(sends=50):
                    code, said = await server.command("keys", "revoke", key_id, "--stop", "--json")
                ended = json.loads(said)
                assert code == 0, said
                assert {"programs", "background"} <= set(ended["stopped"]), said
                assert ended["paused"] == ["often"] and (ended["running"], ended["active"]) == ([], [])
                assert [living(word) for word in words] == [[], []]
                sessions = (await admin.get("/v1/sessions?all=true")).json()["sessions"]
                assert {one["state"] for one in sessions if one["principal"] == ATTACKER} == {"idle"}
                [paused] = (await admin.get("/v1/schedules?all=true")).json()["schedules"]
                assert paused["state"] == "paused"
            await server.check()

    asyncio.run(main())
