"""The program of an MCP server, and how it is started behind a wall of its own.

Invariants
- A server program serves the host, not one session: its wall shows the system, the files that its command names, its
  folder, and what its sandbox allows; no workspace.
- Without a folder of its own, it gets an empty one, which is removed after its end.
- What it uses counts for the principal that it runs for, or, if all share it, for the host.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.tools.sandbox.account import Account
from holdfast.tools.sandbox.sandbox import Sandbox
from holdfast.tools.walled import are_programs_unwalled, launch_of_host

if TYPE_CHECKING:
    from holdfast.agents.program_usage import ProgramAccounts
    from holdfast.tools.sandbox.port import Launch

__all__ = ["ServerProgram", "inherited"]

_INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")


def inherited(extra: Mapping[str, str] | None) -> dict[str, str]:
    """Return the environment of a server program: basic variables of this process (not its keys) and `extra`."""
    base = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return {**base, **(extra or {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProgram:
    """A server program that is about to start.

    Parameters:
        name: server name, for display.
        command: the program and its arguments.
        env: variables to add to the basic environment; None adds no variables.
        cwd: folder in which the program starts, and which it may change; None means a new one.
        sandbox: what else the program may see, change, reach and use up.
        principal: the principal that the program runs for; empty if all share it.
        programs: the accounts of the host.
    """

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] | None = field(default=None, repr=False)
    cwd: str | None = None
    sandbox: Sandbox = field(default_factory=Sandbox)
    principal: str = ""
    programs: ProgramAccounts

    def prepare(self) -> tuple[Launch, str | None]:
        """Return how to start the program, and the folder to remove after its end, if any. May block for seconds.

        Raises:
            NotSupported: if this machine cannot build the wall.
            ConfigurationError: if a path or a secret of the sandbox is missing.
        """
        if self.cwd is not None:
            return self._launch(self.command, self.cwd, charged=self.cwd), None
        if are_programs_unwalled():
            return self._launch(self.command, os.getcwd(), charged=None), None
        own = tempfile.mkdtemp(prefix="holdfast-mcp-")
        try:
            # a relative name means a file in the host's current folder, which the program does not see
            command = tuple(os.path.abspath(word) if _is_file(word) else word for word in self.command)
            return self._launch(command, own, charged=own), own
        except BaseException:
            shutil.rmtree(own, ignore_errors=True)
            raise

    def _launch(self, command: tuple[str, ...], folder: str, *, charged: str | None) -> Launch:
        launch = launch_of_host(
            command,
            sandbox=self.sandbox,
            folder=folder,
            principal=self.principal,
            environment=inherited(self.env),
            home=(self.env or {}).get("HOME"),
            readable=[word for word in command if os.path.isabs(word) and _is_file(word)],
        )
        account = Account(
            programs=self.programs,
            principal=self.principal,
            folder=None if charged is None else Path(os.path.realpath(charged)),
            shared=self.cwd is not None,
        )
        return dataclasses.replace(launch, account=account)


def _is_file(word: str) -> bool:
    """Return whether a word of a command is the path of a file."""
    return "\0" not in word and os.path.isfile(word)
