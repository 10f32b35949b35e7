"""The client keeps the session interface's promises over a network that cuts connections and loses answers."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import msgspec
import pytest

from holdfast import Client, Host, Settings, errors
from holdfast.client.session import RemoteSession
from holdfast.client.wire import error_of, unreachable
from holdfast.errors import (
    AlreadySettled,
    ConfigurationError,
    HoldfastError,
    IdempotencyMismatch,
    InvalidCursor,
    InvalidKey,
    InvalidRequest,
    InvalidSchedule,
    MessageWithdrawn,
    RateLimited,
    RunFailed,
    RunInterrupted,
    ServerUnreachable,
    SessionBusy,
    SessionDeleted,
    UnknownAgent,
    UnknownMessage,
    UnknownPolicy,
    UnknownRun,
    UnknownSchedule,
    UnknownSession,
    WaitExpired,
)
from holdfast.protocol.events import Gap, MessageSettled
from holdfast.protocol.session_api import SessionAPI
from tests.server.live import AGENTS, GUARD_S, Live, live

Scenario = Callable[[Callable[[str], SessionAPI]], Coroutine[Any, Any, None]]


def both(scenario: Scenario) -> None:
    """Run the scenario on sessions of a host, then on sessions of a client: the interface is the same."""

    async def main() -> None:
        async with asyncio.timeout(GUARD_S):
            settings = Settings(drain_timeout_s=0.2, grace_s=0.2)
            async with Host(agents=AGENTS, store="memory://", settings=settings) as host:
                await scenario(host.session)
            async with live() as server, Client(server.url) as client:
                await scenario(client.session)

    asyncio.run(main())


async def begun(session: SessionAPI) -> str:
    """Start an endless run; its message id, once it has begun."""
    receipt = await session.send("go", agent="endless")
    async for event in session.events(after=receipt.cursor):
        if event.kind == "text.delta":
            break
    return receipt.message_id


def test_a_schedule_is_made_looked_at_paused_run_and_deleted() -> None:
    async def scenario(session_of: Callable[[str], SessionAPI]) -> None:
        session = session_of("timed")
        schedule = await session.schedule("tick", every_s=3600.0, agent="echo", jitter_s=2.0, max_runs=9, miss="burst")
        view = await schedule.info()
        assert (view.schedule_id, view.session, view.text) == (schedule.schedule_id, "timed", "tick")
        assert (view.every_s, view.jitter_s, view.max_runs, view.miss) == (3600.0, 2.0, 9, "burst")
        receipt = await schedule.run_now()
        settlement = await session.wait(receipt.message_id, timeout_s=GUARD_S)
        assert (settlement.state, settlement.text) == ("completed", "echo tick")
        assert (await schedule.pause()).state == "paused"
        assert (await schedule.pause()).state == "paused"
        resumed = await schedule.resume()
        assert (resumed.state, resumed.fired) == ("active", 1)
        again = await session.schedule(
            "other", cron="0 9 * * *", timezone="Europe/Berlin", schedule_id=view.schedule_id
        )
        assert (await again.info()).text == "other"
        assert (await schedule.delete()).cron == "0 9 * * *"
        for doing in (schedule.info, schedule.pause, schedule.resume, schedule.run_now, schedule.delete):
            with pytest.raises(UnknownSchedule):
                await doing()
        with pytest.raises(InvalidSchedule):
            await session.schedule("never", cron="0 0 30 2 *")
        for unlimited in (math.nan, math.inf, -1.0):
            with pytest.raises(InvalidRequest):
                await session.schedule("tick", every_s=5.0, initial_delay_s=unlimited)
        with pytest.raises(UnknownAgent):
            await session.schedule("tick", every_s=5.0, agent="nobody")
        with pytest.raises(UnknownPolicy):
            await session.schedule("tick", every_s=5.0, overlap="sometimes")  # type: ignore[arg-type]
        with pytest.raises(InvalidKey):
            await session.schedule("tick", every_s=5.0, schedule_id="")

    both(scenario)


def test_schedules_are_listed_by_principal_and_session() -> None:
    async def main() -> None:
        async with asyncio.timeout(GUARD_S), live() as server, Client(server.url) as client:
            await client.schedule("a", "tick", every_s=60.0, schedule_id="one/two".replace("/", " "))
            await client.schedule("b", "tick", every_s=60.0, schedule_id="..")
            await server.host.schedule("c", "tick", every_s=60.0, principal="anna")
            assert [view.session for view in await client.schedules()] == ["a", "b"]
            assert [view.session for view in await client.schedules(session="b")] == ["b"]
            assert len(await client.schedules(limit=1)) == 1
            assert len(await client.schedules(everybody=True)) == 3
            assert (await client.find_schedule("..").pause()).state == "paused"
            with pytest.raises(UnknownSchedule):
                await client.find_schedule((await server.host.schedules(principal="anna"))[0].schedule_id).delete()

    asyncio.run(main())


def test_a_message_goes_all_the_way() -> None:
    async def scenario(session_of: Callable[[str], SessionAPI]) -> None:
        session = session_of("alice")
        assert await session.ask("hello", timeout_s=GUARD_S) == "echo hello"
        receipt = await session.send("again", idempotency_key="k")
        settlement = await session.wait(receipt.message_id, timeout_s=GUARD_S)
        assert (settlement.state, settlement.text) == ("completed", "echo again")
        assert await session.message(receipt.message_id) == settlement
        assert (await session.send("again", idempotency_key="k")).disposition == "duplicate"
        events = [event async for event in session.events(after=receipt.cursor, follow=receipt.message_id)]
        assert isinstance(events[-1], MessageSettled)
        assert not any(isinstance(event, Gap) for event in events)
        view = await session.info()
        assert (view.key, view.state, view.waiting) == ("alice", "idle", 0)
        assert [entry.content for entry in await session.transcript()] == ["hello", "echo hello", "again", "echo again"]
        runs = await session.runs()
        assert [run.state for run in runs] == ["completed", "completed"]
        assert await session.run(runs[0].run_id) == runs[0]
        assert (await session.tree()).state == "idle"
        assert await session.mailbox() == []

    both(scenario)


def test_a_long_transcript_comes_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(session_of: Callable[[str], SessionAPI]) -> None:
        session = session_of("alice")
        for number in range(5):
            await session.ask(str(number))
        entries = await session.transcript()
        assert [entry.n for entry in entries] == list(range(1, 11))

    for page in (1, 3, 5, 10, 11):
        monkeypatch.setattr("holdfast.client.session._PAGE", page)
        both(scenario)


def test_what_becomes_of_a_message_is_raised_by_ask() -> None:
    async def scenario(session_of: Callable[[str], SessionAPI]) -> None:
        with pytest.raises(RunFailed, match="it broke"):
            await session_of("failing").ask("x", agent="failing")
        with pytest.raises(WaitExpired):
            await session_of("slow").ask("x", agent="endless", timeout_s=0.05)
        session = session_of("alice")
        await begun(session)
        waiting = asyncio.create_task(session.ask("later", agent="echo"))
        while not (items := await session.mailbox()):
            await asyncio.sleep(0.01)
        await session.withdraw(items[0].message.message_id)
        with pytest.raises(MessageWithdrawn):
            await waiting
        asking = asyncio.create_task(session_of("bob").ask("x", agent="endless"))
        while True:
            try:
                if (await session_of("bob").info()).run_id:
                    break
            except UnknownSession:
                await asyncio.sleep(0.01)
        receipt = await session_of("bob").interrupt("enough")
        assert receipt.cause.reason == "enough"
        with pytest.raises(RunInterrupted, match="enough"):
            await asking

    both(scenario)


def test_stopping_answers_with_receipts() -> None:
    async def scenario(session_of: Callable[[str], SessionAPI]) -> None:
        session = session_of("alice")
        await begun(session)
        waiting = await session.send("waits")
        stopped = await session.stop("enough", grace_s=1.0)
        assert stopped.receipt.outcome == "gone"
        assert [message.message_id for message in stopped.withdrawn] == [waiting.message_id]
        idle = await session.interrupt()
        assert (idle.outcome, idle.stopped.tasks) == ("gone", 0)
        message_id = await begun(session)
        run_id = (await session.runs())[0].run_id
        assert (await session.interrupt("exactly", run_id=run_id)).outcome == "gone"
        assert (await session.wait(message_id)).state == "interrupted"
        assert (await session.delete()).receipt.outcome == "gone"
        with pytest.raises(SessionDeleted):
            await session.send("too late")

    both(scenario)


def test_events_wait_for_a_session_here_and_there() -> None:
    async def scenario(session_of: Callable[[str], SessionAPI]) -> None:
        session = session_of("alice")
        reading = asyncio.ensure_future(anext(aiter(session.events())))
        await session_of("bob").ask("another session wakes nobody")
        assert not reading.done()
        await session.ask("hello")
        assert (await reading).kind == "message.accepted"

    both(scenario)


def test_refusals_are_the_same_errors_here_and_there() -> None:
    async def scenario(session_of: Callable[[str], SessionAPI]) -> None:
        session = session_of("alice")
        for refused in (
            session.info,
            session.transcript,
            session.mailbox,
            session.tree,
            session.runs,
            session.interrupt,
        ):
            with pytest.raises(UnknownSession):
                await refused()
        with pytest.raises(UnknownSession):
            await anext(aiter(session.events(follow="m_none")))
        message_id = (await session.send("x", idempotency_key="k")).message_id
        await session.wait(message_id)
        with pytest.raises(IdempotencyMismatch):
            await session.send("y", idempotency_key="k")
        with pytest.raises(AlreadySettled):
            await session.withdraw(message_id)
        with pytest.raises(UnknownMessage):
            await session.wait("m_none")
        with pytest.raises(UnknownRun):
            await session.run("r_none")
        with pytest.raises(UnknownAgent):
            await session.send("x", agent="nobody")
        with pytest.raises(InvalidCursor):
            await anext(aiter(session.events(after="1-77")))
        await begun(session)
        with pytest.raises(SessionBusy) as caught:
            await session.send("x", policy="reject")
        assert caught.value.hint
        with pytest.raises(InvalidKey):
            await session_of("a/b").info()

    both(scenario)


# ── A network that cuts ──────────────────────────────────────────────────────────────────────────────────────────────


class Proxy:
    """A TCP proxy that can cut every connection, refuse new ones, or swallow the next answer."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: set[asyncio.StreamWriter] = set()
        self.refusing = False
        self.lose_answers = 0
        self.cut_after: list[int] = []
        self.connections = 0

    def cut(self) -> None:
        """Cut all connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connections += 1
        if self.refusing:
            writer.transport.abort()
            return
        there, here = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, here}
        async with asyncio.TaskGroup() as group:
            group.create_task(self._copy(reader, here, answers=False))
            group.create_task(self._copy(there, writer, answers=True))
        self._writers -= {writer, here}

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool) -> None:
        left = self.cut_after.pop(0) if answers and self.cut_after else None
        try:
            while data := await source.read(1024):
                if answers and self.lose_answers:
                    self.lose_answers -= 1
                    break
                if left is not None:
                    data = data[:left]
                    left -= len(data)
                    if not data:
                        break
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.close()


@asynccontextmanager
async def proxied(**options: Any) -> AsyncIterator[tuple[Live, Proxy, Client]]:
    """A server, a proxy before it, and a client that speaks to the proxy."""
    async with live() as server:
        proxy = Proxy(int(server.url.rpartition(":")[2]))
        listening = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        try:
            async with Client(f"http://127.0.0.1:{port}", **options) as client:
                yield server, proxy, client
        finally:
            listening.close()
            proxy.cut()


def through_proxy(scenario: Callable[[Live, Proxy, Client], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run the scenario through a proxy."""

    async def main() -> None:
        async with asyncio.timeout(GUARD_S), proxied(**options) as (server, proxy, client):
            await scenario(server, proxy, client)

    asyncio.run(main())


def test_a_send_whose_answer_is_lost_is_repeated_and_runs_once() -> None:
    async def scenario(server: Live, proxy: Proxy, client: Client) -> None:
        session = client.session("alice")
        for lost in (1, 2):
            proxy.lose_answers = lost
            await session.send(f"message {lost}")
        proxy.lose_answers = 1
        assert await session.ask("and now?") == "echo and now?"
        await session.wait((await session.send("end")).message_id)
        said = [entry.content for entry in await session.transcript() if entry.role == "user"]
        assert said == ["message 1", "message 2", "and now?", "end"]

    through_proxy(scenario)


def test_an_interrupt_whose_answer_is_lost_is_not_repeated_unless_it_names_its_run() -> None:
    async def scenario(server: Live, proxy: Proxy, client: Client) -> None:
        session = client.session("alice")
        await begun(session)
        run_id = (await session.runs())[0].run_id
        proxy.lose_answers = 1
        with pytest.raises(ServerUnreachable, match="before the response"):
            await session.interrupt("once")
        await begun(session)
        run_id = (await session.runs())[0].run_id
        proxy.lose_answers = 1
        assert (await session.interrupt("exactly", run_id=run_id)).outcome == "gone"

    through_proxy(scenario)


def test_events_come_back_after_each_cut_without_loss_or_repeat() -> None:
    async def scenario(server: Live, proxy: Proxy, client: Client) -> None:
        session = client.session("alice")
        cuts: list[HoldfastError] = []
        backs: list[int] = []
        receipt = await session.send("300", agent="counting")
        await session.wait(receipt.message_id)
        whole = [event async for event in server.host.session("alice").events(follow=receipt.message_id)]
        proxy.cut_after = [600, 700, 1500, 5000, 10_000, 20_000]
        async with Client(client.url, on_cut=cuts.append, on_back=lambda: backs.append(len(cuts))) as again:
            seen = [event async for event in again.session("alice").events(follow=receipt.message_id)]
        assert seen == whole
        assert len(cuts) == 6
        assert backs == [1, 2, 3, 4, 5, 6]

    through_proxy(scenario)


def test_events_wait_for_a_server_that_is_away_and_give_up_in_time() -> None:
    async def scenario(server: Live, proxy: Proxy, client: Client) -> None:
        session = client.session("alice")
        await begun(session)
        seen = []
        with pytest.raises(ServerUnreachable):
            async for event in session.events():
                seen.append(event.kind)
                if event.kind == "text.delta":
                    proxy.refusing = True
                    proxy.cut()
        assert seen == ["message.accepted", "run.started", "text.delta"]

    through_proxy(scenario, reconnect_s=0.5)


def test_events_go_on_when_the_server_was_started_again() -> None:
    async def main() -> None:
        from holdfast.storage import MemoryStore

        async with asyncio.timeout(GUARD_S):
            store = MemoryStore()
            async with live(store=store) as first, Client(first.url) as client:
                session = client.session("alice")
                receipt = await session.send("one")
                await session.wait(receipt.message_id)
                stream = session.events()
                seen = [await anext(stream) for _ in range(5)]
                port = int(first.url.rpartition(":")[2])
                following = asyncio.create_task(anext(stream))
                while not first.app.context.streams.open:
                    await asyncio.sleep(0.01)
                await first.end()
                async with live(store=store, port=port):
                    await session.send("two")
                    assert msgspec.structs.asdict(await following)["seq"] == len(seen) + 1
                    await stream.aclose()

    asyncio.run(main())


def test_a_server_that_is_not_there_is_said_so_with_a_next_step() -> None:
    async def main() -> None:
        async with Client("http://127.0.0.1:9", retry_s=0.1) as client:
            with pytest.raises(ServerUnreachable) as caught:
                await client.session("alice").send("x")
            assert "127.0.0.1:9" in caught.value.message
            assert "start the server" in caught.value.hint
            with pytest.raises(ServerUnreachable):
                await client.sessions()

    asyncio.run(main())


def test_something_else_than_holdfast_is_told_apart() -> None:
    async def other(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200 if request.url.path.endswith("/odd") else 502, content=b"<html>")

    async def main() -> None:
        async with Client("http://127.0.0.1:9", transport=httpx2.MockTransport(other)) as client:
            with pytest.raises(HoldfastError, match="502"):
                await client.session("alice").info()
            with pytest.raises(HoldfastError, match="unexpected response"):
                await client.session("odd").info()

    asyncio.run(main())


def test_a_limited_rate_is_waited_for() -> None:
    async def main() -> None:
        async with asyncio.timeout(GUARD_S), live(principal_rate_per_s=20.0) as server, Client(server.url) as client:
            views = await asyncio.gather(*(client.sessions() for _ in range(60)))
            assert len(views) == 60

    asyncio.run(main())


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8420",
        "ftp://x",
        "http://",
        "holdfast",
        "http://x:99999",
        "http://x:abc",
        "http://x/?a=1",
        "http://x/#a",
        "http://[::1",
        "http://a b",
    ],
)
def test_an_address_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigurationError, match="not a server URL"):
        Client(url)


def test_every_error_has_a_code_of_its_own_and_comes_back_as_its_class() -> None:
    found = [getattr(errors, name) for name in errors.__all__]
    kinds = [kind for kind in found if isinstance(kind, type) and issubclass(kind, HoldfastError)]
    assert len({kind.code for kind in kinds}) == len(kinds)
    for kind in kinds:
        body = {"error": {"code": kind.code, "message": "what happened", "hint": "what to do"}}
        response = httpx2.Response(400, json=body, headers={"retry-after": "7"})
        error = error_of(response)
        assert type(error) is kind
        assert (error.message, error.hint, error.retry_after_s) == ("what happened", "what to do", 7.0)


def test_a_remote_session_is_a_session() -> None:
    def takes(session: SessionAPI) -> str:
        return session.key

    client = Client()
    assert takes(client.session("alice")) == "alice"
    assert isinstance(client.session("alice"), RemoteSession)
    assert "alice" in repr(client.session("alice"))
    asyncio.run(client.http.aclose())


@pytest.mark.parametrize("secret", ["", "two words", "line\nbreak", "schl\u00fcssel"])
def test_a_key_that_no_header_can_carry_is_refused_at_once(secret: str) -> None:
    with pytest.raises(ConfigurationError, match="key"):
        Client(key=secret)


def test_a_principal_may_have_any_printable_name() -> None:
    async def main() -> None:
        async with live() as server:
            async with Client(server.url, user="\u00fcn\u00ef \U0001f600") as client:
                await client.session("alice").send("x")
                assert (await client.session("alice").info()).principal == "\u00fcn\u00ef \U0001f600"

    asyncio.run(main())
    with pytest.raises(ConfigurationError, match="principal"):
        Client(user="a\nb")


@pytest.mark.parametrize("key", [".", "..", "%2e", "a b", "?", "#", "%", "\u05d0", "\U0001f600" * 200])
def test_each_key_is_a_session_of_its_own(key: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(GUARD_S), live() as server, Client(server.url) as client:
            session = client.session(key)
            receipt = await session.send("x")
            assert receipt.session == key
            assert (await session.info()).key == key
            async for _ in session.events(follow=receipt.message_id):
                pass
            await session.delete()

    asyncio.run(main())


def test_a_server_that_dies_in_the_instant_of_connecting_is_unreachable() -> None:
    async def dying(request: httpx2.Request) -> httpx2.Response:
        raise AttributeError("'NoneType' object has no attribute 'getpeername'")

    async def broken(request: httpx2.Request) -> httpx2.Response:
        raise AttributeError("something else")

    async def main() -> None:
        async with Client(transport=httpx2.MockTransport(dying), retry_s=0.0, reconnect_s=0.0) as client:
            with pytest.raises(ServerUnreachable):
                await client.session("alice").info()
            with pytest.raises(ServerUnreachable):
                await anext(client.session("alice").events())
        async with Client(transport=httpx2.MockTransport(broken), retry_s=0.0) as client:
            with pytest.raises(AttributeError):
                await client.session("alice").info()

    asyncio.run(main())


def test_a_stream_does_not_reconnect_sooner_than_the_server_asks() -> None:
    """A pause as long as the server asks would exceed the time for reconnects, so there is no second attempt."""
    attempts = 0

    async def full(request: httpx2.Request) -> httpx2.Response:
        nonlocal attempts
        attempts += 1
        body = {"error": {"code": RateLimited.code, "message": "too many streams", "hint": ""}}
        return httpx2.Response(429, headers={"retry-after": "30"}, json=body)

    async def main() -> None:
        async with Client(transport=httpx2.MockTransport(full), reconnect_s=20.0) as client:
            with pytest.raises(RateLimited):
                await anext(client.session("alice").events())

    asyncio.run(main())
    assert attempts == 1


def failure(error: httpx2.TransportError, cause: BaseException | None = None) -> httpx2.TransportError:
    error.__cause__ = cause
    error.request = httpx2.Request("GET", "http://x", extensions={"timeout": {"connect": 5.0, "read": 60.0}})
    return error


REFUSED = OSError("All connection attempts failed")
REFUSED.__cause__ = ExceptionGroup("multiple connection attempts failed", [ConnectionRefusedError(111, "refused")])


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (failure(httpx2.ConnectError("All connection attempts failed"), REFUSED), "nothing listens there"),
        (failure(httpx2.ConnectError("x"), socket.gaierror(-2, "Name or service not known")), "unknown host name"),
        (
            failure(httpx2.ConnectError("x"), ssl.SSLError("certificate verify failed")),
            "TLS failed: ('certificate verify failed',)",
        ),
        (failure(httpx2.ConnectError("[Errno 101] Network is unreachable")), "no connection"),
        (failure(httpx2.ConnectTimeout("")), "no connection within 5 s"),
        (failure(httpx2.ReadTimeout("")), "no answer within 60 s"),
        (httpx2.ReadTimeout(""), "no answer"),
        (failure(httpx2.ReadError("")), "the connection broke off"),
        (failure(httpx2.RemoteProtocolError("Server disconnected")), "the connection broke off"),
        (failure(httpx2.ProxyError("407 Proxy Authentication Required")), "407 Proxy Authentication Required"),
        (failure(httpx2.UnsupportedProtocol("")), "UnsupportedProtocol"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_an_unreachable_server_is_told_in_plain_words(error: httpx2.TransportError, why: str) -> None:
    assert unreachable("http://x", error).message == f"http://x does not answer: {why}"


def test_a_lost_response_is_told_with_its_timeout() -> None:
    lost = unreachable("http://x", failure(httpx2.ReadTimeout("")), lost_reply=True)
    assert lost.message == "the connection to http://x was lost before the response: no answer within 60 s"
    broken = unreachable("http://x", failure(httpx2.ReadError("")), lost_reply=True)
    assert broken.message == "the connection to http://x was lost before the response"


def test_names_that_no_address_can_carry_are_refused_and_reach_nothing_else() -> None:
    async def main() -> None:
        async with asyncio.timeout(GUARD_S), live() as server, Client(server.url) as client:
            session = client.session("alice")
            receipt = await session.send("go", agent="endless")
            for key in ("", "\ud800"):
                with pytest.raises(InvalidKey):
                    client.session(key)
            with pytest.raises(errors.InvalidRequest):
                await session.send("\ud800")
            for odd in ("..", "."):
                with pytest.raises(UnknownMessage):
                    await session.message(odd)
                with pytest.raises(UnknownMessage):
                    await session.withdraw(odd)
                with pytest.raises(UnknownRun):
                    await session.run(odd)
            assert (await session.message(receipt.message_id)).state == "taken"

    asyncio.run(main())


def test_a_wait_that_is_over_names_the_time_that_was_given() -> None:
    async def main() -> None:
        async with asyncio.timeout(GUARD_S), live() as server, Client(server.url) as client:
            session = client.session("alice")
            with pytest.raises(WaitExpired, match=r"after 0\.05 s"):
                await session.ask("go", agent="endless", timeout_s=0.05)
            with pytest.raises(WaitExpired):
                await session.ask("go", agent="endless", timeout_s=-1)

    asyncio.run(main())


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -1.0])
def test_a_time_that_is_none_is_refused_here_and_there(odd: float) -> None:
    async def scenario(session_of: Callable[[str], SessionAPI]) -> None:
        with pytest.raises(errors.InvalidRequest):
            await session_of("alice").send("x", policy="collect", quiet_s=odd)
        await session_of("bob").send("x")
        with pytest.raises(errors.InvalidRequest):
            await session_of("bob").interrupt(grace_s=odd)

    both(scenario)
