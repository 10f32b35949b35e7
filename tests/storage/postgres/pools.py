"""A session that used files on a host that is gone."""

from typing import Any

from holdfast.storage.port import RunCommit
from holdfast.storage.postgres import PostgresStore
from tests.storage.postgres.test_races import message


async def leave_session(url: str, pool: str, *, key: str, queued: bool) -> None:
    """Leave a session of the pool in the store: its run has ended, and with `queued` the message ``m2`` waits."""
    gone: Any = PostgresStore(url, workspace_pool=pool)
    await gone.open(node_id="gone", at=1.0)
    claim = (await gone.send(message(1, key=key, principal="local"))).claim
    await gone.use_workspace(claim.lease)
    if queued:
        await gone.send(message(2, key=key, principal="local", room=False))
    await gone.commit_run(RunCommit(lease=claim.lease, status="completed", at=3.0))
    await gone.close()
