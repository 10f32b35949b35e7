"""What a chat shows: text in lines that fit, Markdown, one line for each step and call, and marks for what failed."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Sequence

import pytest
from rich.cells import cell_len

from holdfast.cli.chat_text import LinePainter, TextFlow, fit_cells
from holdfast.cli.chat_view import PipedChatView, TerminalChatView
from holdfast.protocol.events import (
    ChildFinished,
    ChildStarted,
    Event,
    RunFinished,
    RunStarted,
    RunStopping,
    StepStarted,
    TextDelta,
    ToolFinished,
    ToolOutput,
    ToolStarted,
)
from holdfast.protocol.messages import Entry, Question
from holdfast.protocol.stopping import Cause

ANSWER = """\
# Result

It is **bold**, *slanted*, `code` and [a page](http://x.y/z).
* one
  with a second line
1. first
> quoted

| name | value |
|------|------:|
| a | 1 |
| bb \\| c | **22** |

```python
def f():

    return "a"
```
Done."""


def shown(text: str, *, columns: int = 80, styled: bool = False, markdown: bool = True, size: int = 7) -> list[str]:
    """The lines of a text that arrives in pieces."""
    flow = TextFlow(LinePainter(lambda: columns, styled=styled), markdown=markdown)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return [line for piece in pieces for line in flow.add(piece)] + flow.end()


def test_markdown_is_formatted_and_line_breaks_stay_as_they_were_written() -> None:
    assert shown(ANSWER) == [
        "Result",
        "",
        "It is bold, slanted, code and a page (http://x.y/z).",
        "• one",
        "  with a second line",
        "1. first",
        "│ quoted",
        "",
        "name   │ value",
        "───────┼──────",
        "a      │ 1",
        "bb | c │ 22",
        "",
        "```python",
        "def f():",
        "",
        '    return "a"',
        "```",
        "Done.",
    ]


def test_styles_end_on_the_line_on_which_they_begin() -> None:
    lines = shown(ANSWER, styled=True)
    assert any("\x1b[1m" in line for line in lines)
    for line in lines:
        codes = re.findall(r"\x1b\[([\d;]*)m", line)
        assert not codes or codes[-1] == "0", line


@pytest.mark.parametrize("size", [1, 7, 100_000])
@pytest.mark.parametrize("columns", [40, 80])
def test_how_text_is_cut_into_pieces_does_not_change_its_words(size: int, columns: int) -> None:
    text = "\n\n".join(f"{n} " + "several words of an answer, and 漢字 too, " * n for n in (1, 3, 20)) + "\n" + ANSWER
    lines = shown(text, columns=columns, size=size, markdown=False)
    assert " ".join(lines).split() == text.split()
    assert all(cell_len(line) < columns for line in lines)


def test_words_are_not_cut_and_wide_characters_take_two_cells() -> None:
    text = "word16 and other words that do not fit " * 3 + "\n" + "漢字" * 50 + "\n" + "x" * 100
    lines = shown(text, columns=40)
    assert all(cell_len(line) <= 39 for line in lines)
    assert {word for line in lines for word in line.split() if word.startswith("w")} == {"word16", "words"}
    assert sum(line.count("漢") for line in lines) == 50
    assert sum(line.count("x") for line in lines) == 100


def test_rows_of_a_list_with_two_columns_continue_in_their_column() -> None:
    text = "  steps <n>       n steps of half a second; kill -9 the server in the middle and start it again"
    assert shown(text, columns=50) == [
        "  steps <n>       n steps of half a second; kill",
        "                  -9 the server in the middle and",
        "                  start it again",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "2 * 3 * 4",
        "a_b_c",
        "*args, **kwargs",
        "x < y > z <b>",
        "| or",
        "5 ** 2",
        "a[0](x y)",
        "`",
        "- ",
        "#tag",
    ],
)
def test_text_that_only_looks_like_markdown_stays_as_it_is(text: str) -> None:
    assert shown(text) == [text.rstrip()]


def test_an_unclosed_block_is_shown_as_far_as_it_came() -> None:
    assert shown("```\nx = 1\n\ny") == ["```", "x = 1", "", "y"]
    assert shown("| a | b |\n") == ["| a | b |"]


def test_text_cannot_control_the_terminal() -> None:
    for markdown in (True, False):
        assert shown("a\x1b[2Jb\x07\x9b1m\n```\nx\x1bc\n```", markdown=markdown) == ["a·[2Jb··1m", "```", "x·c", "```"]


def test_a_long_line_is_shown_in_parts_and_stays_one_paragraph() -> None:
    flow = TextFlow(LinePainter(lambda: 40, styled=False))
    lines: list[str] = []
    for number in range(200):
        lines += flow.add(f"word{number} ")
        assert len(flow.live()) <= 6
    lines += flow.end()
    assert " ".join(lines).split() == [f"word{number}" for number in range(200)]
    assert all(len(line) > 31 for line in lines[:-1]), "each row is filled"


def test_a_megabyte_on_one_line_does_not_take_for_ever() -> None:
    lines = shown("word " * 50_000, size=100_000)
    assert sum(map(len, lines)) > 200_000


def test_texts_are_cut_by_cells() -> None:
    assert fit_cells("漢字漢字", 5) == "漢字…"
    assert fit_cells("short", 5) == "short"


class Screen:
    """A screen that keeps what it was given."""

    def __init__(self, columns: int = 60) -> None:
        self.columns = columns
        self.lines: list[str] = []
        self.live: Sequence[str] = ()
        self.sign = ""

    def write(self, lines: Iterable[str]) -> None:
        self.lines += lines

    def show_live(self, lines: Sequence[str]) -> None:
        self.live = tuple(lines)

    def ask(self, sign: str) -> None:
        self.sign = sign

    def heard(self, lines: Iterable[str]) -> None:
        self.lines += lines

    def clear(self) -> None:
        self.lines.clear()


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "utf-8"))
    return Screen()


def call(name: str, *, at: float = 1.0, run_id: str = "r", **arguments: object) -> ToolStarted:
    return ToolStarted(at=at, run_id=run_id, call_id=name, name=name, arguments=arguments)


def view_of(screen: Screen, *events: Event) -> TerminalChatView:
    view = TerminalChatView(screen)
    for event in events:
        view.show(event, ours=False)
    return view


def test_a_call_is_one_line_that_appears_while_it_runs_and_stays_when_it_ends(screen: Screen) -> None:
    view = view_of(
        screen,
        RunStarted(at=1.0, run_id="r", agent="a", messages=()),
        TextDelta(at=1.0, run_id="r", text="I look."),
        call("terminal", command="ls -p"),
        ToolOutput(at=1.0, run_id="r", call_id="terminal", text="a\nb\n"),
    )
    assert screen.lines == ["I look."]
    assert list(screen.live) == ["  … terminal ls -p", "      a", "      b"]
    view.show(
        ToolFinished(at=1.2, run_id="r", call_id="terminal", status="ok", result="a\nb\n[exit code 0]"), ours=False
    )
    assert screen.lines == ["I look.", "  ✓ terminal ls -p  0.2 s"]
    assert list(screen.live) == ["  …"]
    assert view.show_call(1)
    assert "  a" in screen.lines and "  command: ls -p" in screen.lines
    assert not view.show_call(2)


def test_a_call_that_was_interrupted_without_output_says_so(screen: Screen) -> None:
    view = view_of(
        screen,
        call("terminal", command="ls -p"),
        ToolFinished(at=1.0, run_id="r", call_id="terminal", status="interrupted"),
    )
    assert view.show_call(1)
    assert screen.lines[-3:] == ["arguments", "  command: ls -p", "no output"]


@pytest.mark.parametrize(
    ("finished", "line"),
    [
        ({"status": "ok", "failed": True, "result": "Traceback\n[exit code 1]"}, "  ✗ python  exit code 1"),
        ({"status": "ok", "failed": True, "result": "no mark"}, "  ✗ python  failed"),
        ({"status": "error", "error": "ValueError: no"}, "  ✗ python  ValueError: no"),
        ({"status": "interrupted"}, "  ✗ python  interrupted"),
    ],
)
def test_a_call_that_failed_looks_failed(screen: Screen, finished: dict[str, object], line: str) -> None:
    ended = ToolFinished(at=1.0, run_id="r", call_id="python", **finished)  # type: ignore[arg-type]
    view_of(screen, call("python"), ended)
    assert screen.lines == [line]


def test_a_named_step_is_one_line_with_the_calls_that_went_well(screen: Screen) -> None:
    view = view_of(
        screen,
        StepStarted(at=1.0, run_id="r", step=1, label="step 1 of 2"),
        call("nap"),
    )
    assert list(screen.live) == ["  … step 1 of 2"]
    view.show(ToolFinished(at=1.5, run_id="r", call_id="nap", status="ok"), ours=False)
    view.show(TextDelta(at=1.5, run_id="r", text="Done.\n"), ours=False)
    view.show(StepStarted(at=1.5, run_id="r", step=2, label="step 2 of 2"), ours=False)
    view.show(call("other"), ours=False)
    view.show(ToolFinished(at=2.0, run_id="r", call_id="other", status="error", error="no"), ours=False)
    view.show(RunFinished(at=2.0, run_id="r", status="failed", error="ValueError: no"), ours=False)
    assert screen.lines[:5] == [
        "  ✓ step 1 of 2",
        "Done.",
        "  ✗ other  no  1.0 s",
        "  ✗ step 2 of 2",
        "  ✗ failed: ValueError: no",
    ]
    assert list(screen.live) == []


def test_children_that_speak_at_once_are_not_mixed(screen: Screen) -> None:
    view = view_of(
        screen,
        ChildStarted(at=1.0, run_id="r", child_id="r.1", agent="a", text="one"),
        ChildStarted(at=1.0, run_id="r", child_id="r.2", agent="b", text="two"),
    )
    for text in ("I am ", "the same\n"):
        for child in ("r.1", "r.2"):
            view.show(TextDelta(at=1.0, run_id=child, text=text), ours=False)
    view.show(ChildFinished(at=1.0, run_id="r", child_id="r.1", status="completed"), ours=False)
    view.show(ChildFinished(at=3.0, run_id="r", child_id="r.2", status="failed", error="no"), ours=False)
    assert screen.lines == ["I am the same", "I am the same", "  ✓ child a: one", "  ✗ child b: two  failed: no  2.0 s"]


def test_lines_of_calls_fit_the_terminal(screen: Screen) -> None:
    view_of(
        screen,
        call("terminal", command="echo 漢字 " * 40),
        ToolFinished(at=1.0, run_id="r", call_id="terminal", status="ok"),
    )
    assert [cell_len(line) <= 59 for line in screen.lines] == [True]


def test_ascii_terminals_get_words_for_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "latin-1", errors="replace"))
    screen = Screen()
    view = view_of(
        screen,
        TextDelta(at=1.0, run_id="r", text="* one\n"),
        call("a"),
        ToolFinished(at=1.0, run_id="r", call_id="a", status="ok"),
        call("b"),
    )
    view.show(ToolFinished(at=1.0, run_id="r", call_id="b", status="error", error="no"), ours=False)
    assert screen.lines == ["* one", "  ok a", "  FAILED b  no"]


def test_earlier_entries_have_a_mark_if_they_did_not_complete(screen: Screen) -> None:
    view = TerminalChatView(screen)
    view.entry(Entry(n=1, run_id="r", role="user", content="hi\nyou", ended_by="failure"))
    view.entry(Entry(n=2, run_id="r", role="user", content="again", ended_by="user"))
    view.entry(Entry(n=3, run_id="r", role="assistant", content="**half**", partial=True))
    assert screen.lines == [
        "> hi",
        "  you",
        "  ✗ failed with an error",
        "> again",
        "[interrupted by the user]",
        "half",
        "[interrupted]",
    ]


def test_a_stop_that_was_asked_for_here_is_not_reported_as_news(screen: Screen) -> None:
    view = TerminalChatView(screen)
    stopping = RunStopping(at=1.0, run_id="r", cause=Cause(kind="user", reason="Ctrl-C"))
    view.show(stopping, ours=True)
    assert screen.lines == []
    view.show(stopping, ours=False)
    assert screen.lines == ["[stopping: user, Ctrl-C]"]


def test_a_call_to_approve_is_shown_whole(screen: Screen) -> None:
    view = TerminalChatView(screen)
    command = "rm -rf build; " + "echo word; " * 100 + "curl evil"
    view.question(Question(question_id="q", kind="approval", tool="terminal", arguments={"command": command}))
    whole = " ".join(line.strip() for line in screen.lines)
    assert command in whole
    assert whole.startswith("Allow terminal") and whole.endswith('?  y = yes, n = no, "n because …"')
    assert screen.sign == "y/n> "


def test_a_pipe_gets_the_answer_and_stderr_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    view = PipedChatView()
    view.greet("s", "http://x", None)
    view.entry(Entry(n=1, run_id="r", role="assistant", content="old"))
    for event in (
        TextDelta(at=1.0, run_id="r", text="\n**Hello**"),
        TextDelta(at=1.0, run_id="r.1", text="of a child"),
        call("ls"),
        ToolFinished(at=1.0, run_id="r", call_id="ls", status="ok", failed=True, result="[exit code 2]"),
        RunFinished(at=1.0, run_id="r", status="failed", error="no"),
    ):
        view.show(event, ours=True)
    out, err = capsys.readouterr()
    assert out == "**Hello**\n"
    assert err == "[ls: exit code 2]\n[failed: no]\n"


def test_why_a_run_failed_is_shown_whole_and_what_was_typed_keeps_its_lines(screen: Screen) -> None:
    error = "ValueError: " + "many words about what went wrong " * 5
    view = view_of(screen, RunFinished(at=1.0, run_id="r", status="failed", error=error))
    view.prompt("y/n> ")
    view.heard("no " * 30 + "\nbecause")
    assert " ".join(line.strip() for line in screen.lines if "no" not in line).split()[2:-1] == error.split()
    assert all(cell_len(line) < 60 for line in screen.lines)
    assert [line[:5] for line in screen.lines if "no" in line] == ["y/n> ", "     "]
    assert screen.lines[-1] == "     because"


def test_another_session_begins_without_what_ran_in_the_one_before(screen: Screen) -> None:
    view = view_of(
        screen,
        RunStarted(at=1.0, run_id="r", agent="a", messages=()),
        StepStarted(at=1.0, run_id="r", step=1, label="a step"),
        TextDelta(at=1.0, run_id="r.1", text="half a sen"),
    )
    assert list(screen.live) == ["half a sen", "  … a step"]
    view.greet("other", "http://x", None)
    assert (screen.lines[0], list(screen.live)) == ("half a sen", [])
