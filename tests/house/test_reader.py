"""README and tutorial are typed as a reader types them, in two terminals, in a copy of the repository."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from holdfast.cli.receipt_text import counts_in_words
from holdfast.proof.storm.server import free_port
from holdfast.protocol.stopping import StopCounts
from tests.house.page_reader import ROOT, Done, reader, steps_of

README = ROOT / "README.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
MEASURED = ROOT / "docs" / "measured" / "conformance.md"


def shown_by(done: list[Done], command: str, nth: int = 0) -> str:
    """What a block showed that has this command."""
    return [block.shown for block in done if command in block.step.text][nth]


@pytest.mark.timeout(300)
def test_the_readme_can_be_typed_as_it_is_written(tmp_path: Path) -> None:
    with reader(tmp_path, free_port()) as person:
        done = person.follow(README)
        assert "GOOD MORNING" in shown_by(done, "ask -s hello")
        person.terminals[1].press("C")
        person.terminals[1].expect("reader$ ")
        everything = person.terminals[1].text + person.terminals[2].text
    assert [word for word in ("Traceback", "command not found", "address already in use") if word in everything] == []


@pytest.mark.timeout(300)
def test_the_tutorial_can_be_typed_as_it_is_written(tmp_path: Path) -> None:
    with reader(tmp_path, free_port()) as person:
        done = person.follow(TUTORIAL)
        everything = person.terminals[1].text + person.terminals[2].text
    assert [word for word in ("Traceback", "command not found", "address already in use") if word in everything] == []
    receipts = re.findall(r"^(started|queued): message", shown_by(done, "send --session carol"), re.MULTILINE)
    assert receipts == ["started", "queued"]
    conversation = shown_by(done, "export --session carol")
    order = (
        "stream 40",
        "word1 word2",
        "word40",
        "count these words\n",
        "2 words",
        "count these words, too",
        "3 words",
    )
    assert [conversation.find(text) for text in order] == sorted(conversation.find(text) for text in order)
    assert "gone after" in shown_by(done, "interrupt --session dave")
    assert "stubborn" not in shown_by(done, "holdfast tree", 1)
    assert "of them were not done again" in shown_by(done, "export --session erin")
    assert "ten: 3" in shown_by(done, "export --session bob")
    again = re.split(r"recovered: 1 run resumed", person.terminals[1].text)[-1]
    assert "looking up ten" in again and "looking up one" not in again


def test_a_page_that_is_typed_names_its_files_and_terminals() -> None:
    for page in (README, TUTORIAL):
        assert {step.terminal for step in steps_of(page)} == {1, 2}
        assert "not run" not in page.read_text()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<!-- serve: hello -->\n```sh\nholdfast ask hi\n```\n", "a reader sees no <!-- serve: hello -->"),
        ("Save this as `a.py`:\n\n<!-- file: b.py -->\n```python\n1\n```\n", "a reader sees no <!-- file: b.py -->"),
        ("An agent:\n\n```python\n1\n```\n", "saved under no name"),
    ],
)
def test_what_only_a_comment_says_is_found(tmp_path: Path, text: str, complaint: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(AssertionError, match=re.escape(complaint)):
        steps_of(page)


def test_a_reader_does_what_a_page_says(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "In terminal 2, type `a`, wait for `b`, and press Ctrl-C in terminal 1. Save this as `c`:\n\n```text\nd\n```\n"
        "\n```sh\ne\n```\n"
    )
    assert [(step.kind, step.text.strip(), step.terminal, step.file) for step in steps_of(page)] == [
        ("type", "a", 2, ""),
        ("wait", "b", 2, ""),
        ("press", "C", 1, ""),
        ("save", "d", 1, "c"),
        ("run", "e", 1, ""),
    ]


def test_the_index_of_the_examples_lists_each_program() -> None:
    folder = ROOT / "examples"
    listed = set(re.findall(r"\]\(([\w/]+\.py)\)", (folder / "README.md").read_text()))
    assert listed == {str(path.relative_to(folder)) for path in folder.rglob("*.py") if path.stem != "__init__"}


def test_the_picture_is_of_the_program_as_it_is() -> None:
    picture = (ROOT / "docs" / "_static" / "cast.svg").read_text("utf-8")
    shown = html.unescape(" ".join(re.findall(r"<text[^>]*>(.*?)</text>", picture))).replace("\xa0", " ")
    assert "http" not in re.sub(r'xmlns="[^"]*"|<!--.*?-->', "", picture).replace("http://127.0.0.1:8420", "")
    receipt = re.search(r"gone after \d+ ms: (2 tasks, 1 program \((\d+) processes\))", shown)
    assert receipt and receipt[1] == counts_in_words(StopCounts(tasks=2, programs=1, processes=int(receipt[2])))
    for said in (
        "$ make serve",
        "A tree of stubborn processes is up",
        "Killed",
        "recovered: 1 run resumed",
        "reconnected",
        "were not done again",
    ):
        assert said in shown, said


def test_the_readme_fits_on_a_screen() -> None:
    assert len(README.read_text().splitlines()) <= 60


@pytest.mark.parametrize(
    ("promise", "probe"),
    [
        ("Cancel a tool", "process tree ended"),
        ("A sync tool", "sync tool ended by force"),
        ("After `kill -9`", "messages survive kill -9"),
    ],
)
def test_the_promises_of_the_readme_are_those_that_were_measured(promise: str, probe: str) -> None:
    claim = re.search(
        rf"^\| {re.escape(promise)}[^|]*\| kept: ([^|]*) \| (broken|not offered)", README.read_text(), re.M
    )
    assert claim
    first, *others = re.findall(rf"^\| {re.escape(probe)} \| \**([a-z ]+)\** \| (.*) \|$", MEASURED.read_text(), re.M)
    assert (first[0], claim[1] in first[1]) == ("kept", True), first
    assert [verdict for verdict, _ in others] == [claim[2]] * 4
