"""A claim whose reply arrives late starts no run: another host may have taken the run over, and have ended it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from holdfast import Host, failpoints
from holdfast.clock import system_clock
from tests.host.test_cluster import done, end_lease, hosts, no_work_yet, run

__all__ = ["no_work_yet"]

BOUND_S = 40.0


@pytest.mark.parametrize("epoch", ["ended", "begun anew"])
def test_a_claim_whose_reply_is_late_starts_nothing(postgres_url: str, epoch: str) -> None:
    reached, released = threading.Event(), threading.Event()
    threads: set[threading.Thread] = set()

    def at_reply(name: str) -> None:
        if name == "postgres.after_commit" and threading.current_thread() in threads and not reached.is_set():
            reached.set()
            assert released.wait(BOUND_S)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with hosts(postgres_url, 1) as (late,):
            threads.update(threading.enumerate())
            await beside(loop, late)

    async def beside(loop: asyncio.AbstractEventLoop, late: Host) -> None:
        async with hosts(postgres_url, 1) as (other,):
            with failpoints.attend(at_reply):
                sending = asyncio.ensure_future(late.session("alice").send("hello"))
                await loop.run_in_executor(None, reached.wait, BOUND_S)
                end_lease(postgres_url, late)
                await other.parts.recovery.take_over()
                while (await other.session("alice").info()).state != "idle":
                    await asyncio.sleep(0.005)
                begun = done["hello"]
                cluster = late.store.cluster
                assert cluster is not None
                if epoch == "begun anew":  # before the reply is looked at
                    cluster._lease().follow(cluster.epoch + 1, system_clock.monotonic())  # type: ignore[attr-defined]
                else:
                    while late.store.health().lease_ends_at > system_clock.monotonic():
                        await asyncio.sleep(0.005)
                released.set()
                receipt = await sending
            assert receipt.disposition == "started"
            await late.session("alice").wait(receipt.message_id, timeout_s=20)
            assert (done["hello"], late.live) == (begun, {})
            assert late.statistics().counts["claims_late"] == 1
            assert (await late.session("alice").ask("again", timeout_s=20)) == "did again"  # its slot is free

    run(main)
