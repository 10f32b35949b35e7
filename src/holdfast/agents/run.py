"""`Run`, the handle with which an agent reads input, emits output, makes calls, starts work and asks people questions.

Everything started through the handle belongs to the run's scope and ends with that scope. After the run has ended, the
handle's methods raise `RunClosed`, and late output of an abandoned thread is discarded.
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
from holdfast.agents.programs import start_program
from holdfast.agents.questions import ask_user, require_approval
from holdfast.agents.subtasks import spawn_subtask
from holdfast.agents.tool import Tool
from holdfast.protocol.events import StepStarted
from holdfast.protocol.messages import Usage

if TYPE_CHECKING:
    from holdfast.agents.context import RunContext
    from holdfast.protocol.messages import Answer, Entry, Message
    from holdfast.protocol.transcript import RunTranscript
    from holdfast.runtime import Handle, Interrupt, Process, Scope

__all__ = ["Call", "Run"]

_ONE_STEP = Usage(steps=1)


class Run:
    """One run of an agent. The agent's function receives the `Run` as its argument.

    Call the methods on the run's event loop; `emit`, `now` and the properties also work on any thread of the run. When
    the run is interrupted, each of its tasks is cancelled once and its threads are woken; see `interrupt`.

    Parameters:
        context: state of the run, for integrations with other frameworks; agents do not need the context.
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
        """The number of results that this attempt has taken from the log."""
        return self.context.journal.replayed

    @property
    def usage(self) -> Usage:
        """The usage of the run and its children so far, including earlier attempts."""
        return self.context.usage

    async def take_steering(self) -> list[Message]:
        """Take the messages sent with the policy ``steer`` since the run began or since the previous call, in order.

        The messages are durably part of this run and are settled when the run is settled. For an agent with a model,
        the built-in loop takes the messages before each step. For a child run, the list is empty.
        """
        context = self.context
        context.check_open()
        return await context.take_steering(context.step + 1)

    async def history(self) -> Sequence[Entry]:
        """Return the session's transcript before this run. For a child run, the transcript is empty unless the child is
        a branch of a composite agent and inherits the history."""
        return await self.context.history()

    async def attachment(self, digest: str) -> bytes:
        """Return an attachment's bytes. Raises `UnknownAttachment` if the run's principal has no such attachment."""
        return await self.context.host.attachment(digest)

    async def use_workspace(self) -> None:
        """Tie the session to hosts that share this host's workspaces, before a function uses files of this machine.

        From then on, only hosts with the same ``workspace_pool`` continue the session. Holdfast's own tools, and
        programs behind walls, do this themselves before they write. The call has no effect if no other host can use the
        store, or if this host declares no pool.

        Raises:
            RunClosed: if the run has ended.
        """
        self.context.check_open()
        await self.context.host.use_workspace()

    def now(self) -> float:
        """Return the current time, in seconds since the epoch.

        The time differs between attempts, so a replayable agent must read the time in a `call`.
        """
        return self.context.now()

    # ── output ───────────────────────────────────────────────────────────────────────────────────────────────────

    def emit(self, text: str) -> Emission:
        """Emit a piece of the answer, from any thread of the run.

        On the run's event loop, the text is accepted at once; ``await`` the result to wait while the log is behind. In
        a thread, this method blocks while the log is behind.

        Raises:
            RunClosed: if the run has ended; the text is discarded.
            LimitExceeded: if the run has already emitted more text than the limit allows.
            InvalidRequest: if UTF-8 cannot encode the text because it contains a lone surrogate.
            TypeError: if ``text`` is not a str.
        """
        return self.context.emit(text)

    async def step(self, label: str = "") -> int:
        """Begin a step and return its number, from 1. Readers of the event stream see the step and its label."""
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
        """Call a function and journal the call: the intent before the function starts, the result after it has ended.

        If an earlier attempt of the run recorded a result, that result is returned and the function is not called. A
        function whose first parameter is named ``call`` receives a `Call`.

        Parameters:
            work: function to call.
            args, kwargs: arguments of the function, which are stored and must be JSON-serializable. Use
                `functools.partial` to pass keyword arguments that this method also has, such as ``name``.
            name: display name of the call; None means the function's name.
            idempotent: whether the function may be called again after a crash that left no result.
            timeout_s: deadline in seconds, at which the call is stopped; None means the host's ``tool_timeout_s``.
            on: where the function runs; None means ``loop`` for async functions and ``thread`` for sync functions.

        Raises:
            Exception: any error that the function raises.
            CallFailed: if the function raised an error in an earlier attempt of the run.
            TimeoutError: if the deadline expires.
            NotDeterministic: if an earlier attempt made a different call at this point.
            RunClosed: if the run has ended.
            InvalidRequest: if ``timeout_s`` is not a number of seconds.
            TypeError: if `work` cannot be called, or if JSON cannot represent the arguments or the result.
        """
        context = self.context
        context.check_open()
        if not callable(work):
            raise TypeError(_not_callable(work))
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
        """Call a tool from the function of another call, with arguments in the form in which a model passes them.

        If the tool requires approval or the call asks for access, a person is asked first. The run stays in memory
        while the tool call waits for the answer, because the outer call is still running.

        Raises:
            InvalidArguments: if the arguments do not match the tool's parameters.
            ToolFailed: if a person denies the call, or the approval request expires.
            Exception: any error that `call` raises.
        """
        context = self.context
        context.check_open()
        values = tool.check(arguments)
        call_id = context.next_id()
        call = Call(self, call_id)
        call.approved = await require_approval(context, call_id, tool, arguments)
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
        return await make_call(call, wanted)

    @property
    def exclusive_calls(self) -> tuple[str, ...]:
        """The names of the exclusive calls that are still running, including abandoned ones."""
        return self.context.exclusive_calls.names

    def when_exclusive_calls_end(self, fn: Callable[[], object]) -> None:
        """Call `fn` on the run's loop when all exclusive calls have ended, or at once if all have ended already."""
        self.context.exclusive_calls.when_ended(fn)

    # ── subtasks, children, processes ────────────────────────────────────────────────────────────────────────────

    def spawn(
        self,
        work: Callable[..., Any] | Coroutine[Any, Any, Any],
        *args: Any,
        on: Placement | None = None,
        name: str | None = None,
    ) -> Handle[Any]:
        """Start work that runs concurrently with the agent, and return a handle that can be awaited for the result.

        When the agent ends, the run waits for all work that the agent did not await.

        Parameters:
            work: async function, sync function or coroutine to run.
            args: arguments of the function; a coroutine takes no arguments.
            on: where the work runs; None means ``loop`` for async functions and coroutines, and ``thread`` for sync
                functions.
            name: display name of the work; None means the name of the function or coroutine.

        Raises:
            RunClosed, ScopeClosed: if the run has ended or is being stopped; a coroutine is then closed.
            TypeError: if ``work`` is not callable, or if a coroutine is given arguments, a thread or a process.
        """
        return spawn_subtask(self.context, work, args, on, name)

    async def parallel(self, *branches: Callable[[], Any]) -> list[Any]:
        """Run functions concurrently and return their results in the order of the functions.

        The first error stops the other functions and is raised.

        Raises:
            InvalidRequest: if a branch is not callable; in that case, no function is started.
        """
        self.context.check_open()
        return await run_parallel(self.context, branches)

    async def delegate(self, agent: AgentLike | str, text: str, *, timeout_s: float | None = None) -> str:
        """Run a child agent inside this run and return its answer.

        The child's calls are recorded in this run's journal, and the child's usage also counts as usage of this run.
        Stopping this run also stops the child, with a cause that names this run. In a later attempt, a child that has
        ended does not run again.

        Parameters:
            agent: an agent, or the name of one of the host's agents.
            text: request for the child.
            timeout_s: deadline of the child, in seconds; None sets no deadline.

        Raises:
            RunFailed: if the child raises an error. The error is chained, unless it was raised in an earlier attempt.
            RunInterrupted: if the child exceeds its deadline or uses up its budget.
            AgentCycle: if this run or a run above it is already handling the same request with the same agent.
            LimitExceeded: if the child would exceed the maximum nesting depth.
            UnknownAgent: if the host has no agent with this name.
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
        """Run a function or an agent for each item, with bounded concurrency; return the results in item order.

        The next item is taken from ``items`` only when its work can start, so waiting items use no memory. While the
        log is behind, new items wait. The first error stops the work on the other items and is raised, with a note that
        names the failed item. In a later attempt of the run, a replayable agent must pass the same items in the same
        order.

        Parameters:
            work: an agent or a function. An `Agent`, or the name of one of the host's agents, runs as a child with the
                item's text as its request. An async function is called with the item in a task, a sync function in a
                thread.
            items: sync or async iterable of the items.
            concurrency: maximum number of concurrent items. For sync functions, the principal's thread limit also
                applies.
            name: display name; None means the name of the agent or function.
            timeout_s: deadline of each item, in seconds; None sets no deadline.

        Raises:
            Exception: any error that the function or `delegate` raises.
            TimeoutError: if the function exceeds the deadline for an item.
            TypeError: if ``concurrency`` is not a whole number.
            ValueError: if ``concurrency`` is below 1.
            InvalidRequest: if ``work`` is not callable or ``items`` is not iterable.
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

    async def process(self, argv: Sequence[str], *, sandbox: object = None, **options: Any) -> Process:
        """Start a program in the run's scope; see `Scope.process`. Its process tree does not outlive the run.

        A program that a call starts with this method outlives the call; `Call.process` starts one that does not.

        Parameters:
            sandbox: a `holdfast.tools.Sandbox`: the program runs behind the session's wall, and may change the folder
                ``cwd``, which must be given. None runs it with all rights of this process's user.

        Raises:
            NotSupported: if this machine cannot build the wall.
            ConfigurationError: if a path or a secret of the sandbox is missing.
        """
        self.context.check_open()
        return await start_program(self.context, self.context.scope, argv, sandbox, options)

    # ── people, and work that outlives the run ───────────────────────────────────────────────────────────────────

    async def ask_user(self, text: str) -> Answer:
        """Ask a person a question and return the answer, whose decision is ``answered``, with a text, or ``expired``.

        The question is durable before it is shown. While the question is open, the run of a replayable agent may be
        unloaded; a later attempt then resumes the run from its journal. The run of any other agent stays in memory and
        is interrupted when the host shuts down.

        Raises:
            Interrupted: if the run is being stopped.
            LimitExceeded: if the text exceeds the size limit of results.
        """
        self.context.check_open()
        return await ask_user(self.context, text)

    def background(self, work: Callable[[], Awaitable[Any]], *, name: str) -> None:
        """Start work that survives an interrupt of this run; the session's `stop` ends the work.

        If `work` returns text, the text is sent to the session as a message.

        Raises:
            RunClosed: if the run has ended.
            Draining: if the host is draining.
            LimitExceeded: if the principal already has the maximum number of background tasks.
            Interrupted: if the run is being stopped, alone or with its session.
        """
        context = self.context
        context.check_open()
        context.interrupt.check()
        context.host.background(work, name=name)


def _not_callable(work: object) -> str:
    if isinstance(work, Tool):
        return f"tool {work.name!r} is called by models; pass run.call() the function itself, without @tool"
    return f"run.call() needs a function, got {type(work).__name__}"


class Call(CallContext):
    """A running call, passed to functions that stream output, start programs or need an idempotency key.

    Parameters:
        run: run to which the call belongs. Calls through `Run.call` are in the log and the journal, but not in the
            transcript. What the function starts with `process` or in ``scope`` ends with the call; what it starts with
            ``run.process``, ``run.spawn`` or in ``run.scope`` ends with the run.
        call_id: id of the call, the same in every attempt; usable as the idempotency key for external services.
    """

    __slots__ = ("run",)

    def __init__(self, run: Run, call_id: str) -> None:
        super().__init__(run.context, call_id)
        self.run = run
