"""Use a running server from Python: python examples/client.py [http://127.0.0.1:8420]"""

import asyncio
import sys

import holdfast


async def main(url: str) -> None:
    async with holdfast.Client(url) as client:
        session = client.session("example")
        print(await session.ask("count the words of this line", timeout_s=30))
        receipt = await session.send("count these")
        kinds = [event.kind async for event in session.events(after=receipt.cursor, follow=receipt.message_id)]
        print(kinds[0], "…", kinds[-1])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8420"))
