"""What a session did not make is read-only behind its wall, until a person grants precisely what a call asks for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import pytest

from holdfast import Agent, Host, Session, Settings
from holdfast.agents.scripted import ScriptedModel
from holdfast.errors import CallMismatch, InvalidRequest, NotSupported, UnknownGrant
from holdfast.protocol.messages import Question
from holdfast.protocol.model import CallPart, ToolMessage
from holdfast.tools.files.toolset import Files
from holdfast.tools.files.workspace import Workspace
from holdfast.tools.programs.processes import Processes
from holdfast.tools.programs.python import Python
from holdfast.tools.programs.terminal import Terminal
from holdfast.tools.sandbox.choice import find_backend, use_backend
from holdfast.tools.sandbox.sandbox import Sandbox

BOUND_S = 100.0


def _why_not() -> str:
    try:
        backend = find_backend("linux")
    except NotSupported as error:
        return error.message
    return "" if "namespaces" in backend.layers else "read-only paths need namespaces, which this machine lacks"


needs_wall = pytest.mark.skipif(bool(why := _why_not()), reason=why)


class Desk:
    """A host with an agent that makes the calls that a test wants, and a person who answers."""

    def __init__(self, host: Host, wanted: dict[str, list[CallPart]]) -> None:
        self.host = host
        self.wanted = wanted

    def session(self, key: str = "s", principal: str = "local") -> Session:
        return self.host.session(key, principal=principal)

    async def start(self, session: Session, tool: str, **arguments: Any) -> str:
        """Have the session's agent make a call; return the id of the message."""
        text = f"{session.principal} {session.key} {len(self.wanted)}"
        self.wanted[text] = [CallPart(name=tool, arguments=arguments)]
        return (await session.send(text)).message_id

    async def asked(self, session: Session) -> Question:
        while not (found := await session.questions()):
            await asyncio.sleep(0.01)
        return found[0]

    async def end(self, session: Session, message_id: str) -> str:
        """Wait for the end of a call, and return its result."""
        await session.wait(message_id)
        return (await session.transcript())[-2].content

    async def call(self, session: Session, tool: str, **arguments: Any) -> str:
        """Make a call that asks nobody, and return its result."""
        message_id = await self.start(session, tool, **arguments)
        waiting = asyncio.ensure_future(session.wait(message_id))
        while not waiting.done():
            assert not await session.questions(), "nobody is asked"
            await asyncio.wait([waiting], timeout=0.05)
        return await self.end(session, message_id)

    async def granted(self, session: Session, tool: str, *, scope: Any = "call", **arguments: Any) -> str:
        """Make a call that asks, approve it, and return its result."""
        message_id = await self.start(session, tool, **arguments)
        await session.approve(await self.asked(session), scope=scope)
        return await self.end(session, message_id)


def at_desk(
    folder: Path,
    scenario: Callable[[Desk], Coroutine[Any, Any, None]],
    *,
    store: str = "memory://",
    backend: Literal["linux", "none"] = "linux",
    sandbox: Sandbox | None = None,
    **workspace: Any,
) -> None:
    wanted: dict[str, list[CallPart]] = {}

    def answer(request: Any) -> Any:
        last = request.messages[-1]
        if isinstance(last, ToolMessage):
            return "done"
        calls = wanted.get(last.content)
        return calls.pop() if calls else "nothing to do"

    async def main() -> None:
        place = Workspace(folder, **workspace)
        tools = [Terminal(place, sandbox=sandbox), Processes(place), Files(place), Python(place)]
        agent = Agent(name="worker", model=ScriptedModel(answer), tools=tools)
        async with asyncio.timeout(BOUND_S), AsyncExitStack() as stack:
            stack.enter_context(use_backend(backend))
            host = await stack.enter_async_context(Host(agent, store=store, settings=Settings(sandbox=backend)))
            await scenario(Desk(host, wanted))

    asyncio.run(main())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A workspace with files of a person."""
    root = tmp_path / "work"
    (root / "notes").mkdir(parents=True)
    (root / "notes" / "report.md").write_text("hers")
    (root / "notes" / "other.md").write_text("other")
    (root / "plan.md").write_text("plan")
    return root


# ── what needs no approval, and what does ────────────────────────────────────────────────────────────────────────────


@needs_wall
def test_a_program_changes_what_its_session_made_and_nothing_else(folder: Path) -> None:
    async def scenario(desk: Desk) -> None:
        session = desk.session()
        assert "exit code 0" in await desk.call(
            session, "terminal", command="mkdir own && echo 1 > own/a && echo 1 > b"
        )
        assert "exit code 0" in await desk.call(session, "terminal", command="echo 2 > own/a && rm b && cat plan.md")
        for command in (
            "echo x > plan.md",
            "rm -f plan.md",
            "mv plan.md else.md",
            "echo x > notes/report.md",
            "rm -rf notes",
            "touch notes/new.md",
            "mv notes own/notes",
            "ln notes/report.md own/link && echo x > own/link",
            "ln -s ../notes own/way && echo x > own/way/report.md",
            "chmod 777 plan.md",
            "truncate -s 0 plan.md",
        ):
            assert "exit code 0" not in await desk.call(session, "terminal", command=command), command
        assert sorted(os.listdir(folder)) == ["notes", "own", "plan.md"]
        assert (folder / "own" / "a").read_text() == "2\n"

    at_desk(folder, scenario)
    assert (folder / "plan.md").read_text() == "plan"
    assert (folder / "notes" / "report.md").read_text() == "hers"


@needs_wall
def test_a_call_that_asks_says_precisely_what_and_gets_only_that(folder: Path) -> None:
    async def scenario(desk: Desk) -> None:
        session = desk.session()
        access = {"write": ["notes/report.md"]}
        command = "echo mine > notes/report.md; echo mine > notes/other.md; echo mine > plan.md; touch notes/new"
        message_id = await desk.start(session, "terminal", command=command, access=access)
        question = await desk.asked(session)
        assert "write to notes/report.md, which this session did not make" in question.text
        assert question.access.write == (str(folder / "notes" / "report.md"),)
        await session.approve(question)
        await desk.end(session, message_id)
        assert (folder / "notes" / "report.md").read_text() == "mine\n"
        assert sorted(os.listdir(folder / "notes")) == ["other.md", "report.md"]
        assert (folder / "notes" / "other.md").read_text() == "other"
        assert (folder / "plan.md").read_text() == "plan"
        assert await session.grants() == [], "it held for that call only"
        await desk.call(session, "terminal", command="echo again > notes/report.md")
        assert (folder / "notes" / "report.md").read_text() == "mine\n"

    at_desk(folder, scenario)


@needs_wall
def test_a_grant_of_a_session_holds_until_it_is_revoked_and_only_there(folder: Path) -> None:
    async def scenario(desk: Desk) -> None:
        one, other = desk.session("one"), desk.session("other")
        arguments = {"command": "echo 1 > plan.md", "access": {"write": ["plan.md"]}}
        await desk.granted(one, "terminal", scope="session", **arguments)
        assert "exit code 0" in await desk.call(one, "terminal", command="echo 2 > plan.md"), "nobody is asked again"
        assert "exit code 0" in await desk.call(one, "terminal", **arguments), "nor if the call says what it needs"
        assert "now has" in await desk.call(one, "write_file", path="plan.md", content="3")
        assert "exit code 0" not in await desk.call(other, "terminal", command="echo 9 > plan.md")
        assert "not made by this session" in await desk.call(other, "write_file", path="plan.md", content="9")
        [grant] = await one.grants()
        assert (grant.by, grant.via, grant.scope, grant.session) == ("local", "host", "session", "one")
        await desk.host.revoke_grant(grant.grant_id)
        with pytest.raises(UnknownGrant):
            await desk.host.revoke_grant(grant.grant_id)
        assert await one.grants() == []

    at_desk(folder, scenario)
    assert (folder / "plan.md").read_text() == "3"


@needs_wall
def test_a_grant_of_the_principal_holds_in_its_sessions_and_in_no_other_s(folder: Path) -> None:
    async def scenario(desk: Desk) -> None:
        arguments = {"command": "echo 1 >> notes/report.md", "access": {"write": ["notes"]}}
        await desk.granted(desk.session("one"), "terminal", scope="principal", **arguments)
        assert "exit code 0" in await desk.call(desk.session("two"), "terminal", command="echo 2 >> notes/report.md")
        hers = desk.session("one", "alice")
        assert "exit code 0" not in await desk.call(hers, "terminal", command="echo 3 >> notes/report.md")
        [grant] = await desk.host.grants()
        with pytest.raises(UnknownGrant):
            await desk.host.revoke_grant(grant.grant_id, principal="alice")

    at_desk(folder, scenario)
    assert (folder / "notes" / "report.md").read_text() == "hers1\n2\n"


@needs_wall
def test_a_grant_and_what_a_session_made_survive_a_restart(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store = f"sqlite:///{tmp_path}/store/holdfast.db"

    async def before(desk: Desk) -> None:
        arguments = {"command": "echo 1 > plan.md; mkdir own", "access": {"write": ["plan.md"]}}
        await desk.granted(desk.session(), "terminal", scope="session", **arguments)

    async def after(desk: Desk) -> None:
        session = desk.session()
        assert "exit code 0" in await desk.call(session, "terminal", command="echo 2 > own/a && rm -r own")
        await session.delete()
        assert await desk.host.grants() == [], "it dies with the session"

    at_desk(folder, before, store=store)
    at_desk(folder, after, store=store)


# ── attacks ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@needs_wall
@pytest.mark.parametrize(
    "access",
    [
        {"write": ["../work2/x"]},
        {"write": ["/etc/passwd"]},
        {"write": ["notes/../../x"]},
        {"write": ["notes/report.md\u202ecod"]},
        {"write": [f"f{number}" for number in range(100)]},
        {"write": ["x" * 100_000]},
        {"read": ["/root"]},
        {"hosts": ["*"]},
        {"hosts": ["api.example.org:443 and more"]},
        {"hosts": ["api.example.org:99999"]},
        {"secrets": ["ANTHROPIC_API_KEY"]},
        {"secrets": ["HOME; ls"]},
        {"everything": ["*"]},
        {"write": "plan.md"},
    ],
    ids=str,
)
def test_nobody_is_asked_for_what_cannot_be_granted(folder: Path, access: Any) -> None:
    async def scenario(desk: Desk) -> None:
        result = await desk.call(desk.session(), "terminal", command="echo ran > ran", access=access)
        assert "invalid arguments" in result, result
        assert not (folder / "ran").exists()

    at_desk(folder, scenario)


@needs_wall
def test_a_granted_path_that_became_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("outside")

    async def scenario(desk: Desk) -> None:
        session = desk.session()
        arguments = {"command": "echo x > notes/report.md", "access": {"write": ["notes/report.md"]}}
        message_id = await desk.start(session, "terminal", **arguments)
        question = await desk.asked(session)
        (folder / "notes" / "report.md").unlink()
        (folder / "notes" / "report.md").symlink_to(outside)
        await session.approve(question, scope="session")
        assert "is a link" in await desk.end(session, message_id)
        await desk.call(session, "terminal", command="echo x > notes/report.md")

    at_desk(folder, scenario)
    assert outside.read_text() == "outside"


@needs_wall
def test_an_approval_counts_for_the_access_that_was_shown(folder: Path) -> None:
    async def scenario(desk: Desk) -> None:
        one, other = desk.session("one"), desk.session("other")
        first = await desk.start(one, "terminal", command="true", access={"write": ["notes/other.md"]})
        small = await desk.asked(one)
        await desk.start(other, "terminal", command="echo x > plan.md", access={"write": ["."]})
        large = await desk.asked(other)
        assert "the whole workspace" in large.text
        with pytest.raises(CallMismatch):
            await other.approve(large.question_id, call_hash=small.call_hash, scope="session")
        with pytest.raises(InvalidRequest):
            await one.approve(small, scope="everyone")  # type: ignore[arg-type]
        await one.approve(small)
        await desk.end(one, first)
        await other.interrupt()

    at_desk(folder, scenario)
    assert (folder / "plan.md").read_text() == "plan"


@needs_wall
def test_a_program_ends_when_the_grant_that_it_uses_is_revoked(folder: Path) -> None:
    async def scenario(desk: Desk) -> None:
        session = desk.session()
        access = {"write": ["plan.md"]}
        command = "while sleep 0.02; do date +%N > plan.md; done"
        await desk.granted(session, "terminal", command="true", access=access, scope="session")
        message_id = await desk.start(session, "terminal", command=command)
        background = await desk.call(desk.session("b"), "start_process", command="sleep 1000")
        assert "started" in background, "a process without the grant goes on"
        before = (folder / "plan.md").read_text()
        while (folder / "plan.md").read_text() in ("", before):
            await asyncio.sleep(0.01)
        [grant] = await session.grants()
        await desk.host.revoke_grant(grant.grant_id)
        async with asyncio.timeout(30):
            assert "revoked" in await desk.end(session, message_id)
        last = (folder / "plan.md").read_text()
        await asyncio.sleep(0.2)
        assert (folder / "plan.md").read_text() == last

    at_desk(folder, scenario)


@needs_wall
def test_what_appears_while_several_sessions_run_belongs_to_none(folder: Path) -> None:
    async def scenario(desk: Desk) -> None:
        one, other = desk.session("one"), desk.session("other")
        await desk.call(one, "start_process", command="sleep 1000")
        await desk.call(other, "terminal", command="echo 1 > both; mkdir own")
        assert "exit code 0" not in await desk.call(one, "terminal", command="rm both")
        assert "exit code 0" not in await desk.call(other, "terminal", command="rm both")

    at_desk(folder, scenario)


@needs_wall
def test_an_entry_that_takes_the_place_of_an_own_one_is_not_own(folder: Path) -> None:
    async def scenario(desk: Desk) -> None:
        session = desk.session()
        await desk.call(session, "terminal", command="echo 1 > own")
        (folder / "own").unlink()
        (folder / "own").write_text("hers")
        assert "exit code 0" not in await desk.call(session, "terminal", command="echo 2 > own")
        assert "not made by this session" in await desk.call(session, "write_file", path="own", content="2")

    at_desk(folder, scenario)
    assert (folder / "own").read_text() == "hers"


# ── file tools, scripts, secrets ─────────────────────────────────────────────────────────────────────────────────────


@needs_wall
def test_file_tools_ask_before_they_change_what_the_session_did_not_make(folder: Path) -> None:
    async def scenario(desk: Desk) -> None:
        session = desk.session()
        assert "now has" in await desk.call(session, "write_file", path="own/deep/a.md", content="1")
        assert "now has" in await desk.call(session, "write_file", path="own/deep/a.md", content="2")
        assert "now has" in await desk.call(session, "write_file", path="top.md", content="1")
        assert "replacement" in await desk.call(session, "edit_file", path="top.md", old="1", new="2")
        for path in ("plan.md", "notes/report.md", "notes/new.md", "notes/deep/new.md", "own/../plan.md"):
            assert "not made by this session" in await desk.call(session, "write_file", path=path, content="x"), path
        message_id = await desk.start(session, "edit_file", path="plan.md", old="plan", new="deed", ask=True)
        question = await desk.asked(session)
        assert "write to plan.md, which this session did not make" in question.text
        await session.approve(question)
        assert "replacement" in await desk.end(session, message_id)

    at_desk(folder, scenario)
    assert (folder / "plan.md").read_text() == "deed"
    assert sorted(os.listdir(folder / "notes")) == ["other.md", "report.md"]


@needs_wall
def test_a_secret_reaches_only_the_call_that_asked_for_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TICKETS_TOKEN", "s3cret")

    async def scenario(desk: Desk) -> None:
        session = desk.session()
        show = "echo [${TICKETS_TOKEN:-none}]"
        access = {"secrets": ["TICKETS_TOKEN"]}
        message_id = await desk.start(session, "terminal", command=show, access=access)
        question = await desk.asked(session)
        assert "get the secret TICKETS_TOKEN" in question.text
        await session.approve(question, scope="session")
        assert "[s3cret]" in await desk.end(session, message_id)
        assert "[none]" in await desk.call(session, "terminal", command=show), "it is passed only on request"
        assert "[s3cret]" in await desk.call(session, "terminal", command=show, access=access), "which is granted"

    at_desk(folder, scenario, sandbox=Sandbox(secrets_on_request=("TICKETS_TOKEN",)))


def test_without_a_wall_everything_is_as_it_was(folder: Path) -> None:
    async def scenario(desk: Desk) -> None:
        session = desk.session()
        assert "exit code 0" in await desk.call(session, "terminal", command="echo x > plan.md")
        assert "now has" in await desk.call(session, "write_file", path="notes/report.md", content="x")
        access = {"write": ["plan.md"]}
        assert "exit code 0" in await desk.call(session, "terminal", command="echo y > plan.md", access=access)

    at_desk(folder, scenario, backend="none")
