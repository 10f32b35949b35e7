"""The load: drivers that send concurrently, repeat sends, interrupt, stop, withdraw, read, and probe other users'
sessions."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from holdfast.errors import Draining, HoldfastError, HostBusy, LimitExceeded, ServerUnreachable, StorageError
from holdfast.proof.history import (
    Lost,
    Refused,
    SendAcknowledged,
    SendAttempted,
    StopAnswered,
    StopRequested,
    WithdrawAnswered,
    WithdrawRequested,
)
from holdfast.proof.limits import Limits
from holdfast.proof.storm.access import HostAccess
from holdfast.proof.storm.access_probe import pry
from holdfast.proof.storm.agent import PLAIN, REPLAYABLE
from holdfast.proof.storm.plan import Piece, Plan, encode_plan, make_plan, until_told
from holdfast.proof.storm.readers import StormReader
from holdfast.proof.storm.recorder import StormRecorder
from holdfast.proof.storm.session import StormMessage, StormSession
from holdfast.proof.storm.snapshot import SnapshotReader
from holdfast.protocol.messages import Policy

__all__ = ["Load"]

_EVERYTHING: tuple[Piece, ...] = ("emit", "call", "task", "thread", "parallel", "child", "process", "raw", "probe")
_QUIET_S = 0.05
_MOST_WAIT_S = 0.5
_RESENDS = 50
_OUTAGE_S = 0.3
_COMPLETED = 8
_STARTED_S = 0.5


class Load:
    """Drivers and readers for many sessions of several principals.

    ``others`` lists sessions that have no driver. While ``calm`` is set, drivers only send new messages.

    Parameters:
        rate: actions per second, over all sessions.
        span_s: approximate duration of each piece of an agent's work, in seconds.
        prefix: prefix of session keys and message names.
        agents: names of the agents, assigned to the sessions in turn; None means the host's default agent.
        content: called with a plan; returns the content of a message.
        limited: whether the host may refuse any request of the load's principals, even a read, and programs of theirs,
            because of a limit.
    """

    def __init__(
        self,
        access: HostAccess,
        recorder: StormRecorder,
        limits: Limits,
        *,
        sessions: int,
        rate: float,
        seed: int,
        prefix: str = "s",
        span_s: float = 0.05,
        agents: tuple[str | None, ...] = (REPLAYABLE, PLAIN),
        content: Callable[[Plan], str] = encode_plan,
        limited: bool = False,
    ) -> None:
        self.access = access
        self.recorder = recorder
        self.limits = limits
        self.reading = SnapshotReader(access, recorder, limits)
        self.prefix = prefix
        self._span_s = span_s
        self._content = content
        self._pause_s = sessions / rate
        self.chance = random.Random(seed)
        self._names = 0
        self._cuts = 0
        self._limited = limited
        self._outages = (ServerUnreachable, StorageError, Draining, *((LimitExceeded, HostBusy) if limited else ()))
        self.calm = False
        self.refused: Counter[str] = Counter()
        """Number of refused messages, by error code."""
        self.sessions: list[StormSession] = []
        self.others: list[StormSession] = []
        for number in range(sessions):
            principal = access.principals[number % len(access.principals)]
            session = StormSession(
                principal, f"{prefix}{number}", agents[number % len(agents)], random.Random(f"{seed}/{number}")
            )
            self.sessions.append(session)
            for copy in range(2 if number % 4 == 0 else 1):
                name = f"{prefix}{number}-r{copy}"
                session.readers.append(
                    StormReader(access, recorder, name, (principal, session.key), chance=session.chance)
                )
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start all drivers and readers. `stop` raises their errors."""
        self._stopping.clear()
        for session in self.sessions:
            self._tasks.append(asyncio.create_task(self._drive(session), name=f"storm driver {session.key}"))
            for reader in session.readers:
                self._tasks.append(asyncio.create_task(reader.roam(), name=f"storm reader {reader.name}"))

    async def stop(self) -> None:
        """Let each driver finish its current action, and stop the readers.

        If drivers or readers have failed, raise one of their errors; errors of drivers are raised first.
        """
        self._stopping.set()
        drivers = [task for task in self._tasks if "driver" in task.get_name()]
        readers = [task for task in self._tasks if "reader" in task.get_name()]
        for task in readers:
            task.cancel()
        results = await asyncio.gather(*drivers, *readers, return_exceptions=True)
        self._tasks.clear()
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result

    async def complete(self) -> None:
        """Do the actions that a short load may never have chosen, in up to eight sessions. Call this after `stop`."""
        await asyncio.gather(*(self._complete(session) for session in self.sessions[:_COMPLETED]))

    async def _complete(self, session: StormSession) -> None:
        await self._double_text(session)
        await self._repeat(session)
        await self.cut(stop=False, after_s=0.05)
        await self._cut_short(session)
        await self._read(session)
        await self._settlement(session)
        for principal in self.access.principals:
            if principal != session.principal:
                await pry(self.access, self.recorder, session, principal)

    async def rest(self) -> None:
        """Wait until every session is quiescent; see `SnapshotReader.rest`."""
        await self.reading.rest([*self.sessions, *self.others])

    async def read_back(self) -> None:
        """Read all sessions for the last time; see `SnapshotReader.read_back`."""
        await self.reading.read_back([*self.sessions, *self.others])

    async def read_logs(self) -> None:
        """Read the logs of all sessions up to now; see `SnapshotReader.read_logs`."""
        await self.reading.read_logs([*self.sessions, *self.others])

    async def abandon(self) -> None:
        """Cancel all drivers and readers at once, and ignore their errors."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def warm_up(self) -> None:
        """Run most kinds of work once for each principal, so that one-time allocations precede the baseline."""
        for principal in self.access.principals:
            name = self._name()
            session = StormSession(principal, f"{self.prefix}-warm-{principal}", PLAIN, self.chance)
            self.others.append(session)
            message = self.message(session, Plan(name=name, pieces=_EVERYTHING, span_s=0.02), "queue")
            await self.send(session, message)
            handle = self.access.session(principal, session.key)
            await handle.wait(message.message_id or "", timeout_s=self.limits.answer_s)

    @property
    def broken(self) -> BaseException | None:
        """The error with which a driver or reader failed, if any."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                return task.exception()
        return None

    async def _drive(self, session: StormSession) -> None:
        chance = session.chance
        await self._pause(chance.uniform(0, min(self._pause_s, 2.0)))
        while not self._stopping.is_set():
            await self.access.up.wait()
            await self.act(session)
            await self._pause(chance.expovariate(1 / self._pause_s))

    async def act(self, session: StormSession | None = None) -> None:
        """Do one random action in `session`; None means a random session."""
        session = session or self.chance.choice(self.sessions)
        actions: list[tuple[Callable[[StormSession], Awaitable[None]], int]] = [
            (self._double_text, 44),
            (self._repeat, 6),
            (self._interrupt, 4),
            (self._cut_short, 12),
            (self._stop_session, 2),
            (self._flood, 1),
            (self._withdraw, 5),
            (self._read, 7),
            (self._settlement, 8),
            (self._pry, 4),
        ]
        what, weights = [action for action, _ in actions], [weight for _, weight in actions]
        if not session.exists or self.calm:
            await self._double_text(session)
        else:
            await session.chance.choices(what, weights)[0](session)

    async def _pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until the load stops if that is earlier."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    # ── actions ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _name(self) -> str:
        self._names += 1
        return f"{self.prefix}m{self._names}"

    async def _double_text(self, session: StormSession) -> None:
        chance = session.chance
        count = chance.choices((1, 2, 3), (5, 3, 1))[0]
        await asyncio.gather(*(self.send(session, self.message(session)) for _ in range(count)))

    def message(self, session: StormSession, plan: Plan | None = None, policy: Policy | None = None) -> StormMessage:
        """Return a new message; an omitted plan or policy is chosen at random."""
        chance = session.chance
        plan = plan or make_plan(self._name(), chance, span_s=self._span_s)
        policies: tuple[Policy, ...] = ("queue", "collect", "interrupt", "reject")
        return StormMessage(
            key=f"k-{plan.name}",
            content=self._content(plan),
            policy=policy or chance.choices(policies, (10, 3, 2, 3))[0],
            agent=session.agent,
            may_fail="fail" in plan.pieces or session.agent is None or (self._limited and "probe" in plan.pieces),
        )

    async def send(self, session: StormSession, message: StormMessage) -> bool:
        """Send a message until it is acknowledged or refused, at most 50 times; return whether it was acknowledged.

        The message is sent again if the call is lost, if the host is draining, or if the store fails.
        """
        for _ in range(_RESENDS):
            token = self.recorder.token()
            handle = (session.access or self.access).session(session.principal, session.key)
            self.recorder.note(
                SendAttempted,
                token=token,
                principal=session.principal,
                session=session.key,
                idempotency_key=message.key,
                content=message.content,
                policy=message.policy,
                may_fail=message.may_fail,
                replayable=message.agent != PLAIN,
            )
            try:
                receipt = await handle.send(
                    message.content,
                    policy=message.policy,
                    idempotency_key=message.key,
                    agent=message.agent,
                    quiet_s=_QUIET_S,
                    max_wait_s=_MOST_WAIT_S,
                )
            except ServerUnreachable as error:
                self.recorder.note(Lost, token=token, error=error.message)
                await self._outage()
                continue
            except HoldfastError as error:
                self.recorder.note(Refused, token=token, code=error.code)
                self.refused[error.code] += 1
                if not isinstance(error, (Draining, StorageError)):
                    return False
                await self._outage()
                continue
            seq, _, number = receipt.cursor.partition("-")
            self.recorder.note(
                SendAcknowledged,
                token=token,
                message_id=receipt.message_id,
                seq=receipt.seq,
                disposition=receipt.disposition,
                cursor=int(seq),
                run_id=receipt.run_id,
            )
            message.message_id = receipt.message_id
            session.exists = True
            session.number = int(number)
            session.run_id = receipt.run_id or session.run_id
            for reader in session.readers:
                reader.number = session.number
            if receipt.disposition != "duplicate":
                session.sent.append(message)
            return True
        return False

    async def _outage(self) -> None:
        """Wait until the host is expected to answer again."""
        await asyncio.sleep(_OUTAGE_S)
        await self.access.up.wait()

    async def _repeat(self, session: StormSession) -> None:
        if session.sent:
            await self.send(session, session.chance.choice(session.sent))

    async def _call(self, token: str, call: Awaitable[Any]) -> Any:
        """Await a call and return its answer; if the call fails, record the failure and return None."""
        try:
            return await call
        except ServerUnreachable as error:
            self.recorder.note(Lost, token=token, error=error.message)
            await self._outage()
        except HoldfastError as error:
            self.recorder.note(Refused, token=token, code=error.code)
        return None

    async def _interrupt(self, session: StormSession) -> None:
        await self.access.up.wait()
        token = self.recorder.token()
        chance = session.chance
        run_id = session.run_id if chance.random() < 0.2 else None
        handle = (session.access or self.access).session(session.principal, session.key)
        reason = f"because of {token}"
        self.recorder.note(
            StopRequested,
            token=token,
            principal=session.principal,
            session=session.key,
            scope="run",
            reason=reason,
            run_id=run_id,
        )
        grace_s = chance.choice((None, None, 0.1, 0.0))
        receipt = await self._call(token, handle.interrupt(reason, run_id=run_id, grace_s=grace_s))
        if receipt is not None:
            self.recorder.note(StopAnswered, token=token, receipt=receipt)

    async def _cut_short(self, session: StormSession) -> None:
        """Start a run with much slow work, and interrupt or stop it in the middle."""
        chance = session.chance
        plan = make_plan(self._name(), chance, span_s=4 * self._span_s)
        if chance.random() < 0.3:
            plan = until_told(plan)
        if not await self.send(session, self.message(session, plan)):
            return
        await asyncio.sleep(chance.uniform(0.0, 4 * self._span_s))
        if chance.random() < 0.2:
            await self._stop_session(session)
        else:
            await self._interrupt(session)

    async def flood(self) -> None:
        """Send more messages to a random session than the session's mailbox holds, then stop the session."""
        await self._flood(self.chance.choice(self.sessions))

    async def _flood(self, session: StormSession) -> None:
        """Send more messages than the mailbox holds while a run is active, then stop the session."""
        plan = Plan(name=self._name(), pieces=("nap",), span_s=20 * self._span_s)
        await self.send(session, self.message(session, plan, "queue"))
        small = [Plan(name=self._name(), pieces=("emit",), span_s=0.0) for _ in range(self.limits.mailbox + 3)]
        await asyncio.gather(*(self.send(session, self.message(session, plan, "queue")) for plan in small))
        await self._stop_session(session)

    async def linger(self, count: int, span_s: float, *, apart: bool = False) -> None:
        """Send long work to `count` random sessions, so that runs are active when the host exits.

        With `apart`, send it to new sessions, in which nothing else stops it.
        """
        lingering = self.chance.sample(self.sessions, min(count, len(self.sessions)))
        if apart:
            lingering = [self._other(f"linger-{self._name()}", of=session) for session in lingering]
        pieces: tuple[Piece, ...] = ("call", "emit", "task", "thread", "process", "nap")
        await asyncio.gather(
            *(
                self.send(
                    session,
                    self.message(session, Plan(name=self._name(), pieces=pieces, span_s=span_s / 4), "queue"),
                )
                for session in lingering
            )
        )

    async def cut(self, *, stop: bool, after_s: float = 0.6) -> None:
        """Start a run in a new session; after `after_s` seconds, interrupt the run or stop the session.

        With the default `after_s`, the run's call has returned by then, and a task with slow cleanup is active.
        """
        self._cuts += 1
        session = self._other(
            f"cut-{self._cuts}", of=self.sessions[0], principal=self.chance.choice(self.access.principals)
        )
        plan = Plan(name=self._name(), pieces=("call", "tidy", "nap"), span_s=1.0)
        if await self.send(session, self.message(session, plan, "queue")):
            await asyncio.sleep(after_s)
            await (self._stop_session(session) if stop else self._interrupt(session))

    async def cut_elsewhere(self, begin: HostAccess, end: HostAccess, span_s: float) -> None:
        """Start a run of `span_s` seconds on one host, in a new session, and interrupt it at another host.

        The run ends by itself only after `span_s` seconds.
        """
        self._cuts += 1
        session = self._other(f"cut-{self._cuts}", of=self.sessions[0])
        session.access = begin
        plan = Plan(name=self._name(), pieces=("nap",), span_s=span_s)
        if await self.send(session, self.message(session, plan, "queue")):
            await asyncio.sleep(_STARTED_S)
            session.access = end
            await self._interrupt(session)
        session.access = None

    def _other(self, name: str, *, of: StormSession, principal: str | None = None) -> StormSession:
        """Return a new session without a driver, with the agent of another session."""
        session = StormSession(principal or of.principal, f"{self.prefix}-{name}", of.agent, self.chance)
        self.others.append(session)
        return session

    async def nap(self, session: StormSession, span_s: float) -> None:
        """Start a run that sleeps for `span_s` seconds in a session."""
        await self.send(
            session, self.message(session, Plan(name=self._name(), pieces=("nap",), span_s=span_s), "queue")
        )

    async def stand_by(self, span_s: float) -> None:
        """Run a program that only waits for `span_s` seconds, for each principal, in a session of its own."""
        for principal in self.access.principals:
            key = f"{self.prefix}-bystander-{principal}"
            session = next((one for one in self.others if one.key == key), None)
            if session is None:
                session = StormSession(principal, key, PLAIN, self.chance)
                self.others.append(session)
            plan = Plan(name=self._name(), pieces=("hold",), span_s=span_s)
            await self.send(session, self.message(session, plan, "queue"))

    async def _stop_session(self, session: StormSession) -> None:
        await self.access.up.wait()
        token = self.recorder.token()
        handle = self.access.session(session.principal, session.key)
        reason = f"because of {token}"
        self.recorder.note(
            StopRequested,
            token=token,
            principal=session.principal,
            session=session.key,
            scope="session",
            reason=reason,
        )
        stop = await self._call(token, handle.stop(reason))
        if stop is not None:
            withdrawn = tuple(message.message_id for message in stop.withdrawn)
            self.recorder.note(StopAnswered, token=token, receipt=stop.receipt, withdrawn=withdrawn)

    async def _withdraw(self, session: StormSession) -> None:
        message = self.message(session, policy="queue")
        if not await self.send(session, message) or message.message_id is None:
            return
        token = self.recorder.token()
        handle = self.access.session(session.principal, session.key)
        self.recorder.note(
            WithdrawRequested,
            token=token,
            principal=session.principal,
            session=session.key,
            message_id=message.message_id,
        )
        settlement = await self._call(token, handle.withdraw(message.message_id))
        if settlement is not None:
            self.recorder.note(WithdrawAnswered, token=token, state=settlement.state)

    async def _read(self, session: StormSession) -> None:
        try:
            await self.reading.read(session)
        except self._outages:
            await self._outage()

    async def _settlement(self, session: StormSession) -> None:
        if not session.sent:
            return
        message = session.chance.choice(session.sent)
        try:
            await self.reading.settlement(session, message.message_id or "")
        except self._outages:
            await self._outage()

    async def _pry(self, session: StormSession) -> None:
        """Try to reach the session as a random principal, which may be the session's owner."""
        principal = session.chance.choice(self.access.principals)
        try:
            await pry(self.access, self.recorder, session, principal)
        except self._outages:
            await self._outage()
