"""A call that a person must approve, and a question to a person; both outlive the process that asked."""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import holdfast
from holdfast.agents.scripted import ScriptedModel
from holdfast.protocol.events import RunSuspended
from holdfast.protocol.model import CallPart


@holdfast.tool(approval=lambda arguments: arguments["amount"] > 100)
def pay(to: str, amount: int) -> str:
    """Pay somebody. More than 100 needs a person's approval."""
    return f"{to} has got {amount}"


cashier = holdfast.Agent(
    name="cashier",
    model=ScriptedModel(
        [
            [
                CallPart(name="pay", arguments={"to": "Ann", "amount": 20}),
                CallPart(name="pay", arguments={"to": "Bob", "amount": 2000}),
            ],
            "Done.",
        ]
    ),
    tools=[pay],
)


async def main() -> None:
    with TemporaryDirectory() as folder:
        store = f"sqlite:///{Path(folder, 'holdfast.db')}"
        async with holdfast.Host(cashier, store=store) as host:
            session = host.session("alice")
            receipt = await session.send("pay them")
            async for event in session.events(after=receipt.cursor):
                if isinstance(event, RunSuspended):
                    print(f"asked: {event.question.tool} {event.question.arguments}")
                    break

        # The host is gone, the question is not. It may wait for days.
        async with holdfast.Host(cashier, store=store) as host:
            session = host.session("alice")
            (question,) = await session.questions()
            print(f"still open after the restart: {question.tool} to {question.arguments['to']}")
            await session.deny(question.question_id, reason="that is too much")
            settled = await session.wait(receipt.message_id)
            print(f"{settled.state}: {settled.text}")
            for entry in await session.transcript():
                if entry.role == "tool_result":
                    print(f"{entry.name}: {entry.status}: {entry.content}")


if __name__ == "__main__":
    asyncio.run(main())
