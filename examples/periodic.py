"""Ask an agent at a fixed interval within one run, with a stream beside it, until the run is interrupted."""

import asyncio
from collections.abc import AsyncIterator

import holdfast
from holdfast.events import ChildFinished

readings = [20.5, 20.7, 21.0, 24.8, 25.1]
seen: list[float] = []
heard: list[str] = []


async def look(run: holdfast.Run) -> str:
    """Read the thermometer; called once per tick."""
    seen.append(readings[len(seen) % len(readings)])
    return f"{seen[-1]} °C at reading {len(seen)}"


async def siren(run: holdfast.Run) -> AsyncIterator[str]:
    """Report high readings beside the ticks; it ends when they end."""
    try:
        reported = 0
        while True:
            await asyncio.sleep(0.01)
            for warm in [value for value in seen[reported:] if value > 24]:
                heard.append(f"warm: {warm}")
                yield f"{warm}! "
            reported = len(seen)
    finally:
        heard.append("the siren is off")


async def slow(run: holdfast.Run) -> str:
    """Take longer than the interval between ticks."""
    await asyncio.sleep(0.25)
    return "made it"


watch = holdfast.periodic(look, every_s=0.1, max_runs=5, beside=[siren], name="watch")
impatient = holdfast.periodic(slow, every_s=0.1, overlap="interrupt", name="impatient")


async def main() -> None:
    async with holdfast.Host(agents=[watch, impatient], store="memory://") as host:
        print(await host.session("kitchen", agent="watch").ask("how warm is it?"))
        print(heard)

        session = host.session("attic", agent="impatient")
        receipt = await session.send("go")
        await asyncio.sleep(0.45)
        stopped = await session.interrupt("that will do")
        print(f"outcome: {stopped.outcome}")
        print((await session.wait(receipt.message_id)).state)
        async for event in session.events(follow=receipt.message_id):
            if isinstance(event, ChildFinished) and event.cause is not None:
                print(f"a tick ended early: {event.cause.reason}")


if __name__ == "__main__":
    asyncio.run(main())
