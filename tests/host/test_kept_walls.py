"""The namespaces that are kept to start a session's programs fast end with the session's activation."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import Host, Run, agent
from holdfast.runtime.process_host import process_host
from holdfast.tools.sandbox.sandbox import Sandbox
from tests.tools.sandbox.walled import reason_against


def kept() -> set[str]:
    """Return the network namespaces that the zygotes hold, those of earlier tests included."""
    found = set()
    for pid in process_host().zygote_pids():
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                name = os.readlink(f"/proc/{pid}/fd/{fd}")
            except OSError:
                continue
            if name.startswith("net:"):
                found.add(name)
    return found


def becomes(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until, kept()
        time.sleep(0.01)


@pytest.mark.parametrize("ending", ["stop", "delete", "evict"])
def test_a_session_that_is_stopped_deleted_or_idle_keeps_no_namespaces(tmp_path: Path, ending: str) -> None:
    if (reason := reason_against(("namespaces",))) is not None:
        pytest.skip(reason)

    @agent
    async def walled(run: Run) -> str:
        program = await run.process(["/bin/true"], sandbox=Sandbox(), cwd=str(tmp_path))
        return str(await program.wait())

    async def main() -> None:
        before = kept()
        async with Host(walled, store="memory://") as host:
            session = host.session("s")
            assert await session.ask("go", timeout_s=60) == "0"
            becomes(lambda: bool(kept() - before))
            [own] = kept() - before
            if ending == "evict":
                while host.actors:
                    host.maintenance.evict(idle_for_s=0.0)
                    await asyncio.sleep(0.01)
            else:
                await getattr(session, ending)()
            becomes(lambda: own not in kept())
            if ending == "evict":
                assert await session.ask("go", timeout_s=60) == "0", "it comes back"

    asyncio.run(main())
