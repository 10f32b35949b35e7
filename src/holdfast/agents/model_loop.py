"""Drive the agent loop of `holdfast.protocol.agent_loop`: request answers, call tools, write the results.

Invariants
- A step's answer and a call's intent are durable before the call starts; calls that start together share one wait for
  the log.
- Each request to the model has its own scope: however the request ends, the connection closes with the scope.
- Each call has its own scope inside the step's scope. A call's result is reported after the call's scope has closed;
  later output is discarded. Even an interrupted step ends only after all its calls have their final results.
- One task drives the loop. It receives ended calls and answers through `_post`, on the run's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, assert_never

import msgspec

from holdfast.agents.call_context import CallContext, start_call
from holdfast.agents.compaction import (
    apply_summary,
    context_limit,
    estimated_tokens,
    split,
    split_for_summary,
    summary_of,
)
from holdfast.agents.journaled_calls import begin_call, end_call
from holdfast.agents.model import opened
from holdfast.agents.placement import placement_of
from holdfast.agents.results import to_model_text, truncate
from holdfast.agents.run_tools import toolbox
from holdfast.errors import HoldfastError, Interrupted, ModelFailed, ToolFailed, format_error
from holdfast.logs import redact
from holdfast.protocol.access import join
from holdfast.protocol.agent_loop import Ask, Effect, Exceeded, Finish, Loop, Refuse, SendModelRequest, StartCall, Steer
from holdfast.protocol.events import ReasoningDelta, StepFinished, StepStarted, ToolFinished, plain
from holdfast.protocol.messages import Access, Answer, Entry, Question
from holdfast.protocol.model import (
    EndPart,
    ModelMessage,
    ModelRequest,
    ReasoningPart,
    TextPart,
    ToolCall,
    UserMessage,
    conversation,
    with_user,
)
from holdfast.protocol.transcript import STEP_BREAK, last_agent_state, result_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.agents.agent import Agent
    from holdfast.agents.context import RunContext
    from holdfast.agents.model import Model
    from holdfast.agents.placement import Placement
    from holdfast.agents.tool import Tool
    from holdfast.runtime import Handle, Scope

__all__ = ["work_with_model"]

Status = Literal["ok", "error", "interrupted"]


async def work_with_model(context: RunContext, new_call: Callable[[str], CallContext]) -> None:
    """Run an agent that has a model.

    Parameters:
        new_call: function that is called with a call's id and returns the handle that the tool's function receives.

    Raises:
        ModelFailed: if a request to the model fails and no retry succeeds or is possible.
        ConfigurationError: if two tools have the same name.
        Interrupted: if the run is interrupted, for example because it exceeds its budget or a deadline.
    """
    agent = context.agent
    model = _model_of(agent)
    tools = toolbox(agent)
    messages = list(conversation(await _history(context)))
    for message in context.messages:
        messages = with_user(messages, UserMessage(content=message.content, attachments=message.attachments))
    loop = Loop(
        run_id=context.run_id,
        messages=messages,
        instructions=agent.instructions,
        tools=tools,
        settings=agent.settings,
        limits=agent.limits,
        request_of=lambda name, arguments: tools[name].request_of(context, arguments),
    )
    await _Driver(context, model, loop, tools, new_call).drive()


def _model_of(agent: Agent) -> Model:
    model = agent.model
    assert model is not None
    assert not isinstance(model, str)
    return model


async def _history(context: RunContext) -> Sequence[Entry]:
    """Return the history before the run, summarized if it is too long for the model."""
    history = await context.history()
    limit = context_limit(_model_of(context.agent), context.agent.limits)
    past = context.journal.step(context.run_id, 0)
    if past is None and (limit is None or estimated_tokens(conversation(history)) <= limit):
        return history
    old, recent = split(history)
    if not old or (limit is not None and estimated_tokens(conversation(recent)) > limit // 2):
        old, recent = history, ()
    summary = await _summarize(context, conversation(old), 0)
    entry = Entry(role="summary", content=summary, run_id=context.run_id, agent_state=last_agent_state(old))
    context.replaced_history = (entry, *recent)
    return context.replaced_history


async def _summarize(context: RunContext, messages: Sequence[ModelMessage], step: int) -> str:
    """Return a summary of the messages, from the journal if an earlier attempt recorded one.

    The summary is recorded as step number `step`, which is 0 or less.
    """
    past = context.journal.step(context.run_id, step)
    if past is None:
        label = "summarizing the conversation"
        context.write(StepStarted(run_id=context.run_id, step=step, label=label, at=context.now()))
        step_timeout_s = _step_timeout_s(context)
        try:
            async with context.scope.child("summary", deadline_s=step_timeout_s):
                model, limits = _model_of(context.agent), context.agent.limits
                limit = context_limit(model, limits)
                past = await summary_of(model, messages, limit=limit, run_id=context.run_id, step=step)
        except Interrupted as interrupted:
            _end_with(context, interrupted, f"{label} did not end within {step_timeout_s:g} s")
            raise
        context.write(msgspec.structs.replace(past, at=context.now()))
        await context.recorder.written()
    context.charge(past.usage)
    return past.text


def _end_with(context: RunContext, interrupted: Interrupted, text: str) -> None:
    """If a deadline ended part of the run, interrupt the whole run with cause ``deadline``, and raise the interrupt."""
    if interrupted.cause.kind == "deadline" and not context.interrupt.triggered:
        context.interrupt.trigger(text, kind="deadline")
        context.interrupt.check()


def _step_timeout_s(context: RunContext) -> float:
    own = context.agent.limits.step_timeout_s
    return context.limits.step_timeout_s if own is None else own


class _OpenCall:
    """A call whose intent is recorded; ``scope`` and ``handle`` are set when the function starts."""

    __slots__ = ("call_id", "deadline_s", "handle", "hold", "name", "problem", "scope", "view")

    def __init__(self, call_id: str, name: str) -> None:
        self.call_id = call_id
        self.name = name
        self.scope: Scope | None = None
        self.handle: Handle[Any] | None = None
        self.view: CallContext | None = None
        self.deadline_s = math.inf
        self.hold: AbstractContextManager[None] | None = None
        self.problem: Exception | None = None


class _Driver:
    """Drives the agent loop of one run; the module documents the invariants."""

    def __init__(
        self,
        context: RunContext,
        model: Model,
        loop: Loop,
        tools: dict[str, Tool],
        new_call: Callable[[str], CallContext],
    ) -> None:
        self._context = context
        self._model = model
        self._loop = loop
        self._tools = tools
        self._new_call = new_call
        self._step_timeout_s = _step_timeout_s(context)
        self._open: dict[str, _OpenCall] = {}
        self._inbox: list[_OpenCall | Answer] = []
        self._waiter: asyncio.Future[None] | None = None
        self._asking = 0  # questions that are not durable yet: until all are, the run is not quiescent
        self._last_tokens = 0  # of the last request and its answer, as counted by the model
        self._idle = False  # this task waits for others, and is not counted as active

    async def drive(self) -> None:
        """Take steps until the model has answered."""
        context, loop = self._context, self._loop
        while not loop.over:
            await self._make_room()
            past = context.journal.step(context.run_id, loop.step)
            effect = loop.steered(await context.take_steering(loop.step, only_recorded=past is not None))
            if isinstance(effect, Exceeded):
                self._exceed(effect)
            else:
                await self._in_step(effect, past)

    async def _make_room(self) -> None:
        """Summarize the run's own messages if they are too long for the step's request."""
        context, loop = self._context, self._loop
        limit = context_limit(self._model, context.agent.limits)
        if limit is None or loop.step == 1:
            return
        known = context.journal.step(context.run_id, -loop.step) is not None
        if not known and max(estimated_tokens(loop.messages), self._last_tokens) <= limit:
            return
        old, rest = split_for_summary(loop.messages)
        loop.replace(apply_summary(await _summarize(context, old, -loop.step), old, rest, limit=limit))

    async def _in_step(self, request: SendModelRequest, past: StepFinished | None) -> None:
        context, step = self._context, request.step
        scope = context.scope.child(f"step {step}", deadline_s=self._step_timeout_s)
        try:
            async with scope:
                await self._step(scope, request, past)
        except Interrupted as interrupted:
            _end_with(context, interrupted, f"step {step} did not end within {self._step_timeout_s:g} s")
            raise
        finally:
            for opened in self._open.values():
                self._report(opened, scope)
            self._open.clear()
            context.activity.remove(self._asking)  # of tasks that were stopped before they began
            self._asking = 0

    async def _step(self, scope: Scope, request: SendModelRequest, past: StepFinished | None) -> None:
        context = self._context
        context.step = request.step
        if past is None:
            finished = await self._ask_model(scope, request)
            finished = msgspec.structs.replace(finished, at=context.now())
            context.write(finished)  # stored with the intents of its calls: one wait for all of them
        else:
            finished = past
            context.replay_step(past)
        context.charge(finished.usage)
        self._last_tokens = finished.usage.input_tokens + finished.usage.output_tokens
        journal = context.journal
        effects = self._loop.stored(
            finished,
            context.usage,
            made={call.call_id for call in finished.calls if journal.has_result(call.call_id)},
            asked={call.call_id for call in finished.calls if journal.was_asked(call.call_id)},
            granted=await self._granted(finished.calls),
        )
        await self._call(scope, effects)

    async def _granted(self, calls: Sequence[ToolCall]) -> Access:
        """Return the access that earlier grants give to the session, if one of the calls asks for any."""
        if not any(map(self._asks, calls)):
            return Access()
        return join(*[grant.access for grant in await self._context.host.grants()])

    def _asks(self, call: ToolCall) -> bool:
        tool = self._tools.get(call.name)
        if tool is None or tool.access is None or isinstance(call.arguments, str):
            return False
        with contextlib.suppress(Exception):  # the loop meets it again, and refuses the call
            return bool(tool.request_of(self._context, call.arguments).access)
        return False

    # ── the model ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _ask_model(self, scope: Scope, asked: SendModelRequest) -> StepFinished:
        """Return the model's complete answer; retry a few times if the request fails before its first output."""
        context, label = self._context, ""
        while True:
            context.write(StepStarted(run_id=context.run_id, step=asked.step, label=label, at=context.now()))
            try:
                async with scope.child("request"):
                    await self._read(asked.request)
                return self._loop.answered()
            except ModelFailed as error:
                again = self._loop.failed(error.retry_after_s)
                if again is None:
                    raise
                delay_s, asked = again
                label = plain(f"retry after: {error.message}")
            await scope.interrupt.sleep(delay_s)

    async def _read(self, request: ModelRequest) -> None:
        context, loop = self._context, self._loop
        lead = STEP_BREAK if context.transcript.size else ""
        async with opened(self._model, request, attachment=context.host.attachment) as parts:
            async for part in parts:
                loop.part(part)
                match part:
                    case TextPart(text=text):
                        if text:
                            await context.emit(plain(lead + text))
                            lead = ""
                    case ReasoningPart(text=text):
                        context.write(ReasoningDelta(run_id=context.run_id, text=plain(text), at=context.now()))
                    case EndPart():
                        return
                    case _:
                        pass

    # ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _call(self, scope: Scope, effects: Sequence[Effect]) -> None:
        """Make the step's calls, after their approvals, until all have their results."""
        loop = self._loop
        pending = deque(effects)
        while True:
            starts: list[StartCall] = []
            over = False
            while pending:
                effect = pending.popleft()
                match effect:
                    case StartCall():
                        starts.append(effect)
                    case Refuse():
                        self._refuse(effect)
                    case Ask(question=question):
                        answer = self._context.journal.answer(question.question_id)
                        if answer is not None:
                            pending += loop.decided(answer)
                        else:
                            self._asking += 1
                            self._context.activity.add()
                            scope.spawn(self._ask(scope, question), name=f"approval of {question.tool}")
                    case Exceeded():
                        self._exceed(effect)
                    case Finish() | Steer():
                        over = True
                    case SendModelRequest():
                        raise AssertionError("a model request may follow only steering")
                    case _:
                        assert_never(effect)
            if over:
                return
            pending += await self._start(scope, starts)
            if not pending:
                for item in await self._next():
                    pending += loop.decided(item) if isinstance(item, Answer) else self._take(item, scope)

    async def _start(self, scope: Scope, starts: Sequence[StartCall]) -> list[Effect]:
        """Start calls after one wait for the log. Return the effects of calls whose results are in the journal."""
        context, loop = self._context, self._loop
        effects: list[Effect] = []
        fresh: list[tuple[StartCall, _OpenCall]] = []
        for start in starts:
            call = start.call
            tool = self._tools.get(call.name)  # the tool of a call with a recorded result may be gone
            idempotent = tool is not None and tool.idempotent
            past = begin_call(context, call.call_id, call.name, call.arguments, idempotent=idempotent)
            if past is not None:
                effects += loop.ended(call.call_id, past.status, result_text(past))
            else:
                opened = self._open[call.call_id] = _OpenCall(call.call_id, call.name)
                fresh.append((start, opened))
        if fresh:
            await context.recorder.written()
        for start, opened in fresh:
            self._launch(scope, start, opened)
        return effects

    def _launch(self, scope: Scope, start: StartCall, opened: _OpenCall) -> None:
        context, tool = self._context, self._tools[start.call.name]
        where: Placement = placement_of(tool.work) if tool.isolation == "auto" else tool.isolation
        opened.deadline_s = context.limits.call_timeout_s if tool.timeout_s is None else tool.timeout_s
        bounded = opened.deadline_s < math.inf
        opened.scope = own = scope.child(tool.name, deadline_s=opened.deadline_s if bounded else None)
        opened.view = self._new_call(opened.call_id)
        opened.view.approved = start.approved
        own.open()
        if tool.timeout_s is not None and tool.timeout_s > self._step_timeout_s:
            opened.hold = scope.hold_deadline()
            opened.hold.__enter__()
        context.activity.add()
        try:
            opened.handle = start_call(
                opened.view,
                own,
                tool.work,
                (),
                start.values,
                name=tool.name,
                where=where,
                exclusive=tool.exclusive,
            )
        except Exception as error:  # no thread is free, for example
            opened.problem = error
        own.close_when_done(functools.partial(self._post, opened))

    def _refuse(self, refusal: Refuse) -> None:
        context, call = self._context, refusal.call
        if refusal.problem is not None:
            context.log_failure(f"the approval rule of tool {call.name!r} failed", refusal.problem)
        if begin_call(context, call.call_id, call.name, call.arguments, idempotent=True) is None:
            end_call(context, call.call_id, "error", None, plain(refusal.text))

    async def _ask(self, scope: Scope, question: Question) -> None:
        host = self._context.host
        with scope.hold_deadline():
            try:
                await host.suspend(question)
            finally:
                self._asking -= 1
                self._context.activity.remove()
            self._post(await host.answered(question.question_id))

    def _post(self, item: _OpenCall | Answer) -> None:
        """Receive an ended call or an answer, on the run's loop."""
        self._inbox.append(item)
        activity = self._context.activity
        if isinstance(item, Answer):
            if self._idle:
                activity.add()
        elif not self._idle:
            activity.remove()  # else the driver is active in its place
        self._idle = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _next(self) -> list[_OpenCall | Answer]:
        """Wait for ended calls or answers, and return them."""
        if not self._inbox:
            self._idle = True
            self._context.activity.remove()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
                if self._idle:
                    self._idle = False
                    self._context.activity.add()
        taken, self._inbox = self._inbox, []
        return taken

    def _take(self, opened: _OpenCall, scope: Scope) -> list[Effect]:
        del self._open[opened.call_id]
        finished = self._report(opened, scope)
        return self._loop.ended(opened.call_id, finished.status, result_text(finished))

    def _report(self, opened: _OpenCall, scope: Scope) -> ToolFinished:
        """Write the result of a call."""
        if opened.view is not None:
            opened.view.close()
        if opened.hold is not None:
            opened.hold.__exit__(None, None, None)
        status, result, error = self._outcome(opened, scope)
        failed = opened.view is not None and opened.view.failed
        return end_call(self._context, opened.call_id, status, result, error, failed=failed)

    def _outcome(self, opened: _OpenCall, step: Scope) -> tuple[Status, Any, str | None]:
        limit = self._context.agent.limits.result_bytes
        scope, handle = opened.scope, opened.handle
        if scope is None:
            return "interrupted", None, None
        try:
            if opened.problem is not None:
                raise opened.problem
            if handle is None or not handle.done():
                return "interrupted", None, None
            if scope.errors:
                raise scope.errors[0]
            result = to_model_text(handle.result(), limit_bytes=limit)
        except Interrupted as interrupted:
            if step.interrupt.triggered:
                return "interrupted", None, None
            cause = scope.interrupt.cause or interrupted.cause
            if cause.kind == "deadline":
                return "error", None, self._too_long(opened)
            return "error", None, f"{opened.name} was interrupted: {cause.reason or cause.kind}"
        except BaseException as problem:  # any error of the tool: nothing is awaited here
            if step.interrupt.triggered:
                if not isinstance(problem, HoldfastError):  # such as the end of its process
                    self._context.log_failure(f"tool {opened.name!r} failed while it was interrupted", problem)
                return "interrupted", None, redact(truncate(format_error(problem), limit))
            if isinstance(problem, ToolFailed):
                return "error", None, truncate(str(problem), limit)
            self._context.log_failure(f"tool {opened.name!r} failed", problem)
            return "error", None, redact(truncate(format_error(problem), limit))
        ended_by = scope.interrupt.cause
        if ended_by is not None and ended_by.kind == "deadline" and not step.interrupt.triggered:
            last = truncate(result if isinstance(result, str) else msgspec.json.encode(result).decode(), limit)
            return "error", None, f"{self._too_long(opened)}; before it was stopped it returned: {last}"
        return "ok", result, None

    def _too_long(self, opened: _OpenCall) -> str:
        return f"{opened.name} did not end within {opened.deadline_s:g} s"

    def _exceed(self, exceeded: Exceeded) -> None:
        self._context.interrupt.trigger(exceeded.text, kind="budget")
        self._context.interrupt.check()
