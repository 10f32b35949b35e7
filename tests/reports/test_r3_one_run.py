"""Report R3: never two agents on one session, and no message lost on the way. The models fail, Holdfast holds.

Each scenario is written once, against `Chat`. The explorer finds a schedule in which each model fails; the shipped host
goes through the same scenario in every schedule that is tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest

from holdfast import Host, Receipt, Run, Session, Settings
from holdfast.errors import MailboxFull
from holdfast.testing import ScheduleFailure, VirtualClock, explore, run_virtual
from tests.reports.models_r3 import SETUP_AWAITS, ReportedGateway, SentinelGateway

CHOOSERS: list[Literal["random", "pct"]] = ["random", "pct"]


RUN_S = 0.005


class Log:
    """What the agents did."""

    def __init__(self) -> None:
        self.active: list[str] = []
        self.most_active = 0
        self.began: list[str] = []
        self.completed: list[str] = []

    async def agent(self, text: str) -> None:
        """A run: a few steps on the session's transcript."""
        self.began.append(text)
        self.active.append(text)
        self.most_active = max(self.most_active, len(self.active))
        try:
            await asyncio.sleep(0)
            await asyncio.sleep(RUN_S)
            self.completed.append(text)
        finally:
            self.active.remove(text)


class Chat(Protocol):
    """A session as its user sees it."""

    async def send(self, text: str) -> bool:
        """Whether the message was accepted."""
        ...

    async def stop(self) -> None:
        """The command /stop."""
        ...

    async def settle(self) -> None:
        """Until nothing runs and nothing waits."""
        ...


OpenChat = Callable[[Log, int], AbstractAsyncContextManager[Chat]]


@asynccontextmanager
async def gateway(kind: type[ReportedGateway], log: Log, cap: int) -> AsyncIterator[Chat]:
    chat = kind(log.agent, cap=cap)
    yield chat
    await chat.settle()


reported: OpenChat = partial(gateway, ReportedGateway)
sentinel: OpenChat = partial(gateway, SentinelGateway)


class HostChat:
    """A session of the shipped host."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.receipts: list[Receipt] = []

    async def send(self, text: str) -> bool:
        try:
            self.receipts.append(await self.session.send(text))
        except MailboxFull:
            return False
        return True

    async def stop(self) -> None:
        await self.session.stop("the user said so")

    async def settle(self) -> None:
        for receipt in self.receipts:
            await self.session.wait(receipt.message_id, timeout_s=60)


@asynccontextmanager
async def hosted(log: Log, cap: int, *, store: str = "memory://") -> AsyncIterator[Chat]:
    async def agent(run: Run) -> None:
        for _ in range(SETUP_AWAITS):
            await asyncio.sleep(0)
        await log.agent(run.text)

    async with Host(agent, store=store, settings=Settings(mailbox_limit=cap), clock=VirtualClock()) as host:
        chat = HostChat(host.session("alice"))
        yield chat
        await chat.settle()


async def two_quick_messages(chats: OpenChat) -> None:
    """Two messages at once: one run at a time, both answered."""
    log = Log()
    async with chats(log, 100) as chat:
        async with asyncio.TaskGroup() as group:
            group.create_task(chat.send("one"))
            group.create_task(chat.send("two"))
        await chat.settle()
    assert log.most_active == 1
    assert sorted(log.completed) == ["one", "two"]


async def three_during_set_up(chats: OpenChat) -> None:
    """Messages that arrive while a run is set up all wait, in order."""
    log = Log()
    async with chats(log, 100) as chat:
        for text in ("one", "two", "three"):
            assert await chat.send(text)
        await chat.settle()
    assert log.most_active == 1
    assert log.completed == ["one", "two", "three"]


async def stopped_then_new(chats: OpenChat) -> None:
    """The end of a stopped run does not free the slot of the next one."""
    log = Log()
    async with chats(log, 100) as chat:
        await chat.send("one")
        while not log.began:
            await asyncio.sleep(0.001)
        await chat.stop()
        await chat.send("two")
        for _ in range(SETUP_AWAITS):
            await asyncio.sleep(0)
        await chat.send("three")
        await chat.settle()
    assert log.most_active == 1
    assert log.completed[-2:] == ["two", "three"]


async def stop_ends_all_that_waits(chats: OpenChat) -> None:
    """A stop takes everything that waits along, and the next message runs."""
    log = Log()
    async with chats(log, 100) as chat:
        await chat.send("one")
        while not log.began:
            await asyncio.sleep(0.001)
        await chat.send("two")
        await chat.send("three")
        await chat.stop()
        await chat.settle()
        assert log.began == ["one"]
        assert not log.active
        assert await chat.send("four")
        await chat.settle()
    assert log.completed[-1:] == ["four"]


async def stop_during_set_up(chats: OpenChat) -> None:
    """A stop works on a run that is only being set up."""
    log = Log()
    async with chats(log, 100) as chat:
        await chat.send("one")
        await asyncio.sleep(0)
        await chat.stop()
        await chat.settle()
        assert not log.completed
        assert await chat.send("two")
        await chat.settle()
    assert log.completed == ["two"]


async def accepted_at_the_cap(chats: OpenChat) -> None:
    """At the cap a message is refused, or it is answered: nobody is told "queued" for nothing."""
    log = Log()
    accepted: list[str] = []
    async with chats(log, 1) as chat:
        for number in range(4):
            if await chat.send(str(number)):
                accepted.append(str(number))
            for _ in range(SETUP_AWAITS):
                await asyncio.sleep(0)
        await chat.settle()
    assert log.completed == accepted
    assert log.most_active == 1


SCENARIOS = [
    two_quick_messages,
    three_during_set_up,
    stopped_then_new,
    stop_ends_all_that_waits,
    stop_during_set_up,
    accepted_at_the_cap,
]
Scenario = Callable[[OpenChat], Coroutine[Any, Any, None]]


@pytest.mark.parametrize(
    ("scenario", "model"),
    [
        (two_quick_messages, reported),
        (three_during_set_up, reported),
        (stop_ends_all_that_waits, reported),
        (stop_during_set_up, reported),
        (accepted_at_the_cap, reported),
        (three_during_set_up, sentinel),
        (stopped_then_new, sentinel),
        (stop_ends_all_that_waits, sentinel),
        (accepted_at_the_cap, sentinel),
    ],
)
def test_the_explorer_finds_the_faults_of_the_models(scenario: Scenario, model: OpenChat) -> None:
    with pytest.raises(ScheduleFailure):
        explore(lambda: scenario(model), schedules=300)


@pytest.mark.parametrize("chooser", CHOOSERS)
def test_the_sentinel_does_fix_two_quick_messages(chooser: Literal["random", "pct"]) -> None:
    async def test() -> None:
        log = Log()
        async with sentinel(log, 100) as chat:
            await chat.send("one")
            await chat.send("two")
            await chat.settle()
        assert log.most_active == 1

    explore(test, chooser=chooser, schedules=300)


@pytest.mark.parametrize("tasks", ["ordinary", "eager"])
@pytest.mark.parametrize("chooser", CHOOSERS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_host_holds_in_every_schedule(
    scenario: Scenario, chooser: Literal["random", "pct"], tasks: Literal["ordinary", "eager"]
) -> None:
    explore(lambda: scenario(hosted), chooser=chooser, schedules=150, tasks=tasks)


async def a_hundred_at_once(store: str) -> None:
    """100 messages at once through ten awaits of set-up: one run at a time, none lost, in the order of acceptance."""
    log = Log()
    async with hosted(log, 200, store=store) as chat:
        assert isinstance(chat, HostChat)
        async with asyncio.TaskGroup() as group:
            for number in range(100):
                group.create_task(chat.send(str(number)))
        await chat.settle()
        settled = [await chat.session.message(receipt.message_id) for receipt in chat.receipts]
        entries = await chat.session.transcript()
        order = [receipt.message_id for receipt in sorted(chat.receipts, key=lambda receipt: receipt.seq)]
    assert log.most_active == 1
    assert len(log.completed) == 100
    assert [settlement.state for settlement in settled] == ["completed"] * 100
    assert len({settlement.run_id for settlement in settled}) == 100
    assert [entry.message_id for entry in entries if entry.role == "user"] == order
    assert [entry.content for entry in entries if entry.role == "user"] == log.completed


def test_a_hundred_messages_at_once_run_one_at_a_time_in_order() -> None:
    run_virtual(a_hundred_at_once("memory://"))


@pytest.mark.parametrize("chooser", CHOOSERS)
def test_a_hundred_messages_at_once_in_any_schedule(chooser: Literal["random", "pct"]) -> None:
    explore(lambda: a_hundred_at_once("memory://"), chooser=chooser, schedules=5, max_steps=100_000)


def test_a_hundred_messages_at_once_on_sqlite(tmp_path: Path) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await a_hundred_at_once(f"sqlite:///{tmp_path / 'r3.db'}")

    asyncio.run(bounded())
