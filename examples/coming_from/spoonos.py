"""Coming from SpoonOS: an agent with a state, a memory, a stream and messages from other agents.

The state belongs to the session and cannot get stuck; concurrent callers are all answered, in order; every reader of
the stream sees everything; 150 concurrent messages are stored complete; a message from another agent has a deadline.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import holdfast
from holdfast.events import TextDelta

T = TypeVar("T")


async def agent(run: holdfast.Run) -> str:
    memory = await run.history()
    if run.text == "hang":
        await run.interrupt.wait()
    for word in ("thinking ", "about "):
        await run.emit(word)
    return f"{run.text} (memory: {len(memory)} entries)"


async def together(*callers: Coroutine[Any, Any, T]) -> list[T]:
    async with holdfast.Scope("callers") as scope:
        handles = [scope.spawn(caller) for caller in callers]
        return [await handle for handle in handles]


async def read(session: holdfast.Session, receipt: holdfast.Receipt) -> str:
    events = session.events(after=receipt.cursor, follow=receipt.message_id)
    return "".join([event.text async for event in events if isinstance(event, TextDelta)])


async def main() -> None:
    async with holdfast.Host(agent, store="memory://", settings=holdfast.Settings(mailbox_limit=200)) as host:
        spoon = host.session("spoon")

        # Several callers of run(): none is refused, and each gets the answer to its own question, in order.
        answers = await together(*(spoon.ask(f"question {n}") for n in range(4)))
        print(*answers, sep="\n")
        print(f"state: {(await spoon.info()).state}")

        # Several consumers of stream(): each sees all of it, even if the others are slow.
        receipt = await spoon.send("a stream")
        streams = await together(*(read(spoon, receipt) for _ in range(3)))
        print(f"3 readers, {len(set(streams))} text: {streams[0]!r}")

        # The memory: 150 concurrent messages, complete and in order.
        busy = host.session("busy")
        receipts = await together(*(busy.send(f"note {n}") for n in range(150)))
        for receipt in receipts:
            await busy.wait(receipt.message_id)
        notes = [entry.content for entry in await busy.transcript() if entry.role == "user"]
        print(f"memory: {len(notes)} notes, in order: {notes == [f'note {n}' for n in range(150)]}")

        # A message from another agent has a deadline, and its failure affects nothing else.
        try:
            await host.session("other").ask("hang", timeout_s=0.2)
        except holdfast.WaitExpired as late:
            print(f"from outside: {late.code}; spoon is {(await spoon.info()).state}")
        stopped = await host.session("other").stop("too late")
        assert stopped.receipt is not None
        print(f"other: {stopped.receipt.outcome}")


if __name__ == "__main__":
    asyncio.run(main())
