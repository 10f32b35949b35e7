"""The tool that runs a Python script in its own confined interpreter; the script can call the agent's tools.

Invariants
- The script and the host communicate over a socket pair that the script inherits, so other processes have no path to
  open.
- The script's messages are bounded in frame size, concurrent calls and total calls. While the limit of concurrent calls
  is reached, the host does not read the socket.
- A tool call that the script makes is recorded in the run's journal and log, and is subject to the run's limits and
  approvals. When the script ends, its unfinished calls are stopped before the tool returns.
- The script's process tree is dead before the tool returns or propagates a cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.agents.agent import Agent
from holdfast.agents.results import truncate
from holdfast.agents.run import Call
from holdfast.agents.run_tools import toolbox
from holdfast.agents.tool import Approval, Tool, Toolset, ToolsetContext, tool
from holdfast.errors import Interrupted, ToolFailed, format_error
from holdfast.protocol.events import encode_json
from holdfast.runtime import Handle, Scope, current_scope
from holdfast.tools.access import AccessArgument, access_rule, hold_access
from holdfast.tools.files.workspace import Workspace
from holdfast.tools.programs.output import LiveOutput, Recording
from holdfast.tools.programs.program import Program, ending
from holdfast.tools.sandbox.choice import are_programs_unwalled
from holdfast.tools.sandbox.environment import clean_environment
from holdfast.tools.sandbox.sandbox import Sandbox, SandboxChoice, sandbox_of
from holdfast.tools.walled import HeldAccess, prepare_launch_of

__all__ = ["SCRIPT", "Python"]

SCRIPT = Sandbox(
    memory_bytes=2 << 30, cpu_s=60, processes=64, open_files=256, file_bytes=256 << 20, scratch_bytes=64 << 20
)
"""What scripts may use up unless the tool is given a `Sandbox`."""

_CHILD = str(Path(__file__).with_name("python_child.py"))
_LIVE_BYTES = 200_000
_FRAME_BYTES = 1_100_000
"""Maximum frame size, slightly more than a run accepts as the arguments or the result of a call."""
_LAST_WORDS_S = 1.0
_CALLS_GRACE_S = 1.0
_LENGTH = struct.Struct("!I")


class _Hello(msgspec.Struct, tag_field="kind", tag="hello"):
    pass


class _Use(msgspec.Struct, tag_field="kind", tag="use"):
    id: int
    tool: str
    arguments: dict[str, Any]


class _Value(msgspec.Struct, tag_field="kind", tag="value"):
    text: str
    cut: bool


_decode = msgspec.json.Decoder(_Hello | _Use | _Value).decode


class Python(Toolset):
    """The tool ``python`` for a model, which runs a script in a new interpreter; the script can call the agent's tools.

    Scripts run behind a wall (see `Sandbox`); the tool's description states what it allows, if that is the same for
    all principals.

    Parameters:
        workspace: workspace in which scripts start, or path of its root; None uses the default root of `Workspace`.
            Apart from temporary folders, a script can change files only in the workspace.
        sandbox: what scripts may see, change, reach and use up, or a function that returns this for a principal;
            None means `SCRIPT`.
        tools: tools that scripts may call; None means the agent's tools.
        timeout_s: default timeout of a script, in seconds; time spent in tool calls does not count.
        timeout_limit_s: maximum timeout that the model may request, in seconds.
        output_bytes: maximum number of bytes of output in the result, and of characters of the script's value.
        calls_at_once: maximum number of concurrent tool calls of a script; further calls wait.
        calls: maximum total number of tool calls of a script.
        interpreter: path of the Python interpreter (3.9 or later) that runs scripts with its installed packages.
        pass_environment, environment: environment variables of scripts, as for `Terminal`.
        approval: whether a person must approve each script, or a predicate that decides from the arguments.

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
        tools: Sequence[Tool] | None = None,
        timeout_s: float = 60.0,
        timeout_limit_s: float = 600.0,
        output_bytes: int = 32_000,
        calls_at_once: int = 8,
        calls: int = 200,
        interpreter: str = sys.executable,
        pass_environment: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        approval: Approval = False,
    ) -> None:
        self._workspace = workspace if isinstance(workspace, Workspace) else Workspace(workspace)
        self._sandbox = sandbox if sandbox is not None else SCRIPT
        self._offered = tools
        self._timeout_s = timeout_s
        self._timeout_limit_s = max(timeout_limit_s, timeout_s)
        self._output_bytes = output_bytes
        self._calls_at_once = calls_at_once
        self._calls = calls
        self._interpreter = interpreter
        self._environment = clean_environment(pass_environment, environment)
        self._approval = approval
        self._rule = access_rule(self._workspace, self._sandbox)

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
        """Return the tool ``python``."""
        allowed = self._sandbox.describe() if isinstance(self._sandbox, Sandbox) else ""
        about = (
            "Run a Python script and return its output and its value: the value of the last line if that is an "
            "expression, else the variable `result`. Only files persist between scripts. "
            "Your other tools are functions in the script: `from holdfast_tools import <name>`, then "
            f"`<name>(parameter=value)`; they return what you would get, or raise ToolFailed. "
            f"{allowed}"
        )
        return (tool(description=about, timeout_s=math.inf, approval=self._approval, access=self._rule)(self.python),)

    async def python(
        self, call: Call, script: str, timeout_s: float | None = None, access: AccessArgument | None = None
    ) -> str:
        """Run a Python script.

        Parameters:
            script: the source code.
            timeout_s: seconds after which the script is ended and its output so far is returned; time in tool calls
                does not count.
            access: what the script needs beyond its sandbox. A person decides, so ask only for what is needed.
        """
        request = self._rule(call.run, {"access": access})
        async with hold_access(call.run, call.approved, self._workspace, request) as held:
            return await self._run(call, held, script, timeout_s)

    async def _run(self, call: Call, held: HeldAccess, script: str, timeout_s: float | None) -> str:
        sandbox = sandbox_of(self._sandbox, call.run.principal)
        launch = await prepare_launch_of(
            call.run,
            [self._interpreter, "-I", _CHILD],
            workspace=self._workspace,
            sandbox=sandbox,
            environment=self._environment,
            readable=(_CHILD, *_home_of(self._interpreter)),
            held=held,
        )
        recording = Recording(self._output_bytes)
        live = LiveOutput(call, _LIVE_BYTES)

        def feed(data: bytes) -> None:
            recording.feed(data)
            live.feed(data)

        wait_s = self._timeout_s if timeout_s is None else min(max(timeout_s, 0.0), self._timeout_limit_s)
        conversation = _Conversation(
            call,
            offered=self._tools_of(call.run.agent),
            wait_s=wait_s,
            value_limit=self._output_bytes,
            calls_at_once=self._calls_at_once,
            calls=self._calls,
        )
        with contextlib.closing(live):
            async with _connected() as (reader, writer, theirs):
                with theirs, theirs.makefile("rb") as given:
                    program = await Program.start(
                        launch, command=[self._interpreter], feed=feed, stdin=given, name="python script"
                    )
                returncode = await conversation.hold(program, reader, writer, script)
        if not conversation.begun and not conversation.expired:
            raise ToolFailed(f"the script failed to start: {recording.text().strip() or ending(returncode or 0)}")
        if program.ended_because and conversation.fault is None:
            conversation.fault = program.ended_because
        call.failed = returncode != 0 or conversation.fault is not None
        how = _ended(conversation.fault, returncode, wait_s, sandbox.cpu_s)
        return _told(recording.text(), conversation.value, how, program.network_note)

    def _tools_of(self, agent: Agent) -> list[Tool]:
        """Return the tools that a script may call, without ``python``, which a script does not need."""
        tools = toolbox(agent).values() if self._offered is None else self._offered
        return [tool for tool in tools if tool.name != "python"]


def _told(text: str, value: _Value | None, how: str, network_note: str) -> str:
    """Return a script's result for the model."""
    parts = [text.rstrip("\n")] if text.strip() else []
    if value is not None:
        parts.append(f"[value{' (truncated)' if value.cut else ''}] {value.text}")
    parts += [f"[{note}]" for note in (how, network_note) if note]
    return "\n".join(parts) or "[no output and no value]"


def _ended(fault: str | None, returncode: int | None, wait_s: float, cpu_s: int) -> str:
    """Return how a script ended; empty if it ended by itself with exit code 0."""
    if fault is not None:
        return f"killed: {fault}"
    if returncode is None:
        return f"timed out after {wait_s:g} s and was killed"
    if returncode == -signal.SIGXCPU:
        return f"killed: used up its {cpu_s} CPU seconds"
    return ending(returncode) if returncode else ""


def _home_of(interpreter: str) -> list[Path]:
    """Return the parts of an interpreter's installation to expose; empty for our own, which is always exposed."""
    if interpreter == sys.executable:
        return []
    roots = {Path(interpreter).absolute().parent.parent, Path(interpreter).resolve().parent.parent}
    parts = [root / part for root in roots for part in ("bin", "lib", "lib64", "pyvenv.cfg")]
    return [part for part in parts if part.exists()]


class _Conversation:
    """The exchange between the host and one script, from start to end."""

    def __init__(
        self,
        call: Call,
        *,
        offered: Sequence[Tool],
        wait_s: float,
        value_limit: int,
        calls_at_once: int,
        calls: int,
    ) -> None:
        self._call = call
        self._offered = {tool.name: tool for tool in offered}
        self._left_s = wait_s
        self._value_limit = value_limit
        self._slots = asyncio.Semaphore(calls_at_once)
        self._calls = calls
        self._made = 0
        self._ended = False
        self._under_way = 0
        self._deadline: asyncio.Timeout | None = None
        self.begun = False
        self.expired = False
        self.value: _Value | None = None
        self.fault: str | None = None

    async def hold(
        self, program: Program, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, script: str
    ) -> int | None:
        """Send the script, serve its calls, and end its process tree; return the exit code, or None on timeout."""
        scope = current_scope()
        assert scope is not None, "tools run in a scope"
        calls = scope.child("calls of the script", grace_s=_CALLS_GRACE_S)
        returncode: int | None = None
        listening = None
        try:
            calls.open()
            listening = scope.spawn(self._listen(reader, writer, calls, program), name="calls of the script")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._left_s) as self._deadline:
                    writer.write(_framed(self._order(script)))
                    returncode = await program.wait()
        finally:
            self.expired = self._deadline is not None and self._deadline.expired()
            self._deadline = None
            await program.end()
            self._ended = True
            await calls.stop("the script has ended")
            self._slots.release()  # for a waiting listener: calls stopped before they began never release theirs
            if listening is not None:
                await _until(listening)
                listening.interrupt.trigger("the script has ended", kind="stop")
        return returncode

    def _order(self, script: str) -> dict[str, Any]:
        tools = [
            {"name": tool.name, "description": tool.description, "parameters": [*tool.parameters.get("properties", ())]}
            for tool in self._offered.values()
        ]
        return {
            "kind": "script",
            "source": script,
            "tools": tools,
            "value_limit": self._value_limit,
            "frame_limit": _FRAME_BYTES,
        }

    async def _listen(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, calls: Scope, program: Program
    ) -> None:
        """Process the script's messages until the socket closes; kill the script if a message is invalid."""
        try:
            while True:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                if length > _FRAME_BYTES:
                    raise ValueError(f"message of {length:,} bytes")
                message = _decode(await reader.readexactly(length))
                match message:
                    case _Hello():
                        self.begun = True
                    case _Value():
                        self.value = message
                    case _Use():
                        if not self._ended:
                            await self._slots.acquire()
                        if self._ended:
                            continue
                        self._made += 1
                        self._count(+1)
                        serving = self._serve(message, writer, allowed=self._made <= self._calls)
                        calls.spawn(serving, name=f"{message.tool} for the script")
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except (ValueError, RecursionError) as error:  # msgspec's errors too
            self.fault = f"protocol violation: {error}"
            program.process.signal(signal.SIGKILL)

    def _count(self, change: int) -> None:
        """Count a call that starts or ends; the script's timeout is paused while any call is in progress."""
        self._under_way += change
        deadline = self._deadline
        if deadline is None or deadline.expired():
            return
        now = asyncio.get_running_loop().time()
        if self._under_way == 1 and change > 0:
            self._left_s = (deadline.when() or now) - now
            deadline.reschedule(None)
        elif self._under_way == 0:
            deadline.reschedule(now + self._left_s)

    async def _serve(self, message: _Use, writer: asyncio.StreamWriter, *, allowed: bool) -> None:
        try:
            try:
                if not allowed:
                    raise ToolFailed(f"tool call limit reached: a script may make at most {self._calls:,} calls")
                answer = {"kind": "result", "id": message.id, "value": await self._use(message)}
            except Exception as error:
                text = str(error) if isinstance(error, ToolFailed) else format_error(error)
                answer = {"kind": "error", "id": message.id, "text": truncate(text, _FRAME_BYTES)}
            finally:
                self._count(-1)
            writer.write(_framed(answer))
            with contextlib.suppress(ConnectionError):  # the script has ended
                await writer.drain()
        finally:
            self._slots.release()  # after the answer is read, so that answers do not pile up

    async def _use(self, message: _Use) -> Any:
        tool = self._offered.get(message.tool)
        if tool is None:
            raise ToolFailed(f"unknown tool {message.tool!r}; available: {', '.join(self._offered) or 'none'}")
        return await self._call.run.call_tool(tool, message.arguments)


@contextlib.asynccontextmanager
async def _connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, socket.socket]]:
    """Yield a socket pair: our end as two streams, and the script's end, which the caller must close."""
    ours, theirs = socket.socketpair()
    try:
        reader, writer = await asyncio.open_connection(sock=ours)
    except BaseException:
        ours.close()
        theirs.close()
        raise
    try:
        yield reader, writer, theirs
    finally:
        writer.transport.abort()


def _framed(message: dict[str, Any]) -> bytes:
    data = encode_json(message)  # error texts may contain characters that JSON does not allow
    return _LENGTH.pack(len(data)) + data


async def _until(listening: Handle[None]) -> None:
    """Wait briefly until the listener has read the last messages; the script's end of the socket is already closed."""
    with contextlib.suppress(TimeoutError, Interrupted):
        async with asyncio.timeout(_LAST_WORDS_S):
            await listening
