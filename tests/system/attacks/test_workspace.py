"""No agent works where it could read or change what decides who the host is: settings, store, code, environment."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from holdfast import Agent, Host
from holdfast.agents.model import Model
from holdfast.agents.scripted import ScriptedModel
from holdfast.errors import ConfigurationError, ToolFailed
from holdfast.protocol.model import CallPart
from holdfast.tools import Files, Processes, Python, Terminal, Web, Workspace
from holdfast.tools.sandbox.system_paths import interpreter_paths
from tests.cli.processes import run, served
from tests.tools.sandbox.walled import reason_against

WITHOUT = reason_against(("namespaces",))

confines = pytest.mark.skipif(WITHOUT is not None, reason=f"scripts are not confined here: {WITHOUT}")


def says(*steps: CallPart | str) -> Model:
    return ScriptedModel(list(steps))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that a host is started in."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def refusal(root: str | os.PathLike[str]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        Workspace(root)
    assert "--workspace work" in caught.value.hint
    return caught.value.message


def test_the_folder_that_the_host_starts_in_is_no_workspace_whatever_it_is_called(project: Path) -> None:
    (project / "way").symlink_to(project)
    for root in (".", project, project.parent, "/", project / "way", "way/work/.."):
        assert "contains" in refusal(root)
    for root in ("work", project / "a" / "b", project.parent / "beside"):
        Workspace(root)


def test_what_is_not_there_yet_counts_too(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = project.parent / "elsewhere"
    monkeypatch.setenv("HOLDFAST_CONFIG", str(elsewhere / "other.toml"))
    assert "contains the settings file" in refusal(elsewhere)
    assert "contains the file of secrets" in refusal(project)


def test_own_folder_environment_and_code_are_no_workspaces(project: Path) -> None:
    for root in (".holdfast", ".holdfast/inner", project / ".holdfast"):
        assert "Holdfast's own folder" in refusal(root)
    Workspace(".holdfast/workspaces/mine")
    for root in (sys.prefix, sysconfig.get_paths()["purelib"], Path(sys.prefix, "lib", "made")):
        assert "the Python environment" in refusal(root) or "imports from" in refusal(root)
    import holdfast

    assert "Holdfast's code" in refusal(Path(holdfast.__file__ or "").parent / "tools" / "made")
    link = project / "link.py"
    link.symlink_to(__file__)
    assert "contains" in refusal(Path(__file__).parent)


def test_what_others_run_as_their_own_is_no_workspace(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = project.parent / "home"
    monkeypatch.setenv("HOME", str(home))
    assert "SSH keys" in refusal(home) and "SSH keys" in refusal(home / ".ssh" / "inner")
    for root in ("/etc", "/etc/cron.d", "/usr/bin", "/usr/local", "/usr/local/bin/made", "/bin", "/proc/self", "/var"):
        assert "a system folder" in refusal(root)
    subprocess.run(["git", "init", "-q", "code"], check=True, timeout=60)
    subprocess.run(["git", "init", "-q", "--bare", "store"], check=True, timeout=60)
    for root in ("code/.git", "code/.git/hooks", "store", "store/hooks"):
        assert "the internals of a Git repository" in refusal(root)
    for allowed in ("code", "code/work", str(home / "work")):
        Workspace(allowed)
    shared = tempfile.mkdtemp(dir="/dev/shm")
    Workspace(shared)
    os.rmdir(shared)


def test_a_module_that_is_only_linked_from_elsewhere_counts(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, code = project / "work", project / "code"
    work.mkdir()
    code.mkdir()
    (work / "linked_agent.py").write_text("x = 1\n")
    (code / "linked_agent.py").symlink_to(work / "linked_agent.py")
    monkeypatch.syspath_prepend(str(code))
    __import__("linked_agent")
    try:
        assert "contains code of the host" in refusal(work)
    finally:
        del sys.modules["linked_agent"]


@pytest.mark.parametrize("toolset", [Files, Terminal, Processes, Python, lambda root: Web(workspace=root)])
def test_a_host_does_not_start_with_a_workspace_that_has_its_store(project: Path, toolset: type[Files]) -> None:
    agent = Agent(name="a", model=says("x"), tools=[toolset("work")])

    async def main() -> None:
        async with Host(agent, store=f"sqlite:///{project}/work/inner/x.db"):
            pass

    (project / "work" / "inner").mkdir()
    with pytest.raises(ConfigurationError, match="contains the store"):
        asyncio.run(main())


def test_serve_refuses_its_own_folder_with_the_line_that_mends_it(project: Path) -> None:
    for workspace in (".", "..", str(project)):
        refused = run("serve", "--model", "scripted:demo", "--workspace", workspace, folder=project)
        assert refused.returncode == 2, refused
        assert "contains" in refused.stderr and "--workspace work" in refused.stderr


def test_no_file_tool_gets_at_what_appears_later(project: Path) -> None:
    workspace = Workspace("work")
    (project / "work" / "deep").mkdir()
    for name in ("holdfast.toml", ".env", ".holdfast", "deep/.env", "deep/.holdfast/holdfast.db", "HOLDFAST.TOML"):
        path = Path("work", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_dir():
            path.write_text("secret")
        (project / "work" / "way").unlink(missing_ok=True)
        (project / "work" / "way").symlink_to(name)
        for way in (name, f"./{name}", "way", f"deep/../{name}"):
            with pytest.raises(ToolFailed, match="belongs to the host"), workspace.open_file(way):
                pass
            with pytest.raises(ToolFailed, match="belongs to the host"):
                workspace.replace(way, b"forged", check=lambda: None)
        if name == ".holdfast":
            path.unlink()
    assert [entry.path for entry in workspace.walk(".")] == ["deep", "way"]


def test_each_session_has_a_workspace_of_its_own_whatever_its_key_is(project: Path) -> None:
    write = CallPart(name="write_file", arguments={"path": "note", "content": "x"})
    owners = [("local", key) for key in ("s", "S", "s..s", "..", "s" * 100, "s" * 101, "ß", "SS")] + [("Local", "s")]

    async def main() -> None:
        async with Host(Agent(name="a", model=says(write, "done"), tools=[Files()])) as host:
            for principal, key in owners:
                await host.session(key, principal=principal).ask("write")

    asyncio.run(main())
    root = project / ".holdfast" / "workspaces"
    notes = [path.relative_to(root).parts for path in root.rglob("note")]
    assert len(notes) == len(owners) and {len(parts) for parts in notes} == {3}
    assert len({"/".join(parts).casefold() for parts in notes}) == len(owners)
    assert max(len(name) for parts in notes for name in parts) < 100
    assert {path.stat().st_mode & 0o777 for path in [root, *root.glob("*"), *root.glob("*/*")]} == {0o700}


@pytest.mark.parametrize("store", ["sqlite:///x.db", "memory://"])
def test_a_session_with_the_key_of_a_deleted_one_begins_with_an_empty_workspace(project: Path, store: str) -> None:
    async def main(steps: Model) -> None:
        async with Host(Agent(name="a", model=steps, tools=[Files(None)]), store=store) as host:
            await host.session("s").ask("go")
            await host.session("s").delete()
            now = host.now() + 1
            await host.store.prune(events_before=now, tombstones_before=now, idempotency_before=now)

    for number in (1, 2):
        write = CallPart(name="write_file", arguments={"path": f"note{number}", "content": "x"})
        asyncio.run(main(says(write, "done")))
    notes = list((project / ".holdfast" / "workspaces").rglob("note*"))
    assert len(notes) == 2 and notes[0].parent != notes[1].parent


@confines
def test_a_script_sees_of_an_environment_in_the_project_only_what_an_interpreter_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment may be the project's folder itself, as ``python -m venv .`` makes it."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    shown = {Path(path) for path in interpreter_paths()}
    assert tmp_path not in shown
    for name in ("holdfast.toml", ".env", ".holdfast", "work", "agent.py"):
        assert not any(Path(path) in {tmp_path / name, *(tmp_path / name).parents} for path in shown)


def test_the_readme_line_goes_on_working(project: Path) -> None:
    with served(project, "--model", "scripted:demo", "--workspace", "work") as server:
        (project / "work" / "note.txt").write_text("hello")
        assert server.run("send", "make a report about the files here", "--wait", "20").returncode == 0
        assert "note.txt" in (project / "work" / "report.md").read_text()
        assert server.end() == 0


def test_without_a_name_the_assistant_works_in_the_sessions_own_folder(project: Path) -> None:
    with served(project, "--model", "scripted:demo") as server:
        assert server.run("send", "make a report about the files here", "--wait", "20").returncode == 0
        (report,) = (project / ".holdfast" / "workspaces").glob("*/*/report.md")
        assert report.is_file() and not (project / "report.md").exists()
        assert server.end() == 0
