"""Sessions that wait for a run are offered to a node in an order that is fair to their principals."""

from typing import Any

from holdfast.storage.port import RunCommit
from tests.storage.postgres.test_races import message, nodes, run

AGENTS: Any = {"demo": ""}


def test_principals_take_turns_among_the_sessions_that_wait(postgres_url):
    async def main():
        async with nodes(postgres_url, 2) as (full, free):
            waiting = []
            for n, principal in enumerate(["many"] * 6 + ["few"] * 2):
                sent = await full.send(message(n, key=f"k{n}", principal=principal, room=False))
                assert sent.disposition == "queued"
                waiting.append(sent.session)

            async def ready(limit):
                found = await free.cluster.ready(agents=AGENTS, at=99.0, limit=limit)
                return [each.session for each in found]

            assert await ready(2) == [waiting[0], waiting[6]], "the oldest one of each"
            assert await ready(3) == [waiting[0], waiting[6], waiting[1]]
            assert await ready(99) == [waiting[n] for n in (0, 6, 1, 7, 2, 3, 4, 5)]
            claim = await free.claim(waiting[6], run_id="r", at=99.0)
            assert await ready(2) == [waiting[0], waiting[7]]
            await free.commit_run(RunCommit(lease=claim.lease, status="completed", at=99.0))

    run(main)


def test_principals_take_turns_among_parked_runs_which_have_a_limit_of_their_own(postgres_url):
    async def main():
        async with nodes(postgres_url, 2) as (leaving, staying):
            parked = []
            for n, principal in enumerate(["many", "many", "many", "few"]):
                claim = (await leaving.send(message(n, key=f"k{n}", principal=principal))).claim
                await leaving.park(claim.lease, at=10.0 + n, restarts=True)
                parked.append(claim.lease.session)
            waits = (await leaving.send(message(9, key="k9", principal="many", room=False))).session
            found = await staying.cluster.ready(agents=AGENTS, at=99.0, limit=2)
            sessions = [each.session for each in found]
            assert sorted(sessions) == sorted([parked[0], parked[3], waits])

    run(main)
