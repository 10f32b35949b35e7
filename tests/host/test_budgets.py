"""Budgets: a share for each principal, a limit for the host, and fair waiting."""

import asyncio

import pytest

from holdfast.errors import BudgetExceeded, HostBusy, RateLimited
from holdfast.host.budgets import Budget, Charge, LoopTime, Rate


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
        assert (refused.value.status, refused.value.retry_after_s) == (429, 1.0)
        one.charge("bob", 40).release()
    assert one.usage().refused == 1


def test_full_host_answers_busy() -> None:
    one = budget()
    with one.charge("alice", 60), one.charge("bob", 40), pytest.raises(HostBusy) as refused:
        one.charge("carol", 1)
    assert refused.value.status == 503


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
    assert times.spend("alice", 0.01) == 0.0
    assert times.spend("alice", 0.02) == pytest.approx(0.12)
    assert times.spend("bob", 0.001) == 0.0
    clock.at += 0.12
    assert times.spend("alice", 0.0) == 0.0
    assert times.usage().principals == {"alice": pytest.approx(0.03), "bob": pytest.approx(0.001)}
