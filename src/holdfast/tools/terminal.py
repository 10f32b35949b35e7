"""The tool that runs a command to its end, in a workspace: bounded output, every exit told, and nothing left alive."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.agents.run import Call
from holdfast.agents.tool import Approval, Tool, Toolset, tool
from holdfast.runtime.processes import TreeResult
from holdfast.tools.environment import clean_environment
from holdfast.tools.output import LiveOutput, Recording
from holdfast.tools.programs import Program, ending, input_file, typed
from holdfast.tools.workspace import Workspace

__all__ = ["Terminal"]

_MARGIN_S = 30.0
"""The call's own deadline comes so much after the command's: time to end its tree and to tell."""
_TERM_FIRST_S = 1.0
_LIVE_BYTES = 100_000


class Terminal(Toolset):
    """Gives a model the tool ``terminal``: a shell command, or a program with its arguments, run to its end.

    What the command starts ends with it, also what left its session or ignores SIGTERM; when the run is interrupted,
    everything is asked to end and killed after the grace.

    Parameters:
        workspace: where commands start. They can leave it: they have all rights of this process's user.
            None: see `Workspace`.
        timeout_s: deadline of a command that names none.
        timeout_limit_s: the longest deadline that the model may ask for.
        output_bytes: how much of the output the result has; half of it from the beginning, half from the end.
        pass_environment: names or patterns of environment variables to hand on besides the usual ones; secrets are
            refused.
        environment: variables to add, with their values.
        approval: a person must approve each command; or a predicate of the arguments that says so.

    Raises:
        ConfigurationError: as `Workspace` and `clean_environment`.
    """

    executes = True
    unwalled = True

    def __init__(
        self,
        workspace: Workspace | str | os.PathLike[str] | None = None,
        *,
        timeout_s: float = 120.0,
        timeout_limit_s: float = 600.0,
        output_bytes: int = 32_000,
        pass_environment: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        approval: Approval = False,
    ) -> None:
        self._workspace = workspace if isinstance(workspace, Workspace) else Workspace(workspace)
        self._timeout_s = timeout_s
        self._timeout_limit_s = max(timeout_limit_s, timeout_s)
        self._output_bytes = output_bytes
        self._environment = clean_environment(pass_environment, environment)
        self._tools = (tool(timeout_s=self._timeout_limit_s + _MARGIN_S, approval=approval)(self.terminal),)

    def folders(self) -> Sequence[Path]:
        """Return the root of its workspace."""
        return (self._workspace.root,)

    def tools(self) -> Sequence[Tool]:
        """The one tool."""
        return self._tools

    async def terminal(
        self,
        call: Call,
        command: str | list[str],
        folder: str = ".",
        timeout_s: float | None = None,
        stdin: str | None = None,
        pty: bool = False,
    ) -> str:
        """Run a command to its end and return what it wrote, standard error included, and its exit code.

        Each call is a new shell: no folder or variable is kept from the last one. Processes that the command leaves
        running are ended with it.

        Parameters:
            command: a shell command line, or a list of a program and its arguments.
            folder: where to run it, in the workspace.
            timeout_s: seconds after which it is ended; what it wrote until then is returned.
            stdin: text for its standard input, which is empty otherwise.
            pty: give it a terminal, for programs that want one.
        """
        recording = Recording(self._output_bytes)
        live = LiveOutput(call, _LIVE_BYTES)

        def feed(data: bytes) -> None:
            recording.feed(data)
            live.feed(data)

        wait_s = self._timeout_s if timeout_s is None else min(max(timeout_s, 0.0), self._timeout_limit_s)
        start_in = self._workspace.of(call.run).folder(folder)
        with contextlib.closing(live), contextlib.ExitStack() as opened:
            program = await Program.start(
                command,
                folder=start_in,
                environment=self._environment,
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
                returncode = program.process.returncode  # before the kill, which would give it one
                result = await program.end(term_first_s=_TERM_FIRST_S if returncode is None else 0.0)
            except asyncio.CancelledError:
                await program.leave()
                raise
        text = recording.text()
        return f"{text}{'' if text.endswith(chr(10)) or not text else chr(10)}[{_told(returncode, wait_s, result)}]"


def _told(returncode: int | None, wait_s: float, result: TreeResult) -> str:
    """What became of the command and its tree."""
    if returncode is None:
        parts = [f"it did not end within {wait_s:g} s and was killed; this is what it wrote until then"]
    else:
        parts = [ending(returncode)]
        if left := len(result.killed):
            parts.append(
                f"{left} process{'' if left == 1 else 'es'} that it left running {'was' if left == 1 else 'were'} ended"
            )
    if result.survivors:
        parts.append(f"not ended yet: process {', '.join(map(str, result.survivors))}")
    return "; ".join(parts)
