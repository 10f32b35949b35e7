"""Ask several agents at the same time and wait for all, the first, or some of them; a branch can have a deadline."""

import asyncio

import holdfast
from holdfast.events import ChildFinished


async def library(run: holdfast.Run) -> str:
    await asyncio.sleep(0.05)
    return f"the library has two books on {run.text}"


def archive(run: holdfast.Run) -> str:
    """Search the archive. A sync function gets a thread; the sleep ends at once when the branch is interrupted."""
    run.interrupt.sleep_blocking(0.1)
    return f"the archive has a map of {run.text}"


async def stuck(run: holdfast.Run) -> str:
    await asyncio.sleep(3600)
    return "never"


async def broken(run: holdfast.Run) -> str:
    raise ConnectionError("no such index")


both = holdfast.parallel(library, archive, name="both")
quickest = holdfast.parallel(library, archive, stuck, need="first", name="quickest")
patient = holdfast.parallel(library, broken, holdfast.branch(stuck, deadline_s=0.2), need="some", name="patient")
strict = holdfast.parallel(library, broken, stuck, name="strict")


async def main() -> None:
    async with holdfast.Host(agents=[both, quickest, patient, strict], store="memory://") as host:
        for shape in (both, quickest, patient):
            print(f"{shape.name}: {await host.session(shape.name).ask('Lima', agent=shape.name)!r}")
        session = host.session("strict", agent="strict")
        try:
            await session.ask("Lima")
        except holdfast.RunFailed as error:
            print(f"strict: {error.message}")
        async for event in session.events(follow=(await session.runs())[0].messages[0]):
            if isinstance(event, ChildFinished):
                print(f"  {event.status}: {event.error or event.text}")


if __name__ == "__main__":
    asyncio.run(main())
