"""An agent that survives kill -9: calls that have a result in the journal are not repeated.

This program starts itself as a child process, which is killed in the middle of a run, and then resumes that run.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import holdfast

LEDGER = Path("ledger.txt")
CUT = Path("cut")


def charge(item: str) -> str:
    """Charge the customer, which must not happen twice."""
    with LEDGER.open("a") as ledger:
        ledger.write(f"{item}\n")
    return f"charged {item}"


def power_cut() -> None:
    """Kill the process, but only the first time."""
    if not CUT.exists():
        CUT.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@holdfast.agent(replayable=True)
async def shop(run: holdfast.Run) -> str:
    charged = await run.call(charge, run.text)
    await run.call(power_cut, idempotent=True)
    return f"{charged}, attempt {run.attempt}, {run.replayed} call from the journal"


async def first_life() -> None:
    async with holdfast.Host(shop, store="sqlite:///shop.db") as host:
        await host.session("alice").send("a teapot", idempotency_key="order-1")
        await asyncio.sleep(60)


async def second_life() -> None:
    async with holdfast.Host(shop, store="sqlite:///shop.db") as host:
        print(f"recovered: {len(host.recovered.restarted)} run resumed")
        session = host.session("alice")
        # With the same idempotency key, this is the same message: it does not run again.
        receipt = await session.send("a teapot", idempotency_key="order-1")
        settled = await session.wait(receipt.message_id, timeout_s=30)
        print(f"{receipt.disposition}: {settled.state}: {settled.text}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.run(
            [sys.executable, os.path.abspath(__file__), "first"], cwd=folder, check=False, timeout=60
        )
        print(f"the first life ended with {child.returncode} (SIGKILL)")
        os.chdir(folder)
        asyncio.run(second_life())
        print(f"in the ledger: {LEDGER.read_text().splitlines()}")
        os.chdir("/")


if __name__ == "__main__":
    if sys.argv[1:] == ["first"]:
        asyncio.run(first_life())
    else:
        main()
