"""Interrupt a run: the agent cleans up, and the receipt lists everything that ended."""

import asyncio

import holdfast
from holdfast.runtime import check_interrupt


def compute() -> None:
    while True:
        check_interrupt()  # a thread must check for interrupts itself


async def agent(run: holdfast.Run) -> None:
    run.spawn(compute, name="computation")
    run.spawn(asyncio.sleep, 600, name="a long wait")
    await run.emit("working…")
    try:
        await asyncio.sleep(600)
    finally:
        await run.emit(" cleaned up.")  # within the grace period: 5 seconds by default


async def main() -> None:
    async with holdfast.Host(agent, store="memory://") as host:
        session = host.session("alice")
        first = await session.send("go")
        async for event in session.events(after=first.cursor):
            if event.kind == "text.delta":
                break
        waiting = await session.send("go again")
        receipt = await session.interrupt("changed my mind")
        print(f"outcome: {receipt.outcome}, ended: {receipt.stopped.tasks} tasks, {receipt.stopped.threads} threads")
        settled = await session.wait(first.message_id)
        print(f"first message: {settled.state} ({settled.cause.reason if settled.cause else ''}): {settled.text}")

        # An interrupt ends one run, and the next message runs. A stop ends everything in the session.
        stop = await session.stop("enough")
        settled = await session.wait(waiting.message_id)
        print(f"stop: {stop.receipt.outcome}; second message: {settled.state}")


if __name__ == "__main__":
    asyncio.run(main())
