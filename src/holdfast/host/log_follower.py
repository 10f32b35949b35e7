"""Follow the logs of sessions that other hosts write: for readers and waits on this host, and for the runs it holds.

Invariants
- The log is the only source: an interrupt, an answer, a steering message or a deletion that another host recorded is
  an event in it. Signals and polls only decide when to read. Events that another host sends are in the log already.
- A session is followed while it has a run, a reader, background work or a wait on this host. Events are handled in
  order, each at least once: handling an event again, or an event of this host, has no effect.
- A gap in the numbers of events that this host publishes shows that another host has written, without any signal.
- If the store has fewer events than this host knows, it has lost some: it was restored, or a standby was promoted that
  lagged behind. Readers have seen events that do not exist any more, so their streams end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from holdfast.host.budgets import PAGE_BYTES
from holdfast.host.coalesced_tasks import CoalescedTasks
from holdfast.host.live_session import SharedSession
from holdfast.host.session_directory import PAGE
from holdfast.protocol.events import (
    MessageAccepted,
    MessageSettled,
    RunRestarted,
    RunResumed,
    RunStopping,
    SessionDeletedEvent,
    decode_event,
)
from holdfast.protocol.states import TERMINAL_MESSAGE_STATES
from holdfast.protocol.stopping import Cause

if TYPE_CHECKING:
    from holdfast.host.context import HostContext
    from holdfast.host.run_execution import RunExecution
    from holdfast.host.run_launcher import RunLauncher
    from holdfast.host.session_directory import SessionDirectory
    from holdfast.host.settlements import Settlements
    from holdfast.protocol.events import Stored
    from holdfast.protocol.messages import Settlement
    from holdfast.storage.port import Cluster, SessionEvents

__all__ = ["LogFollower"]

_HANDLED: Final = frozenset(
    ("message.accepted", "message.settled", "run.restarted", "run.resumed", "run.stopping", "session.deleted")
)


class LogFollower:
    """Follows the logs of the sessions in memory. Use it on the host's loop only.

    Parameters:
        cluster: the hosts that share the store.
    """

    def __init__(
        self,
        context: HostContext,
        directory: SessionDirectory,
        settlements: Settlements,
        launcher: RunLauncher,
        cluster: Cluster,
    ) -> None:
        self._context = context
        self._directory = directory
        self._settlements = settlements
        self._launcher = launcher
        self._cluster = cluster
        self._reads = CoalescedTasks(context, self._catch_up, name="follow")
        self._settles = CoalescedTasks(context, self._settle, name="settlement")
        self._checks = CoalescedTasks(context, self._check_run, name="check a run")
        self._waits: dict[int, set[str]] = {}
        """Messages whose settlement is awaited on this host, by session."""
        self._changes: dict[int, list[asyncio.Future[None]]] = {}

    # ── when to read ─────────────────────────────────────────────────────────────────────────────────────────────

    def on_behind(self, live: SharedSession) -> None:
        """Read the events that this host does not know of a session yet."""
        self._reads.request(live.session)

    def on_restarted(self, run: RunExecution) -> None:
        """Look for an interrupt of a run that was recorded while this host took the run over."""
        self._checks.request(run.actor.session)

    def wake(self, sessions: Mapping[int, int]) -> None:
        """Look at sessions that other hosts have changed, if they matter on this host.

        Parameters:
            sessions: numbers of the sessions, each with the seq of its newest event; 0 if that is not known.
        """
        for session, seq in sessions.items():
            live = self._directory.live.get(session)
            if isinstance(live, SharedSession) and not live.idle:
                if live.readers:
                    self._cluster.signals.follow(session)
                if not 0 < seq <= live.seen:
                    self._reads.request(session)
            self._wake_waits(session)

    def receive(self, received: Sequence[SessionEvents]) -> None:
        """Handle and publish events that other hosts have sent, if this host knows all events before them."""
        for session, events in received:
            live = self._directory.live.get(session)
            if not isinstance(live, SharedSession) or live.idle:
                continue
            if live.readers:
                self._cluster.signals.follow(session)
            if events[0].seq <= live.seen + 1:
                self._continue(live, events)
                self._wake_waits(session)
            else:
                self._reads.request(session)

    async def poll(self) -> None:
        """Look at all sessions that matter on this host. Raises `StorageError`."""
        live_sessions = [live for live in self._directory.live.values() if isinstance(live, SharedSession)]
        followed = [(live, max(live.seen, live.shown_seq)) for live in live_sessions if not live.idle]
        if followed:
            last = await self._cluster.last_seqs([live.session for live, _ in followed])
            for live, seen in followed:
                stored = last.get(live.session, 0)
                if stored > live.seen:
                    self._reads.request(live.session)
                elif stored < seen and not live.deleted:
                    self._on_lost_events(live, stored)
        for session in {*self._waits, *self._changes}:
            self._wake_waits(session)

    def expect(self, session: int, message_id: str, future: asyncio.Future[Settlement], *, look: bool = True) -> None:
        """Look for the settlement of a message until `future`, which `Settlements.expect` returned, is done.

        Parameters:
            look: whether to look at once; else, with the next signal or poll.
        """
        if future.done():
            return
        self._waits.setdefault(session, set()).add(message_id)
        future.add_done_callback(lambda _: self._forget_wait(session, message_id))
        if look:
            self._settles.request(session)

    def change(self, session: int) -> asyncio.Future[None]:
        """Return a future that resolves when another host may have changed the session."""
        future: asyncio.Future[None] = self._context.loop.create_future()
        self._changes.setdefault(session, []).append(future)
        return future

    def _wake_waits(self, session: int) -> None:
        if session in self._waits:
            self._settles.request(session)
        for future in self._changes.pop(session, ()):
            if not future.done():
                future.set_result(None)

    def _forget_wait(self, session: int, message_id: str) -> None:
        waiting = self._waits.get(session, set())
        if message_id in waiting and message_id not in self._settlements:
            waiting.remove(message_id)
            if not waiting:
                del self._waits[session]

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _catch_up(self, session: int) -> None:
        """Handle and publish the events after those that this host knows."""
        live = self._directory.live.get(session)
        if not isinstance(live, SharedSession):
            return
        while True:
            log = live.log
            page = await self._context.store.read_events(session, after=live.seen, limit=PAGE, limit_bytes=PAGE_BYTES)
            if live.log is not log:
                continue  # the page may be of the log that the store has lost
            if not page or not self._continue(live, page):
                break  # events of other hosts are received in the meantime
        self._wake_waits(session)

    def _continue(self, live: SharedSession, events: Sequence[Stored]) -> bool:
        """Handle and publish those of these consecutive events that this host does not know yet, and return if any."""
        new = [event for event in events if event.seq > live.seen]
        self._handle(live, new)
        live.seen = max(live.seen, events[-1].seq)
        live.publish(new)
        return bool(new)

    def _on_lost_events(self, live: SharedSession, stored: int) -> None:
        newest = max(live.seen, live.shown_seq)
        text = (
            f"the store has lost events {stored + 1} to {newest} of a session; streams that showed them have "
            f"ended (it was restored from a backup, or a standby was promoted that lagged behind)"
        )
        self._context.report("store", text, session=live.key)
        if stored:
            live.truncate(stored)
            self._reads.request(live.session)
        else:
            self._directory.discard(live)

    async def _settle(self, session: int) -> None:
        """Wake the tasks that wait for messages of the session which are settled."""
        for message_id in list(self._waits.get(session, ())):
            if message_id not in self._settlements:
                self._forget_wait(session, message_id)
                continue
            settlement = await self._context.store.settlement(session, message_id)
            if settlement is not None and settlement.state in TERMINAL_MESSAGE_STATES:
                self._settlements.settle([settlement])

    async def _check_run(self, session: int) -> None:
        live = self._directory.live.get(session)
        run = None if live is None or live.active is None else self._launcher.live.get(live.active.run_id)
        if run is None:
            return
        view = await self._context.store.run(session, run.run_id)
        if view is not None and view.state == "stopping" and view.cause is not None:
            run.request_stop(view.cause)

    # ── handling ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _handle(self, live: SharedSession, events: Sequence[Stored]) -> None:
        for stored in events:
            if stored.kind not in _HANDLED:
                continue
            event = decode_event(stored)
            match event:
                case RunStopping(run_id=run_id, cause=cause, grace_s=grace_s):
                    run = self._launcher.live.get(run_id)
                    if run is not None:
                        run.request_stop(cause, grace_s=grace_s)
                case SessionDeletedEvent(reason=reason, at=at):
                    cause = Cause(kind="stop", reason=reason, origin=live.key, at=at)
                    live.stop_background(self._context.start_task, cause, grace_s=None)
                case RunResumed(run_id=run_id, answer=answer):
                    run = self._launcher.live.get(run_id)
                    if run is not None:
                        run.take_answer(answer)
                case RunRestarted(run_id=run_id, attempt=attempt):
                    run = self._launcher.live.get(run_id)
                    if run is not None and run.attempt < attempt:
                        run.supersede()
                case MessageAccepted(policy="steer"):
                    run = None if live.active is None else self._launcher.live.get(live.active.run_id)
                    if run is not None:
                        run.expect_steering()
                case MessageSettled(message_id=message_id):
                    if message_id in self._settlements:
                        self._waits.setdefault(live.session, set()).add(message_id)
                case _:
                    pass
