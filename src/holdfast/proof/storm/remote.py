"""A storm over an existing server: it uses only clients and readers, and deletes its sessions at the end."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from holdfast import ids
from holdfast.client import Client
from holdfast.clock import system_clock
from holdfast.errors import AccessDenied, NotFound
from holdfast.proof.history import Opened
from holdfast.proof.limits import Limits
from holdfast.proof.storm.access import Progress, RemoteAccess
from holdfast.proof.storm.bounds import PRINCIPALS
from holdfast.proof.storm.load import Load
from holdfast.proof.storm.recorder import StormRecorder

__all__ = ["remote_storm"]

LIMITS = Limits(mailbox=0, attempts=1_000_000)
"""Bounds for a server whose own limits on mailboxes and restarts are unknown."""


async def remote_storm(
    recorder: StormRecorder,
    *,
    url: str,
    key: str | None,
    say: str,
    sessions: int,
    seconds: float,
    seed: int,
    progress: Progress,
    rate: float | None = None,
) -> None:
    """Run a storm over the server at `url`, with four principals if the key may act for other users, else with one.

    Parameters:
        recorder: recorder of the history, to which the storm adds the opening record.
        say: prefix of each message; it should make the server's agent work for a short time.
        sessions, seconds, seed, rate: number of sessions, duration in seconds, random seed, and actions per second over
            all sessions.
        progress: called with progress messages.

    Raises:
        HoldfastError: if the server does not answer, or refuses the key.
    """
    name = ids.node_id()[-8:]
    async with AsyncExitStack() as stack:
        acting = await _may_act(url, key)
        principals = tuple(f"storm-{name}-{who}" for who in PRINCIPALS) if acting else ("own",)
        recorder.note(
            Opened,
            seed=seed,
            mode="url",
            sees=("clients", "principals") if acting else ("clients",),
            limits=LIMITS,
        )
        access = await stack.enter_async_context(RemoteAccess(url, dict.fromkeys(principals, key), acting=acting))
        load = Load(
            access,
            recorder,
            LIMITS,
            sessions=sessions,
            rate=rate or min(100.0, 3.0 * sessions),
            seed=seed,
            prefix=f"storm-{name}-",
            content=lambda plan: f"{say} [{plan.name}]",
            agents=(None,),
        )
        try:
            access.up.set()
            load.start()
            end = system_clock.monotonic() + seconds
            while (left := end - system_clock.monotonic()) > 0:
                progress(f"{len(recorder.records):,} records, {left:.0f} s left")
                await asyncio.sleep(min(1.0, left))
                if load.broken is not None:
                    raise load.broken
            await load.stop()
            await load.complete()
            progress("coming to rest")
            await load.rest()
            progress("reading everything back")
            await load.read_back()
        finally:
            await load.abandon()
            progress("deleting the storm's sessions")
            for session in (*load.sessions, *load.others):
                try:
                    await access.session(session.principal, session.key).delete()
                except NotFound:
                    continue


async def _may_act(url: str, key: str | None) -> bool:
    """Return whether the key may act for other users. Raises `HoldfastError` if the key has no access at all."""
    async with Client(url, key, user=PRINCIPALS[0], retry_s=0.0) as client:
        try:
            await client.sessions(limit=1)
        except AccessDenied:
            acting = False
        else:
            return True
    async with Client(url, key, retry_s=0.0) as client:
        await client.sessions(limit=1)
    return acting
