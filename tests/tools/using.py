"""Runs tools as a host does, on a plain agent that makes one call after the other."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from holdfast import Host, Run, Session, Settings, Tool
from holdfast.agents.tool import Toolset
from holdfast.clock import system_clock
from holdfast.errors import HoldfastError, Interrupted
from holdfast.runtime import Process
from holdfast.tools.sandbox.choice import BackendName

__all__ = ["Bench", "SessionHome", "Unbounded", "on_host", "use"]

BOUND_S = 60.0


class Bench:
    """What a scenario works with: the tools by name, as a run calls them, and the session."""

    def __init__(self, run: Run, toolsets: Sequence[Toolset]) -> None:
        self.run = run
        self._tools: dict[str, Tool] = {one.name: one for toolset in toolsets for one in toolset.tools()}

    async def __call__(self, name: str, /, **arguments: Any) -> str:
        """Call a tool with what a model would give; its answer, or the text of its refusal after ``!``."""
        one = self._tools[name]
        checked = one.check(arguments)
        try:
            answer = await self.run.call(functools.partial(one.work, **checked), name=name, timeout_s=one.timeout_s)
        except Interrupted:
            raise
        except Exception as error:
            return f"!{type(error).__name__}: {error}"
        return str(answer)


def on_host(
    toolsets: Sequence[Toolset],
    agent: Callable[[Bench], Awaitable[Any]],
    scenario: Callable[[Host], Coroutine[Any, Any, None]],
    *,
    store: str = "memory://",
    grace_s: float = 0.2,
    abandon_after_s: float = 20.0,
    sandbox: BackendName = "auto",
) -> None:
    """Run the scenario on a host whose only agent works with these tools."""

    async def work(run: Run) -> str | None:
        said = await agent(Bench(run, toolsets))
        return said if isinstance(said, str) else None

    async def main() -> None:
        async with asyncio.timeout(BOUND_S):
            settings = Settings(grace_s=grace_s, abandon_after_s=abandon_after_s, sandbox=sandbox)
            async with Host(work, store=store, settings=settings) as host:
                await scenario(host)

    asyncio.run(main())


def use(
    toolset: Toolset, agent: Callable[[Bench], Awaitable[Any]], *more: Toolset, sandbox: BackendName = "auto"
) -> Session | None:
    """Run the agent once, in a session of its own; what it raises is raised here."""
    problems: list[BaseException] = []

    async def kept(bench: Bench) -> None:
        if bench.run.text != "go":
            return  # the message of a background process
        try:
            await agent(bench)
        except BaseException as error:
            problems.append(error)
            raise

    async def scenario(host: Host) -> None:
        session = host.session("s")
        receipt = await session.send("go")
        await session.wait(receipt.message_id)

    on_host([toolset, *more], kept, scenario, sandbox=sandbox)
    if problems:
        raise problems[0]
    return None


class Unbounded:
    """Accounts that count nothing, and the programs they got. Implements `ProgramAccounts`."""

    ended_because = ""

    def __init__(self) -> None:
        self.watched: list[str] = []

    def known_fault(self, principal: str, folder: Path, *, shared: bool) -> str:
        return ""

    def admit_write(self, principal: str, folder: Path, size: int, *, shared: bool) -> str:
        return ""

    async def measure(self, principal: str, folder: Path, *, shared: bool) -> None:
        return None

    def cgroup_of(self, principal: str) -> None:
        return None

    def watch(self, principal: str, process: Process, *, folder: Path | None, shared: bool) -> Unbounded:
        self.watched.append(principal)
        return self


class SessionHome:
    """A host as a toolset sees it, for tests that enter its lifespan themselves."""

    clock = system_clock

    def __init__(self, data_dir: Path | None = None) -> None:
        self.data_dir = data_dir
        self.programs = Unbounded()
        self.told: list[tuple[str, str, str]] = []
        self.refusal: HoldfastError | None = None

    async def tell(self, principal: str, session_key: str, text: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.told.append((principal, session_key, text))
