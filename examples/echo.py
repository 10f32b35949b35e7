"""The smallest agent: it repeats the message. Run it, or serve it with: holdfast serve examples.echo:agent"""

import asyncio

import holdfast


async def agent(run: holdfast.Run) -> str:
    return f"You said: {run.text}"


async def main() -> None:
    async with holdfast.Host(agent, store="memory://") as host:
        session = host.session("alice")
        print(await session.ask("hello"))
        print(await session.ask("and again"))
        for entry in await session.transcript():
            print(f"{entry.n}. {entry.role}: {entry.content}")


if __name__ == "__main__":
    asyncio.run(main())
