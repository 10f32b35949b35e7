"""The session actor: messages of each policy and an interrupt meet a run that finishes, fails or is found dead."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import get_args

from holdfast import Host, Run, agent
from holdfast.errors import SessionBusy, StorageError
from holdfast.protocol.events import RunFinished, decode_event
from holdfast.protocol.messages import Policy
from holdfast.protocol.stopping import Cause
from holdfast.settings import Settings
from holdfast.storage import MemoryStore
from holdfast.storage.port import InterruptRequest, Send
from holdfast.testing import VirtualClock
from tests.explored.model import Model
from tests.explored.of_mailboxes import plain
from tests.explored.session_faults import Ending, faults_of
from tests.explored.story import Story
from tests.storage.audit import audit

ITEM = "session actor"
QUICK = Settings(grace_s=1.0, abandon_after_s=1.0, quiet_s=0.01, max_wait_s=0.05, drain_timeout_s=60.0)
TWO = ("queue", "collect", "interrupt")
"""Policies of which two messages come, because what they promise is about more than one."""
PROMISES: dict[Policy, str] = {
    "queue": "each message gets a run of its own, in order",
    "steer": "what steers is given to the run that took it, or runs next",
    "collect": "what comes close together is one run",
    "interrupt": "the run is stopped, and the next takes all that waits",
    "rollback": "the run is stopped and taken back",
    "reject": "refused while a run is on, and only then",
}
ENDINGS: dict[Ending, str] = {
    "finishing": "P4: one run at a time; P5: each message settled once",
    "failing": "P4, P5: also when it fails",
    "crashed": "P4, P5, P11: a dead holder's run is ended, and what it was sent is not lost",
}


class Meeting:
    """Messages of a policy, an interrupt, and the run that they meet.

    Parameters:
        policy: of the messages.
        ending: how the run that is on ends if nobody stops it.
    """

    def __init__(self, policy: Policy, ending: Ending) -> None:
        self.policy: Policy = policy
        self.ending: Ending = ending
        self.store = MemoryStore(yielding=True)
        self.clock = VirtualClock()
        self.names = ("one", "two") if policy in TWO else ("one",)
        self.interrupted = False
        self.accepted: dict[str, str] = {}
        self.given: dict[str, list[str]] = {}
        self.agents = [agent(work) for work in (self.finishing, failing, crashed)]

    async def finishing(self, run: Run) -> str:
        """Works in a few steps, of which each can be the last."""
        given = self.given.setdefault(run.run_id, [])
        await run.emit("a")
        for _ in range(8 if self.policy == "steer" else 3):
            await asyncio.sleep(0)
            given += [message.message_id for message in await run.take_steering()]
        return run.text

    async def play(self) -> None:
        """Let them meet, and look at what is left."""
        if self.ending == "crashed":
            await self.until_a_crash()
        host = Host(agents=self.agents, store=self.store, settings=QUICK, clock=self.clock)
        async with host:
            if self.ending != "crashed":
                receipt = await host.session("s").send("first", agent=self.ending)
                self.accepted["first"] = receipt.message_id
            async with asyncio.timeout(600):
                async with asyncio.TaskGroup() as group:
                    for name in self.names:
                        if name not in self.accepted:
                            group.create_task(self.send(host, name))
                    if not self.interrupted and self.policy != "steer":
                        group.create_task(self.interrupt(host))
                for message_id in self.accepted.values():
                    settlement = await host.session("s").wait(message_id)
                    assert settlement.state not in ("accepted", "taken")
                    if settlement.state == "failed":
                        assert self.ending == "failing"
        assert not host.incidents.promises.broken.total(), "the host itself counts a promise that was broken"
        await self.look()

    async def send(self, host: Host, name: str) -> None:
        """Send a message; one that is to be rejected may be, unless the session is idle: then nobody else comes."""
        row = self.store.backend.tables.find("local", "s")
        idle = row is None or (row.run_id is None and not row.waiting)
        try:
            receipt = await host.session("s").send(name, policy=self.policy, agent="finishing")
        except SessionBusy:
            assert self.policy == "reject"
            assert not idle, "refused, though the session is idle"
        else:
            self.accepted[name] = receipt.message_id
        if self.policy == "steer" and not self.interrupted:
            await self.interrupt(host)  # else the run is stopped nearly always before it looks for the message

    async def interrupt(self, host: Host) -> None:
        """Interrupt whatever is on."""
        receipt = await host.session("s").interrupt("enough")
        assert receipt.outcome == "gone"
        row = self.store.backend.tables.find("local", "s")
        assert row is not None
        assert row.cause is None or row.cause.kind != "user", "the interrupt was answered, and its run is still on"

    async def until_a_crash(self) -> None:
        """A holder whose run is on when it dies; what came before was taken by the store, the rest is tried again."""
        await self.store.open(node_id="dead", at=self.clock.now())
        self.accepted["first"] = await self._accept("first", "queue", "crashed")

        async def send(name: str) -> None:
            try:
                self.accepted[name] = await self._accept(name, self.policy, "finishing")
            except (SessionBusy, StorageError):
                return

        async def interrupt() -> None:
            at = self.clock.now()
            cause = Cause(kind="user", reason="enough", at=at)
            try:
                await self.store.interrupt(InterruptRequest(principal="local", key="s", cause=cause, at=at))
            except StorageError:
                return
            self.interrupted = True

        async with asyncio.TaskGroup() as group:
            for work in (*(send(name) for name in self.names), interrupt(), self.store.close()):
                group.create_task(work)

    async def _accept(self, name: str, policy: Policy, agent: str) -> str:
        sent = await self.store.send(
            Send(
                principal="local", key="s", agent=agent, default_agent=agent, message_id=f"m_{name}", content=name,
                policy=policy, at=self.clock.now(), run_id=f"r_{name}", quiet_s=QUICK.quiet_s,
                max_wait_s=QUICK.max_wait_s,
            )
        )  # fmt: skip
        return sent.message_id

    async def look(self) -> None:
        """The store as it was left."""
        store = plain(self.store)
        await store.open(node_id="after", at=1e10)
        ((_, log),) = (await audit(store)).items()
        events = [decode_event(stored) for stored in log]
        story = Story(interrupts=1).tell(events)
        assert set(self.accepted.values()) <= set(story.settled), "a message was lost"
        for event in events:
            if isinstance(event, RunFinished) and event.status == "completed":
                assert self.given[event.run_id] == story.steered[event.run_id], (
                    "what steered the run was not given to it"
                )


async def failing(run: Run) -> None:
    """Fails half-way, after a while."""
    await asyncio.sleep(0)
    raise ValueError("no")


async def crashed(run: Run) -> None:
    """Was running when its holder died."""


async def meet(policy: Policy, ending: Ending) -> None:
    """One meeting."""
    await Meeting(policy, ending).play()


MODELS = tuple(
    Model(
        item=ITEM,
        name=f"{policy} against a run, {ending}",
        promise=f"{ENDINGS[ending]}; {PROMISES[policy]}",
        scenario=partial(meet, policy, ending),
        faults=faults_of(policy, ending),
    )
    for policy in get_args(Policy)
    for ending in get_args(Ending)
)
