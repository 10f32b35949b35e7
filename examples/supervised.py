"""Restart agents that fail, together with the agents after them, and give up after too many restarts."""

import asyncio
from collections import Counter

import holdfast

tries: Counter[str] = Counter()


async def feed(run: holdfast.Run) -> str:
    tries["feed"] += 1
    await asyncio.sleep(0.01)
    if tries["feed"] < 3:
        raise ConnectionError(f"the feed broke off ({tries['feed']})")
    return f"the feed was read at try {tries['feed']}"


async def index(run: holdfast.Run) -> str:
    """Build an index of the feed, so it is restarted together with the feed."""
    tries["index"] += 1
    await asyncio.sleep(0.1)
    return f"indexed at try {tries['index']}"


async def heartbeat(run: holdfast.Run) -> None:
    """Keep running while the others work."""
    for number in range(1_000_000):
        await run.step(f"beat {number}")
        await asyncio.sleep(0.02)


async def hopeless(run: holdfast.Run) -> None:
    raise ValueError("no chance")


pipeline = holdfast.supervised(
    holdfast.branch(heartbeat, restart="permanent"),
    feed,
    index,
    strategy="rest_for_one",
    restarts=5,
    within_s=10,
    delay_s=0.01,
    name="pipeline",
)
doomed = holdfast.supervised(hopeless, restarts=2, within_s=10, name="doomed")


async def main() -> None:
    async with holdfast.Host(agents=[pipeline, doomed], store="memory://") as host:
        print(await host.session("alice").ask("go", agent="pipeline"))
        try:
            await host.session("bob").ask("go", agent="doomed")
        except holdfast.RunFailed as error:
            print(error.message)


if __name__ == "__main__":
    asyncio.run(main())
