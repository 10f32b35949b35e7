"""`Run`, the handle that agents get: their input and output, and their calls, subtasks, children and questions.

Everything started through the handle belongs to the run's scope and ends with it. After the run's end, every use raises
`RunClosed`, and late output of an abandoned thread does not count.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.agents.agent import Agent, AgentLike, as_agent
from holdfast.agents.call_context import CallContext
from holdfast.agents.children import ChildTask, delegate
from holdfast.agents.fanout import run_map, run_parallel
from holdfast.agents.journal import CallPath
from holdfast.agents.journaled_calls import CallRequest, make_call, written
from holdfast.agents.output import Emission, require_text
from holdfast.agents.placement import Placement, name_of
from holdfast.agents.questions import ask_user, require_approval
from holdfast.agents.subtasks import spawn_subtask
from holdfast.protocol.events import StepStarted
from holdfast.protocol.messages import Usage

if TYPE_CHECKING:
    from holdfast.agents.context import RunContext
    from holdfast.agents.tool import Tool
    from holdfast.protocol.messages import Answer, Entry, Message
    from holdfast.protocol.transcript import RunTranscript
    from holdfast.runtime import Handle, Interrupt, Process, Scope

__all__ = ["Call", "Run"]

_ONE_STEP = Usage(steps=1)


class Run:
    """One run of an agent. Agents get it as their argument.

    Call its methods on the run's event loop; `emit`, `now` and the properties also work on any thread of the run. An
    interrupt of the run cancels its tasks once and wakes its threads; see `interrupt`.

    Parameters:
        context: the state of the run, for integrations with other frameworks; agents do not need it.
    """

    __slots__ = ("context",)

    def __init__(self, context: RunContext) -> None:
        self.context = context

    # ── input ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.context.run_id

    @property
    def root_id(self) -> str:
        """The id of the top-level run, which the host started; it equals `run_id` unless this run is a child."""
        return self.context.root_id

    @property
    def agent(self) -> Agent:
        """The agent that runs."""
        return self.context.agent

    @property
    def principal(self) -> str:
        """The user that the session belongs to."""
        return self.context.principal

    @property
    def session_key(self) -> str:
        """The session's key, which the principal chose."""
        return self.context.session_key

    @property
    def session_id(self) -> str:
        """The session's id, unique on this host."""
        return self.context.session_id

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self.context.attempt

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages that the run took, oldest first."""
        return self.context.messages

    @property
    def text(self) -> str:
        """The content of the messages, oldest first, separated by line breaks."""
        return self.context.text

    @property
    def scope(self) -> Scope:
        """The scope that owns everything that the run starts."""
        return self.context.scope

    @property
    def interrupt(self) -> Interrupt:
        """The run's interrupt, with `check()`, `wait()`, `sleep()` and more."""
        return self.context.scope.interrupt

    @property
    def transcript(self) -> RunTranscript:
        """The run's transcript so far."""
        return self.context.transcript

    @property
    def replayed(self) -> int:
        """Calls of this attempt whose result came from the log."""
        return self.context.journal.replayed

    @property
    def usage(self) -> Usage:
        """The usage of the run and its children so far, including earlier attempts."""
        return self.context.usage

    async def take_steering(self) -> list[Message]:
        """Take the messages sent with the policy ``steer`` since the run began or this was last called, in order.

        They are durably part of this run, and are settled with it. An agent with a model takes them before each step.
        A child gets none.
        """
        context = self.context
        context.check_open()
        return await context.take_steering(context.step + 1)

    async def history(self) -> Sequence[Entry]:
        """Return the session's transcript before this run. It is empty for a child, except for a branch of a composite
        that inherits the history."""
        return await self.context.history()

    async def attachment(self, digest: str) -> bytes:
        """Return the bytes of an attachment of the run's principal. Raises `UnknownAttachment`."""
        return await self.context.host.attachment(digest)

    def now(self) -> float:
        """Return the seconds since the epoch. The time differs between attempts, so a replayable agent must read it in
        a `call`."""
        return self.context.now()

    # ── output ───────────────────────────────────────────────────────────────────────────────────────────────────

    def emit(self, text: str) -> Emission:
        """Emit a piece of the answer. It is accepted at once; ``await`` the result to wait while the log is behind.

        Callable from any thread of the run; in a thread, it blocks while the log is behind.

        Raises:
            RunClosed: the run has ended; the text does not count.
            LimitExceeded: the run emitted more than its limit.
            InvalidRequest: UTF-8 cannot encode the text (a lone surrogate).
            TypeError: not text.
        """
        return self.context.emit(text)

    async def step(self, label: str = "") -> int:
        """Begin a step, which is shown to readers; return its number, from 1."""
        require_text(label, "step()")
        context = self.context
        context.step += 1
        context.charge(_ONE_STEP)
        context.write(StepStarted(run_id=context.run_id, step=context.step, label=label, at=context.now()))
        await Emission(context.recorder)
        return context.step

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
        """Call a function and journal the call: its intent before it starts, its result when it has ended.

        In a later attempt, the result comes from the log and the function is not called. A function whose first
        parameter is named ``call`` gets a `Call`. Sync functions run in a thread.

        Parameters:
            work: the function.
            args, kwargs: the function's arguments; JSON-serializable, as they are stored. (Use `functools.partial` to
                pass keyword arguments that this method also has, such as ``name``.)
            name: display name; default: the function's name.
            idempotent: whether it may be called again after a crash that left no result.
            timeout_s: deadline, in seconds, at which the call is stopped; default: the host's ``tool_timeout_s``.
            on: where it runs; default: ``loop`` for async functions, else ``thread``.

        Raises:
            the function's own errors; in a later attempt, `CallFailed` in their place.
            TimeoutError: the deadline expired.
            NotDeterministic, RunClosed.
            InvalidRequest: ``timeout_s`` is not a number of seconds.
            TypeError: JSON cannot represent the arguments or the result.
        """
        context = self.context
        context.check_open()
        label = name or name_of(work)
        require_text(label, "call(name=)")
        given = {**({"args": args} if args else {}), **kwargs}
        arguments = written(context, given, f"the arguments of {label}") or None
        wanted = CallRequest(
            name=label,
            work=work,
            args=args,
            kwargs=kwargs,
            arguments=arguments,
            idempotent=bool(idempotent),
            timeout_s=timeout_s,
            on=on,
        )
        return await make_call(Call(self, context.next_id()), wanted)

    async def call_tool(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        """Call a tool inside another call, with arguments as a model passes them.

        If the tool requires approval, a person is asked first. The run stays in memory while it waits for the answer,
        because the outer call is still running.

        Raises:
            InvalidArguments: the arguments do not match the tool's parameters.
            ToolFailed: a person denied the call, or the approval request expired.
            the errors of `call`.
        """
        context = self.context
        context.check_open()
        values = tool.check(arguments)
        call_id = context.next_id()
        if tool.needs_approval(arguments):
            await require_approval(context, call_id, tool, arguments)
        wanted = CallRequest(
            name=tool.name,
            work=tool.work,
            kwargs=values,
            arguments=written(context, arguments, f"the arguments of {tool.name}"),
            idempotent=tool.idempotent,
            timeout_s=tool.timeout_s,
            on=None if tool.isolation == "auto" else tool.isolation,
            exclusive=tool.exclusive,
        )
        return await make_call(Call(self, call_id), wanted)

    @property
    def exclusive_calls(self) -> tuple[str, ...]:
        """The names of the exclusive calls that are still running, including abandoned ones."""
        return self.context.exclusive_calls.names

    def when_exclusive_calls_end(self, fn: Callable[[], object]) -> None:
        """Call `fn` on the run's loop when all exclusive calls have ended, or at once if none is open."""
        self.context.exclusive_calls.when_ended(fn)

    # ── subtasks, children, processes ────────────────────────────────────────────────────────────────────────────

    def spawn(
        self,
        work: Callable[..., Any] | Coroutine[Any, Any, Any],
        *args: Any,
        on: Placement | None = None,
        name: str | None = None,
    ) -> Handle[Any]:
        """Start work that runs concurrently with the agent; await the handle for its result. When the agent ends, the
        run joins all work that was not awaited.

        Parameters:
            work: an async function, a sync one (it runs in a thread), or a coroutine.
            args: the function's arguments; none for a coroutine.
            on: default: ``loop`` for async functions and coroutines, else ``thread``.

        Raises:
            RunClosed, ScopeClosed: the run has ended, or is being stopped; a coroutine is closed then.
            TypeError: not callable, or a coroutine with arguments or for a thread or process.
        """
        return spawn_subtask(self.context, work, args, on, name)

    async def parallel(self, *branches: Callable[[], Any]) -> list[Any]:
        """Run functions concurrently; return the results in order. The first error stops the others and is raised.

        Raises:
            InvalidRequest: one of them is not callable; none is started.
        """
        self.context.check_open()
        return await run_parallel(self.context, branches)

    async def delegate(self, agent: AgentLike | str, text: str, *, timeout_s: float | None = None) -> str:
        """Run a child agent inside this run and return its answer.

        The child's calls are in this run's journal, and its usage counts for this run too. Stopping this run also stops
        the child, with a cause that names this run. In a later attempt, a child that has ended does not run again.

        Parameters:
            agent: an agent, or the name of one of the host's agents.
            text: the request.
            timeout_s: deadline, in seconds.

        Raises:
            RunFailed: the child raised an error (chained).
            RunInterrupted: the child exceeded its deadline or used up its budget.
            AgentCycle: delegation cycle: a parent run already has this request in progress with the same agent.
            LimitExceeded: children are nested too deep.
            UnknownAgent.
        """
        context = self.context
        context.check_open()
        definition = context.host.find_agent(agent) if isinstance(agent, str) else as_agent(agent)
        require_text(text, "delegate()")
        task = ChildTask(agent=definition, text=text, branch=CallPath(context.next_id()), deadline_s=timeout_s)
        return await delegate(context, task)

    async def map(
        self,
        work: Agent | str | Callable[[Any], Any],
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        concurrency: int = 16,
        name: str | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Run a function or an agent for each item, a bounded number at a time; return the results in item order.

        An item is taken only when there is room for it, so waiting items cost nothing; while the log is behind, none is
        started. The first error stops the others and is raised, with a note that names its item. In a later attempt, a
        replayable agent must pass the same items in the same order.

        Parameters:
            work: an `Agent`, or the name of one of the host's agents, which runs as a child with each item (text) as
                its request; or a function of an item: an async one runs in a task, a sync one in a thread.
            items: a sync or async iterable.
            concurrency: maximum number of concurrent items. For sync functions, the principal's thread limit also
                applies.
            name: display name; default: the name of the agent or function.
            timeout_s: deadline of each item, in seconds.

        Raises:
            the errors of the function or of `delegate`.
            TimeoutError: the function exceeded the deadline for an item.
            TypeError, ValueError: ``concurrency`` is not a whole number, or below 1.
            InvalidRequest: ``work`` is not callable, or ``items`` not iterable.
        """
        context = self.context
        context.check_open()
        if not isinstance(concurrency, int):
            raise TypeError(f"concurrency is {concurrency!r:.100}; it must be a whole number")
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}; it must be at least 1")
        if isinstance(work, str):
            work = context.host.find_agent(work)
        return await run_map(context, work, items, concurrency=concurrency, name=name, timeout_s=timeout_s)

    async def process(self, argv: Sequence[str], **options: Any) -> Process:
        """Start a program in the run's scope; see `Scope.process`. Its whole tree dies with the run."""
        self.context.check_open()
        return await self.context.scope.process(argv, **options)

    # ── people, and work that outlives the run ───────────────────────────────────────────────────────────────────

    async def ask_user(self, text: str) -> Answer:
        """Ask a person and wait for the answer: ``answered`` with a text, or ``expired``.

        The question is durable before it is shown. Meanwhile, a replayable agent may be unloaded, and resumes from its
        journal in a later attempt. Any other agent waits here, and is interrupted when the host ends.

        Raises:
            Interrupted: the run is being stopped.
            LimitExceeded: the text exceeds the size limit of results.
        """
        self.context.check_open()
        return await ask_user(self.context, text)

    def background(self, work: Callable[[], Awaitable[Any]], *, name: str) -> None:
        """Start work that survives an interrupt of this run; the session's `stop` ends it.

        If it returns text, the text is sent to the session as a message.

        Raises:
            RunClosed, Draining.
            Interrupted: the run, and perhaps its session, is being stopped.
        """
        context = self.context
        context.check_open()
        context.interrupt.check()
        context.host.background(work, name=name)


class Call(CallContext):
    """The running call, for functions that stream output or need an idempotency key for external services.

    Parameters:
        run: the run it belongs to. Calls through `Run.call` are in the log and the journal, but not in the transcript.
            Work that the function starts in ``current_scope()`` ends with the call; work in ``run.scope`` ends with the
            run.
        call_id: the same in every attempt: the idempotency key for external services.
    """

    __slots__ = ("run",)

    def __init__(self, run: Run, call_id: str) -> None:
        super().__init__(run.context, call_id)
        self.run = run
