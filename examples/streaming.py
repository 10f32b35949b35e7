"""Stream an answer, and resume reading it from a cursor after a disconnect."""

import asyncio
from collections.abc import AsyncIterator

import holdfast
from holdfast.events import TextDelta


async def agent(run: holdfast.Run) -> AsyncIterator[str]:
    for number in range(1, 6):
        yield f"{number} "
        await asyncio.sleep(0.02)


async def main() -> None:
    async with holdfast.Host(agent, store="memory://") as host:
        session = host.session("alice")
        receipt = await session.send("count")

        # Read two pieces, then disconnect…
        seen = []
        number = (await session.info()).number
        cursor = receipt.cursor
        async for event in session.events(after=receipt.cursor):
            if isinstance(event, TextDelta):
                seen.append(event.text)
                cursor = f"{event.seq}-{number}"
                if len(seen) == 2:
                    break
        # … and resume from the cursor: nothing is lost, nothing is repeated.
        rest = session.events(after=cursor, follow=receipt.message_id)
        seen += [event.text async for event in rest if isinstance(event, TextDelta)]
        print("".join(seen))


if __name__ == "__main__":
    asyncio.run(main())
