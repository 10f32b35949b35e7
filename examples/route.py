"""Route each message to one of several agents, chosen by a function or a model. An unknown name fails the run."""

import asyncio

import holdfast


async def billing(run: holdfast.Run) -> str:
    return f"billing looks at: {run.text}"


async def repairs(run: holdfast.Run) -> str:
    return f"repairs looks at: {run.text}"


def by_words(run: holdfast.Run) -> str:
    return "billing" if "invoice" in run.text else "repairs" if "broken" in run.text else "sales"


# With a model: Agent(name="clerk", model=…, instructions="Answer in one word: billing or repairs")
desk = holdfast.route(by_words, {"billing": billing, "repairs": repairs}, name="desk")


async def main() -> None:
    async with holdfast.Host(desk, store="memory://") as host:
        session = host.session("alice")
        print(await session.ask("my invoice is wrong"))
        print(await session.ask("my lamp is broken"))
        try:
            await session.ask("hello")
        except holdfast.RunFailed as error:
            print(error.message)


if __name__ == "__main__":
    asyncio.run(main())
