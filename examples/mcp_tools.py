"""Give an agent the tools of an MCP server. Needs the extra ``mcp``: pip install 'holdfast-agents[mcp]'"""

import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import holdfast
from holdfast import CallPart, ScriptedModel
from holdfast.tools import McpServer

PROGRAM = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("clock", log_level="ERROR")

@server.tool()
async def add_hours(hour: int, hours: int) -> int:
    "Return the hour of the day after adding a number of hours."
    return (hour + hours) % 24

server.run("stdio")
"""


async def main(program: Path) -> None:
    clock = McpServer("clock", command=[sys.executable, str(program)])
    agent = holdfast.Agent(
        name="planner",
        model=ScriptedModel(
            [CallPart(name="clock_add_hours", arguments={"hour": 22, "hours": 5}), "Three in the morning."]
        ),
        tools=[clock],
    )
    async with holdfast.Host(agent, store="memory://") as host:
        print(f"tools: {[tool.name for tool in clock.tools()]}")
        session = host.session("alice")
        print(await session.ask("when do we land?"))
        print([entry.content for entry in await session.transcript() if entry.role == "tool_result"])


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        file = Path(folder, "clock_server.py")
        file.write_text(PROGRAM)
        asyncio.run(main(file))
