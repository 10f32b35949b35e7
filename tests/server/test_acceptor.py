"""New connections: who has shown a valid key is served first, and nobody's burst keeps the others waiting."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from holdfast import Host, Run, Settings
from holdfast.host.budgets import Charge
from holdfast.server import acceptor
from holdfast.server.acceptor import Acceptor
from holdfast.server.auth import KeyRing
from holdfast.server.connections import Connection, Connections
from holdfast.server.tokens import TokenVerifier
from tests.server.live import GUARD_S

HEAD = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
_RESET = struct.pack("ii", 1, 0)


def with_key(secret: str) -> bytes:
    return HEAD + f"Authorization: Bearer {secret}\r\n\r\n".encode()


async def echo(run: Run) -> str:
    return run.text


class Listener(socket.socket):
    """A listening socket that may refuse to accept, and notes when."""

    def __init__(self) -> None:
        super().__init__(socket.AF_INET, socket.SOCK_STREAM)
        self.refusals: list[int] = []
        self.refused_at: list[float] = []
        self.bind(("127.0.0.1", 0))
        self.listen(2048)
        self.setblocking(False)

    def accept(self) -> tuple[socket.socket, Any]:
        if self.refusals:
            self.refused_at.append(asyncio.get_running_loop().time())
            raise OSError(self.refusals.pop(), "refused")
        return super().accept()


class Served(asyncio.Protocol):
    """A connection that is served; it answers nothing."""

    queue: OrderedDict[Connection, float] | None = None
    charge: Charge | None = None
    peer = "127.0.0.1"

    def __init__(self, scene: Scene, waited: Connection | None) -> None:
        self.scene = scene
        self.waited = waited

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.number = (transport.get_extra_info("peername") or ("", 0))[1]
        if self.waited is not None:
            self.scene.connections.lost(self.waited)
        self.scene.connections.opened(self, transport.get_extra_info("socket").fileno())
        if self.number in self.scene.owners:
            self.scene.connections.own(self, self.scene.owners[self.number])
            self.scene.connections.busy(self)
        self.scene.served.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.scene.connections.lost(self)

    def on_timeout(self) -> None:
        self.drop()

    def drop(self) -> None:
        self.transport.abort()


class Scene:
    """A listener whose clients connect before anything accepts them, so that their order is known."""

    def __init__(self, host: Host, keys: KeyRing) -> None:
        self.host = host
        self.keys = keys
        self.connections = Connections(host)
        self.listener = Listener()
        self.clients: dict[int, socket.socket] = {}
        self.owners: dict[int, str] = {}
        """Clients whose request is handled, by their number."""
        self.served: list[Served] = []
        self.acceptor: Acceptor | None = None

    def client(self, said: bytes = b"") -> int:
        """Connect, say it, and return the number of the client."""
        made = socket.create_connection(self.listener.getsockname())
        made.sendall(said)
        number: int = made.getsockname()[1]
        self.clients[number] = made
        return number

    def crowd(self, count: int, said: bytes = HEAD + b"\r\n") -> list[int]:
        return [self.client(said) for _ in range(count)]

    def accept(self) -> Acceptor:
        self.acceptor = Acceptor(self.listener, lambda waited: Served(self, waited), self.connections, self.keys)
        return self.acceptor

    @property
    def order(self) -> list[int]:
        """The clients in the order in which they were served."""
        return [one.number for one in self.served]

    async def all_served(self, *numbers: int) -> None:
        await self.until(lambda: set(numbers) <= set(self.order))

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(GUARD_S):
            while not done():
                await asyncio.sleep(0)

    def is_closed(self, number: int) -> bool:
        """Whether the server has closed the connection of a client."""
        client = self.clients[number]
        client.setblocking(False)
        try:
            return client.recv(1) == b""
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def count(self, reason: str) -> int:
        return self.host.incidents.counts[f"connections_{reason}"]

    async def end(self) -> None:
        if self.acceptor is not None:
            self.acceptor.close()
            await self.acceptor.wait_closed()
        for one in self.served:
            one.transport.abort()
        self.listener.close()
        self.connections.close()
        for client in self.clients.values():
            client.close()
        await self.until(lambda: not self.connections.open)


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def play(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a scenario on each kind of loop; even the shortest burst takes turns."""
    monkeypatch.setattr(acceptor, "_BURST", 0)

    def run(scenario: Callable[[Scene], Coroutine[Any, Any, None]], token: str | None = None, **settings: Any) -> None:
        async def main() -> None:
            chosen = Settings(**{"head_timeout_s": GUARD_S, **settings})
            async with asyncio.timeout(GUARD_S), Host(echo, store="memory://", settings=chosen) as host:
                keys = KeyRing(host.store, host.clock, token=token, signed=TokenVerifier.of(chosen))
                await keys.load()
                scene = Scene(host, keys)
                try:
                    await scenario(scene)
                finally:
                    await scene.end()

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(main())

    return run


async def key_of(scene: Scene, principal: str) -> bytes:
    """The head of a request with a key of that principal."""
    return with_key((await scene.keys.create(principal=principal, role="user"))[1])


def test_a_valid_key_overtakes_hundreds_that_wait(play: Any) -> None:
    async def scenario(scene: Scene) -> None:
        head = await key_of(scene, "alice")
        junk = scene.crowd(250, b"GET / HTTP/1.1\r\na: " + b"b" * 9000) + scene.crowd(250)
        alice = scene.client(head)
        scene.accept()
        await scene.all_served(alice)
        assert scene.order.index(alice) <= 20
        await scene.all_served(*junk)
        assert [number for number in scene.order if number != alice] == junk

    play(scenario)


@pytest.mark.parametrize("said", [b"", HEAD + b"Authoriz"], ids=["nothing", "a part"])
def test_a_key_that_comes_after_the_connection_was_accepted_counts(play: Any, said: bytes) -> None:
    async def scenario(scene: Scene) -> None:
        head = await key_of(scene, "alice")
        scene.crowd(300)
        alice = scene.client(said)
        scene.crowd(200)
        scene.accept()
        if said:
            await scene.until(lambda: scene.connections.open > 300)
        else:
            await scene.until(lambda: scene.connections.open == 501)
        scene.clients[alice].sendall(head[len(said) :])
        await scene.all_served(alice)
        assert scene.order.index(alice) < 100

    play(scenario)


def test_the_oldest_without_a_key_make_room_and_are_counted(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "_FEW", 0)

    async def scenario(scene: Scene) -> None:
        head = await key_of(scene, "alice")
        alice = scene.client(head)
        scene.owners[alice] = "alice"
        junk = scene.crowd(40)
        scene.accept()
        await scene.until(lambda: scene.count("no_room") == 30)
        await scene.until(lambda: all(map(scene.is_closed, junk[:30])))
        assert not any(map(scene.is_closed, [*junk[30:], alice]))
        assert scene.order == [alice]
        assert scene.connections.open == 11

    play(scenario, max_connections=20)


def test_what_waits_counts_as_an_open_connection(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "_FEW", 0)

    async def scenario(scene: Scene) -> None:
        head = await key_of(scene, "alice")
        monkeypatch.setattr(acceptor, "_MOST", 0)
        scene.crowd(5)
        for _ in range(8):
            scene.client(head)
        scene.accept()
        await scene.until(lambda: scene.connections.open == 13)
        assert scene.host.budgets.connections.held("alice") == 8
        assert scene.served == []

    play(scenario)


def test_what_waits_is_closed_after_the_time_of_a_head(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "_FEW", 0)

    async def scenario(scene: Scene) -> None:
        await key_of(scene, "alice")
        silent = scene.client()
        scene.accept()
        await scene.until(lambda: scene.is_closed(silent))
        assert scene.count("too_slow") == 1

    play(scenario, head_timeout_s=0.05)


def test_clients_that_have_gone_are_closed(play: Any) -> None:
    async def scenario(scene: Scene) -> None:
        await key_of(scene, "alice")
        for number in scene.crowd(5):
            scene.clients[number].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            scene.clients.pop(number).close()
        for number in (gone := scene.crowd(5, b"")):
            scene.clients.pop(number).close()
        left = scene.crowd(5)
        scene.accept()
        await scene.all_served(*left)
        assert not set(gone) & set(scene.order)
        await scene.until(lambda: scene.connections.open == 5)

    play(scenario)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS])
def test_accepting_pauses_where_the_system_refuses(play: Any, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(acceptor, "_PAUSE_S", 0.05)

    async def scenario(scene: Scene) -> None:
        await key_of(scene, "alice")
        scene.listener.refusals = [number] * 3
        late = scene.crowd(10)
        scene.accept()
        await scene.all_served(*late)
        first, second, third = scene.listener.refused_at
        assert min(second - first, third - second) > 0.045
        assert any("cannot accept" in one.text for one in scene.host.incidents.newest)

    play(scenario)


def test_what_waits_is_served_while_accepting_pauses(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "_PAUSE_S", 600.0)

    async def scenario(scene: Scene) -> None:
        await key_of(scene, "alice")
        waiting = scene.crowd(50)
        accept = Listener.accept
        monkeypatch.setattr(Listener, "accept", lambda self: refuse() if len(scene.clients) > 50 else accept(self))
        scene.accept()
        await scene.until(lambda: scene.connections.open == 50)
        late = scene.client()
        await scene.all_served(*waiting)
        assert late not in scene.order

    def refuse() -> Any:
        raise OSError(errno.EMFILE, "refused")

    play(scenario)


@pytest.mark.parametrize("turns", range(6))
def test_closing_closes_what_waits_and_what_is_being_served(play: Any, turns: int) -> None:
    async def scenario(scene: Scene) -> None:
        head = await key_of(scene, "alice")
        scene.crowd(50)
        for _ in range(10):
            scene.client(head)
        made = scene.accept()
        for _ in range(turns):
            await asyncio.sleep(0)
        made.close()
        made.close()
        await made.wait_closed()
        for one in scene.served:
            one.transport.abort()
        await scene.until(lambda: all(map(scene.is_closed, scene.clients)))
        await scene.until(lambda: not scene.connections.open)
        assert len(scene.served) < 60
        with pytest.raises(OSError):
            scene.client()

    play(scenario)


def test_where_no_key_is_needed_the_order_is_kept(play: Any) -> None:
    async def scenario(scene: Scene) -> None:
        everybody = [scene.client(with_key("x") if number % 7 else b"") for number in range(100)]
        scene.accept()
        await scene.all_served(*everybody)
        assert scene.order == everybody

    play(scenario)


def test_a_revoked_key_has_no_priority(play: Any) -> None:
    async def scenario(scene: Scene) -> None:
        record, secret = await scene.keys.create(principal="alice", role="user")
        await scene.keys.revoke(record.key_id)
        crowd = scene.crowd(100)
        alice = scene.client(with_key(secret))
        scene.accept()
        await scene.all_served(alice)
        assert scene.order == [*crowd, alice]

    play(scenario)


def test_a_flood_with_one_principals_key_does_not_delay_another(play: Any) -> None:
    async def scenario(scene: Scene) -> None:
        mallory, alice = await key_of(scene, "mallory"), await key_of(scene, "alice")
        scene.crowd(300, mallory)
        hers = scene.crowd(3, alice)
        scene.accept()
        await scene.all_served(*hers)
        assert max(scene.order.index(one) for one in hers) < 60

    play(scenario)


def test_a_principal_at_its_share_has_no_priority(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "_FEW", 0)

    async def scenario(scene: Scene) -> None:
        mallory, alice = await key_of(scene, "mallory"), await key_of(scene, "alice")
        flood = scene.crowd(30, mallory)
        scene.owners = dict.fromkeys(flood, "mallory")
        scene.accept()
        await scene.until(lambda: len(scene.order) == 20)
        hers = scene.client(alice)
        await scene.all_served(hers)
        assert scene.order == [*flood[:20], hers]

    play(scenario, max_connections=40)


def test_the_local_token_has_priority(play: Any) -> None:
    async def scenario(scene: Scene) -> None:
        scene.crowd(100, with_key("another"))
        local = scene.client(with_key("the token"))
        scene.accept()
        await scene.all_served(local)
        assert scene.order.index(local) <= 20

    play(scenario, token="the token")


def test_what_may_be_a_signed_token_comes_behind_keys_and_before_all_others(play: Any) -> None:
    async def scenario(scene: Scene) -> None:
        head = await key_of(scene, "alice")
        crowd = scene.crowd(50)
        signed = scene.client(with_key("eyJ.eyJ.x"))
        alice = scene.client(head)
        scene.accept()
        await scene.all_served(*crowd, signed, alice)
        assert scene.order[:2] == [alice, signed]

    play(scenario, jwt_secret="s" * 40)


def test_without_signed_tokens_what_looks_like_one_waits_in_order(play: Any) -> None:
    async def scenario(scene: Scene) -> None:
        await key_of(scene, "alice")
        crowd = scene.crowd(50)
        signed = scene.client(with_key("eyJ.eyJ.x"))
        scene.accept()
        await scene.all_served(signed)
        assert scene.order == [*crowd, signed]

    play(scenario)


def test_a_few_are_served_without_a_look(play: Any) -> None:
    async def scenario(scene: Scene) -> None:
        await key_of(scene, "alice")
        scene.accept()
        for _ in range(5):
            await scene.all_served(*scene.crowd(2))
        assert [one.waited for one in scene.served] == [None] * 10

    play(scenario)


def test_a_short_burst_is_served_without_a_look_and_a_second_one_takes_turns(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(scene: Scene) -> None:
        monkeypatch.setattr(acceptor, "_BURST", 24)
        monkeypatch.setattr(acceptor, "_BURST_PER_S", 0)
        await key_of(scene, "alice")
        first = scene.crowd(16)
        accepting = scene.accept()
        await scene.all_served(*first)
        second = scene.crowd(16)
        await scene.all_served(*second)
        looked_at = [one.waited is not None for one in scene.served]
        assert looked_at == [False] * 16 + [True] * 16
        assert scene.order == first + second
        await scene.until(lambda: not accepting._has_waiting)
        for _ in range(4):
            await scene.all_served(*scene.crowd(2))
        assert [one.waited for one in scene.served[32:]] == [None] * 8

    play(scenario)


def test_the_allowance_for_bursts_grows_again_up_to_its_bound(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(scene: Scene) -> None:
        monkeypatch.setattr(acceptor, "_BURST", 24)
        now = 0.0
        with monkeypatch.context() as patch:  # within one iteration of the loop, whose own timers need its real time
            patch.setattr(asyncio.get_running_loop(), "time", lambda: now)
            accepting = scene.accept()
            assert accepting._allows_burst(24)
            assert not accepting._allows_burst(3)
            now = 3 / acceptor._BURST_PER_S
            assert accepting._allows_burst(3)
            now += 3600
            assert not accepting._allows_burst(25)
            assert accepting._allows_burst(24)

    play(scenario)


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    """Some of these scenarios need a thousand sockets at once."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]) if before[1] > 0 else 4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
