"""Tools in processes of their own: what they are given, and where what they print appears."""

from __future__ import annotations

import asyncio
import os

from holdfast import Agent, Host, Run, tool
from holdfast.agents.scripted import ScriptedModel
from holdfast.protocol.events import RunFinished, ToolFinished, ToolOutput
from holdfast.protocol.model import CallPart
from holdfast.runtime.processes import procfs
from tests.agents.isolated_tools import speaking
from tests.runtime.processes_zoo import await_condition


def test_an_isolated_tool_knows_its_call_and_its_output_is_streamed() -> None:
    async def main() -> None:
        model = ScriptedModel([[CallPart(name="speaking", arguments={"word": "hello"})], "done"])
        agent = Agent(name="a", model=model, tools=[tool(isolation="process")(speaking)])
        heard = ""
        async with asyncio.timeout(30), Host(agent, store="memory://") as host:
            session = host.session("s")
            receipt = await session.send("go")
            async for event in session.events(after=receipt.cursor):
                match event:
                    case ToolOutput():
                        heard += event.text
                    case ToolFinished():
                        said, _, pid = event.result.partition(" in another: ")
                        assert said == event.call_id
                        assert int(pid) != os.getpid()
                    case RunFinished():
                        break
        assert heard == "hello is said\nhello is printed\n"

    asyncio.run(main())


def test_a_function_called_in_a_process_by_an_agent_of_its_own_gets_its_call_too() -> None:
    async def main() -> None:
        async def agent(run: Run) -> str:
            return str(await run.call(speaking, "hello", on="process"))

        async with asyncio.timeout(30), Host(agent, store="memory://") as host:
            said, _, pid = (await host.session("s").ask("go")).partition(" in another: ")
            assert said.startswith("r_")
            assert int(pid) != os.getpid()

    asyncio.run(main())


def test_the_hosts_close_ends_the_processes_that_were_kept_for_its_tools() -> None:
    async def main() -> int:
        async def agent(run: Run) -> str:
            return str(await run.call(os.getpid, on="process"))

        async with asyncio.timeout(30), Host(agent, store="memory://") as host:
            pid = int(await host.session("s").ask("go"))
            assert procfs.read_stat(pid) is not None
        return pid

    pid = asyncio.run(main())
    await_condition(lambda: (stat := procfs.read_stat(pid)) is None or stat.dead, "it has ended")
