"""Background processes: they outlive the run, die with the session's activation, and are told of exactly once."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import Host, Session
from holdfast.errors import MailboxFull, SessionDeleted
from holdfast.runtime.processes import procfs
from holdfast.tools.programs.leftovers import Notes, make_note
from holdfast.tools.programs.processes import Processes
from tests.runtime.processes_zoo import ROLES, living, program
from tests.tools.using import Bench, SessionHome, on_host, use


def token_of(tmp_path: Path, what: str) -> str:
    return f"{what}-{os.getpid()}-{tmp_path.name}"


def sleeper(token: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)", token]


def process_id(said: str) -> str:
    assert said.startswith("process p"), said
    return said.split()[1]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def ask(session: Session, text: str) -> str:
    return await session.ask(text, timeout_s=20)


Request = Callable[[Bench, str], Awaitable[str]]


def by_words(**requests: Request) -> Callable[[Bench], Awaitable[str]]:
    """An agent that does what the first word of its message says, and repeats any other message."""

    async def agent(bench: Bench) -> str:
        word, _, rest = bench.run.text.partition(" ")
        return await requests[word](bench, rest) if word in requests else f"heard {bench.run.text}"

    return agent


async def transcript(session: Session) -> str:
    return "\n".join(repr(entry) for entry in await session.transcript())


def test_a_process_is_started_polled_written_to_and_waited_for(tmp_path: Path) -> None:
    async def agent(bench: Bench) -> None:
        said = await bench("start_process", command="while read line; do echo got $line; done; echo over; exit 3")
        one = process_id(said)
        assert await bench("write_process", process_id=one, text="a\nb\n") == "written"
        await until(lambda: toolset._sessions[("local", "s")][one].log.total == 12)
        polled = await bench("poll_process", process_id=one)
        assert "running for" in polled and polled.endswith("\ngot a\ngot b\n")
        assert (await bench("poll_process", process_id=one)).endswith("done; echo over; exit 3\n")
        assert one in await bench("list_processes")
        assert "running for" in await bench("wait_process", process_id=one, timeout_s=0.05)
        assert "input closed" in await bench("write_process", process_id=one, text="c\n", end=True)
        waited = await bench("wait_process", process_id=one)
        assert waited.startswith(f"{one}: exit code 3; 23 bytes of output; while read")
        assert waited.endswith("\ngot c\nover\n")
        log = await bench("read_process_log", process_id=one, offset=4, limit=6)
        assert log == "[bytes 4 to 10 of 23; kept from 0]\na\ngot "
        assert (await bench("read_process_log", process_id=one, limit=5)).endswith("over\n")
        assert "exit code 3" in await bench("list_processes")
        assert "has ended" in await bench("write_process", process_id=one, text="d")
        assert "exit code 3" in await bench("kill_process", process_id=one)

    toolset = Processes(tmp_path)
    use(toolset, agent)


def test_a_terminal_takes_control_keys(tmp_path: Path) -> None:
    async def agent(bench: Bench) -> None:
        one = process_id(await bench("start_process", command="echo ready; exec sleep 1000", pty=True))
        await until(lambda: toolset._sessions[("local", "s")][one].log.total >= 6)
        await bench("write_process", process_id=one, text="\x03")
        assert "killed by signal 2 (SIGINT)" in await bench("wait_process", process_id=one)
        two = process_id(await bench("start_process", command="cat; echo over", pty=True))
        await bench("write_process", process_id=two, text="x\n", end=True)
        assert "exit code 0" in (waited := await bench("wait_process", process_id=two)) and "over" in waited

    toolset = Processes(tmp_path)
    use(toolset, agent)


@pytest.mark.parametrize("role", ["ignores-term", "double-fork", "wiped-environment", "respawns"])
def test_kill_ends_the_whole_tree_and_sends_no_message(
    tmp_path: Path, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.tools.programs.processes._TERM_FIRST_S", 0.2)
    token = token_of(tmp_path, f"kill-{role}")

    async def start(bench: Bench, _: str) -> str:
        return await bench("start_process", command=program(role, token))

    async def kill(bench: Bench, one: str) -> str:
        return await bench("kill_process", process_id=one)

    async def scenario(host: Host) -> None:
        session = host.session("s")
        one = process_id(await ask(session, "start"))
        await until(lambda: len(living(token)) >= ROLES[role])
        toolset_kill = await ask(session, f"kill {one}")
        assert "killed by signal" in toolset_kill, toolset_kill
        assert living(token) == []
        assert len(await session.runs()) == 2

    on_host([Processes(tmp_path)], by_words(start=start, kill=kill), scenario)


def test_an_interrupt_leaves_it_alone_and_its_end_comes_back_as_a_message(tmp_path: Path) -> None:
    token = token_of(tmp_path, "outlives")

    async def start(bench: Bench, _: str) -> str:
        await bench(
            "start_process", command=["/bin/sh", "-c", "until [ -e go ]; do sleep 0.01; done; echo bye; exit 9", token]
        )
        answered.append("started")
        await bench.run.interrupt.sleep(1000)
        return "never"

    answered: list[str] = []

    async def scenario(host: Host) -> None:
        session = host.session("s")
        await session.send("start")
        await until(lambda: answered)
        await session.interrupt("enough")
        assert living(token)
        (tmp_path / "go").touch()
        await until(lambda: not living(token))
        async with asyncio.timeout(30):
            while "heard [process p" not in await transcript(session):
                await asyncio.sleep(0.01)
        assert "exit code 9. Last output:\\nbye" in await transcript(session)

    on_host([Processes(tmp_path)], by_words(start=start), scenario)


@pytest.mark.parametrize("cut", [False, True])
def test_a_call_that_waits_for_the_end_tells_of_it_in_place_of_a_message(tmp_path: Path, cut: bool) -> None:
    async def start(bench: Bench, _: str) -> str:
        one = process_id(await bench("start_process", command="until [ -e go ]; do sleep 0.01; done; exit 9"))
        bench.run.spawn(touch, one)
        return await bench("wait_process", process_id=one)

    async def touch(one: str) -> None:
        await until(lambda: toolset._sessions[("local", "s")][one].watching)
        if not cut:
            (tmp_path / "go").touch()
        waiting.append(one)

    waiting: list[str] = []
    toolset = Processes(tmp_path)

    async def scenario(host: Host) -> None:
        session = host.session("s")
        receipt = await session.send("start")
        if cut:
            await until(lambda: waiting)
            await session.interrupt("enough")
            (tmp_path / "go").touch()
            async with asyncio.timeout(30):
                while "heard [process p" not in await transcript(session):
                    await asyncio.sleep(0.01)
        else:
            assert "exit code 9" in (await session.wait(receipt.message_id)).text
            assert await ask(session, "and now?") == "heard and now?"
            assert len(await session.runs()) == 2

    on_host([toolset], by_words(start=start), scenario)


def test_a_character_that_comes_in_two_pieces_is_shown_whole(tmp_path: Path) -> None:
    async def agent(bench: Bench) -> None:
        command = r"printf 'caf\303'; until [ -e go ]; do sleep 0.01; done; printf '\251'"
        one = process_id(await bench("start_process", command=command))
        await until(lambda: toolset._sessions[("local", "s")][one].log.total == 4)
        assert (await bench("poll_process", process_id=one)).endswith("\ncaf")
        (tmp_path / "go").touch()
        assert (await bench("wait_process", process_id=one)).endswith("\né")

    toolset = Processes(tmp_path)
    use(toolset, agent)


@pytest.mark.parametrize("role", [*ROLES, "holds-pipe"])
def test_the_stop_of_the_session_ends_every_hostile_tree(tmp_path: Path, role: str) -> None:
    token = token_of(tmp_path, f"stop-{role}")
    toolset = Processes(tmp_path)

    async def start(bench: Bench, _: str) -> str:
        for _number in range(2):
            await bench("start_process", command=program(role, token))
        return "started"

    async def scenario(host: Host) -> None:
        session = host.session("s")
        await ask(session, "start")
        if role in ROLES:
            await until(lambda: len(living(token)) >= ROLES[role])
        await session.stop("enough")
        assert living(token) == []
        assert len(await session.runs()) <= 3
        assert role not in ROLES or toolset._sessions == {} or role == "leaves-strays"

    on_host([toolset], by_words(start=start), scenario)
    assert living(token) == []


def test_the_end_of_the_host_ends_them(tmp_path: Path) -> None:
    token = token_of(tmp_path, "host")

    async def start(bench: Bench, _: str) -> str:
        return await bench("start_process", command=program("double-fork", token))

    async def scenario(host: Host) -> None:
        await ask(host.session("s"), "start")
        await until(lambda: len(living(token)) == 2)

    on_host([Processes(tmp_path)], by_words(start=start), scenario)
    assert living(token) == []


def test_a_start_that_is_cut_leaves_nothing_that_is_not_listed(tmp_path: Path) -> None:
    token = token_of(tmp_path, "cut")
    toolset = Processes(tmp_path, limit=100)

    async def start(bench: Bench, _: str) -> str:
        async def one() -> None:
            answered.append(await bench("start_process", command=sleeper(token)))

        await bench.run.parallel(*[one] * 5)
        return "never seen" if len(answered) < 5 else "all"

    answered: list[str] = []

    async def scenario(host: Host) -> None:
        for ticks in (1, 4, 10, 20, 40, 80, 120, 200, 300):
            session = host.session(f"s{ticks}")
            answered.clear()
            await session.send("start")
            for _ in range(ticks):
                await asyncio.sleep(0)
            await session.interrupt("at once")
            told = {process_id(said) for said in answered if said.startswith("process p")}
            kept = toolset._sessions.get(("local", f"s{ticks}"), {})
            assert told <= set(kept)  # more where the run was stopped between the tool's return and the agent
            assert {one.program.process.pid for one in kept.values()} == set(living(token))
            await session.stop("all of it")
            assert living(token) == []

    on_host([toolset], by_words(start=start), scenario, grace_s=5.0)
    assert living(token) == []
    assert toolset._sessions == {}


def test_no_session_sees_the_processes_of_another(tmp_path: Path) -> None:
    token = token_of(tmp_path, "private")

    async def start(bench: Bench, _: str) -> str:
        return await bench("start_process", command=sleeper(token))

    async def touch(bench: Bench, one: str) -> str:
        said = [await bench("list_processes")]
        for name, more in (
            ("poll_process", {}),
            ("wait_process", {}),
            ("read_process_log", {}),
            ("write_process", {"text": "x"}),
            ("kill_process", {}),
        ):
            said.append(await bench(name, process_id=one, **more))
        return "\n".join(said)

    async def scenario(host: Host) -> None:
        one = process_id(await ask(host.session("a", principal="ann"), "start"))
        for session in (host.session("b", principal="ann"), host.session("a", principal="bob")):
            said = await ask(session, f"touch {one}")
            assert said.count(f"unknown process '{one}'") == 5 and said.startswith("no background processes")
        assert len(living(token)) == 1
        await host.session("a", principal="bob").stop("mine only")
        assert len(living(token)) == 1

    on_host([Processes(tmp_path)], by_words(start=start, touch=touch), scenario)


def test_a_session_has_only_so_many_and_a_log_only_so_long(tmp_path: Path) -> None:
    async def agent(bench: Bench) -> None:
        one = process_id(await bench("start_process", command="head -c 5000000 /dev/zero | tr '\\0' x; echo end"))
        waited = await bench("wait_process", process_id=one)
        assert "5,000,004 bytes of output" in waited and waited.endswith("xend\n")
        assert "[… 4,992,004 bytes omitted" in waited and len(waited) < 9000
        log = await bench("read_process_log", process_id=one, offset=0, limit=10)
        assert log == "[bytes 4,990,004 to 4,990,014 of 5,000,004; kept from 4,990,004]\nxxxxxxxxxx"
        for _ in range(2):
            process_id(await bench("start_process", command="sleep 1000"))
        assert "2 processes are already running, which is the limit" in await bench(
            "start_process", command="sleep 1000"
        )

    use(Processes(tmp_path, limit=2, log_bytes=10_000), agent)


def test_the_limit_holds_for_starts_at_the_same_time(tmp_path: Path) -> None:
    async def agent(bench: Bench) -> None:
        async def one() -> None:
            answers.append(await bench("start_process", command="sleep 1000"))

        await bench.run.parallel(*[one] * 6)

    answers: list[str] = []
    use(Processes(tmp_path, limit=2), agent)
    assert sum(answer.startswith("process p") for answer in answers) == 2
    assert sum("which is the limit" in answer for answer in answers) == 4


def test_a_command_with_odd_letters_is_shown_in_plain_ones(tmp_path: Path) -> None:
    async def agent(bench: Bench) -> None:
        one = process_id(await bench("start_process", command=["true", "\x1b[31m", "a\n b", "\udcff", "é"]))
        waited = await bench("wait_process", process_id=one)
        assert waited.splitlines()[0].endswith("; true \ufffd[31m a b \ufffd é"), waited

    use(Processes(tmp_path), agent)


def test_what_cannot_be_started_is_told_and_takes_no_place(tmp_path: Path) -> None:
    async def agent(bench: Bench) -> None:
        for _ in range(5):
            assert "not found; check that it is installed" in await bench("start_process", command=["no-such-program"])
            assert "outside the workspace" in await bench("start_process", command="true", folder="..")
            assert "empty" in await bench("start_process", command="")
        assert await bench("list_processes") == "no background processes"

    use(Processes(tmp_path, limit=2), agent)


def test_input_that_nobody_reads_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.tools.programs.processes._WRITE_S", 0.1)

    async def agent(bench: Bench) -> None:
        one = process_id(await bench("start_process", command="sleep 1000"))
        assert "the process accepted only" in await bench("write_process", process_id=one, text="x" * 1_000_000)
        two = process_id(await bench("start_process", command="exec <&-; echo closed; sleep 1000"))
        await until(lambda: toolset._sessions[("local", "s")][two].log.total)
        assert "the program has closed its input" in await bench("write_process", process_id=two, text="x")

    toolset = Processes(tmp_path)
    use(toolset, agent)


def test_one_that_runs_too_long_is_ended(tmp_path: Path) -> None:
    async def agent(bench: Bench) -> None:
        one = process_id(await bench("start_process", command="sleep 1000"))
        assert "ended at its limit of 0.2 s" in await bench("wait_process", process_id=one)

    use(Processes(tmp_path, lifetime_s=0.2), agent)


# ── over a restart of the host ───────────────────────────────────────────────────────────────────────────────────────


def note_files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "processes").glob("*"))


def test_a_note_is_kept_while_it_runs_and_only_the_end_of_the_host_leaves_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    home = SessionHome(data)
    toolset = Processes(tmp_path)
    seen: list[list[str]] = []

    async def start(bench: Bench, command: str) -> str:
        return await bench("start_process", command=command)

    async def kill(bench: Bench, one: str) -> str:
        return await bench("kill_process", process_id=one)

    async def scenario(host: Host) -> None:
        one = process_id(await ask(host.session("killed"), "start sleep 1000"))
        two = process_id(await ask(host.session("stopped"), "start sleep 1000"))
        three = process_id(await ask(host.session("over"), "start until [ -e go ]; do sleep 0.01; done"))
        four = process_id(await ask(host.session("left"), "start sleep 1000"))
        seen.append(note_files(data))
        assert seen[-1] == sorted(f"{name}.json" for name in (one, two, three, four))
        await ask(host.session("killed"), f"kill {one}")
        await host.session("stopped").stop("enough")
        (tmp_path / "go").touch()
        await until(lambda: note_files(data) == [f"{four}.json"])
        seen.append([four])

    async def lives() -> None:
        async with toolset.lifespan(home):
            await asyncio.sleep(0)

    toolset._notes = Notes(data / "processes")
    on_host([toolset], by_words(start=start, kill=kill), scenario)
    (four,) = seen[-1]
    assert note_files(data) == [f"{four}.json"]
    asyncio.run(lives())
    assert home.told == [
        (
            "local",
            "left",
            f"[process {four}] `sleep 1000` ended together with its host. Start it again if needed.",
        )
    ]
    assert note_files(data) == []


def test_a_process_that_outlived_its_host_is_killed_only_when_it_is_the_same_one(tmp_path: Path) -> None:
    token = token_of(tmp_path, "outlived")
    home = SessionHome(tmp_path)
    notes = Notes(tmp_path / "processes")
    child = subprocess.Popen(sleeper(token), start_new_session=True)
    try:
        right = make_note(process_id="p1", principal="ann", session_key="s", command="sleeper", pid=child.pid)
        others = [
            type(right)(**{**{n: getattr(right, n) for n in right.__struct_fields__}, "process_id": name, **change})
            for name, change in (
                ("p2", {"started": right.started + 1}),
                ("p3", {"boot": "another"}),
                ("p4", {"started": 0}),
            )
        ]
        for note in others:
            notes.write(note)
        asyncio.run(enter(home))
        assert child.poll() is None and len(home.told) == 3 and "killed" not in str(home.told)
        notes.write(right)
        asyncio.run(enter(home))
        assert child.wait(10) == -9
        assert home.told[-1][2].startswith("[process p1] `sleeper` ended together with its host; 1 of its")
    finally:
        child.kill()
        child.wait()
    assert note_files(tmp_path) == []


async def enter(home: SessionHome) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with Processes(folder).lifespan(home):
            pass


def test_notes_of_a_host_that_lives_are_left_to_it(tmp_path: Path) -> None:
    home = SessionHome(tmp_path)
    notes = Notes(tmp_path / "processes")
    child = subprocess.Popen(["sleep", "1000"])
    try:
        mine = make_note(process_id="p1", principal="ann", session_key="s", command="x", pid=child.pid)
        host = f"{child.pid}.{procfs.start_time(child.pid)}"
        notes.write(type(mine)(**{**{n: getattr(mine, n) for n in mine.__struct_fields__}, "host": host}))
        asyncio.run(enter(home))
        assert child.poll() is None and home.told == [] and note_files(tmp_path) == ["p1.json"]
    finally:
        child.kill()
        child.wait()
    asyncio.run(enter(home))
    assert len(home.told) == 1 and note_files(tmp_path) == []


def test_a_note_stays_while_its_session_cannot_be_told(tmp_path: Path) -> None:
    home = SessionHome(tmp_path)
    notes = Notes(tmp_path / "processes")
    notes.write(make_note(process_id="p1", principal="ann", session_key="s", command="x", pid=2**22 + 1))
    home.refusal = MailboxFull()
    asyncio.run(enter(home))
    assert note_files(tmp_path) == ["p1.json"]
    home.refusal = SessionDeleted()
    asyncio.run(enter(home))
    assert note_files(tmp_path) == []


def test_a_note_that_cannot_be_read_harms_no_start(tmp_path: Path) -> None:
    folder = tmp_path / "processes"
    folder.mkdir()
    for name, content in (("p1.json", b"{"), ("p2.json", b""), ("p3.json.part", b"x"), ("../p4.json", b"[]")):
        (folder / name).write_bytes(content)
    asyncio.run(enter(SessionHome(tmp_path)))
    assert note_files(tmp_path) == []
