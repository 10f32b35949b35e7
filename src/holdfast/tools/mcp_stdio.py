"""MCP over the pipes of a program under the process host: its whole tree dies with the connection, and with us.

- A line that is no message, or one that is too long, costs at most the call that it answers; the others go on.
- Nothing waits for the program: its pipes are read for as long as it lives, and its tree is killed at the end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from holdfast.runtime import Process, Scope
from holdfast.runtime.processes import PIPE

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

__all__ = ["inherited", "open_stdio"]

_log = logging.getLogger("holdfast.tools.mcp")
_CHUNK_BYTES = 65_536
_MESSAGE_BYTES = 16_000_000
_NOTE_LINES = 5
_LINE_BYTES = 2000
_LEAVE_S = 0.5
_TERM_S = 1.0
_INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")
_ANSWER_TO = re.compile(rb'\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d+|"[^"\\]{0,100}")')


def inherited(extra: Mapping[str, str] | None) -> dict[str, str]:
    """The environment of a server: what every program needs, and `extra`; the keys of this process stay here."""
    base = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return {**base, **(extra or {})}


@asynccontextmanager
async def open_stdio(
    scope: Scope,
    command: Sequence[str],
    *,
    name: str,
    env: Mapping[str, str] | None,
    cwd: str | None,
    on_end: Callable[[str], None],
) -> AsyncGenerator[TransportStreams, None]:
    """Start the program and give the streams of its messages; at the end its tree is gone.

    Parameters:
        scope: owns the program.
        command: the program and its arguments.
        name: of the server, for people.
        env: what its environment has besides the usual.
        cwd: where it starts.
        on_end: called once with a sentence when it ends by itself.

    Raises:
        OSError: it cannot be started.
    """
    import anyio
    from mcp.shared.message import SessionMessage

    process = await scope.process(
        command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=inherited(env), cwd=cwd, name=f"mcp {name}"
    )
    incoming, messages = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, to_send = anyio.create_memory_object_stream[SessionMessage](0)
    notes: deque[str] = deque(maxlen=_NOTE_LINES)

    async def read() -> None:
        async with incoming:
            await _read(process, name, incoming.send)
            on_end(await ended())  # before the session hears it, and calls fail

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
        """Why it ended, in a sentence."""
        code = "its output"
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                code = f"with exit code {await process.wait()}"
                await noting
        last = f"; it wrote: {' | '.join(notes)}" if notes else ""
        return f"the MCP server {name!r} ended {code}{last}"

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
    """Read or write until that side is gone."""
    import anyio

    try:
        await part()
    except (anyio.ClosedResourceError, anyio.BrokenResourceError):
        pass  # the session is closed; nobody waits for more


async def _close(process: Process) -> None:
    """End the program: its input ends, then SIGTERM, then all of its tree is killed. Bounded."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await process.wait()
    finally:
        await process.kill_tree(term_first_s=_TERM_S if process.returncode is None else 0.0)


async def _read(process: Process, name: str, deliver: Callable[[Any], Any]) -> None:
    """Deliver each message until the output ends."""
    from mcp.shared.message import SessionMessage
    from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter

    async for line in _lines(process, "stdout", _MESSAGE_BYTES):
        if isinstance(line, _Cut):
            _log.warning("%s sent a message of more than %d bytes, which was dropped", name, _MESSAGE_BYTES)
            answered = _ANSWER_TO.match(line)
            if answered:
                text = f"the answer has more than {_MESSAGE_BYTES:,} bytes"
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
            _log.warning("%s wrote a line that is no message: %.200r", name, line)
            continue
        await deliver(SessionMessage(message))


class _Cut(bytes):
    """The beginning of a line that was too long; the rest was dropped."""


async def _lines(process: Process, source: str, limit_bytes: int) -> AsyncGenerator[bytes, None]:
    """The lines of a pipe; of one that is too long a `_Cut`."""
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
