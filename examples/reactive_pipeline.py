"""Connect a reactive pipeline to agents: readings from threads become messages, and the answers become a stream.

Needs the extra ``reactive``: pip install 'holdfast-agents[reactive]'
"""

import asyncio

import reactivex
from reactivex import operators as ops
from reactivex.scheduler import ThreadPoolScheduler

import holdfast
from holdfast.integrations.reactive import ReactiveBridge


async def judge(run: holdfast.Run) -> str:
    """Judge a reading."""
    await asyncio.sleep(0.001)  # stands in for a model
    if run.text == "999":
        raise ValueError("the sensor is broken")
    return f"{run.text} is {'hot' if int(run.text) > 30 else 'fine'}"


async def round_of_readings(run: holdfast.Run) -> str:
    """Ask the judge about each reading of a stream; the judges are children of this run, five at a time."""
    readings = reactivex.from_iterable(run.text.split())
    async with ReactiveBridge(run, concurrency=5, ordered=True) as bridge:
        answers = await bridge.collect(readings.pipe(bridge.each(holdfast.agent(judge))))
    return "; ".join(answers)


async def watch_for_ever(_: int) -> None:
    await asyncio.sleep(3600)


async def main() -> None:
    pool = ThreadPoolScheduler(2)
    async with holdfast.Host(agents=[judge, round_of_readings], store="memory://") as host:
        # Inside a run: each item is a child run.
        print(await host.session("house").ask("21 35 19", agent="round_of_readings"))

        # Outside a run: each item is a message to the session of its room, from any thread.
        readings = [("kitchen", "22"), ("cellar", "12"), ("kitchen", "41"), ("cellar", "999"), ("attic", "33")]
        async with ReactiveBridge(concurrency=10, overflow="block") as bridge:
            asked = bridge.ask(
                lambda reading: host.session(reading[0]),
                text=lambda reading: str(reading[1]),
                agent="judge",
                ordered=True,
                outcomes=True,  # a failed item does not end the stream
            )
            stream = reactivex.from_iterable(readings).pipe(ops.subscribe_on(pool), asked)
            for outcome in await bridge.collect(stream):
                room, _ = outcome.item
                print(f"{room}: {outcome.value or outcome.error}")
            counts = bridge.statistics()
            print(f"{counts.received} readings: {counts.done} done, {counts.failed} failed")

            # An endless stream: disposing it interrupts the work in progress.
            subscription = reactivex.interval(0.001).pipe(bridge.each(watch_for_ever)).subscribe()
            await asyncio.sleep(0.02)
            subscription.dispose()
        print(f"left: {bridge.statistics().in_flight} in flight, {bridge.streams} streams")
    pool.executor.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
