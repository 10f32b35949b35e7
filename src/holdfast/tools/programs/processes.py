"""Tools for background processes of a session: start, poll, write to, wait for and kill them.

Invariants
- A process belongs to one activation of a session: interrupting a run does not end the process, stopping the session
  does.
- A session can access only its own processes; the id of another session's process is treated as unknown.
- If a start is cancelled before it returns, the process is ended, so every running process is in the session's list.
- When a process ends, its session gets one message that states how the process ended. The message is not sent if a
  call that waits for the process reports this, or if a tool call or a stop of the session ended the process. If the
  host ends, the next host sends the message, based on the process's note.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from holdfast import ids
from holdfast.agents.run import Call, Run
from holdfast.agents.tool import Approval, Tool, Toolset, ToolsetContext, tool
from holdfast.clock import Clock, system_clock
from holdfast.errors import Conflict, HoldfastError, InvalidRequest, NotFound, ScopeClosed, ToolFailed
from holdfast.protocol.stopping import Cause
from holdfast.runtime import Scope, current_scope
from holdfast.runtime.oneshot import Oneshot
from holdfast.tools.access import AccessArgument, access_rule, hold_access
from holdfast.tools.files.workspace import Workspace
from holdfast.tools.plain_text import readable, unfinished
from holdfast.tools.programs.leftovers import Note, Notes, make_note
from holdfast.tools.programs.output import OutputLog
from holdfast.tools.programs.program import TERM_TYPE, Program, command_line, ending, shown, typed
from holdfast.tools.sandbox.choice import are_programs_unwalled
from holdfast.tools.sandbox.environment import clean_environment
from holdfast.tools.sandbox.sandbox import Sandbox, SandboxChoice, sandbox_of
from holdfast.tools.walled import HeldAccess, prepare_launch_of

__all__ = ["BackgroundProcess", "Processes"]

_MARGIN_S = 30.0
_TERM_FIRST_S = 3.0
_WRITE_S = 10.0
_NEWS_BYTES = 8_000
_LAST_WORDS_BYTES = 1_000
_ENDED_LIMIT = 1_000
_ENDED_BYTES = 64_000_000

Owner = tuple[str, str]
"""The principal and session key that a process belongs to."""


class BackgroundProcess:
    """A background program of a session and its state, which is kept for a while after the program ends."""

    def __init__(self, owner: Owner, command: str, *, log_bytes: int, clock: Clock) -> None:
        self.process_id = f"p{ids.secret('')[:6]}"
        self.owner = owner
        self.command = command
        self.log = OutputLog(log_bytes)
        self.seen = 0
        """Offset in the log up to which `news` has returned the output."""
        self.started: Oneshot[Program | Exception] = Oneshot()
        self.ended: Oneshot[str] = Oneshot()
        self.wanted = True
        """Whether the session gets a message at the end; False once the session has requested the end."""
        self.watching: list[Oneshot[bool]] = []
        """One entry for each call that waits for the end, set to whether the call reports the end when it returns."""
        self.scope: Scope | None = None
        """Scope that the program runs in; None before the program starts."""
        self.clock = clock
        self.begun_at = clock.monotonic()

    @property
    def program(self) -> Program:
        """The running program. Raises `ToolFailed` if the program is not running."""
        program = self.started.value
        if self.ended.value is not None or not isinstance(program, Program):
            raise ToolFailed(f"process {self.process_id} has ended ({self.ended.value or 'it did not start'})")
        return program

    def state(self) -> str:
        """Return a one-line description of the process's state."""
        if self.ended.value is not None:
            state = self.ended.value
        elif isinstance(self.started.value, Program):
            state = f"running for {self.clock.monotonic() - self.begun_at:.0f} s, pid {self.started.value.process.pid}"
        else:
            state = "starting"
        return f"{self.process_id}: {state}; {self.log.total:,} bytes of output; {self.command}"

    def news(self) -> str:
        """Return the state of the process and its output since the last call of this method."""
        start, data = self.log.read(max(self.seen, self.log.total - _NEWS_BYTES), _NEWS_BYTES)
        missed = start - self.seen
        if self.ended.value is None:  # an incomplete character may still be completed
            data = data[: len(data) - unfinished(data)]
        self.seen = start + len(data)
        skipped = f"[… {missed:,} bytes omitted; read_process_log returns what is kept …]\n" if missed else ""
        return f"{self.state()}\n{skipped}{readable(data)}"

    def last_words(self) -> str:
        """Return the last part of the output, with a heading."""
        text = readable(self.log.last(_LAST_WORDS_BYTES)).strip()
        return f"Last output:\n{text}" if text else "It produced no output."


class Processes(Toolset):
    """Tools with which a model starts, lists, polls, waits for, reads from, writes to and kills background processes.

    Parameters:
        workspace: workspace in which commands start, or path of its root; None uses the default root of `Workspace`.
            Processes run behind a wall: they can change only the workspace.
        sandbox: what processes may see, change, reach and use up in addition, or a function that returns
            this for a principal; None uses the defaults of `Sandbox` without a limit of CPU time below `lifetime_s`.
        limit: maximum number of running processes per session.
        log_bytes: maximum number of output bytes to keep per process; the oldest bytes are dropped first.
        lifetime_s: maximum run time of a process in seconds, after which the process is ended.
        wait_limit_s: maximum time that the model may wait for a process in one call, in seconds.
        pass_environment, environment: environment variables of processes, as for `Terminal`.
        approval: whether a person must approve each start of a process and each write to a process (which may be a
            shell), or a predicate that decides from the arguments. For a write, the predicate is called with the text
            as ``command``.

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
        limit: int = 8,
        log_bytes: int = 256_000,
        lifetime_s: float = 86_400.0,
        wait_limit_s: float = 600.0,
        pass_environment: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        approval: Approval = False,
    ) -> None:
        self._workspace = workspace if isinstance(workspace, Workspace) else Workspace(workspace)
        self._sandbox = sandbox if sandbox is not None else Sandbox(cpu_s=max(math.ceil(lifetime_s), 1))
        self._limit = limit
        self._log_bytes = log_bytes
        self._lifetime_s = lifetime_s
        self._wait_limit_s = wait_limit_s
        self._environment = clean_environment(pass_environment, environment)
        self._rule = access_rule(self._workspace, self._sandbox)
        looking = tool(idempotent=True)
        self._tools = (
            tool(timeout_s=60.0, approval=approval, access=self._rule)(self.start_process),
            looking(self.list_processes),
            looking(self.poll_process),
            tool(timeout_s=wait_limit_s + _MARGIN_S, idempotent=True)(self.wait_process),
            looking(self.read_process_log),
            tool(approval=_of_input(approval))(self.write_process),
            tool(self.kill_process),
        )
        self._clock: Clock = system_clock
        self._notes: Notes | None = None
        self._sessions: dict[Owner, dict[str, BackgroundProcess]] = {}
        self._ended: deque[BackgroundProcess] = deque()
        self._ended_bytes = 0

    @property
    def unwalled(self) -> bool:  # type: ignore[override]  # known after the machine was probed
        """Whether the operator chose that programs run without a wall."""
        return are_programs_unwalled()

    def folders(self) -> Sequence[Path]:
        """Return the root of the workspace."""
        return (self._workspace.root,)

    def tools(self) -> Sequence[Tool]:
        """Return the seven process tools."""
        return self._tools

    # ── host lifespan ────────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.asynccontextmanager
    async def lifespan(self, home: ToolsetContext) -> AsyncIterator[None]:
        """End processes that an earlier host left behind, notify their sessions, and write notes for new processes."""
        self._clock = home.clock
        self._workspace.keep_records(home.data_dir)
        notes = None if home.data_dir is None else Notes(home.data_dir / "processes")
        if notes is not None:
            for note in notes.left():
                if await _tell_of(note, home):
                    notes.remove(note.process_id)
        self._notes = notes
        try:
            yield
        finally:
            self._notes = None

    # ── the tools ────────────────────────────────────────────────────────────────────────────────────────────────

    async def start_process(
        self,
        call: Call,
        command: str | list[str],
        folder: str = ".",
        pty: bool = False,
        access: AccessArgument | None = None,
    ) -> str:
        """Start a program in the background and return its id. You get a message when the program ends.

        Parameters:
            command: a shell command line, or a list of a program and its arguments.
            folder: the folder to start in, relative to the workspace.
            pty: attach a terminal, for programs that need one.
            access: what the program needs beyond its sandbox. A person decides, so ask only for what is needed.
        """
        run = call.run
        request = self._rule(run, {"command": command, "access": access})
        holding = functools.partial(hold_access, run, call.approved, self._workspace, request)
        owner = (run.principal, run.session_key)
        command_line(command)  # before anything is started
        mine = self._sessions.setdefault(owner, {})
        running = sum(one.ended.value is None for one in mine.values())
        if running >= self._limit:
            raise ToolFailed(f"{running} processes are already running, which is the limit; kill one first")
        one = BackgroundProcess(owner, shown(command), log_bytes=self._log_bytes, clock=self._clock)
        mine[one.process_id] = one
        try:
            run.background(
                functools.partial(self._attend, one, run, holding, command, folder, pty),
                name=f"process {one.process_id}",
            )
            started = await one.started.wait()
        except BaseException:
            one.started.set(ToolFailed("its start was cancelled"))  # so that it never starts later
            self._forget(one)
            if one.scope is not None:
                await one.scope.stop("its start was cancelled", grace_s=0.0)
            raise
        if isinstance(started, Exception):
            raise started
        return f"process {one.process_id} started, pid {started.process.pid}"

    async def list_processes(self, call: Call) -> str:
        """List this session's background processes: those running, and the last ones that ended."""
        mine = self._sessions.get((call.run.principal, call.run.session_key), {})
        return "\n".join(one.state() for one in mine.values()) or "no background processes"

    async def poll_process(self, call: Call, process_id: str) -> str:
        """Return the state of a background process and its output since the last call.

        Parameters:
            process_id: the id that start_process returned.
        """
        return self._find(call, process_id).news()

    async def wait_process(self, call: Call, process_id: str, timeout_s: float = 60.0) -> str:
        """Wait until a background process ends or the timeout expires, then return what poll_process returns.

        Parameters:
            process_id: the id that start_process returned.
            timeout_s: maximum wait in seconds. The process keeps running.
        """
        one = self._find(call, process_id)
        watch: Oneshot[bool] = Oneshot()
        one.watching.append(watch)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(max(timeout_s, 0.0), self._wait_limit_s)):
                    await one.ended.wait()
            watch.set(one.ended.value is not None)
        finally:
            watch.set(False)  # no effect unless the wait was cancelled
            one.watching.remove(watch)
        return one.news()

    async def read_process_log(
        self, call: Call, process_id: str, offset: int | None = None, limit: int = _NEWS_BYTES
    ) -> str:
        """Return a part of a background process's output; only the newest output is kept.

        Parameters:
            process_id: the id that start_process returned.
            offset: first byte to return, counted from the start of all output; default: the end of the output.
            limit: maximum bytes to return.
        """
        log = self._find(call, process_id).log
        limit = min(max(limit, 1), 4 * _NEWS_BYTES)
        start, data = log.read(log.total - limit if offset is None else offset, limit)
        return f"[bytes {start:,} to {start + len(data):,} of {log.total:,}; kept from {log.first:,}]\n{readable(data)}"

    async def write_process(self, call: Call, process_id: str, text: str, end: bool = False) -> str:
        """Write to the standard input of a background process, or to its terminal.

        Parameters:
            process_id: the id that start_process returned.
            text: the text to write, including line breaks; on a terminal, \\u0003 is Ctrl-C.
            end: close the input afterwards.
        """
        one = self._find(call, process_id)
        program = one.program
        data = typed(text, end=end and program.pty)
        taken = await program.write(data, timeout_s=_WRITE_S)
        if taken < len(data):
            raise ToolFailed(f"the process accepted only {taken:,} of {len(data):,} bytes within {_WRITE_S:g} s")
        if end and not program.pty:
            program.close_input()
        return "written; input closed" if end else "written"

    async def kill_process(self, call: Call, process_id: str) -> str:
        """End a background process and its child processes: SIGTERM first, then SIGKILL.

        Parameters:
            process_id: the id that start_process returned.
        """
        one = self._find(call, process_id)
        if one.ended.value is None:
            program = one.program
            one.wanted = False
            await program.process.kill_tree(term_first_s=_TERM_FIRST_S)
            await one.ended.wait()
        return one.news()

    def _find(self, call: Call, process_id: str) -> BackgroundProcess:
        one = self._sessions.get((call.run.principal, call.run.session_key), {}).get(process_id)
        if one is None:
            raise ToolFailed(f"unknown process {process_id!r}; call list_processes for valid ids")
        return one

    # ── process lifecycle ────────────────────────────────────────────────────────────────────────────────────────

    async def _attend(
        self,
        one: BackgroundProcess,
        run: Run,
        holding: Callable[[], AbstractAsyncContextManager[HeldAccess]],
        command: str | Sequence[str],
        folder: str,
        pty: bool,
    ) -> str | None:
        """Run a process to its end with its access, in the session's activation; return the message for the session."""
        try:
            async with holding() as held:
                return await self._run(one, run, held, command, folder, pty)
        except ToolFailed as error:  # the access was revoked, or is unusable
            self._forget(one)
            one.started.set(error)
            return None

    async def _run(
        self,
        one: BackgroundProcess,
        run: Run,
        held: HeldAccess,
        command: str | Sequence[str],
        folder: str,
        pty: bool,
    ) -> str | None:
        one.scope = scope = current_scope()
        assert scope is not None, "it runs in the background of a session"
        if one.started.value is not None:
            return None
        try:
            launch = await prepare_launch_of(
                run,
                command_line(command),
                workspace=self._workspace,
                sandbox=sandbox_of(self._sandbox, run.principal),
                environment=self._environment | ({"TERM": TERM_TYPE} if pty else {}),
                folder=folder,
                held=held,
            )
            program = await Program.start(launch, command=command, feed=one.log.feed, stdin="open", pty=pty)
        except (ToolFailed, ScopeClosed) as error:
            self._forget(one)
            one.started.set(error)
            return None
        try:
            self._write_note(one, program)
            one.started.set(program)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._lifetime_s):
                    await program.wait()
            returncode = program.process.returncode
            result = await program.end(term_first_s=_TERM_FIRST_S if returncode is None else 0.0)
        except BaseException as error:
            self._forget(one)
            if self._notes is not None and not _ends_the_host(scope.interrupt.cause):
                self._notes.remove(one.process_id)
            await program.leave()
            one.started.set(ToolFailed(f"the process was ended: {error}"))
            one.ended.set("ended with the session's activation")
            raise
        how = f"ended at its limit of {self._lifetime_s:g} s" if returncode is None else ending(returncode)
        if program.ended_because:
            how = f"ended: {program.ended_because}"
        elif left := sum(pid != program.process.pid for pid in result.killed):
            how += f"; {left} remaining process{'' if left == 1 else 'es'} ended"
        if program.network_note:
            how += f"; {program.network_note}"
        self._settle(one, how)
        told = [await watch.wait() for watch in tuple(one.watching)]
        return f"`{one.command}` has ended: {how}. {one.last_words()}" if one.wanted and not any(told) else None

    def _write_note(self, one: BackgroundProcess, program: Program) -> None:
        if self._notes is not None:
            principal, session_key = one.owner
            self._notes.write(
                make_note(
                    process_id=one.process_id,
                    principal=principal,
                    session_key=session_key,
                    command=one.command,
                    pid=program.process.pid,
                )
            )

    def _settle(self, one: BackgroundProcess, how: str) -> None:
        """Record the end of a process, and forget the oldest ended processes beyond the limits."""
        if self._notes is not None:
            self._notes.remove(one.process_id)
        one.ended.set(how)
        self._ended.append(one)
        self._ended_bytes += one.log.total - one.log.first
        while len(self._ended) > _ENDED_LIMIT or self._ended_bytes > _ENDED_BYTES:
            oldest = self._ended.popleft()
            self._ended_bytes -= oldest.log.total - oldest.log.first
            self._forget(oldest)

    def _forget(self, one: BackgroundProcess) -> None:
        mine = self._sessions.get(one.owner, {})
        mine.pop(one.process_id, None)
        if not mine:
            self._sessions.pop(one.owner, None)


def _of_input(approval: Approval) -> Approval:
    """Return the approval for writes to a process; the text is judged as a command, because a shell would run it."""
    if not callable(approval):
        return approval
    return lambda arguments: approval({**arguments, "command": arguments["text"]})


def _ends_the_host(cause: Cause | None) -> bool:
    """Return whether a process ended because its host ended, so that the session still has to be notified."""
    while cause is not None:
        if cause.kind in ("shutdown", "lease_lost", "crash"):
            return True
        cause = cause.parent
    return False


async def _tell_of(note: Note, home: ToolsetContext) -> bool:
    """Kill what remains of an earlier host's process and notify the session; return False if it must be retried."""
    killed = note.kill()
    alive = f"; {killed} of its processes survived it and were killed" if killed else ""
    text = f"`{note.command}` ended together with its host{alive}. Start it again if needed."
    try:
        await home.tell(note.principal, note.session_key, f"[process {note.process_id}] {text}")
    except (Conflict, NotFound, InvalidRequest):  # the session is deleted
        return True
    except HoldfastError:  # such as a full mailbox: the next start retries
        return False
    return True
