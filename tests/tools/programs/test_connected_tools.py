"""Tools whose programs have a network: through the proxy to allowed hosts, and the model learns what was refused."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from holdfast.agents.tool import Toolset
from holdfast.tools.programs.processes import Processes
from holdfast.tools.programs.python import Python
from holdfast.tools.programs.terminal import Terminal
from holdfast.tools.sandbox.choice import BackendName
from holdfast.tools.sandbox.proxy.link import network_proxy
from holdfast.tools.sandbox.sandbox import Sandbox
from tests.tools.sandbox.ordinary_user import NETWORKED, networked_backend, run_as_ordinary_user
from tests.tools.sandbox.test_network import PROGRAM, echo
from tests.tools.using import Bench, use
from tests.tools.web.test_fetch import serving

SANDBOX = Sandbox(network="hosts", hosts=("127.0.0.1:*",), allow_networks=("127.0.0.1",))
REFUSED = "network: host evil.test is not allowed; allowed: 127.0.0.1:*"


@pytest.fixture(params=NETWORKED)
def sandbox(request: pytest.FixtureRequest) -> BackendName:
    """The setting of the host."""
    networked_backend(request.param)
    name: BackendName = request.param
    return name


def test_tools_behind_bubblewrap_work_for_an_ordinary_user() -> None:
    run_as_ordinary_user(__file__, "-k", "bwrap")


def connected(
    make: Callable[[Path], Toolset],
    work: Callable[[Bench, str], Awaitable[None]],
    folder: Path,
    *,
    sandbox: BackendName,
) -> None:
    """Run a scenario with a toolset whose programs may reach the server at the given address."""

    async def agent(bench: Bench) -> None:
        async with serving(echo) as (here, _):
            await work(bench, here)

    use(make(folder), agent, sandbox=sandbox)


def test_a_command_reaches_its_hosts_and_tells_what_was_refused(tmp_path: Path, sandbox: BackendName) -> None:
    async def work(bench: Bench, here: str) -> None:
        command = [sys.executable, "-I", "-c", PROGRAM, f"http://{here}/x"]
        told = await bench("terminal", command=command)
        assert told == f"GET /x HTTP/1.1|{here}\n[exit code 0]", told
        told = await bench("terminal", command=[*command, "http://evil.test/"])
        assert "403 Request blocked: host evil.test" in told and told.endswith(f"[exit code 0; {REFUSED}]"), told

    connected(lambda folder: Terminal(folder, sandbox=SANDBOX), work, tmp_path, sandbox=sandbox)


def test_a_script_reaches_its_hosts_and_tells_what_was_refused(tmp_path: Path, sandbox: BackendName) -> None:
    async def work(bench: Bench, here: str) -> None:
        script = f"import urllib.request\nurllib.request.urlopen('http://{here}/x').read().decode()"
        assert f"GET /x HTTP/1.1|{here}" in await bench("python", script=script)
        told = await bench("python", script=script.replace(here, "evil.test"))
        assert told.endswith(f"[{REFUSED}]") and "403" in told, told

    connected(lambda folder: Python(folder, sandbox=SANDBOX), work, tmp_path, sandbox=sandbox)


def test_a_background_process_reaches_its_hosts_and_tells_what_was_refused(
    tmp_path: Path, sandbox: BackendName
) -> None:
    async def work(bench: Bench, here: str) -> None:
        command = [sys.executable, "-I", "-c", PROGRAM, f"http://{here}/x", "http://evil.test/"]
        started = await bench("start_process", command=command)
        process_id = started.split()[1].strip("`:;,.")
        told = await bench("wait_process", process_id=process_id)
        assert f"GET /x HTTP/1.1|{here}" in told and REFUSED in told, told

    connected(lambda folder: Processes(folder, sandbox=SANDBOX), work, tmp_path, sandbox=sandbox)


def test_a_command_that_times_out_or_does_not_start_leaves_no_network_open(
    tmp_path: Path, sandbox: BackendName
) -> None:
    async def work(bench: Bench, here: str) -> None:
        before = network_proxy().open_count
        assert "timed out" in await bench("terminal", command="sleep 60", timeout_s=0.2)
        told = await bench("terminal", command=["no-such-program"])
        assert "!ToolFailed" in told or "[exit code 127]" in told, told
        assert network_proxy().open_count == before

    connected(lambda folder: Terminal(folder, sandbox=SANDBOX), work, tmp_path, sandbox=sandbox)


@pytest.mark.parametrize("network", ["hosts", "all"])
def test_where_no_network_can_be_confined_the_tool_is_refused(
    tmp_path: Path, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.tools.sandbox.backends.linux import LinuxBackend

    alone = LinuxBackend(("landlock",))
    if (reason := alone.probe()) is not None:
        pytest.skip(f"no Landlock on this machine: {reason}")
    monkeypatch.setattr("holdfast.tools.walled.find_backend", lambda: alone)

    async def agent(bench: Bench) -> None:
        told = await bench("terminal", command="true")
        assert told.startswith("!ToolFailed") and "needs namespaces" in told, told

    sandbox = Sandbox(network="hosts" if network == "hosts" else "all", hosts=("example.org",))
    use(Terminal(tmp_path, sandbox=sandbox), agent)
