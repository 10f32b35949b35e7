"""A self-reconnecting connection to an MCP server, shared by the runs of all sessions.

- The connection runs in its own scope, so interrupting a run cancels only that run's call, never the connection
  or another run's call. (The MCP client starts tasks in the context of the caller. If that were a run's context, the
  tasks would belong to the run, and the connection would close when the run ended.)
- Cancelling the task that waits for a call also cancels the call on the server. Calls are never retried automatically.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, cast

from holdfast.errors import Interrupted, format_error
from holdfast.runtime import Handle, Scope

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client._transport import TransportStreams
    from mcp.shared.dispatcher import ProgressFnT as Progress
    from mcp_types import CallToolResult, RequestParamsMeta, Tool

__all__ = ["LinkDown", "McpLink", "Opener"]

_log = logging.getLogger("holdfast.tools.mcp")
_FIRST_DELAY_S = 0.2
_MOST_DELAY_S = 30.0
_STEADY_S = 30.0
_CANCEL_S = 0.5
_PAGES = 100
_TOOLS = 1000
_LIST_CHARS = 4_000_000
_SCHEMA_CHARS = 100_000
_DESCRIPTION_CHARS = 4000
_LIST_EVERY_S = 0.2
_INVALID_REQUEST = -32600

Opener = Callable[[Callable[[str], None]], AbstractAsyncContextManager["TransportStreams"]]


class LinkDown(Exception):
    """The server is not connected, for the reason given in the message."""


class McpLink:
    """A connection to an MCP server, bound to one event loop; `start` it in a scope that outlives all runs.

    Parameters:
        name: server name, for display.
        open_streams: function that opens the streams of a connection. The function receives a callback, which it calls
            with the reason when the server side ends.
        connect_s: timeout in seconds for each attempt to connect, and for a call that waits for a connection.
        on_tools: called with the server's tools each time the tools have been listed.
    """

    def __init__(
        self,
        name: str,
        open_streams: Opener,
        *,
        connect_s: float,
        on_tools: Callable[[Sequence[Tool]], None],
    ) -> None:
        self.name = name
        self.problem: str | None = None
        self.error: Exception | None = None
        self.connections = 0
        self._open_streams = open_streams
        self._connect_s = connect_s
        self._on_tools = on_tools
        self._scope: Scope | None = None
        self._client: Client | None = None
        self._changed: asyncio.Future[None] | None = None
        self._woken: asyncio.Future[None] | None = None
        self._ended: str | None = None
        self._stale = False

    @property
    def connected(self) -> bool:
        """Whether the server is connected, so that calls can be made now."""
        return self._client is not None

    def start(self, scope: Scope) -> None:
        """Connect in the background, and reconnect after each disconnect until `scope` ends."""
        self._scope = scope
        self._changed = asyncio.get_running_loop().create_future()
        _ = scope.spawn(self._keep(), name=f"mcp {self.name}")

    async def settled(self) -> None:
        """Wait until the first attempt to connect has succeeded or failed."""
        while self._client is None and self.problem is None:
            await self._change()

    async def call(
        self, tool: str, arguments: dict[str, Any], progress: Progress, *, caller: Mapping[str, str]
    ) -> CallToolResult:
        """Call a tool of the server and return its result.

        Cancelling the task that waits for the result also cancels the call on the server.

        Parameters:
            tool: name of the tool on the server.
            arguments: arguments of the call.
            progress: called with each progress notification of the call.
            caller: the caller's identity, which is sent in the request's ``_meta`` field; empty sends no identity.

        Raises:
            LinkDown: if the server is not connected within `connect_s` seconds, or if the connection breaks during the
                call.
            mcp.MCPError: if the server refuses the call.
        """
        client = await self._connected()
        assert self._scope is not None
        calling = self._call(client, tool, arguments, progress, caller)
        handle = self._scope.spawn(calling, name=f"mcp {self.name} {tool}")
        try:
            outcome = await handle
        except Interrupted:
            raise LinkDown(self._why()) from None
        finally:
            if not handle.done():
                await _cancel(handle)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _call(
        self, client: Client, tool: str, arguments: dict[str, Any], progress: Progress, caller: Mapping[str, str]
    ) -> CallToolResult | Exception:
        """Make the call and return its result or its error; a raised error would end the shared scope."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        try:
            meta = cast("RequestParamsMeta", dict(caller)) if caller else None
            return await client.call_tool(tool, arguments, progress_callback=progress, meta=meta)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                why = self.problem or f"MCP server {self.name!r} did not respond: {error.message}"
                return LinkDown(f"{why}; the call may or may not have taken effect")
            if error.code == _INVALID_REQUEST and error.message == "Session terminated":
                self._broken(client, f"MCP server {self.name!r} has lost the session")
                return LinkDown(self._why())
            return error
        except Exception as error:
            return error

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────

    async def _connected(self) -> Client:
        """Wait for a connection and return its client."""
        try:
            async with asyncio.timeout(self._connect_s):
                while self._client is None:
                    await self._change()
        except TimeoutError:
            raise LinkDown(self._why()) from None
        return self._client

    def _why(self) -> str:
        return self.problem or f"MCP server {self.name!r} is not connected"

    async def _change(self) -> None:
        """Wait for the next change of the connection's state."""
        assert self._changed is not None
        await asyncio.shield(self._changed)

    def _note(self, client: Client | None, problem: str | None) -> None:
        self._client, self.problem = client, problem
        assert self._changed is not None
        self._changed.set_result(None)
        self._changed = asyncio.get_running_loop().create_future()

    async def _keep(self) -> None:
        """Connect, and reconnect after each disconnect with exponential backoff."""
        loop = asyncio.get_running_loop()
        delay_s = _FIRST_DELAY_S
        while True:
            began = loop.time()
            try:
                why = await self._connection()
                self.error = None
            except Exception as error:  # any server response or library error
                self.error = _first(error)
                why = self._ended or f"failed to reach MCP server {self.name!r}: {_said(self.error)}"
            if loop.time() - began > _STEADY_S:
                delay_s = _FIRST_DELAY_S
            _log.warning("%s; retrying in %.1f s", why, delay_s)
            self._note(None, why)
            await asyncio.sleep(delay_s)
            delay_s = min(_MOST_DELAY_S, delay_s * 2)

    async def _connection(self) -> str:
        """Run one connection from start to end and return why the connection ended."""
        from mcp import Client

        self._ended, self._stale = None, True
        client = Client(
            self._open_streams(self._other_side_ended),
            cache=None,
            read_timeout_seconds=None,
            message_handler=self._heard,
        )
        async with asyncio.timeout(self._connect_s) as deadline, client:
            await self._list(client)
            deadline.reschedule(None)
            self.connections += 1
            self._note(client, None)
            try:
                async with asyncio.TaskGroup() as group:
                    listening = group.create_task(self._listen(client))
                    while self._ended is None:
                        if self._stale:
                            await self._list_again(client)
                            continue
                        self._woken = asyncio.get_running_loop().create_future()
                        await self._woken
                    listening.cancel()
            finally:
                self._client = None
        return self._ended

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def _other_side_ended(self, why: str) -> None:
        if self._ended is None:
            self._ended = self.problem = why
            self._client = None
            self._wake()

    def _broken(self, client: Client, why: str) -> None:
        """End the connection of `client`, which a call has found to be broken."""
        if client is self._client:
            self._other_side_ended(why)

    # ── the list of tools ────────────────────────────────────────────────────────────────────────────────────────

    async def _list(self, client: Client) -> None:
        """Fetch the list of tools page by page, up to the limits."""
        self._stale = False
        found: list[Tool] = []
        cursor: str | None = None
        size = 0
        for _ in range(_PAGES):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                schema = len(json.dumps(tool.input_schema))
                if schema > _SCHEMA_CHARS:
                    _log.warning(
                        "MCP server %s: skipping tool %.100r: schema has %d characters", self.name, tool.name, schema
                    )
                    continue
                description = (tool.description or tool.title or "")[:_DESCRIPTION_CHARS]
                size += schema + len(description)
                found.append(tool.model_copy(update={"description": description, "output_schema": None, "meta": None}))
            cursor = page.next_cursor
            if cursor is None:
                break
            if len(found) > _TOOLS or size > _LIST_CHARS:
                _log.warning("MCP server %s has too many tools; using those of the first pages", self.name)
                break
        self._on_tools(found[:_TOOLS])

    async def _list_again(self, client: Client) -> None:
        """Refresh the list of tools; keep the old list if the server does not respond."""
        try:
            async with asyncio.timeout(self._connect_s):
                await self._list(client)
        except TimeoutError:
            _log.warning("MCP server %s did not list its tools within %g s", self.name, self._connect_s)
        await asyncio.sleep(_LIST_EVERY_S)

    def _outdated(self) -> None:
        self._stale = True
        self._wake()

    async def _heard(self, message: object) -> None:
        """Handle a change notification from a server that uses MCP sessions."""
        from mcp_types import ToolListChangedNotification

        if isinstance(message, ToolListChangedNotification):
            self._outdated()

    async def _listen(self, client: Client) -> None:
        """Subscribe to change notifications of newer servers; resubscribe when the stream breaks."""
        from mcp import MCPError
        from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost

        listened = False
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                async with client.listen(tools_list_changed=True) as changes:
                    self._outdated()  # the list may have changed since the last fetch
                    listened, delay_s = True, _FIRST_DELAY_S
                    async for _ in changes:
                        self._outdated()
            except ListenNotSupportedError:
                return
            except (MCPError, SubscriptionLost):
                if not listened:
                    return  # the server does not support subscriptions
            await asyncio.sleep(delay_s)
            delay_s = min(_MOST_DELAY_S, delay_s * 2)


async def _cancel(handle: Handle[Any]) -> None:
    """Cancel a call and wait a bounded time for the cancellation, which may complete later or never."""
    handle.interrupt.trigger("the caller stopped waiting", kind="stop")
    try:
        async with asyncio.timeout(_CANCEL_S):
            await handle
    except (Interrupted, TimeoutError):
        pass


def _first(error: Exception) -> Exception:
    """Return the first error of a possibly nested exception group, or the error itself."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _said(error: Exception) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "it did not respond in time"
    return str(error) if isinstance(error, OSError) else format_error(error)
