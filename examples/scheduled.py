"""Send messages to a session on a schedule. It survives a restart, and each tick fires once."""

import asyncio

import holdfast
from holdfast.events import RunFinished


async def clerk(run: holdfast.Run) -> str:
    """Do the task in the message."""
    return f"done: {run.text}"


async def next_answer(session: holdfast.Session) -> str:
    """Return the text of the next run that a schedule starts."""
    receipt = await session.send("hello")
    async for event in session.events(after=receipt.cursor):
        if isinstance(event, RunFinished) and event.text != "done: hello":
            return event.text
    return ""


async def main() -> None:
    async with holdfast.Host(clerk, store="sqlite:///scheduled.db") as host:
        session = host.session("reports")
        # Adding the same id again changes nothing, so a program can add its schedules at every start.
        for _ in range(2):
            await session.schedule("look for news", every_s=1.0, initial_delay_s=0.3, schedule_id="news")
        await session.schedule("weekly report", cron="30 9 * * MON", timezone="Europe/Berlin", schedule_id="weekly")
        print("first tick:", await next_answer(session))
        by_hand = await host.find_schedule("weekly").run_now()
        print("by hand:", (await session.wait(by_hand.message_id)).text)

    await asyncio.sleep(2.5)  # the host is down, and ticks are missed

    async with holdfast.Host(clerk, store="sqlite:///scheduled.db") as host:
        print("after the restart:", await next_answer(host.session("reports")))
        print("paused:", (await host.find_schedule("news").pause()).state)
        for view in await host.schedules():
            print(f"{view.schedule_id}: {view.state}, fired {view.fired > 0}, missed {view.missed > 0}")
        try:
            await host.schedule("reports", "never", cron="0 0 30 2 *")
        except holdfast.HoldfastError as error:
            print(f"refused: {error.code}: {error.message}")


if __name__ == "__main__":
    asyncio.run(main())
