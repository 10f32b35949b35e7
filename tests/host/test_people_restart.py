"""Runs that wait for people over the end of their host: closed, and killed between any two writes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import Host, Run, Settings, agent, tool
from holdfast.errors import ToolFailed
from holdfast.failpoints import VARIABLE
from holdfast.host.session import Session
from holdfast.protocol.events import RunFinished, RunSuspended
from tests.host.people import check_entries, check_story, whole_log
from tests.host.people_host import QUESTIONS, agents, answer_until_settled

ROOT = Path(__file__).parents[2]
KILLS = (
    "suspend.after_commit",
    "park.before_commit",
    "park.after_commit",
    "answer.after_commit",
    "claim.after_commit",
    "restart.after_commit",
    "commit_run.before_commit",
)
MORE_KILLS = (
    "suspend.before_commit",
    "suspend.after_commit:2",
    "park.before_write",
    "park.after_commit:2",
    "answer.before_commit",
    "answer.after_commit:2",
    "claim.before_commit",
    "commit_run.after_commit",
)


def start(folder: Path, point: str, name: str) -> subprocess.Popen[bytes]:
    """A host that kills itself at that failpoint."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.host.people_host", str(folder / f"{name}-{point}.db"), name],
        env={**os.environ, VARIABLE: f"sqlite.{point}"},
        cwd=ROOT,
    )


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The databases of hosts that were killed, for the tests that are run."""
    folder = tmp_path_factory.mktemp("killed")
    names = [item.name for item in request.session.items]
    points = [point for point in (*KILLS, *MORE_KILLS) if any(f"[{point}]" in name for name in names)]
    pairs = [(point, "patient") for point in points] + [("suspend.after_commit", "present")]
    for first in range(0, len(pairs), 4):
        children = [start(folder, *pair) for pair in pairs[first : first + 4]]
        for child in children:
            assert child.wait(100) == -signal.SIGKILL
    return folder


@pytest.mark.parametrize("point", [*KILLS, *(pytest.param(point, marks=pytest.mark.nightly) for point in MORE_KILLS)])
def test_a_run_that_waits_for_people_goes_on_after_a_kill_at_any_write(killed: Path, point: str) -> None:
    path = killed / f"patient-{point}.db"
    effects = path.with_suffix(".effects")

    async def main() -> None:
        async with asyncio.timeout(30):
            async with Host(agents=agents(effects), store=f"sqlite:///{path}") as host:  # type: ignore[arg-type]
                session = host.session("s")
                (run,) = await session.runs()
                (message_id,) = run.messages
                await answer_until_settled(session, message_id)
                settlement = await session.wait(message_id)
                assert settlement.state == "completed"
                assert settlement.text == "before yes to shall I? yes to sure?"
                events = await whole_log(host, "s")
                check_story(events)
                entries = await session.transcript()
                check_entries(entries, events)
                assert "".join(e.content for e in entries if e.role == "assistant") == settlement.text
                assert [e.question.text for e in events if isinstance(e, RunSuspended)] == list(QUESTIONS)
                assert await session.ask("next", agent="echo") == "next"
                assert not {n: c for n, c in host.statistics().promises.items() if c.broken}

    asyncio.run(main())
    assert effects.read_text().split() == ["first", "second"]


def test_a_plain_function_that_waited_when_its_host_was_killed_is_interrupted_and_announced(killed: Path) -> None:
    path = killed / "present-suspend.after_commit.db"

    async def main() -> None:
        async with asyncio.timeout(30):
            async with Host(agents=agents(path.with_suffix(".effects")), store=f"sqlite:///{path}") as host:  # type: ignore[arg-type]
                session = host.session("s")
                settlement = await session.wait(path.with_suffix(".sent").read_text())
                assert settlement.cause is not None
                assert (settlement.state, settlement.cause.kind) == ("interrupted", "crash")
                (incident,) = [i for i in host.incidents.newest if i.kind == "unanswered"]
                assert settlement.run_id is not None
                assert settlement.run_id in incident.text
                assert not await session.questions()
                check_story(await whole_log(host, "s"))
                check_entries(await session.transcript(), await whole_log(host, "s"))
                assert await session.ask("next", agent="echo") == "next"

    asyncio.run(main())


def test_a_parked_run_outlives_its_host_and_goes_on_with_the_answer_of_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    effects = tmp_path / "effects"

    def host() -> Host:
        return Host(agents=agents(effects), store=f"sqlite:///{path}")  # type: ignore[arg-type]

    async def suspended(session: Session) -> None:
        while not await session.questions() or session._parts.launcher.live:
            await asyncio.sleep(0.01)

    async def main() -> None:
        async with asyncio.timeout(30):
            async with host() as one:
                session = one.session("s", agent="patient")
                receipt = await session.send("x")
                await suspended(session)
            async with host() as two:
                assert two.recovered.restarted == two.recovered.interrupted == ()
                session = two.session("s")
                assert (await session.info()).state == "suspended"
                assert not two.live
                (question,) = await session.questions()
                await session.answer(question.question_id, "go")
                await suspended(session)
                (question,) = await session.questions()
                assert question.text == QUESTIONS[1]
            async with host() as three:
                session = three.session("s")
                (question,) = await session.questions()
                await two_answers(session, question.question_id)
                assert (await session.wait(receipt.message_id)).text == "before go now"
                events = await whole_log(three, "s")
                check_story(events)
                assert len([e for e in events if isinstance(e, RunFinished)]) == 1

    async def two_answers(session: Session, question_id: str) -> None:
        first, second = await asyncio.gather(session.answer(question_id, "now"), session.answer(question_id, "now"))
        assert first == second

    asyncio.run(main())
    assert effects.read_text().split() == ["first", "second"]


def test_a_call_inside_another_one_that_asks_for_something_else_after_a_restart_is_not_made(tmp_path: Path) -> None:
    """The question is still the one that was shown, and its approval is for what was shown."""
    wanted, paid = ["ann", "mallory"], []

    @tool(approval=True)
    def pay(to: str) -> str:
        """Pay somebody."""
        paid.append(to)
        return f"{to} is paid"

    @agent(replayable=True)
    async def payer(run: Run) -> str:
        try:
            return str(await run.call_tool(pay, {"to": wanted.pop(0)}))
        except ToolFailed as refused:
            return str(refused)

    async def main() -> None:
        async with asyncio.timeout(30):
            store, settings = f"sqlite:///{tmp_path / 's.db'}", Settings(drain_timeout_s=0.1)
            async with Host(payer, store=store, settings=settings) as one:
                receipt = await one.session("s").send("x")
                while not await one.session("s").questions():
                    await asyncio.sleep(0.01)
            async with Host(payer, store=store) as two:
                session = two.session("s")
                (question,) = await session.questions()
                assert question.arguments == {"to": "ann"}
                await session.approve(question)
                assert "a different call" in str((await session.wait(receipt.message_id)).text)

    asyncio.run(main())
    assert paid == []


def test_a_parked_run_that_is_interrupted_after_a_restart_ends_with_what_it_had_said(tmp_path: Path) -> None:
    path = tmp_path / "s.db"

    def host() -> Host:
        return Host(agents=agents(tmp_path / "effects"), store=f"sqlite:///{path}")  # type: ignore[arg-type]

    async def main() -> None:
        async with asyncio.timeout(30):
            async with host() as one:
                session = one.session("s", agent="patient")
                receipt = await session.send("x")
                while not await session.questions() or one.live:
                    await asyncio.sleep(0.01)
            async with host() as two:
                session = two.session("s")
                assert (await session.interrupt("enough")).cause.reason == "enough"
                settlement = await session.wait(receipt.message_id)
                assert (settlement.state, settlement.text) == ("interrupted", "before ")
                assert await session.ask("next", agent="echo") == "next"

    asyncio.run(main())
