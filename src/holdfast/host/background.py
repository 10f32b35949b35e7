"""Background work, which outlives the run that started it and sends its result to the session as a message."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from holdfast.errors import Draining, HoldfastError, LimitExceeded, StorageError
from holdfast.host.live_session import BackgroundOrigin
from holdfast.host.store_retry import retry
from holdfast.logs import log_failure, one_line
from holdfast.protocol.send_options import SendOptions
from holdfast.runtime import Scope

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from holdfast.host.context import HostContext
    from holdfast.host.live_session import LiveSession
    from holdfast.host.message_sender import MessageSender
    from holdfast.host.thread_pools import ThreadPools
    from holdfast.host.tree import TaskTree
    from holdfast.storage.port import Claim, Cluster

__all__ = ["Background"]

_log = logging.getLogger("holdfast.host")


class Background:
    """Starts background work within each principal's limit. Use it on the host's loop only."""

    __slots__ = ("_active", "_cluster", "_context", "_noted", "_sender", "_threads", "_tree")

    def __init__(
        self,
        context: HostContext,
        threads: ThreadPools,
        tree: TaskTree,
        sender: MessageSender,
        cluster: Cluster | None,
    ) -> None:
        self._context = context
        self._threads = threads
        self._tree = tree
        self._sender = sender
        self._active: Counter[str] = Counter()
        self._cluster = cluster
        self._noted: dict[int, asyncio.Task[int]] = {}
        """Sessions with background work here, and the tasks that record it; see `BackgroundOrigin`."""

    def start(self, actor: LiveSession, work: Callable[[], Awaitable[Any]], *, name: str, claim: Claim) -> None:
        """Start background work of a session, for the run of `claim`.

        Raises:
            Draining: if the host is shutting down.
            LimitExceeded: if the principal already has the maximum number of background tasks.
        """
        context = self._context
        if context.lifecycle.draining:
            raise Draining("this host is shutting down and starts no background work")
        limit = context.settings.principal_background
        if self._active[actor.principal] >= limit:
            context.incidents.promises.kept["P9"] += 1
            raise LimitExceeded(
                f"{actor.principal!r} already has {limit} background tasks, which is the limit",
                hint="wait until some have ended, or stop their sessions",
            )
        scope = Scope(name, parent=context.scope, threads=self._threads.of(actor.principal), owner=actor.principal)

        async def report() -> None:
            text = await self._outcome(actor, work, name, noted)
            if text is None or scope.interrupt.triggered:
                return  # stopped work reports nothing
            try:
                await self._sender.send(actor.principal, actor.key, text, SendOptions())
            except HoldfastError as error:
                problem = f"the result of {name} could not be sent to its session: {one_line(error)}"
                context.report("background", problem, session=actor.key)

        def ended() -> None:
            self._tree.note_abandoned(actor, scope)
            del actor.background[scope]
            self._note_end(actor)
            self._active[actor.principal] -= 1

        def begin() -> None:
            scope.open()
            actor.background[scope] = BackgroundOrigin(claim.started_seq, noted)
            self._active[actor.principal] += 1
            _ = scope.spawn(report(), name=name)
            scope.close_when_done(ended)

        noted = self._note(actor, claim.lease.run_id)
        context.variables.copy().run(begin)

    def _note(self, actor: LiveSession, run_id: str) -> asyncio.Task[int] | None:
        """Record that this host has background work of the session, once under each epoch; return the task of that.

        Its result is the epoch, or 0 if the work may not begin, because the run or its session was stopped.
        """
        cluster = self._cluster
        if cluster is None:
            return None
        noted = self._noted.get(actor.session)
        if noted is None or (noted.done() and (noted.exception() or noted.result() != cluster.epoch)):
            note = retry(self._context, "background", lambda: cluster.note_background(actor.session, run_id))
            noted = self._noted[actor.session] = self._context.start_task(note, "note background")
        return noted

    def _note_end(self, actor: LiveSession) -> None:
        """Record that the session has no background work here any more, if so."""
        noted = None if actor.background else self._noted.pop(actor.session, None)
        if noted is not None:
            self._context.start_task(self._forget(actor.session, noted), "forget background")

    async def _forget(self, session: int, noted: asyncio.Task[int]) -> None:
        """Drop the record of background work, unless there is new work. If that fails, others ask in vain."""
        await asyncio.wait((noted,))
        if session not in self._noted and self._cluster is not None:
            with suppress(StorageError):
                await self._cluster.drop_background(session)

    async def _outcome(
        self, actor: LiveSession, work: Callable[[], Awaitable[Any]], name: str, noted: asyncio.Task[int] | None
    ) -> str | None:
        """Run `work` and return a message with its result or error; return None if `work` returned None.

        Work of a session that was stopped in the meantime is not run.
        """
        try:
            if noted is not None and not await asyncio.shield(noted):
                return None
            outcome = await work()
        except Exception as error:
            log_failure(_log, f"background work {name!r} failed", error, principal=actor.principal, session=actor.key)
            self._context.report("background", f"{name}: {one_line(error)}", session=actor.key)
            return f"[{name}] failed: {one_line(error)}"
        return None if outcome is None else f"[{name}] {outcome}"
