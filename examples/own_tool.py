"""Tools of your own: checked arguments, streamed output, plain errors, and a group with a connection to keep."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import holdfast
from holdfast.agents import Call, Home, Toolset
from holdfast.agents.scripted import ScriptedModel
from holdfast.protocol.events import ToolOutput
from holdfast.protocol.model import CallPart


@holdfast.tool(timeout_s=30)
async def count_down(call: Call, start: int) -> str:
    """Count down to zero.

    Parameters:
        start: where it begins, at most 5.
    """
    if start > 5:
        raise holdfast.ToolFailed("I count from 5 at most")  # the model reads this as it is
    for number in range(start, 0, -1):
        await call.output(f"{number} ")
        await asyncio.sleep(0)  # an interrupt, or the deadline, ends it here
    return "lift-off"


class Notes(Toolset):
    """Tools that share something which lives as long as the host, such as a connection."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    @asynccontextmanager
    async def lifespan(self, home: Home) -> AsyncIterator[None]:
        """Entered when the host starts, left when it closes."""
        print("connected")
        yield
        print("closed")

    def tools(self) -> Sequence[holdfast.Tool]:
        """Asked at the start of each run."""
        return [holdfast.tool(name="note", description="Write a note down.")(self.write)]

    def write(self, text: str) -> int:
        """The work of the tool."""
        self.notes.append(text)
        return len(self.notes)


script = ScriptedModel(
    [
        [
            CallPart(name="count_down", arguments={"start": 3}),
            CallPart(name="count_down", arguments={"start": "many"}),
            CallPart(name="count_down", arguments={"start": 9}),
            CallPart(name="note", arguments={"text": "it flew"}),
        ],
        "All done.",
    ]
)


async def main() -> None:
    agent = holdfast.Agent(name="pilot", model=script, tools=[count_down, Notes()])
    async with holdfast.Host(agent, store="memory://") as host:
        session = host.session("alice")
        receipt = await session.send("go")
        async for event in session.events(follow=receipt.message_id):
            if isinstance(event, ToolOutput):
                print(f"output: {event.text}")
        for entry in await session.transcript():
            if entry.role == "tool_result":
                print(f"{entry.name}: {entry.status}: {entry.content}")


if __name__ == "__main__":
    asyncio.run(main())
