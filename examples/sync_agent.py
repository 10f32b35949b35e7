"""Write an agent as blocking code: a sync function gets a thread, and can still be interrupted."""

import asyncio

import holdfast


def agent(run: holdfast.Run) -> str:
    counted = 0
    for word in run.text.split():
        run.interrupt.sleep_blocking(0.01)  # stands in for blocking work; ends at once when interrupted
        counted += len(word)
    return f"{counted} letters"


async def main() -> None:
    async with holdfast.Host(agent, store="memory://") as host:
        # Each session has its own run, so the threads run concurrently.
        async with asyncio.TaskGroup() as group:
            asks = [
                group.create_task(host.session(name).ask("the quick brown fox")) for name in ("alice", "bob", "carol")
            ]
        print([ask.result() for ask in asks])


if __name__ == "__main__":
    asyncio.run(main())
