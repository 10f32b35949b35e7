"""A host in a process of its own, which a test kills or stops: ``cluster_node.py URL LEASE_S COUNT``.

It sends COUNT messages, each to a session of its own, tells that their runs have begun, and then answers each line of
its input with a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import holdfast
from holdfast.settings import Settings
from holdfast.storage.postgres import PostgresStore


async def tick(run: holdfast.Run) -> None:
    """Tell by which process it is run, until it is interrupted."""
    while True:
        await run.emit(f"{os.getpid()} ")
        await asyncio.sleep(0.01)


async def programs(run: holdfast.Run) -> None:
    """Start programs that ignore SIGTERM, one of them past Holdfast's own interface, and tell their pids."""
    script = "trap '' TERM; setsid sleep 1000 & echo $! $$; sleep 1000"
    own = await run.process(["sh", "-c", script], stdout=subprocess.PIPE)
    foreign = await asyncio.create_subprocess_exec("sh", "-c", script, stdout=subprocess.PIPE)
    assert own.stdout is not None and foreign.stdout is not None
    told = [await own.stdout.readline(), await foreign.stdout.readline()]
    await run.emit(b" ".join(told).decode())
    await asyncio.Event().wait()


AGENTS = (
    holdfast.Agent(name="ticker", work=tick, replayable=True),
    holdfast.Agent(name="fragile", work=tick),
    holdfast.Agent(name="programs", work=programs),
)


async def main(url: str, lease_s: float, count: int) -> None:
    loop = asyncio.get_running_loop()
    host = holdfast.Host(
        agents=AGENTS, store=PostgresStore(url, lease_s=lease_s), settings=Settings(cluster_poll_s=0.2)
    )
    async with host:
        for n in range(count):
            await host.session(f"s{n}").send("tick", agent="fragile" if n == 1 else "ticker")
        tell(begun=len(host.live))
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            if line.strip() == "programs":
                receipt = await host.session("programs").send("start", agent="programs")
                tell(run_id=receipt.run_id)
            elif line.strip() == "send":
                receipt = await host.session("later").send("tick")
                tell(disposition=receipt.disposition)
            else:
                info = await host.store.info()
                tell(
                    live=len(host.live),
                    stale=info.stale_writes_refused,
                    lost=host.statistics().counts.get("runs_lost", 0),
                    broken=sum(promise.broken for promise in host.statistics().promises.values()),
                )
        os._exit(0)


def tell(**told: object) -> None:
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
