"""Start programs that resist being stopped, then stop the run: no process survives."""

import asyncio

import holdfast

STUBBORN = "trap '' TERM; (setsid sleep 600 &); (sleep 600 &); sleep 600"


async def agent(run: holdfast.Run) -> None:
    for _ in range(2):
        await run.process(["sh", "-c", STUBBORN])
    await run.emit("started")
    await run.interrupt.wait()


async def main() -> None:
    async with holdfast.Host(agent, store="memory://") as host:
        session = host.session("alice")
        receipt = await session.send("go")
        async for event in session.events(after=receipt.cursor):
            if event.kind == "text.delta":
                break
        stopped = await session.interrupt("enough", grace_s=0)
        print(f"outcome: {stopped.outcome}, survivors: {list(stopped.survivors)}")


if __name__ == "__main__":
    asyncio.run(main())
