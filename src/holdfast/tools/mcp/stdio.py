"""MCP over the pipes of a program that runs under the process host and ends with the connection.

- An output line that is too long or not a valid message affects at most the call that it answers; other calls
  continue.
- The program's pipes are read while it runs, and its process tree is killed when the connection closes, so the program
  cannot delay the host.
- The program runs behind a wall of its own. When its tree is gone, its network is closed, and its own folder removed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import shutil
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from holdfast.runtime import Process, Scope
from holdfast.runtime.process_host import PIPE
from holdfast.tools.sandbox.network import open_network

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

    from holdfast.agents.program_usage import WatchedProgram
    from holdfast.tools.mcp.program import ServerProgram

__all__ = ["open_stdio"]

_log = logging.getLogger("holdfast.tools.mcp")
_CHUNK_BYTES = 65_536
_MESSAGE_BYTES = 16_000_000
_NOTE_LINES = 5
_LINE_BYTES = 2000
_LEAVE_S = 0.5
_TERM_S = 1.0
_ANSWER_TO = re.compile(rb'\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d+|"[^"\\]{0,100}")')


@asynccontextmanager
async def open_stdio(
    scope: Scope, program: ServerProgram, *, on_end: Callable[[str], None]
) -> AsyncGenerator[TransportStreams, None]:
    """Start a server program and yield its message streams; kill its process tree when the block exits.

    Parameters:
        scope: scope that owns the program.
        program: the program.
        on_end: called with the reason when the program's output ends or writing to its input fails; may be called
            repeatedly.

    Raises:
        NotSupported: if this machine cannot build the program's wall.
        ConfigurationError: if a path or a secret of the program's sandbox is missing.
        ToolFailed: if the proxy of the program's network does not start.
        OSError: if the program fails to start.
    """
    async with _started(scope, program) as (process, watched):
        async with _streams(scope, process, watched, program.name, on_end) as streams:
            yield streams


@asynccontextmanager
async def _started(scope: Scope, program: ServerProgram) -> AsyncGenerator[tuple[Process, WatchedProgram], None]:
    """Start the program behind its wall, and clean up after it at the end of the block, which closes the program."""

    launch, own = await asyncio.get_running_loop().run_in_executor(None, program.prepare)
    async with AsyncExitStack() as after:
        if own is not None:
            after.push_async_callback(_remove, own)
        with ExitStack() as given:
            launch = await open_network(launch)
            for fd in launch.pass_fds:
                given.callback(os.close, fd)
            if launch.network is not None:
                after.callback(launch.network.close)
            assert launch.account is not None, "every server program has one"
            process = await scope.process(
                launch.argv,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=launch.environment,
                cwd=launch.directory,
                name=f"mcp {program.name}",
                wall=launch.wall,
                pass_fds=launch.pass_fds,
                confirm=launch.confirm,
                cgroup=launch.account.cgroup,
            )
        yield process, launch.account.watch(process)


async def _remove(folder: str) -> None:
    """Remove a folder in a thread, which continues if the wait is cancelled."""
    remove = functools.partial(shutil.rmtree, folder, ignore_errors=True)
    await asyncio.get_running_loop().run_in_executor(None, remove)


@asynccontextmanager
async def _streams(
    scope: Scope, process: Process, watched: WatchedProgram, name: str, on_end: Callable[[str], None]
) -> AsyncGenerator[TransportStreams, None]:
    """Yield the message streams of a running program, and close the program first when the block exits."""
    import anyio
    from mcp.shared.message import SessionMessage

    incoming, messages = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, to_send = anyio.create_memory_object_stream[SessionMessage](0)
    notes: deque[str] = deque(maxlen=_NOTE_LINES)

    async def read() -> None:
        async with incoming:
            await _read(process, name, incoming.send)
            on_end(await ended())  # before the session notices and calls fail

    async def write() -> None:
        async with to_send:
            async for message in to_send:
                line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                assert process.stdin is not None
                try:
                    process.stdin.write(line.encode() + b"\n")
                    await process.stdin.drain()
                except OSError:
                    on_end(await ended())
                    return

    async def follow_notes() -> None:
        async for line in _lines(process, "stderr", _LINE_BYTES):
            text = bytes(line).decode("utf-8", "replace").rstrip()
            notes.append(text)
            _log.debug("%s: %s", name, text)

    async def ended() -> str:
        """Return a sentence that describes how the program ended."""
        if watched.ended_because:
            return f"MCP server {name!r} was ended: {watched.ended_because}"
        code = "its output"
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                code = f"with exit code {await process.wait()}"
                await noting
        last = f"; stderr: {' | '.join(notes)}" if notes else ""
        return f"MCP server {name!r} ended {code}{last}"

    noting = scope.spawn(_contained(follow_notes), name=f"mcp {name} notes")
    work = [noting, *(scope.spawn(_contained(part), name=f"mcp {name}") for part in (read, write))]
    try:
        yield messages, outgoing
    finally:
        await _close(process)
        for part in work:
            part.interrupt.trigger("the connection is closed", kind="stop")
        for stream in (incoming, messages, outgoing, to_send):
            stream.close()


async def _contained(part: Callable[[], Any]) -> None:
    """Run a reading or writing task, which ends normally when its stream is closed."""
    import anyio

    try:
        await part()
    except (anyio.ClosedResourceError, anyio.BrokenResourceError):
        pass  # the session is closed


async def _close(process: Process) -> None:
    """End a program within a bounded time: close its input, send SIGTERM, then kill the whole process tree."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await process.wait()
    finally:
        await process.kill_tree(term_first_s=_TERM_S if process.returncode is None else 0.0)


async def _read(process: Process, name: str, deliver: Callable[[Any], Any]) -> None:
    """Pass each message of the program's output to `deliver` until the output ends."""
    from mcp.shared.message import SessionMessage
    from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter

    async for line in _lines(process, "stdout", _MESSAGE_BYTES):
        if isinstance(line, _Cut):
            _log.warning("MCP server %s: dropped a message of more than %d bytes", name, _MESSAGE_BYTES)
            answered = _ANSWER_TO.match(line)
            if answered:
                text = f"the response exceeds {_MESSAGE_BYTES:,} bytes"
                number = answered[1].decode()
                to = number[1:-1] if number.startswith('"') else int(number)
                error = ErrorData(code=INTERNAL_ERROR, message=text)
                await deliver(SessionMessage(JSONRPCError(jsonrpc="2.0", id=to, error=error)))
            continue
        if not line.strip():
            continue
        try:
            message = jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError:
            _log.warning("MCP server %s: ignoring a line that is not a message: %.200r", name, line)
            continue
        await deliver(SessionMessage(message))


class _Cut(bytes):
    """The beginning of a line that was too long; the rest of the line was dropped."""


async def _lines(process: Process, source: str, limit_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a pipe; an oversized line becomes a `_Cut`."""
    reader = getattr(process, source)
    kept = bytearray()
    cut = False
    while chunk := await reader.read(_CHUNK_BYTES):
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            kept += end
            cut = cut or len(kept) > limit_bytes
            yield _Cut(kept[:_LINE_BYTES]) if cut else bytes(kept)
            kept.clear()
            cut = False
        kept += rest
        if len(kept) > limit_bytes:
            cut = True
            del kept[_LINE_BYTES:]
