"""Coming from Hermes: a gateway whose sessions have their own tools, and a stop that affects only one session.

Alice's agent runs a terminal command, a child agent and a blocking tool; so does Bob's. Alice sends a follow-up that
interrupts her run. Her run ends, including whole process trees; Bob's continues.
"""

import asyncio
import os

import holdfast
from holdfast.events import TextDelta

STUBBORN = "trap '' TERM; (setsid sleep 600 &); sleep 600"


def search(run: holdfast.Run) -> None:
    """Block in a thread. It receives the interrupt of its own run, and of no other."""
    while True:
        run.interrupt.sleep_blocking(1)


async def reviewer(run: holdfast.Run) -> None:
    await run.interrupt.wait()  # a child; the parent's interrupt reaches it


async def assistant(run: holdfast.Run) -> str | None:
    if run.text.startswith("also"):
        return f"heard: {run.text}"
    terminal = await run.process(["sh", "-c", STUBBORN])
    run.spawn(search, run, name="search")
    run.spawn(run.delegate, reviewer, "look at this", name="review")
    await run.emit(f"{terminal.pid}")
    await terminal.wait()
    return None


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def main() -> None:
    async with holdfast.Host(assistant, store="memory://") as host:
        alice, bob = host.session("telegram:alice"), host.session("matrix:bob")
        terminals = {}
        for session in (alice, bob):
            started = await session.send("build it")
            async for event in session.events(after=started.cursor):
                if isinstance(event, TextDelta):
                    terminals[session.key] = int(event.text)
                    break

        # The interrupt comes with Alice's next message. The run that takes it sees no stale interrupt.
        print("alice:", await alice.ask("also run the tests", policy="interrupt"))
        first = (await alice.runs())[-1]
        assert first.receipt is not None
        print(f"alice's first run: {first.state}, {first.receipt.outcome}, survivors: {list(first.receipt.survivors)}")

        print(f"terminals at work: {[key for key, pid in terminals.items() if is_there(pid)]}")
        print(f"bob's run: {(await bob.runs())[0].state}")
        stopped = await bob.stop("good night", grace_s=0.5)
        assert stopped.receipt is not None
        print(f"bob's session: {stopped.receipt.outcome}, survivors: {list(stopped.receipt.survivors)}")
        print(f"terminals at work: {[key for key, pid in terminals.items() if is_there(pid)]}")


if __name__ == "__main__":
    asyncio.run(main())
