"""The context of one run: the state that the run's calls, children and model loop share.

An agent's function receives a `Run`; the modules in this folder that implement runs use the run's `RunContext`.
`holdfast.agents.perform` creates the `Run` for the agent's function. Modules that `perform` imports call
`perform` only through `RunContext.perform`.

Invariants
- A child run has its own context, which shares the parent's journal, recorder, limits and activity counter.
- After a context is closed, output from any thread of the run is discarded.
- Events from threads reach the recorder in the order in which they were written, through one queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.agents.exclusive_calls import ExclusiveCalls
from holdfast.agents.journal import CallPath, Journal, current_call_path
from holdfast.agents.output import Emission, require_text
from holdfast.agents.quiescence import ActivityCounter
from holdfast.errors import LimitExceeded, RunClosed, ToolFailed
from holdfast.logs import log_failure
from holdfast.protocol.events import (
    ChildFinished,
    ChildStarted,
    MessageSteered,
    ReasoningDelta,
    StepFinished,
    StepStarted,
    TextDelta,
    ToolFinished,
    ToolOutput,
    ToolStarted,
)
from holdfast.protocol.messages import Entry, Message, Usage
from holdfast.protocol.transcript import RunTranscript
from holdfast.runtime import current_scope

if TYPE_CHECKING:
    from holdfast.agents.agent import Agent
    from holdfast.agents.limits import RunLimits
    from holdfast.agents.ports import Recorder, RunHost
    from holdfast.runtime import Handle, Interrupt, Scope

__all__ = ["RunContext", "RunEvent"]

_log = logging.getLogger("holdfast.agents")

RunEvent = (
    ChildStarted
    | ChildFinished
    | TextDelta
    | ReasoningDelta
    | StepStarted
    | StepFinished
    | ToolStarted
    | ToolOutput
    | ToolFinished
)

_THREAD_QUEUE_LIMIT = 1024
_BEHIND_POLL_S = 0.005
_NO_USAGE = Usage()


class RunContext:
    """The state of one run, shared by all code that works for the run.

    The host creates the context of a top-level run; `Child` creates the context of a child run.

    Call the methods on the run's event loop; only `emit`, `write`, `check_open`, `close`, `now`, `next_id`,
    `call_on_loop` and `innermost_scope` may be called from any thread of the run.

    Parameters:
        run_id: id of the run; for a child run, its call path.
        root_id: id of the top-level run.
        messages: input messages. Messages that were steered to an earlier attempt are delivered again at the same step.
        scope: scope that owns everything that the run starts.
        recorder: recorder that receives the run's events.
        journal: journal with the results of earlier attempts.
        host: services of the host for the run.
        limits: the host's limits on the run.
        call_path: call path that numbers the run's calls.
        perform: async function that runs an agent's code with a context; normally `holdfast.agents.perform.perform`.
        parent: context of the parent run; None for the top-level run.
        inherits_history: whether a child run sees the session history that its parent run sees.
        streams_to_parent: whether the parent run also emits the text of this child run as the text arrives.
    """

    __slots__ = (
        "_from_threads",
        "_hop_pending",
        "_steered_before",
        "_thread",
        "active_children",
        "activity",
        "agent",
        "attempt",
        "call_path",
        "child_waiters",
        "closed",
        "depth_left",
        "exclusive_calls",
        "host",
        "inherits_history",
        "journal",
        "limits",
        "loop",
        "messages",
        "parent",
        "perform",
        "principal",
        "recorder",
        "replaced_history",
        "root_id",
        "run_id",
        "scope",
        "session_id",
        "session_key",
        "step",
        "streams_to_parent",
        "subtasks",
        "transcript",
        "usage",
    )

    def __init__(
        self,
        run_id: str,
        root_id: str,
        agent: Agent,
        principal: str,
        session_key: str,
        session_id: str,
        messages: tuple[Message, ...],
        attempt: int,
        scope: Scope,
        recorder: Recorder,
        journal: Journal,
        host: RunHost,
        limits: RunLimits,
        call_path: CallPath,
        perform: Callable[[RunContext], Coroutine[Any, Any, None]],
        parent: RunContext | None = None,
        inherits_history: bool = False,
        streams_to_parent: bool = False,
    ) -> None:
        self.run_id = run_id
        self.root_id = root_id
        self.agent = agent
        self.principal = principal
        self.session_key = session_key
        self.session_id = session_id
        self.messages = messages
        self._steered_before: dict[str, Message] = {}
        if parent is None and (steered := journal.steered_ids):
            self.messages = tuple(m for m in messages if m.message_id not in steered)
            self._steered_before = {m.message_id: m for m in messages if m.message_id in steered}
        self.attempt = attempt
        self.scope = scope
        self.recorder = recorder
        self.journal = journal
        self.host = host
        self.limits = limits
        self.call_path = call_path
        self.perform = perform
        self.parent = parent
        self.inherits_history = inherits_history
        self.streams_to_parent = streams_to_parent
        self.transcript = RunTranscript(run_id, messages)
        self.usage = _NO_USAGE
        """The usage of the run and its children so far, including earlier attempts."""
        self.step = 0
        """The number of the current step; 0 before the first."""
        self.replaced_history: tuple[Entry, ...] | None = None
        """The entries that replace the session's transcript before this run, if it was summarized; else None."""
        self.subtasks: list[Handle[Any]] = []
        """Subtasks that `Run.spawn` started; the run joins them at its end."""
        self.active_children = 0
        self.child_waiters: list[asyncio.Future[None]] = []
        """Futures of children that wait until fewer children are active."""
        self.closed = False
        """Whether the run has ended, so that its output no longer counts."""
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._from_threads: deque[RunEvent] = deque()
        self._hop_pending = False
        depth = limits.depth if agent.model is None else min(limits.depth, agent.limits.depth)
        if parent is None:
            self.depth_left = depth
            """Remaining depth for nested children."""
            self.activity = ActivityCounter(host.on_quiescence)
            """Counts the active tasks and threads of the run and its children."""
            self.exclusive_calls = ExclusiveCalls()
        else:
            self.depth_left = min(parent.depth_left - 1, depth)
            self.activity = parent.activity
            self.exclusive_calls = parent.exclusive_calls

    # ── input ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def text(self) -> str:
        """The content of the messages, oldest first, separated by line breaks."""
        messages = self.messages
        return messages[0].content if len(messages) == 1 else "\n".join(m.content for m in messages)

    @property
    def interrupt(self) -> Interrupt:
        """The run's interrupt."""
        return self.scope.interrupt

    async def history(self) -> Sequence[Entry]:
        """Return the session's transcript before this run, or nothing for a child that does not inherit the history."""
        if self.parent is not None:
            return await self.parent.history() if self.inherits_history else ()
        return await self.host.history()

    async def take_steering(self, step: int, *, only_recorded: bool = False) -> list[Message]:
        """Take the messages steered to the run, at the start of a step. For a child run, return an empty list.

        Parameters:
            step: number of the step.
            only_recorded: whether to take only the messages that an earlier attempt took at the start of this step.
        """
        if self.parent is not None:
            return []
        taken = [self._steered_before.pop(i) for i in self.journal.steered(step) if i in self._steered_before]
        if not only_recorded and self.host.steering:
            taken += await self.host.steer(step)
        self.transcript.know(taken)
        for message in taken:
            self.transcript.feed(MessageSteered(run_id=self.run_id, message_id=message.message_id, step=step))
        return taken

    def now(self) -> float:
        """Return the current time, in seconds since the epoch."""
        return self.host.clock.now()

    # ── output ───────────────────────────────────────────────────────────────────────────────────────────────────

    def emit(self, text: str) -> Emission:
        """Emit a piece of the answer; see `Run.emit`."""
        require_text(text, "emit()")
        if self.transcript.size > self.limits.answer_limit_bytes:
            raise LimitExceeded(
                f"the run emitted more than {self.limits.answer_limit_bytes:,} characters",
                hint="write large output to a file and emit the file's name",
            )
        self.write(TextDelta(run_id=self.run_id, text=text, at=self.now()))
        return Emission(self.recorder)

    def write(self, event: RunEvent) -> None:
        """Write an event to the log and the transcript. In a thread, block while the log is behind.

        Raises:
            RunClosed: if the run has ended; the event is discarded.
        """
        if self.closed:  # checked here to save a call, because this runs for each event
            self.check_open()
        if threading.get_ident() == self._thread:
            self._take(event)
        else:
            self._hand_over(event)

    def check_open(self) -> None:
        """Raise `RunClosed` if the run has ended."""
        if self.closed:
            self.recorder.late()
            raise RunClosed(f"run {self.run_id} has ended")

    def close(self) -> None:
        """Reject all further use with `RunClosed`."""
        self.closed = True

    def replay_step(self, step: StepFinished) -> None:
        """Add a step of an earlier attempt to the transcript, but not to the log, which already has the step."""
        before = len(self.transcript.text) if self.streams_to_parent else 0
        self.transcript.feed(step)
        if self.streams_to_parent and (text := self.transcript.text[before:]):
            self._emit_in_parent(text)

    def _take(self, event: RunEvent) -> None:
        self.recorder.write(event)
        self.transcript.feed(event)
        if self.streams_to_parent and isinstance(event, TextDelta):
            self._emit_in_parent(event.text)

    def _emit_in_parent(self, text: str) -> None:
        parent = self.parent
        assert parent is not None
        parent._take(TextDelta(run_id=parent.run_id, text=text, at=self.now()))

    def _hand_over(self, event: RunEvent) -> None:
        """Queue an event from a thread for the loop; one wake-up of the loop takes all queued events."""
        while self.recorder.behind or len(self._from_threads) >= _THREAD_QUEUE_LIMIT:
            self.interrupt.sleep_blocking(_BEHIND_POLL_S)
            self.check_open()
        self._from_threads.append(event)
        if not self._hop_pending:  # read after the append: `_take_queued` clears it, then drains the queue
            self._hop_pending = True
            self.loop.call_soon_threadsafe(self._take_queued)

    def _take_queued(self) -> None:
        self._hop_pending = False
        while self._from_threads:
            event = self._from_threads.popleft()
            if self.closed:
                self.recorder.late()
            else:
                self._take(event)

    # ── accounts ─────────────────────────────────────────────────────────────────────────────────────────────────

    def charge(self, used: Usage) -> None:
        """Add usage to this run and its ancestors; interrupt each ancestor whose budget is then exceeded."""
        self.usage += used
        above = self.parent
        while above is not None:
            above.usage += used
            if above.agent.model is not None and (problem := above.agent.limits.exceeded(above.usage)):
                above.interrupt.trigger(problem, kind="budget")
            above = above.parent

    def log_failure(self, what: str, error: BaseException) -> None:
        """Log an error of this run's code or tools, except `ToolFailed` and interrupts, which are expected."""
        if isinstance(error, Exception) and not isinstance(error, ToolFailed):
            log_failure(_log, what, error, principal=self.principal, session=self.session_key, run_id=self.run_id)

    # ── place ────────────────────────────────────────────────────────────────────────────────────────────────────

    def next_id(self) -> str:
        """Return the id of the next call or child on the current call path; it is the same in every attempt."""
        return (current_call_path.get() or self.call_path).next_id()

    def innermost_scope(self) -> Scope:
        """Return the innermost scope of this run that encloses the calling code."""
        here = scope = current_scope()
        while scope is not None and scope is not self.scope:
            scope = scope.parent
        return self.scope if scope is None or here is None else here

    @contextlib.contextmanager
    def deadlines_held(self) -> Iterator[None]:
        """Pause all deadlines from the current scope up to the top-level run, for a block that waits for a person."""
        root = self
        while root.parent is not None:
            root = root.parent
        with contextlib.ExitStack() as held:
            scope: Scope | None = self.innermost_scope()
            while scope is not None:
                held.enter_context(scope.hold_deadline())
                scope = None if scope is root.scope else scope.parent
            yield

    def call_on_loop(self, callback: Callable[[], object]) -> None:
        """Schedule `callback` on the run's loop, unless the loop is closed. Callable from any thread."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(callback)
