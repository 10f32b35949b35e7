"""The agents of a storm, which follow a plan of mixed work and record their observations as stamps.

The agent ``storm`` is declared replayable, because all its effects are calls; the agent ``storm-plain`` does the same
work but is not replayable. `agents` creates both; `agents_of_environment` creates both in a server of a storm.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import assert_never

from holdfast.agents import Agent, Run, tool
from holdfast.errors import ToolFailed
from holdfast.proof.history import Stamp
from holdfast.proof.storm.bombs import StormPrograms
from holdfast.proof.storm.plan import Piece, Plan, decode_plan
from holdfast.proof.storm.stamps import MARKER, Stamps, shell_stamp
from holdfast.proof.storm.wall_probe import ProbeEnded, WallProbe, can_build_walls
from holdfast.protocol.access import AccessRequest
from holdfast.protocol.messages import Access
from holdfast.protocol.stopping import Cause
from holdfast.runtime import Interrupt, current_interrupt
from holdfast.settings import load_settings

__all__ = ["PLAIN", "REPLAYABLE", "STAMPS_VARIABLE", "STORM_VARIABLE", "agents", "agents_of_environment"]

REPLAYABLE = "storm"
PLAIN = "storm-plain"
STAMPS_VARIABLE = "HOLDFAST_STORM_STAMPS"
STORM_VARIABLE = "HOLDFAST_STORM_NAME"

_home: ContextVar[str | None] = ContextVar("holdfast_storm_home", default=None)
"""Principal and key of the session in whose run the code was started. Stamps record this value, so that the checker
finds code that runs with the ambient context of another session."""

_STUCK_S = 0.9
_LISTENS = 10
_POURED = 128
_CUP = "a cup of water " * 512
_WAIT_S = 3.0

_TREE = """\
trap '' TERM INT HUP
tick() {{ {stamp}; }}
beat() {{ n=0; while [ $n -lt {beats} ]; do tick; sleep 0.2; n=$((n+1)); done; }}
case "$1" in
  leaf) beat ;;
  middle) setsid "$0" -c "$2" "$0" leaf "$2" & ;;
  *) ( setsid "$0" -c "$1" "$0" middle "$1" & ) ; beat ;;
esac
"""
"""A shell program that ignores SIGTERM, SIGINT and SIGHUP, and starts an orphaned descendant in another session."""


def _reach(name: str) -> str:
    """Reach a host that only a person can allow."""
    return name


_REACHING = tool(
    name="reach",
    idempotent=True,
    access=lambda session, arguments: AccessRequest(
        access=Access(hosts=("storm.example:443",)), text="reach storm.example:443"
    ),
)(_reach)


class _Teller:
    """Writer of the stamps for one attempt of one run."""

    def __init__(self, stamps: Stamps, storm: str, host: int, run: Run) -> None:
        self._stamps = stamps
        self._run = run
        self._host = host
        self.home = f"{run.principal}/{run.session_key}"
        self.marker = f"{storm} {run.principal} {run.session_key} {run.root_id} {host}"

    def stamp(self, what: str, branch: str = "main", member: str = "task", **fields: object) -> None:
        run = self._run
        made = Stamp(
            at=time.monotonic(),
            what=what,  # type: ignore[arg-type]
            principal=run.principal,
            session=run.session_key,
            run_id=run.root_id,
            attempt=run.attempt,
            branch=branch,
            member=member,  # type: ignore[arg-type]
            pid=fields.pop("pid", os.getpid()),  # type: ignore[arg-type]
            host_pid=self._host,
            **fields,  # type: ignore[arg-type]
        )
        self._stamps.write(made)

    def tick(self, branch: str = "main", member: str = "task", **fields: object) -> None:
        self.stamp("tick", branch, member, seen_session=_home.get(), **fields)

    def in_shell(self, branch: str) -> str:
        """Return a shell command that writes a ``tick`` stamp for a process of the branch."""
        run = self._run
        words = (run.root_id, str(run.attempt), branch, str(self._host), run.principal, run.session_key)
        return shell_stamp(words, self._stamps.path)

    def ended(self, branch: str, member: str, interrupt: Interrupt | None) -> None:
        """Stamp the end of a branch; before that, stamp the branch's interrupt if it was triggered."""
        if interrupt is not None and interrupt.triggered:
            self.stamp("told", branch, member, cause=_first_reason(interrupt.cause), seen_session=_home.get())
        self.stamp("end", branch, member)


def _first_reason(cause: Cause | None) -> str | None:
    while cause is not None and cause.parent is not None:
        cause = cause.parent
    return cause.reason or None if cause is not None else None


class _Work:
    """Executor of the pieces of a plan, for one message of one run."""

    def __init__(self, run: Run, plan: Plan, teller: _Teller, probe: WallProbe, programs: StormPrograms) -> None:
        self._run = run
        self._plan = plan
        self._teller = teller
        self._probe = probe
        self._programs = programs
        self._number = 0

    def _name(self, piece: str) -> str:
        self._number += 1
        return f"{self._plan.name}-{self._number}-{piece}"

    async def do(self) -> None:
        for piece in self._plan.pieces:
            self._teller.tick()
            await self._piece(piece, self._name(piece))

    async def _piece(self, piece: Piece, name: str) -> None:
        span_s = self._plan.span_s
        match piece:
            case "emit":
                for word in range(4):
                    await self._run.emit(f"{name}:{word} ")
                    await asyncio.sleep(span_s / 4)
            case "nap":
                await self._run.interrupt.sleep(span_s)
            case "call" | "once":
                again = piece == "call"
                await self._run.emit(await self._run.call(self._effect, name, again, name=name, idempotent=again))
            case "task":
                self._run.spawn(self._beating, name, name=name)
                await asyncio.sleep(0)
            case "tidy":
                await self._run.spawn(self._beating, name, span_s, name=name)
            case "thread":
                await self._run.spawn(self._beating_thread, name, name=name)
            case "stuck":
                await self._run.spawn(self._stuck, name, name=name)
            case "wait":
                await self._run.parallel(
                    partial(self._wait, f"{name}-task"),
                    partial(self._wait_blocking, f"{name}-thread"),
                    partial(self._tree, f"{name}-tree", _WAIT_S),
                )
            case "parallel":
                await self._run.parallel(
                    partial(self._beating, f"{name}-1"),
                    partial(self._beating_thread, f"{name}-2"),
                    partial(self._beating, f"{name}-3"),
                )
            case "child":
                child = Agent(name=name, work=partial(self._child, name))
                await self._run.emit(await self._run.delegate(child, "the child's part"))
            case "process":
                await self._tree(name, span_s)
            case "raw":
                await self._foreign(name)
            case "ask":
                await self._run.emit((await self._run.ask_user(f"{name}: how to continue?")).decision)
            case "access":
                await self._run.call_tool(_REACHING, {"name": name})
            case "listen":
                for _ in range(_LISTENS):
                    await asyncio.sleep(span_s / _LISTENS)
                    await self._run.take_steering()
            case "pour":
                for _ in range(_POURED):
                    await self._run.emit(_CUP)
            case "probe":
                await self._try_to_leave()
            case "bomb":
                await self._throw()
            case "hold":
                await self._hold()
            case "fail":
                raise RuntimeError(f"{name} was asked to fail")
            case _:
                assert_never(piece)

    async def _effect(self, name: str, idempotent: bool) -> str:
        self._teller.stamp("effect", effect=name, idempotent=idempotent)
        await asyncio.sleep(self._plan.span_s / 2)
        return name

    async def _beating(self, name: str, tidy_s: float = 0.0) -> None:
        teller = self._teller
        teller.stamp("branch", name)
        try:
            for _ in range(4):
                await asyncio.sleep(self._plan.span_s / 4)
                teller.tick(name)
        finally:
            try:
                await asyncio.sleep(tidy_s)
            finally:
                teller.ended(name, "task", self._run.interrupt)

    def _beating_thread(self, name: str) -> None:
        teller = self._teller
        interrupt = current_interrupt()
        teller.stamp("branch", name, "thread")
        try:
            for _ in range(4):
                if interrupt is None:
                    time.sleep(self._plan.span_s / 4)
                else:
                    interrupt.sleep_blocking(self._plan.span_s / 4)
                teller.tick(name, "thread")
        finally:
            teller.ended(name, "thread", interrupt)

    async def _wait(self, name: str) -> None:
        """Wait for the interrupt. The timeout is long enough that a timeout is not mistaken for an interrupt."""
        self._teller.stamp("branch", name)
        try:
            await self._run.interrupt.sleep(_WAIT_S)
        finally:
            self._teller.ended(name, "task", self._run.interrupt)

    def _wait_blocking(self, name: str) -> None:
        interrupt = current_interrupt() or self._run.interrupt
        self._teller.stamp("branch", name, "thread")
        try:
            interrupt.sleep_blocking(_WAIT_S)
        finally:
            self._teller.ended(name, "thread", interrupt)

    def _stuck(self, name: str) -> None:
        """Block the thread for `_STUCK_S` seconds, without watching the interrupt."""
        self._teller.stamp("branch", name, "thread", cooperative=False)
        time.sleep(_STUCK_S)
        self._teller.stamp("end", name, "thread", cooperative=False)

    async def _child(self, name: str, child: Run) -> str:
        self._teller.stamp("branch", name, "child")
        try:
            await child.emit(f"{name} ")
            await asyncio.sleep(self._plan.span_s / 2)
            self._teller.tick(name, "child")
        finally:
            self._teller.ended(name, "child", child.interrupt)
        return "done"

    def _environment(self) -> dict[str, str]:
        return {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), MARKER: self._teller.marker}

    async def _tree(self, name: str, span_s: float) -> None:
        beats = max(1, round(span_s / 0.2))
        tree = _TREE.format(stamp=self._teller.in_shell(name), beats=beats)
        process = await self._run.process(["/bin/sh", "-c", tree, "/bin/sh", tree], env=self._environment(), name=name)
        self._teller.stamp("branch", name, "process", pid=process.pid, cooperative=False)
        await process.wait()

    async def _try_to_leave(self) -> None:
        """Run a walled program that tries to leave its wall; do nothing where programs run without walls."""
        if await self._run.spawn(can_build_walls, on="thread"):
            try:
                self._teller.stamp("probe", reached=await self._probe.run(self._run))
            except ProbeEnded as error:
                self._teller.stamp("program", ended=str(error))

    async def _throw(self) -> None:
        """Throw the plan's bomb, and emit the tool's result, or why the tool refused."""
        try:
            await self._run.emit(await self._programs.throw(self._run, self._plan.bomb, self._teller.marker))
        except ToolFailed as error:
            await self._run.emit(f"[refused: {error}]")

    async def _hold(self) -> None:
        """Run a walled program that waits; do nothing where programs run without walls."""
        if await self._run.spawn(can_build_walls, on="thread"):
            self._teller.stamp("program", ended=await self._programs.hold(self._run, self._plan.span_s))

    async def _foreign(self, name: str) -> None:
        """Start a program with asyncio instead of the runtime, as third-party code would, and wait for it."""
        program = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            f"trap '' TERM; sleep {self._plan.span_s:.3f}",
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        self._teller.stamp("branch", name, "process", pid=program.pid, cooperative=False)
        await program.wait()


def agents(stamps: Stamps, storm: str, *, host: int) -> tuple[Agent, Agent]:
    """Return the replayable agent and the plain agent.

    Parameters:
        stamps: the side file to which the agents write stamps.
        storm: name of the storm, which is part of the marker of all the storm's processes.
        host: number of the host in the history, which is the host's pid if the host is a separate process.
    """
    programs = StormPrograms(stamps.path.parent)
    probe = WallProbe(stamps.path.parent, port=load_settings().port if host == os.getpid() else 0)

    async def work(run: Run) -> None:
        teller = _Teller(stamps, storm, host, run)
        _home.set(teller.home)
        teller.stamp("start")
        try:
            for message in run.messages:
                await _Work(run, decode_plan(message.content), teller, probe, programs).do()
        finally:
            if run.interrupt.triggered:
                cause = _first_reason(run.interrupt.cause)
                teller.stamp("told", cause=cause, seen_session=_home.get())
            teller.stamp("finish")

    return (
        Agent(name=REPLAYABLE, work=work, replayable=True, description="mixed work that resumes after a crash"),
        Agent(name=PLAIN, work=work, description="mixed work that a crash ends"),
    )


def agents_of_environment() -> tuple[Agent, Agent]:
    """Return the agents for the side file and storm named in environment variables.

    Raises `KeyError` outside a storm.
    """
    return agents(Stamps(Path(os.environ[STAMPS_VARIABLE])), os.environ[STORM_VARIABLE], host=os.getpid())
