"""Stores and an export that commit 07d6fa0 wrote: every session opens, resumes, replays and exports.

``written_by_07d6fa0.sql`` is a dump of what its host left when it was killed: runs that wait for people, one in the
middle of its work, a mailbox, schedules, a fork, a compacted, an undone and a deleted session, a graph's state.
``rolled_back_by_07d6fa0.sql`` has a run that was rolled back, and one that was killed during its rollback. The folder's
README tells how they were made.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import msgspec
import pytest

import holdfast
from examples.langgraph_graph import agent as orders
from holdfast import Host
from holdfast.agents.scripted import ScriptedModel
from holdfast.errors import SessionDeleted
from holdfast.protocol.events import Gap, RunFinished
from holdfast.protocol.messages import SessionExport
from holdfast.protocol.model import CallPart
from holdfast.testing.clock import ManualClock

FIXTURES = Path(__file__).parents[1] / "storage" / "fixtures"
WRITTEN_AT = 1795384170.0
ROLLED_BACK_AT = 1795439150.0
SCHEMA_OF_07D6FA0 = 4
"""It refuses a store with a higher version, with the line that is in the README."""

TO_PAY = (("Ann", 20), ("Bob", 2000))
weighed: list[str] = []


def weigh(item: str) -> int:
    weighed.append(item)
    return len(item)


async def hold() -> str:
    return "held"


@holdfast.agent(replayable=True)
async def shop(run: holdfast.Run) -> str:
    weight = await run.call(weigh, run.text)
    await run.call(hold, idempotent=True)
    return f"{run.text} weighs {weight}"


@holdfast.agent(replayable=True)
async def desk(run: holdfast.Run) -> str:
    number = await run.call(weigh, run.text)
    answer = await run.ask_user("Which customer?")
    return f"order {number} is for {answer.text}"


@holdfast.agent(replayable=True)
async def clerk(run: holdfast.Run) -> str:
    return f"done: {run.text}"


@holdfast.agent
async def boss(run: holdfast.Run) -> str:
    return f"the clerk says: {await run.delegate('clerk', run.text)}"


@holdfast.tool(approval=lambda arguments: arguments["amount"] > 100)
def pay(to: str, amount: int) -> str:
    """Pay somebody."""
    return f"{to} has got {amount}"


def agents() -> list[holdfast.Agent]:
    calls = [
        CallPart(name="pay", arguments={"to": to, "amount": amount}) for to, amount in (("Ann", 20), ("Bob", 2000))
    ]
    cashier = holdfast.Agent(name="cashier", model=ScriptedModel([calls, "Done."]), tools=[pay])
    writer = holdfast.Agent(name="writer", model=ScriptedModel("They greeted each other."))
    team = holdfast.parallel(clerk, holdfast.branch(desk, name="asks"), name="team")
    return [clerk, shop, desk, boss, cashier, writer, team, orders]


@asynccontextmanager
async def opened(path: Path, *, at: float = WRITTEN_AT) -> AsyncIterator[Host]:
    weighed.clear()
    clock = ManualClock(at)
    async with asyncio.timeout(30), Host(agents=agents(), store=f"sqlite:///{path}", clock=clock) as host:
        yield host


def restore(dump: str, path: Path) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((FIXTURES / dump).read_text("utf-8"))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return restore("written_by_07d6fa0.sql", tmp_path / "old.db")


@pytest.fixture
def rolled_back(tmp_path: Path) -> Path:
    return restore("rolled_back_by_07d6fa0.sql", tmp_path / "rolled_back.db")


def contents(path: Path) -> tuple[int, list[str]]:
    """The version of a store's schema, and all of its data."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("PRAGMA user_version").fetchone()[0], list(connection.iterdump())


async def answered(host: Host, key: str, text: str, principal: str = "local") -> str:
    """The end of a run that waits for a person, once it has its answer."""
    session = host.session(key, principal=principal)
    (question,) = await session.questions()
    (message_id,) = [message for run in await session.runs() if run.state == "suspended" for message in run.messages]
    if question.kind == "approval":
        await session.deny(question, reason=text)
    else:
        await session.answer(question, text)
    settled = await session.wait(message_id)
    assert settled.state == "completed", settled
    return settled.text


def test_runs_that_wait_for_people_go_on_from_their_journal(path: Path) -> None:
    async def main() -> None:
        async with opened(path) as host:
            assert await answered(host, "suspended", "Ann") == "order 8 is for Ann"
            assert await answered(host, "asking team", "Bob") == "done: five\n\norder 4 is for Bob"
            assert await answered(host, "paying", "too much") == "Done."
            results = [e for e in await host.session("paying").transcript() if e.role == "tool_result"]
            assert {(e.status, e.content) for e in results} == {
                ("ok", "Ann has got 20"),
                ("error", "a person denied this call: too much; it was not made"),
            }
            assert {"a teapot", "five"}.isdisjoint(weighed)  # the calls of the first life are not made again

    asyncio.run(main())


def test_a_run_that_was_at_work_goes_on_and_the_mailbox_after_it(path: Path) -> None:
    async def main() -> None:
        async with opened(path) as host:
            session = host.session("running")
            first = await session.send("a lamp", agent="shop", idempotency_key="order-1")
            second = await session.send("after that", idempotency_key="order-2")
            assert (first.disposition, second.disposition) == ("duplicate", "duplicate")
            assert (await session.wait(first.message_id)).text == "a lamp weighs 6"
            assert (await session.wait(second.message_id)).text == "after that weighs 10"
            assert weighed == ["after that"]

    asyncio.run(main())


def test_a_graph_finds_the_state_that_it_kept(path: Path) -> None:
    async def main() -> None:
        async with opened(path) as host:
            assert await answered(host, "graph", "yes", principal="ann") == "Ordered a lamp."
            asked = await host.session("graph", principal="ann").ask("what have I ordered?", agent="orders")
            assert asked == "You have ordered: a cup, a lamp"

    asyncio.run(main())


def test_transcripts_edits_and_logs_are_read_as_they_were_written(path: Path) -> None:
    async def main() -> None:
        async with opened(path) as host:

            async def said(key: str) -> list[str]:
                return [f"{entry.role}: {entry.content}" for entry in await host.session(key).transcript()]

            talk = await said("talk")
            assert talk[:2] == ["user: where is this?", "assistant: done: where is this?"]
            assert await said("forked") == talk[:2]
            assert "They greeted each other." in (await said("compacted"))[0]
            assert await said("undone") == ["user: one", "assistant: done: one"]
            assert (await said("delegated"))[-1] == "assistant: the clerk says: done: count"
            with pytest.raises(SessionDeleted):
                await host.session("gone").transcript()

            receipt = await host.session("talk").send("and now?")
            events = [event async for event in host.session("talk").events(after="0", follow=receipt.message_id)]
            assert not any(isinstance(event, Gap) for event in events)
            ends = [event.text for event in events if isinstance(event, RunFinished)]
            assert ends == ["done: where is this?", "done: and this?", "done: again", "done: and now?"]

    asyncio.run(main())


def test_schedules_are_due_when_they_were_and_fire(path: Path) -> None:
    async def main() -> None:
        async with opened(path) as host:
            by_cron, by_interval = await host.schedules(session="scheduled")
            assert (by_cron.cron, by_cron.timezone, by_interval.every_s) == ("0 9 * * *", "Europe/Berlin", 3600)
            for view in (by_cron, by_interval):
                assert view.state == "active"
                assert view.next_at is not None and WRITTEN_AT < view.next_at < WRITTEN_AT + 86_400
            receipt = await host.find_schedule(by_interval.schedule_id).run_now()
            assert (await host.session("scheduled").wait(receipt.message_id)).text == "done: say it once more"

    asyncio.run(main())


def test_an_old_export_begins_a_session_and_a_new_one_has_all_of_it(path: Path) -> None:
    old = msgspec.json.decode((FIXTURES / "export_of_07d6fa0.json").read_bytes(), type=SessionExport)

    async def main() -> None:
        async with opened(path) as host:
            new = await host.session("talk").export()
            assert [(e.role, e.content) for e in new.entries] == [(e.role, e.content) for e in old.entries]
            assert new.attachments == old.attachments
            session = host.session("elsewhere")
            await session.import_history(old)
            assert len(await session.transcript()) == len(old.entries)
            (picture,) = old.entries[0].attachments
            assert (await session.attachment(picture.digest))[1] == b"\x89PNG a map"

    asyncio.run(main())


def test_a_run_that_was_killed_during_its_rollback_ends_rolled_back(rolled_back: Path) -> None:
    async def main() -> None:
        async with opened(rolled_back, at=ROLLED_BACK_AT) as host:
            stopping = host.session("stopping")
            newer = await stopping.send("instead", policy="rollback", idempotency_key="again")
            assert newer.disposition == "duplicate"
            assert (await stopping.wait(newer.message_id)).text == "done: instead"
            for session in (host.session("ended"), stopping):
                asked = [entry.content for entry in await session.transcript() if entry.role == "user"]
                assert asked == ["first", "instead"]
                found = await host.store.find_session("local", session.key)
                assert found is not None
                log = await host.store.read_events(found[0], after=0, limit=1000)
                assert [event.kind for event in log].count("run.rolled_back") == 1
                export = await session.export()
                assert [entry.content for entry in export.entries if entry.role == "user"] == asked

    asyncio.run(main())


def test_the_old_store_is_copied_aside_and_the_migrated_one_has_a_version_that_old_code_refuses(
    path: Path, rolled_back: Path
) -> None:
    async def main(store: Path) -> None:
        async with opened(store, at=ROLLED_BACK_AT):
            pass

    for store in (path, rolled_back):
        before = contents(store)
        assert before[0] == SCHEMA_OF_07D6FA0
        asyncio.run(main(store))
        assert contents(store)[0] > SCHEMA_OF_07D6FA0
        assert contents(store.with_name(f"{store.name}.version-{SCHEMA_OF_07D6FA0}")) == before
