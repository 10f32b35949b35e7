"""An MCP server for tests, over stdio or HTTP: it writes down what happens to its calls.

Run as ``python mcp_everything.py <folder> [port]``; marks are files in the folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ImageContent, TextContent

folder = Path(sys.argv[1])
server = MCPServer("everything", log_level="ERROR")


def mark(name: str, text: str = "") -> None:
    (folder / name).write_text(text)


def me() -> str:
    """Name this process to processes outside of its namespaces: the number of its pid's namespace, its pid and start.

    The kernel reuses numbers of namespaces, but not with the same pid at the same time since the machine's start.
    """
    try:
        started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        return f"{os.stat('/proc/self/ns/pid').st_ino}:{os.getpid()}:{started}"
    except OSError:  # Landlock alone: the pid is the host's
        return f"0:{os.getpid()}:0"


@server.tool()
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
async def echo(call: str, then: dict[str, Any] | None = None) -> str:
    """Say it again. Its first parameter has the name that our own functions keep for themselves."""
    return f"{call} {then}"


@server.tool()
async def wait(name: str) -> str:
    """Wait until cancelled."""
    mark(f"{name}.started")
    try:
        await anyio.sleep(600)
    except anyio.get_cancelled_exc_class():
        mark(f"{name}.cancelled")
        raise
    return "slept"


@server.tool()
def block(seconds: float) -> str:
    """Block a thread."""
    mark("block.started")
    time.sleep(seconds)
    mark("block.ended")
    return "done"


@server.tool()
async def count(upto: int, ctx: Context) -> str:
    """Count, and tell of it."""
    for n in range(1, upto + 1):
        await ctx.report_progress(n, upto, f"at {n}")
    return "counted"


@server.tool()
async def chatter(times: int, ctx: Context) -> str:
    """Tell much more than anybody wants to know."""
    for n in range(times):
        await ctx.report_progress(n, times, "x" * 100_000)
    return "said"


@server.tool()
async def swell(ctx: Context) -> str:
    """Get tools that are too much: with a huge description, a huge schema, and very many."""

    async def huge() -> str:
        return "huge"

    async def plain() -> str:
        return "plain"

    server.add_tool(huge, name="huge", description="d" * 1_000_000)
    for n in range(1200):
        server.add_tool(plain, name=f"plain{n}", description="p")
    await ctx.notify_tools_changed()
    return "swollen"


@server.tool()
async def read(path: str) -> str:
    """Return a file, or why it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError as error:
        return str(error)


@server.tool()
async def fail() -> str:
    """Fail."""
    raise ToolError("the printer is on fire")


@server.tool()
async def picture() -> list[TextContent | ImageContent]:
    """A picture."""
    return [TextContent(type="text", text="here"), ImageContent(type="image", data="AAAA" * 100, mime_type="image/png")]


@server.tool()
async def person(name: str) -> dict[str, Any]:
    """An object."""
    return {"name": name, "age": 7}


_remembered: list[str] = []


@server.tool()
async def who(ctx: Context) -> dict[str, Any]:
    """Who asks, and who asked this process before."""
    meta = ctx.request_context.meta or {}
    told = {str(name): value for name, value in dict(meta).items() if str(name).startswith("holdfast/")}
    before = list(_remembered)
    _remembered.append(str(told.get("holdfast/principal")))
    return {"told": told, "before": before, "pid": me()}


@server.tool()
async def big(size: int) -> str:
    """Much text."""
    return "x" * size


@server.tool()
async def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
async def fork(programs: int) -> str:
    """Start programs that stay, and wait."""
    for _ in range(programs):
        subprocess.Popen(["sleep", "60"])
    await anyio.sleep(60)
    return "they are there"


@server.tool()
async def grow(ctx: Context) -> str:
    """Get one more tool."""

    async def grown() -> str:
        """A new tool."""
        return "new"

    server.add_tool(grown, name="grown.tool")
    await ctx.notify_tools_changed()
    await ctx.request_context.session.send_tool_list_changed()
    return "grown"


if __name__ == "__main__":
    mark("pid", me())
    with (folder / "starts").open("a") as starts:
        starts.write(f"{os.getpid()}\n")
    if len(sys.argv) > 2:
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        server.run("stdio")
