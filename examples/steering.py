"""Send a message while a run is active: steer the run, or roll it back."""

import asyncio

import holdfast
from holdfast import CallPart, ScriptedModel
from holdfast.agents import ModelRequest, ToolMessage, UserMessage

gates = {"hotels in Oslo": holdfast.Interrupt(name="Oslo"), "hotels in Rome": holdfast.Interrupt(name="Rome")}


@holdfast.tool
async def look_up(what: str) -> str:
    """Look something up. This takes a while."""
    if what in gates:
        await gates[what].wait()
    return f"{what}: found"


async def looking(session: holdfast.Session, receipt: holdfast.Receipt) -> None:
    """Wait until the message's run has started its tool call."""
    async for event in session.events(after=receipt.cursor):
        if event.kind == "tool.started":
            return


def model(request: ModelRequest) -> CallPart | str:
    heard = [message.content for message in request.messages if isinstance(message, UserMessage)]
    if not any(isinstance(message, ToolMessage) for message in request.messages):
        return CallPart(name="look_up", arguments={"what": heard[0]})
    return f"I heard: {' | '.join(heard)}"


async def main() -> None:
    agent = holdfast.Agent(name="clerk", model=ScriptedModel(model), tools=[look_up])
    async with holdfast.Host(agent, store="memory://") as host:
        session = host.session("alice")
        first = await session.send("hotels in Oslo")
        await looking(session, first)
        steered = await session.send("only cheap ones", policy="steer")
        print(f"steer: {steered.disposition}")
        gates["hotels in Oslo"].trigger("found")
        print((await session.wait(first.message_id)).text)

        other = host.session("bob")
        wrong = await other.send("hotels in Rome")
        await looking(other, wrong)
        instead = await other.send("hotels in Lima", policy="rollback")
        print(f"rollback: {instead.disposition}")
        print(f"first message: {(await other.wait(wrong.message_id)).state}")
        print((await other.wait(instead.message_id)).text)
        print([entry.content for entry in await other.transcript() if entry.role == "user"])


if __name__ == "__main__":
    asyncio.run(main())
