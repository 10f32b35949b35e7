"""The input line of ``holdfast chat`` on a real terminal: editing, history, pastes, completion, and output above it."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.history import InMemoryHistory

from holdfast.cli.chat_commands import COMMANDS, command_of, completions, spoken_command, unescaped
from holdfast.cli.chat_history import ChatHistory, history_path, open_history
from holdfast.errors import InvalidRequest
from tests.cli.processes import Served, Terminal, approval_key, run, served, shows, start, terminal

CTRL_A, CTRL_C, CTRL_D, CTRL_E, CTRL_U = "\x01", "\x03", "\x04", "\x05", "\x15"
UP, LEFT, ALT_ENTER = "\x1b[A", "\x1b[D", "\x1b\r"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests of this module; each uses a session of its own."""
    with served(tmp_path_factory.mktemp("input"), HOLDFAST_GRACE_S="0.3") as running:
        yield running


def sent(server: Served, session: str) -> list[str]:
    """The messages of a session."""
    lines = server.run("export", "-s", session, "--json").stdout.splitlines()
    return [entry["content"] for line in lines if (entry := json.loads(line))["role"] == "user"]


def leave(screen: Terminal) -> None:
    screen.type(CTRL_D)
    assert screen.end() == 0


def test_a_line_is_edited_with_the_usual_keys(server: Served) -> None:
    with terminal("chat", "-s", "edit", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.prompt()
        screen.type(f"wo three{CTRL_A}count one t{LEFT}\x1b[C{CTRL_E}!{LEFT}\x1b[3~\r")
        screen.expect("3 words.")
        screen.type("thrown away")
        screen.until(shows("thrown away"))
        screen.type(CTRL_C)
        screen.prompt()
        leave(screen)
    assert sent(server, "edit") == ["count one two three"]


def test_history_comes_back_after_a_restart_and_only_its_user_may_read_it(server: Served, tmp_path: Path) -> None:
    state = {"HOLDFAST_URL": server.url, "XDG_STATE_HOME": str(tmp_path)}
    with terminal("chat", "-s", "history", folder=server.folder, **state) as screen:
        screen.prompt()
        screen.type("count one\r")
        screen.expect("1 word.")
        screen.type(f"count first{ALT_ENTER}second\r")
        screen.expect("2 words.")
        leave(screen)
    file = tmp_path / "holdfast" / "chat_history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    with terminal("chat", "-s", "history", folder=server.folder, **state) as screen:
        screen.expect("2 words.")
        screen.prompt()
        screen.type(UP)
        screen.until(lambda lines: lines[-2:] == ["> count first", "  second"])
        screen.type(f"{UP}{UP}")
        screen.until(lambda lines: lines[-1:] == ["> count one"])
        screen.type("\r")
        screen.expect("1 word.")
        leave(screen)
    assert sent(server, "history") == ["count one", "count first\nsecond", "count one"]


def test_a_history_that_cannot_be_kept_costs_nothing_else(server: Served, tmp_path: Path) -> None:
    (tmp_path / "holdfast").write_text("a file where the folder should be")
    state = {"HOLDFAST_URL": server.url, "XDG_STATE_HOME": str(tmp_path)}
    with terminal("chat", "-s", "nowhere", folder=server.folder, **state) as screen:
        screen.prompt()
        screen.type("count one\r")
        screen.expect("1 word.")
        screen.type(UP)
        screen.until(lambda lines: lines[-1:] == ["> count one"])
        screen.type(CTRL_U)
        leave(screen)


def test_a_paste_of_many_lines_is_one_message(server: Served) -> None:
    lines = [f"line {number}\twith 漢字 and `code`" for number in range(40)]
    with terminal("chat", "-s", "paste", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.prompt()
        screen.type("\x1b[200~" + "\r\n".join(lines) + "\r\n\x1b[201~")
        screen.until(shows("line 39"))
        screen.type("\r")
        screen.expect("240 words.")
        screen.prompt()
        leave(screen)
    assert sent(server, "paste") == ["\n".join(lines)]


def test_what_is_typed_while_the_answer_streams_stays_whole(server: Served) -> None:
    with terminal("chat", "-s", "both", folder=server.folder, COLUMNS="40", HOLDFAST_URL=server.url) as screen:
        screen.prompt()
        screen.type("stream 40\r")
        typed = "count typed while it streams"
        for number in range(0, len(typed), 2):
            screen.until(shows(f"word{number // 2 + 1}"))
            screen.type(typed[number : number + 2])
            screen.until(lambda lines, so_far=typed[: number + 2]: lines[-1:] == [f"> {so_far}".rstrip()])  # type: ignore[misc]
        screen.type("\r")
        screen.expect("queued")
        screen.expect("4 words.")
        screen.prompt()
        shown = screen.display()
        leave(screen)
    answer = " ".join(line for line in shown if line.startswith("word")).split()
    assert answer == [f"word{number}" for number in range(1, 41)], "no word is cut or torn"
    assert sent(server, "both") == ["stream 40", typed]


def test_tab_completes_commands_and_agents(server: Served) -> None:
    with terminal("chat", "-s", "tab", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.expect("session tab")
        screen.type("/comp\t")
        screen.until(lambda lines: lines[-1:] == ["> /compact"])
        screen.type(f"{CTRL_U}/agent d\t")
        screen.until(lambda lines: lines[-1:] == ["> /agent demo"])
        screen.type("\r")
        screen.expect("your messages go to agent 'demo' now")
        screen.type("/agent nobody\r")
        screen.expect("unknown agent 'nobody' (choose demo)")
        screen.type("/agent\r")
        screen.expect("demo  (this session, default)")
        screen.prompt()
        leave(screen)


def test_words_that_people_type_to_leave_or_for_help_do_so(server: Served) -> None:
    for word in ("exit", "quit", "/exit", "/bye", "/q"):
        with terminal("chat", "-s", "words", folder=server.folder, HOLDFAST_URL=server.url) as screen:
            screen.prompt()
            screen.type("?\r")
            screen.expect("/rollback TEXT")
            screen.type(f"{word}\r")
            screen.expect("bye")
            assert screen.end() == 0
    with terminal("chat", "-s", "words", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.prompt()
        screen.type("//exit\r")
        screen.expect("1 word.")
        screen.type("/clear\r")
        screen.until(lambda lines: lines[:1] != [] and lines[0].startswith("[session words-2"))
        leave(screen)
    assert sent(server, "words") == ["exit"]


def test_a_call_is_opened_on_demand(server: Served) -> None:
    with terminal("chat", "-s", "show", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.prompt()
        screen.type("/show\r")
        screen.expect("this chat has had no calls")
        screen.type("count one two\r")
        screen.expect("✓ count_words one two")
        screen.expect("2 words.")
        screen.type("/show\r")
        screen.expect("args: [")
        screen.expect("result")
        screen.type("/show 2\r")
        screen.expect("call 2 is not among those of this chat")
        screen.type("/show two\r")
        screen.expect("is not a number")
        leave(screen)


def test_a_stop_that_lasts_is_announced(tmp_path: Path) -> None:
    with (
        served(tmp_path, HOLDFAST_GRACE_S="10") as server,
        terminal("chat", folder=tmp_path, HOLDFAST_URL=server.url) as screen,
    ):
        screen.prompt()
        screen.type("resist 4\r")
        screen.until(shows("Interrupt me"))
        screen.type(CTRL_C)
        screen.expect("interrupting")
        screen.expect("still stopping after ")
        screen.expect("interrupted: user, Ctrl-C")
        screen.prompt()
        leave(screen)


def test_a_secret_is_never_shown_nor_stored_and_a_draft_survives_it(tmp_path: Path) -> None:
    key = approval_key(tmp_path)
    with served(tmp_path, "--model", "scripted:demo", "--approve", "all") as server:
        with terminal("chat", folder=tmp_path, HOLDFAST_URL=server.url) as screen:
            screen.prompt()
            screen.type("run echo one\r")
            screen.prompt("y/n>")
            screen.type("y\r")
            screen.prompt("approval key (hidden)>")
            screen.type(CTRL_C)
            screen.expect("no approval key was typed; the call still waits")
            screen.prompt("y/n>")
            screen.type("y\r")
            screen.prompt("approval key (hidden)>")
            screen.type(f"{key}\x17\x19{key}")  # cut and yanked: neither shows it, nor keeps it for later
            screen.type(f"{CTRL_U}{key}\r")
            screen.expect("[approved]")
            screen.expect("tokens]")
            screen.type("\x19")
            screen.type("run echo two\r")
            screen.prompt("y/n>")
            screen.type("n\r")
            screen.expect("[denied]")
            screen.expect("tokens]")
            screen.prompt()
            leave(screen)
        assert key.encode() not in screen.raw
        assert key not in (tmp_path / "state" / "holdfast" / "chat_history").read_text()
        assert sent(server, "main") == ["run echo one", "run echo two"]


def test_a_session_whose_agent_is_gone_is_told_with_the_command_to_type(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "async def first(run):\n    yield 'first here'\nasync def second(run):\n    yield 'second here'\n"
    )
    server = start(tmp_path, "mine:first")
    assert run("send", "hi", "-s", "old", "--wait", "60", folder=tmp_path, HOLDFAST_URL=server.url).returncode == 0
    assert server.end() == 0
    with served(tmp_path, "mine:second") as again:
        with terminal("chat", "-s", "old", folder=tmp_path, HOLDFAST_URL=again.url) as screen:
            screen.expect("session old belongs to agent 'first', which this server does not have")
            screen.expect("/agent second")
            screen.type("hello\r")
            screen.expect("/agent NAME (available: second)")
            screen.type("/agent second\r")
            screen.type("hello\r")
            screen.expect("second here")
            leave(screen)
        assert sent(again, "old") == ["hi", "hello"]


def test_the_history_is_searched_and_what_was_found_is_sent_with_a_second_enter(server: Served) -> None:
    with terminal("chat", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.type("count one two three\r")
        screen.expect("3 words.")
        screen.type("\x12two")
        screen.until(lambda lines: any("count one two three" in line for line in lines[-3:]))
        screen.type("\r")
        screen.type("\r")
        screen.expect("3 words.")
        leave(screen)
    assert sent(server, "main")[-2:] == ["count one two three"] * 2


def test_a_server_of_another_folder_is_told_apart_from_that_of_this_folder(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    with served(here):
        pass
    with served(there) as server, terminal("chat", folder=here, HOLDFAST_URL=server.url) as screen:
        screen.expect("not the store of this folder")
        leave(screen)
    with served(there) as server, terminal("chat", folder=there, HOLDFAST_URL=server.url) as screen:
        screen.prompt()
        assert "not the store" not in screen.display()
        leave(screen)


def test_a_demo_session_is_taken_over_and_the_chat_tells_so(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("async def agent(run):\n    yield 'mine here'\n")
    server = start(tmp_path)
    assert run("send", "count a", "--wait", "60", folder=tmp_path, HOLDFAST_URL=server.url).returncode == 0
    assert server.end() == 0
    with served(tmp_path, "mine:agent") as again, terminal("chat", folder=tmp_path, HOLDFAST_URL=again.url) as screen:
        screen.expect("the demo agent is gone; 'agent' answers in this session now")
        screen.type("hello\r")
        screen.expect("mine here")
        leave(screen)


def test_a_terminal_without_cursor_control_gets_no_escapes(server: Served) -> None:
    with terminal("chat", "-s", "dumb", folder=server.folder, HOLDFAST_URL=server.url, TERM="dumb") as screen:
        screen.expect("> ")
        screen.type("count one two\n")
        screen.expect("✓ count_words")
        screen.expect("2 words.")
        screen.expect("> ")
        screen.type("exit\n")
        screen.expect("bye")
        assert screen.end() == 0
    assert b"\x1b" not in screen.raw


def test_without_cursor_control_no_prompt_stands_between_the_parts_of_an_answer(server: Served) -> None:
    with terminal("chat", "-s", "order", folder=server.folder, HOLDFAST_URL=server.url, TERM="dumb") as screen:
        screen.expect("> ")
        screen.type("/queue steps 3\n")
        screen.expect("/queue steps 3")
        answer = screen.expect("> ")
        assert "3" in answer and len(answer.split()) > 3, "the prompt comes after the whole answer"
        screen.type("exit\n")
        screen.expect("bye")
        assert screen.end() == 0


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_other_encodings_show_what_they_can(server: Served, encoding: str) -> None:
    here = {"HOLDFAST_URL": server.url, "PYTHONIOENCODING": encoding}
    with terminal("chat", "-s", f"enc-{encoding}", folder=server.folder, **here) as screen:
        screen.prompt()
        screen.type("parallel 3\r")
        screen.expect("ok task 0.5")
        screen.expect("All are done")
        screen.prompt()
        leave(screen)
    assert b"Traceback" not in screen.raw


def test_a_signal_interrupts_as_the_key_does_and_the_terminal_is_left_as_it_was(server: Served) -> None:
    with terminal("chat", "-s", "signal", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.prompt()
        screen.type("stream 100000\r")
        screen.until(shows("word3"))
        os.kill(screen.pid, signal.SIGINT)
        screen.expect("interrupted: user, Ctrl-C")
        leave(screen)
    assert screen.raw.rstrip().endswith(b"\x1b[?2004l"), "pastes are not bracketed any more"


def test_commands_are_found_by_name_and_alias_and_typing_errors_are_answered() -> None:
    found = command_of("/queue first\nsecond")
    assert found is not None and found[1] == "first\nsecond"
    assert command_of("/h") == (COMMANDS["help"], "")
    assert command_of("//help") is command_of("text") is None
    with pytest.raises(InvalidRequest) as raised:
        command_of("/interupt")
    assert "did you mean /interrupt?" in raised.value.hint
    with pytest.raises(InvalidRequest):
        command_of("/")
    assert [spoken_command(word) for word in ("exit", "QUIT", "?", "exit now")] == [
        "/quit",
        "/quit",
        "/help",
        "exit now",
    ]
    assert [unescaped(line) for line in ("//exit", "//?", "//help me", "text")] == ["exit", "?", "/help me", "text"]


def test_completions_fit_what_is_typed() -> None:
    assert ("/compact", COMMANDS["compact"].doc) in completions("/co", [])
    assert completions("/agent s", ["first", "second"]) == [("second", "")]
    assert completions("co", []) == completions("/queue co", []) == []


def test_a_user_without_a_home_has_a_history_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", dict[int, object]().__getitem__)  # as for a user of a container without a name
    assert history_path({}) is None
    assert isinstance(open_history(None), InMemoryHistory)


def test_a_history_keeps_its_newest_entries_and_no_huge_ones(tmp_path: Path) -> None:
    path = history_path({"XDG_STATE_HOME": str(tmp_path)})
    assert path is not None
    assert history_path({"XDG_STATE_HOME": "relative"}) == history_path({})
    history = open_history(path)
    history.append_string("x" * 20_000)
    for number in range(1200):
        history.append_string(f"entry {number}\n" + "y" * 1000)
    assert path.stat().st_size > 1 << 20
    again = open_history(path)
    assert isinstance(again, ChatHistory)
    kept = list(again.load_history_strings())
    assert (len(kept), kept[0].split("\n")[0]) == (1000, "entry 1199")
    assert path.stat().st_size < 1.1 * (1 << 20)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
