"""A program that cannot be confined is refused with a reason that a user and an operator can act on, and never runs."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from holdfast import Agent, CallPart, Host, Settings
from holdfast.agents.scripted import ScriptedModel
from holdfast.cli.wall_checks import check_walls
from holdfast.errors import ConfigurationError
from holdfast.tools import Files, Processes, Python, Sandbox, Terminal, Workspace
from holdfast.tools.sandbox import choice
from holdfast.tools.sandbox.backends import container, linux
from holdfast.tools.sandbox.backends.linux import LinuxBackend
from tests.tools.sandbox.test_container import StandIn
from tests.tools.sandbox.walled import reason_against

DECIDE = "Tell the user that the operator must decide this."


@pytest.fixture(autouse=True)
def sandboxes_are_searched_anew() -> Iterator[None]:
    """What one test finds is of no use to the others."""
    choice._find.cache_clear()
    yield
    choice._find.cache_clear()


class Bare:
    """A backend on a kernel that supports no wall."""

    name = "linux"
    layers = ()
    threads: ClassVar[list[threading.Thread]] = []

    def probe(self) -> str:
        Bare.threads.append(threading.current_thread())
        return "the kernel supports neither user namespaces nor Landlock"


@pytest.fixture
def bare_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which no wall can be built."""
    Bare.threads.clear()
    for name in choice.AUTOMATIC:
        monkeypatch.setitem(choice.BACKENDS, name, f"{__name__}:Bare")


def call_all(
    root: Path,
    *,
    sandbox: Sandbox | None = None,
    before: Callable[[], object] = lambda: None,
    folder: str = ".",
    backend: Any = "auto",
) -> tuple[list[str], list[str]]:
    """Have a model start a program with each tool that does; the results, and the incidents of the host."""
    place = Workspace(root)
    more: dict[str, Any] = {} if sandbox is None else {"sandbox": sandbox}
    ran = f"touch {root}/ran ran || true"
    calls = [
        CallPart(name="terminal", arguments={"command": ran, "folder": folder}),
        CallPart(name="start_process", arguments={"command": ran, "folder": folder}),
        CallPart(name="python", arguments={"script": f"open({str(root / 'ran')!r}, 'w')"}),
    ]
    tools = [Terminal(place, **more), Processes(place, **more), Python(place, **more)]
    agent = Agent(name="worker", model=ScriptedModel([*calls, "done"]), tools=tools)
    incidents: list[str] = []

    async def main() -> list[str]:
        async with asyncio.timeout(60), Host(agent, store="memory://", settings=Settings(sandbox=backend)) as host:
            incidents.extend(incident.text for incident in host.incidents.newest)
            before()
            session = host.session("s")
            receipt = await session.send("go")
            await session.wait(receipt.message_id)
            return [entry.content for entry in await session.transcript() if entry.role == "tool_result"]

    found = asyncio.run(main())
    assert len(found) == len(calls)
    return found, incidents


def assert_refused(results: list[str], root: Path, *texts: str) -> None:
    for result in results:
        assert all(text in result for text in texts), result
        assert "exit code" not in result and "started" not in result
    assert not any("ran" in names for _, _, names in os.walk(root.parent)), "nothing ran"


def test_without_any_wall_programs_are_refused_and_the_operator_is_warned(tmp_path: Path, bare_kernel: None) -> None:
    results, incidents = call_all(tmp_path / "work")
    why = "this machine cannot confine programs: linux: the kernel supports neither user namespaces nor Landlock"
    assert_refused(results, tmp_path / "work", why, 'see "holdfast doctor"', DECIDE)
    [warned] = incidents
    assert warned.startswith(f"programs of tools are refused: {why}")
    assert Bare.threads and threading.main_thread() not in Bare.threads, "a slow search must not block the loop"
    [check] = check_walls(Settings())
    assert (check.state, check.found[: len(why)]) == ("fault", why)


def incidents_at_start(root: Path) -> list[str]:
    """Start a host whose agent has a terminal; the incidents that it has at once."""
    agent = Agent(name="worker", model=ScriptedModel([]), tools=[Terminal(Workspace(root))])

    async def main() -> list[str]:
        async with Host(agent, store="memory://") as host:
            return [incident.text for incident in host.incidents.newest]

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("left", "why", "remedy"),
    [
        ("landlock", "namespaces are not available (unshare: EPERM)", "user.max_user_namespaces"),
        ("namespaces", "Landlock is not available (the kernel lacks it or has it disabled)", "boot parameter lsm"),
    ],
)
def test_a_wall_of_one_layer_is_reported_with_the_reason_and_the_remedy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    left: str,
    why: str,
    remedy: str,
) -> None:
    if (reason := reason_against((left,))) is not None:
        pytest.skip(reason)
    if left == "landlock":
        monkeypatch.setattr(LinuxBackend, "_try", lambda _: "unshare: EPERM")
    else:
        monkeypatch.setattr(linux, "landlock_abi", lambda: 0)
    text = f"programs of tools run behind linux ({left}) only: {why}; see holdfast doctor"
    assert incidents_at_start(tmp_path / "work") == [text]
    assert [record.getMessage() for record in caplog.records].count(text) == 1
    check, *attempts = check_walls(Settings())
    assert (check.state, check.found) == ("advice", f"programs run behind linux ({left}) only: {why}")
    assert remedy in check.advice
    assert {attempt.state for attempt in attempts} == {"ok"}, attempts


class Second(LinuxBackend):
    """A wall that this machine builds, in the place of the second one that ``auto`` tries."""

    name = "bwrap"


def test_a_sandbox_that_is_not_the_first_choice_is_reported_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if (reason := reason_against(("namespaces", "landlock"))) is not None:
        pytest.skip(reason)
    monkeypatch.setitem(choice.BACKENDS, "linux", f"{__name__}:Bare")
    monkeypatch.setitem(choice.BACKENDS, "bwrap", f"{__name__}:Second")
    why = "bwrap (namespaces, landlock); not linux: the kernel supports neither user namespaces nor Landlock"
    text = f"programs of tools run behind {why}; see holdfast doctor"
    assert incidents_at_start(tmp_path / "work") == [text]
    assert [record.getMessage() for record in caplog.records].count(text) == 1
    check, *attempts = check_walls(Settings())
    assert (check.state, check.found) == ("advice", f"programs run behind {why}")
    assert "user.max_user_namespaces" in check.advice and 'set sandbox = "bwrap"' in check.advice
    assert {attempt.state for attempt in attempts} == {"ok"}, attempts
    named = next(iter(check_walls(Settings(sandbox="bwrap"))))
    assert (named.state, named.found) == ("ok", "programs run behind bwrap (namespaces, landlock)")


def test_a_wall_of_all_layers_is_not_reported(tmp_path: Path) -> None:
    if (reason := reason_against(("namespaces", "landlock"))) is not None:
        pytest.skip(reason)
    assert incidents_at_start(tmp_path / "work") == []
    assert next(iter(check_walls(Settings()))).state == "ok"


def test_a_container_engine_that_hangs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = StandIn(tmp_path / "engine")
    (docker.folder / "hangs").touch()
    monkeypatch.setenv("PATH", f"{docker.folder}:{os.environ['PATH']}")
    monkeypatch.setattr(container, "_ANSWER_S", 0.3)
    results, incidents = call_all(tmp_path / "place" / "work", backend="docker")
    why = "this machine cannot confine programs: docker: docker version did not answer within 0.3 s"
    assert_refused(results, tmp_path / "place" / "work", why, "choose another sandbox", DECIDE)
    assert [why in text for text in incidents] == [True]
    [check] = check_walls(Settings(sandbox="docker"))
    assert (check.state, check.found[: len(why)]) == ("fault", why)


@pytest.mark.parametrize("instead", ["nothing", "a file"])
def test_a_workspace_that_vanished_is_said_to_be_gone(tmp_path: Path, instead: str) -> None:
    root = tmp_path / "work"

    def vanish() -> None:
        shutil.rmtree(root)
        if instead == "a file":
            root.write_text("")

    results, _ = call_all(root, before=vanish)
    assert_refused(results, root, "the workspace cannot be opened: ", "the operator must restore its folder")
    assert root.exists() is (instead == "a file"), "nothing makes it anew"


def test_file_tools_say_that_a_workspace_vanished(tmp_path: Path) -> None:
    root = tmp_path / "work"
    calls = [
        CallPart(name="write_file", arguments={"path": "x", "content": "y"}),
        CallPart(name="edit_file", arguments={"path": "x", "old": "y", "new": "z"}),
        CallPart(name="read_file", arguments={"path": "x"}),
        CallPart(name="list_files", arguments={}),
        CallPart(name="search_files", arguments={"pattern": "y"}),
    ]
    agent = Agent(name="worker", model=ScriptedModel([*calls, "done"]), tools=[Files(root)])

    async def main() -> list[str]:
        async with asyncio.timeout(60), Host(agent, store="memory://") as host:
            shutil.rmtree(root)
            session = host.session("s")
            receipt = await session.send("go")
            await session.wait(receipt.message_id)
            return [entry.content for entry in await session.transcript() if entry.role == "tool_result"]

    results = asyncio.run(main())
    assert ["the workspace cannot be opened" in result for result in results] == [True] * len(calls), results
    assert not root.exists()


@pytest.mark.parametrize("folder", ["../other", "/etc", "notes/../../other"])
def test_no_program_starts_in_a_folder_outside(tmp_path: Path, folder: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "work" / "notes").mkdir(parents=True)
    results, _ = call_all(tmp_path / "work", folder=folder)
    for result in results[:2]:
        assert result == f"{folder} is outside the workspace; use paths relative to its root"
    assert not any("ran" in names for _, _, names in os.walk(tmp_path / "other"))


@pytest.mark.parametrize(
    ("sandbox", "why"),
    [
        (Sandbox(secrets=("NOT_SET_HERE",)), "the secret 'NOT_SET_HERE' of the sandbox is not set"),
        (Sandbox(readable=("/not/there",)), "the sandbox's path '/not/there' is not usable: No such file"),
        (Sandbox(writable=("/",)), "the folder / cannot be shared with walled programs"),
    ],
)
def test_a_profile_that_cannot_be_enforced_starts_nothing(tmp_path: Path, sandbox: Sandbox, why: str) -> None:
    results, _ = call_all(tmp_path / "work", sandbox=sandbox)
    assert_refused(results, tmp_path / "work", why, DECIDE)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"hosts": ("example.org",)}, "the sandbox names hosts, but its network is 'none'"),
        ({"network": "some"}, "unknown network 'some'"),
        ({"network": "hosts", "hosts": "example.org"}, "the sandbox's hosts is a string"),
        ({"network": "hosts", "hosts": ("https://example.org",)}, "invalid allowed host"),
        ({"memory_bytes": 0}, "the sandbox's memory_bytes is 0"),
    ],
)
def test_a_profile_that_contradicts_itself_is_refused_where_it_is_written(values: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        Sandbox(**values)
