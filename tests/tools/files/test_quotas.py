"""Tools that write files from the server keep the principal's quota, the disk's reserve, and other people's files."""

from __future__ import annotations

import asyncio
import http.server
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import Host, Run, Settings
from holdfast.agents.tool import Toolset
from holdfast.host.program_quotas import ProgramQuotas
from holdfast.runtime.processes import procfs
from holdfast.tools import Files, Web, Workspace
from tests.host.placed_programs import MIB, ROOMY
from tests.tools.using import Bench

pytestmark = pytest.mark.skipif(not procfs.supported(), reason="programs are watched only on Linux")

Call = Callable[..., Coroutine[Any, Any, str]]


def on_host(toolsets: list[Toolset], body: Callable[[Call], Coroutine[Any, Any, None]], **settings: Any) -> None:
    """Run `body` with a function that calls a tool for a principal, in the principal's session."""
    asked: list[tuple[str, dict[str, Any]]] = []
    answers: list[str] = []

    async def agent(run: Run) -> None:
        name, arguments = asked.pop()
        answers.append(await Bench(run, toolsets)(name, **arguments))

    async def main() -> None:
        values = {"disk_reserve_bytes": 0, "principal_disk_bytes": 4 * MIB, **settings}
        async with asyncio.timeout(60), Host(agent, store="memory://", settings=Settings(**values)) as host:

            async def call(principal: str, name: str, **arguments: Any) -> str:
                asked.append((name, arguments))
                session = host.session("s", principal=principal)
                receipt = await session.send("go")
                await session.wait(receipt.message_id)
                return answers.pop()

            await body(call)

    asyncio.run(main())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("per_session", [True, False])
def test_a_full_workspace_takes_no_file_until_one_is_deleted(tmp_path: Path, per_session: bool) -> None:
    workspace = Workspace(tmp_path / "work", per_session=per_session, protect_existing=False)

    async def body(call: Call) -> None:
        for number in range(3):
            assert "has 1,048,576 bytes" in await call("alice", "write_file", path=f"f{number}", content="x" * MIB)
        small = await call("alice", "write_file", path="notes", content="a small one")
        assert small == "notes now has 11 bytes"
        before = names(tmp_path)
        refused = await call("alice", "write_file", path="new/f3", content="x" * MIB)
        assert refused.startswith(
            "!ToolFailed: nothing was written: the workspace of user alice holds 3.0 MiB and has "
        )
        assert refused.endswith("no room for 1 MiB; the limit is 4 MiB; delete files")
        assert "no room for" in await call("alice", "edit_file", path="notes", old="small", new="y" * MIB)
        assert names(tmp_path) == before
        assert not list(tmp_path.rglob("new")), "not even a folder is made"
        if per_session:
            assert "has 1,048,576 bytes" in await call("bob", "write_file", path="b", content="x" * MIB)
        next(tmp_path.rglob("f0")).unlink()
        assert "has 1,048,576 bytes" in await call("alice", "write_file", path="new/f3", content="x" * MIB)

    on_host([Files(workspace)], body)


def test_what_the_workspace_held_before_the_host_started_counts(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "work", per_session=True)

    async def begin(call: Call) -> None:
        assert "now has" in await call("alice", "write_file", path="old", content="x" * (3 * MIB))

    async def go_on(call: Call) -> None:
        assert "no room for 2 MiB" in await call("alice", "write_file", path="new", content="x" * (2 * MIB))

    on_host([Files(workspace)], begin)
    on_host([Files(workspace)], go_on)


def test_files_of_the_tools_count_together_with_those_of_calls_at_the_same_time(tmp_path: Path) -> None:
    async def main() -> None:
        quotas = ProgramQuotas(msgspec.structs.replace(ROOMY, disk_bytes=4 * MIB), lambda *_: None)
        await quotas.measure("alice", tmp_path)
        admitted = [quotas.admit_write("alice", tmp_path, MIB) for _ in range(6)]
        assert [bool(fault) for fault in admitted] == [False] * 4 + [True] * 2
        quotas.close()

    asyncio.run(main())


def test_too_many_files_are_refused(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "work", per_session=True)

    async def body(call: Call) -> None:
        answers = [await call("alice", "write_file", path=f"f{number}", content="") for number in range(8)]
        assert "now has" in answers[3]
        assert "files and folders; the limit is 6" in answers[-1]

    on_host([Files(workspace)], body, principal_inodes=6)


def test_the_reserve_of_the_disk_is_kept(tmp_path: Path) -> None:
    space = os.statvfs(tmp_path)
    workspace = Workspace(tmp_path / "work", per_session=True)

    async def body(call: Call) -> None:
        refused = await call("alice", "write_file", path="f", content="x")
        assert "kept in reserve" in refused
        assert names(tmp_path) == []

    on_host([Files(workspace)], body, disk_reserve_bytes=space.f_bavail * space.f_frsize + (1 << 30))


@pytest.fixture
def page() -> Iterator[str]:
    """The address of a page of 1 MiB on this machine."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(MIB))
            self.end_headers()
            self.wfile.write(bytes(MIB))

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_a_fetched_file_counts_and_overwrites_nothing_that_the_session_did_not_make(tmp_path: Path, page: str) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "mine").write_text("precious")
    web = Web(workspace=Workspace(tmp_path / "work"), allow_networks=["127.0.0.0/8"], ports=None)

    async def body(call: Call) -> None:
        refused = await call("alice", "fetch", url=page, save_as="mine")
        assert "mine was not made by this session" in refused and "choose a name that does not exist yet" in refused
        assert (tmp_path / "work" / "mine").read_text() == "precious"
        answers = [await call("alice", "fetch", url=page, save_as=name) for name in ("a", "b", "a", "c", "d", "e")]
        assert all("[saved to " in answer for answer in answers[:5])
        assert "no room for 1 MiB" in answers[5]

    on_host([web], body)
