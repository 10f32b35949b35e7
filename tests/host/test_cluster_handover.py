"""A run that a drained host hands over is another attempt at the host that resumes it."""

import asyncio

import pytest

import holdfast
from holdfast.events import RunRestarted
from holdfast.protocol.events import ToolStarted, decode_event, encode_event
from holdfast.settings import Settings
from holdfast.storage.port import Send
from holdfast.storage.postgres import PostgresStore
from holdfast.storage.transactions import questions

attempts: list[int] = []


@holdfast.agent(replayable=True)
async def talker(run: holdfast.Run) -> None:
    attempts.append(run.attempt)
    await run.emit("hello ")
    await run.interrupt.wait()


def test_a_run_that_is_handed_over_is_a_further_attempt(postgres_url: str) -> None:
    def host() -> holdfast.Host:
        settings = Settings(cluster_poll_s=0.1, drain_timeout_s=0.2, grace_s=1.0)
        return holdfast.Host(agents=[talker], store=PostgresStore(postgres_url, lease_s=20.0), settings=settings)

    async def main() -> None:
        attempts.clear()
        async with host() as leaving, host() as staying:
            await leaving.session("alice").send("go")
            while not attempts:
                await asyncio.sleep(0.005)
            await leaving.drain()
            while len(attempts) == 1:
                await asyncio.sleep(0.005)
            assert attempts == [1, 2]
            await staying.session("alice").interrupt("enough")
            found = await staying.store.find_session("local", "alice")
            assert found is not None
            stored = await staying.store.read_events(found[0], after=0, limit=1000)
            events = [decode_event(event) for event in stored]
            assert [event.attempt for event in events if isinstance(event, RunRestarted)] == [2]

    asyncio.run(asyncio.wait_for(main(), 60))


calls: list[int] = []


@holdfast.agent(replayable=True)
async def caller(run: holdfast.Run) -> None:
    async def act() -> None:
        calls.append(run.attempt)
        await run.interrupt.wait()

    await run.call(act)


def test_a_call_that_may_not_be_repeated_is_not_though_the_claim_of_a_handed_over_run_was_repeated(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply of the first claim was lost, and the second one no longer says that the run was handed over."""
    monkeypatch.setattr(questions, "HANDED_OVER", "nothing")

    async def main() -> None:
        calls.clear()
        settings = Settings(cluster_poll_s=0.1, grace_s=1.0)
        store = PostgresStore(postgres_url, lease_s=20.0)
        gone = PostgresStore(postgres_url, lease_s=20.0)
        await gone.open(node_id="gone", at=1.0)
        message = Send(
            principal="local", key="alice", agent="caller", default_agent="caller", message_id="m1", content="go",
            policy="queue", at=1.0, run_id="r1",
        )  # fmt: skip
        claim = (await gone.send(message)).claim
        assert claim is not None
        begun = ToolStarted(run_id="r1", call_id="act", name="act", arguments={}, idempotent=False, at=1.0)
        await gone.append(claim.lease, [encode_event(begun)])
        await gone.close()
        stranger = PostgresStore(postgres_url, lease_s=20.0)
        await stranger.open(node_id="stranger", at=2.0)
        assert await stranger.rescue(at=2.0, served={"other": ""}) == ()
        await stranger.close()
        async with holdfast.Host(agents=[caller], store=store, settings=settings) as host:
            settled = await (await host.session("alice").expect("m1"))
            assert settled.state == "interrupted"
        assert calls == []

    asyncio.run(asyncio.wait_for(main(), 60))
