"""Budgets: a share for each principal, a limit for the host, and fair waiting."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from holdfast.errors import BudgetExceeded, HostBusy, RateLimited
from holdfast.host.budgets import FREE_BYTES, Budget, Budgets, Charge, LoopTime, Rate
from holdfast.settings import Settings
from holdfast.testing import run_virtual
from holdfast.testing.clock import VirtualClock


def budget(limit: int = 100, share: int = 60) -> Budget:
    return Budget("bytes under way", limit=limit, share=share, hint="read open answers")


class HandClock:
    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at


def test_charge_is_given_back_once() -> None:
    one = budget()
    with one.charge("alice", 10) as charge:
        charge.grow(20)
        charge.shrink(5)
        assert (one.used, one.held("alice")) == (25, 25)
    charge.release()
    charge.shrink(100)
    assert (one.used, one.held("alice"), one.usage().principals) == (0, 0, {})


def test_principal_at_its_share_is_refused_and_the_others_are_not() -> None:
    one = budget()
    with one.charge("alice", 60):
        with pytest.raises(BudgetExceeded, match="alice: 60 of 60 bytes under way in use") as refused:
            one.charge("alice", 1)
        assert refused.value.retry_after_s == 1.0
        one.charge("bob", 40).release()
    assert one.usage().refused == 1


def test_full_host_answers_busy() -> None:
    one = budget()
    with one.charge("alice", 60), one.charge("bob", 40), pytest.raises(HostBusy):
        one.charge("carol", 1)


def test_refused_growth_keeps_what_is_held() -> None:
    one = budget()
    with one.charge("alice", 50) as charge:
        with pytest.raises(BudgetExceeded):
            charge.grow(11)
        assert (charge.amount, one.used) == (50, 50)
    assert one.used == 0


def test_charge_moves_to_the_principal_that_showed_its_key() -> None:
    one = budget()
    charge = one.charge("", 30)
    charge.move("alice")
    assert (one.held(""), one.held("alice"), one.used) == (0, 30, 30)
    with one.charge("bob", 50), pytest.raises(BudgetExceeded):
        charge.move("bob")
    assert one.held("alice") == 30
    charge.release()
    assert one.used == 0


def test_waiters_get_room_with_principals_in_turn() -> None:
    async def case() -> None:
        one = budget()
        held = [one.charge("alice", 60), one.charge("bob", 40)]
        order: list[str] = []

        async def wait(principal: str, name: str) -> Charge:
            charge = await one.wait_for(principal, 30, within_s=60)
            order.append(name)
            return charge

        waiting = [
            asyncio.ensure_future(wait(principal, name))
            for principal, name in (("alice", "a1"), ("alice", "a2"), ("alice", "a3"), ("carol", "c1"))
        ]
        await asyncio.sleep(0)
        assert order == []
        held[0].release()
        for _ in range(5):
            await asyncio.sleep(0)
        assert order == ["a1", "c1"]
        (await waiting[0]).release()
        (await waiting[1]).release()
        (await waiting[2]).release()
        (await waiting[3]).release()
        assert order == ["a1", "c1", "a2", "a3"]
        held[1].release()
        assert one.used == 0

    asyncio.run(case())


def test_principal_that_waits_at_its_share_holds_up_nobody() -> None:
    async def case() -> None:
        one = budget()
        with one.charge("alice", 60):
            waiting = asyncio.ensure_future(one.wait_for("alice", 30, within_s=60))
            await asyncio.sleep(0)
            (await one.wait_for("bob", 40, within_s=0)).release()
            assert not waiting.done()
        (await waiting).release()

    asyncio.run(case())


def test_waiting_ends_with_the_refusal_and_leaves_nothing() -> None:
    async def case() -> None:
        one = budget()
        with one.charge("alice", 60):
            with pytest.raises(BudgetExceeded):
                await one.wait_for("alice", 30, within_s=0)
            with pytest.raises(BudgetExceeded):
                await one.wait_for("alice", 61, within_s=60)  # it could never fit
            cancelled = asyncio.ensure_future(one.wait_for("alice", 30, within_s=60))
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.wait([cancelled])
        assert one.used == 0
        (await one.wait_for("alice", 60, within_s=0)).release()

    asyncio.run(case())


def test_waiter_that_is_cancelled_once_admitted_gives_its_room_back() -> None:
    async def case() -> None:
        one = budget()
        held = one.charge("alice", 60)
        waiting = asyncio.ensure_future(one.wait_for("alice", 30, within_s=60))
        await asyncio.sleep(0)
        held.release()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert one.used == 0

    asyncio.run(case())


def test_rate_refuses_above_its_burst_and_says_when() -> None:
    clock = HandClock()
    rate = Rate("requests", 2, clock)
    for _ in range(4):
        rate.take("alice")
    with pytest.raises(RateLimited) as refused:
        rate.take("alice")
    assert refused.value.retry_after_s == pytest.approx(0.5)
    rate.take("bob")
    clock.at += 0.5
    rate.take("alice")


def test_loop_time_makes_the_principal_wait_that_took_too_much() -> None:
    clock = HandClock()
    times = LoopTime(0.25, clock)
    assert times.spend("alice", 0.001) == 0.0, "a small answer does not wait"
    assert times.spend("alice", 0.029) == pytest.approx(0.12)
    assert times.spend("bob", 0.001) == 0.0
    clock.at += 0.12
    assert times.spend("alice", 0.0) == 0.0
    assert times.usage().principals == {"alice": pytest.approx(0.03), "bob": pytest.approx(0.001)}


def test_a_turn_waits_for_what_the_principal_took_before_and_not_for_itself() -> None:
    async def main() -> None:
        times = LoopTime(0.5, VirtualClock())
        loop = asyncio.get_running_loop()
        began = loop.time()
        await times.turn("alice", 5.0)
        await times.turn("bob", 1.0)
        assert loop.time() == began
        await times.turn("bob", 1.0)
        assert loop.time() - began == pytest.approx(2.0)
        await times.turn("alice", 1.0)
        assert loop.time() - began == pytest.approx(10.0)

    run_virtual(main())


def test_a_rate_can_be_looked_at_without_a_count() -> None:
    clock = HandClock()
    rate = Rate("wrong keys", 0.1, clock, burst=2)
    for _ in range(9):
        rate.check("alice")
    rate.take("alice")
    rate.take("alice")
    with pytest.raises(RateLimited) as caught:
        rate.check("alice")
    assert caught.value.retry_after_s == pytest.approx(10.0)
    clock.at += 10.0
    rate.check("alice")


def test_a_page_waits_longer_than_a_reader_that_stalls_holds_its_own() -> None:
    async def main() -> None:
        budgets = Budgets(Settings(memory_limit_bytes=3_000_000, principal_memory_bytes=1_000_000, stream_stall_s=3))
        stalled = budgets.memory.charge("alice", 900_000)
        asyncio.get_running_loop().call_later(3.5, stalled.release)

        async def page() -> bytes:
            return bytes(1000)

        _, charge = await budgets.read_page("alice", page, len)
        charge.release()

    run_virtual(main())


class Unreliable:
    """Contents of some size that are read with awaits and failures, and now and then grow between two reads."""

    def __init__(self, rng: random.Random, size: int) -> None:
        self.rng = rng
        self.size = size

    async def page(self) -> bytes:
        await asyncio.sleep(self.rng.choice((0, 0, 1)))
        if self.rng.random() < 0.1:
            raise OSError("the store fails")
        self.size += self.rng.choice((0, 0, 0, 50_000))
        return bytes(self.size)

    async def whole(self, limit_bytes: int) -> list[bytes] | int:
        found = await self.page()
        return [found] if len(found) <= limit_bytes else len(found)


@pytest.mark.parametrize("seed", range(40))
def test_every_charge_is_given_back_however_its_holders_end(seed: int) -> None:
    """Charges, waits, reads and moves of three principals, each cancelled at any await, fail or end by themselves."""
    rng = random.Random(seed)
    budgets = Budgets(Settings(memory_limit_bytes=3_000_000, principal_memory_bytes=1_000_000, stream_stall_s=3))
    every = (budgets.memory, budgets.histories)

    async def hold(charge: Charge) -> None:
        with charge:
            await asyncio.sleep(rng.choice((0, 1, 2)))
            charge.shrink(rng.randrange(0, charge.amount + 1))
            if rng.random() < 0.5:
                charge.grow(rng.randrange(0, 100_000))
            charge.move(rng.choice("abc"))
            await asyncio.sleep(rng.choice((0, 1)))

    async def charge_at_once(principal: str) -> None:
        await hold(rng.choice(every).charge(principal, rng.randrange(0, 1_100_000)))

    async def wait(principal: str) -> None:
        within_s = rng.choice((None, 0, 2, 20))
        amount, in_memory = rng.randrange(1, 1_100_000), rng.random() < 0.5
        await hold(await rng.choice(every).wait_for(principal, amount, within_s=within_s, in_memory=in_memory))

    async def read_page(principal: str) -> None:
        contents = Unreliable(rng, rng.choice((100, 200_000, 400_000, 2_000_000)))
        _, charge = await budgets.read_page(principal, contents.page, len)
        await hold(charge)

    async def read_history(principal: str) -> None:
        contents = Unreliable(rng, rng.choice((100, 200_000, 400_000, 2_000_000)))
        within_s = rng.choice((None, 5))
        found, charge = await budgets.read_history(
            principal, contents.whole, lambda parts: sum(map(len, parts)), within_s=within_s
        )
        assert charge.amount >= sum(map(len, found)) or not charge.amount
        assert charge.amount or sum(map(len, found)) <= FREE_BYTES
        await hold(charge)

    kinds: list[Callable[[str], Awaitable[None]]] = [charge_at_once, wait, read_page, read_history]

    def check() -> None:
        for budget in every:
            held = [budget.held(principal) for principal in "abc"]
            assert sum(held) == budget.used <= budget.limit
            assert max(held) <= budget.share
            assert min(held) >= 0

    async def main() -> None:
        tasks: list[asyncio.Future[None]] = []
        for _ in range(60):
            tasks.append(asyncio.ensure_future(rng.choice(kinds)(rng.choice("aabc"))))
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(rng.choice((0, 0, 0.5)))
                check()
            if rng.random() < 0.4:
                rng.choice(tasks).cancel()
        done, waiting = await asyncio.wait(tasks, timeout=1000)
        check()
        assert not waiting, "nobody waits for ever: all that was held was given back"
        for task in done:
            error = None if task.cancelled() else task.exception()
            assert error is None or isinstance(error, (BudgetExceeded, HostBusy, OSError)), repr(error)
        for budget in every:
            assert (budget.used, budget.usage().principals, budget._lined_up) == (0, {}, {})

    run_virtual(main())
