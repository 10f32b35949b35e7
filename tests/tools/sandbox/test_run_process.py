"""`run.process(sandbox=…)`: an agent's own code starts programs behind the session's wall."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from holdfast import Host, Run, Settings
from holdfast.errors import InvalidRequest
from holdfast.runtime.process_host import PIPE
from holdfast.tools import Sandbox
from holdfast.tools.sandbox.choice import BackendName, find_backend
from tests.tools.sandbox.walled import reason_against

pytestmark = pytest.mark.skipif(
    reason_against(("namespaces",)) is not None, reason=f"no namespaces here: {reason_against(('namespaces',))}"
)


def on_host(agent: Callable[[Run], Awaitable[str]], settings: Settings | None = None) -> str:
    async def main() -> str:
        async with asyncio.timeout(60), Host(agent, store="memory://", settings=settings or Settings()) as host:
            return await host.session("s").ask("go")

    return asyncio.run(main())


def test_a_program_of_an_agents_code_runs_behind_the_wall(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("for nobody")
    (tmp_path / "work").mkdir()

    async def agent(run: Run) -> str:
        command = f"pwd; cat {secret}; echo made >file"
        process = await run.process(["/bin/sh", "-c", command], cwd=tmp_path / "work", stdout=PIPE, sandbox=Sandbox())
        assert process.stdout is not None
        return (await process.stdout.read()).decode()

    assert on_host(agent) == f"{tmp_path / 'work'}\n"
    assert (tmp_path / "work" / "file").read_text() == "made\n"


def test_a_folder_to_work_in_must_be_given() -> None:
    async def agent(run: Run) -> str:
        with pytest.raises(InvalidRequest, match="folder"):
            await run.process(["true"], sandbox=Sandbox())
        with pytest.raises(TypeError, match="Sandbox"):
            await run.process(["true"], sandbox="linux", cwd="/tmp")
        return "refused"

    assert on_host(agent) == "refused"


def test_the_hosts_setting_chooses_the_backend(tmp_path: Path) -> None:
    async def agent(run: Run) -> str:
        return find_backend().name

    assert on_host(agent, Settings(sandbox="none")) == "none"
    assert on_host(agent) in ("linux", "bwrap")


@pytest.mark.parametrize(("sandbox", "counted"), [("auto", 1), ("none", 0)])
def test_the_host_counts_the_programs_that_start_behind_a_wall(
    tmp_path: Path, sandbox: BackendName, counted: int
) -> None:
    async def agent(run: Run) -> str:
        await (await run.process(["true"], cwd=tmp_path)).wait()
        await (await run.process(["true"], cwd=tmp_path, sandbox=Sandbox())).wait()
        return "both ended"

    async def main() -> None:
        async with asyncio.timeout(60), Host(agent, store="memory://", settings=Settings(sandbox=sandbox)) as host:
            assert await host.session("s").ask("go") == "both ended"
            assert host.statistics().promises["P16"].kept == counted

    asyncio.run(main())
