"""A workspace that has a store of this process in it, whoever let it: no tool leads to the store or to its token."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from holdfast import Agent, Host
from holdfast.agents.scripted import ScriptedModel
from holdfast.tools import Files, Python, Workspace
from holdfast.tools.files.private_paths import kept_private, private_paths, store_paths
from tests.tools.sandbox.walled import reason_against, run_walled
from tests.tools.using import Bench, on_host

SECRET = "hft-do-not-tell"
WITHOUT = reason_against(("namespaces",))


def lay_out(tmp_path: Path) -> None:
    """A token beside the store, in the workspace, and ways that lead to it."""
    (tmp_path / "h.db-token").write_text(SECRET)
    (tmp_path / "link").symlink_to("h.db-token")
    (tmp_path / "absolute").symlink_to(tmp_path / "h.db-token")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "up").symlink_to("../h.db-token")
    (tmp_path / "h.db-other").write_text("not the host's")


def used(tmp_path: Path, agent: Callable[[Bench], Awaitable[list[str]]]) -> list[str]:
    said: list[str] = []

    async def work(bench: Bench) -> None:
        if bench.run.text == "go":
            said.extend(await agent(bench))

    async def scenario(host: Host) -> None:
        session = host.session("s")
        with kept_private(store_paths(tmp_path / "h.db")):  # as a host does whose agents have toolsets
            receipt = await session.send("go")
            settled = await session.wait(receipt.message_id)
        assert settled.state == "completed", settled
        assert await session.ask("still there?") == ""

    on_host([Files(tmp_path), Python(tmp_path)], work, scenario, store=f"sqlite:///{tmp_path}/h.db")
    return said


def test_no_file_tool_reads_or_changes_what_is_the_hosts(tmp_path: Path) -> None:
    lay_out(tmp_path)

    async def agent(bench: Bench) -> list[str]:
        ways = ["h.db", "h.db-wal", "h.db-token", "link", "absolute", "sub/up", "./sub/../h.db-token", "h.db.d/x"]
        told = [await bench("read_file", path=way) for way in ways]
        told += [await bench("write_file", path=way, content="x") for way in ways]
        told += [await bench("write_file", path=way, content="x") for way in ("h.db-journal", "h.db.d/deep/er/x")]
        told += [await bench("edit_file", path="link", old="do", new="x")]
        assert all("belongs to the host" in one for one in told), told
        assert "h.db-other" in (listed := await bench("list_files", recursive=True)) and "\nh.db-token " not in listed
        assert (
            SECRET not in (found := await bench("search_files", pattern="do-not|the host's")) and "h.db-other" in found
        )
        assert await bench("read_file", path="h.db-other") == "not the host's"
        return told

    used(tmp_path, agent)
    assert (tmp_path / "h.db-token").read_text() == SECRET
    assert not (tmp_path / "h.db-journal").exists() and not (tmp_path / "h.db.d" / "deep").exists()
    assert private_paths() == ()


@pytest.mark.skipif(WITHOUT is not None, reason=f"scripts are not confined here: {WITHOUT}")
def test_no_script_starts_where_it_could_make_a_file_beside_the_store(tmp_path: Path) -> None:
    lay_out(tmp_path)

    async def agent(bench: Bench) -> list[str]:
        return [await bench("python", script="print(open('h.db-token').read())")]

    (told,) = used(tmp_path, agent)
    assert "of the host, so programs are not confined there" in told and SECRET not in told


@pytest.mark.skipif(WITHOUT is not None, reason=f"scripts are not confined here: {WITHOUT}")
def test_what_is_the_hosts_is_hidden_also_where_the_project_can_be_read(tmp_path: Path) -> None:
    own = tmp_path / ".holdfast"
    mine, theirs = own / "workspaces" / "a" / "s", own / "workspaces" / "b" / "s"
    for folder in (mine, theirs):
        folder.mkdir(parents=True)
        (folder / "note").write_text(SECRET)
    (own / "holdfast.db").write_text(SECRET)
    (tmp_path / "holdfast.toml").write_text(SECRET)
    (tmp_path / "public").write_text("public")
    code = f"""
import os
for folder, _, names in os.walk({str(tmp_path)!r}):
    for name in names:
        print(os.path.relpath(os.path.join(folder, name), {str(tmp_path)!r}), open(os.path.join(folder, name)).read())
open("made", "w").close()
try:
    open({str(own / "made")!r}, "w").close()
except OSError:
    print("closed")
"""
    ended = run_walled(
        [sys.executable, "-I", "-S", "-c", code],
        folder=mine,
        readable=[tmp_path],
        hidden=[str(own), str(tmp_path / "holdfast.toml")],
    )
    assert sorted(ended.output.splitlines()) == [
        f".holdfast/workspaces/a/s/note {SECRET}",
        "closed",
        "holdfast.toml ",
        "public public",
    ], ended
    assert (mine / "made").exists()


def test_what_is_private_is_so_for_as_long_as_any_host_is_up(tmp_path: Path) -> None:
    async def main() -> None:
        def made() -> Agent:
            return Agent(name="a", model=ScriptedModel(["x"]), tools=[Files(tmp_path / "work")])

        async with Host(made(), store=f"sqlite:///{tmp_path}/one.db"):
            async with Host(made(), store=f"sqlite:///{tmp_path}/two.db"):
                assert {str(tmp_path / "one.db"), str(tmp_path / "two.db-token")} <= set(private_paths())
            assert str(tmp_path / "two.db") not in private_paths()
            with pytest.raises(Exception, match="belongs to the host"), Workspace(tmp_path).open_file("one.db"):
                pass
        assert private_paths() == ()

    asyncio.run(main())
