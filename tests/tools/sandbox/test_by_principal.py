"""A function chooses the sandbox by principal: each gets what is theirs, and none is known means nothing is started."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import Host
from holdfast.errors import ConfigurationError, ToolFailed
from holdfast.tools.access import access_rule
from holdfast.tools.files.workspace import Workspace
from holdfast.tools.mcp.server import McpServer
from holdfast.tools.programs.processes import Processes
from holdfast.tools.programs.python import Python
from holdfast.tools.programs.terminal import Terminal
from holdfast.tools.sandbox.sandbox import Sandbox, sandbox_of
from tests.tools.using import Bench, on_host

CALLS: dict[str, tuple[str, Callable[[Path], dict[str, Any]]]] = {
    "terminal": ("terminal", lambda path: {"command": ["cat", str(path)]}),
    "processes": ("start_process", lambda path: {"command": ["cat", str(path)]}),
    "python": ("python", lambda path: {"script": f"open({str(path)!r}).read()"}),
}


class _Identity:
    """A session of a principal."""

    session_key = session_id = "s"

    def __init__(self, principal: str) -> None:
        self.principal = principal


def _chosen(folder: Path) -> Callable[[str], Sandbox]:
    sandboxes = {"alice": Sandbox(readable=(folder,), readable_on_request=("/srv",)), "bob": Sandbox()}
    return sandboxes.__getitem__


def _outcomes(toolset: Any, name: str, arguments: dict[str, Any], principals: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}

    async def agent(bench: Bench) -> None:
        if bench.run.text == "go":
            said = await bench(name, **arguments)
            if (started := re.match(r"process (\w+) started", said)) is not None:
                said = await bench("wait_process", process_id=started[1], timeout_s=30.0)
            found[bench.run.principal] = said

    async def scenario(host: Host) -> None:
        for principal in principals:
            session = host.session("s", principal=principal)
            await session.wait((await session.send("go")).message_id)

    on_host([toolset], agent, scenario)
    return found


@pytest.mark.parametrize("kind", list(CALLS))
def test_each_principals_programs_see_what_the_principal_may(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Alice's program reads the folder, bob's does not, and a principal without a sandbox gets no program at all."""
    (tmp_path / "shared").mkdir()
    secret = tmp_path / "shared" / "report"
    secret.write_text("for alice")
    chosen = _chosen(tmp_path / "shared")
    work = Workspace(tmp_path / "work")
    toolset = {
        "terminal": lambda: Terminal(work, sandbox=chosen),
        "processes": lambda: Processes(work, sandbox=chosen),
        "python": lambda: Python(work, sandbox=chosen),
    }[kind]()
    name, arguments = CALLS[kind]
    found = _outcomes(toolset, name, arguments(secret), ("alice", "bob", "carol"))
    assert "for alice" in found["alice"]
    assert "No such file" in found["bob"] and "for alice" not in found["bob"]
    assert "no sandbox is known for this user" in found["carol"] and "KeyError" not in found["carol"]
    assert "failed for principal 'carol'" in caplog.text


def test_what_may_be_asked_for_is_the_principals_own(tmp_path: Path) -> None:
    rule = access_rule(Workspace(tmp_path / "work"), _chosen(tmp_path))
    asked = {"access": {"read": ["/srv/data"]}}
    assert rule(_Identity("alice"), asked).access.read == ("/srv/data",)
    with pytest.raises(ToolFailed, match="cannot be granted"):
        rule(_Identity("bob"), asked)
    with pytest.raises(ToolFailed, match="no sandbox is known"):
        rule(_Identity("carol"), asked)


@pytest.mark.parametrize("returned", [None, "hosts", Sandbox])
def test_a_function_that_returns_no_sandbox_is_no_permission(returned: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ToolFailed, match="no sandbox is known"):
        sandbox_of(lambda _: returned, "alice")
    assert "returned" in caplog.text and "'alice'" in caplog.text


def test_a_shared_program_cannot_depend_on_the_principal() -> None:
    with pytest.raises(ConfigurationError, match="all share its program"):
        McpServer("m", command=["server"], sandbox=lambda _: Sandbox())
