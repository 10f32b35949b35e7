"""Process ten thousand items in one run with bounded concurrency, then interrupt such a run halfway."""

import asyncio

import holdfast


async def look_up(number: int) -> int:
    await asyncio.sleep(0)
    return number * number


def checksum(text: str) -> int:
    """Compute a checksum. A sync function, so each call gets a thread."""
    return sum(text.encode())


@holdfast.agent
async def summarise(run: holdfast.Run) -> str:
    return run.text[:5]


@holdfast.agent
async def fan_out(run: holdfast.Run) -> str:
    squares = await run.map(look_up, range(10_000), concurrency=200)
    sums = await run.map(checksum, (f"page {n}" for n in range(50)), concurrency=8)
    texts = await run.map(summarise, ["first page", "second page"], timeout_s=10)
    return f"{len(squares):,} squares, {len(sums)} sums, {texts}"


@holdfast.agent
async def endless(run: holdfast.Run) -> None:
    async def wait(number: int) -> None:
        await asyncio.sleep(60)

    await run.map(wait, range(10_000), concurrency=500)


async def main() -> None:
    async with holdfast.Host(agents=[fan_out, endless], store="memory://") as host:
        print(await host.session("alice").ask("go", agent="fan_out"))
        session = host.session("bob", agent="endless")
        await session.send("go")
        await asyncio.sleep(0.2)
        receipt = await session.interrupt("enough")
        print(f"outcome: {receipt.outcome}, {receipt.stopped.tasks} tasks ended")


if __name__ == "__main__":
    asyncio.run(main())
