"""A database that went back to an older state, as a promoted standby that lagged behind: its nodes begin new epochs."""

import psycopg
import pytest

from holdfast import failpoints
from holdfast.errors import StaleFence
from tests.storage.postgres.test_races import DELTA, message, nodes, run


def go_back(url, epoch, *, transactions=2, cut=True):
    """Let the node have written fewer transactions; end its connections, unless a pooler keeps them."""
    with psycopg.connect(url, autocommit=True) as connection:
        if cut:
            connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database() "
                "AND application_name = 'holdfast'"
            )
        connection.execute("UPDATE writer SET batch = batch - %s WHERE epoch = %s", [transactions, epoch])


@pytest.mark.parametrize("when", ["between transactions", "before a commit", "behind a pooler"])
def test_a_node_begins_a_new_epoch_when_its_last_transaction_is_not_the_stored_one(postgres_url, when):
    async def main():
        async with nodes(postgres_url, 1) as (store,):
            for n in range(3):
                await store.send(message(n, key=f"k{n}"))
            before = store.cluster.epoch
            back: list[None] = []

            def at(name):
                if name == "postgres.before_commit" and when == "before a commit" and not back:
                    back.append(None)
                    go_back(postgres_url, before)

            if when != "before a commit":
                go_back(postgres_url, before, cut=when == "between transactions")
            with failpoints.attend(at):
                assert (await store.send(message(9, key="k9"))).disposition == "started"
            assert store.cluster.epoch != before
            assert [lease.run_id for lease in await store.cluster.held()] == ["r9"], "it holds what it began since"

    run(main)


def test_a_run_that_the_older_state_does_not_have_can_write_nothing(postgres_url):
    async def main():
        async with nodes(postgres_url, 1) as (store,):
            claim = (await store.send(message(0))).claim
            await store.append(claim.lease, DELTA)
            with psycopg.connect(postgres_url, autocommit=True) as connection:
                connection.execute("DELETE FROM session")
            go_back(postgres_url, store.cluster.epoch)
            with pytest.raises(StaleFence):
                await store.append(claim.lease, DELTA, nth=2)

    run(main)
