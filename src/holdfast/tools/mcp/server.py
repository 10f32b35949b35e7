"""The tools of an MCP server as tools of an agent (extra ``mcp``).

The runs of all sessions share one connection to the server. If the server is a program, each principal can get a
separate program and connection instead. `holdfast.tools.mcp.connection` describes how calls on a shared connection
are isolated from each other. A server program ends with the host. When a call is interrupted or exceeds its deadline,
a cancel request is sent to the server.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib.util
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
from holdfast.agents.tool import Tool, Toolset, ToolsetContext
from holdfast.errors import ConfigurationError, MissingExtra, NotSupported, RunClosed, ToolFailed
from holdfast.runtime import Scope
from holdfast.tools.mcp.connection import LinkDown, McpLink, Opener
from holdfast.tools.mcp.http import open_http
from holdfast.tools.mcp.program import ServerProgram
from holdfast.tools.mcp.stdio import open_stdio
from holdfast.tools.sandbox.sandbox import Sandbox, SandboxChoice, sandbox_of
from holdfast.tools.walled import are_programs_unwalled

if TYPE_CHECKING:
    from mcp_types import CallToolResult
    from mcp_types import Tool as ServerTool

    from holdfast.agents.program_usage import ProgramAccounts

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
    """A Model Context Protocol server and its tools.

    Holdfast connects when the host starts and reconnects as needed. While the server is unreachable, calls wait up to
    `connect_s` for a connection and then report the reason to the model. A run uses the tools that the server had when
    the run began.

    Parameters:
        name: server name in logs and errors; tool names have the form ``<name>_<tool>``.
        command: program to start and communicate with over pipes. Either `command` or `url` is required.
        url: URL of a server to connect to over HTTP.
        env: variables to add to the program's environment, which does not include the keys of this process.
        cwd: folder in which the program starts, and which it may change. None means an empty folder of its own, which
            is removed afterwards.
        sandbox: what the program may see, change, reach and use up behind its wall. It sees the system read-only, the
            files that `command` names, and `cwd`; its ``HOME`` is `cwd` unless `env` names another. None uses the
            defaults of `Sandbox`, without a network. With `per_principal`, it may be a function that returns the
            sandbox of a principal; the program that only lists the tools gets that of ``""``.
        headers: headers to send with each HTTP request, such as ``authorization``.
        timeout_s: timeout of a call, in seconds; None uses the host's default for tools.
        connect_s: timeout in seconds for each attempt to connect, and for a call that waits for a connection.
        approval: whether a person must approve each call, or a predicate that decides from the tool and its arguments.
        prefix: prefix of tool names that replaces ``<name>_``; None keeps ``<name>_``.
        tell_caller: whether to send the caller's principal, session and call id in the ``_meta`` field of each call.
            None sends them to a program, but not to a URL.
        per_principal: whether to start a separate program for each principal at the principal's first call, so that
            principals share no state in the program.
        principals: maximum number of programs that `per_principal` runs at the same time. When the maximum is reached,
            the least recently used idle program is stopped; if no program is idle, the new principal's call fails.

    Raises:
        ConfigurationError: if `command` and `url` are both given or both missing, if the prefix, the URL or a header
            is invalid, if `per_principal` or `sandbox` is used with `url`, or if `sandbox` is a function without
            `per_principal`.
    """

    def __init__(
        self,
        name: str,
        *,
        command: Sequence[str] | None = None,
        url: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        sandbox: SandboxChoice | None = None,
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
                f"MCP server {name!r} needs either a command (a list of the program and its arguments) or a url",
                hint='McpServer("files", command=["/opt/files/server"]) or McpServer("search", url="https://…/mcp")',
            )
        if per_principal and url:
            raise ConfigurationError(
                f"MCP server {name!r} has a url, so per_principal does not apply",
                hint="use tell_caller=True and let the server tell principals apart",
            )
        if sandbox is not None and url:
            raise ConfigurationError(
                f"MCP server {name!r} has a url, so no sandbox applies", hint="remove the sandbox, or use a command"
            )
        if callable(sandbox) and not per_principal:
            raise ConfigurationError(
                f"the sandbox of MCP server {name!r} depends on the principal, but all share its program",
                hint="use per_principal=True, or one Sandbox",
            )
        if url and not url.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"{url!r} is not a valid MCP server URL", hint="use a URL that starts with https:// or http://"
            )
        self.name = name
        self.prefix = f"{name}_" if prefix is None else prefix
        if not re.fullmatch(r"[a-zA-Z0-9_-]{0,40}", self.prefix):
            raise ConfigurationError(
                f"the prefix {self.prefix!r} is not valid in tool names",
                hint="use at most 40 letters, digits, _ and -",
            )
        for header, value in (headers or {}).items():
            if not (f"{header}{value}".isascii() and f"{header}{value}".isprintable()):
                raise ConfigurationError(
                    f"header {header!r} of MCP server {name!r} contains invalid characters",
                    hint="a key read from a file may end with a line break: strip() it",
                )
        self.executes = self.programs = command is not None
        self._command = tuple(command or ())
        self._url = url or ""
        self._env = env
        self._cwd = cwd
        self._sandbox = sandbox if sandbox is not None else Sandbox()
        self._headers = dict(headers or {})
        self._timeout_s = timeout_s
        self._connect_s = connect_s
        self._approval = approval
        self._tools: tuple[Tool, ...] = ()
        self._link: McpLink | None = None
        self._tells_caller = command is not None if tell_caller is None else tell_caller
        self._per_principal = per_principal
        self._principals = principals
        self._scope: Scope | None = None
        self._programs: ProgramAccounts | None = None
        self._own: dict[str, _Own] = {}  # least recently used first

    def __repr__(self) -> str:
        return f"<McpServer {self.name!r} {'connected' if self.connected else 'not connected'}>"

    @property
    def unwalled(self) -> bool:  # type: ignore[override]  # known after the machine was probed
        """Whether the server is a program, and the operator chose that programs run without a wall."""
        return self.programs and are_programs_unwalled()

    @property
    def connected(self) -> bool:
        """Whether the server is connected, so that calls can be made now."""
        return self._link is not None and self._link.connected

    @property
    def problem(self) -> str | None:
        """Reason why the server is not connected; None while the server is connected or outside of `lifespan`."""
        return self._link.problem if self._link is not None else None

    def tools(self) -> Sequence[Tool]:
        """Return the tools that the server listed most recently; empty before the first connection."""
        return self._tools

    @asynccontextmanager
    async def lifespan(self, home: ToolsetContext) -> AsyncGenerator[None, None]:
        """Connect to the server, and reconnect as needed until the block exits.

        If the first attempt to connect fails for any reason other than those below, connecting is retried in the
        background.

        Raises:
            MissingExtra: if the package ``mcp`` is not installed.
            ConfigurationError: if the program cannot be started, a path or a secret of its sandbox is missing, or the
                function of its sandbox fails for the principal ``""``.
            NotSupported: if this machine cannot build the program's wall.
        """
        if importlib.util.find_spec("mcp") is None:
            raise MissingExtra("MCP servers", extra="mcp")
        # in a thread: it takes most of a second
        await asyncio.get_running_loop().run_in_executor(None, importlib.import_module, "mcp")
        try:
            sandbox = sandbox_of(self._sandbox, "")
        except ToolFailed:
            raise ConfigurationError(
                f"the program that lists the tools of MCP server {self.name!r} has no sandbox",
                hint='let the function of its sandbox return one for the principal ""',
            ) from None
        scope = Scope(f"mcp {self.name}", detached=True, grace_s=_CLOSE_S).open()
        self._programs = home.programs
        link = McpLink(self.name, self._opener(scope, sandbox), connect_s=self._connect_s, on_tools=self._listed)
        try:
            link.start(scope)
            await link.settled()
            if isinstance(link.error, (FileNotFoundError, PermissionError, NotADirectoryError)) and self._command:
                raise ConfigurationError(
                    f"failed to start the program of MCP server {self.name!r}: {link.error}",
                    hint="check that the program is installed, and that command and cwd are correct",
                )
            if isinstance(link.error, (ConfigurationError, NotSupported)):
                raise link.error
            self._link, self._scope = link, scope
            yield
        finally:
            self._link = None
            self._own = {}
            await scope.stop("the host closes")

    def _opener(self, scope: Scope, sandbox: Sandbox, principal: str = "") -> Opener:
        def open_streams(on_end: Callable[[str], None]) -> AbstractAsyncContextManager[Any]:
            if self._url:
                return open_http(self._url, headers=self._headers)
            assert self._programs is not None, "it is in its lifespan"
            program = ServerProgram(
                name=self.name,
                command=self._command,
                env=self._env,
                cwd=self._cwd,
                sandbox=sandbox,
                principal=principal,
                programs=self._programs,
            )
            return open_stdio(scope, program, on_end=on_end)

        return open_streams

    def _listed(self, found: Sequence[ServerTool]) -> None:
        """Replace the list of tools; skip and log each tool whose name is a duplicate."""
        tools: dict[str, Tool] = {}
        for tool in found:
            name = _tool_name(self.prefix, tool.name)
            if name in tools:
                _log.warning("MCP server %s: duplicate tool name %s; skipping the second", self.name, name)
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
        """Return the caller's identity to send to the server; empty if it is not to be sent."""
        if not self._tells_caller:
            return {}
        run = call.run
        named = {"principal": run.principal, "session": run.session_key, "session_id": run.session_id}
        return {f"holdfast/{name}": value for name, value in {**named, "call": call.call_id}.items()}

    def _own_of(self, principal: str) -> tuple[_Own, _Own | None]:
        """Reserve a call on a principal's program; return the program, and an idle program to stop or None.

        Raises:
            ToolFailed: if all programs are busy with calls of other principals, or the principal has no sandbox.
        """
        own = self._own.pop(principal, None)
        if own is None:
            sandbox = sandbox_of(self._sandbox, principal)
            idle = next((name for name, one in self._own.items() if not one.calls), None)
            past = self._own.pop(idle) if idle is not None and len(self._own) >= self._principals else None
            if len(self._own) >= self._principals:
                raise ToolFailed(f"MCP server {self.name!r} is busy with {len(self._own)} users; try again later")
            assert self._scope is not None, "it is connected"
            scope = self._scope.child(f"mcp {self.name} of {principal}", grace_s=_CLOSE_S).open()
            link = McpLink(
                self.name, self._opener(scope, sandbox, principal), connect_s=self._connect_s, on_tools=lambda _: None
            )
            link.start(scope)
            own = _Own(scope, link)
            self._own[principal] = own
            own.calls += 1
            return own, past
        self._own[principal] = own
        own.calls += 1
        return own, None

    async def _call(self, tool: str, call: Call, /, **arguments: Any) -> Any:
        """Call a tool of the server and return the result, or raise `ToolFailed` with a reason for the model."""
        from mcp import MCPError

        if self._link is None:
            raise ToolFailed(f"MCP server {self.name!r} is not connected: its host is not open")
        own, past = self._own_of(call.run.principal) if self._per_principal else (None, None)
        link = self._link if own is None else own.link
        try:
            if past is not None:
                await past.scope.stop("another principal needs the slot")
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
    """The program of one principal, and the number of calls in progress on the program."""

    scope: Scope
    link: McpLink
    calls: int = 0


def _fitting(schema: dict[str, Any], arguments: dict[str, Any], /) -> dict[str, Any]:
    """Check the arguments against the parts of the schema that we support, leaving the rest to the server."""
    try:
        check_schema(arguments, schema)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        _log.debug("schema too complex to check; leaving it to the server: %.200r", schema)
    return arguments


class _Progress:
    """Callback that streams a call's progress messages as output, limited in their rate and number."""

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
        with suppress(RunClosed):  # the message arrived after the run ended
            _ = self._call.output(f"[{share}]{text}\n")


def _tool_name(prefix: str, name: str) -> str:
    """Return a tool name that models accept; a name that is too long is truncated and made unique with a hash."""
    plain = prefix + re.sub(r"[^a-zA-Z0-9_-]", "_", name)
    if len(plain) <= _NAME_LENGTH:
        return plain
    mark = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{plain[: _NAME_LENGTH - 9]}_{mark}"


def _content(result: CallToolResult) -> Any:
    """Return a call's result as text or a JSON value; images and audio are replaced by notes in the text."""
    text = "\n".join(filter(None, map(_block, result.content)))
    structured = result.structured_content
    if structured is None:
        return text
    if isinstance(structured, dict) and structured.keys() == {"result"}:
        structured = structured["result"]  # servers wrap non-object values this way
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
            return f"[content of unknown kind {kind}]"
