"""The reactive bridge: agents and functions as operators on reactivex streams (extra ``reactive``).

Items may arrive from any thread or scheduler. The work on the items is bounded, runs in a scope, and ends with the
scope.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from holdfast.agents.run import Run
from holdfast.clock import system_clock
from holdfast.errors import ConfigurationError, Interrupted, MissingExtra, ScopeClosed, WaitExpired
from holdfast.integrations.reactive.intake import IntakeCounts, Overflow
from holdfast.integrations.reactive.outlet import Outlet
from holdfast.integrations.reactive.sessions import EventFlow, Sessions, SessionSender
from holdfast.integrations.reactive.subscription import Flow, ItemFlow, Outcome, Shape, Work
from holdfast.integrations.reactive.work import ItemText, branching, label_of, text_of, work_on
from holdfast.protocol.stopping import Cause, StopReceipt
from holdfast.protocol.supervision import is_seconds
from holdfast.runtime import Scope

if TYPE_CHECKING:
    from reactivex import Observable
    from reactivex.abc import DisposableBase, ObserverBase, SchedulerBase

    from holdfast.agents.agent import Agent
    from holdfast.protocol.messages import Policy
    from holdfast.protocol.session_api import SessionAPI

    Operator = Callable[[Observable[Any]], Observable[Any]]

__all__ = ["IntakeCounts", "Outcome", "Overflow", "ReactiveBridge", "Shaped"]

_MARGIN_S = 5.0
"""Extra seconds that `cleanup` waits beyond the longest stop."""
_MOST_S = 366 * 86400.0
"""Maximum time that a thread may be blocked, in seconds."""


class Shaped(TypedDict, total=False):
    """Settings for the work on a stream's items. Set defaults on the bridge, and overrides on an operator.

    Parameters:
        concurrency: maximum number of items that are processed at the same time.
        buffer: maximum number of items that wait in the buffer.
        overflow: policy for an item that arrives when the buffer is full. ``block`` blocks the producer's thread until
            the buffer has room; on the thread of an event loop, which must not block, ``block`` acts like ``fail``.
            ``fail`` ends the stream with `QueueFull`. ``drop`` drops the item and counts it as dropped.
        block_s: maximum time that a producer's thread is blocked, in seconds; if the time runs out, the stream ends
            with `QueueFull`.
        ordered: whether results are emitted in the order of the items instead of in the order of completion. If true,
            fewer than ``concurrency`` + ``buffer`` results wait for a slow item.
        outcomes: whether an `Outcome` is emitted for each item instead of its result, so that an error does not end the
            stream.
    """

    concurrency: int
    buffer: int
    overflow: Overflow
    block_s: float
    ordered: bool
    outcomes: bool


class ReactiveBridge:
    """Runs agents and functions on the items of reactive streams, and owns all work that it starts.

    On exit, ``async with ReactiveBridge() as bridge`` waits until the bridge's streams have ended; if the block raises,
    the streams are interrupted. The bridge belongs to the event loop on which it was opened. From any thread, you can
    use operators, create and dispose subscriptions, push items, and call `cleanup` and `statistics`.

    Parameters:
        owner: run or scope that owns the bridge. If a run owns the bridge, functions run as branches and agents as
            children of that run. None means the current scope, if any.
        name: display name in the task tree, causes and errors.
        grace_s: grace period for interrupted work, in seconds; None means the owner's grace period.
        shape: default settings of the bridge's operators; see `Shaped`.

    Raises:
        ConfigurationError: if a parameter is invalid.
        MissingExtra: if reactivex is not installed.
    """

    def __init__(
        self,
        owner: Run | Scope | None = None,
        *,
        name: str = "reactive",
        grace_s: float | None = None,
        **shape: Unpack[Shaped],
    ) -> None:
        if importlib.util.find_spec("reactivex") is None:
            raise MissingExtra("the reactive bridge", extra="reactive")
        default = Shape(concurrency=100, buffer=1024, overflow="block", block_s=60.0, ordered=False, outcomes=False)
        self._shape = _shaped(default, shape)
        if grace_s is not None:
            _check_time("grace_s", grace_s)
        self.name = name
        self._run: Run | None = None
        if isinstance(owner, Scope):
            self.scope = Scope(name, parent=owner, grace_s=grace_s)
        elif owner is not None:
            if not isinstance(owner, Run):
                raise ConfigurationError(
                    f"invalid owner of a bridge: {owner!r}",
                    hint="pass a run, a scope or nothing; to send to sessions, use bridge.ask or bridge.send",
                )
            self._run = owner
            self.scope = Scope(name, parent=owner.context.innermost_scope(), grace_s=grace_s)
        else:
            self.scope = Scope(name, grace_s=grace_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flows: dict[Flow, None] = {}
        self._past = IntakeCounts()
        self._closing: Cause | None = None
        self._idle: list[asyncio.Future[None]] = []
        self._closed: Future[None] = Future()

    def __repr__(self) -> str:
        return f"<ReactiveBridge {self.name!r} {self.scope.state}, {len(self._flows)} streams>"

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the bridge. Raises `ScopeClosed` if the bridge was never opened."""
        if self._loop is None:
            raise ScopeClosed(f"{self.name} is not open", hint="use it in 'async with', or open() it first")
        return self._loop

    # ── opening and ending ───────────────────────────────────────────────────────────────────────────────────────

    def open(self) -> ReactiveBridge:
        """Bind the bridge to the running loop and return the bridge. Close it with `aclose`, `drain` or `cleanup`.

        Raises:
            Interrupted, ScopeClosed: if the bridge's owner is being stopped.
        """
        self.scope.open()
        self._loop = asyncio.get_running_loop()
        self.scope.interrupt.on_trigger(self._on_interrupt, loop=self.loop)
        return self

    async def __aenter__(self) -> ReactiveBridge:
        return self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            await self.aclose(f"the block around it was left by {type(error).__name__}")
            return
        try:
            await self.scope.join()
        except Interrupted as interrupted:
            if interrupted.cause is not self._closing:
                raise
        finally:
            self._swept()

    async def aclose(self, reason: str = "closed") -> StopReceipt:
        """Close the bridge: reject new work, interrupt all active work, and return when that work has ended.

        Call this method on the bridge's loop. Observers that subscribe from now on get `ScopeClosed`; observers of
        interrupted streams get `RunInterrupted`. Further calls have no effect.

        Raises:
            Interrupted: if called from the bridge's own work, which must not wait for its own end; the stop continues.
        """
        return await self._stop(self._close(reason))

    async def _stop(self, cause: Cause) -> StopReceipt:
        if asyncio.get_running_loop() is not self.loop:
            raise RuntimeError(f"{self.name} runs on another event loop; close it there, or call cleanup() in a thread")
        receipt = await self.scope.stop(cause=cause)
        self._swept()
        return receipt

    def cleanup(self, reason: str = "clean-up") -> StopReceipt | None:
        """Close the bridge from any thread, as `aclose` does, and wait until the bridge is closed.

        On a thread that runs an event loop, and in the bridge's own work, this method does not wait: it starts the stop
        and returns None, or the receipt if the stop is already complete.

        Raises:
            WaitExpired: if the wait times out, because the bridge's loop does not run or is blocked. The stop
                continues.
            ScopeClosed: if the loop was closed while streams were open. Observers and threads are notified, but tasks
                do not clean up.
        """
        cause = self._close(reason)
        scope = self.scope
        if self.loop.is_closed():
            if not self._closed.done():
                self._forsaken(cause)
        elif not scope.closed:
            scope.request_stop(cause)
            if asyncio._get_running_loop() is None and not scope.is_around_caller():
                timeout_s = scope.grace_s + scope.abandon_after_s + _MARGIN_S
                try:
                    self._closed.result(timeout_s)
                except TimeoutError:
                    raise WaitExpired(
                        f"{self.name} is not closed after {timeout_s:g} s", hint="check that its event loop is running"
                    ) from None
        return scope.receipt

    async def drain(self, *, timeout_s: float = 30.0) -> StopReceipt:
        """Reject new items, wait until accepted items are finished or the deadline expires, and close the bridge.

        Streams that finish in time complete; the remaining streams are interrupted. Call this method on the bridge's
        loop, but not from the bridge's own work.

        Parameters:
            timeout_s: deadline in seconds.

        Raises:
            ConfigurationError: if `timeout_s` is invalid.
        """
        _check_time("timeout_s", timeout_s)
        cause = self._close("drained")
        for flow in tuple(self._flows):
            flow.drain()
        try:
            async with asyncio.timeout(timeout_s):
                while self._flows:
                    idle: asyncio.Future[None] = self.loop.create_future()
                    self._idle.append(idle)
                    await idle
        except TimeoutError:
            pass
        return await self._stop(cause)

    def _close(self, reason: str) -> Cause:
        """Reject new work from now on, and return the cause. Thread-safe."""
        if self._closing is None:
            self._closing = Cause(kind="stop", reason=reason, origin=self.name, at=system_clock.now())
        return self._closing

    def _on_interrupt(self, _: Cause) -> None:
        if self.scope.closed:
            self._swept()
        else:
            self.scope.close_when_done(self._swept)

    def _swept(self) -> None:
        """Settle the streams whose task never started, once the scope has closed."""
        for flow in tuple(self._flows):
            flow.settle(flow.cut_off(self.scope.interrupt.cause))
        if not self._closed.done():
            self._closed.set_result(None)

    def _forsaken(self, cause: Cause) -> None:
        """Settle all streams after the loop was closed before the bridge. Raises `ScopeClosed` if streams were open."""
        self.scope.interrupt.trigger(cause=cause)
        self._idle = []
        left = len(self._flows)
        self._swept()
        if left:
            raise ScopeClosed(
                f"the event loop of {self.name} was closed while {left} streams of the bridge were open, so the tasks "
                "of these streams did not clean up",
                hint="close the bridge before its loop: use 'async with', or call aclose() or drain() on that loop",
            )

    def ended(self, flow: Flow) -> None:
        """Forget a settled flow, but keep its counts. Called only by this bridge's flows."""
        self._past += flow.counts()
        self._flows.pop(flow, None)
        if not self._flows:
            idle, self._idle = self._idle, []
            for waiter in idle:
                if not waiter.done():
                    waiter.set_result(None)

    def statistics(self) -> IntakeCounts:
        """Return the item counts of all streams so far; they are exact after the streams have ended. Thread-safe."""
        counts = self._past
        for flow in tuple(self._flows):
            counts += flow.counts()
        return counts

    @property
    def streams(self) -> int:
        """Number of active subscriptions."""
        return len(self._flows)

    # ── operators ────────────────────────────────────────────────────────────────────────────────────────────────

    def each(
        self,
        work: Agent | Callable[[Any], Any],
        *,
        text: ItemText = text_of,
        scheduler: SchedulerBase | None = None,
        **shape: Unpack[Shaped],
    ) -> Operator:
        """Return an operator that runs `work` on each item and emits the results.

        The stream ends early if the source fails, if a limit is exceeded, or if `work` raises an error and ``outcomes``
        is false. Active work is interrupted, and then the observer gets the error. Disposing the subscription also
        interrupts the work, but without an error.

        Parameters:
            work: agent, or function that is called with each item. A sync function runs in a thread. An agent is
                allowed only if a run owns the bridge; the agent runs as a child of that run, and its answer is the
                result.
            text: function that builds an agent's request from an item; by default, the item itself is the request.
            scheduler: scheduler on which results are emitted; None means the bridge's loop.
            shape: settings of this operator; see `Shaped`.

        Raises:
            ConfigurationError: if a parameter is invalid, or `work` is an agent and no run owns the bridge.
        """
        run, plain = self._run, work_on(work, self._run, text)
        return self._operator(label_of(work), lambda: plain if run is None else branching(plain, run), scheduler, shape)

    def ask(
        self,
        session_of: Sessions,
        *,
        text: ItemText = text_of,
        policy: Policy = "queue",
        idempotency_key: Callable[[Any], str] | None = None,
        agent: str | None = None,
        full_s: float = 60.0,
        scheduler: SchedulerBase | None = None,
        **shape: Unpack[Shaped],
    ) -> Operator:
        """Return an operator that sends each item to a session as a message, and emits the answers.

        Messages to one session are sent in the order of the items. If the stream is interrupted, its messages are
        revoked: waiting messages are withdrawn, and the runs of active messages are interrupted (except with the
        policies ``steer`` and ``collect``, because such a run may also have other messages).

        Parameters:
            session_of: function that returns the session of an item, or one session for all items.
            text: function that builds the message from an item.
            policy: policy of the messages; see ``session.send``.
            idempotency_key: function that builds a message's idempotency key from the item; see ``session.send``. None
                means a new key for each item.
            agent: name of the agent to which messages are addressed; see ``session.send``.
            full_s: time in seconds for which a send is retried while the mailbox is full; 0 means no retry. Meanwhile,
                the item counts towards ``concurrency``, which slows the source. When the time runs out, `MailboxFull`
                ends the stream or, if ``outcomes`` is true, is the error in the item's `Outcome`.
            scheduler, shape: scheduler and settings of this operator; see `each`.

        Raises:
            ConfigurationError: if a parameter is invalid.
            InvalidRequest: if `full_s` is not a finite number of 0 or more.
        """
        mail = SessionSender(session_of, text, policy, idempotency_key, agent, full_s)
        return self._operator("ask", mail.asking, scheduler, shape)

    def send(
        self,
        session_of: Sessions,
        *,
        text: ItemText = text_of,
        policy: Policy = "queue",
        idempotency_key: Callable[[Any], str] | None = None,
        agent: str | None = None,
        full_s: float = 60.0,
        scheduler: SchedulerBase | None = None,
        **shape: Unpack[Shaped],
    ) -> Operator:
        """Return an operator that sends each item to a session and emits the receipts.

        The parameters are those of `ask`. If the stream is interrupted, messages that were sent are not revoked.
        """
        mail = SessionSender(session_of, text, policy, idempotency_key, agent, full_s)
        return self._operator("send", mail.sending, scheduler, shape)

    def events(
        self,
        session: SessionAPI,
        *,
        after: str | None = None,
        follow: str | None = None,
        gaps: Literal["value", "error"] = "value",
        scheduler: SchedulerBase | None = None,
    ) -> Observable[Any]:
        """Return a session's log as an observable; each subscription reads the log separately, at its own pace.

        Parameters:
            after, follow: range of events to read; see ``session.events``.
            gaps: policy for a `Gap`. ``value`` emits the gap like an event; ``error`` ends the stream with
                `EventsMissed`.
            scheduler: scheduler on which events are emitted; None means the bridge's loop.
        """
        from reactivex import Observable
        from reactivex.disposable import Disposable

        if gaps not in ("value", "error"):
            raise ConfigurationError(f"gaps is {gaps!r}", hint="use 'value' or 'error'")

        def subscribe(observer: ObserverBase[Any], _: SchedulerBase | None = None) -> DisposableBase:
            outlet = Outlet(observer, scheduler, self.loop)
            name = f"{self.name} events of {session.key}"
            flow = EventFlow(self, name, outlet, lambda: session.events(after=after, follow=follow), gaps == "error")
            self._begin(flow, observer)
            return Disposable(flow.dispose)

        return Observable(subscribe)

    async def collect(self, source: Observable[Any]) -> list[Any]:
        """Subscribe to an observable and return all values that it emits until it completes.

        If this call is cancelled, the subscription is disposed.

        Raises:
            Exception: the error with which the observable ends.
        """
        found: list[Any] = []
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def end(error: Exception | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        def ended(error: Exception | None = None) -> None:
            done.get_loop().call_soon_threadsafe(end, error)

        subscription = source.subscribe(found.append, ended, ended)
        try:
            await done
        finally:
            subscription.dispose()
        return found

    def _operator(
        self, label: str, make_work: Callable[[], Work], scheduler: SchedulerBase | None, shape: Shaped
    ) -> Operator:
        from reactivex import Observable
        from reactivex.disposable import Disposable, SingleAssignmentDisposable

        settings = _shaped(self._shape, shape)

        def operator(source: Observable[Any]) -> Observable[Any]:
            def subscribe(observer: ObserverBase[Any], on: SchedulerBase | None = None) -> DisposableBase:
                outlet = Outlet(observer, scheduler, self.loop)
                name = f"{self.name} {label}"
                flow = ItemFlow(self, name, outlet, SingleAssignmentDisposable(), make_work(), settings)
                if self._begin(flow, observer):
                    flow.listen(source, on)
                return Disposable(flow.dispose)

            return Observable(subscribe)

        return operator

    def _begin(self, flow: Flow, observer: ObserverBase[Any]) -> bool:
        """Start a flow; if the bridge is closing, notify the observer and return False."""
        self._flows[flow] = None  # before the check: a concurrent close sees the flow, or the check sees it
        try:
            if self._closing is not None:
                raise ScopeClosed(f"{self.name} is closing", hint="subscribe on an open bridge")
            flow.start()
        except ScopeClosed as error:
            self._flows.pop(flow, None)
            observer.on_error(error)
            return False
        return True


def _shaped(default: Shape, given: Shaped) -> Shape:
    """Return the default settings with the given overrides. Raises `ConfigurationError` if a setting is invalid."""
    shape = dataclasses.replace(default, **given)
    for name in ("concurrency", "buffer"):
        value = getattr(shape, name)
        if not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"{name} is {value!r}", hint="use a whole number of at least 1")
    if shape.overflow not in ("block", "fail", "drop"):
        raise ConfigurationError(f"overflow is {shape.overflow!r}", hint="use 'block', 'fail' or 'drop'")
    if shape.block_s == 0:
        raise ConfigurationError("block_s is 0", hint="use overflow='fail' if threads must not block")
    _check_time("block_s", shape.block_s)
    return shape


def _check_time(name: str, value: object) -> None:
    """Raise `ConfigurationError` unless `value` is a number of seconds of at most a year."""
    if not (is_seconds(value) and value <= _MOST_S):
        raise ConfigurationError(f"{name} is {value!r}", hint="use a number of seconds, at most one year")
