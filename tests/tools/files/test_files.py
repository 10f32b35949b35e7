"""The file tools: exact, bounded, and stopped before a file is touched or not at all."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import Host
from holdfast.tools import Files, Workspace
from tests.tools.using import Bench, on_host, use


def do(root: Path, *calls: tuple[str, dict[str, Any]], files: Files | None = None) -> list[str]:
    """The result of each call."""
    results: list[str] = []

    async def agent(bench: Bench) -> None:
        for name, arguments in calls:
            results.append(await bench(name, **arguments))

    use(files or Files(Workspace(root, protect_existing=False)), agent)
    return results


def reading(path: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "read_file", {"path": path, **more}


def editing(path: str, old: str, new: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "edit_file", {"path": path, "old": old, "new": new, **more}


def test_a_file_is_read_whole_or_by_lines(tmp_path: Path) -> None:
    (tmp_path / "ten").write_text("".join(f"line {n}\n" for n in range(1, 11)))
    (tmp_path / "empty").touch()
    (tmp_path / "no-end").write_text("a\nb")
    assert do(
        tmp_path,
        reading("ten", lines=100),
        reading("ten", lines=2),
        reading("ten", first_line=9, lines=2),
        reading("ten", first_line=10),
        reading("ten", first_line=11),
        reading("ten", first_line=-5, lines=-5),
        reading("empty"),
        reading("no-end"),
        reading("no-end", first_line=2),
    ) == [
        "".join(f"line {n}\n" for n in range(1, 11)),
        "line 1\nline 2\n[lines 1 to 2 of ten; more follows from line 3]",
        "line 9\nline 10\n[lines 9 to 10 of ten, the end]",
        "line 10\n[lines 10 to 10 of ten, the end]",
        "[ten has 10 lines]",
        "line 1\n[lines 1 to 1 of ten; more follows from line 2]",
        "[empty is empty]",
        "a\nb",
        "b\n[lines 2 to 2 of no-end, the end]",
    ]


def test_huge_files_and_lines_are_read_in_parts(tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.write(b"first\n")
        file.write(b"x" * 3_000_000 + b"\nthird\n")
        file.write(b"y" * 200_000)
    whole, second, later = do(
        tmp_path, reading("sparse"), reading("sparse", first_line=2, lines=1), reading("sparse", first_line=3, lines=1)
    )
    assert whole.startswith("first\nxxx") and len(whole) < 60_000
    assert "[… 2,996,001 bytes of this line omitted]" in second
    assert later == "third\n[lines 3 to 3 of sparse; more follows from line 4]"


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    told = do(tmp_path, *[reading(name) for name in ("binary", "latin", "pipe", "device", "missing", ".", "..")])
    assert "is a binary file of 6 bytes" in told[0]
    assert told[1] == "caf\ufffd\n"
    assert "is a named pipe, not a file" in told[2]
    assert "outside the workspace" in told[3] and "outside the workspace" in told[6]
    assert told[4] == "!ToolFailed: no such file: missing"
    assert "is a folder, not a file" in told[5]


def test_a_file_is_written_and_edited_exactly(tmp_path: Path) -> None:
    (tmp_path / "twice").write_text("a\nb\na\n")
    (tmp_path / "crlf").write_bytes(b"one\r\ntwo\r\n")
    (tmp_path / "binary").write_bytes(b"a\0b")
    assert do(
        tmp_path,
        ("write_file", {"path": "new/file", "content": "héllo\n"}),
        editing("new/file", "hé", "je"),
        editing("twice", "a\n", "c\n"),
        editing("twice", "a\n", "c\n", every=True),
        editing("twice", "a\n", "d\n"),
        editing("crlf", "one\ntwo", "1\n2"),
        editing("binary", "a", "b"),
        editing("twice", "", "b"),
        ("write_file", {"path": "bad", "content": "\ud800"}),
    ) == [
        "new/file now has 7 bytes",
        "1 replacement in new/file, line 1",
        "!ToolFailed: twice contains this text 2 times, lines 1, 3; include more context, or set every",
        "2 replacements in twice, lines 1, 3",
        "!ToolFailed: twice does not contain this text; read the file and copy the text exactly",
        "1 replacement in crlf, line 1",
        "!ToolFailed: binary is a binary file; use a program to change it",
        "!ToolFailed: old is empty; use write_file to write a whole file",
        "!ToolFailed: the text contains lone surrogates, which UTF-8 cannot encode",
    ]
    assert (tmp_path / "new" / "file").read_text() == "jello\n"
    assert (tmp_path / "twice").read_text() == "c\nb\nc\n"
    assert (tmp_path / "crlf").read_bytes() == b"1\r\n2\r\n"


def test_edits_at_the_same_time_are_all_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("".join(f"<{n}>\n" for n in range(4)))

    async def agent(bench: Bench) -> None:
        def editor(number: int) -> Callable[[], Awaitable[None]]:
            async def edit() -> None:
                told = await bench("edit_file", path="file", old=f"<{number}>", new=f"done {number}")
                assert told.startswith("1 replacement"), told

            return edit

        await bench.run.parallel(*[editor(number) for number in range(4)])

    for _ in range(10):
        (tmp_path / "file").write_text("".join(f"<{n}>\n" for n in range(4)))
        use(Files(Workspace(tmp_path, protect_existing=False)), agent)
        assert (tmp_path / "file").read_text() == "".join(f"done {n}\n" for n in range(4))


def test_folders_are_listed_within_bounds(tmp_path: Path) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "b" / "one.py").write_text("12345")
    (tmp_path / "b" / "c" / "two.py").touch()
    (tmp_path / "a.txt").touch()
    (tmp_path / "link").symlink_to("b")
    (tmp_path / "many").mkdir()
    for number in range(600):
        (tmp_path / "many" / f"{number:03}").touch()
    told = do(
        tmp_path,
        ("list_files", {}),
        ("list_files", {"pattern": "*.py", "recursive": True}),
        ("list_files", {"path": "many"}),
        ("list_files", {"path": "b/c", "pattern": "*.txt"}),
        ("list_files", {"path": "missing"}),
    )
    assert told[0] == "a.txt  0 bytes\nb/\nlink -> b\nmany/"
    assert told[1] == "b/c/two.py  0 bytes\nb/one.py  5 bytes"
    assert told[2].count("\n") == 500 and told[2].endswith(
        "[more than 500 entries; choose a subfolder or a narrower pattern]"
    )
    assert told[3:] == ["[no matches]", "!ToolFailed: no such file or folder: missing"]


def test_a_folder_of_too_many_names_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.tools.files.entries._NAMES_LIMIT", 10)
    for number in range(11):
        (tmp_path / str(number)).touch()
    assert do(tmp_path, ("list_files", {})) == ["!ToolFailed: ./ has more than 10 entries; use a program to list it"]
    (tmp_path / "0").unlink()
    assert do(tmp_path, ("list_files", {}))[0].count("\n") == 9


def test_files_are_searched_within_bounds(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "one.py").write_text("def Alpha():\n    pass\n")
    (tmp_path / "sub" / "two.txt").write_text("alpha beta\n" + "x" * 20_000 + "\n")
    (tmp_path / "sub" / "binary").write_bytes(b"alpha\0")
    (tmp_path / "many").write_text("hit\n" * 1000)
    (tmp_path / "outside").symlink_to("/etc")
    os.mkfifo(tmp_path / "pipe")
    told = do(
        tmp_path,
        ("search_files", {"pattern": "alpha"}),
        ("search_files", {"pattern": "^def alpha", "files": "*.py", "ignore_case": True}),
        ("search_files", {"pattern": "hit"}),
        ("search_files", {"pattern": "(unclosed"}),
        ("search_files", {"pattern": "x", "path": "outside"}),
        ("search_files", {"pattern": "pass", "path": "one.py"}),
    )
    assert told[0].startswith("sub/two.txt:1: alpha beta\n[1 line found; files searched: 3; skipped (binary")
    assert told[1] == "one.py:1: def Alpha():\n[1 line found; files searched: 1]"
    assert told[2].count("many:") == 200 and "the search ended early: there may be more" in told[2]
    assert told[3].startswith("!ToolFailed: invalid regular expression: missing )")
    assert "outside the workspace" in told[4]
    assert told[5].startswith("one.py:2: pass\n")


def test_a_pattern_that_never_comes_back_is_killed_and_the_host_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.tools.files.toolset._SEARCH_S", 0.5)
    monkeypatch.setattr("holdfast.tools.files.toolset._SEARCH_MARGIN_S", 0.5)
    (tmp_path / "line").write_text("a" * 60 + "b\n")
    beats: list[int] = []

    async def agent(bench: Bench) -> None:
        async def beat() -> None:
            while not told:
                beats.append(1)
                await asyncio.sleep(0.01)

        told: list[str] = []
        bench.run.spawn(beat)
        told.append(await bench("search_files", pattern="(a+)+$"))
        assert "was killed; the pattern takes too long" in told[0]

    use(Files(Workspace(tmp_path, protect_existing=False)), agent)
    assert len(beats) > 10


def test_a_run_that_is_stopped_before_the_rename_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread does not listen and is abandoned; when it goes on afterwards, its file does not appear."""
    (tmp_path / "file").write_text("before")
    writing, go_on, over = threading.Event(), threading.Event(), threading.Event()
    replace = Workspace.replace

    def slow(self: Workspace, path: str, data: bytes, **more: Any) -> str:
        check = more.pop("check")

        def stuck() -> None:
            writing.set()
            go_on.wait(100)
            check()

        try:
            return replace(self, path, data, check=stuck, **more)
        finally:
            over.set()

    monkeypatch.setattr(Workspace, "replace", slow)

    async def agent(bench: Bench) -> None:
        await bench("write_file", path="file", content="after")

    async def scenario(host: Host) -> None:
        session = host.session("s")
        await session.send("go")
        while not writing.is_set():
            await asyncio.sleep(0.005)
        receipt = await session.interrupt("enough", grace_s=0.1)
        assert receipt.outcome == "quarantined"
        go_on.set()
        while not over.is_set():
            await asyncio.sleep(0.005)

    files = Files(Workspace(tmp_path, protect_existing=False))
    on_host([files], agent, scenario, abandon_after_s=0.5)
    assert (tmp_path / "file").read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]
