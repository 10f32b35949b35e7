"""Help, usage errors and completion: what a newcomer sees first."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
from typer.testing import CliRunner

import holdfast
from holdfast.cli.command_group import RefusingGroup
from holdfast.cli.commands import COMMANDS, app
from holdfast.version import __version__
from tests.cli.processes import HOLDFAST, LIMIT_S, clean_environment, served


def invoke(*arguments: str, columns: int = 80) -> tuple[int, str, str]:
    """Run the command line in this process, on a terminal with that many columns."""
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)}, prog_name="holdfast")
    return result.exit_code, result.stdout, result.stderr


def every_command() -> list[tuple[str, ...]]:
    """Return the names of all commands, the subcommands included."""
    found: list[tuple[str, ...]] = []
    commands: dict[str, Any] = getattr(typer.main.get_command(app), "commands", {})
    for name, command in commands.items():
        found += [(name,), *((name, one) for one in getattr(command, "commands", {}))]
    return found


def test_summaries_are_short_enough_for_80_columns() -> None:
    assert {name: spec.summary for name, spec in COMMANDS.items() if len(spec.summary) > 60} == {}
    _, shown, _ = invoke("--help")
    assert all(f"  {spec.summary}\n" in shown for spec in COMMANDS.values()), shown
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_commands_are_listed_in_groups_with_the_exit_codes_below() -> None:
    _, shown, _ = invoke("--help")
    headings = re.findall(r"^(\S.*):$", shown, re.MULTILINE)
    assert headings == ["Options", *dict.fromkeys(spec.group for spec in COMMANDS.values()), "Exit codes", "Docs"]


@pytest.mark.parametrize("command", [(), *every_command()], ids=" ".join)
def test_help_fits_a_narrow_terminal_without_cutting_a_word(command: tuple[str, ...]) -> None:
    _, wide, _ = invoke(*command, "--help", columns=80)
    _, narrow, _ = invoke(*command, "--help", columns=40)
    wide, narrow = (shown.partition("\n\n")[2].partition("\nExample:")[0] for shown in (wide, narrow))
    assert max(map(len, narrow.splitlines())) <= 40
    wide, narrow = (re.sub(r"-\s+", "-", shown) for shown in (wide, narrow))
    assert wide.split() == narrow.split(), "the same words"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_ends_with_an_example_of_it(name: str) -> None:
    _, shown, _ = invoke(name, "--help")
    assert shown.endswith(f"\nExample:\n  {COMMANDS[name].example}\n")
    assert COMMANDS[name].example.split()[:2] == ["holdfast", name]


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_have_only_options_that_exist(name: str) -> None:
    words = COMMANDS[name].example.split()[1:3]
    _, shown, _ = invoke(*(words if tuple(words) in every_command() else words[:1]), "--help")
    listed = set(re.findall(r"(?<!\S)--?[a-z][\w-]*", shown.split("Example:")[0]))
    used = set(re.findall(r"(?<= )--?[a-z][\w-]*", COMMANDS[name].example))
    assert used <= listed


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["send", "--foo"], "no such option '--foo'", "'holdfast send --help' lists the options"),
        (
            ["send", "x", "--polcy", "y"],
            "no such option '--polcy'",
            "did you mean --policy? 'holdfast send --help' lists the options",
        ),
        (["sned"], "no such command 'sned'", "did you mean 'send'? 'holdfast --help' lists the commands"),
        (["keys", "make"], "no such command 'make'", "'holdfast keys --help' lists the commands"),
        (["fork"], "missing argument 'KEY'", "'holdfast fork --help' lists the options"),
        (["ps", "x", "y"], "unexpected argument: x y", "'holdfast ps --help' lists the options"),
        (
            ["send", "x", "--wait", "soon"],
            "invalid value for '--wait' / '-w': 'soon' is not a number of seconds; use 0 or more",
            "'holdfast send --help' lists the options",
        ),
        (
            ["completion", "tcsh"],
            "invalid value for 'shell': 'tcsh' is not one of 'bash', 'zsh', 'fish'",
            "'holdfast completion --help' lists the options",
        ),
        (
            ["ps", "--limit", "0"],
            "invalid value for '--limit': use 1 or more",
            "'holdfast ps --help' lists the options",
        ),
        (
            ["ps", "--limit", "5000"],
            "invalid value for '--limit': use 1000 or less",
            "'holdfast ps --help' lists the options",
        ),
        (
            ["ps", "--limit", "x"],
            "invalid value for '--limit': use a number",
            "'holdfast ps --help' lists the options",
        ),
        (["help", "sned"], "no such command 'sned'", "did you mean 'send'? 'holdfast --help' lists the commands"),
        (["ls"], "no such command 'ls'", "'holdfast --help' lists the commands"),
        (
            ["hello.py"],
            "no such command 'hello.py'",
            "to serve this agent: holdfast serve hello.py; to run it once: holdfast run hello.py",
        ),
        (
            ["serve", "--agent", "hello"],
            "no such option '--agent'",
            "name the agent without an option: holdfast serve hello.py",
        ),
        (["branch"], "the command 'branch' was renamed; use 'fork'", "'holdfast --help' lists the commands"),
    ],
)
def test_usage_errors_look_like_all_errors(arguments: list[str], message: str, hint: str) -> None:
    assert invoke(*arguments) == (2, "", f"holdfast: {message}\n  {hint}\n")


def test_a_usage_error_is_json_where_json_was_asked_for() -> None:
    code, out, err = invoke("ps", "--nope", "--json")
    assert (code, out) == (2, "")
    error = json.loads(err)["error"]
    assert (error["code"], error["message"]) == ("configuration_error", "no such option '--nope'")


def test_no_command_shows_the_help_and_is_a_usage_error() -> None:
    code, out, err = invoke()
    assert (code, out) == (2, "")
    assert re.search(r"\n  chat +Chat with an agent\.\n", err)
    assert invoke("keys")[0] == 2


def test_a_caller_that_handles_usage_errors_gets_the_exception() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, RefusingGroup)
    with pytest.raises(typer.TyperException, match="No such command"):
        group.main(["nonsense"], prog_name="holdfast", standalone_mode=False)
    with pytest.raises(SystemExit) as left:
        group.main(["nonsense"], prog_name="holdfast")
    assert left.value.code == 2


def test_help_explains_a_command_and_lists_all_as_json() -> None:
    assert invoke("help") == invoke("--help")
    assert invoke("help", "send") == invoke("send", "--help")
    assert invoke("help", "keys", "create") == invoke("keys", "create", "--help")
    listed = json.loads(invoke("help", "--json")[1])["commands"]
    assert [row["name"] for row in listed] == list(COMMANDS)
    assert {"group", "summary", "example"} < set(listed[0])


def test_version_names_the_python_and_the_place() -> None:
    _, line, _ = invoke("--version")
    assert line == f"holdfast {__version__} (Python {platform.python_version()}, {Path(holdfast.__file__).parent})\n"
    assert invoke("version")[1] == line
    assert json.loads(invoke("version", "--json")[1])["version"] == __version__


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("holdfast s", {"send", "stop", "serve", "schedule", "store", "storm"}),
        ("holdfast send --a", {"--agent", "--attach"}),
        ("holdfast keys ", {"create", "list", "revoke"}),
        ("holdfast --v", {"--version"}),
        ("holdfast completion z", {"zsh"}),
    ],
)
def test_words_are_completed(line: str, words: set[str]) -> None:
    asked = {"_HOLDFAST_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    found = subprocess.run(
        HOLDFAST, env=clean_environment(**asked), capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert (set(found.stdout.split()), found.stderr) == (words, "")


def test_completing_the_name_of_a_command_loads_next_to_nothing() -> None:
    program = (
        "import sys\nfrom holdfast.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = {'httpx2', 'uvicorn', 'starlette', 'rich', 'msgspec', 'asyncio', 'holdfast.host'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    asked = {"_HOLDFAST_COMPLETE": "complete_bash", "COMP_WORDS": "holdfast s", "COMP_CWORD": "1"}
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=clean_environment(**asked),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert ("storm" in found.stdout, found.stderr.strip()) == (True, "[]")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_asks_for_completions(shell: str) -> None:
    code, script, err = invoke("completion", shell)
    assert (code, err) == (0, "")
    assert f"_HOLDFAST_COMPLETE=complete_{shell}" in script
    assert json.loads(invoke("completion", shell, "--json")[1]) == {"shell": shell, "script": script.strip()}
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, timeout=LIMIT_S, check=True)


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash here")
def test_bash_completes_a_command_with_the_script() -> None:
    _, script, _ = invoke("completion", "bash")
    typed = 'COMP_WORDS=(holdfast inter); COMP_CWORD=1; _holdfast_completion holdfast; echo "${COMPREPLY[@]}"'
    environment = clean_environment(PATH=f"{Path(HOLDFAST[0]).parent}:{os.environ['PATH']}")
    found = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\n{typed}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert found.stdout == "interrupt\n"


def test_completion_without_a_shell_names_the_shells_in_one_line() -> None:
    found = CliRunner().invoke(app, ["completion"])
    assert found.exit_code == 2
    assert found.stderr.splitlines()[0] == "holdfast: missing argument 'shell': choose bash, zsh, fish"
    assert len(found.stderr.splitlines()) == 2


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("ask", "holdfast ask [OPTIONS] [TEXT]"),
        ("serve", "holdfast serve [OPTIONS] [FILE|MODULE[:AGENT]]..."),
        ("approve", "holdfast approve [OPTIONS] [QUESTION]"),
        ("run", "holdfast run [OPTIONS] AGENT [TEXT]"),
        ("rm", "holdfast rm [OPTIONS] SESSION..."),
    ],
)
def test_usage_line_shows_arguments_as_other_programs_do(command: str, usage: str) -> None:
    assert invoke(command, "--help")[1].splitlines()[0] == f"Usage: {usage}"


def test_help_shows_no_python_type() -> None:
    shown = {name: invoke(*name.split(), "--help")[1] for name in (*COMMANDS, "keys create", "schedule add")}
    assert [name for name, text in shown.items() if re.search(r"<[a-z]+[ \[>]", text)] == []


def test_names_of_sessions_are_completed_from_the_server_that_the_line_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def completed(line: str, **environment: str) -> tuple[set[str], str]:
        asked = {"_HOLDFAST_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        result = CliRunner().invoke(app, [], env={**asked, **environment}, prog_name="holdfast")
        return set(result.stdout.split("\n")) - {""}, result.stderr

    with served(tmp_path) as server, monkeypatch.context() as patient:
        patient.setattr("holdfast.cli.session_names._WITHIN_S", LIMIT_S)
        for name in ("shopping", "shop-2", "deleted", "two words", "shop$(id)"):
            server.run("send", "count a", "-s", name, "--wait", "60")
        server.run("rm", "deleted", "--yes")
        assert completed("holdfast tail -s ", HOLDFAST_URL=server.url) == ({"shopping", "shop-2"}, "")
        assert completed("holdfast tail --session shopp", HOLDFAST_URL=server.url) == ({"shopping"}, "")
        assert completed(f"holdfast tail --url {server.url} -s shop-") == ({"shop-2"}, "")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert completed("holdfast tail -s ", HOLDFAST_URL=url) == (set(), ""), "a server that does not respond"
    assert completed("holdfast tail -s ", HOLDFAST_URL=url) == (set(), ""), "no server"
    assert completed("holdfast tail -s ", HOLDFAST_URL="no address") == (set(), "")
