"""Enter the lifespans of the agents' toolsets when the host starts, and exit them when it closes.

Each lifespan has its own task and scope, outside any run. It is entered and exited in the same task, as task groups
require. Servers, browsers and other resources that a lifespan starts end with the lifespan.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import ConfigurationError, HoldfastError, Interrupted
from holdfast.host.event_archive import archive_folder
from holdfast.host.message_sender import check_key
from holdfast.logs import log_failure, one_line
from holdfast.protocol.send_options import SendOptions
from holdfast.runtime import Scope
from holdfast.tools.files.private_paths import kept_private, store_paths
from holdfast.tools.files.workspace_guard import check_folder
from holdfast.tools.sandbox.choice import find_choice, use_backend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.agents.program_usage import ProgramAccounts
    from holdfast.agents.tool import Toolset
    from holdfast.clock import Clock
    from holdfast.host.agent_registry import AgentRegistry
    from holdfast.host.context import HostContext
    from holdfast.host.message_sender import MessageSender

__all__ = ["HostToolsetContext", "Toolsets"]

_log = logging.getLogger("holdfast.host")

ENTER_S = 60.0
"""Maximum time that a toolset may take to start, in seconds."""
LEAVE_S = 10.0
"""Maximum time that a toolset may take to end before its scope is stopped, in seconds."""


class HostToolsetContext:
    """The services that a host provides to toolsets. Implements `holdfast.agents.tool.ToolsetContext`.

    Parameters:
        path: path of the store's file; None if the store has no file.
    """

    def __init__(self, clock: Clock, sender: MessageSender, programs: ProgramAccounts, path: str | None) -> None:
        self._sender = sender
        self._path = path
        self.clock = clock
        self.programs = programs

    @property
    def data_dir(self) -> Path | None:
        """The folder beside the store's file, created on first use; None if the store has no file."""
        if self._path is None:
            return None
        folder = Path(f"{self._path}.d")
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    async def tell(self, principal: str, session_key: str, text: str) -> None:
        """Send a message to a session. The message is processed once the session is free.

        Raises the errors of `Session.send`.
        """
        await self._sender.send(principal, check_key(session_key), text, SendOptions())


class _Lifespan:
    """The lifespan of one toolset, from the host's start to its close."""

    def __init__(self, context: HostContext, toolset: Toolset, home: HostToolsetContext) -> None:
        loop, settings = context.loop, context.settings
        self.name = type(toolset).__name__
        self._toolset = toolset
        self._home = home
        self._entered: asyncio.Future[None] = loop.create_future()
        self._leave: asyncio.Future[None] = loop.create_future()
        self._scope = Scope(
            f"toolset {self.name}",
            detached=True,
            grace_s=settings.grace_s,
            abandon_after_s=settings.abandon_after_s,
        )

    async def enter(self) -> None:
        """Enter the lifespan. If this fails, stop everything the toolset started and raise `ConfigurationError`."""
        self._scope.open()
        _ = self._scope.spawn(self._live(), name=self.name)
        problem: BaseException | None = None
        try:
            async with asyncio.timeout(ENTER_S):
                await asyncio.shield(self._entered)
        except TimeoutError:
            problem = TimeoutError(f"not ready after {ENTER_S:g} s")
        except asyncio.CancelledError:
            await self._scope.stop("the host's start was cancelled", kind="shutdown")
            raise
        except Exception as error:
            problem = error
        if problem is not None:
            await self._scope.stop("it did not start", kind="shutdown")
            log_failure(_log, f"toolset {self.name} did not start", problem)
            raise ConfigurationError(
                f"toolset {self.name} did not start: {one_line(problem)}",
                hint="correct the toolset, or remove it from the agent's tools",
            ) from problem

    async def _live(self) -> None:
        try:
            async with self._toolset.lifespan(self._home):
                if not self._entered.done():
                    self._entered.set_result(None)
                await self._leave
        except (Exception, asyncio.CancelledError, Interrupted) as error:
            if self._entered.done():
                raise
            self._entered.set_exception(error if isinstance(error, Exception) else InterruptedError("it was stopped"))

    async def leave(self) -> str | None:
        """Exit the lifespan. Return a description of the problem if the exit fails, otherwise None."""
        if not self._leave.done():
            self._leave.set_result(None)
        problem: str | None = None
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._scope.join()
        except TimeoutError:
            problem = f"it did not end within {LEAVE_S:g} s and was stopped"
        except (Exception, Interrupted) as error:
            log_failure(_log, f"toolset {self.name} failed to shut down", error)
            problem = one_line(error)
        receipt = await self._scope.stop("the host is closing", kind="shutdown")
        if receipt.outcome != "gone":
            left = [*(left.name for left in receipt.abandoned), *(f"process {pid}" for pid in receipt.survivors)]
            problem = f"{problem or 'it ended'}, but left: {', '.join(left)}"
        return problem


class Toolsets:
    """Enters and exits the lifespans of a host's toolsets. Use it on the host's loop only."""

    def __init__(
        self, context: HostContext, agents: AgentRegistry, sender: MessageSender, programs: ProgramAccounts
    ) -> None:
        self._context = context
        self._agents = agents
        self._sender = sender
        self._programs = programs
        self._entered: list[_Lifespan] = []
        self._while_entered = contextlib.ExitStack()

    async def enter(self) -> None:
        """Enter each toolset of the host's agents once, and protect the server's data from access through workspaces.

        The data are the store's files and the archive of events. Raises `ConfigurationError` if a toolset fails to
        start, or if a toolset's folder contains or lies in a protected file or folder.
        """
        context = self._context
        self._while_entered.enter_context(use_backend(context.settings.sandbox))
        toolsets: list[Toolset] = []
        for agent in self._agents.by_name.values():
            toolsets += (toolset for toolset in agent.toolsets if not any(known is toolset for known in toolsets))
        if not toolsets:
            return
        info = await context.store.info()
        path = info.path if info.engine == "sqlite" else None
        private = dict.fromkeys(() if path is None else store_paths(path), "the store")
        if context.settings.event_archive:
            private[archive_folder(context.settings.event_archive)] = "the archive of events"
        self._while_entered.enter_context(kept_private(tuple(private)))
        for toolset in toolsets:
            for folder in toolset.folders():
                check_folder(folder, private)
        await self._find_wall(toolsets)
        home = HostToolsetContext(context.clock, self._sender, self._programs, path)
        for toolset in toolsets:
            lifespan = _Lifespan(context, toolset, home)
            await context.start_task(lifespan.enter(), f"enter {lifespan.name}")
            self._entered.append(lifespan)

    async def _find_wall(self, toolsets: Sequence[Toolset]) -> None:
        """Find what confines programs, in a thread, because that may take long; report what is missing.

        Later searches return the same result at once.
        """
        if not any(toolset.executes or toolset.programs for toolset in toolsets):
            return

        def find() -> str:
            try:
                choice = find_choice()
            except HoldfastError as error:
                return f"programs of tools are refused: {error}"
            if not choice.lacks:
                return ""
            return f"programs of tools run behind {choice.describe()}; see holdfast doctor"

        problem = await asyncio.get_running_loop().run_in_executor(None, find)
        if problem and any(toolset.programs for toolset in toolsets):
            _log.warning("%s", problem)
            self._context.report("toolset", problem)

    async def leave(self) -> None:
        """Exit all toolsets in reverse order, and report failures as incidents."""
        while self._entered:
            lifespan = self._entered.pop()
            problem = await lifespan.leave()
            if problem is not None:
                text = f"toolset {lifespan.name} failed to shut down: {problem}"
                self._context.report("toolset", text)
        self._while_entered.close()
