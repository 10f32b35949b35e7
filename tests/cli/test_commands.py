"""Each command against a real server: what it prints, in JSON too, and its exit code."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from holdfast import errors
from holdfast.cli.exit_codes import Exit, exit_of
from holdfast.cli.output import say, say_error
from holdfast.cli.send import content_of
from holdfast.protocol.events import EVENT_KINDS
from tests.cli.processes import LIMIT_S, Served, clean_environment, run, served


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests of this module; each uses sessions of its own."""
    with served(tmp_path_factory.mktemp("serve"), HOLDFAST_GRACE_S="0.3") as running:
        yield running
        assert running.end() == 0


def test_send_prints_a_receipt_or_the_answer(server: Served) -> None:
    sent = server.run("send", "count a b c", "-s", "send", "--json")
    receipt = json.loads(sent.stdout)
    assert (sent.returncode, receipt["session"], receipt["disposition"]) == (0, "send", "started")
    assert "cursor" in server.run("send", "count", "-s", "send2").stdout
    answered = server.run("send", "-", "-s", "send", "--wait", "60", stdin="count from stdin")
    assert (answered.returncode, answered.stdout) == (0, "2 words.\n")
    settled = json.loads(server.run("send", "count x", "-s", "send", "--wait", "60", "--json").stdout)
    assert (settled["state"], settled["text"]) == ("completed", "1 word.")
    key = ["--idempotency-key", "k"]
    first, second = (json.loads(server.run("send", "count x", "-s", "send", "--json", *key).stdout) for _ in range(2))
    assert first["message_id"] == second["message_id"]


def test_exit_codes_say_what_became_of_a_message(server: Served) -> None:
    failed = server.run("send", "fail", "-s", "exits", "--wait", "60")
    assert (failed.returncode, "asked to fail" in failed.stderr) == (1, True)
    waited = server.run("send", "steps 1000", "-s", "exits", "--wait", "0.2", "--json")
    assert waited.returncode == 6
    assert json.loads(waited.stdout)["disposition"] == "started", "the receipt is printed all the same"
    refused = server.run("send", "x", "-s", "exits", "--policy", "reject", "--json")
    assert refused.returncode == 4
    assert json.loads(refused.stderr)["error"]["code"] == "busy"
    assert json.loads(server.run("interrupt", "-s", "exits", "--json").stdout)["outcome"] == "gone"
    same = ["send", "steps 1000", "-s", "exits", "--wait", "60", "--idempotency-key"]
    server.run("send", "steps 1000", "-s", "exits", "--idempotency-key", "k")
    server.run("stop", "-s", "exits")
    assert server.run(*same, "k").returncode == 5
    for arguments, code in (
        (["send", "x", "-s", "a/b"], 4),
        (["send", "x", "--policy", "hurry"], 4),
        (["send", "x", "--agent", "nobody"], 4),
        (["tail", "-s", "nobody"], 4),
        (["interrupt", "-s", "nobody"], 4),
        (["nonsense"], 2),
        (["send", "--nonsense"], 2),
        (["ps", "--url", "no address"], 2),
        (["ps", "--url", "http://127.0.0.1:9"], 3),
    ):
        found = server.run(*arguments)
        assert found.returncode == code, (arguments, found)
        assert "Traceback" not in found.stderr


def test_ps_and_tree_show_what_is_alive(server: Served) -> None:
    receipt = json.loads(server.run("send", "steps 1000", "-s", "alive", "--json").stdout)
    table = server.run("ps").stdout
    assert table.splitlines()[0].split()[:3] == ["SESSION", "PRINCIPAL", "STATE"]
    line = next(line for line in table.splitlines() if line.startswith("alive "))
    assert "running" in line
    assert receipt["run_id"] in line
    sessions = json.loads(server.run("ps", "--json", "--all").stdout)["sessions"]
    assert "alive" in {session["key"] for session in sessions}
    listed: list[str] = []
    following: list[str] = []
    while len(listed) < len(sessions):
        page = json.loads(server.run("ps", "--json", "--all", "--limit", "1", *following).stdout)
        listed += [session["key"] for session in page["sessions"]]
        following = ["--before", page["next"]]
    assert sorted(listed) == sorted(session["key"] for session in sessions)
    assert receipt["run_id"] in server.run("tree", "-s", "alive").stdout
    tree = json.loads(server.run("tree", "--json").stdout)
    assert tree["kind"] == "host"
    stopped = json.loads(server.run("stop", "-s", "alive", "--reason", "enough", "--json").stdout)
    assert stopped["receipt"]["cause"]["reason"] == "enough"


def test_tail_and_export_show_what_was_said(server: Served) -> None:
    server.run("send", "count a b", "-s", "said", "--wait", "60")
    lines = server.run("tail", "-s", "said", "--no-follow", "--json").stdout.splitlines()
    events = [json.loads(line) for line in lines]
    assert {event["kind"] for event in events} <= set(EVENT_KINDS)
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    people = server.run("tail", "-s", "said", "--no-follow", "-n", "2").stdout.splitlines()
    assert len(people) == 2
    assert "message.settled" in people[-1]
    after = server.run("tail", "-s", "said", "--no-follow", "--after", "3-1", "--json")
    assert after.returncode in (0, 4)
    markdown = server.run("export", "-s", "said").stdout
    assert "**user**:\n\ncount a b" in markdown
    assert "2 words." in markdown
    entries = [json.loads(line) for line in server.run("export", "-s", "said", "--json").stdout.splitlines()]
    assert [entry["role"] for entry in entries] == ["user", "tool_call", "tool_result", "assistant"]
    path = server.folder / "said.jsonl"
    written = server.run("export", "-s", "said", "--events", "--json", "-o", str(path))
    assert (written.returncode, written.stdout) == (0, "")
    assert len(path.read_text().splitlines()) == len(events)
    assert server.run("export", "-s", "said", "-o", "/no/such/folder/x").returncode == 2


def test_a_tail_that_nobody_reads_any_more_ends_quietly(server: Served) -> None:
    server.run("send", "count a b", "-s", "piped", "--wait", "60")
    command = f"{sys.executable} -c 'from holdfast.cli import main; main()' tail -s piped --no-follow | head -1"
    environment = clean_environment(HOLDFAST_URL=server.url)
    found = subprocess.run(
        ["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert "message.accepted" in found.stdout
    assert "Traceback" not in found.stderr
    assert "BrokenPipe" not in found.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_an_output_that_has_no_room_is_told_in_words(server: Served) -> None:
    server.run("send", "count a b", "-s", "full", "--wait", "60")
    for arguments in (("export", "-s", "full"), ("export", "-s", "full", "-o", "/dev/full"), ("ps", "--json")):
        with open("/dev/full", "w") as full:
            found = subprocess.run(
                [sys.executable, "-c", "from holdfast.cli import main; main()", *arguments],
                env=clean_environment(HOLDFAST_URL=server.url),
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        assert (found.returncode, "Traceback" in found.stderr) == (1, False), found.stderr
        assert "incomplete output: No space left on device" in found.stderr


def test_doctor_on_a_full_disk_advises_to_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Path) -> float:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("holdfast.cli.doctor._sync_latency", full)
    found = run("doctor", "--json", folder=tmp_path, HOLDFAST_PORT="9")
    checks = {check["name"]: check for check in json.loads(found.stdout)["checks"]}
    assert checks["disk latency"]["advice"] == "free some space"


def test_doctor_finds_a_healthy_server_and_says_what_to_do_otherwise(server: Served, tmp_path: Path) -> None:
    healthy = server.run("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(healthy.stdout)["checks"]}
    names = {"versions", "open files", "process control", "walls", "orphans", "store", "disk latency", "server"}
    assert names <= set(checks)
    faults = {check["name"] for check in json.loads(healthy.stdout)["checks"] if check["state"] == "fault"}
    assert faults <= {"orphans"}, "other programs of this machine may have left some"
    assert healthy.returncode == (1 if faults else 0)
    in_use = f"{server.folder}/.holdfast/holdfast.db is in use by a running server (process {server.process.pid})"
    assert checks["store"]["found"].endswith(in_use.removeprefix(f"{server.folder}/"))
    assert "ready" in checks["server"]["found"]
    assert "fdatasync" in checks["disk latency"]["found"]
    (tmp_path / "holdfast.db").write_text("no database" * 1000)  # where older versions kept it
    sick = run("doctor", folder=tmp_path, HOLDFAST_PORT="9")
    assert sick.returncode == 1
    assert "FAULT" in sick.stdout
    assert "restore a backup" in sick.stdout
    fresh = run("doctor", "--store", f"sqlite:///{tmp_path}/new.db", folder=tmp_path, HOLDFAST_PORT="9")
    assert "FAULT   store" not in fresh.stdout
    assert "start one: holdfast serve\n" in fresh.stdout
    port = server.url.rpartition(":")[2]
    here = json.loads(run("doctor", "--port", port, "--json", folder=server.folder).stdout)["checks"]
    assert any(check["name"] == "server" and "ready" in check["found"] for check in here)
    elsewhere = run("doctor", "--port", "9", folder=tmp_path)
    assert "no server runs at http://127.0.0.1:9" in elsewhere.stdout
    assert "start one: holdfast serve --port 9\n" in elsewhere.stdout
    assert run("doctor", "--port", "9", "--url", server.url).returncode == Exit.USAGE
    coloured = run("doctor", folder=tmp_path, HOLDFAST_PORT="9", CLICOLOR_FORCE="1", NO_COLOR="")
    assert "\x1b[32mok\x1b[0m      versions" in coloured.stdout
    assert not (tmp_path / "new.db").exists(), "a doctor leaves nothing behind"


def test_keys_are_made_in_the_store_or_through_the_server(tmp_path: Path) -> None:
    made = run("keys", "create", "ops", "--role", "admin", "--label", "first", "--json", folder=tmp_path)
    secret = json.loads(made.stdout)["secret"]
    assert secret.startswith("hf_")
    assert secret not in (tmp_path / ".holdfast" / "holdfast.db").read_bytes().decode("latin-1")
    assert run("keys", "create", "x", "--role", "king", folder=tmp_path).returncode == 2
    with served(tmp_path) as server:
        assert server.ready["keys_required"] is True
        assert server.run("ps").returncode == 4
        assert server.run("ps", HOLDFAST_KEY=secret).returncode == 0
        port = server.url.rpartition(":")[2]
        through = run("keys", "create", "alice", folder=tmp_path, HOLDFAST_PORT=port, HOLDFAST_KEY=secret)
        assert (through.returncode, through.stdout[:3]) == (0, "hf_")
        alice = through.stdout.strip()
        assert server.run("send", "count a", "--wait", "60", HOLDFAST_KEY=alice).stdout == "1 word.\n"
        assert server.run("drain", HOLDFAST_KEY=alice).returncode == 4
        budgets = [line for line in server.run("doctor", HOLDFAST_KEY=alice).stdout.splitlines() if "  budget " in line]
        assert any("budget connections" in line and "alice 1;" in line for line in budgets)
        assert [line for line in budgets if "alice 0;" in line or "e+" in line] == [], "only what is used, in figures"
        listed = json.loads(server.run("keys", "list", "--json", HOLDFAST_KEY=secret).stdout)["keys"]
        by_principal = {key["principal"]: key for key in listed}
        assert set(by_principal) == {"ops", "alice"}
        gone = server.run("keys", "revoke", by_principal["alice"]["key_id"], HOLDFAST_KEY=secret)
        assert "revoked" in gone.stdout
        assert server.run("ps", HOLDFAST_KEY=alice).returncode == 4
        assert server.run("keys", "revoke", "k_none", HOLDFAST_KEY=secret).returncode == 4
        drained = server.run("drain", "--deadline", "0.1", "--json", HOLDFAST_KEY=secret)
        assert (drained.returncode, json.loads(drained.stdout)["orphans"]) == (0, [])
        again = server.run("drain", HOLDFAST_KEY=secret)
        assert again.stderr.endswith(f"end it with Ctrl-C in its terminal, or: kill {server.process.pid}\n")
        refused = server.run("send", "count a", HOLDFAST_KEY=secret)
        assert (refused.returncode, "shutting down" in refused.stderr) == (4, True)
        assert server.end() == 0
    assert "first" in run("keys", "list", folder=tmp_path).stdout


def test_keys_of_a_store_are_never_made_on_another_server(tmp_path: Path) -> None:
    # The store is served on some port, and at the address of the settings is another server: that one got the key.
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    with served(tmp_path / "here") as here, served(tmp_path / "there") as there:
        port = there.url.rpartition(":")[2]
        for command in (("create", "alice"), ("list",), ("revoke", "k_none")):
            refused = run("keys", *command, folder=tmp_path / "here", HOLDFAST_PORT=port)
            assert refused.returncode == 7, refused.stdout + refused.stderr
            assert f"process {here.process.pid}" in refused.stderr
            assert "--url" in refused.stderr
        assert json.loads(there.run("keys", "list", "--json").stdout) == {"keys": []}
        assert run("keys", "create", "alice", "--url", here.url, folder=tmp_path / "here").returncode == 0


def test_help_is_quick_because_it_loads_next_to_nothing() -> None:
    program = (
        "import sys\nfrom holdfast.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = {'httpx2', 'uvicorn', 'starlette', 'rich', 'msgspec', 'asyncio', 'psutil', 'holdfast.host'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, "--help"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert "\nTalk:\n" in found.stdout
    assert found.stderr.strip() == "[]"
    for command in (
        "serve",
        "chat",
        "send",
        "ps",
        "tree",
        "interrupt",
        "stop",
        "tail",
        "export",
        "drain",
        "doctor",
        "keys",
    ):
        assert f"\n  {command} " in found.stdout


def test_every_command_explains_itself_and_takes_json() -> None:
    import typer.main

    from holdfast.cli import app

    group = typer.main.get_command(app)
    commands = dict(getattr(group, "commands", {}))
    for name in ("grants", "keys", "schedule", "store"):
        commands |= {f"{name} {one}": command for one, command in commands.pop(name).commands.items()}
    for name, command in commands.items():
        assert command.help, name
        options = {option for parameter in command.params for option in parameter.opts}
        assert "--json" in options, name
        for parameter in command.params:
            if getattr(parameter, "hidden", False):
                continue  # not for people
            assert getattr(parameter, "help", None), f"{name} {parameter.name}"


def test_summary_of_every_command_is_the_first_sentence_of_its_help() -> None:
    import typer.main

    from holdfast.cli.commands import COMMANDS, app

    commands = getattr(typer.main.get_command(app), "commands", {})
    assert {name: command.get_short_help_str(1000) for name, command in commands.items()} == {
        name: spec.summary for name, spec in COMMANDS.items()
    }


def test_every_error_has_an_exit_code() -> None:
    assert exit_of(errors.ConfigurationError()) is Exit.USAGE
    assert exit_of(errors.ServerUnreachable()) is Exit.UNREACHABLE
    assert exit_of(errors.WaitExpired()) is Exit.WAITED
    assert exit_of(errors.RunFailed()) is Exit.FAILED
    assert exit_of(errors.RunInterrupted()) is Exit.INTERRUPTED
    assert exit_of(errors.MessageWithdrawn()) is Exit.INTERRUPTED
    assert exit_of(errors.StoreLocked()) is Exit.STORE
    assert exit_of(errors.SessionBusy()) is Exit.REFUSED
    assert [code.value for code in Exit] == list(range(8))


def test_arguments_that_cannot_work_are_refused_in_words(server: Served) -> None:
    sent = server.run("send", "-s", "odd", "count a", "--wait", "60")
    assert sent.returncode == 0
    for arguments, code in (
        (("tail", "-s", "odd", "--no-follow", "--after", "zz"), Exit.REFUSED),
        (("tail", "-s", "odd", "--no-follow", "--after", "0-999"), Exit.REFUSED),
        (("send", "-s", "odd", "x", "--wait", "nan"), Exit.USAGE),
        (("send", "-s", "odd", "x", "--wait", "-1"), Exit.USAGE),
        (("send", "-s", "odd", "x", "--wait", "soon"), Exit.USAGE),
        (("interrupt", "-s", "odd", "--grace", "nan"), Exit.USAGE),
        (("stop", "-s", "odd", "--grace", "inf"), Exit.USAGE),
        (("drain", "--deadline", "-1"), Exit.USAGE),
        (("send",), Exit.USAGE),  # and stdin has nothing
        (("send", "-"), Exit.USAGE),
        (("ps", "--url", "http://127.0.0.1:99999"), Exit.USAGE),
        (("ps", "--key", "schl\u00fcssel"), Exit.USAGE),
    ):
        found = server.run(*arguments, "--json")
        assert found.returncode == code, (arguments, found.stderr)
        assert found.stdout == ""
        assert "Traceback" not in found.stderr, arguments


def test_what_an_agent_says_cannot_drive_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = "a\x1b]0;title\x07\tb\nc\r\u202e"
    say(text)
    assert capsys.readouterr().out == text + "\n", "a pipe gets what was said"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    say(text)
    say_error(errors.RunFailed(text), as_json=False)
    shown = capsys.readouterr()
    assert shown.out == "a\u00b7]0;title\u00b7\tb\nc\u00b7\u00b7\n"
    assert "\x1b" not in shown.err


def test_who_is_asked_for_the_message_at_a_terminal_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keyboard, terminal = os.openpty()
    os.write(keyboard, b"words\n\x04")
    try:
        with open(terminal) as typed:
            for stdin, asked, told in ((typed, None, "Ctrl-D"), (io.StringIO("words\n"), "-", "")):
                monkeypatch.setattr(sys, "stdin", stdin)
                assert content_of("given") == "given"
                assert capsys.readouterr().err == ""
                assert content_of(asked) == "words\n"
                shown = capsys.readouterr()
                assert told in shown.err and bool(told) is bool(shown.err)
                assert shown.out == ""
    finally:
        os.close(keyboard)


def test_an_export_of_nothing_leaves_the_file_as_it_was(server: Served, tmp_path: Path) -> None:
    kept = tmp_path / "kept.md"
    kept.write_text("precious")
    found = server.run("export", "-s", "never-was", "-o", str(kept))
    assert found.returncode == Exit.REFUSED
    assert kept.read_text() == "precious"


def test_export_of_events_as_an_archive_is_refused_without_a_traceback(tmp_path: Path) -> None:
    found = run("export", "--events", "--archive", "--url", "http://127.0.0.1:1", folder=tmp_path)
    assert found.returncode == Exit.USAGE
    assert "--events and --archive are mutually exclusive" in found.stderr


def test_a_schedule_is_added_listed_paused_resumed_run_and_removed(server: Served) -> None:
    added = server.run("schedule", "add", "count a b", "-s", "timed", "--every", "3600", "--id", "hourly", "--json")
    view = json.loads(added.stdout)
    assert (added.returncode, view["schedule_id"], view["session"], view["every_s"]) == (0, "hourly", "timed", 3600.0)
    cron = ["schedule", "add", "-", "-s", "timed", "--cron", "30 9 * * MON-FRI", "--timezone", "Europe/Berlin"]
    shown = server.run(*cron, "--id", "daily", "--jitter", "5", "--max-runs", "3", stdin="count x")
    assert (shown.returncode, shown.stdout.startswith("daily: active, 30 9 * * MON-FRI (Europe/Berlin)")) == (0, True)
    listed = server.run("schedule", "ls", "-s", "timed").stdout.splitlines()
    assert listed[0].split()[:3] == ["SCHEDULE", "SESSION", "STATE"]
    assert [line.split()[0] for line in listed[1:]] == ["hourly", "daily"]
    assert re.search(r" 09:30:0\d CES?T ", listed[2]), listed[2]
    assert re.search(r" \d\d:\d\d:\d\d UTC ", listed[1]), listed[1]
    assert re.search(r"  next    .* 09:30:0\d CES?T$", shown.stdout, re.MULTILINE), shown.stdout
    paused = server.run("schedule", "pause", "daily").stdout
    assert paused.startswith("daily: paused")
    assert json.loads(server.run("schedule", "resume", "daily", "--json").stdout)["state"] == "active"
    ran = json.loads(server.run("schedule", "run", "hourly", "--json").stdout)
    assert (ran["session"], ran["disposition"]) == ("timed", "started")
    removed = server.run("schedule", "rm", "hourly").stdout
    assert removed.startswith("hourly: deleted")
    assert "1 fired" in removed
    left = json.loads(server.run("schedule", "ls", "--all", "--json").stdout)["schedules"]
    assert [view["schedule_id"] for view in left] == ["daily"]
    with closing(sqlite3.connect(server.folder / ".holdfast" / "holdfast.db")) as database, database:
        database.execute("UPDATE schedule SET body = 'damaged' WHERE schedule_id = 'daily'")
    broken = server.run("schedule", "ls").stdout.splitlines()
    assert broken[1].split()[:5] == ["daily", "timed", "broken", "-", "-"]
    assert broken[2].startswith("daily: damaged, or written by a newer version")
    for arguments, code, word in (
        (["pause", "daily"], 4, "schedule_broken"),
        (["add", "x", "--cron", "0 0 30 2 *"], 4, "invalid_schedule"),
        (["add", "x"], 4, "invalid_schedule"),
        (["add", "x", "--every", "9", "--miss", "never"], 4, "invalid_schedule"),
        (["add", "x", "--every", "60", "--agent", "nobody"], 4, "unknown_agent"),
        (["add", "x", "--every", "60", "--timezone", "Europe/Berlin"], 4, "invalid_schedule"),
        (["run", "nothing"], 4, "unknown_schedule"),
    ):
        found = server.run("schedule", *arguments, "--json")
        assert (found.returncode, json.loads(found.stderr)["error"]["code"]) == (code, word)
    assert server.run("schedule", "add", "x", "--every", "never").returncode == 2


@pytest.mark.parametrize(
    ("words", "quoted"),
    [
        (["send", "hello", "world"], 'holdfast send "hello world"'),
        (["ask", "a", "b", "c"], 'holdfast ask "a b c"'),
        (["ask", "costs", "$5"], "holdfast ask 'costs $5'"),
    ],
)
def test_a_text_without_quotes_is_answered_with_the_quoted_command(words: list[str], quoted: str) -> None:
    found = run(*words)
    assert (found.returncode, found.stderr.splitlines()[-1]) == (Exit.USAGE, f"  quote the text: {quoted}")
    assert "--help' lists the options" in run("ps", "hello", "world").stderr, "a command that takes no text"


def test_a_text_above_the_limit_names_the_setting(server: Served) -> None:
    found = server.run("send", "-", "-s", "large", stdin="a" * 3_000_000)
    assert found.returncode == Exit.REFUSED
    assert "larger than 1,000,000 bytes" in found.stderr
    assert "body_limit_bytes (HOLDFAST_BODY_LIMIT_BYTES)" in found.stderr


@pytest.mark.parametrize("status", [200, 404])
def test_doctor_finds_a_fault_if_another_program_has_the_port(status: int, tmp_path: Path) -> None:
    class Foreign(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"<p>hello</p>")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Foreign) as foreign:
        threading.Thread(target=foreign.serve_forever, daemon=True).start()
        found = run("doctor", "--port", str(foreign.server_port), folder=tmp_path)
        foreign.shutdown()
    (line,) = [line for line in found.stdout.splitlines() if "is not a Holdfast server" in line]
    assert (found.returncode, line.split()[:2]) == (Exit.FAILED, ["FAULT", "server"])
