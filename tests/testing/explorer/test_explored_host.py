"""The shipped host under the explorer: any mix of operations settles every message once and comes to rest."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import pytest

from holdfast import Host, Receipt, Run, Session, Settings
from holdfast.errors import (
    AlreadySettled,
    Draining,
    MailboxFull,
    SessionBusy,
    SessionDeleted,
    UnknownMessage,
    UnknownSession,
)
from holdfast.protocol.events import Event, Gap, MessageSettled, RunFinished, RunStarted, RunStopping
from holdfast.protocol.messages import Policy
from holdfast.testing import VirtualClock, explore

EXPECTED = (AlreadySettled, Draining, MailboxFull, SessionBusy, SessionDeleted, UnknownMessage, UnknownSession)
POLICIES: tuple[Policy, ...] = ("queue", "collect", "interrupt", "reject")
SETTINGS = Settings(mailbox_limit=5, quiet_s=0.02, max_wait_s=0.1)
WAYS: list[dict[str, Any]] = [
    {"chooser": "random"},
    {"chooser": "pct"},
    {"chooser": "pct", "late_s": 1.0},
    {"chooser": "random", "tasks": "eager"},
]


class Mix:
    """One mix of operations on two sessions; the same seed gives the same one.

    Parameters:
        seed: which mix.
        end: ``rest``: wait until everything is settled, and read the logs. ``drain``: drain the host in the middle.
            ``delete``: sessions are deleted in between.
    """

    def __init__(self, seed: int, end: Literal["rest", "drain", "delete"]) -> None:
        self.end = end
        self.dice = random.Random(seed)
        self.agents_dice = random.Random(seed + 1)
        self.active: Counter[str] = Counter()
        self.sent: list[tuple[Session, Receipt]] = []

    async def agent(self, run: Run) -> None:
        """Some steps, sometimes an error, sometimes a slow clean-up."""
        dice = self.agents_dice
        self.active[run.session_key] += 1
        assert self.active[run.session_key] == 1, "two runs of one session"
        try:
            await run.emit("a")
            for _ in range(dice.randrange(4)):
                await asyncio.sleep(0)
            if dice.random() < 0.3:
                await run.call(asyncio.sleep, 0.01)
            if dice.random() < 0.5:
                await asyncio.sleep(0.01)
            if dice.random() < 0.2:
                raise ValueError("the agent's own error")
            await run.emit("b")
        finally:
            try:
                if dice.random() < 0.4:
                    await asyncio.sleep(dice.choice([0, 0.5]))
            finally:
                self.active[run.session_key] -= 1

    async def play(self) -> None:
        """Play the mix against a fresh host."""
        async with Host(self.agent, store="memory://", settings=SETTINGS, clock=VirtualClock()) as host:
            async with asyncio.timeout(1000), asyncio.TaskGroup() as group:
                for _ in range(8):
                    group.create_task(self.one_of_many(host))
                    for _ in range(self.dice.randrange(4)):
                        await asyncio.sleep(0)
            if self.end == "rest":
                await self.check(host)
        assert self.active.total() == 0

    async def one_of_many(self, host: Host) -> None:
        session = host.session(self.dice.choice(["anna", "anna", "bert"]))
        known = self.dice.choice(self.sent) if self.sent else None
        kinds: list[Callable[[], Coroutine[Any, Any, object]]] = [
            *(lambda policy=policy: self.send(session, policy) for policy in POLICIES),
            lambda: session.interrupt("not that"),
            lambda: session.stop("nor this"),
        ]
        if known is not None:
            kinds.append(lambda: known[0].withdraw(known[1].message_id))
            if self.end == "rest":
                kinds.append(lambda: self.follow(*known))
        if self.end == "drain":
            kinds.append(lambda: host.drain(deadline_s=0.05))
        if self.end == "delete":
            kinds.append(session.delete)
        try:
            await self.dice.choice(kinds)()
        except EXPECTED:
            return

    async def send(self, session: Session, policy: Policy) -> None:
        self.sent.append((session, await session.send("message", policy=policy)))

    async def follow(self, session: Session, receipt: Receipt) -> list[Event]:
        """A reader: every number once, in order, and the end."""
        seen: list[Event] = []
        async for event in session.events(after=receipt.cursor, follow=receipt.message_id):
            assert not isinstance(event, Gap)
            seen.append(event)
        numbers = [event.seq for event in seen]
        assert numbers == list(range(receipt.seq, receipt.seq + len(numbers)))
        last = seen[-1]
        assert isinstance(last, MessageSettled)
        assert last.message_id == receipt.message_id
        return seen

    async def check(self, host: Host) -> None:
        """Everything is settled exactly once, each run ended exactly once, and the sessions answer."""
        async with asyncio.timeout(1000):
            for session, receipt in self.sent:
                assert (await session.wait(receipt.message_id)).state not in ("accepted", "taken")
            for key in {session.key for session, _ in self.sent}:
                session = host.session(key)
                last = await session.send("the last one")
                settled: Counter[str] = Counter()
                started: Counter[str] = Counter()
                stopping: Counter[str] = Counter()
                finished: Counter[str] = Counter()
                async for event in session.events(follow=last.message_id):
                    if isinstance(event, MessageSettled):
                        settled[event.message_id] += 1
                    elif isinstance(event, RunStarted):
                        started[event.run_id] += 1
                    elif isinstance(event, RunStopping):
                        stopping[event.run_id] += 1
                    elif isinstance(event, RunFinished):
                        finished[event.run_id] += 1
                mine = {receipt.message_id for session, receipt in self.sent if session.key == key}
                assert settled == Counter({*mine, last.message_id})
                assert set(started.values()) == {1}
                assert stopping <= started
                assert finished <= started
                assert (started - finished).total() <= 1  # the last one's end may stand behind its settlement


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("end", ["rest", "drain", "delete"])
@pytest.mark.parametrize("seed", range(4))
def test_any_mix_of_operations_comes_to_rest(
    seed: int, end: Literal["rest", "drain", "delete"], how: dict[str, Any]
) -> None:
    explore(lambda: Mix(seed, end).play(), schedules=20, seed=seed, **how)


@pytest.mark.nightly
@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("end", ["rest", "drain", "delete"])
def test_many_mixes_of_operations_come_to_rest(end: Literal["rest", "drain", "delete"], how: dict[str, Any]) -> None:
    for seed in range(100, 140):
        explore(lambda seed=seed: Mix(seed, end).play(), schedules=30, seed=seed, **how)  # type: ignore[misc]
