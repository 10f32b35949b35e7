"""The tools of an MCP server as tools of an agent (extra ``mcp``).

One connection serves the runs of all sessions, or, for a program, one of each principal; see `holdfast.tools.mcp_link`
for what keeps them apart. A server that is a program dies with the host. When a call is interrupted, or its deadline is
over, the server is told to cancel it.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import math
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.agents.run import Call
from holdfast.agents.schema import check_schema
from holdfast.agents.tool import Home, Tool, Toolset
from holdfast.errors import ConfigurationError, MissingExtra, RunClosed, ToolFailed
from holdfast.runtime import Scope
from holdfast.tools.mcp_http import open_http
from holdfast.tools.mcp_link import Link, LinkDown, Opener
from holdfast.tools.mcp_stdio import open_stdio

if TYPE_CHECKING:
    from mcp_types import CallToolResult
    from mcp_types import Tool as ServerTool

__all__ = ["McpServer"]

_log = logging.getLogger("holdfast.tools.mcp")
_CLOSE_S = 2.0
_PROGRESS_AT_ONCE = 20
_PROGRESS_EVERY_S = 0.2
_PROGRESS_CHARS = 500
_PROGRESS_LINES = 2000
_NAME_LENGTH = 64

Approval = bool | Callable[[str, dict[str, Any]], bool]


class McpServer(Toolset):
    """A server of the Model Context Protocol, and its tools.

    It is connected when the host starts and stays connected; while it cannot be reached, calls wait for it and then
    tell the model why. A run has the tools that the server had when the run began.

    Parameters:
        name: names the server in logs and errors, and begins the names of its tools: ``<name>_<tool>``.
        command: start this program and speak over its pipes. Either this or `url`.
        url: speak HTTP with the server at this address.
        env: what the program's environment has besides the usual; the keys of this process are not passed on.
        cwd: where the program starts.
        headers: sent with each HTTP request, such as ``authorization``.
        timeout_s: deadline of a call; None: the run's own.
        connect_s: how long connecting may take, and a call wait for it.
        approval: ask a person before a call: always, or when this says so of the server's tool and the arguments.
        prefix: begins the names of the tools in place of ``<name>_``.
        tell_caller: tell the server with each call who asks: principal, session and call, in ``_meta``. None: a program
            is told, an address is not.
        per_principal: start a program for each principal, with its first call, so that what the program keeps for one
            is not there for others. Up to `principals` at once; one that has no call under way makes room.
        principals: bounds those programs.

    Raises:
        ConfigurationError: neither or both of `command` and `url`, a `name` that no tool name can begin with, a
            header that cannot be sent, or `per_principal` with a `url`.
    """

    def __init__(
        self,
        name: str,
        *,
        command: Sequence[str] | None = None,
        url: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        connect_s: float = 10.0,
        approval: Approval = False,
        prefix: str | None = None,
        tell_caller: bool | None = None,
        per_principal: bool = False,
        principals: int = 32,
    ) -> None:
        if (not command) == (not url) or isinstance(command, str):
            raise ConfigurationError(
                f"the MCP server {name!r} needs a command (a list of the program and its arguments) or a url",
                hint='McpServer("files", command=["npx", "…"]) or McpServer("search", url="https://…/mcp")',
            )
        if per_principal and url:
            raise ConfigurationError(
                f"the MCP server {name!r} has a url, so it cannot be started for each principal",
                hint="use tell_caller=True and let the server tell them apart",
            )
        if url and not url.startswith(("http://", "https://")):
            raise ConfigurationError(f"{url!r} is not the address of an MCP server", hint="it begins with https://")
        self.name = name
        self.prefix = f"{name}_" if prefix is None else prefix
        if not re.fullmatch(r"[a-zA-Z0-9_-]{0,40}", self.prefix):
            raise ConfigurationError(
                f"the tools of an MCP server cannot be named {self.prefix!r} and so on",
                hint="use at most 40 letters, digits, _ and -",
            )
        for header, value in (headers or {}).items():
            if not (f"{header}{value}".isascii() and f"{header}{value}".isprintable()):
                raise ConfigurationError(
                    f"the header {header!r} of the MCP server {name!r} has characters that no header can have",
                    hint="a key that was read from a file may end with a line break: strip() it",
                )
        self.executes = self.unwalled = command is not None
        self._command = tuple(command or ())
        self._url = url or ""
        self._env = env
        self._cwd = cwd
        self._headers = dict(headers or {})
        self._timeout_s = timeout_s
        self._connect_s = connect_s
        self._approval = approval
        self._tools: tuple[Tool, ...] = ()
        self._link: Link | None = None
        self._tells_caller = command is not None if tell_caller is None else tell_caller
        self._per_principal = per_principal
        self._principals = principals
        self._scope: Scope | None = None
        self._own: dict[str, _Own] = {}  # the one that was used longest ago first

    def __repr__(self) -> str:
        return f"<McpServer {self.name!r} {'connected' if self.connected else 'not connected'}>"

    @property
    def connected(self) -> bool:
        """Whether calls can be made now."""
        return self._link is not None and self._link.connected

    @property
    def problem(self) -> str | None:
        """Why there is no connection, in a sentence."""
        return self._link.problem if self._link is not None else None

    def tools(self) -> Sequence[Tool]:
        """The server's tools as it listed them last; none before it was reached for the first time."""
        return self._tools

    @asynccontextmanager
    async def lifespan(self, home: Home) -> AsyncGenerator[None, None]:
        """Connect, and stay connected until the block is left.

        Raises:
            MissingExtra: the package ``mcp`` is not installed.
            ConfigurationError: the program cannot be started. A server that only does not answer yet is waited for in
                the background.
        """
        try:
            import mcp  # noqa: F401
        except ImportError:
            raise MissingExtra("MCP servers", extra="mcp") from None
        scope = Scope(f"mcp {self.name}", detached=True, grace_s=_CLOSE_S).open()
        link = Link(self.name, self._opener(scope), connect_s=self._connect_s, on_tools=self._listed)
        try:
            link.start(scope)
            await link.settled()
            if isinstance(link.error, (FileNotFoundError, PermissionError, NotADirectoryError)) and self._command:
                raise ConfigurationError(
                    f"the program of the MCP server {self.name!r} cannot be started: {link.error}",
                    hint="check its command and cwd, and that it is installed",
                )
            self._link, self._scope = link, scope
            yield
        finally:
            self._link = None
            self._own = {}
            await scope.stop("the host closes")

    def _opener(self, scope: Scope) -> Opener:
        def open_streams(on_end: Callable[[str], None]) -> AbstractAsyncContextManager[Any]:
            if self._url:
                return open_http(self._url, headers=self._headers)
            return open_stdio(scope, self._command, name=self.name, env=self._env, cwd=self._cwd, on_end=on_end)

        return open_streams

    def _listed(self, found: Sequence[ServerTool]) -> None:
        """Take over the list; what cannot be a tool of ours is left out, and said."""
        tools: dict[str, Tool] = {}
        for tool in found:
            name = _tool_name(self.prefix, tool.name)
            if name in tools:
                _log.warning("%s has two tools that would be named %s; the second is left out", self.name, name)
            else:
                tools[name] = self._tool(name, tool)
        self._tools = tuple(tools.values())

    def _tool(self, name: str, tool: ServerTool) -> Tool:
        hints = tool.annotations
        approval = self._approval
        return Tool(
            name=name,
            description=tool.description or "",
            parameters={**tool.input_schema, "type": "object"},
            work=functools.partial(self._call, tool.name),
            timeout_s=self._timeout_s,
            isolation="loop",
            convert=functools.partial(_fitting, tool.input_schema),
            idempotent=hints is not None and bool(hints.read_only_hint or hints.idempotent_hint),
            approval=functools.partial(approval, tool.name) if callable(approval) else approval,
        )

    def _caller(self, call: Call) -> dict[str, str]:
        """Return who asks, as the server is told."""
        if not self._tells_caller:
            return {}
        run = call.run
        named = {"principal": run.principal, "session": run.session_key, "session_id": run.session_id}
        return {f"holdfast/{name}": value for name, value in {**named, "call": call.call_id}.items()}

    def _own_of(self, principal: str) -> tuple[_Own, _Own | None]:
        """Return the program of a principal, with one call more under way, and one to stop that gave up its place.

        Raises:
            ToolFailed: all that may run are at work for others.
        """
        own = self._own.pop(principal, None)
        if own is None:
            idle = next((name for name, one in self._own.items() if not one.calls), None)
            past = self._own.pop(idle) if idle is not None and len(self._own) >= self._principals else None
            if len(self._own) >= self._principals:
                raise ToolFailed(f"the MCP server {self.name!r} is at work for {len(self._own)} users; try again later")
            assert self._scope is not None, "it is connected"
            scope = self._scope.child(f"mcp {self.name} of {principal}", grace_s=_CLOSE_S).open()
            link = Link(self.name, self._opener(scope), connect_s=self._connect_s, on_tools=lambda _: None)
            link.start(scope)
            own = _Own(scope, link)
            self._own[principal] = own
            own.calls += 1
            return own, past
        self._own[principal] = own
        own.calls += 1
        return own, None

    async def _call(self, tool: str, call: Call, /, **arguments: Any) -> Any:
        """Make a call; its result, or an error that the model can use."""
        from mcp import MCPError

        if self._link is None:
            raise ToolFailed(f"the MCP server {self.name!r} is not connected: its host is not open")
        own, past = self._own_of(call.run.principal) if self._per_principal else (None, None)
        link = self._link if own is None else own.link
        try:
            if past is not None:
                await past.scope.stop("another principal needs its place")
            result = await link.call(tool, arguments, _Progress(call), caller=self._caller(call))
        except (LinkDown, MCPError) as error:
            raise ToolFailed(str(error)) from None
        finally:
            if own is not None:
                own.calls -= 1
        content = _content(result)
        if result.is_error:
            raise ToolFailed(content if isinstance(content, str) else json.dumps(content))
        return content


@dataclass(slots=True)
class _Own:
    """The program of one principal, and how many of its calls are under way."""

    scope: Scope
    link: Link
    calls: int = 0


def _fitting(schema: dict[str, Any], arguments: dict[str, Any], /) -> dict[str, Any]:
    """The arguments, held against what can be read of the server's schema; the server has the last word."""
    try:
        check_schema(arguments, schema)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        _log.debug("a schema that is not plain is left to the server: %.200r", schema)
    return arguments


class _Progress:
    """Streams what a server tells of a call; what comes too fast, or is too much, is left out."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._lines = 0
        self._shown_at = -math.inf

    async def __call__(self, progress: float, total: float | None, message: str | None) -> None:
        now = asyncio.get_running_loop().time()
        early = self._lines >= _PROGRESS_AT_ONCE and now - self._shown_at < _PROGRESS_EVERY_S
        if early or self._lines >= _PROGRESS_LINES:
            return
        self._lines += 1
        self._shown_at = now
        share = f"{progress:g}/{total:g}" if total else f"{progress:g}"
        text = f" {message[:_PROGRESS_CHARS]}" if message else ""
        with suppress(RunClosed):  # it came after the end of the run
            _ = self._call.output(f"[{share}]{text}\n")


def _tool_name(prefix: str, name: str) -> str:
    """A name that models take: cut where it is too long, with a mark that keeps it unlike others."""
    plain = prefix + re.sub(r"[^a-zA-Z0-9_-]", "_", name)
    if len(plain) <= _NAME_LENGTH:
        return plain
    mark = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{plain[: _NAME_LENGTH - 9]}_{mark}"


def _content(result: CallToolResult) -> Any:
    """What a call gave, as text or a JSON value; for pictures and sounds a note stands in the text."""
    text = "\n".join(filter(None, map(_block, result.content)))
    structured = result.structured_content
    if structured is None:
        return text
    if isinstance(structured, dict) and structured.keys() == {"result"}:
        structured = structured["result"]  # so do servers wrap what is no object
    if not text or text == structured or _same(text, structured):
        return structured
    return {"text": text, "structured": structured}


def _same(text: str, structured: Any) -> bool:
    try:
        return bool(json.loads(text) == structured)
    except ValueError:
        return False


def _block(block: Any) -> str:
    match block.type:
        case "text":
            return str(block.text)
        case "image" | "audio":
            return f"[{block.type} {block.mime_type}, {len(block.data) * 3 // 4:,} bytes, not shown]"
        case "resource_link":
            return f"[resource {block.uri} {block.name}{f': {block.description}' if block.description else ''}]"
        case "resource":
            resource = block.resource
            if (text := getattr(resource, "text", None)) is not None:
                return f"[resource {resource.uri}]\n{text}"
            size = len(resource.blob) * 3 // 4
            return f"[resource {resource.uri} {resource.mime_type or 'of unknown type'}, {size:,} bytes, not shown]"
        case kind:
            return f"[content of an unknown kind: {kind}]"
