"""Programs that a storm's agents run with the tool `terminal`: bombs of a hostile principal, and programs that wait.

A bomb takes ever more of one resource at a known pace and counts what it has, until the quota of its principal ends it.
Invariants

- A bomb stops at a bound of its own, which is a few times its quota, and ends by itself.
- It writes only to the workspace of its session, which is emptied before and after it.
- Its processes carry the marker of the storm, so the storm's lists of processes show what is left of it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.host.program_quotas import REACTION_S
from holdfast.proof.storm.stamps import MARKER
from holdfast.tools.files.workspace import Workspace
from holdfast.tools.programs.terminal import Terminal

if TYPE_CHECKING:
    from holdfast.agents.run import Run

__all__ = ["BOMBS", "QUOTAS", "Bomb", "StormPrograms"]

_TICK_S = 0.01
_LIFE_S = 20.0
_ABOVE_S = 5.0
"""Time for which a bomb continues once it has more than its quota."""
_TIMEOUT_S = 40.0
_OUTPUT_BYTES = 8_000
_OMITTED_BYTES = 200
"""Length of the lines about the program's end and the bytes left out."""
_MIB = 1 << 20

_BOMB = """\
import os, time
held, kept, main = 0, [], 1
above, until = False, time.monotonic() + {life_s}
{first}
while time.monotonic() < until:
    if held < {most}:
        try:
            {take}
            held += {step}
            main and os.write(1, b"had %d\\n" % held)
        except OSError:
            pass
    if held > {quota} and not above:
        above, until = True, time.monotonic() + {above_s}
    time.sleep({tick_s})
"""
_HAD = re.compile(r"^had (\d+)$", re.MULTILINE)
_ENDED = re.compile(r"^\[ended: ([^\]]*)", re.MULTILINE)
_EMPTY = ("find", ".", "-mindepth", "1", "-delete")


class Bomb(msgspec.Struct, frozen=True, kw_only=True):
    """A program that takes ever more of one resource.

    Parameters:
        name: name of the bomb, and of the hostile principal's action.
        setting: the setting that limits the resource; empty if the tool's own bound does.
        quota: value of the setting or bound.
        overshoot: how much more the program may have before it is ended, as the host states it.
        reason: text in the tool's result if the program was ended, or its output cut, for this resource.
        program: Python source of the program.
    """

    name: str
    setting: str
    quota: int
    overshoot: int
    reason: str
    program: str

    def result(self, text: str) -> tuple[int, bool]:
        """Return the most that the program had, and whether the tool's result has the reason for its end."""
        had = [int(count) for count in _HAD.findall(text)] if self.setting else [len(text.encode())]
        ended = _ENDED.findall(text) if self.setting else [text]
        return max(had, default=0), any(self.reason in why for why in ended)


def _bomb(
    name: str, setting: str, quota: int, reason: str, *, step: int, most: int, take: str, first: str = ""
) -> Bomb:
    """Return a bomb that takes `step` more every tick, up to `most`; `take` and `first` are lines of its source."""
    program = _BOMB.format(
        first=first, take=take, step=step, most=most, quota=quota, life_s=_LIFE_S, above_s=_ABOVE_S, tick_s=_TICK_S
    )
    overshoot = int(step / _TICK_S * REACTION_S)
    return Bomb(name=name, setting=setting, quota=quota, overshoot=overshoot, reason=reason, program=program)


BOMBS = (
    _bomb(
        "fork bombs",
        "principal_program_processes",
        100,
        "processes and threads; the limit is",
        step=1,
        most=240,
        take="if os.fork() == 0: time.sleep(30); os._exit(0)",
    ),
    _bomb(
        "memory bombs",
        "principal_program_memory_bytes",
        128 * _MIB,
        "of memory; the limit is",
        step=_MIB,
        most=260 * _MIB,
        take=f"kept.append(b'x' * {_MIB})",
    ),
    _bomb(
        "disk bombs",
        "principal_disk_bytes",
        32 * _MIB,
        "; the limit is 32 MiB; delete files",
        step=_MIB // 2,
        most=96 * _MIB,
        take=f"open(str(held), 'wb').write(bytes({_MIB // 2}))",
    ),
    _bomb(
        "inode bombs",
        "principal_inodes",
        2000,
        "files and folders; the limit is",
        step=20,
        most=4400,
        take="for number in range(20): open(str(held + number), 'wb').close()",
    ),
    _bomb(
        "descriptor bombs",
        "principal_program_files",
        600,
        "open files; the limit is",
        step=6,
        most=1440,
        first="main = os.fork() and os.fork()",
        take="kept += [os.open('/dev/null', 0) for _ in range(2)]",
    ),
    Bomb(
        name="output bombs",
        setting="",
        quota=_OUTPUT_BYTES,
        overshoot=_OMITTED_BYTES,
        reason="bytes omitted",
        program="import os\nfor _ in range(320): os.write(1, b'y' * 65536)",
    ),
)
"""The bombs. Each one that is not ended goes beyond four times its overshoot."""

QUOTAS = {bomb.setting: bomb.quota for bomb in BOMBS if bomb.setting}
"""The settings of a server at which bombs are thrown; what other programs of the storm use is far below them."""


class StormPrograms:
    """Runs programs for the sessions of one host, as a model would with the tool `terminal`.

    Parameters:
        folder: folder of the storm's files, in which the workspaces of these programs are.
    """

    def __init__(self, folder: Path) -> None:
        workspace = Workspace(folder / "terminals", per_session=True, protect_existing=False)
        (self._terminal,) = Terminal(workspace, timeout_s=_TIMEOUT_S, output_bytes=_OUTPUT_BYTES).tools()
        self._bombs = {bomb.name: bomb for bomb in BOMBS}

    async def throw(self, run: Run, name: str, marker: str) -> str:
        """Run a bomb in the workspace of a run's session, and return what the tool returned.

        Parameters:
            name: the bomb's name.
            marker: value of the environment variable that marks the bomb's processes.

        Raises:
            ToolFailed: if the program was not started.
        """
        bomb = self._bombs[name]
        await self._run(run, *_EMPTY)
        try:
            return await self._run(run, "env", f"{MARKER}={marker}", sys.executable, "-I", "-S", "-c", bomb.program)
        finally:
            await self._run(run, *_EMPTY)

    async def hold(self, run: Run, span_s: float) -> str:
        """Run a program that only waits; return why the host ended it, or an empty string if it ended by itself.

        Raises:
            ToolFailed: if the program was not started.
        """
        why = _ENDED.findall(await self._run(run, "sleep", f"{span_s:.3f}"))
        return why[-1] if why else ""

    async def _run(self, run: Run, *command: str) -> str:
        return str(await run.call_tool(self._terminal, {"command": list(command)}))
