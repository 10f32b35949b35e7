"""The handle that a running agent works with: its input, its output, its calls, branches and children.

Everything that is started through the handle belongs to the run's scope and ends with it. After the run's end every use
raises `RunClosed`, and nothing that a leftover thread emits counts any more.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, assert_never

import msgspec

from holdfast.agents.agent import Agent, AgentLike, as_agent, perform
from holdfast.agents.journal import Branch, Journal, Recorder, current_branch
from holdfast.agents.tool import wants_call
from holdfast.errors import CallFailed, Interrupted, LimitExceeded, RunClosed, RunFailed, RunInterrupted, told
from holdfast.protocol.events import (
    ChildFinished,
    ChildStarted,
    StepStarted,
    TextDelta,
    ToolFinished,
    ToolOutput,
    ToolStarted,
)
from holdfast.protocol.messages import Answer, Entry, Message, Question, Usage, check_text
from holdfast.protocol.transcript import RunTranscript

if TYPE_CHECKING:
    from holdfast.clock import Clock
    from holdfast.runtime import Handle, Interrupt, Process, Scope

__all__ = ["Call", "Run", "RunLimits", "Surroundings"]

Placement = Literal["loop", "thread", "process"]
Written = TextDelta | StepStarted | ToolStarted | ToolOutput | ToolFinished

_HANDED_LIMIT = 1024
_BEHIND_POLL_S = 0.005


class RunLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a run.

    Parameters:
        call_s: deadline of a call that names none, in seconds.
        answer_limit_bytes: characters of text that a run may emit in all.
        result_limit_bytes: size of the JSON of one call's arguments or result.
        depth: how deep `delegate` may nest.
    """

    call_s: float = 60.0
    answer_limit_bytes: int = 16_000_000
    result_limit_bytes: int = 1_000_000
    depth: int = 8


class Surroundings(Protocol):
    """What the host lends to a run."""

    clock: Clock

    async def history(self) -> Sequence[Entry]:
        """The session's transcript before this run."""
        ...

    def find_agent(self, name: str) -> Agent:
        """The host's agent of that name. Raises `UnknownAgent`."""
        ...

    def background(self, work: Callable[[], Awaitable[Any]], *, name: str) -> None:
        """Start work that outlives the run and belongs to the session's activation."""
        ...

    @property
    def steering(self) -> bool:
        """Whether a ``steer`` message may wait for this run."""
        ...

    async def steer(self, step: int) -> Sequence[Message]:
        """Take what was steered to the run, before the step of that number. Durable when it returns."""
        ...

    async def suspend(self, question: Question) -> None:
        """Ask a person: the question is open, durably, when this returns. A known id has no effect."""
        ...

    async def answered(self, question_id: str) -> Answer:
        """Wait for the answer to an open question; ``expired`` is one too."""
        ...

    def at_rest(self, resting: bool) -> None:
        """Tell that all lines of the run and its children wait for people only, or do so no more."""
        ...

    async def attachment(self, digest: str) -> bytes:
        """The bytes of an attachment of the run's principal. Raises `UnknownAttachment`."""
        ...


class Emission:
    """What `Run.emit` gives: the text is taken already; awaiting it waits while the log is behind."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __await__(self) -> Generator[Any, None, None]:
        if self._recorder.behind:
            yield from self._recorder.room().__await__()


class Call:
    """The running call, for functions that want to stream output, or to name the call to outside services.

    Parameters:
        run: the run it belongs to. What it calls through `Run.call` is in the log and the journal, but no part of the
            transcript; what it starts with ``current_scope()`` ends with the call, with ``run.scope`` with the run.
        call_id: the same in every attempt: the idempotency key to give to outside services.
    """

    __slots__ = ("call_id", "run")

    def __init__(self, run: Run, call_id: str) -> None:
        self.run = run
        self.call_id = call_id

    def output(self, text: str) -> Emission:
        """Stream a piece of the call's output. From any thread. Raises as `Run.emit` does."""
        _check_text(text, "output()")
        run = self.run
        run._write(ToolOutput(run_id=run.root_id, call_id=self.call_id, text=text, at=run.now()))
        return Emission(run._recorder)


class Run:
    """One run of an agent. Made by the host (or by `delegate`); agents get it as their argument.

    All methods may be called from the run's event loop; `emit`, `now` and the properties from any thread of the run.
    An interrupt of the run cancels its tasks once and wakes its threads; see `interrupt`.
    """

    __slots__ = (
        "_branch",
        "_closed",
        "_depth",
        "_handed",
        "_hop_pending",
        "_journal",
        "_limits",
        "_loop",
        "_recorder",
        "_spawned",
        "_steps",
        "_surroundings",
        "_thread",
        "_tool_calls",
        "agent",
        "attempt",
        "messages",
        "principal",
        "root_id",
        "run_id",
        "scope",
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
        messages: tuple[Message, ...],
        attempt: int,
        scope: Scope,
        recorder: Recorder,
        journal: Journal,
        surroundings: Surroundings,
        limits: RunLimits,
        branch: Branch,
        depth: int = 0,
    ) -> None:
        self.run_id = run_id
        self.root_id = root_id
        self.agent = agent
        self.principal = principal
        self.session_key = session_key
        self.messages = messages
        self.attempt = attempt
        self.scope = scope
        self.transcript = RunTranscript(run_id, messages)
        self._recorder = recorder
        self._journal = journal
        self._surroundings = surroundings
        self._limits = limits
        self._branch = branch
        self._depth = depth
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._handed: deque[Written] = deque()
        self._hop_pending = False
        self._spawned: list[Handle[Any]] = []
        self._closed = False
        self._steps = 0
        self._tool_calls = 0

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
        """What the run used so far."""
        return Usage(steps=self._steps, tool_calls=self._tool_calls) if self._steps or self._tool_calls else _NOTHING

    async def history(self) -> Sequence[Entry]:
        """The session's transcript before this run."""
        return await self._surroundings.history()

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
        _check_text(text, "emit()")
        if self.transcript.size > self._limits.answer_limit_bytes:
            raise LimitExceeded(
                f"the run said more than {self._limits.answer_limit_bytes:,} characters",
                hint="write large output to a file and name it",
            )
        self._write(TextDelta(run_id=self.run_id, text=text, at=self.now()))
        return Emission(self._recorder)

    async def step(self, label: str = "") -> int:
        """Begin a step, shown to readers; returns its number, from 1."""
        _check_text(label, "step()")
        self._steps += 1
        self._write(StepStarted(run_id=self.run_id, step=self._steps, label=label, at=self.now()))
        await Emission(self._recorder)
        return self._steps

    def _check_open(self) -> None:
        if self._closed:
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
            if not self._closed:
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
            TypeError: arguments or result that JSON cannot hold.
        """
        self._check_open()
        label = name or _name(work)
        _check_text(label, "call(name=)")
        branch = current_branch.get() or self._branch
        call_id = branch.next_id()
        arguments = self._plain({**({"args": args} if args else {}), **kwargs}, f"the arguments of {label}") or None
        past = self._journal.past(call_id, label, arguments)
        started = ToolStarted(
            run_id=self.root_id,
            call_id=call_id,
            name=label,
            arguments=arguments,
            idempotent=bool(idempotent),
            at=self.now(),
        )
        if past is not None:
            self.transcript.feed(started)
            self.transcript.feed(past)
            if past.status == "error":
                raise CallFailed(past.error or f"{label} failed")
            return past.result
        self._tool_calls += 1
        self._write(started)
        self._journal.begun(started)
        await self._recorder.written()
        status: Literal["ok", "error", "interrupted"] = "interrupted"
        result: Any = None
        error: str | None = None
        try:
            outcome = await self._in_scope(work, args, kwargs, label, call_id, timeout_s, on)
            result = self._plain(outcome, f"the result of {label}")
            status = "ok"
        except Exception as problem:
            status, error = "error", told(problem)
            raise
        finally:
            if not self._closed:
                finished = ToolFinished(
                    run_id=self.root_id, call_id=call_id, status=status, result=result, error=error, at=self.now()
                )
                self._write(finished)
                self._journal.ended(finished)
        return result

    async def _in_scope(
        self,
        work: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str,
        call_id: str,
        timeout_s: float | None,
        on: Placement | None,
    ) -> Any:
        if wants_call(work):
            args = (Call(self, call_id), *args)
        where: Placement = on or _placement(work)
        deadline_s = self._limits.call_s if timeout_s is None else timeout_s
        scope = self.scope.child(name, deadline_s=deadline_s)
        bound = functools.partial(work, *args, **kwargs)
        try:
            async with scope:
                outcome = await scope.spawn(_placed(bound, Branch(call_id), where), on=where, name=name)
        except Interrupted as interrupted:
            if interrupted.cause.kind == "deadline" and not self.interrupt.triggered:
                raise TimeoutError(f"{name} did not end within {deadline_s:g} s") from None
            raise
        return outcome

    def _plain(self, value: Any, what: str) -> Any:
        try:
            encoded = msgspec.json.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise TypeError(f"{what} cannot be written down as JSON: {error}") from None
        if len(encoded) > self._limits.result_limit_bytes:
            raise LimitExceeded(
                f"{what} take {len(encoded):,} bytes of JSON, more than {self._limits.result_limit_bytes:,}",
                hint="write large data to a file and pass its name",
            )
        return msgspec.json.decode(encoded)

    # ── branches, children, processes ────────────────────────────────────────────────────────────────────────────

    def spawn(
        self, work: Callable[..., Any], *args: Any, on: Placement | None = None, name: str | None = None
    ) -> Handle[Any]:
        """Start a branch of the run; await the handle for its result. At the end the run joins what was not awaited.

        Parameters:
            work: an async function, or a sync one (it gets a thread).
            on: default: ``loop`` for async functions, else ``thread``.
        """
        self._check_open()
        parent = current_branch.get() or self._branch
        where: Placement = on or _placement(work)
        label = name or _name(work)
        bound = functools.partial(work, *args)
        handle: Handle[Any] = self.scope.spawn(_placed(bound, Branch(parent.next_id()), where), on=where, name=label)
        self._spawned.append(handle)
        return handle

    async def parallel(self, *branches: Callable[[], Any]) -> list[Any]:
        """Run branches at the same time; results in order. The first error stops the others and is raised."""
        self._check_open()
        parent = current_branch.get() or self._branch
        lines = [Branch(parent.next_id()) for _ in branches]
        async with self.scope.child("parallel") as scope:
            handles: list[Handle[Any]] = []
            for number, (work, line) in enumerate(zip(branches, lines, strict=True), 1):
                where = _placement(work)
                handles.append(scope.spawn(_placed(work, line, where), on=where, name=f"{_name(work)} {number}"))
            return [await handle for handle in handles]

    async def delegate(self, agent: AgentLike | str, text: str, *, timeout_s: float | None = None) -> str:
        """Run a child agent inside this run and return its answer.

        Its calls are in this run's journal; it is stopped with this run, with a cause that names it.

        Raises:
            RunFailed: the child raised an error (chained).
            RunInterrupted: the child's deadline was over.
            LimitExceeded: children nested too deep.
        """
        self._check_open()
        if self._depth >= self._limits.depth:
            raise LimitExceeded(
                f"agents are nested {self._depth} deep", hint="a child may not go on delegating for ever"
            )
        definition = self._surroundings.find_agent(agent) if isinstance(agent, str) else as_agent(agent)
        _check_text(text, "delegate()")
        line = Branch((current_branch.get() or self._branch).next_id())
        scope = self.scope.child(definition.name, deadline_s=timeout_s)
        child = Run(
            run_id=line.path,
            root_id=self.root_id,
            agent=definition,
            principal=self.principal,
            session_key=self.session_key,
            messages=(Message(message_id=line.path, seq=0, content=text),),
            attempt=self.attempt,
            scope=scope,
            recorder=self._recorder,
            journal=self._journal,
            surroundings=self._surroundings,
            limits=self._limits,
            branch=line,
            depth=self._depth + 1,
        )
        self._recorder.write(
            ChildStarted(run_id=self.run_id, child_id=line.path, agent=definition.name, text=text, at=self.now())
        )
        status: Literal["completed", "failed", "interrupted"] = "interrupted"
        error: str | None = None
        try:
            async with scope:
                await scope.spawn(child.work(), name=definition.name)
            status = "completed"
        except Interrupted as interrupted:
            if self.interrupt.triggered:
                raise
            raise RunInterrupted(f"child {definition.name} was interrupted: {interrupted.cause.kind}") from None
        except Exception as problem:
            status, error = "failed", told(problem)
            raise RunFailed(f"child {definition.name} failed: {error}") from problem
        finally:
            child.close()
            if not self._closed:
                self._recorder.write(
                    ChildFinished(
                        run_id=self.run_id,
                        child_id=line.path,
                        status=status,
                        text=child.transcript.text,
                        error=error,
                        at=self.now(),
                    )
                )
        return child.transcript.text

    async def process(self, argv: Sequence[str], **options: Any) -> Process:
        """Start a program in the run's scope; see `Scope.process`. Its whole tree dies with the run."""
        self._check_open()
        return await self.scope.process(argv, **options)

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


_NOTHING = Usage()


def _check_text(text: object, what: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{what} takes text (str), not {type(text).__name__}")
    if not text.isascii():
        check_text(text)


def _function(work: Callable[..., Any]) -> Callable[..., Any]:
    return work.func if isinstance(work, functools.partial) else work


def _name(work: Callable[..., Any]) -> str:
    function = _function(work)
    return str(getattr(function, "__name__", type(function).__name__))


def _placement(work: Callable[..., Any]) -> Placement:
    return "loop" if inspect.iscoroutinefunction(_function(work)) else "thread"


def _placed(work: Callable[[], Any], branch: Branch, where: Placement) -> Callable[[], Any]:
    """`work` with its own numbering of calls; in another process it makes none."""
    match where:
        case "process":
            return work
        case "loop":

            async def on_loop() -> Any:
                current_branch.set(branch)
                return await work()

            return on_loop
        case "thread":

            def in_thread() -> Any:
                current_branch.set(branch)
                return work()

            return in_thread
        case _:
            assert_never(where)
