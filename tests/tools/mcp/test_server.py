"""The tools of a real MCP server, over its pipes and over HTTP: what stops stops there too, and harms nobody else."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest

pytest.importorskip("mcp")

from holdfast import Agent, CallPart, Host, Run, Settings, agent
from holdfast.agents.scripted import ScriptedModel
from holdfast.clock import system_clock
from holdfast.errors import ConfigurationError, InvalidArguments, MissingExtra, NotSupported, ToolFailed
from holdfast.host import Session
from holdfast.proof.storm.server import free_port
from holdfast.protocol.events import ToolFinished, ToolOutput
from holdfast.runtime.processes import procfs
from holdfast.runtime.processes.procfs import all_pids, start_time
from holdfast.tools.mcp.server import McpServer
from holdfast.tools.sandbox.sandbox import Sandbox
from tests.tools.using import Unbounded

SERVER = Path(__file__).with_name("mcp_everything.py")
BOUND_S = 60.0


class Here:
    """What the host offers; these servers need none of it."""

    clock = system_clock
    data_dir = None
    programs = Unbounded()

    async def tell(self, principal: str, session_key: str, text: str) -> None:
        raise AssertionError("an MCP server tells nobody anything")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server over HTTP for all tests, as it would be: its address, and the folder of its marks."""
    folder, port = tmp_path_factory.mktemp("mcp"), free_port()
    with start_http(folder, port):
        yield f"http://127.0.0.1:{port}/mcp", folder


@pytest.fixture(params=["stdio", "http"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """How the server of the test is reached, and where its marks are: over its pipes, and over HTTP."""
    if request.param == "http":
        url, folder = request.getfixturevalue("shared")
        return {"url": url}, folder
    return over_pipes(tmp_path)


def over_pipes(folder: Path) -> tuple[dict[str, Any], Path]:
    """A server of the test's own."""
    return {"command": [sys.executable, str(SERVER), str(folder)], "cwd": str(folder)}, folder


def start_http(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """The server over HTTP; it ends when the test does."""
    return subprocess.Popen([sys.executable, str(SERVER), str(folder), str(port)], stdin=subprocess.PIPE)


async def seen(what: Callable[[], bool]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(BOUND_S):
        while not what():
            await asyncio.sleep(0.005)


def pid_of(named: str) -> int | None:
    """The pid here of a process that named itself, as `mcp_everything.me` does; None if it is gone."""
    namespace, pid, started = (int(part) for part in named.split(":"))
    for one in all_pids():
        try:
            if namespace and os.stat(f"/proc/{one}/ns/pid").st_ino != namespace:
                continue
            status = Path(f"/proc/{one}/status").read_text()
        except OSError:
            continue
        inside = int(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1])
        if inside == pid and started in (0, start_time(one)):
            return one
    return None


def alive(named: str) -> bool:
    return pid_of(named) is not None


@asynccontextmanager
async def opened(reached: dict[str, Any], **options: Any) -> AsyncIterator[tuple[McpServer, Host]]:
    """A connected server, and a host whose agent makes the calls that its messages name: ``tool {arguments}``."""
    async with asyncio.timeout(90):
        # on a busy machine, even the imports take long
        server = McpServer("m", **{"connect_s": BOUND_S, **reached, **options})
        async with server.lifespan(Here()):
            await seen(lambda: server.connected)

            @agent
            async def caller(run: Run) -> str:
                name, _, arguments = run.text.partition(" ")
                tools = {tool.name: tool for tool in server.tools()}
                tool = tools[f"m_{name}"]
                given = tool.check(eval(arguments or "{}"))
                bound = functools.partial(tool.work, **given)
                return repr(await run.call(bound, name=tool.name, timeout_s=tool.timeout_s, on="loop"))

            async with Host(caller, store="memory://", settings=Settings(drain_timeout_s=0)) as host:
                yield server, host


async def outcome(session: Session, text: str) -> str:
    """What the call gave the agent, or the error that it raised."""
    receipt = await session.send(text)
    settled = await session.wait(receipt.message_id, timeout_s=BOUND_S)
    return settled.text or settled.error or str(settled.cause)


def test_tools_are_listed_and_their_results_and_errors_come_back(where: tuple[dict[str, Any], Path]) -> None:
    reached, _ = where

    async def main() -> None:
        async with opened(reached) as (server, host):
            add = next(tool for tool in server.tools() if tool.name == "m_add")
            assert add.description == "Add two numbers."
            assert add.parameters["properties"].keys() == {"a", "b"}
            session = host.session("s")
            assert await outcome(session, "add {'a': 1, 'b': 2}") == "3"
            assert await outcome(session, "echo {'call': 'x', 'then': {'y': 1}}") == repr("x {'y': 1}")
            assert await outcome(session, "person {'name': 'Ada'}") == repr({"name": "Ada", "age": 7})
            assert "here\\n[image image/png, 300 bytes, not shown]" in await outcome(session, "picture")
            assert "the printer is on fire" in await outcome(session, "fail")
            assert "the parameter 'b' is missing" in await outcome(session, "add {'a': 1}")
            assert await outcome(session, "count {'upto': 3}") == repr("counted")
            said = [e.text async for e in session.events(follow=await last(session)) if isinstance(e, ToolOutput)]
            assert said == ["[1/3] at 1\n", "[2/3] at 2\n", "[3/3] at 3\n"]

    asyncio.run(main())


async def last(session: Session) -> str:
    return (await session.runs())[0].messages[0]


async def asked(host: Host, principal: str, key: str = "s") -> dict[str, Any]:
    found = eval(await outcome(host.session(key, principal=principal), "who"))
    assert isinstance(found, dict)
    return found


def test_a_program_is_told_with_each_call_who_asks_and_an_address_only_if_you_say_so(
    where: tuple[dict[str, Any], Path],
) -> None:
    reached, _ = where

    async def main() -> None:
        for tell_caller in (None, True, False):
            async with opened(reached, tell_caller=tell_caller) as (_, host):
                alice, bob = await asked(host, "alice", "a"), await asked(host, "bob", "b")
                if tell_caller is False or (tell_caller is None and "url" in reached):
                    assert alice["told"] == bob["told"] == {}
                    continue
                for told, principal, key in ((alice["told"], "alice", "a"), (bob["told"], "bob", "b")):
                    assert (told["holdfast/principal"], told["holdfast/session"]) == (principal, key)
                    assert told["holdfast/call"].startswith("r_") and told["holdfast/session_id"]
                assert alice["told"]["holdfast/session_id"] != bob["told"]["holdfast/session_id"]

    asyncio.run(main())


def test_each_principal_can_have_a_program_of_its_own(tmp_path: Path) -> None:
    reached, _ = over_pipes(tmp_path)

    async def main() -> None:
        async with opened(reached, per_principal=True, principals=2) as (_, host):
            first = {name: await asked(host, name) for name in ("alice", "bob")}
            again = {name: await asked(host, name, "other") for name in ("alice", "bob")}
            assert all(first[name]["before"] == [] and again[name]["before"] == [name] for name in first)
            assert len({one["pid"] for one in first.values()}) == 2
            await host.session("busy", principal="bob").send("wait {'name': 'bobs'}")
            await seen((tmp_path / "bobs.started").exists)
            carol = await asked(host, "carol")  # takes the place of alice, who has no call under way
            assert carol["before"] == [] and not alive(first["alice"]["pid"]) and alive(first["bob"]["pid"])
            await host.session("busy", principal="carol").send("wait {'name': 'carols'}")
            await seen((tmp_path / "carols.started").exists)
            assert "is busy with 2 users" in await outcome(host.session("s", principal="alice"), "who")
        assert not any(alive(one["pid"]) for one in (*first.values(), carol))

    asyncio.run(main())


@pytest.mark.skipif(not procfs.supported(), reason="programs are watched only on Linux")
def test_a_principals_program_sees_what_the_principal_may(tmp_path: Path) -> None:
    secret = tmp_path / "shared" / "report"
    secret.parent.mkdir()
    secret.write_text("for alice")
    reached, _ = over_pipes(tmp_path / "server")
    (tmp_path / "server").mkdir()
    sandboxes = {"": Sandbox(), "alice": Sandbox(readable=(secret.parent,)), "bob": Sandbox()}

    async def main() -> None:
        async with opened(reached, per_principal=True, sandbox=sandboxes.__getitem__) as (_, host):
            asking = {name: host.session("s", principal=name) for name in ("alice", "bob", "carol")}
            found = {name: await outcome(one, f"read {{'path': {str(secret)!r}}}") for name, one in asking.items()}
            assert found["alice"] == repr("for alice") and "No such file" in found["bob"]
            assert "no sandbox is known" in found["carol"]
        del sandboxes[""]
        with pytest.raises(ConfigurationError, match="lists the tools of MCP server 'm' has no sandbox"):
            async with opened(reached, per_principal=True, sandbox=sandboxes.__getitem__):
                raise AssertionError("it must not start")

    asyncio.run(main())


@pytest.mark.skipif(not procfs.supported(), reason="programs are watched only on Linux")
@pytest.mark.parametrize("per_principal", [False, True])
def test_a_server_programs_bomb_is_ended_and_counts_for_whom_it_serves(tmp_path: Path, per_principal: bool) -> None:
    """A program of one principal uses up its quota, and one that all share uses up the host's."""
    reached, _ = over_pipes(tmp_path)

    async def main() -> None:
        server = McpServer("m", **reached, connect_s=BOUND_S, per_principal=per_principal)
        model = ScriptedModel([CallPart(name="m_fork", arguments={"programs": 60}), "done"])
        caller = Agent(name="caller", model=model, tools=[server])
        settings = Settings(principal_program_processes=60, drain_timeout_s=0)
        async with asyncio.timeout(BOUND_S), Host(caller, store="memory://", settings=settings) as host:
            session = host.session("s", principal="alice")
            receipt = await session.send("go")
            await session.wait(receipt.message_id)
            (told,) = [entry.content for entry in await session.transcript() if entry.role == "tool_result"]
            whose = "user alice's programs" if per_principal else "the host's programs"
            assert f"MCP server 'm' was ended: {whose} had " in told
            usage = host.budget_usage()["program_processes"]
            assert usage.refused == 1
            await seen(lambda: host.incidents.counts["programs_ended_processes"] == 1)
            await seen(lambda: "(host)" in host.budget_usage()["program_processes"].principals)

    asyncio.run(main())


def test_a_call_that_ends_while_it_makes_room_gives_its_place_back(tmp_path: Path) -> None:
    reached, _ = over_pipes(tmp_path)

    class Stopping:
        begun = asyncio.Event()

        async def stop(self, reason: str) -> None:
            self.begun.set()
            await asyncio.Event().wait()

    async def main() -> None:
        async with opened(reached, per_principal=True, principals=1) as (server, host):
            await asked(host, "alice")
            alice = server._own["alice"]
            real, alice.scope = alice.scope, cast(Any, Stopping())
            bob = host.session("s", principal="bob")
            await bob.send("who")
            await Stopping.begun.wait()
            assert (await bob.interrupt("enough")).outcome == "gone"
            await real.stop("as it should have been")
            assert (await asked(host, "carol"))["before"] == []

    asyncio.run(main())


LOOK = """\
import json, os, sys

def read(name):
    try:
        with open(os.path.join(sys.argv[1], name)) as file:
            return file.read()
    except OSError:
        return None

seen = {name: read(name) for name in ("own/mine", "program.py", "store.db")}
try:
    seen["names"] = os.listdir(sys.argv[1])
except OSError:
    seen["names"] = []
with open("seen", "w") as file:
    json.dump(seen, file)
sys.exit("it looked")
"""


def test_a_program_sees_its_folder_and_nothing_of_the_host(tmp_path: Path) -> None:
    """A server that serves everybody reads no file of the host but those that its command names."""
    secret, program, folder = tmp_path / "store.db", tmp_path / "program.py", tmp_path / "own"
    secret.write_text("the secret of the host")
    program.write_text(LOOK)
    folder.mkdir()
    (folder / "mine").write_text("its own")

    async def main() -> None:
        command = [sys.executable, str(program), str(tmp_path)]
        server = McpServer("m", command=command, cwd=str(folder), connect_s=BOUND_S)
        assert not server.unwalled and server.programs
        async with server.lifespan(Here()):
            assert "it looked" in str(server.problem)
        seen = json.loads((folder / "seen").read_text())
        assert set(seen.pop("names")) <= {"own", "program.py"}, "Landlock alone lists nothing"
        assert seen == {"own/mine": "its own", "program.py": LOOK, "store.db": None}
        command[1:] = ["-c", f"open({str(secret)!r}).read()"]
        server = McpServer("m", command=command, connect_s=BOUND_S)
        async with server.lifespan(Here()):
            assert "Error" in str(server.problem) and str(secret) in str(server.problem)

    asyncio.run(main())


def test_a_program_whose_wall_cannot_be_built_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.tools import walled

    def missing() -> None:
        raise NotSupported("this machine cannot confine programs")

    monkeypatch.setattr(walled, "find_backend", missing)

    async def main() -> None:
        command = [sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"]
        for cwd in (str(tmp_path), None):
            with pytest.raises(NotSupported, match="cannot confine"):
                async with McpServer("m", command=command, cwd=cwd).lifespan(Here()):
                    pass
        assert not (tmp_path / "ran").exists()

    asyncio.run(main())


def test_only_a_program_can_be_started_for_each_principal() -> None:
    with pytest.raises(ConfigurationError, match="has a url"):
        McpServer("m", url="https://example.org/mcp", per_principal=True)


def test_an_interrupt_cancels_the_call_at_the_server_and_no_other(where: tuple[dict[str, Any], Path]) -> None:
    reached, marks = where

    async def main() -> None:
        async with opened(reached) as (_, host):
            ours, other = host.session("ours"), host.session("other", principal="somebody else")
            await other.send("wait {'name': 'theirs'}")
            await ours.send("wait {'name': 'ours'}")
            for name in ("ours", "theirs"):
                await seen((marks / f"{name}.started").exists)
            receipt = await ours.interrupt("enough")
            assert receipt.outcome == "gone"
            await seen((marks / "ours.cancelled").exists)
            assert await outcome(host.session("third"), "add {'a': 1, 'b': 2}") == "3"
            assert not (marks / "theirs.cancelled").exists()
            assert (await other.info()).state == "running"
            assert len((marks / "starts").read_text().split()) == 1, "the server was started again"

    asyncio.run(main())


def test_a_call_over_its_deadline_is_cancelled_at_the_server(where: tuple[dict[str, Any], Path]) -> None:
    reached, marks = where

    async def main() -> None:
        async with opened(reached, timeout_s=3.0) as (_, host):
            assert "did not end within 3 s" in await outcome(host.session("s"), "wait {'name': 'late'}")
            await seen((marks / "late.cancelled").exists)
            assert await outcome(host.session("s"), "add {'a': 1, 'b': 2}") == "3"

    asyncio.run(main())


def test_a_tool_that_the_server_gets_later_is_there_for_the_next_run(where: tuple[dict[str, Any], Path]) -> None:
    reached, _ = where

    async def main() -> None:
        async with opened(reached) as (server, host):
            assert await outcome(host.session("s"), "grow") == repr("grown")
            await seen(lambda: "m_grown_tool" in [tool.name for tool in server.tools()])
            assert await outcome(host.session("s"), "grown_tool") == repr("new")

    asyncio.run(main())


def test_an_answer_that_is_too_long_costs_that_call_and_no_other(where: tuple[dict[str, Any], Path]) -> None:
    reached, marks = where

    async def main() -> None:
        async with opened(reached) as (_, host):
            await host.session("other").send("wait {'name': 'beside'}")
            await seen((marks / "beside.started").exists)
            said = await outcome(host.session("s"), "big {'size': 20_000_000}")
            assert "16,000,000" in said or "exceed" in said.lower(), said
            assert await outcome(host.session("s"), "add {'a': 1, 'b': 2}") == "3"
            assert not (marks / "beside.cancelled").exists()

    asyncio.run(main())


def test_at_the_end_nothing_of_the_server_is_left(where: tuple[dict[str, Any], Path]) -> None:
    reached, marks = where

    async def main() -> None:
        async with opened(reached) as (server, host):
            await host.session("s").send("wait {'name': 'end'}")
            await seen((marks / "end.started").exists)
            pid = (marks / "pid").read_text()
        assert not server.connected
        if "command" in reached:
            assert not alive(pid)
        with pytest.raises(ToolFailed, match="not connected"):
            await server.tools()[0].work(None, a=1, b=2)

    asyncio.run(main())


def test_progress_without_end_is_shown_within_bounds(where: tuple[dict[str, Any], Path]) -> None:
    reached, _ = where

    async def main() -> None:
        async with opened(reached) as (_, host):
            session = host.session("s")
            assert await outcome(session, "chatter {'times': 300}") == repr("said")
            said = [e.text async for e in session.events(follow=await last(session)) if isinstance(e, ToolOutput)]
            assert 20 <= sum(text.count("\n") for text in said) < 300
            assert sum(map(len, said)) < 300 * 600

    asyncio.run(main())


def test_a_list_of_tools_is_taken_within_bounds(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(over_pipes(tmp_path)[0]) as (server, host):
            assert await outcome(host.session("s"), "swell") == repr("swollen")
            await seen(lambda: len(server.tools()) > 500)
            tools = {tool.name: tool for tool in server.tools()}
            assert len(tools) == 1000
            assert len(tools["m_huge"].description) == 4000
            assert await outcome(host.session("s"), "huge") == repr("huge")

    asyncio.run(main())


def test_a_server_that_dies_fails_the_call_in_words_and_is_started_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(over_pipes(tmp_path)[0]) as (_, host):
            session = host.session("s")
            said = await outcome(session, "die")
            assert "ended with exit code 3; the call may or may not have taken effect" in said
            assert await outcome(session, "add {'a': 1, 'b': 2}") == "3"
            pid = pid_of((tmp_path / "pid").read_text())
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            said = await outcome(session, "add {'a': 1, 'b': 2}")
            assert said == "3" or "ended with exit code -9" in said
            assert await outcome(session, "add {'a': 1, 'b': 2}") == "3"
            calls = [e async for e in session.events(follow=await last(session)) if isinstance(e, ToolFinished)]
            assert [e.status for e in calls][:2] == ["error", "ok"]

    asyncio.run(main())


def test_a_server_dies_with_its_host(tmp_path: Path) -> None:
    program = (
        "import asyncio, os, signal, sys\n"
        "from tests.tools.mcp.test_server import Here, McpServer\n"
        "async def main():\n"
        f"    given = [sys.executable, {str(SERVER)!r}, {str(tmp_path)!r}]\n"
        f"    server = McpServer('m', command=given, cwd={str(tmp_path)!r})\n"
        "    async with server.lifespan(Here()):\n"
        "        print(server.connected, flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=60, check=False)
    assert done.stdout == b"True\n"
    pid = (tmp_path / "pid").read_text()
    asyncio.run(seen(lambda: not alive(pid)))


def test_a_program_that_is_not_there_is_said_at_the_start(tmp_path: Path) -> None:
    async def main() -> None:
        server = McpServer("m", command=[str(tmp_path / "nothing")])
        with pytest.raises(ConfigurationError, match=r"failed to start the program of MCP server 'm'.*nothing"):
            async with server.lifespan(Here()):
                pass

    asyncio.run(main())


@pytest.mark.parametrize(
    "program",
    ["print('hello')", "import time; print('{', flush=True); time.sleep(600)", "import sys; sys.exit('no key given')"],
    ids=["no protocol", "silent", "fails"],
)
def test_a_program_that_speaks_no_protocol_delays_the_host_for_a_bounded_time(program: str) -> None:
    async def main() -> None:
        connect_s = 1.0 if "sleep" in program else 30.0
        server = McpServer("m", command=[sys.executable, "-c", program], connect_s=connect_s)
        async with asyncio.timeout(60), server.lifespan(Here()):
            assert not server.connected
            assert server.problem is not None and "'m'" in server.problem
            assert server.tools() == ()
            if "no key" in program:
                assert "exit code 1; stderr: no key given" in server.problem

    asyncio.run(main())


def test_a_server_that_comes_later_is_found(tmp_path: Path) -> None:
    async def main() -> None:
        port = free_port()
        server = McpServer("m", url=f"http://127.0.0.1:{port}/mcp", prefix="", connect_s=0.3)
        async with asyncio.timeout(60), server.lifespan(Here()):
            assert not server.connected
            assert server.problem is not None and "127.0.0.1" in server.problem
            with start_http(tmp_path, port):
                await seen(lambda: server.connected)
                assert "add" in [tool.name for tool in server.tools()]

    asyncio.run(main())


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"command": ["x"], "url": "http://x"},
        {"command": "x y"},
        {"url": "ftp://x"},
        {"command": ["x"], "prefix": "é"},
    ],
)
def test_a_server_that_cannot_be_is_refused_where_it_is_written(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        McpServer("m", **arguments)


def test_a_header_that_cannot_be_sent_is_refused_without_its_value() -> None:
    with pytest.raises(ConfigurationError, match="authorization") as refused:
        McpServer("m", url="http://x", headers={"authorization": "Bearer sk-secret\n"})
    assert "sk-secret" not in str(refused.value)


@pytest.mark.parametrize(
    "schema",
    [{"properties": {"x": True}}, {"properties": None}, {"required": None, "properties": {}}, {"properties": {"x": 7}}],
)
def test_a_schema_that_is_not_plain_is_left_to_the_server(schema: dict[str, Any]) -> None:
    from holdfast.tools.mcp.server import _fitting

    assert _fitting(schema, {"x": 1}) == {"x": 1}
    with pytest.raises(InvalidArguments):
        _fitting({"type": "object", "required": ["y"]}, {"x": 1})


def test_the_servers_own_keys_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.tools.mcp.program import inherited

    monkeypatch.setenv("SOME_API_KEY", "secret")
    given = inherited({"MORE": "1"})
    assert "SOME_API_KEY" not in given and given["MORE"] == "1" and "PATH" in given


def test_a_request_that_cannot_be_sent_fails_alone(shared: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    url, marks = shared
    send = httpx2.AsyncHTTPTransport.handle_async_request

    async def cut(self: httpx2.AsyncHTTPTransport, request: httpx2.Request) -> httpx2.Response:
        if b'"message"' in request.content and b"no way" in request.content:
            raise httpx2.ConnectError("no way there")
        if b"overloaded" in request.content:
            return httpx2.Response(503, request=request, stream=httpx2.ByteStream(b"later"))
        return await send(self, request)

    async def main() -> None:
        async with opened({"url": url}) as (server, host):
            await host.session("other").send("wait {'name': 'alone'}")
            await seen((marks / "alone.started").exists)
            session = host.session("s")
            assert "no way there" in await outcome(session, "echo {'call': 'no way', 'then': {'message': 1}}")
            assert "responded 503" in await outcome(session, "echo {'call': 'overloaded'}")
            assert await outcome(session, "add {'a': 1, 'b': 2}") == "3"
            assert server.connected
            assert (await host.session("other").info()).state == "running"
            assert not (marks / "alone.cancelled").exists()

    monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", cut)
    asyncio.run(main())


@pytest.mark.parametrize("command", [["/nowhere/program"], [sys.executable, "-c", "import time; time.sleep(600)"]])
def test_a_host_starts_without_a_server_that_is_silent_and_not_without_its_program(command: list[str]) -> None:
    async def main() -> None:
        model = ScriptedModel("hello")
        server = McpServer("m", command=command, connect_s=0.3)
        host = Host(
            Agent(name="a", model=model, tools=[server]), store="memory://", settings=Settings(drain_timeout_s=0)
        )
        if "/nowhere" in command[0]:
            with pytest.raises(ConfigurationError, match="failed to start"):
                async with host:
                    pass
        else:
            async with host:
                assert await host.session("s").ask("hi", timeout_s=BOUND_S) == "hello"

    asyncio.run(main())


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="mcp"):
        asyncio.run(_enter(McpServer("none", command=["true"])))


def test_the_package_is_imported_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes most of a second, in which a loop would serve nobody."""
    threads: list[threading.Thread] = []

    def imported(name: str) -> None:
        assert name == "mcp"
        threads.append(threading.current_thread())
        raise ImportError("it is broken")

    monkeypatch.setattr(importlib, "import_module", imported)
    with pytest.raises(ImportError, match="it is broken"):
        asyncio.run(_enter(McpServer("broken", command=["true"])))
    assert [thread is threading.main_thread() for thread in threads] == [False]


async def _enter(server: McpServer) -> None:
    async with server.lifespan(cast(Any, None)):
        raise AssertionError("it was entered")
