"""Branches that leave traces, and every shape made of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from holdfast import Agent, Host, Run, Settings, agent, branch, parallel, periodic, route, sequence, supervised
from holdfast.errors import HoldfastError
from holdfast.protocol.events import ChildFinished, ChildStarted, Event, RunFinished, decode_event
from holdfast.storage import MemoryStore
from holdfast.testing import VirtualClock

QUICK = Settings(grace_s=1.0, abandon_after_s=1.0, drain_timeout_s=60.0)
STEP_S = 0.01


class Ledger:
    """What the branches of one scenario did.

    Parameters:
        fails: name of a branch, and the step before which it raises, each time it is begun or so many times.
    """

    def __init__(self, fails: tuple[str, int] | None = None, times: int = 1_000_000) -> None:
        self.fails = fails
        self.times = times
        self.alive: Counter[str] = Counter()
        self.begun: Counter[str] = Counter()
        self.finished: list[str] = []
        self.effects: list[str] = []
        self.problems: list[str] = []

    @asynccontextmanager
    async def living(self, name: str) -> AsyncIterator[None]:
        """Somebody is at work, and takes a moment to clean up."""
        self.alive[name] += 1
        self.begun[name] += 1
        try:
            yield
        finally:
            try:
                await asyncio.sleep(STEP_S / 2)
            finally:
                self.alive[name] -= 1

    def step(self, name: str, number: int) -> None:
        """Fails where it is to."""
        if (name, number) == self.fails and self.times > 0:
            self.times -= 1
            raise ValueError(f"{name} broke at step {number}")

    async def effect(self, name: str) -> str:
        """Leaves a trace each time it is really called."""
        self.effects.append(name)
        await asyncio.sleep(0)
        return f"did {name}"

    def task(self, name: str, steps: int = 2) -> Agent:
        """A branch of one task, with a call in the journal."""

        async def work(run: Run) -> str:
            async with self.living(name):
                for number in range(steps):
                    self.step(name, number)
                    await asyncio.sleep(STEP_S)
                await run.call(self.effect, name, idempotent=True)
                self.step(name, steps)
            self.finished.append(name)
            return f"{name} done"

        return agent(name=name, replayable=True)(work)

    def family(self, name: str) -> Agent:
        """A branch with two more tasks and a child."""

        async def work(run: Run) -> str:
            async def helper() -> None:
                async with self.living(f"{name}'s task"):
                    await asyncio.sleep(STEP_S)

            async with self.living(name):
                self.step(name, 0)
                await run.parallel(helper, helper)
                self.step(name, 1)
                said = await run.delegate(self.task(f"{name}'s child", 1), "go on")
                self.step(name, 2)
            self.finished.append(name)
            return f"{name} done after {said}"

        return agent(name=name, replayable=True)(work)

    def outer(self, shape: Agent) -> Agent:
        """Runs the shape, and looks whether anything is left of it."""

        async def outer(run: Run) -> str:
            try:
                return await run.delegate(shape, run.text)
            finally:
                if +self.alive:
                    self.problems.append(f"left when the shape had ended: {dict(+self.alive)}")

        return agent(name="outer", replayable=True)(outer)


def mapping(ledger: Ledger, what: str) -> Agent:
    """`Run.map`, of agents or of functions."""

    async def work(run: Run) -> str:
        if what == "agents":
            return " ".join(await run.map(ledger.task("item"), [str(n) for n in range(4)], concurrency=2))

        async def one(number: int) -> str:
            async with ledger.living(f"item {number}"):
                ledger.step("item", number)
                await run.call(ledger.effect, f"item {number}", idempotent=True)
            ledger.finished.append(f"item {number}")
            return str(number)

        return " ".join(await run.map(one, range(4), concurrency=2))

    return agent(name=f"map of {what}", replayable=True)(work)


def choose(name: str) -> Agent:
    """Says a name."""

    async def work(run: Run) -> str:
        return name

    return agent(name="choose", replayable=True)(work)


SHAPES: dict[str, Callable[[Ledger], Agent]] = {
    "all": lambda the: parallel(the.task("a"), the.family("b"), the.task("c", 4)),
    "all, waiting": lambda the: parallel(the.task("a"), the.family("b"), the.task("c", 4), on_failure="wait"),
    "first": lambda the: parallel(the.task("a", 3), the.family("b"), the.task("c", 2), need="first"),
    "two of four": lambda the: parallel(
        the.task("a", 1), the.family("b"), the.task("c", 2), the.task("d", 3), need=2, concurrency=3
    ),
    "some": lambda the: parallel(
        the.task("a"), the.task("b", 1), branch(the.task("c", 50), deadline_s=3 * STEP_S), need="some"
    ),
    "sequence": lambda the: sequence(the.task("a", 1), the.family("b"), branch(the.task("c", 1), text="{text}!")),
    "route": lambda the: route(choose("b"), {"a": the.task("a"), "b": the.family("b")}),
    "one for one": lambda the: supervised(the.task("a", 1), the.family("b"), the.task("c", 2), delay_s=STEP_S),
    "rest for one": lambda the: supervised(
        the.task("a", 1), the.task("b", 2), the.task("c", 3), strategy="rest_for_one"
    ),
    "one for all": lambda the: supervised(
        the.task("a", 2), the.family("b"), branch(the.task("c", 500), restart="permanent"), strategy="one_for_all"
    ),
    "nested": lambda the: parallel(
        sequence(the.task("a", 1), parallel(the.task("b", 1), the.task("c", 2), need="first")),
        supervised(the.task("d", 2)),
        name="nested",
    ),
    "periodic": lambda the: periodic(
        the.family("b"), every_s=5 * STEP_S, initial_delay_s=0.0, max_runs=3, beside=(the.task("c", 500),)
    ),
    "periodic, interrupting": lambda the: periodic(
        the.task("a", 4), every_s=3 * STEP_S, max_runs=3, overlap="interrupt", beside=(the.task("c", 1),)
    ),
    "map of agents": lambda the: mapping(the, "agents"),
    "map of functions": lambda the: mapping(the, "functions"),
}


def host(agents: Sequence[Agent], store: MemoryStore | None = None) -> Host:
    """A host on virtual time."""
    return Host(agents=agents, store=store or MemoryStore(), settings=QUICK, clock=VirtualClock())


@agent
async def echo(run: Run) -> str:
    """The next run."""
    return run.text


async def log_of(one: Host) -> list[Event]:
    """All events of the only session."""
    return [decode_event(event) for event in await one.store.read_events(1, after=0, limit=100_000)]


async def settled(one: Host, message_id: str) -> Any:
    """What became of the message."""
    async with asyncio.timeout(1000):
        return await one.session("s").wait(message_id, timeout_s=900)


async def check(one: Host, ledger: Ledger, message_id: str, *, whole: bool = True) -> None:
    """What holds after each scenario, whatever was done to it.

    Parameters:
        whole: the log is of one life, so each child that it began has an end there.
    """
    settlement = await settled(one, message_id)
    assert ledger.problems == []
    assert not +ledger.alive, f"survivors: {dict(+ledger.alive)}"
    events = await log_of(one)
    started = [event for event in events if isinstance(event, ChildStarted)]
    finished = [event for event in events if isinstance(event, ChildFinished)]
    ends = {event.child_id: event for event in finished}
    if whole:
        assert sorted(ends) == sorted({event.child_id for event in started}), "a child without an end"
    names = {event.child_id: event.name or event.agent for event in started}
    told = Counter(event.text for event in finished if event.status == "completed")
    for name in ledger.finished:
        if not name.startswith("item"):
            assert any(text.startswith(f"{name} done") for text in told), f"the result of {name} is lost"
    for child in ends.values():
        if child.status == "interrupted" and child.error is None:
            above = [ends[other].status for other in ends if child.child_id.startswith(f"{other}.")]
            reason = settlement.state == "interrupted" or "interrupted" in above or "failed" in above
            assert reason, f"{names[child.child_id]} was interrupted for no reason that is told"
        elif child.status == "interrupted":
            assert child.cause is not None
            assert child.cause.reason
    assert any(isinstance(event, RunFinished) for event in events)
    answer = await one.session("s").ask("still there?", agent="echo")
    assert answer == "still there?"


async def send(one: Host) -> str:
    """Start the run; its message."""
    receipt = await one.session("s", agent="outer").send("go")
    return receipt.message_id


__all__ = [
    "QUICK",
    "SHAPES",
    "STEP_S",
    "HoldfastError",
    "Ledger",
    "check",
    "echo",
    "host",
    "log_of",
    "send",
    "settled",
]
