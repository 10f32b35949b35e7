"""The terminal: whatever a command does, its result arrives, is bounded, and nothing of it lives afterwards."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import Host
from holdfast.errors import ConfigurationError
from holdfast.protocol.events import Gap, ToolOutput
from holdfast.protocol.messages import Access
from holdfast.tools import Terminal, Workspace
from tests.runtime.processes_zoo import ROLES, living, program
from tests.tools.using import Bench, on_host, use


def run(root: Path, *commands: Any, terminal: Terminal | None = None, **more: Any) -> list[str]:
    """The result of each command."""
    results: list[str] = []

    async def agent(bench: Bench) -> None:
        for command in commands:
            results.append(await bench("terminal", command=command, **more))

    use(terminal or Terminal(Workspace(root, protect_existing=False)), agent)
    return results


def test_a_result_has_the_output_of_both_streams_in_order_and_the_exit_code(tmp_path: Path) -> None:
    words = [sys.executable, "-S", "-c", "import sys; print(sys.argv[1:])", "a b", "$HOME"]
    assert run(tmp_path, "echo one; echo two >&2; echo three; exit 3", "true", words) == [
        "one\ntwo\nthree\n[exit code 3]",
        "[exit code 0]",
        "['a b', '$HOME']\n[exit code 0]",
    ]


def test_signal_deaths_are_named(tmp_path: Path) -> None:
    kill = [sys.executable, "-S", "-c", "import os; os.kill(os.getpid(), 9)"]
    assert run(tmp_path, kill, "kill -TERM $$", "exit 139", "exit 255") == [
        "[killed by signal 9 (SIGKILL)]",
        "[killed by signal 15 (SIGTERM)]",
        "[exit code 139, signal 11 (SIGSEGV)]",
        "[exit code 255]",
    ]


def test_commands_start_in_the_folder_of_the_workspace_and_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "file").write_text("x")
    (tmp_path / "out").symlink_to("/")
    assert run(tmp_path, "pwd", folder="inside") == [f"{tmp_path.resolve()}/inside\n[exit code 0]"]
    for folder in ("..", "/", "out", "inside/../..", "missing", "inside/file", "a\0b"):
        (told,) = run(tmp_path, "pwd", folder=folder)
        assert told.startswith("!ToolFailed: "), (folder, told)


def test_no_secret_of_the_host_reaches_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("OPENAI_API_KEY", "GITHUB_TOKEN", "HOLDFAST_KEY", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "UNKNOWN_NAME")
    for name in secrets:
        monkeypatch.setenv(name, f"leaked-{name}")
    monkeypatch.setenv("COLOUR", "blue")
    terminal = Terminal(tmp_path, pass_environment=["COL*"], environment={"SERVICE_TOKEN": "given on purpose"})
    (told,) = run(tmp_path, "env", terminal=terminal)
    assert "leaked" not in told
    assert "COLOUR=blue" in told and "SERVICE_TOKEN=given on purpose" in told and "PATH=" in told
    assert not [line for line in told.splitlines() if line.startswith("HOLDFAST_") and "HOLDFAST_HOST=" not in line]
    (everything,) = run(tmp_path, "env", terminal=Terminal(tmp_path, pass_environment=["*"]))
    assert "leaked-UNKNOWN_NAME" in everything and everything.count("leaked") == 1
    with pytest.raises(ConfigurationError, match="OPENAI_API_KEY"):
        Terminal(tmp_path, pass_environment=["OPENAI_API_KEY"])
    with pytest.raises(ConfigurationError, match="HOLDFAST_STORE"):
        Terminal(tmp_path, environment={"HOLDFAST_STORE": "x"})


def test_large_output_keeps_its_beginning_and_end_and_counts_the_middle(tmp_path: Path) -> None:
    (told,) = run(tmp_path, "echo first; head -c 100000000 /dev/zero | tr '\\0' x; echo; echo last; exit 5")
    assert told.startswith("first\n") and told.endswith("last\n[exit code 5]")
    assert len(told) < 33_000
    assert "[… 99,9" in told and "bytes omitted …]" in told


def test_output_that_never_ends_is_ended_by_the_deadline(tmp_path: Path) -> None:
    (told,) = run(tmp_path, "yes", timeout_s=2.0)
    assert told.startswith("y\ny\n")
    assert told.endswith("[timed out after 2 s and was killed; the output up to then is above]")


def test_binary_output_becomes_safe_text(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, output_bytes=200)
    told = run(
        tmp_path,
        r"printf 'caf\303\251 \377\376 \033[31mred\033[0m bell\a end\r\n'",
        "head -c 50 /dev/zero",
        "i=0; while [ $i -lt 100 ]; do printf '\\303\\251'; i=$((i+1)); done; printf 'a\\303\\251b\\303'",
        terminal=terminal,
    )
    assert told[0] == "café \ufffd\ufffd red bell\ufffd end\n[exit code 0]"
    assert told[1] == "[50 bytes of binary data]\n[exit code 0]"
    assert told[2].count("é") >= 98 and told[2].count("\ufffd") == 1 and "bytes omitted" in told[2]


def test_a_line_that_is_written_over_is_shown_as_it_was_last(tmp_path: Path) -> None:
    assert run(tmp_path, r"printf '1%%\r50%%\r100%%\ndone\r\nhalf\r'") == ["100%\ndone\nhalf\n[exit code 0]"]


def test_standard_input_is_what_was_given_or_empty(tmp_path: Path) -> None:
    assert run(tmp_path, "cat; echo .") == [".\n[exit code 0]"]
    assert run(tmp_path, "wc -c", stdin="x" * 500_000) == ["500000\n[exit code 0]"]
    assert run(tmp_path, "true", stdin="x" * 500_000) == ["[exit code 0]"]


def test_a_terminal_is_one(tmp_path: Path) -> None:
    assert run(tmp_path, "test -t 0 && test -t 1 && test -t 2 && tty </dev/tty >/dev/null && echo yes", pty=True) == [
        "yes\n[exit code 0]"
    ]
    assert "read: hello" in run(tmp_path, "read line; echo read: $line", pty=True, stdin="hello\n")[0]
    for text in ("a\n", "a", ""):
        (told,) = run(tmp_path, "cat >got; wc -c <got", pty=True, stdin=text)
        assert told.endswith(f"{len(text)}\n[exit code 0]"), (text, told)
    (told,) = run(tmp_path, ["no-such-program"], pty=True)
    assert "not found" in told


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("", "empty"),
        ([], "empty"),
        ([""], "empty"),
        ("echo a\0b", "NUL"),
        (["echo", "a\0b"], "NUL"),
        (["no-such-program"], "program 'no-such-program' not found"),
        (["./not-executable"], "permission denied"),
        (["./garbage"], "not an executable"),
        (["echo", "x" * 3_000_000], "too long"),
        (["echo", "\ud800"], "surrogates"),
    ],
)
def test_what_cannot_be_started_is_told_plainly(tmp_path: Path, command: Any, says: str) -> None:
    (tmp_path / "not-executable").write_text("x")
    (tmp_path / "garbage").write_bytes(b"\x01\x02")
    (tmp_path / "garbage").chmod(0o755)
    results: list[str] = []

    async def agent(bench: Bench) -> None:
        terminal = bench._tools["terminal"]
        fake = {"run": bench.run, "approved": Access(), "output": lambda self, text: None}
        call: Any = type("FakeCall", (), fake)()
        try:
            results.append(await terminal.work(call, command=command))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")

    use(Terminal(tmp_path), agent)
    assert results[0].startswith("ToolFailed: ") and says in results[0], results


def test_processes_that_a_command_leaves_are_ended_and_counted(tmp_path: Path) -> None:
    token = f"left-{os.getpid()}-{tmp_path.name}"
    (told,) = run(tmp_path, program("leaves-strays", token))
    assert told == "[exit code 7; 2 processes left running were ended]"
    assert living(token) == []


def test_a_stray_that_holds_the_pipe_delays_nothing(tmp_path: Path) -> None:
    token = f"holds-{os.getpid()}-{tmp_path.name}"
    (told,) = run(tmp_path, program("holds-pipe", token))
    assert told == "held\n[exit code 0; 1 process left running was ended]"
    assert living(token) == []


def test_what_the_loop_had_no_time_to_read_is_in_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.tools.programs.output.Capture._on_readable", lambda self: None)
    for pty in (False, True):
        (told,) = run(tmp_path, "head -c 3000 /dev/zero | tr '\\0' x; (setsid sleep 1000 &)", pty=pty)
        assert told.startswith("x" * 3000 + "\n[exit code 0"), told  # the end of a terminal may end the stray


def test_the_far_end_of_a_substitution_may_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.tools.programs.program._LINGER_S", 10.0)
    if not os.access("/bin/bash", os.X_OK):
        pytest.skip("no bash: install it")
    assert run(tmp_path, "echo seen > >(sleep 0.05; cat)") == ["seen\n[exit code 0]"]


def test_a_command_that_closes_its_output_early_is_waited_for(tmp_path: Path) -> None:
    assert run(tmp_path, "echo a; exec >&- 2>&-; sleep 0.3; exit 4") == ["a\n[exit code 4]"]


def test_a_deadline_ends_every_hostile_tree_and_keeps_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.tools.programs.terminal._TERM_FIRST_S", 0.1)
    token = f"deadline-{os.getpid()}-{tmp_path.name}"
    code = program("", token)[4]
    results: dict[str, str] = {}

    async def agent(bench: Bench) -> None:
        def hostile(role: str) -> Callable[[], Awaitable[None]]:
            words = " ".join('"$code"' if word == code else word for word in program(role, token))

            async def command() -> None:
                results[role] = await bench("terminal", command=f"echo {role}; {words}; sleep 1000", timeout_s=5.0)

            return command

        await bench.run.parallel(*map(hostile, ROLES))

    use(Terminal(tmp_path, environment={"code": code}), agent)
    for role, told in results.items():
        assert told.startswith(f"{role}\n") and "timed out after 5 s" in told
    assert len(results) == len(ROLES)
    assert living(token) == []


@pytest.mark.parametrize("role", [*ROLES, "holds-pipe"])
@pytest.mark.parametrize("how", ["interrupt", "stop"])
def test_a_stopped_run_leaves_nothing_of_its_command(tmp_path: Path, role: str, how: str) -> None:
    token = f"{how}-{role}-{os.getpid()}-{tmp_path.name}"

    async def agent(bench: Bench) -> None:
        await bench("terminal", command=program(role, token))
        await bench("terminal", command=program(role, token))
        await bench("terminal", command="sleep 1000")

    async def scenario(host: Host) -> None:
        session = host.session("s")
        receipt = await session.send("go")
        async with asyncio.timeout(30):
            while not living(token):
                await asyncio.sleep(0.005)
        await getattr(session, how)("enough")
        assert living(token) == []
        assert (await session.message(receipt.message_id)).state == "interrupted"

    on_host([Terminal(tmp_path)], agent, scenario)
    assert living(token) == []


def test_a_stop_while_the_program_is_started_leaves_nothing(tmp_path: Path) -> None:
    token = f"starting-{os.getpid()}-{tmp_path.name}"

    async def agent(bench: Bench) -> None:
        async def one() -> None:
            await bench("terminal", command=program("double-fork", token))

        await bench.run.parallel(*[one] * 6)

    async def scenario(host: Host) -> None:
        for ticks in (1, 5, 20, 60, 150):
            session = host.session(f"s{ticks}")
            await session.send("go")
            for _ in range(ticks):
                await asyncio.sleep(0)
            await session.interrupt("at once")
            assert living(token) == []

    on_host([Terminal(tmp_path)], agent, scenario, grace_s=0.1)
    assert living(token) == []


def test_what_a_stopped_command_said_is_in_the_log(tmp_path: Path) -> None:
    async def agent(bench: Bench) -> None:
        await bench("terminal", command="trap 'echo cleaned up; exit' TERM; echo begun; sleep 1000 & wait")

    async def scenario(host: Host) -> None:
        session = host.session("s")
        receipt = await session.send("go")
        said = ""
        async for event in session.events(follow=receipt.message_id):
            if not isinstance(event, Gap) and isinstance(event, ToolOutput):
                said += event.text
                if said == "begun\n":
                    stop = asyncio.create_task(session.interrupt("enough"))
        await stop
        assert said == "begun\ncleaned up\n"

    on_host([Terminal(tmp_path)], agent, scenario, grace_s=5.0)


def test_output_is_streamed_while_the_command_runs_and_only_so_much(tmp_path: Path) -> None:
    go_on = tmp_path / "go"

    async def agent(bench: Bench) -> None:
        await bench(
            "terminal",
            command="echo first; until [ -e go ]; do sleep 0.01; done; head -c 3000000 /dev/zero | tr '\\0' x",
        )

    async def scenario(host: Host) -> None:
        session = host.session("s")
        receipt = await session.send("go")
        pieces: list[str] = []
        async for event in session.events(follow=receipt.message_id):
            if isinstance(event, ToolOutput):
                pieces.append(event.text)
                go_on.touch()
        assert pieces[0] == "first\n"
        assert len("".join(pieces)) < 110_000
        assert pieces[-1].endswith("[live output truncated; the result contains the end]\n")

    on_host([Terminal(tmp_path)], agent, scenario)


def test_sessions_of_a_workspace_for_each_have_their_own_folder(tmp_path: Path) -> None:
    async def agent(bench: Bench) -> str:
        return await bench("terminal", command="pwd; ls; touch mine")

    async def scenario(host: Host) -> None:
        folders = set()
        for key in ("a", "A", "a.", "..", "ä" * 60, "a"):
            said = await host.session(key).ask("go")
            folders.add(said.splitlines()[0])
            assert ("mine" in said) == (len(folders) == 5 and key == "a"), said
        assert len(folders) == 5
        assert all(folder.startswith(f"{tmp_path.resolve()}/") for folder in folders)

    on_host([Terminal(Workspace(tmp_path, per_session=True))], agent, scenario)


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("pty", [False, True])
def test_a_lack_of_descriptors_is_told_and_leaks_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, pty: bool
) -> None:
    async def agent(bench: Bench) -> None:
        await bench("terminal", command="true", pty=pty)
        before = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patch:
            left = iter([None] * after)
            for name in ("pipe", "openpty", "dup"):
                original = getattr(os, name)

                def limited(*values: Any, original: Any = original) -> Any:
                    if next(left, "none") == "none":
                        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                    return original(*values)

                patch.setattr(os, name, limited)
            told = await bench("terminal", command="true", pty=pty)
        assert "Too many open files" in told or told == "[exit code 0]"
        # The other end of a program may be closed a moment after its result; what is leaked stays open.
        async with asyncio.timeout(30):
            while len(os.listdir("/proc/self/fd")) > before:
                await asyncio.sleep(0.01)
        assert await bench("terminal", command="echo fine") == "fine\n[exit code 0]"

    use(Terminal(tmp_path), agent)


def test_no_descriptor_or_process_is_left_after_many_commands(tmp_path: Path) -> None:
    counts: list[int] = []

    async def agent(bench: Bench) -> None:
        for number in range(6):
            if number:
                await bench("terminal", command="echo x; (setsid sleep 1000 &)", stdin="y", pty=bool(number % 2))
                await bench("terminal", command=["no-such-program"])
            else:
                await bench("terminal", command="true")
            counts.append(len(os.listdir("/proc/self/fd")))
        async with asyncio.timeout(30):  # what another thread has open for a moment is no leak: one stays
            while counts[-1] > counts[1]:
                await asyncio.sleep(0.01)
                counts[-1] = len(os.listdir("/proc/self/fd"))

    use(Terminal(tmp_path), agent)
    assert counts[-1] <= counts[1], counts
