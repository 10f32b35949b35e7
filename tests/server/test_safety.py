"""Nobody drives an agent who should not: pages of other sites, callers without a key, other principals."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from holdfast import Host, Settings
from holdfast.clock import system_clock
from holdfast.errors import ConfigurationError, InvalidRequest, RateLimited
from holdfast.host.budgets import Rate
from holdfast.local_token import is_loopback
from holdfast.logs import RedactingFormatter, redact
from holdfast.server import bind, serve_until
from holdfast.server.auth import OriginGate, digest_of, make_key
from holdfast.server.caller import Role
from holdfast.storage import MemoryStore
from tests.server.live import AGENTS, GUARD_S, JSON, Live, live, served
from tests.server.test_bad_input import refused


async def key_of(server: Live, principal: str, role: Role = "user") -> dict[str, str]:
    """Headers with a new key."""
    _, secret = await server.app.keys.create(principal=principal, role=role)
    return {"authorization": f"Bearer {secret}"}


# ── Pages of other sites ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_host_that_is_not_on_the_list_is_refused_everywhere() -> None:
    async def scenario(server: Live) -> None:
        for host in (
            "evil.example",
            "evil.example:8420",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "[::2]",
            "",
            "a b",
            "[::1",
        ):
            for path in ("/", "/healthz", "/metrics", "/v1/sessions", "/openapi.json"):
                refused(await server.http.get(path, headers={"host": host}), 403, "host_refused")
            refused(await server.post_as("alice", {"host": host}), 403, "host_refused")
        for host in ("localhost", "LOCALHOST:1", "127.0.0.1:9", "[::1]:8420", "my.name"):
            assert (await server.http.get("/healthz", headers={"host": host})).status_code == 200

    served(scenario, allowed_hosts=("my.name",))


def test_a_foreign_origin_is_refused_and_an_allowed_one_gets_its_headers() -> None:
    async def scenario(server: Live) -> None:
        own = server.url
        for origin in ("https://evil.example", "null", "http://localhost:1", own + ".evil", "file://"):
            refused(await server.http.get("/v1/sessions", headers={"origin": origin}), 403, "origin_refused")
            refused(await server.post_as("alice", {"origin": origin}), 403, "origin_refused")
        same = await server.http.get("/v1/sessions", headers={"origin": own})
        assert same.status_code == 200
        assert "access-control-allow-origin" not in same.headers
        friend = {"origin": "https://chat.example"}
        allowed = await server.http.get("/v1/sessions", headers=friend)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, friend["origin"])
        asked = await server.http.options(
            "/v1/sessions/a/messages", headers={**friend, "access-control-request-method": "POST"}
        )
        assert asked.status_code == 204
        assert "content-type" in asked.headers["access-control-allow-headers"]
        async with server.http.stream("GET", "/v1/sessions/none/events", headers=friend) as stream:
            assert stream.headers["access-control-allow-origin"] == friend["origin"]

    served(scenario, allowed_origins=("https://chat.example",))


# ── Keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_from_the_first_key_on_every_request_needs_one() -> None:
    async def scenario(server: Live) -> None:
        assert (await server.http.get("/v1/sessions")).status_code == 200
        made = await server.http.post("/v1/keys", json={"principal": "ops", "role": "admin", "label": "first"})
        assert made.status_code == 201
        headers = {"authorization": f"Bearer {made.json()['secret']}"}
        for path in ("/v1/sessions", "/v1/server", "/metrics"):
            answer = await server.http.get(path)
            refused(answer, 401, "unauthenticated")
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert (await server.http.get(path, headers=headers)).status_code == 200
        assert (await server.http.get("/")).status_code == 401
        page = await server.http.get("/", auth=("any", made.json()["secret"]))
        assert page.status_code == 200
        for path in ("/healthz", "/readyz", "/openapi.json"):
            assert (await server.http.get(path)).status_code == 200, "probes need no key"
        listed = (await server.http.get("/v1/keys", headers=headers)).json()["keys"]
        assert [(key["principal"], key["role"], key["label"]) for key in listed] == [("ops", "admin", "first")]
        assert "secret" not in listed[0]
        assert "digest" not in listed[0]

    served(scenario)


def test_a_wrong_key_is_refused() -> None:
    wrong = ("", "Bearer", "Bearer wrong", "Token x", "Basic !!!", "Basic YTpi", "bearer hf_" + "0" * 32)

    async def scenario(server: Live) -> None:
        await key_of(server, "ops")
        for value in wrong:
            refused(await server.http.get("/v1/sessions", headers={"authorization": value}), 401, "unauthenticated")

    served(scenario)


def test_a_revoked_key_is_refused_at_once_and_the_door_stays_shut() -> None:
    async def scenario(server: Live) -> None:
        admin = await key_of(server, "ops", "admin")
        key_id = (await server.http.get("/v1/keys", headers=admin)).json()["keys"][0]["key_id"]
        revoked = await server.http.delete(f"/v1/keys/{key_id}", headers=admin)
        assert revoked.json()["keys"][0]["revoked_at"] is not None
        refused(await server.http.get("/v1/sessions", headers=admin), 401, "unauthenticated")
        refused(await server.http.get("/v1/sessions"), 401, "unauthenticated")

    served(scenario)


def test_only_admins_drain_and_manage_keys() -> None:
    async def scenario(server: Live) -> None:
        roles: tuple[Role, ...] = ("user", "trusted")
        for role in roles:
            headers = await key_of(server, "someone", role)
            for method, path in (
                ("POST", "/v1/drain"),
                ("GET", "/v1/keys"),
                ("POST", "/v1/keys"),
                ("DELETE", "/v1/keys/x"),
            ):
                refused(await server.http.request(method, path, headers={**headers, **JSON}), 403, "forbidden")
            refused(await server.http.get("/v1/sessions?all=true", headers=headers), 403, "forbidden")
            refused(await server.http.get("/v1/tree?all=true", headers=headers), 403, "forbidden")

    served(scenario)


def test_a_principal_reaches_only_its_own_sessions() -> None:
    async def scenario(server: Live) -> None:
        alice, mallory = await key_of(server, "alice"), await key_of(server, "mallory")
        sent = await server.http.post(
            "/v1/sessions/s/messages", json={"content": "go", "agent": "endless"}, headers=alice
        )
        receipt = sent.json()
        for method, path in (
            ("GET", ""),
            ("GET", "/transcript"),
            ("GET", "/mailbox"),
            ("GET", "/tree"),
            ("GET", "/runs"),
            ("GET", f"/runs/{receipt['run_id']}"),
            ("GET", f"/messages/{receipt['message_id']}"),
            ("DELETE", f"/messages/{receipt['message_id']}"),
            ("GET", f"/events?follow={receipt['message_id']}"),
            ("GET", f"/events?after={receipt['cursor']}"),
            ("POST", "/interrupt"),
            ("POST", "/stop"),
            ("DELETE", ""),
        ):
            answer = await server.http.request(method, f"/v1/sessions/s{path}", headers={**mallory, **JSON})
            refused(answer, 404, "unknown_session")
        assert (await server.http.get("/v1/sessions", headers=mallory)).json() == {"sessions": [], "next": None}
        assert "children" not in (await server.http.get("/v1/tree", headers=mallory)).json()
        own = await server.http.get("/v1/sessions/s", headers=alice)
        assert own.json()["state"] == "running", "nobody else could stop it"
        same_key = await server.http.post("/v1/sessions/s/messages?wait=60", json={"content": "mine"}, headers=mallory)
        assert same_key.json()["text"] == "echo mine", "the same key is another session"

    served(scenario)


def test_only_trusted_keys_act_for_others() -> None:
    async def scenario(server: Live) -> None:
        front, user = await key_of(server, "front", "trusted"), await key_of(server, "user")
        for name in ("alice", "bob"):
            headers = {**front, "x-holdfast-user": name}
            await server.http.post("/v1/sessions/s/messages?wait=60", json={"content": f"of {name}"}, headers=headers)
        for name in ("alice", "bob"):
            seen = (
                await server.http.get("/v1/sessions/s/transcript", headers={**front, "x-holdfast-user": name})
            ).json()
            assert seen["entries"][0]["content"] == f"of {name}"
        refused(await server.http.get("/v1/sessions", headers={**user, "x-holdfast-user": "alice"}), 403, "forbidden")
        for bad in (b"\xff", b"", b"a\tb", b"x" * 201):
            headers_of_bad = {b"authorization": front["authorization"].encode(), b"x-holdfast-user": bad}
            refused(await server.http.get("/v1/sessions", headers=headers_of_bad), 422, "invalid_request")
        admin = await key_of(server, "ops", "admin")
        everybody = (await server.http.get("/v1/sessions?all=true", headers=admin)).json()["sessions"]
        assert {view["principal"] for view in everybody} == {"alice", "bob"}

    served(scenario)


def test_each_principal_has_its_own_rate() -> None:
    async def scenario(server: Live) -> None:
        alice, bob = await key_of(server, "alice"), await key_of(server, "bob")
        answers = [await server.http.get("/v1/sessions", headers=alice) for _ in range(30)]
        limited = [answer for answer in answers if answer.status_code == 429]
        assert limited, "the rate is limited"
        refused(limited[0], 429, "rate_limited")
        assert int(limited[0].headers["retry-after"]) >= 1
        assert (await server.http.get("/v1/sessions", headers=bob)).status_code == 200, "others are not"

    served(scenario, principal_rate_per_s=5.0)


def test_a_bucket_fills_again_and_full_ones_are_forgotten() -> None:
    class Clock:
        at = 0.0

        def now(self) -> float:
            return self.at

        def monotonic(self) -> float:
            return self.at

    clock = Clock()
    rate = Rate("requests", 2.0, clock)
    for _ in range(4):
        rate.take("a")
    with pytest.raises(RateLimited) as caught:
        rate.take("a")
    assert caught.value.retry_after_s == pytest.approx(0.5)
    clock.at = 0.5
    rate.take("a")
    clock.at = 1000.0
    for number in range(10_001):
        rate.take(f"p{number}")
    assert len(rate._buckets) <= 10_001, "the bucket of a was full again, and is gone"
    Rate("requests", 0.0, clock).take("nobody is limited")


def test_a_principal_may_have_only_so_many_streams() -> None:
    async def scenario(server: Live) -> None:
        await server.post("alice", query="?wait=60")
        async with server.http.stream("GET", "/v1/sessions/alice/events") as first:
            assert first.status_code == 200
            refused(await server.http.get("/v1/sessions/alice/events"), 429, "budget_exceeded")
        while server.app.context.streams.open:
            await asyncio.sleep(0.01)
        async with server.http.stream("GET", "/v1/sessions/alice/events") as again:
            assert again.status_code == 200

    served(scenario, principal_streams=1)


# ── Addresses and secrets ────────────────────────────────────────────────────────────────────────────────────────────


def test_an_address_that_others_can_reach_demands_a_key_before_it_starts() -> None:
    async def main(store: MemoryStore, *, host: str) -> None:
        settings = Settings(host=host, port=0, drain_timeout_s=0.1)
        asked: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asked.set_result("at once")
        await serve_until(
            asked, Host(agents=AGENTS, store=store, settings=settings), bind(settings), ready=lambda _: None, note=print
        )

    with pytest.raises(ConfigurationError, match="no API key"):
        asyncio.run(main(MemoryStore(), host="0.0.0.0"))
    asyncio.run(main(MemoryStore(), host="127.0.0.1"))
    with_key = MemoryStore()
    record, _ = make_key(principal="ops", role="admin", label="", at=system_clock.now())

    async def both() -> None:
        await with_key.open(node_id="n_x", at=0.0)
        await with_key.add_key(record)
        await with_key.close()
        await main(with_key, host="0.0.0.0")

    asyncio.run(both())


def test_an_open_address_answers_to_any_number_but_not_to_any_name() -> None:
    gate = OriginGate(Settings(host="0.0.0.0", allowed_hosts=("my.name",)))
    for host in (b"10.1.2.3:8420", b"[fe80::1]:8420", b"my.name"):
        assert gate.check({b"host": host}) is None
    for host in (b"evil.example", b""):
        with pytest.raises(Exception, match="Host header not allowed"):
            gate.check({b"host": host})


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
    ],
)
def test_what_counts_as_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_a_key_is_160_bits_and_stored_only_as_its_hash() -> None:
    record, secret = make_key(principal="ops", role="user", label="", at=1.0)
    assert len(secret) == len("hf_") + 32
    assert record.digest == digest_of(secret)
    assert secret not in repr(record)
    for principal in ("", "x" * 201, "a\nb"):
        with pytest.raises(InvalidRequest):
            make_key(principal=principal, role="user", label="", at=1.0)
    with pytest.raises(InvalidRequest):
        make_key(principal="ops", role="user", label="\0", at=1.0)


def test_secrets_never_reach_the_log() -> None:
    _, secret = make_key(principal="ops", role="user", label="", at=1.0)
    formatter = RedactingFormatter()
    try:
        raise RuntimeError(f"it was {secret}")
    except RuntimeError as error:
        record = logging.LogRecord("x", 40, "", 1, "Bearer %s and basic %s", (secret, "dXNlcjpwYXNz"), None)
        record.exc_info = (type(error), error, error.__traceback__)
    line = formatter.format(record)
    assert secret not in line
    assert "dXNlcjpwYXNz" not in line
    assert "***" in line
    assert redact("nothing to hide") == "nothing to hide"


def test_a_mistake_of_the_server_tells_nothing_and_disturbs_nobody(caplog: Any) -> None:
    async def scenario(server: Live) -> None:
        async def broken(*_: object, **__: object) -> None:
            raise ZeroDivisionError("secret detail")

        sessions, server.host.sessions = server.host.sessions, broken  # type: ignore[method-assign, assignment]
        answer = await server.http.get("/v1/sessions")
        refused(answer, 500, "internal_error")
        assert "secret detail" not in answer.text
        server.host.sessions = sessions  # type: ignore[method-assign]
        assert (await server.post("alice", query="?wait=60")).status_code == 200

    served(scenario)
    assert "secret detail" in caplog.text


def test_live_is_a_context_of_its_own() -> None:
    """Two servers in one process do not know each other."""

    async def main() -> None:
        async with asyncio.timeout(GUARD_S), live() as one, live() as other:
            await one.post("alice", query="?wait=60")
            assert (await other.http.get("/v1/sessions")).json() == {"sessions": [], "next": None}

    asyncio.run(main())


# ── Requests that mean two things, or never end ──────────────────────────────────────────────────────────────────────


async def _raw(server: Live, head: bytes) -> bytes:
    """What the server answers to these bytes, up to the end of the connection or of the answer's head."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    try:
        writer.write(head)
        async with asyncio.timeout(GUARD_S):
            return await reader.readuntil(b"\r\n\r\n")
    finally:
        writer.transport.abort()


def test_a_header_that_decides_may_come_only_once() -> None:
    async def scenario(server: Live) -> None:
        own = server.url.removeprefix("http://").encode()
        user = b"x-holdfast-user: "
        for lines in (
            b"host: evil.example\r\nhost: " + own,
            b"host: " + own + b"\r\norigin: https://evil.example\r\norigin: http://" + own,
            b"host: " + own + b"\r\nauthorization: Bearer a\r\nauthorization: Bearer b",
            b"host: " + own + b"\r\n" + user + b"ann\r\n" + user + b"bob",
        ):
            for path in (b"/v1/sessions", b"/", b"/healthz"):
                answer = await _raw(server, b"GET " + path + b" HTTP/1.1\r\n" + lines + b"\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 422"), lines
        other = b"GET /healthz HTTP/1.1\r\nhost: " + own + b"\r\naccept: a\r\naccept: b\r\n\r\n"
        assert (await _raw(server, other)).startswith(b"HTTP/1.1 200")

    served(scenario)


def test_a_head_without_an_end_is_refused_and_takes_no_more_memory() -> None:
    async def scenario(server: Live) -> None:
        own = server.url.removeprefix("http://").encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: " + own + b"\r\nx-endless: ")
        async with asyncio.timeout(GUARD_S):
            try:
                for _ in range(200):
                    writer.write(b"a" * 65_536)
                    await writer.drain()
                raise AssertionError("13 MB of one header were taken in")
            except ConnectionError:
                pass
            finally:
                writer.transport.abort()
        body = b'{"content": "' + b"b" * 200_000 + b'"}'
        many = b"POST /v1/sessions/a/messages HTTP/1.1\r\nhost: " + own + b"\r\ncontent-type: application/json\r\n"
        many += b"content-length: %d\r\n\r\n" % len(body) + body
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        async with asyncio.timeout(GUARD_S):
            writer.write(many * 3)
            for _ in range(3):
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 202"), "a body is not a head"
                await reader.readuntil(b"}\n")
        writer.transport.abort()

    served(scenario)
