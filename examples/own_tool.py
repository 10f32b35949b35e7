"""Write your own tools: validated arguments, streamed output, clear errors, and a toolset that owns a connection."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import holdfast
from holdfast import Call, CallPart, ScriptedModel, Toolset
from holdfast.agents import ToolsetContext
from holdfast.events import ToolOutput


@holdfast.tool(timeout_s=30)
async def count_down(call: Call, start: int) -> str:
    """Count down to zero.

    Parameters:
        start: the number to start from, at most 5.
    """
    if start > 5:
        raise holdfast.ToolFailed("start must be 5 or less")  # the model gets this text unchanged
    for number in range(start, 0, -1):
        await call.output(f"{number} ")
        await asyncio.sleep(0)  # an interrupt or the deadline ends the call here
    return "lift-off"


class Notes(Toolset):
    """Tools that share a resource which lives as long as the host, such as a connection."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    @asynccontextmanager
    async def lifespan(self, home: ToolsetContext) -> AsyncIterator[None]:
        """Open the connection when the host starts, and close it when the host closes."""
        print("connected")
        yield
        print("closed")

    def tools(self) -> Sequence[holdfast.Tool]:
        """Return the tools; called at the start of each run."""
        return [holdfast.tool(name="note", description="Save a note.")(self.write)]

    def write(self, text: str) -> int:
        """Save a note and return how many there are."""
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
