"""Hosts go on with an asynchronous standby that had not received the last transactions of the primary.

What `docs/how-to/operations.md` says of an asynchronous failover holds: for messages, for runs and for the hosts.
"""

import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pytest

import holdfast
from holdfast.errors import NotFound, StaleFence, StorageError
from holdfast.events import RunRestarted
from holdfast.proof.storm.postgres_server import PostgresServer
from holdfast.protocol.events import decode_event
from holdfast.settings import Settings
from holdfast.storage.postgres import PostgresStore
from tests.storage.postgres.test_races import end_lease

T = TypeVar("T")
LEASE_S = 20.0
"""Longer than a failover takes: no host gives up its runs by itself."""
LIMIT_S = 90.0
done: Counter[str] = Counter()


@holdfast.agent(replayable=True)
async def worker(run: holdfast.Run) -> str:
    done[run.text] += 1
    while run.text == "talk":
        await run.emit("x")
        await asyncio.sleep(0.01)
    if run.text == "wait":
        await run.interrupt.wait()
    return f"did {run.text}"


class Pair:
    """A primary and its standby, which is asynchronous, and two hosts that use whichever of them accepts writes."""

    def __init__(self, primary: PostgresServer, standby: PostgresServer) -> None:
        self.primary = primary
        self.standby = standby

    @property
    def url(self) -> str:
        folders = f"{self.primary.folder},{self.standby.folder}"
        return f"postgresql://holdfast@/postgres?host={folders}&target_session_attrs=read-write"

    def detach(self) -> None:
        """Let the standby have everything up to now, and receive nothing more."""
        with (
            psycopg.connect(self.primary.url(), autocommit=True) as primary,
            psycopg.connect(self.standby.url(), autocommit=True) as standby,
        ):
            row = primary.execute("SELECT pg_current_wal_lsn()::text").fetchone()
            until(standby, "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", row)
            standby.execute("ALTER SYSTEM SET primary_conninfo = ''")
            standby.execute("SELECT pg_reload_conf()")
            until(standby, "SELECT count(*) = 0 FROM pg_stat_wal_receiver")

    def fail_over(self) -> None:
        """Lose the primary with what only it has, and promote the standby."""
        self.primary.stop(at_once=True)
        self.standby.promote()


def until(connection: psycopg.Connection[Any], query: str, parameters: Any = None) -> None:
    while connection.execute(query, parameters).fetchone() != (True,):
        connection.execute("SELECT pg_sleep(0.01)")


@pytest.fixture
def pair(own_postgres: PostgresServer) -> Iterator[Pair]:
    done.clear()
    with tempfile.TemporaryDirectory(prefix="pg-") as name:
        standby = PostgresServer(Path(name), standby_of=own_postgres)
        standby.start()
        try:
            yield Pair(own_postgres, standby)
        finally:
            standby.stop()


@asynccontextmanager
async def two_hosts(pair: Pair, agent: holdfast.Agent = worker) -> AsyncIterator[tuple[holdfast.Host, holdfast.Host]]:
    def host() -> holdfast.Host:
        settings = Settings(cluster_poll_s=0.1, grace_s=1.0, drain_timeout_s=0.2)
        return holdfast.Host(agents=[agent], store=PostgresStore(pair.url, lease_s=LEASE_S), settings=settings)

    async with host() as one, host() as two:
        yield one, two


async def in_thread(call: Callable[[], object]) -> None:
    await asyncio.get_running_loop().run_in_executor(None, call)


async def answered(call: Callable[..., Awaitable[T]], *arguments: Any, **more: Any) -> T:
    """Ask until the database answers, as a client does."""
    while True:
        try:
            return await call(*arguments, **more)
        except StaleFence:
            raise
        except StorageError:
            await asyncio.sleep(0.02)


async def started(host: holdfast.Host, key: str, text: str) -> str:
    receipt = await host.session(key).send(text)
    while not done[text]:
        await asyncio.sleep(0.005)
    return receipt.run_id or ""


def epoch(host: holdfast.Host) -> int:
    assert host.store.cluster is not None
    return host.store.cluster.epoch


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_a_message_that_a_failover_has_lost_is_not_found_and_runs_once_when_it_is_sent_again(pair: Pair) -> None:
    async def main() -> None:
        async with two_hosts(pair) as (one, two):
            kept = await one.session("kept").send("kept")
            assert (await two.session("kept").wait(kept.message_id)).state == "completed"
            await in_thread(pair.detach)
            lost = {}
            for key in ("kept", "new"):  # a session that the standby has, and one that it does not have
                lost[key] = await one.session(key).send(f"lost {key}", idempotency_key="k")
                assert (await one.session(key).wait(lost[key].message_id)).state == "completed"
            await in_thread(pair.fail_over)
            for host in (one, two):
                for key, receipt in lost.items():
                    with pytest.raises(NotFound):
                        await answered(host.session(key).message, receipt.message_id)
                assert (await answered(host.session("kept").message, kept.message_id)).text == "did kept"
            for key, receipt in lost.items():
                sends = [
                    answered(host.session(key).send, f"lost {key}", idempotency_key="k") for host in (one, two, one)
                ]
                again = await asyncio.gather(*sends)
                (message_id,) = {each.message_id for each in again}
                assert message_id != receipt.message_id
                assert sorted(each.disposition for each in again) == ["duplicate", "duplicate", "started"]
                assert (await two.session(key).wait(message_id)).text == f"did lost {key}"
                assert done[f"lost {key}"] == 2, "once in each history"
                said = [entry.content for entry in await one.session(key).transcript()]
                assert said.count(f"lost {key}") == 1

    run(main)


def test_after_a_failover_that_lost_their_transactions_hosts_begin_new_epochs_and_lose_their_runs(pair: Pair) -> None:
    async def main() -> None:
        async with two_hosts(pair) as (one, two):
            await started(one, "old", "wait")
            await in_thread(pair.detach)
            await one.session("more").ask("more")
            await started(two, "new", "talk")  # the standby never hears of it
            before = [epoch(one), epoch(two)]
            held = [*one.live.values(), *two.live.values()]
            assert len(held) == 2
            await in_thread(pair.fail_over)
            for n, host in enumerate((one, two)):
                await answered(host.session(f"after {n}").ask, "after")
            assert not {epoch(one), epoch(two)} & set(before)
            watch: Any = one.parts.cluster_watch
            await watch._reconcile()  # else it does so once in each lease
            while not all(each.scope.closed for each in held):
                await asyncio.sleep(0.005)
            for host in (one, two):
                assert host.statistics().counts.get("runs_lost", 0) == 1
                assert not any(promise.broken for promise in host.statistics().promises.values())
            with pytest.raises(NotFound):
                await two.session("new").info()
            for ended in before:
                end_lease(pair.standby.url(), ended)
            await two.parts.recovery.take_over()
            while done["wait"] < 2:
                await asyncio.sleep(0.005)
            assert (await one.session("old").interrupt("enough")).outcome == "gone"
            found = await two.store.find_session("local", "old")
            assert found is not None
            events = [decode_event(each) for each in await two.store.read_events(found[0], after=0, limit=100)]
            assert [each.attempt for each in events if isinstance(each, RunRestarted)] == [2]

    run(main)


def test_a_run_that_ended_in_the_lost_history_does_not_begin_again_without_its_history(pair: Pair) -> None:
    """The new primary shows it as active. It is not what a host holds whose claim had no reply, and has never begun."""
    released: list[asyncio.Event] = []

    @holdfast.agent
    async def fragile(run: holdfast.Run) -> str:
        done["fragile"] += 1
        await released[0].wait()
        return "ended"

    async def main() -> None:
        released.append(asyncio.Event())
        async with two_hosts(pair, fragile) as (one, two):
            receipt = await one.session("s").send("go")
            while not done["fragile"]:
                await asyncio.sleep(0.005)
            before = epoch(one)
            await in_thread(pair.detach)
            released[0].set()
            assert (await one.session("s").wait(receipt.message_id)).text == "ended"
            await in_thread(pair.fail_over)
            await answered(one.session("after").ask, "after")
            done.clear()
            watch: Any = one.parts.cluster_watch
            for _ in range(2):  # two looks must agree
                await watch._reconcile()
            assert not done, "it would run twice, though it may not"
            end_lease(pair.standby.url(), before)
            await two.parts.recovery.take_over()
            (view,) = await two.session("s").runs()
            assert (view.state, view.cause and view.cause.kind) == ("interrupted", "crash")

    run(main)
