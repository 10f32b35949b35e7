"""Nodes that share a store: one of them crashes, is stopped or loses a reply at each of its writes; others take over.

The transactions are those of the product, on rows in memory. The database and the network are simulated: other nodes
come in between before each write is executed, and before its node is told.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import pytest
from msgspec.structs import replace

from holdfast.errors import StaleFence
from holdfast.protocol.events import RunRestarted, RunStarted, TextDelta, decode_event, encode_event
from holdfast.storage import transactions
from holdfast.storage.backend import Tables
from holdfast.storage.memory.backend import MemoryBackend
from holdfast.storage.memory.tables import MemoryTables
from holdfast.storage.port import Claim, RunCommit, Store
from holdfast.storage.rows import SessionRow
from holdfast.storage.transactions import runs
from tests.explored.model import Fault, Model, fault
from tests.explored.of_mailboxes import an_idempotency_key_is_not_looked_at, message
from tests.explored.story import Story
from tests.storage.audit import audit

_T = TypeVar("_T")
Kind = Literal["crash", "stop", "lost reply"]
WRITES = 8
"""Writes of a node at which something may happen; none does more."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What happens to a node.

    Parameters:
        kind: ``crash``: it does nothing more. ``stop``: it goes on only after its lease is over, with what it had under
            way. ``lost reply``: it is not told that the write was executed.
        write: number of the write at which it happens, from 0.
        executed: whether the write was executed before.
    """

    kind: Kind
    write: int
    executed: bool

    def __str__(self) -> str:
        return f"{self.kind} {'after' if self.executed else 'before'} write {self.write}"


class Crashed(Exception):  # noqa: N818 - it is no error of the product
    """The node has crashed: nobody waits for the result."""


class Database(MemoryTables):
    """The rows that the nodes share, and which nodes may still write."""

    def __init__(self) -> None:
        super().__init__()
        self._epochs = itertools.count(1)
        self.over: set[int] = set()
        """Epochs whose lease is over."""
        self.ended: set[int] = set()
        """Epochs that another node has ended."""

    def new_epoch(self) -> int:
        return next(self._epochs)

    def orphans(self) -> Sequence[SessionRow]:
        self.ended |= self.over - {self.epoch}
        return [row for row in super().orphans() if row.holder in self.ended]


class Connection(MemoryBackend):
    """A node's connection, as `PostgresWriteConnection`: an ended epoch writes nothing, and a new one begins."""

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.is_open = True
        self.database = self.tables = database
        self.epoch = database.new_epoch()

    def write(self, verb: str, action: Callable[[Tables], _T]) -> asyncio.Future[_T]:
        if self.epoch in self.database.ended:
            self.epoch = self.database.new_epoch()
        self.database.epoch = self.epoch
        return super().write(verb, action)


class Node:
    """A node with its own connection. It does what a host does, as far as the store notices."""

    def __init__(self, database: Database, trouble: Trouble | None = None) -> None:
        self.database = database
        self.connection = Connection(database)
        self.store = Store(self.connection)
        self.resumed = asyncio.Event()
        self._name = f"n{self.connection.epoch}"
        self._trouble = trouble
        self._writes = itertools.count()
        self._worked: set[tuple[str, int]] = set()

    async def send(self, name: str) -> None:
        """Send a message, and do its run if it starts at once."""
        request = message(name, idempotency_key=name, body_hash=name.encode())
        await self.work((await self._done(functools.partial(self.store.send, request))).claim)
        await self._reconcile()

    async def take_over(self) -> None:
        """Do the runs of nodes whose lease is over, and those that nobody has begun."""
        for claim in await self._done(functools.partial(self.store.rescue, at=2.0)):
            await self.work(claim)
        await self._reconcile()
        for waiting in await self.store.ready(limit=9):
            run_id = f"r_by_{self.connection.epoch}"
            found = await self._done(functools.partial(self.store.claim, waiting.session, run_id=run_id, at=2.0))
            await self.work(found if isinstance(found, Claim) else None)

    async def _reconcile(self) -> None:
        """Do the runs that are this node's in the store, but whose claim it was not told of."""
        held = [session.row for session in self.database.sessions.values() if session.row.run_id is not None]
        for row in held:
            if row.holder == self.connection.epoch and (row.run_id, row.fence) not in self._worked:
                assert row.run_id is not None
                found = await self._done(functools.partial(self.store.claim, row.session, run_id=row.run_id, at=2.0))
                await self.work(found if isinstance(found, Claim) else None)

    async def work(self, claim: Claim | None) -> None:
        """Do a run and those that follow it, until another node has taken them."""
        while claim is not None:
            lease = claim.lease
            self._worked.add((lease.run_id, lease.fence))
            text = encode_event(TextDelta(run_id=lease.run_id, text=self._name))
            try:
                if claim.attempt > 1:
                    await self._done(functools.partial(self.store.restart, lease, at=2.0))
                for nth in (1, 2):
                    await self._done(functools.partial(self.store.append, lease, [text], nth=nth))
                end = RunCommit(lease=lease, status="completed", at=2.0, next_run_id=f"{lease.run_id}_")
                claim = (await self._done(functools.partial(self.store.commit_run, end))).claim
            except StaleFence:
                return

    async def _done(self, write: Callable[[], Any]) -> Any:
        """The result of a write, which is done again if its reply was lost."""
        await asyncio.sleep(0)  # the request is on its way
        trouble = self._trouble
        if trouble is None or trouble.write != next(self._writes):
            return await write()
        if trouble.kind != "lost reply":
            self.database.over.add(self.connection.epoch)
        result: Any = None
        refusal: StaleFence | None = None
        if trouble.executed:
            try:
                result = await write()
            except StaleFence as error:
                refusal = error
        match trouble.kind:
            case "crash":
                raise Crashed
            case "stop":
                await self.resumed.wait()
            case "lost reply":
                await asyncio.sleep(0)
        if refusal is not None:
            raise refusal
        return result if trouble.executed and trouble.kind == "stop" else await write()


async def _alive(work: Coroutine[Any, Any, None]) -> None:
    """Wait for what a node does, which may crash."""
    try:
        await work
    except Crashed:
        return


async def judge(database: Database) -> None:
    """What must hold in the end: a node that starts then finds the rest; each message was done once, by one holder."""
    last = Node(database)
    database.over.update(range(last.connection.epoch))
    await last.take_over()
    await last.take_over()
    for log in (await audit(last.store)).values():
        events = [decode_event(event) for event in log]
        story = Story(interrupts=0).tell(events)
        assert set(story.settled.values()) == {"completed"}
        texts: list[str] = []
        for event in events:
            match event:
                case RunStarted() | RunRestarted():
                    texts = []
                case TextDelta(text=text):
                    texts.append(text)
                    assert texts in ([text], [text, text]), (
                        "two holders of one run wrote to its log, or one wrote twice"
                    )
                case _:
                    pass


async def _drawn(below: int) -> int:
    """A number that the schedule draws: all schedules together draw all numbers."""
    drawn = 0
    for _ in range((below - 1).bit_length()):
        order: list[int] = []
        created: list[asyncio.Task[None]] = []

        async def note(bit: int, order: list[int] = order, created: list[asyncio.Task[None]] = created) -> None:
            if len(created) < 2:  # an eager task, which begins when it is created
                await asyncio.sleep(0)
            order.append(bit)

        for bit in (0, 1):
            created.append(asyncio.create_task(note(bit)))
        for task in created:
            await task
        drawn = 2 * drawn + order[0]
    return drawn % below


async def _trouble(*kinds: Kind) -> Trouble:
    kind = kinds[await _drawn(len(kinds))]
    write = await _drawn(WRITES)
    return Trouble(kind, write, executed=kind == "lost reply" or bool(await _drawn(2)))


def two_nodes(kind: Kind, *, of: Literal["holder", "rescuer"]) -> Callable[[], Coroutine[Any, Any, None]]:
    """A holder of a run, and a node that sends to the same session and then looks for what the other left.

    Parameters:
        kind: what happens at one of the writes.
        of: the node that it happens to. If it is the rescuer, the holder has crashed in its run.
    """

    async def scenario() -> None:
        database, trouble = Database(), await _trouble(kind)
        holder = Node(database, trouble if of == "holder" else Trouble("crash", 1, executed=False))
        rescuer = Node(database, trouble if of == "rescuer" else None)

        async def rescue() -> None:
            await rescuer.send("b")
            await rescuer.take_over()

        async def resume() -> None:
            holder.resumed.set()
            rescuer.resumed.set()

        others = [asyncio.create_task(_alive(rescue()))]
        if kind == "stop":
            others.append(asyncio.create_task(resume()))
        await _alive(holder.send("a"))
        for other in others:
            await other
        await judge(database)

    return scenario


async def three_nodes() -> None:
    """Any trouble at any write of two of three nodes."""
    database = Database()
    nodes = [Node(database, await _trouble("crash", "stop", "lost reply")) for _ in range(2)]
    nodes.append(Node(database))

    async def serve(node: Node, name: str) -> None:
        await node.send(name)
        await node.take_over()
        await node.take_over()

    async def resume() -> None:
        for node in nodes:
            await asyncio.sleep(0)
            node.resumed.set()

    async with asyncio.TaskGroup() as group:
        for node, name in zip(nodes, "abc", strict=True):
            group.create_task(_alive(serve(node, name)))
        group.create_task(resume())
    await judge(database)


# Faults


@fault
def a_rescue_finds_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Database, "orphans", lambda self: [])


@fault
def a_rescue_keeps_the_fence(patch: pytest.MonkeyPatch) -> None:
    rescue = transactions.rescue

    def lenient(tables: Any, at: float, served: Any) -> Any:
        claims = []
        for claim in rescue(tables, at, served):
            tables.get(claim.lease.session).fence -= 1
            claims.append(replace(claim, lease=replace(claim.lease, fence=claim.lease.fence - 1)))
        return tuple(claims)

    patch.setattr(transactions, "rescue", lenient)


@fault
def a_rescue_takes_the_runs_of_nodes_that_live(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Database, "orphans", MemoryTables.orphans)
    rescue = transactions.rescue

    def careless(tables: Any, at: float, served: Any) -> Any:
        claims = rescue(tables, at, served)
        for claim in claims:  # as a rescue without a fence: who held it goes on
            tables.get(claim.lease.session).fence -= 1
        return tuple(replace(claim, lease=replace(claim.lease, fence=claim.lease.fence - 1)) for claim in claims)

    patch.setattr(transactions, "rescue", careless)


@fault
def an_append_does_not_look_at_the_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runs, "require_lease", lambda tables, lease: tables.get(lease.session))


@fault
def an_append_that_is_repeated_counts_again(patch: pytest.MonkeyPatch) -> None:
    append = transactions.append

    def again(tables: Any, lease: Any, events: Any, nth: int, stored_limit: int) -> Any:
        return append(tables, lease, events, 0, stored_limit)

    patch.setattr(transactions, "append", again)


TROUBLES: tuple[tuple[Literal["holder", "rescuer"], Kind, str, int, tuple[Fault, ...]], ...] = (
    ("holder", "crash", "crashes", 3_000, (a_rescue_finds_nothing,)),
    ("holder", "stop", "is stopped", 140_000, (a_rescue_keeps_the_fence, an_append_does_not_look_at_the_fence)),
    (
        "holder",
        "lost reply",
        "loses a reply",
        3_000,
        (an_append_that_is_repeated_counts_again, an_idempotency_key_is_not_looked_at),
    ),
    ("rescuer", "crash", "crashes", 1_000, (a_rescue_finds_nothing,)),
    ("rescuer", "stop", "is stopped", 8_000, (a_rescue_finds_nothing,)),
    ("rescuer", "lost reply", "loses a reply", 1_000, (an_append_that_is_repeated_counts_again,)),
)
PROMISE = "P4, P5, P11: one node writes at a time, and each message is done once"

MODELS = (
    *(
        Model(
            item="cluster",
            name=f"the {of} of a run {what}, at each of its writes",
            promise=PROMISE,
            scenario=two_nodes(kind, of=of),
            faults=faults,
            ends=ends,
        )
        for of, kind, what, ends, faults in TROUBLES
    ),
    Model(
        item="cluster",
        name="three nodes, two of them in trouble",
        promise=PROMISE,
        scenario=three_nodes,
        faults=(a_rescue_finds_nothing, a_rescue_keeps_the_fence, a_rescue_takes_the_runs_of_nodes_that_live),
    ),
)
