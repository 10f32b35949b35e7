"""The python tool: what a script does arrives, is bounded, goes through the run's calls, and ends with the run."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast import Agent, Host, Tool, tool
from holdfast.agents.scripted import ScriptedModel
from holdfast.errors import NotSupported, ToolFailed
from holdfast.protocol.events import ToolFinished, ToolOutput, ToolStarted
from holdfast.protocol.model import CallPart
from holdfast.runtime.processes.procfs import all_pids, read_text
from holdfast.tools import walled
from holdfast.tools.programs.python import Python
from holdfast.tools.sandbox.choice import use_backend
from holdfast.tools.sandbox.port import SandboxBackend
from tests.tools.sandbox.walled import reason_against
from tests.tools.using import Bench, on_host, use

WITHOUT = reason_against(("namespaces",))
pytestmark = pytest.mark.skipif(WITHOUT is not None, reason=f"scripts are not confined by namespaces here: {WITHOUT}")


def run(
    root: Path, *scripts: str, tools: Sequence[Tool] = (), timeout_s: float | None = None, **more: Any
) -> list[str]:
    """The result of each script."""
    results: list[str] = []
    limit = {} if timeout_s is None else {"timeout_s": timeout_s}

    async def agent(bench: Bench) -> None:
        for script in scripts:
            results.append(await bench("python", script=script, **limit))

    use(Python(root, tools=tools, **more), agent)
    return results


def living(root: Path) -> list[int]:
    """Processes of scripts in this workspace, whatever they call themselves."""
    mark = b"HOME=" + os.fsencode(root.resolve())
    return [pid for pid in all_pids() if mark in (read_text(f"/proc/{pid}/environ") or b"").split(b"\0")]


@tool
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool(name="to-fail")
def to_fail(text: str) -> str:
    """Fail."""
    raise ValueError(text)


def test_a_result_has_the_output_the_value_and_how_it_ended(tmp_path: Path) -> None:
    assert run(
        tmp_path,
        "import sys\nprint('out')\nprint('err', file=sys.stderr)\n{'ä': [1, None]}",
        "result = 'kept'",
        "None",
        "open('file', 'w').write('x')\nobject",
        "print(open('file').read())\nimport sys\nsys.exit(3)",
        "import os\nos.kill(os.getpid(), 11)",
    ) == [
        'out\nerr\n[value] {"ä": [1, null]}',
        '[value] "kept"',
        "[no output and no value]",
        "[value] <class 'object'>",
        "x\n[exit code 3]",
        "[killed by signal 11 (SIGSEGV)]",
    ]


def test_an_error_is_told_with_the_lines_of_the_script_and_no_others(tmp_path: Path) -> None:
    raised, syntax = run(tmp_path, "def f():\n    return 1 / 0\n\nf()", "x = (")
    assert "    return 1 / 0" in raised and raised.endswith("division by zero\n[exit code 1]")
    assert "SyntaxError" in syntax and "python_child" not in raised + syntax


def test_scripts_start_afresh_without_input_or_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVIDER_API_KEY", "hidden-key")
    monkeypatch.setenv("SOMETHING_ELSE", "hidden-too")
    _, second, third = run(
        tmp_path, "kept = 1", "'kept' in globals()", "import os, sys\nprint(sys.stdin.read(), dict(os.environ))"
    )
    assert second == "[value] false"
    assert "hidden" not in third and "HOME" in third


def test_output_and_value_are_bounded_and_streamed(tmp_path: Path) -> None:
    seen: list[str] = []

    async def agent(bench: Bench) -> None:
        flood = "print('begin')\nprint('x' * 5_000_000)\nprint('end')\n'v' * 5_000_000"
        seen.append(await bench("python", script=flood))
        seen.append(await bench("python", script="while True: print('y' * 1000)", timeout_s=0.5))

    streamed: list[str] = []

    async def scenario(host: Host) -> None:
        session = host.session("s")
        receipt = await session.send("go")
        async for event in session.events(follow=receipt.message_id):
            if isinstance(event, ToolOutput):
                streamed.append(event.text)

    on_host([Python(tmp_path, output_bytes=1000)], agent, scenario)
    assert seen[0].startswith("begin\n") and "\nend\n[value (truncated)] " in seen[0] and len(seen[0]) < 2200
    assert seen[1].endswith("[timed out after 0.5 s and was killed]") and len(seen[1]) < 1200
    assert 0 < len("".join(streamed)) < 500_000


def test_a_script_calls_tools_by_name_from_any_of_its_threads(tmp_path: Path) -> None:
    script = """
from concurrent.futures import ThreadPoolExecutor
from holdfast_tools import add
import holdfast_tools
told = [add(1, 2), add(a=3, b=4), tools.add(5, b=6)]
for wrong in (lambda: add("x", 1), lambda: add(1), lambda: add(1, 2, 3), lambda: add(1, a=2), lambda: add(1, {1}),
              lambda: add(1, "\\udc80"), lambda: tools.to_fail("because")):
    try:
        wrong()
    except Exception as error:
        told.append(f"{type(error).__name__}: {error}"[:50])
with ThreadPoolExecutor(20) as pool:
    told.append(sum(pool.map(add, range(100), range(100))))
told.append((add.__doc__, sorted(holdfast_tools.__all__)))
for line in told:
    print(line)
"""
    (told,) = run(tmp_path, script, tools=[add, to_fail])
    assert told.splitlines() == [
        "3",
        "7",
        "11",
        "ToolFailed: Expected `int`, got `str` - at `$.a`",
        "ToolFailed: Object missing required field `b`",
        "TypeError: add() takes 2 arguments: a, b",
        "TypeError: add() got two values for a",
        "TypeError: Object of type set is not JSON serializ",
        "UnicodeEncodeError: 'utf-8' codec can't encode cha",
        "ToolFailed: ValueError: because",
        "9900",
        "('Add two numbers.', ['ToolFailed', 'add', 'to_fail'])",
    ]


def test_errors_of_any_text_and_size_come_back_to_the_script_and_are_bounded_in_the_log(tmp_path: Path) -> None:
    @tool
    def break_off(how: str) -> None:
        raise ToolFailed("half of \udc80" if how == "odd" else "x" * 5_000_000)

    script = """
from holdfast_tools import break_off, ToolFailed
for how in ("odd", "long"):
    try:
        break_off(how)
    except ToolFailed as error:
        print(len(str(error)) < 1_200_000, ascii(str(error))[:20])
"""
    logged: list[int] = []
    results: list[str] = []

    async def agent(bench: Bench) -> None:
        results.append(await bench("python", script=script))

    async def scenario(host: Host) -> None:
        session = host.session("s")
        receipt = await session.send("go")
        async for event in session.events(follow=receipt.message_id):
            if isinstance(event, ToolFinished) and event.status == "error":
                logged.append(len(event.error or ""))

    on_host([Python(tmp_path, tools=[break_off])], agent, scenario)
    assert results == ["True 'half of \\\\udc80'\nTrue 'xxxxxxxxxxxxxxxxxxx"]
    assert len(logged) == 2 and max(logged) < 20_000


def test_a_scripts_calls_are_calls_of_the_run(tmp_path: Path) -> None:
    async def agent(bench: Bench) -> None:
        await bench("python", script="tools.add(1, 2)")

    calls: list[ToolStarted] = []
    ends: list[ToolFinished] = []

    async def scenario(host: Host) -> None:
        session = host.session("s")
        receipt = await session.send("go")
        async for event in session.events(follow=receipt.message_id):
            match event:
                case ToolStarted():
                    calls.append(event)
                case ToolFinished():
                    ends.append(event)

    on_host([Python(tmp_path, tools=[add])], agent, scenario)
    outer, nested = calls
    assert (outer.name, nested.name) == ("python", "add")
    assert nested.call_id.startswith(outer.call_id + ".")
    assert [(end.call_id, end.status, end.result) for end in ends] == [
        (nested.call_id, "ok", 3),
        (outer.call_id, "ok", "[value] 3"),
    ]


@pytest.mark.parametrize("decision", ["approve", "deny"])
def test_a_script_has_the_agents_tools_and_waits_for_the_approval_of_a_person(tmp_path: Path, decision: str) -> None:
    made: list[int] = []

    @tool(approval=True)
    async def guarded(number: int) -> int:
        """Needs approval."""
        made.append(number)
        return number + 1

    attempt = "try:\n    told = tools.guarded(1)\nexcept Exception as error:\n    told = str(error)"
    script = f"{attempt}\nsorted(vars(tools)), told"
    model = ScriptedModel([CallPart(name="python", arguments={"script": script}), "done"])
    agent = Agent(name="agent", model=model, tools=(Python(tmp_path), guarded, add))
    results: list[Any] = []

    async def scenario() -> None:
        async with asyncio.timeout(20), Host(agent, store="memory://") as host:
            session = host.session("s")
            receipt = await session.send("go")
            while not (questions := await session.questions()):
                await asyncio.sleep(0.01)
            (question,) = questions
            assert (question.tool, question.arguments, made) == ("guarded", {"number": 1}, [])
            await (session.approve(question) if decision == "approve" else session.deny(question.question_id))
            async for event in session.events(follow=receipt.message_id):
                if isinstance(event, ToolFinished):
                    results.append(event.result)

    asyncio.run(scenario())
    assert made == ([1] if decision == "approve" else [])
    told = 2 if decision == "approve" else "a person denied this call; it was not made"
    value = json.loads(results[-1].removeprefix("[value] "))
    assert value[1] == told
    assert {"add", "guarded"} <= set(value[0]) and "python" not in value[0]


def test_calls_at_once_and_in_all_are_bounded(tmp_path: Path) -> None:
    now = most = made = 0

    @tool
    async def counted() -> int:
        nonlocal now, most, made
        now, made = now + 1, made + 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return made

    script = """
from concurrent.futures import ThreadPoolExecutor
def one(_):
    try:
        return tools.counted()
    except Exception as error:
        return str(error)
with ThreadPoolExecutor(20) as pool:
    told = list(pool.map(one, range(40)))
sum(isinstance(each, str) for each in told), [each for each in told if isinstance(each, str)][0]
"""
    (told,) = run(tmp_path, script, tools=[counted], calls_at_once=3, calls=25)
    assert told == '[value] [15, "tool call limit reached: a script may make at most 25 calls"]'
    assert (most, made) == (3, 25)


def test_a_script_that_does_not_take_its_answers_is_not_served_without_end(tmp_path: Path) -> None:
    made = 0

    @tool
    async def large() -> str:
        nonlocal made
        made += 1
        return "x" * 900_000

    script = RAW + "for number in range(100):\n    send(kind='use', id=number, tool='large', arguments={})\nhang()"
    (told,) = run(tmp_path, script, tools=[large], calls_at_once=4, timeout_s=2.0)
    assert "was killed" in told
    assert 1 <= made <= 6


RAW = """
import json, os, socket, stat, struct, threading
link = None
for fd in range(3, 20):
    try:
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            link = socket.socket(fileno=os.dup(fd))
    except OSError:
        pass
def raw(data):
    link.sendall(struct.pack("!I", len(data)) + data)
def send(**frame):
    raw(json.dumps(frame).encode())
def hang():
    threading.Event().wait()
"""


@pytest.mark.parametrize(
    "attack",
    [
        "raw(b'{')",
        "raw(b'[' * 100_000)",
        "raw(b'\\xff' * 100)",
        "send(kind='sing')",
        "send(kind='use', id='x', tool='add', arguments={})",
        "send(kind='use', id=1, tool='add', arguments=[1])",
        "send(kind='value', text='\\udc80', cut=False)",
        "link.sendall(struct.pack('!I', 1 << 31))",
        "link.sendall(b'\\xff\\xff\\xff\\xff' * 100_000)",
    ],
)
def test_a_script_that_breaks_the_rules_of_its_connection_is_killed(tmp_path: Path, attack: str) -> None:
    told, then = run(tmp_path, f"{RAW}\n{attack}\nhang()", "1", tools=[add])
    assert "[killed: protocol violation" in told
    assert then == "[value] 1"
    assert living(tmp_path) == []


def test_its_time_does_not_run_while_it_waits_for_a_tool(tmp_path: Path) -> None:
    @tool
    async def slow() -> str:
        await asyncio.sleep(4.2)
        return "waited"

    (waited,) = run(tmp_path, "tools.slow()", tools=[slow], timeout_s=4.0)
    assert waited == '[value] "waited"'
    (hung,) = run(tmp_path, "tools.add(1, 2)\nwhile True: pass", tools=[add], timeout_s=0.7)
    assert hung == "[timed out after 0.7 s and was killed]"


@pytest.mark.parametrize("how", ["os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_a_script_that_dies_in_the_middle_of_a_call_leaves_no_call_behind(tmp_path: Path, how: str) -> None:
    ended: list[str] = []
    begun = tmp_path / "begun"

    @tool
    async def endless() -> None:
        begun.touch()
        try:
            await asyncio.sleep(600)
        finally:
            ended.append("endless")

    script = f"""
import os, threading, time
for _ in range(20):
    threading.Thread(target=tools.endless, daemon=True).start()
while not os.path.exists("begun"):
    time.sleep(0.01)
{how}
"""
    finished: list[str] = []
    told: list[str] = []

    async def agent(bench: Bench) -> None:
        told.append(await bench("python", script=script))

    async def scenario(host: Host) -> None:
        session = host.session("s")
        receipt = await session.send("go")
        started = 0
        async for event in session.events(follow=receipt.message_id):
            started += isinstance(event, ToolStarted)
            if isinstance(event, ToolFinished):
                finished.append(event.status)
        assert len(finished) == started

    on_host([Python(tmp_path, tools=[endless], calls_at_once=2)], agent, scenario)
    assert told == ["[exit code 3]" if "exit" in how else "[killed by signal 9 (SIGKILL)]"]
    assert ended and finished == [*["interrupted"] * (len(finished) - 1), "ok"]


BLOCKED = {
    "in C, with the GIL": "import ctypes; up(); ctypes.PyDLL(None).sleep(600)",
    "in recv": "import socket; pair = socket.socketpair(); up(); pair[0].recv(1)",
    "in a tool": "tools.endless()",
    "in a loop of Python": "up()\nwhile True: pass",
    "ignoring SIGTERM with a stray": (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n    os.setsid()\n    os.fork()\nup()\nwhile True:\n    time.sleep(1)"
    ),
    "before its first line": "",
    "writing": "up()\nwhile True: print('x' * 10_000)",
}


@pytest.mark.parametrize("where", BLOCKED)
def test_an_interrupt_ends_a_script_wherever_it_is(tmp_path: Path, where: str) -> None:
    ended: list[str] = []

    @tool
    async def endless() -> None:
        (tmp_path / "up").touch()
        try:
            await asyncio.sleep(600)
        finally:
            ended.append("endless")

    script = "def up(): open('up', 'w').close()\n" + BLOCKED[where]
    told: list[str] = []

    async def agent(bench: Bench) -> None:
        if bench.run.text == "again":
            told.append(await bench("python", script="1 + 1"))
        else:
            await bench("python", script=script or "1")

    async def scenario(host: Host) -> None:
        session = host.session("s")
        receipt = await session.send("go")
        async for event in session.events(follow=receipt.message_id):
            if isinstance(event, ToolStarted):
                break
        while BLOCKED[where] and not (tmp_path / "up").exists():
            await asyncio.sleep(0.005)
        stop = await session.interrupt("enough")
        assert living(tmp_path) == []
        assert stop.outcome == "gone" and stop.survivors == () and stop.abandoned == ()
        again = await session.send("again")
        await session.wait(again.message_id)

    on_host([Python(tmp_path, tools=[endless])], agent, scenario, grace_s=5.0)
    assert told == ["[value] 2"]
    assert ended == (["endless"] if where == "in a tool" else [])


def test_nothing_of_scripts_is_left_behind(tmp_path: Path) -> None:
    async def agent(bench: Bench) -> None:
        await bench("python", script="tools.add(1, 2)")
        before = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
        for script in ("tools.add(1, 2)", "1 / 0", "import os; os.kill(os.getpid(), 9)", "import time; time.sleep(60)"):
            await bench("python", script=script, timeout_s=0.3)
        async with asyncio.timeout(30):  # what another thread has open for a moment is no leak: one stays
            while len(os.listdir("/proc/self/fd")) > before[0] or len(asyncio.all_tasks()) > before[1]:
                await asyncio.sleep(0.01)

    use(Python(tmp_path, tools=[add]), agent)
    assert living(tmp_path) == []


def test_where_no_wall_can_be_built_it_is_refused_unless_the_operator_chose_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str | None = None) -> SandboxBackend:
        raise NotSupported("tried in a test", hint="do something")

    with monkeypatch.context() as patched:
        patched.setattr(walled, "find_backend", refuse)
        (refused,) = run(tmp_path, "1")
        assert refused.startswith("!ToolFailed: ") and "tried in a test (do something)" in refused
        assert not Python(tmp_path).unwalled
    with use_backend("none"):
        assert run(tmp_path, "1") == ["[value] 1"]
        assert Python(tmp_path).unwalled
    assert not Python(tmp_path).unwalled


def test_an_interpreter_that_cannot_be_started_is_told(tmp_path: Path) -> None:
    for interpreter in ("/nowhere/python", "/bin/false"):
        (told,) = run(tmp_path, "1", interpreter=interpreter)
        assert told.startswith("!ToolFailed: ") and ("failed to start" in told or "not found" in told)


@pytest.mark.skipif(not os.path.exists("/bin/python3"), reason="no /bin/python3: install the system's Python")
def test_another_interpreter_shows_a_script_no_more_of_the_machine(tmp_path: Path) -> None:
    (told,) = run(tmp_path, "import os, sys\nsys.executable, sorted(os.listdir('/'))", interpreter="/bin/python3")
    executable, seen = json.loads(told.removeprefix("[value] "))
    assert executable == "/bin/python3"
    assert not {"var", "home", "sys", "run", "srv"} & set(seen) - {tmp_path.parts[1]}
