"""A workspace that has the host's own store in it, as it is by default: no tool leads to the store or to its token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from holdfast import Agent, Host
from holdfast.agents.scripted import ScriptedModel
from holdfast.tools import Files, Python, Workspace
from holdfast.tools.sandbox import Isolation, Sandbox, find_isolation
from holdfast.tools.workspace import kept_private, private_paths, store_paths
from tests.tools.using import Bench, on_host

SECRET = "hft-do-not-tell"


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


@pytest.mark.skipif(find_isolation().kind == "none", reason=f"scripts are not confined here: {find_isolation().reason}")
def test_no_script_reads_or_changes_what_is_the_hosts(tmp_path: Path) -> None:
    lay_out(tmp_path)
    (tmp_path / "h.db.d").mkdir()
    (tmp_path / "h.db.d" / "note").write_text(SECRET)
    script = """
import os
for name in ("h.db", "h.db-wal", "h.db-shm", "h.db-token", "h.db-lock", "link", "sub/up"):
    print(name, len(open(name, "rb").read()))
for change in (lambda: os.unlink("h.db"), lambda: os.rename("h.db-wal", "x"), lambda: os.rename("h.db-other", "h.db"),
               lambda: open("h.db.d/x", "w"), lambda: os.truncate("h.db", 0), lambda: os.link("h.db", "y")):
    try:
        change()
        print("changed")
    except OSError as error:
        pass
print(os.listdir("h.db.d"), len(open("h.db-other").read()))
"""

    async def agent(bench: Bench) -> list[str]:
        return [await bench("python", script=script)]

    (told,) = used(tmp_path, agent)
    assert SECRET not in told and "changed" not in told
    assert {line.split()[-1] for line in told.splitlines()[:7]} == {"0"}
    assert told.endswith("[] 14")
    assert (tmp_path / "h.db-token").read_text() == SECRET and (tmp_path / "h.db").stat().st_size > 0


def test_bubblewrap_is_told_to_hide_it_where_it_is_shown(tmp_path: Path) -> None:
    lay_out(tmp_path)
    (tmp_path / "h.db.d").mkdir()
    inside, outside = tmp_path / "sub", tmp_path
    for folder, hides in ((outside, True), (inside, False)):
        words = Sandbox().command(
            ["true"],
            isolation=Isolation(kind="bwrap"),
            directory=folder,
            writable=[folder],
            hidden=store_paths(tmp_path / "h.db"),
        )
        told = " ".join(words)
        assert (f"--ro-bind /dev/null {tmp_path.resolve()}/h.db-token" in told) is hides
        assert (f"--tmpfs {tmp_path.resolve()}/h.db.d" in told) is hides


def test_what_is_private_is_so_for_as_long_as_any_host_is_up(tmp_path: Path) -> None:
    async def main() -> None:
        def made() -> Agent:
            return Agent(name="a", model=ScriptedModel(["x"]), tools=[Files(tmp_path)])

        async with Host(made(), store=f"sqlite:///{tmp_path}/one.db"):
            async with Host(made(), store=f"sqlite:///{tmp_path}/two.db"):
                assert {str(tmp_path / "one.db"), str(tmp_path / "two.db-token")} <= set(private_paths())
            assert str(tmp_path / "two.db") not in private_paths()
            with pytest.raises(Exception, match="belongs to the host"), Workspace(tmp_path).open_file("one.db"):
                pass
        assert private_paths() == ()

    asyncio.run(main())
