"""The handle that a running agent works with: its input, its output, its calls, branches and children.

Everything that is started through the handle belongs to the run's scope and ends with it. After the run's end every use
raises `RunClosed`, and nothing that a leftover thread emits counts any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from holdfast.agents.agent import Agent, AgentLike, as_agent, perform
from holdfast.agents.call import Call, Emission, check_said
from holdfast.agents.calls import Wanted, approved, make_call, written
from holdfast.agents.children import ChildTask, check_chain, past_end, run_child
from holdfast.agents.fanout import run_map, run_parallel
from holdfast.agents.journal import Branch, Journal, Recorder, current_branch
from holdfast.agents.placing import Placement, name_of, placed, placement_of
from holdfast.agents.surroundings import Lines, RunLimits, Surroundings
from holdfast.errors import LimitExceeded, RunClosed, RunFailed, RunInterrupted, ToolFailed
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
from holdfast.protocol.messages import Answer, Entry, Message, Question, Usage
from holdfast.protocol.transcript import RunTranscript
from holdfast.runtime import Scope, current_scope

if TYPE_CHECKING:
    from holdfast.agents.tool import Tool
    from holdfast.runtime import Handle, Interrupt, Process

__all__ = ["Call", "Run", "RunLimits", "Surroundings"]

_log = logging.getLogger("holdfast.agents")

Written = (
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

_HANDED_LIMIT = 1024
_BEHIND_POLL_S = 0.005
_NOTHING = Usage()


class Run:
    """One run of an agent. Made by the host (or by `delegate`); agents get it as their argument.

    All methods may be called from the run's event loop; `emit`, `now` and the properties from any thread of the run.
    An interrupt of the run cancels its tasks once and wakes its threads; see `interrupt`.
    """

    __slots__ = (
        "_aloud",
        "_branch",
        "_children",
        "_closed",
        "_depth_left",
        "_exclusive",
        "_for_room",
        "_handed",
        "_hop_pending",
        "_inherits",
        "_journal",
        "_limits",
        "_lines",
        "_loop",
        "_on_released",
        "_parent",
        "_recorder",
        "_spawned",
        "_steered_before",
        "_steps",
        "_surroundings",
        "_thread",
        "_used",
        "agent",
        "attempt",
        "messages",
        "principal",
        "replaced_history",
        "root_id",
        "run_id",
        "scope",
        "session_id",
        "session_key",
        "transcript",
    )

    def __init__(
        self,
        *,
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
        surroundings: Surroundings,
        limits: RunLimits,
        branch: Branch,
        parent: Run | None = None,
        inherits: bool = False,
        aloud: bool = False,
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
        self.transcript = RunTranscript(run_id, messages)
        self._recorder = recorder
        self._journal = journal
        self._surroundings = surroundings
        self._limits = limits
        self._branch = branch
        self._parent = parent
        self._inherits = inherits
        self._aloud = aloud
        self._lines: Lines = Lines(surroundings.at_rest) if parent is None else parent._lines
        allowed = limits.depth if agent.model is None else min(limits.depth, agent.limits.depth)
        self._depth_left: int = allowed if parent is None else min(parent._depth_left - 1, allowed)
        self._children = 0
        self._exclusive: dict[str, str] = {} if parent is None else parent._exclusive
        self._on_released: list[Callable[[], object]] = [] if parent is None else parent._on_released
        self._for_room: list[asyncio.Future[None]] = []
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._handed: deque[Written] = deque()
        self._hop_pending = False
        self._spawned: list[Handle[Any]] = []
        self._closed = False
        self._steps = 0
        self._used = _NOTHING
        self.replaced_history: tuple[Entry, ...] | None = None
        """What stands in the place of the transcript before this run, once it was summed up; None: as it was."""

    # ── input ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def text(self) -> str:
        """The content of the messages it took, oldest first, a line break between them."""
        messages = self.messages
        return messages[0].content if len(messages) == 1 else "\n".join(m.content for m in messages)

    @property
    def interrupt(self) -> Interrupt:
        """The run's interrupt: `check()`, `wait()`, `sleep()` and the rest."""
        return self.scope.interrupt

    @property
    def replayed(self) -> int:
        """Calls of this attempt whose result came from the log."""
        return self._journal.replayed

    @property
    def usage(self) -> Usage:
        """What the run and its children used so far, in earlier attempts too."""
        return self._used

    def _charge(self, used: Usage) -> None:
        """Count what was used, here and in the runs above; one above whose budget is used up is interrupted."""
        self._used += used
        above = self._parent
        while above is not None:
            above._used += used
            if above.agent.model is not None and (problem := above.agent.limits.exceeded(above._used)):
                above.interrupt.trigger(problem, kind="budget")
            above = above._parent

    async def steered(self) -> list[Message]:
        """Messages that were sent with the policy ``steer`` since the run began or this was last called, in order.

        They are taken for good: it is durable that this run got them, and they are settled with it. An agent with a
        model looks for them before each step. A child gets none.
        """
        self._check_open()
        return await self._steered(self._steps + 1)

    async def _steered(self, step: int, *, more: bool = True) -> list[Message]:
        if self._parent is not None:
            return []
        known = [self._steered_before.pop(i) for i in self._journal.steered(step) if i in self._steered_before]
        if more and self._surroundings.steering:
            known += await self._surroundings.steer(step)
        self.transcript.know(known)
        for message in known:
            self.transcript.feed(MessageSteered(run_id=self.run_id, message_id=message.message_id, step=step))
        return known

    async def history(self) -> Sequence[Entry]:
        """The session's transcript before this run. A child has none, but for a branch of a shape: it sees the same."""
        if self._parent is not None:
            return await self._parent.history() if self._inherits else ()
        return await self._surroundings.history()

    async def attachment(self, digest: str) -> bytes:
        """The bytes of an attachment of the run's principal. Raises `UnknownAttachment`."""
        return await self._surroundings.attachment(digest)

    def now(self) -> float:
        """Seconds since the epoch. Not the same in another attempt: a replayable agent reads it in a `call`."""
        return self._surroundings.clock.now()

    # ── output ───────────────────────────────────────────────────────────────────────────────────────────────────

    def emit(self, text: str) -> Emission:
        """Say a piece of the answer. It is taken at once; ``await`` it to wait while the log is behind.

        From any thread of the run; in a thread it blocks while the log is behind.

        Raises:
            RunClosed: the run has ended; the text does not count.
            LimitExceeded: the run said more than its limit.
            InvalidRequest: text that UTF-8 cannot hold (a lone surrogate).
            TypeError: not text.
        """
        check_said(text, "emit()")
        if self.transcript.size > self._limits.answer_limit_bytes:
            raise LimitExceeded(
                f"the run said more than {self._limits.answer_limit_bytes:,} characters",
                hint="write large output to a file and name it",
            )
        self._write(TextDelta(run_id=self.run_id, text=text, at=self.now()))
        return Emission(self._recorder)

    async def step(self, label: str = "") -> int:
        """Begin a step, shown to readers; returns its number, from 1."""
        check_said(label, "step()")
        self._steps += 1
        self._charge(Usage(steps=1))
        self._write(StepStarted(run_id=self.run_id, step=self._steps, label=label, at=self.now()))
        await Emission(self._recorder)
        return self._steps

    def _check_open(self) -> None:
        if self._closed:
            self._recorder.late()
            raise RunClosed(f"run {self.run_id} has ended")

    def _write(self, event: Written) -> None:
        self._check_open()
        if threading.get_ident() == self._thread:
            self._take(event)
        else:
            self._hand_over(event)

    def _take(self, event: Written) -> None:
        self._recorder.write(event)
        self.transcript.feed(event)
        if self._aloud and isinstance(event, TextDelta):
            self._say_above(event.text)

    def _say_above(self, text: str) -> None:
        above = self._parent
        assert above is not None
        above._take(TextDelta(run_id=above.run_id, text=text, at=self.now()))

    def _recall(self, step: StepFinished) -> None:
        """Take what the model said in an earlier attempt."""
        before = len(self.transcript.text) if self._aloud else 0
        self.transcript.feed(step)
        if self._aloud and (said := self.transcript.text[before:]):
            self._say_above(said)

    def _hand_over(self, event: Written) -> None:
        """From a thread: queue the event for the loop, with one hop for all that are queued meanwhile."""
        while self._recorder.behind or len(self._handed) >= _HANDED_LIMIT:
            self.interrupt.sleep_blocking(_BEHIND_POLL_S)
            self._check_open()
        self._handed.append(event)
        if not self._hop_pending:  # read after the append: whoever clears it drains after clearing
            self._hop_pending = True
            self._loop.call_soon_threadsafe(self._take_handed)

    def _take_handed(self) -> None:
        self._hop_pending = False
        while self._handed:
            event = self._handed.popleft()
            if self._closed:
                self._recorder.late()
            else:
                self._take(event)

    # ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def call(
        self,
        work: Callable[..., Any],
        *args: Any,
        name: str | None = None,
        idempotent: bool = False,
        timeout_s: float | None = None,
        on: Placement | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a function with the journal: intent first, then the effect, then the result.

        In a later attempt the result is taken from the log and the function is not called. A function whose first
        parameter is named ``call`` gets a `Call`. Sync functions run in a thread.

        Parameters:
            work: what to call.
            args, kwargs: JSON-serialisable; they are written down. (For keyword arguments that this method has
                itself, such as ``name``, use `functools.partial`.)
            name: default: the function's name.
            idempotent: it may be made again after a crash that left no result.
            timeout_s: deadline; default: the host's ``tool_s``. The call's branch is stopped then.
            on: where it runs; default: ``loop`` for async functions, else ``thread``.

        Raises:
            what the function raises; in a later attempt `CallFailed` in its place.
            TimeoutError: the deadline was over.
            NotDeterministic, RunClosed.
            InvalidRequest: ``timeout_s`` is no number of seconds.
            TypeError: arguments or result that JSON cannot hold.
        """
        self._check_open()
        label = name or name_of(work)
        check_said(label, "call(name=)")
        arguments = written(self, {**({"args": args} if args else {}), **kwargs}, f"the arguments of {label}") or None
        wanted = Wanted(
            call_id=self._next_id(),
            name=label,
            work=work,
            args=args,
            kwargs=kwargs,
            arguments=arguments,
            idempotent=bool(idempotent),
            timeout_s=timeout_s,
            on=on,
        )
        return await make_call(self, wanted)

    def _next_id(self) -> str:
        return (current_branch.get() or self._branch).next_id()

    async def use(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        """Make a call of a tool inside of another call, with what a model could give it.

        Where the tool demands it a person is asked first. The run stays in memory while it waits for the answer: what
        makes this call is itself in the middle of something.

        Raises:
            InvalidArguments: the arguments do not fit.
            ToolFailed: a person denied the call, or nobody answered in time.
            what `call` raises.
        """
        self._check_open()
        values = tool.check(arguments)
        call_id = self._next_id()
        if tool.needs_approval(arguments):
            await approved(self, call_id, tool, arguments)
        wanted = Wanted(
            call_id=call_id,
            name=tool.name,
            work=tool.work,
            kwargs=values,
            arguments=written(self, arguments, f"the arguments of {tool.name}"),
            idempotent=tool.idempotent,
            timeout_s=tool.timeout_s,
            on=None if tool.isolation == "auto" else tool.isolation,
            exclusive=tool.exclusive,
        )
        return await make_call(self, wanted)

    def _around(self) -> Scope:
        """The innermost scope of this run that the code runs in."""
        here = scope = current_scope()
        while scope is not None and scope is not self.scope:
            scope = scope.parent
        return self.scope if scope is None or here is None else here

    @property
    def held_by(self) -> tuple[str, ...]:
        """Names of the exclusive calls that have not really ended, some of them given up perhaps."""
        return tuple(self._exclusive.values())

    def released(self, fn: Callable[[], object]) -> None:
        """Call it once no exclusive call is left: on the run's loop, at once if there is none. For the host."""
        if self._exclusive:
            self._on_released.append(fn)
        else:
            fn()

    def _release(self, call_id: str) -> None:
        self._exclusive.pop(call_id, None)
        while self._on_released and not self._exclusive:
            self._on_released.pop()()

    # ── branches, children, processes ────────────────────────────────────────────────────────────────────────────

    def spawn(
        self,
        work: Callable[..., Any] | Coroutine[Any, Any, Any],
        *args: Any,
        on: Placement | None = None,
        name: str | None = None,
    ) -> Handle[Any]:
        """Start a branch of the run; await the handle for its result. At the end the run joins what was not awaited.

        Parameters:
            work: an async function, a sync one (it gets a thread), or a coroutine.
            args: for a function.
            on: default: ``loop`` for async functions and coroutines, else ``thread``.

        Raises:
            RunClosed, ScopeClosed: the run has ended, or is being stopped; a coroutine is closed then.
            TypeError: what cannot be called, or a coroutine with arguments or for a thread or process.
        """
        if isinstance(work, CoroutineType):
            return self._spawn_coroutine(work, args, on, name)
        self._check_open()
        if not callable(work):
            raise TypeError(f"spawn() takes a function or a coroutine, not {type(work).__name__}")
        where: Placement = on or placement_of(work)
        label = name or name_of(work)
        bound = functools.partial(work, *args)
        counted = int(where != "process")
        self._lines.add(counted)  # before it begins: an eager task may have ended when `spawn` returns

        def ended() -> None:
            """Told where it ran, and by its handle, as it may never have begun: the first counts. On the run's loop."""
            nonlocal counted
            left, counted = counted, 0
            self._lines.remove(left)

        tell = ended if where == "loop" else functools.partial(self._soon, ended)
        try:
            handle: Handle[Any] = self.scope.spawn(
                placed(bound, Branch(self._next_id()), where, tell), on=where, name=label
            )
        except BaseException:
            ended()
            raise
        handle.when_done(ended)
        self._spawned.append(handle)
        return handle

    def _spawn_coroutine(
        self, work: Coroutine[Any, Any, Any], args: tuple[Any, ...], on: Placement | None, name: str | None
    ) -> Handle[Any]:
        async def awaited() -> Any:
            return await work

        try:
            if args or on not in (None, "loop"):
                raise TypeError(
                    "spawn() takes a coroutine without arguments and on the loop; pass the function instead"
                )
            handle = self.spawn(awaited, name=name or getattr(work, "__name__", "coroutine"))
        except BaseException:
            work.close()
            raise
        handle.when_done(work.close)  # one that was stopped before it began
        return handle

    def _soon(self, fn: Callable[[], object]) -> None:
        """Call it on the run's loop. From any thread; a loop that is closed needs it no more."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(fn)

    async def parallel(self, *branches: Callable[[], Any]) -> list[Any]:
        """Run branches at the same time; results in order. The first error stops the others and is raised.

        Raises:
            InvalidRequest: one of them cannot be called; none has begun then.
        """
        self._check_open()
        return await run_parallel(self, branches)

    async def delegate(self, agent: AgentLike | str, text: str, *, timeout_s: float | None = None) -> str:
        """Run a child agent inside this run and return its answer.

        Its calls are in this run's journal; it is stopped with this run, with a cause that names it. What it uses
        counts for this run too. In a later attempt a child that has ended is not run again.

        Parameters:
            agent: an agent, or the name of one that the host has.
            text: what it is asked.
            timeout_s: deadline, in seconds.

        Raises:
            RunFailed: the child raised an error (chained).
            RunInterrupted: the child's deadline was over, or its budget used up.
            AgentCycle: it is asked what it is being asked already, further up.
            LimitExceeded: children nested too deep.
            UnknownAgent.
        """
        self._check_open()
        definition = self._surroundings.find_agent(agent) if isinstance(agent, str) else as_agent(agent)
        check_said(text, "delegate()")
        return await self._delegate(
            ChildTask(agent=definition, text=text, branch=Branch(self._next_id()), deadline_s=timeout_s)
        )

    async def _delegate(self, task: ChildTask) -> str:
        check_chain(self, task)
        past = past_end(self, task)
        if past is None:
            return await run_child(self, task)
        if past.status == "completed":
            return past.text
        ending = RunFailed if past.status == "failed" else RunInterrupted
        raise ending(past.error or f"child {task.agent.name} {past.status}")

    async def map(
        self,
        work: Agent | str | Callable[[Any], Any],
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        concurrency: int = 16,
        name: str | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Do the same for each item, a bounded number at a time; the results, in the order of the items.

        Items are taken as there is room for them, so that those whose turn has not come cost nothing; while the log is
        behind, none begins. The first error stops the others and is raised, with a note that says which item it was.
        In a later attempt a replayable agent has to give the same items in the same order.

        Parameters:
            work: an `Agent`, or the name of one that the host has: it is asked each item (text), as a child. Any other
                function is called with the item: an async one in a task, a sync one in a thread.
            items: any number.
            concurrency: how many at a time. Of sync functions no more than the principal may have threads.
            name: for people; default: the name of the agent or function.
            timeout_s: deadline of each item, in seconds.

        Raises:
            what the function raises; what `delegate` raises.
            TimeoutError: the deadline of a function's item was over.
            TypeError, ValueError: ``concurrency`` is no whole number, or below 1.
            InvalidRequest: ``work`` cannot be called, or ``items`` gives no items.
        """
        self._check_open()
        if not isinstance(concurrency, int):
            raise TypeError(f"concurrency is {concurrency!r:.100}; it must be a whole number")
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}; it must be at least 1")
        if isinstance(work, str):
            work = self._surroundings.find_agent(work)
        return await run_map(self, work, items, concurrency=concurrency, name=name, timeout_s=timeout_s)

    async def process(self, argv: Sequence[str], **options: Any) -> Process:
        """Start a program in the run's scope; see `Scope.process`. Its whole tree dies with the run."""
        self._check_open()
        return await self.scope.process(argv, **options)

    # ── people ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def suspend(self, text: str) -> Answer:
        """Ask a person, and wait for the answer: ``answered`` with a text, or ``expired``.

        The question is durable before it is shown. A replayable agent may leave the memory meanwhile and goes on in a
        later attempt, from its journal; any other one waits here, and is interrupted when the host ends.

        Raises:
            Interrupted: the run is being stopped.
            LimitExceeded: the text is longer than a result may be.
        """
        self._check_open()
        check_said(text, "suspend()")
        written(self, text, "the words of the question")
        question_id = self._next_id()
        known = self._journal.answer(question_id)
        if known is not None:
            return known
        with self._deadlines_held():
            await self._surroundings.suspend(Question(question_id=question_id, kind="question", text=text))
            self._lines.remove()
            try:
                return await self._surroundings.answered(question_id)
            finally:
                self._lines.add()

    @contextlib.contextmanager
    def _deadlines_held(self) -> Iterator[None]:
        """While a person is asked the deadlines around this code, up to the whole run's, do not run."""
        root = self
        while root._parent is not None:
            root = root._parent
        with contextlib.ExitStack() as held:
            scope: Scope | None = self._around()
            while scope is not None:
                held.enter_context(scope.hold_deadline())
                scope = None if scope is root.scope else scope.parent
            yield

    # ── beside the run ───────────────────────────────────────────────────────────────────────────────────────────

    def background(self, work: Callable[[], Awaitable[Any]], *, name: str) -> None:
        """Start work that an interrupt of this run leaves alone; it dies with the session's `stop`.

        What it returns (text) comes back to the session as a message.

        Raises:
            RunClosed, Draining.
            Interrupted: the run is being stopped, and perhaps its session: nothing begins any more.
        """
        self._check_open()
        self.interrupt.check()
        self._surroundings.background(work, name=name)

    def _log_failure(self, what: str, error: BaseException) -> None:
        """Log an error of this run's code or tools, with whose it is; what is no failure is left out."""
        if isinstance(error, Exception) and not isinstance(error, ToolFailed):
            log_failure(_log, what, error, principal=self.principal, session=self.session_key, run_id=self.run_id)

    # ── for the host ─────────────────────────────────────────────────────────────────────────────────────────────

    async def work(self) -> None:
        """Do the agent's work, and join the branches that nobody awaited. The host spawns this."""
        current_branch.set(self._branch)
        await perform(self.agent, self)
        for handle in self._spawned:
            if not handle.done():
                await handle

    def close(self) -> None:
        """From now on nothing counts: every use raises `RunClosed`. From any thread."""
        self._closed = True
