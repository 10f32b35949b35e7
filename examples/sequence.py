"""Run agents one after another: each gets the previous answer, and the last one streams its text."""

import asyncio

import holdfast
from holdfast.events import ChildFinished, TextDelta


async def outline(run: holdfast.Run) -> str:
    return f"beginning, middle and end of {run.text}"


async def draft(run: holdfast.Run) -> str:
    return f"a draft with {run.text}"


async def read_aloud(run: holdfast.Run) -> None:
    for word in run.text.split():
        await run.emit(f"{word} ")
        await asyncio.sleep(0.01)


author = holdfast.sequence(
    outline,
    holdfast.branch(draft, text="{text}, in three sentences", deadline_s=30),
    read_aloud,
    name="author",
)


async def main() -> None:
    async with holdfast.Host(author, store="memory://") as host:
        session = host.session("alice")
        receipt = await session.send("a voyage")
        pieces = 0
        async for event in session.events(after=receipt.cursor, follow=receipt.message_id):
            if isinstance(event, ChildFinished):
                print(f"{event.child_id.rpartition('.')[2]}: {event.text}")
            elif isinstance(event, TextDelta) and event.run_id == receipt.run_id:
                pieces += 1
        print(f"the answer came in {pieces} pieces")


if __name__ == "__main__":
    asyncio.run(main())
