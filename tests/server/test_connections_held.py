"""Connections that do nothing are closed in time, make room for others, and leave descriptors to tools and store."""

from __future__ import annotations

import asyncio
import resource
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from holdfast import Host, Run, Settings
from holdfast.errors import BudgetExceeded, HostBusy
from holdfast.host.budgets import UNKNOWN, Charge
from holdfast.server import connections
from holdfast.server.connections import Connection, Connections, descriptors_kept_free
from tests.server.live import GUARD_S, Live, served


class Held:
    """A connection that notes what is done to it."""

    peer = "10.0.0.1"
    charge: Charge | None = None
    queue: OrderedDict[Connection, float] | None = None

    def __init__(self) -> None:
        self.done: list[str] = []

    def on_timeout(self) -> None:
        self.done.append("timeout")

    def drop(self) -> None:
        self.done.append("dropped")


async def echo(run: Run) -> str:
    return run.text


def run(scenario: Callable[[Connections], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(GUARD_S),
            Host(echo, store="memory://", settings=Settings(**settings)) as host,
        ):
            held = Connections(host)
            try:
                await scenario(held)
            finally:
                held.close()

    asyncio.run(main())


def opened(held: Connections, count: int, *, principal: str = UNKNOWN, idle: bool = True) -> list[Held]:
    """So many connections; with a principal each has answered a request of its."""
    made = []
    for _ in range(count):
        one = Held()
        held.opened(one, 10)
        if principal != UNKNOWN:
            held.busy(one)
            held.own(one, principal)
            if idle:
                held.answered(one, whole=True, head_began=False)
        made.append(one)
    return made


def dropped(*made: Held) -> list[bool]:
    return ["dropped" in one.done for one in made]


def test_the_oldest_keyless_connection_makes_room_and_no_principals_does() -> None:
    async def scenario(held: Connections) -> None:
        alice = opened(held, 2, principal="alice")
        keyless = opened(held, 2)
        (newest,) = opened(held, 1)
        assert dropped(*alice, *keyless, newest) == [False, False, True, False, False]
        assert held.open == 4

    run(scenario, max_connections=4)


def test_where_all_have_shown_a_key_the_one_that_was_idle_longest_makes_room() -> None:
    async def scenario(held: Connections) -> None:
        alice = opened(held, 2, principal="alice")
        bob = opened(held, 2, principal="bob")
        opened(held, 1)
        assert dropped(*alice, *bob) == [True, False, False, False]

    run(scenario, max_connections=4)


def test_connections_that_handle_requests_are_left_alone_and_a_new_one_is_refused() -> None:
    async def scenario(held: Connections) -> None:
        working = opened(held, 2, principal="alice", idle=False) + opened(held, 2, principal="bob", idle=False)
        with pytest.raises(HostBusy):
            opened(held, 1)
        assert not any(dropped(*working))
        assert held.open == 4

    run(scenario, max_connections=4)


def test_all_without_a_key_together_have_one_share() -> None:
    async def scenario(held: Connections) -> None:
        keyless = opened(held, 9)
        assert sum(dropped(*keyless)) == 4
        assert not any(dropped(*keyless[4:]))

    run(scenario, max_connections=10)


def test_a_principal_at_its_share_is_refused() -> None:
    async def scenario(held: Connections) -> None:
        opened(held, 5, principal="alice")
        with pytest.raises(BudgetExceeded):
            opened(held, 1, principal="alice")

    run(scenario, max_connections=10)


def test_what_waits_with_a_key_counts_as_its_principals_within_the_share() -> None:
    async def scenario(held: Connections) -> None:
        opened(held, 4, principal="alice")
        first, second, third = opened(held, 3)
        assert held.claim(first, "alice")
        assert not held.claim(second, "alice")
        assert held.claim(third, "bob")
        opened(held, 10)
        assert dropped(first, second, third) == [False, True, False]

    run(scenario, max_connections=10)


def test_no_more_is_accepted_than_finds_room() -> None:
    async def scenario(held: Connections) -> None:
        assert held.acceptable(2) == 5
        keyless = opened(held, 5)
        assert held.acceptable(2) == 5
        for number, one in enumerate(keyless):
            held.claim(one, f"principal {number}")
        assert held.acceptable(2) == 5
        opened(held, 5, principal="alice", idle=False)
        assert held.acceptable(2) == 2
        assert held.acceptable(0) == 0

    run(scenario, max_connections=10)


@contextmanager
def descriptors(soft: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_quarter_of_the_descriptors_stays_free() -> None:
    async def scenario(held: Connections) -> None:
        for principal in ("alice", "bob", "carol"):
            opened(held, 160, principal=principal)
        opened(held, 400)
        assert held.open == 640 - descriptors_kept_free(640) == 480

    with descriptors(640):
        run(scenario)


def test_heads_that_are_not_whole_have_a_bound_in_bytes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_HEADS_BYTES", 100)

    async def scenario(held: Connections) -> None:
        first, second = opened(held, 2)
        for one in (first, second):
            held.head_bytes += 60
            held.head_began(one)
        assert dropped(first, second) == [True, False]

    run(scenario)


@pytest.mark.parametrize("setting", ["head_timeout_s", "idle_connection_timeout_s", "body_timeout_s"])
def test_each_way_to_do_nothing_has_a_deadline(setting: str) -> None:
    async def scenario(held: Connections) -> None:
        head, idle, body = opened(held, 1) + opened(held, 2, principal="alice")
        held.answered(body, whole=False, head_began=False)
        late = {"head_timeout_s": head, "idle_connection_timeout_s": idle, "body_timeout_s": body}[setting]
        while not any(one.done for one in (head, idle, body)):
            await asyncio.sleep(0.01)
        assert [one.done for one in (head, idle, body) if one is not late] == [[], []]
        assert late.done == ["timeout"]

    run(
        scenario,
        **{"head_timeout_s": 600.0, "idle_connection_timeout_s": 600.0, "body_timeout_s": 600.0, setting: 0.05},
    )


def test_a_pause_of_the_loop_is_not_counted_as_a_delay_of_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(held: Connections) -> None:
        loop = asyncio.get_running_loop()
        (before,) = opened(held, 1)
        now = loop.time() + 3600.0
        with monkeypatch.context() as patch:  # left before the loop looks for timers that are due
            patch.setattr(loop, "time", lambda: now)
            (after,) = opened(held, 1)
            held._look()
            assert (before.done, after.done) == ([], [])
            for _ in range(20):
                now += connections._LOOK_EVERY_S
                held._look()
            assert (before.done, after.done) == (["timeout"], ["timeout"])

    run(scenario, head_timeout_s=10.0)


def test_half_a_head_is_answered_and_closed_after_its_time() -> None:
    async def scenario(server: Live) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: loc")
        said = await reader.read()
        assert said.startswith(b"HTTP/1.1 400") and b"in time" in said
        writer.close()

    served(scenario, head_timeout_s=0.1)
