"""A host in a program of its own, whose agent starts a background process; killed by the tests."""

from __future__ import annotations

import asyncio
import sys

from holdfast import Agent, Host
from holdfast.agents.scripted import ScriptedModel
from holdfast.protocol.model import CallPart
from holdfast.tools import Processes


def agent_that_starts(folder: str, command: list[str]) -> Agent:
    """It starts the command for the first message, and repeats what the others say."""

    def script(request: object) -> object:
        last = request.messages[-1]  # type: ignore[attr-defined]
        match last.content:
            case "start":
                return CallPart(name="start_process", arguments={"command": command})
            case said:
                return f"heard {said}"

    return Agent(name="starter", model=ScriptedModel(script), tools=[Processes(folder)])  # type: ignore[arg-type]


async def main(store: str, folder: str, command: list[str]) -> None:
    async with Host(agent_that_starts(folder, command), store=store) as host:
        print(await host.session("s").ask("start"), flush=True)
        await asyncio.sleep(1000)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
