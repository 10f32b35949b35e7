"""Ask a person to approve a tool call. The open question survives a restart of the host."""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import holdfast
from holdfast import CallPart, ScriptedModel
from holdfast.events import RunSuspended


@holdfast.tool(approval=lambda arguments: arguments["amount"] > 100)
def pay(to: str, amount: int) -> str:
    """Pay a person. Amounts above 100 need approval."""
    return f"paid {amount} to {to}"


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

        # The host is gone, but the question is still open. It can stay open for days.
        async with holdfast.Host(cashier, store=store) as host:
            session = host.session("alice")
            (question,) = await session.questions()
            print(f"still open after the restart: {question.tool} to {question.arguments['to']}")
            await session.deny(question.question_id, reason="the amount is too high")
            settled = await session.wait(receipt.message_id)
            print(f"{settled.state}: {settled.text}")
            for entry in await session.transcript():
                if entry.role == "tool_result":
                    print(f"{entry.name}: {entry.status}: {entry.content}")


if __name__ == "__main__":
    asyncio.run(main())
