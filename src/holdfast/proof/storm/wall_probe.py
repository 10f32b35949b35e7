"""A program in a session's workspace that tries to reach what is outside its wall, as a storm's agents run it.

The program leaves a mark in its own workspace, then looks for the marks of all other sessions, for files of the storm,
for the host's memory and environment, and for the host's port. It is started in the same way as the programs of a
model's tools. What it reports is judged as promise P16.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError
from holdfast.tools.files.workspace import Workspace
from holdfast.tools.programs.output import Recording
from holdfast.tools.programs.program import Program, command_line
from holdfast.tools.sandbox.choice import find_backend
from holdfast.tools.sandbox.environment import clean_environment
from holdfast.tools.sandbox.sandbox import Sandbox
from holdfast.tools.walled import HeldAccess, prepare_launch_of

if TYPE_CHECKING:
    from holdfast.agents.run import Run

__all__ = ["ProbeEnded", "WallProbe", "can_build_walls"]

_MARK = "mark"
_OUTPUT_BYTES = 16_000
_PROBE = """\
home=$1 host=$2 folder=$3 port=$4
echo "$home" >mark || echo "reached no workspace of its own"
for mark in "$folder"/workspaces/*/mark "$folder"/workspaces/*/*/mark /proc/[0-9]*/cwd/mark; do
  [ -e "$mark" ] && { read -r found <"$mark"; [ "$found" = "$home" ] || echo "reached the workspace of $found"; }
done
for file in "$folder"/*; do
  [ -f "$file" ] && { head -c 1 "$file" >/dev/null 2>&1 && echo "reached the file ${file##*/}"; }
  [ -f "$file" ] && { : 2>/dev/null >>"$file" && echo "reached the file ${file##*/} for writing"; }
done
for file in environ maps; do
  grep -qs python "/proc/$host/cmdline" && head -c 1 "/proc/$host/$file" >/dev/null 2>&1 &&
    echo "reached $file of the host"
done
[ "$port" != 0 ] && (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null && echo "reached the host's port"
echo done
"""
"""Shell program; its arguments are its session, the host's pid, the storm's folder and the host's port, 0 if none."""


def can_build_walls() -> bool:
    """Return whether programs of tools run behind walls here. May block for seconds."""
    try:
        return find_backend().name != "none"
    except HoldfastError:
        return False


class ProbeEnded(Exception):
    """The host ended the program, for the reason that is the error's text."""


class WallProbe:
    """Runs the program for the sessions of one host.

    Parameters:
        folder: folder of the storm's files, in which the workspaces are.
        port: port of the host on loopback; 0 if it has none.
    """

    def __init__(self, folder: Path, *, port: int) -> None:
        self._folder = folder
        self._port = port
        self._workspace = Workspace(folder / "workspaces", per_session=True)

    async def run(self, run: Run) -> tuple[str, ...]:
        """Run the program in the workspace of a run's session; return what it reached outside its wall.

        Raises:
            ToolFailed: if the program did not start.
            ProbeEnded: if the host ended the program because its principal used too much.
            RuntimeError: if the program did not come to its end, so that it proves nothing.
        """
        recording = Recording(_OUTPUT_BYTES)
        home = f"{run.principal}/{run.session_key}"
        words = (home, str(os.getpid()), os.fspath(self._folder), str(self._port))
        argv = [*command_line(_PROBE), "probe", *words]
        launch = await prepare_launch_of(
            run,
            argv,
            workspace=self._workspace,
            sandbox=Sandbox(),
            environment=clean_environment(),
            held=HeldAccess(),
        )
        program = await Program.start(launch, command="probe of the wall", feed=recording.feed)
        try:
            await program.wait()
        except BaseException:
            await program.leave()
            raise
        await program.end()
        if program.ended_because:
            raise ProbeEnded(program.ended_because)
        *reached, last = recording.text().splitlines() or [""]
        if last != "done":
            raise RuntimeError(f"the probe of the wall ended early: {recording.text()!r:.300}")
        return tuple(line.removeprefix("reached ") for line in reached)
