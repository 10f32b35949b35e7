"""Questions, edited histories and attachments on the command line and in a chat, with the demo model's assistant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.processes import Served, approval_key, served, shows, terminal

CTRL_D = "\x04"
KEYS: dict[Path, str] = {}
"""The approval key of each server, which nothing has but the person in the test."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests of this module; each uses a session of its own."""
    folder = tmp_path_factory.mktemp("talking")
    KEYS[folder] = approval_key(folder)
    with served(folder, "--model", "scripted:demo", "--approve", "all", HOLDFAST_GRACE_S="0.3") as running:
        yield running


def asking(server: Served, session: str, text: str) -> str:
    """Start a run that asks something; the question's id."""
    server.run("send", text, "-s", session)
    while True:
        found = json.loads(server.run("questions", "-s", session, "--json").stdout)["questions"]
        if found:
            return str(found[0]["question_id"])


def answer_of(server: Served, session: str) -> str:
    """The newest answer in the transcript, once the session is idle."""
    while (session, "idle") not in [
        (view["key"], view["state"]) for view in json.loads(server.run("ps", "--json").stdout)["sessions"]
    ]:
        pass
    lines = server.run("export", "-s", session, "--json").stdout.splitlines()
    return str([entry for line in lines if (entry := json.loads(line))["role"] == "assistant"][-1]["content"])


def test_a_call_is_approved_or_denied(server: Served) -> None:
    question = asking(server, "approve", "run echo it is done > done.txt")
    listed = server.run("ps").stdout
    assert "suspended" in listed and "approve asks: terminal" in listed and "holdfast approve" in listed
    assert "echo it is done" in server.run("questions", "-s", "approve").stdout
    with terminal("ps", folder=server.folder, HOLDFAST_URL=server.url, COLUMNS="60") as screen:
        assert screen.expect("…\r\n  holdfast approve").rpartition("approve asks: ")[2].startswith("terminal {")
        assert screen.end() == 0
    listed = server.run("questions", "-s", "approve", "--json").stdout
    call = json.loads(listed)["questions"][0]["call_hash"]
    assert call in server.run("questions", "-s", "approve").stdout
    unsaid = server.run("approve", "-s", "approve", "--json")
    assert (unsaid.returncode, "without --call requires a terminal" in unsaid.stderr) == (2, True)
    other = server.run("approve", "-s", "approve", "--call", "0" * 32, "--json")
    assert (other.returncode, json.loads(other.stderr)["error"]["code"]) == (4, "call_mismatch")
    nobody = server.run("approve", "-s", "approve", "--call", call, "--json")
    assert (nobody.returncode, json.loads(nobody.stderr)["error"]["code"]) == (4, "approval_key_required")
    assert list(server.folder.rglob("done.txt")) == []
    with terminal("approve", "-s", "approve", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.expect('approve terminal {"command":"echo it is done > done.txt"')
        screen.expect("y/n> ")
        screen.type("y\n")
        screen.expect("approval key: ")
        screen.type(f"{KEYS[server.folder]}\n")
        screen.expect(f"approved: {question}")
        assert screen.end() == 0
    answer_of(server, "approve")
    assert [file.read_text() for file in server.folder.rglob("done.txt")] == ["it is done\n"]
    asking(server, "approve", "run echo again > again.txt")
    denied = server.run("deny", "-s", "approve", "-r", "not here")
    assert (denied.returncode, denied.stdout.split(":")[0]) == (0, "denied")
    answer_of(server, "approve")
    assert list(server.folder.rglob("again.txt")) == []
    nothing = server.run("approve", "-s", "approve")
    assert (nothing.returncode, "has no open approval" in nothing.stderr) == (4, True)
    wrong = server.run("approve", "nonsense", "-s", "approve", "--json")
    assert (wrong.returncode, json.loads(wrong.stderr)["error"]["code"]) == (4, "unknown_question")


def test_a_question_is_answered(server: Served) -> None:
    asking(server, "answer", "ask which colour?")
    assert "which colour?" in server.run("questions", "-s", "answer").stdout
    assert server.run("answer", "blue", "-s", "answer").returncode == 0
    assert "blue" in answer_of(server, "answer")


def test_a_history_is_changed_by_hand(server: Served, tmp_path: Path) -> None:
    for text in ("one", "two"):
        assert server.run("send", text, "-s", "edit", "--wait", "60").returncode == 0
    assert server.run("retry", "-s", "edit", "--wait", "60").returncode == 0
    assert server.run("fork", "edit-2", "-s", "edit", "--through", "2").returncode == 0
    undone = json.loads(server.run("undo", "-s", "edit", "--json").stdout)["entries"]
    assert [entry["content"] for entry in undone if entry["role"] == "user"] == ["two"]
    assert "2 entries removed" in server.run("undo", "-s", "edit").stdout
    assert server.run("undo", "-s", "edit").returncode == 4
    archive = tmp_path / "archive.json"
    assert server.run("export", "-s", "edit-2", "--archive", "-o", str(archive)).returncode == 0
    assert "edit-3" in server.run("import", str(archive), "-s", "edit-3").stdout
    exported = [server.run("export", "-s", session, "--json").stdout for session in ("edit-2", "edit-3")]
    assert exported[0] and exported[0] == exported[1]
    assert server.run("import", str(archive), "-s", "edit-3").returncode == 4
    compacted = server.run("compact", "-s", "edit-2", "--keep", "0", "--json")
    assert [entry["role"] for entry in json.loads(compacted.stdout)["entries"]] == ["summary"]
    assert "Summary of earlier messages" in server.run("export", "-s", "edit-2").stdout
    archive.write_text("{}")
    assert server.run("import", str(archive), "-s", "edit-4").returncode == 2
    assert server.run("import", str(tmp_path / "none"), "-s", "edit-4").returncode == 2


def test_a_file_is_attached(server: Served, tmp_path: Path) -> None:
    picture = tmp_path / "a picture.png"
    picture.write_bytes(b"\x89PNG")
    sent = server.run("send", "look", "-s", "attach", "--attach", str(picture), "--wait", "60")
    assert sent.returncode == 0, sent.stderr
    entry = json.loads(server.run("export", "-s", "attach", "--json").stdout.splitlines()[0])
    assert (entry["attachments"][0]["name"], entry["attachments"][0]["media_type"]) == ("a picture.png", "image/png")
    assert "a picture.png (image/png)" in server.run("export", "-s", "attach").stdout
    assert server.run("send", "look", "--attach", str(tmp_path / "none")).returncode == 2


def test_a_chat_asks_for_approval_and_shows_the_call(server: Served) -> None:
    with terminal("chat", "-s", "chat", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.prompt()
        screen.type("run echo 4$((1+1))\n")
        screen.expect("Allow terminal")
        screen.prompt("y/n>")
        screen.type("perhaps\n")
        screen.expect("type y or n")
        screen.type("y\n")
        screen.prompt("approval key (hidden)>")
        screen.type("hfa_wrong\n")
        screen.expect("invalid approval key for this session")
        screen.prompt("y/n>")
        screen.type("y\n")
        screen.prompt("approval key (hidden)>")
        screen.type(f"{KEYS[server.folder]}\n")
        screen.expect("[approved]")
        screen.expect("✓ terminal")
        screen.expect("42")
        screen.expect("tokens]")
        screen.prompt()
        screen.type("run echo nothing\n")
        screen.prompt("y/n>")
        screen.type("n I said so\n")
        screen.expect("[denied: I said so]")
        screen.prompt()
        screen.type("ask which colour?\n")
        screen.expect("question: which colour?")
        screen.prompt("answer>")
        screen.type("blue\n")
        screen.expect("[answered: blue]")
        screen.prompt()
        screen.type(CTRL_D)
        assert screen.end() == 0


def test_a_chat_takes_commands_past_the_queue(server: Served) -> None:
    with terminal("chat", "-s", "slash", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.prompt()
        screen.type("/help\n")
        screen.expect("/rollback TEXT")
        screen.type("/nonsense\n")
        screen.expect("unknown command /nonsense")
        screen.type("run sleep 600\n")
        screen.prompt("y/n>")
        screen.type("/status\n")
        screen.expect("suspended")
        screen.type("/approve\n")
        screen.prompt("approval key (hidden)>")
        screen.type(f"{KEYS[server.folder]}\n")
        screen.expect("[approved]")
        screen.until(shows("terminal sleep 600"))
        while "program" not in server.run("tree", "-s", "slash").stdout:
            pass  # the call is shown before its program has been started
        screen.type("/tree\n")
        screen.expect("session slash running")
        screen.type("/queue later\n")
        screen.expect("queued")
        screen.type("/stop enough\n")
        screen.expect("gone after")
        screen.expect(" tasks, 1 program]")
        screen.expect("withdrawn: later")
        screen.type("hello\n")
        screen.expect("I am the demo model")
        screen.expect("tokens]")
        screen.prompt()
        screen.type("/undo\n")
        screen.expect("2 entries removed")
        for wrong in ("/compact all", "/fork slash-other first"):
            screen.type(f"{wrong}\n")
            screen.expect("is not a number")
        screen.type("/new slash/other\n")
        screen.expect("is not a session key")
        screen.type("/fork slash-other\n")
        screen.expect("session slash-other")
        screen.type("/new\n")
        screen.expect("session slash-other-2")
        screen.type("//help me\n")
        screen.expect("tokens]")
        screen.type("/quit\n")
        assert screen.end() == 0
    entries = server.run("export", "-s", "slash-other-2", "--json").stdout.splitlines()
    assert json.loads(entries[0])["content"] == "/help me"


def test_a_chat_shows_what_a_background_process_reports(server: Served) -> None:
    with terminal("chat", "-s", "reports", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.prompt()
        screen.type("start touch waits; until [ -e go ]; do sleep 0.1; done; exit 3\n")
        screen.prompt("y/n>")
        screen.type("y\n")
        screen.prompt("approval key (hidden)>")
        screen.type(f"{KEYS[server.folder]}\n")
        screen.expect("tokens]")
        while not (waits := list(server.folder.rglob("waits"))):
            pass
        waits[0].with_name("go").touch()
        screen.expect("[message: [process")
        screen.type(CTRL_D)
        assert screen.end() == 0


def test_a_chat_comes_back_to_an_open_question(server: Served) -> None:
    asking(server, "back", "ask which shape?")
    with terminal("chat", "-s", "back", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.expect("question: which shape?")
        screen.type("round\n")
        screen.expect("round")
        screen.prompt()
        screen.type(CTRL_D)
        assert screen.end() == 0


def test_lines_from_a_pipe_do_not_wait_for_an_answer_that_nobody_gives(server: Served) -> None:
    found = server.run("chat", "-s", "pipe", stdin="ask which colour?\n")
    assert (found.returncode, "waits for an answer" in found.stderr) == (6, True)
    server.run("stop", "-s", "pipe")
