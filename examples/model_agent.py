"""The built-in agent: a model with a tool and a child agent that it delegates to. The model here is a script."""

import asyncio

import holdfast
from holdfast import CallPart, ScriptedModel


@holdfast.tool(idempotent=True)
def distance_km(start: str, end: str) -> int:
    """Return the distance between two towns.

    Parameters:
        start: the town to start from.
        end: the destination.
    """
    return {("Graz", "Vienna"): 190, ("Vienna", "Linz"): 185}[start, end]


poet = holdfast.Agent(
    name="poet",
    description="Writes a line of verse.",
    model=ScriptedModel("Three towns, two roads, one day."),
)

planner = holdfast.Agent(
    name="planner",
    instructions="Plan trips. Ask the poet for a line to end with.",
    # For a real model: model="anthropic:claude-sonnet-5", with pip install 'holdfast-agents[models]' and a key.
    model=ScriptedModel(
        [
            [
                "I look it up. ",
                CallPart(name="distance_km", arguments={"start": "Graz", "end": "Vienna"}),
                CallPart(name="distance_km", arguments={"start": "Vienna", "end": "Linz"}),
                CallPart(name="poet", arguments={"task": "a line about three towns"}),
            ],
            "375 km in all.",
        ]
    ),
    tools=[distance_km, poet],
)


async def main() -> None:
    async with holdfast.Host(planner, store="memory://") as host:
        session = host.session("alice")
        receipt = await session.send("from Graz over Vienna to Linz")
        async for event in session.events(after=receipt.cursor, follow=receipt.message_id):
            match event.kind:
                case "tool.started" | "tool.finished" | "step.started" | "child.finished":
                    print(event.kind, getattr(event, "name", ""), getattr(event, "result", "") or "")
        run = (await session.runs())[0]
        print(f"{run.state}: {run.text}")
        print(f"{run.usage.steps} steps, {run.usage.tool_calls} calls")


if __name__ == "__main__":
    asyncio.run(main())
