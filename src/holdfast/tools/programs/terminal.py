"""The tool that runs a command to completion in a workspace and returns its exit status and bounded output."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from holdfast.agents.run import Call
from holdfast.agents.tool import Approval, Tool, Toolset, ToolsetContext, tool
from holdfast.runtime.process_host import TreeResult
from holdfast.tools.access import AccessArgument, access_rule, hold_access
from holdfast.tools.files.workspace import Workspace
from holdfast.tools.programs.output import LiveOutput, Recording
from holdfast.tools.programs.program import TERM_TYPE, Program, command_line, ending, input_file, typed
from holdfast.tools.sandbox.choice import are_programs_unwalled
from holdfast.tools.sandbox.environment import clean_environment
from holdfast.tools.sandbox.sandbox import Sandbox, SandboxChoice, sandbox_of
from holdfast.tools.walled import HeldAccess, prepare_launch_of

__all__ = ["Terminal"]

_MARGIN_S = 30.0
"""Time added to the command's timeout for the call, so that the process tree can be killed and the end reported."""
_TERM_FIRST_S = 1.0
_LIVE_BYTES = 100_000


class Terminal(Toolset):
    """The tool ``terminal`` for a model, which runs a shell command or a program with arguments to completion.

    The command's child processes end with the command, even if they have left its session or ignore SIGTERM. When the
    run is interrupted, the command and its child processes receive SIGTERM, and are killed after the grace period.

    Parameters:
        workspace: workspace in which commands start, or path of its root; None uses the default root of `Workspace`.
            Commands run behind a wall: they can change only the workspace.
        sandbox: what commands may see, change, reach and use up in addition, or a function that returns
            this for a principal; None uses the defaults of `Sandbox`.
        timeout_s: default timeout of a command, in seconds.
        timeout_limit_s: maximum timeout that the model may request, in seconds.
        output_bytes: maximum number of output bytes in the result, half from the beginning and half from the end.
        pass_environment: names or patterns of additional environment variables to pass on; names of secrets are
            refused.
        environment: environment variables to add, with their values; None adds no variables.
        approval: whether a person must approve each command, or a predicate that decides from the arguments.

    Raises:
        ConfigurationError: if `Workspace` rejects the workspace or `clean_environment` rejects a variable.
    """

    executes = True
    programs = True

    def __init__(
        self,
        workspace: Workspace | str | os.PathLike[str] | None = None,
        *,
        sandbox: SandboxChoice | None = None,
        timeout_s: float = 120.0,
        timeout_limit_s: float = 600.0,
        output_bytes: int = 32_000,
        pass_environment: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        approval: Approval = False,
    ) -> None:
        self._workspace = workspace if isinstance(workspace, Workspace) else Workspace(workspace)
        self._sandbox = sandbox if sandbox is not None else Sandbox()
        self._timeout_s = timeout_s
        self._timeout_limit_s = max(timeout_limit_s, timeout_s)
        self._output_bytes = output_bytes
        self._environment = clean_environment(pass_environment, environment)
        self._rule = access_rule(self._workspace, self._sandbox)
        self._tools = (
            tool(timeout_s=self._timeout_limit_s + _MARGIN_S, approval=approval, access=self._rule)(self.terminal),
        )

    @property
    def unwalled(self) -> bool:  # type: ignore[override]  # known after the machine was probed
        """Whether the operator chose that programs run without a wall."""
        return are_programs_unwalled()

    @contextlib.asynccontextmanager
    async def lifespan(self, home: ToolsetContext) -> AsyncIterator[None]:
        """Keep the records of what sessions made while the host runs."""
        self._workspace.keep_records(home.data_dir)
        yield

    def folders(self) -> Sequence[Path]:
        """Return the root of the workspace."""
        return (self._workspace.root,)

    def tools(self) -> Sequence[Tool]:
        """Return the tool ``terminal``."""
        return self._tools

    async def terminal(
        self,
        call: Call,
        command: str | list[str],
        folder: str = ".",
        timeout_s: float | None = None,
        stdin: str | None = None,
        pty: bool = False,
        access: AccessArgument | None = None,
    ) -> str:
        """Run a command to completion and return its output, standard error included, and its exit code.

        Each call starts a new shell: the current folder and variables do not carry over. Processes that the command
        leaves running end with the command.

        Parameters:
            command: a shell command line, or a list of a program and its arguments.
            folder: the folder to start in, relative to the workspace.
            timeout_s: seconds after which the command is ended and its output so far is returned.
            stdin: text for the command's standard input; empty by default.
            pty: attach a terminal, for programs that need one.
            access: what the command needs beyond its sandbox. A person decides, so ask only for what is needed.
        """
        request = self._rule(call.run, {"command": command, "stdin": stdin, "access": access})
        async with hold_access(call.run, call.approved, self._workspace, request) as held:
            return await self._run(call, held, command, folder, timeout_s, stdin, pty)

    async def _run(
        self,
        call: Call,
        held: HeldAccess,
        command: str | list[str],
        folder: str,
        timeout_s: float | None,
        stdin: str | None,
        pty: bool,
    ) -> str:
        recording = Recording(self._output_bytes)
        live = LiveOutput(call, _LIVE_BYTES)

        def feed(data: bytes) -> None:
            recording.feed(data)
            live.feed(data)

        wait_s = self._timeout_s if timeout_s is None else min(max(timeout_s, 0.0), self._timeout_limit_s)
        launch = await prepare_launch_of(
            call.run,
            command_line(command),
            workspace=self._workspace,
            sandbox=sandbox_of(self._sandbox, call.run.principal),
            environment=self._environment | ({"TERM": TERM_TYPE} if pty else {}),
            folder=folder,
            held=held,
            may_free=True,
        )
        with contextlib.closing(live), contextlib.ExitStack() as opened:
            program = await Program.start(
                launch,
                command=command,
                feed=feed,
                stdin="none" if stdin is None or pty else opened.enter_context(input_file(stdin)),
                pty=pty,
            )
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        if pty and stdin is not None:
                            await program.write(typed(stdin, end=True), timeout_s=wait_s)
                        await program.wait()
                returncode = program.process.returncode  # read before the kill, which sets it
                result = await program.end(term_first_s=_TERM_FIRST_S if returncode is None else 0.0)
            except asyncio.CancelledError:
                await program.leave()
                raise
        call.failed = returncode != 0 or bool(program.ended_because)
        text = recording.text()
        told = _told(returncode, wait_s, result, program.ended_because, program.network_note)
        if launch.account is not None and launch.account.full:
            told += f"; commands can delete but not write files, because {launch.account.full}"
        line_end = "" if text.endswith("\n") or not text else "\n"
        return f"{text}{line_end}[{told}]"


def _told(returncode: int | None, wait_s: float, result: TreeResult, ended_because: str, network_note: str) -> str:
    """Return a description of how the command and its process tree ended, and of what its network refused."""
    if ended_because:
        parts = [f"ended: {ended_because}"]
    elif returncode is None:
        parts = [f"timed out after {wait_s:g} s and was killed; the output up to then is above"]
    else:
        parts = [ending(returncode)]
        if left := len(result.killed):
            parts.append(
                f"{left} process{'' if left == 1 else 'es'} left running {'was' if left == 1 else 'were'} ended"
            )
    if result.survivors:
        parts.append(f"still running: process {', '.join(map(str, result.survivors))}")
    if network_note:
        parts.append(network_note)
    return "; ".join(parts)
