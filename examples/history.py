"""Change a session's history: retry, undo, fork, compact, export and import; and attach files to messages."""

import asyncio

import holdfast
from holdfast import ScriptedModel

numbers = iter(range(1, 100))


async def oracle(run: holdfast.Run) -> str:
    files = [attachment.name for message in run.messages for attachment in message.attachments]
    return f"answer {next(numbers)} to {run.text!r}{f' with {files}' if files else ''}"


writer = holdfast.Agent(name="writer", model=ScriptedModel("They greeted each other."))


async def main() -> None:
    async with holdfast.Host(agents=[oracle, writer], store="memory://") as host:
        session = host.session("alice")
        picture = await session.attach(b"\x89PNG...", media_type="image/png", name="map.png")
        print(await session.ask("where is this?", attachments=[picture]))
        again = await session.retry()
        print((await session.wait(again.message_id)).text)
        print(await session.ask("and this?"))

        entries = await session.transcript()
        fork = await session.fork("what-if", through_n=entries[1].n)
        print(f"the fork has {len(await host.session(fork.key).transcript())} of {len(entries)} entries")
        undone = await session.undo()
        print(f"undone: {[entry.content for entry in undone]}")

        export = await session.export()
        await host.session("elsewhere").import_history(export)
        print(f"imported: {len(export.entries)} entries, {len(export.attachments)} attachment")

        talk = host.session("bob")
        for text in ("hello", "how are you?", "good night"):
            await talk.ask(text, agent="writer")
        entries = await talk.compact(keep=1)
        print([f"{entry.role}: {entry.content}" for entry in entries])


if __name__ == "__main__":
    asyncio.run(main())
