"""Coming from the Hermes gateway: a session stays claimed while a message is still being enriched.

Setting up a run is slow: pictures are described, voice is transcribed, hooks are called. Two quick messages start one
run after the other, never two at once; a stop works during the setup; commands leave no claim behind.
"""

import asyncio

import holdfast

at_work: list[str] = []
most_at_once = 0


async def enrich(run: holdfast.Run) -> str:
    """Await ten times between message and model: the window in which a second agent used to start."""
    for _ in range(10):
        await run.interrupt.sleep(0.005)
    return f"[picture: a boat] {run.text}"


async def agent(run: holdfast.Run) -> str:
    global most_at_once
    at_work.append(run.run_id)  # the session was claimed before this line, in the write that took the message
    most_at_once = max(most_at_once, len(at_work))
    try:
        text = await enrich(run)
        if run.text.endswith("forever"):
            await run.interrupt.wait()
        return f"seen {text}"
    finally:
        at_work.remove(run.run_id)


async def main() -> None:
    async with holdfast.Host(agent, store="memory://") as host:
        session = host.session("telegram:4711")
        async with holdfast.Scope("two quick messages") as scope:
            sends = [scope.spawn(session.send(text)) for text in ("what is this?", "and this?")]
            first, second = [await send for send in sends]
        print(f"{first.disposition}, then {second.disposition}")
        for receipt in (first, second):
            print((await session.wait(receipt.message_id)).text)

        # /stop during the setup. The message queued behind it runs.
        slow = await session.send("draw forever")
        waiting = await session.send("still there?")
        stopped = await session.interrupt("/stop", run_id=slow.run_id)
        print(f"/stop: {stopped.outcome}; {(await session.wait(slow.message_id)).state}")
        print((await session.wait(waiting.message_id)).text)

        # /status and /help only read; they claim nothing. A message that must not wait uses the policy reject.
        print(f"/status: {(await session.info()).state}")
        busy = await session.send("paint forever")
        try:
            await session.send("now!", policy="reject")
        except holdfast.HoldfastError as refused:
            print(f"refused: {refused.code}")
        await session.interrupt("/stop", run_id=busy.run_id)
        print(f"agents at once, at most: {most_at_once}")


if __name__ == "__main__":
    asyncio.run(main())
