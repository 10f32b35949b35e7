"""Sessions that use files are continued by hosts that have the files, wherever their messages arrive."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.agents.scripted import ScriptedModel
from holdfast.events import RunRestarted
from holdfast.protocol.events import decode_event
from holdfast.protocol.model import CallPart
from holdfast.settings import Settings
from holdfast.storage.port import Send
from holdfast.storage.postgres import PostgresStore
from holdfast.tools import Files, Sandbox, Terminal, Workspace

works: list[tuple[str, str]] = []
"""Host and text of each attempt of a run."""


@pytest.fixture(autouse=True)
def no_work_yet() -> None:
    works.clear()


def clerk(place: str, *, replayable: bool = True) -> holdfast.Agent:
    """An agent that says where it runs."""

    @holdfast.agent(name="clerk", replayable=replayable)
    async def work(run: holdfast.Run) -> str:
        works.append((place, run.text))
        if run.text == "use files":
            await run.use_workspace()
        return f"{place} did {run.text}"

    return work


def host(url: str, pool: str | None, agent: holdfast.Agent | None = None, **settings: Any) -> holdfast.Host:
    chosen = Settings(**{"cluster_poll_s": 0.05, "grace_s": 1.0, "sandbox": "none", **settings})
    store = PostgresStore(url, lease_s=20.0, workspace_pool=pool)
    return holdfast.Host(agents=[agent or clerk(pool or "plain")], store=store, settings=chosen)


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main(), 60))


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def left_by_a_host_of_pool_a(url: str, **more: Any) -> None:
    """A run of the session alice, which used files of pool a, and whose host is gone."""
    gone = PostgresStore(url, lease_s=20.0, workspace_pool="a")
    await gone.open(node_id="gone", at=1.0)
    message = Send(
        principal="local", key="alice", agent="clerk", default_agent="clerk", message_id="m1", content="go",
        policy="queue", at=1.0, run_id="r1",
    )  # fmt: skip
    claim = (await gone.send(message)).claim
    assert claim is not None
    await gone.use_workspace(claim.lease)
    await gone.close()


def test_messages_of_a_session_with_files_run_where_the_files_are(postgres_url: str) -> None:
    async def main() -> None:
        async with host(postgres_url, "a") as one, host(postgres_url, "b") as other:
            assert await one.session("alice").ask("use files") == "a did use files"
            assert await one.session("bob").ask("hello") == "a did hello"
            assert await other.session("bob").ask("hello") == "b did hello", "it used no files"
            receipt = await other.session("alice").send("and now?")
            assert receipt.disposition == "queued"
            assert (await other.session("alice").wait(receipt.message_id)).text == "a did and now?"
            schedule = await other.session("alice").schedule("tick", every_s=3600.0)
            receipt = await schedule.run_now()
            assert (await other.session("alice").wait(receipt.message_id)).text == "a did tick"

    run(main)


def test_messages_wait_for_a_host_with_the_files_and_operators_are_told(
    postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with host(postgres_url, "b") as other:
            async with host(postgres_url, "a") as one:
                await one.session("alice").ask("use files")
            receipt = await other.session("alice").send("hello")
            await until(lambda: other.awaiting_pool)
            assert (other.awaiting_pool, other.statistics().awaiting_pool) == (1, 1)
            await until(lambda: other.statistics().counts.get("incidents_workspace_pool"))
            await other.session("alice").send("and hello")
            for _ in range(3):
                await other.parts.cluster_watch._poll()  # type: ignore[union-attr]
            assert other.statistics().counts["incidents_workspace_pool"] == 1, "told once, not at every poll"
            assert caplog.text.count("workspace_pool = 'a'") == 1
            async with host(postgres_url, "a") as one:
                assert (await other.session("alice").wait(receipt.message_id)).text == "a did hello"
                await until(lambda: not other.awaiting_pool)
            assert ("b", "hello") not in works

    run(main)


def test_a_replayable_run_is_handed_over_to_a_host_with_its_files(postgres_url: str) -> None:
    async def main() -> None:
        await left_by_a_host_of_pool_a(postgres_url)
        async with host(postgres_url, "b") as other:
            await until(lambda: other.awaiting_pool)
            assert not other.live
            assert other.admission.statistics().running == 0, "its slot is free"
            assert await other.session("bob").ask("hello") == "b did hello"
            async with host(postgres_url, "a"):
                assert (await (await other.session("alice").expect("m1"))).text == "a did go"
            found = await other.store.find_session("local", "alice")
            assert found is not None
            stored = await other.store.read_events(found[0], after=0, limit=100)
            events = [decode_event(event) for event in stored]
            assert [event.attempt for event in events if isinstance(event, RunRestarted)] == [2]
        assert works == [("b", "hello"), ("a", "go")]

    run(main)


def test_a_run_that_cannot_resume_ends_at_once_and_its_session_waits(postgres_url: str) -> None:
    async def main() -> None:
        await left_by_a_host_of_pool_a(postgres_url)
        async with host(postgres_url, "b", clerk("b", replayable=False)) as other:
            assert (await (await other.session("alice").expect("m1"))).state == "interrupted"
            assert (await other.session("alice").send("hello")).disposition == "queued"
        assert works == []

    run(main)


@pytest.mark.parametrize("replayable", [True, False])
def test_a_run_whose_rescuer_lacks_its_agent_is_ended_or_left_to_its_pool(postgres_url: str, replayable: bool) -> None:
    async def main() -> None:
        await left_by_a_host_of_pool_a(postgres_url)
        stranger = PostgresStore(postgres_url, lease_s=20.0)
        await stranger.open(node_id="stranger", at=2.0)
        assert await stranger.rescue(at=2.0, served={"another": ""}) == ()
        await stranger.close()
        async with host(postgres_url, "b", clerk("b", replayable=replayable)) as other:
            if not replayable:
                assert (await (await other.session("alice").expect("m1"))).state == "interrupted"
                return
            await until(lambda: other.awaiting_pool)
            assert other.admission.statistics().running == 0, "its slot is free"
            async with host(postgres_url, "a"):
                assert (await (await other.session("alice").expect("m1"))).text == "a did go"
        assert works == [("a", "go")]

    run(main)


def test_an_interrupt_ends_a_run_that_waits_for_its_files(postgres_url: str) -> None:
    async def main() -> None:
        await left_by_a_host_of_pool_a(postgres_url)
        async with host(postgres_url, "b") as other:
            await until(lambda: other.awaiting_pool)
            await other.session("alice").interrupt("enough")
            assert (await (await other.session("alice").expect("m1"))).state == "interrupted"
            await until(lambda: not other.awaiting_pool)
        assert works == []

    run(main)


def test_a_drained_host_leaves_its_runs_to_hosts_with_their_files(postgres_url: str) -> None:
    reached = asyncio.Event()

    def patient(place: str) -> holdfast.Agent:
        @holdfast.agent(name="clerk", replayable=True)
        async def work(run: holdfast.Run) -> str:
            works.append((place, run.text))
            await run.use_workspace()
            reached.set()
            if run.attempt == 1:
                await run.interrupt.wait()
            return f"{place} went on"

        return work

    async def main() -> None:
        async with host(postgres_url, "b", patient("b")) as other:
            async with host(postgres_url, "a", patient("a 1"), drain_timeout_s=0.1) as one:
                receipt = await one.session("alice").send("work")
                await reached.wait()
                await one.drain()
            await until(lambda: other.awaiting_pool)
            async with host(postgres_url, "a", patient("a 2")):
                assert (await other.session("alice").wait(receipt.message_id)).text == "a 2 went on"
        assert works == [("a 1", "work"), ("a 2", "work")]

    run(main)


@pytest.mark.parametrize(
    ("tool", "arguments", "ties"),
    [
        ("write_file", {"path": "note", "content": "x"}, True),
        ("terminal", {"command": "true"}, True),
        ("list_files", {}, False),
    ],
)
def test_tools_tie_a_session_before_they_write(
    postgres_url: str, tmp_path: Path, tool: str, arguments: dict[str, Any], ties: bool
) -> None:
    workspace = Workspace(tmp_path / "work")
    model = ScriptedModel([[CallPart(name=tool, arguments=arguments)], "done"])
    agent = holdfast.Agent(name="clerk", model=model, tools=[Files(workspace), Terminal(workspace)])

    async def main() -> None:
        async with host(postgres_url, "a", agent) as one, host(postgres_url, "b") as other:
            assert await one.session("alice").ask("go") == "done"
            receipt = await other.session("alice").send("hello")
            assert (receipt.disposition == "queued") is ties
            await one.session("alice").stop()

    run(main)


def test_a_program_behind_a_wall_ties_its_session(postgres_url: str, tmp_path: Path) -> None:
    @holdfast.agent(name="clerk")
    async def work(run: holdfast.Run) -> str:
        await (await run.process(["true"], sandbox=Sandbox(), cwd=tmp_path)).wait()
        return "done"

    async def main() -> None:
        async with host(postgres_url, "a", work) as one, host(postgres_url, "b") as other:
            assert await one.session("alice").ask("go") == "done"
            assert (await other.session("alice").send("hello")).disposition == "queued"
            await one.session("alice").stop()

    run(main)


def test_a_host_that_declares_a_pool_is_not_warned_that_files_stay_behind(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(holdfast.Agent, "executes", True)

    async def main() -> None:
        other = PostgresStore(postgres_url, lease_s=20.0)
        await other.open(node_id="other", at=1.0)
        async with host(postgres_url, "a") as one:
            watch = one.parts.cluster_watch
            assert watch is not None
            await until(lambda: watch._has_warned)
            assert "leaves its workspace behind" not in caplog.text
        await other.close()

    run(main)


def test_a_store_that_only_one_host_uses_ties_no_session(tmp_path: Path) -> None:
    async def main() -> None:
        settings = Settings(workspace_pool="a")
        async with holdfast.Host(clerk("here"), store=f"sqlite:///{tmp_path}/s.db", settings=settings) as one:
            assert await one.session("alice").ask("use files") == "here did use files"
        async with holdfast.Host(clerk("here"), store=f"sqlite:///{tmp_path}/s.db") as one:
            assert await one.session("alice").ask("hello") == "here did hello"

    run(main)
