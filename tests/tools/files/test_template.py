"""A new workspace begins with the files of its template, and no file is ever overwritten or brought back."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import Host, Run, Toolset, assistant
from holdfast.errors import ConfigurationError
from holdfast.tools import Workspace
from holdfast.tools.programs.processes import Processes
from holdfast.tools.programs.python import Python
from holdfast.tools.programs.terminal import Terminal
from tests.tools.using import Bench, on_host, use

Files = dict[str, str]


@pytest.fixture
def template(tmp_path: Path) -> Path:
    folder = tmp_path / "template"
    (folder / "notes").mkdir(parents=True)
    (folder / "README.md").write_text("# Sample\n")
    (folder / "notes" / "todo.txt").write_text("nothing\n")
    (folder / "run.sh").write_text("echo hello\n")
    (folder / "run.sh").chmod(0o755)
    folder.chmod(0o755)
    return folder


def files_in(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


SAMPLE = {"README.md": "# Sample\n", "notes/todo.txt": "nothing\n", "run.sh": "echo hello\n"}


def in_runs(use: Callable[[Run], Any], *sessions: str) -> list[Any]:
    """What a function returns in one run after the other, each in the session of that name."""
    found: list[Any] = []

    async def agent(bench: Any) -> None:
        found.append(use(bench.run))

    async def scenario(host: Host) -> None:
        for session in sessions:
            await host.session(session).ask("go")

    on_host([], agent, scenario)
    return found


def test_each_session_begins_with_a_copy_in_its_private_folder(tmp_path: Path, template: Path) -> None:
    workspace = Workspace(tmp_path / "work", per_session=True, template=template)
    roots = in_runs(lambda run: workspace.of(run).root, "a", "b")
    assert len(set(roots)) == 2
    for root in roots:
        assert files_in(root) == SAMPLE
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        assert stat.S_IMODE((root / "run.sh").stat().st_mode) & stat.S_IXUSR


def test_what_a_session_changes_or_deletes_stays_so(tmp_path: Path, template: Path) -> None:
    workspace = Workspace(tmp_path / "work", per_session=True, template=template)

    def use(run: Run) -> Files:
        root = workspace.of(run).root
        before = files_in(root)
        for path in root.rglob("*.*"):
            path.unlink()
        assert files_in(workspace.of(run).root) == {}
        return before

    assert in_runs(use, "a", "a") == [SAMPLE, {}]


def test_an_empty_root_is_filled_when_it_is_first_used_and_then_no_more(tmp_path: Path, template: Path) -> None:
    workspace = Workspace(tmp_path / "work", template=template)
    assert files_in(workspace.root) == {}

    def use(run: Run) -> Files:
        before = files_in(workspace.of(run).root)
        (workspace.root / "README.md").unlink()
        for path in (*workspace.root.rglob("*.txt"), *workspace.root.rglob("*.sh")):
            path.unlink()
        (workspace.root / "notes").rmdir()
        assert files_in(workspace.of(run).root) == {}
        return before

    assert in_runs(use, "a") == [SAMPLE]


def test_a_root_with_a_file_of_ones_own_stays_as_it_is(tmp_path: Path, template: Path) -> None:
    workspace = Workspace(tmp_path / "work", template=template)
    (workspace.root / "mine").write_text("mine")
    assert in_runs(lambda run: files_in(workspace.of(run).root), "a") == [{"mine": "mine"}]


@pytest.mark.parametrize("per_session", [True, False])
def test_calls_that_begin_together_all_find_the_whole_copy(tmp_path: Path, template: Path, per_session: bool) -> None:
    for number in range(200):
        (template / f"{number}.txt").write_text("x")
    workspace = Workspace(tmp_path / "work", per_session=per_session, template=template)

    def use(run: Run) -> list[int]:
        counts: list[int] = []
        together = threading.Barrier(8)

        def call() -> None:
            together.wait()
            counts.append(len(files_in(workspace.of(run).root)))

        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return counts

    assert in_runs(use, "a") == [[203] * 8]


def test_a_template_that_is_no_folder_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"template .*missing. is not a folder"):
        Workspace(tmp_path / "work", template=tmp_path / "missing")
    assert not (tmp_path / "work").exists()


def test_the_assistant_of_the_demo_model_reports_on_a_sample_and_no_other_gets_one(tmp_path: Path) -> None:
    async def report(agent: Any) -> str:
        async with Host(agent, store="memory://") as host:
            return await host.session("s").ask("report")

    found = asyncio.run(report(assistant("scripted:demo", workspace=tmp_path / "work", approve="none")))
    for part in ("README.md", "greet.sh", "sales.csv", "notes/", ".csv: 1 file, ", "# Corner shop"):
        assert part in found
    assert "1 files" not in found
    assistant("scripted:hello", workspace=tmp_path / "other")
    assert files_in(tmp_path / "other") == {}


def test_a_copy_that_fails_leaves_nothing_and_is_tried_again(tmp_path: Path, template: Path) -> None:
    os.mkfifo(template / "pipe")
    for root, per_session in (("own", True), ("root", False)):
        workspace = Workspace(tmp_path / root, per_session=per_session, template=template)

        def refused(run: Run, workspace: Workspace = workspace) -> None:
            for _ in range(2):
                with pytest.raises(ConfigurationError):
                    workspace.of(run)

        in_runs(refused, "a")
        assert [path for path in (tmp_path / root).rglob("*") if not path.is_dir()] == []
    (template / "pipe").unlink()
    (filled,) = in_runs(lambda run: list(workspace.of(run).root.iterdir()), "a")
    assert filled


def test_files_of_the_host_are_not_copied_and_links_stay_links(tmp_path: Path, template: Path) -> None:
    (tmp_path / "secret").write_text("s")
    (template / ".env").write_text("KEY=1")
    (template / ".holdfast").mkdir()
    (template / "link").symlink_to(tmp_path / "secret")
    workspace = Workspace(tmp_path / "work", per_session=True, template=template)
    (own,) = in_runs(lambda run: workspace.of(run).root, "a")
    assert not (own / ".env").exists()
    assert not (own / ".holdfast").exists()
    assert (own / "link").is_symlink()
    assert stat.S_IMODE(own.stat().st_mode) == 0o700


def test_a_template_that_contains_the_workspaces_or_lies_in_them_is_refused(tmp_path: Path) -> None:
    (tmp_path / "work" / "inner").mkdir(parents=True)
    for template in (tmp_path, tmp_path / "work", tmp_path / "work" / "inner"):
        with pytest.raises(ConfigurationError, match="workspace template"):
            Workspace(tmp_path / "work", template=template)


@pytest.mark.parametrize("name", ["terminal", "start_process", "python"])
def test_programs_copy_the_template_on_a_thread(
    tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    workspace = Workspace(tmp_path / "work", per_session=True, template=template)
    toolset: Toolset = {"terminal": Terminal, "start_process": Processes, "python": Python}[name](workspace)
    make = Workspace._make_own
    on_loop: list[bool] = []

    def observed(self: Workspace, folder: Path) -> None:
        on_loop.append(threading.current_thread() is threading.main_thread())
        make(self, folder)

    monkeypatch.setattr(Workspace, "_make_own", observed)
    arguments: dict[str, Any] = {"script": "print(1)"} if name == "python" else {"command": ["true"]}

    async def agent(bench: Bench) -> None:
        await bench(name, **arguments)

    use(toolset, agent)
    assert on_loop == [False]
