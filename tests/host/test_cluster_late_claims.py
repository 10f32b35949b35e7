"""A claim whose reply arrives late starts no run: another host may have taken the run over, and have ended it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from holdfast import Host, failpoints
from holdfast.clock import system_clock
from holdfast.events import Event, Gap, RunFinished
from holdfast.storage.postgres.cluster import PostgresCluster
from tests.host.test_cluster import done, end_lease, hosts, no_work_yet, run

__all__ = ["no_work_yet"]

BOUND_S = 40.0
LEASE_S = 20.0


async def events_of(host: Host) -> AsyncIterator[Event | Gap]:
    """The events of the session up to the end of its first run."""
    async for event in host.session("alice").events():
        yield event
        if isinstance(event, RunFinished):
            return


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
                assert any([isinstance(event, RunFinished) async for event in events_of(other)])
                begun = done["hello"]
                assert isinstance(late.store.cluster, PostgresCluster)
                lease, now = late.store.cluster._lease(), system_clock.monotonic()
                assert lease is not None
                if epoch == "begun anew":  # before the reply is looked at
                    lease.follow(lease.epoch + 1, now)
                else:
                    lease.follow(lease.epoch, now - LEASE_S)
                released.set()
                receipt = await sending
            assert receipt.disposition == "started"
            await late.session("alice").wait(receipt.message_id, timeout_s=20)
            assert (done["hello"], late.live) == (begun, {})
            assert late.statistics().counts["claims_late"] == 1
            assert (await late.session("alice").ask("again", timeout_s=20)) == "did again"  # its slot is free

    run(main)
