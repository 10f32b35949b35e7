"""Drives the agent loop of `holdfast.protocol.loop`: asks the model, calls the tools, writes down what comes of it.

Invariants
- A step's answer and a call's intent are durable before the call has its effect, all after one wait for the log.
- The request to the model has a scope of its own: whatever ends it, the connection is closed when the scope is.
- Each call has a scope of its own in the step's, and is reported once that scope has closed: what is left of it then
  does not count. The step ends after all its calls, also when it is interrupted; then each gets its last result.
- One task drives all of it. Calls and answers come in through `_post`, on the run's loop.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, assert_never

import msgspec

from holdfast.agents.call import Call, start_call
from holdfast.agents.calls import begin_call, end_call
from holdfast.agents.compacting import context_limit, divided, estimated_tokens, split, summary_of, with_summary
from holdfast.agents.model import opened
from holdfast.agents.placing import placement_of
from holdfast.agents.results import cut, shown
from holdfast.agents.toolbox import toolbox
from holdfast.errors import HoldfastError, Interrupted, ModelFailed, ToolFailed, told
from holdfast.logs import redact
from holdfast.protocol.events import ReasoningDelta, StepFinished, StepStarted, ToolFinished, plain
from holdfast.protocol.loop import Ask, Effect, Exceeded, Finish, Loop, Refuse, Request, StartCall, Steer
from holdfast.protocol.messages import Answer, Entry, Question
from holdfast.protocol.model import (
    EndPart,
    ModelMessage,
    ModelRequest,
    ReasoningPart,
    TextPart,
    UserMessage,
    conversation,
    with_user,
)
from holdfast.protocol.transcript import STEP_BREAK, last_kept, result_text

if TYPE_CHECKING:
    from holdfast.agents.model import Model
    from holdfast.agents.placing import Placement
    from holdfast.agents.run import Run
    from holdfast.agents.tool import Tool
    from holdfast.runtime import Handle, Scope

__all__ = ["work_with_model"]

Status = Literal["ok", "error", "interrupted"]


async def work_with_model(run: Run) -> None:
    """Do the work of an agent that has a model.

    Raises:
        ModelFailed: the model failed, and asking it again did not help.
        ConfigurationError: two tools have the same name.
        Interrupted: the run was interrupted, by its budget or its deadline perhaps.
    """
    agent = run.agent
    model = agent.model
    assert model is not None
    assert not isinstance(model, str)
    tools = toolbox(agent)
    messages = list(conversation(await _history(run)))
    for message in run.messages:
        messages = with_user(messages, UserMessage(content=message.content, attachments=message.attachments))
    loop = Loop(
        run_id=run.run_id,
        messages=messages,
        instructions=agent.instructions,
        tools=tools,
        settings=agent.settings,
        limits=agent.limits,
    )
    await _Driver(run, model, loop, tools).drive()


async def _history(run: Run) -> Sequence[Entry]:
    """What was before the run; summed up where it is too much for the model."""
    history = await run.history()
    limit = context_limit(run.agent)
    past = run._journal.step(run.run_id, 0)
    if past is None and (limit is None or estimated_tokens(conversation(history)) <= limit):
        return history
    old, recent = split(history)
    if not old or (limit is not None and estimated_tokens(conversation(recent)) > limit // 2):
        old, recent = history, ()
    summary = await _summed_up(run, conversation(old), 0)
    said = Entry(role="summary", content=summary, run_id=run.run_id, kept=last_kept(old))
    run.replaced_history = (said, *recent)
    return run.replaced_history


async def _summed_up(run: Run, messages: Sequence[ModelMessage], step: int) -> str:
    """A summary of the messages, from the journal if it is there; written down as a step that is none, up to 0."""
    past = run._journal.step(run.run_id, step)
    if past is None:
        label = "summing up what was said before"
        run._write(StepStarted(run_id=run.run_id, step=step, label=label, at=run.now()))
        step_s = _step_s(run)
        try:
            async with run.scope.child("summary", deadline_s=step_s):
                past = await summary_of(run.agent, messages, run_id=run.run_id, step=step)
        except Interrupted as interrupted:
            _end_with(run, interrupted, f"{label} did not end within {step_s:g} s")
            raise
        run._write(msgspec.structs.replace(past, at=run.now()))
        await run._recorder.written()
    run._charge(past.usage)
    return past.text


def _end_with(run: Run, interrupted: Interrupted, text: str) -> None:
    """The deadline of a part of the run ends the run: interrupt it, and raise that."""
    if interrupted.cause.kind == "deadline" and not run.interrupt.triggered:
        run.interrupt.trigger(text, kind="deadline")
        run.interrupt.check()


def _step_s(run: Run) -> float:
    own = run.agent.limits.step_s
    return run._limits.step_s if own is None else own


class _OpenCall:
    """A call that was begun; ``scope`` and ``handle`` are there once it runs."""

    __slots__ = ("call_id", "deadline_s", "handle", "hold", "name", "problem", "scope", "view")

    def __init__(self, call_id: str, name: str) -> None:
        self.call_id = call_id
        self.name = name
        self.scope: Scope | None = None
        self.handle: Handle[Any] | None = None
        self.view: Call | None = None
        self.deadline_s = math.inf
        self.hold: AbstractContextManager[None] | None = None
        self.problem: Exception | None = None


class _Driver:
    """See the module."""

    def __init__(self, run: Run, model: Model, loop: Loop, tools: dict[str, Tool]) -> None:
        self._run = run
        self._model = model
        self._loop = loop
        self._tools = tools
        self._step_s = _step_s(run)
        self._open: dict[str, _OpenCall] = {}
        self._inbox: list[_OpenCall | Answer] = []
        self._waiter: asyncio.Future[None] | None = None
        self._asking = 0  # questions that are not durable yet: the run does not rest before all that it asks are there
        self._last_tokens = 0  # of the last request and its answer, as the model counted them
        self._idle = False  # this line waits for others, and is not counted as busy

    async def drive(self) -> None:
        """Take steps until the model has answered."""
        run, loop = self._run, self._loop
        while not loop.over:
            await self._make_room()
            past = run._journal.step(run.run_id, loop.step)
            effect = loop.steered(await run._steered(loop.step, more=past is None))
            if isinstance(effect, Exceeded):
                self._exceed(effect)
            else:
                await self._in_step(effect, past)

    async def _make_room(self) -> None:
        """Sum up what the run itself said and did, where it is too much for the step's request."""
        run, loop = self._run, self._loop
        limit = context_limit(run.agent)
        if limit is None or loop.step == 1:
            return
        known = run._journal.step(run.run_id, -loop.step) is not None
        if not known and max(estimated_tokens(loop.messages), self._last_tokens) <= limit:
            return
        old, rest = divided(loop.messages)
        loop.replace(with_summary(await _summed_up(run, old, -loop.step), old, rest, limit=limit))

    async def _in_step(self, request: Request, past: StepFinished | None) -> None:
        run, step = self._run, request.step
        scope = run.scope.child(f"step {step}", deadline_s=self._step_s)
        try:
            async with scope:
                await self._step(scope, request, past)
        except Interrupted as interrupted:
            _end_with(run, interrupted, f"step {step} did not end within {self._step_s:g} s")
            raise
        finally:
            for opened in self._open.values():
                self._report(opened, scope)
            self._open.clear()
            run._lines.remove(self._asking)  # of tasks that were stopped before they began
            self._asking = 0

    async def _step(self, scope: Scope, request: Request, past: StepFinished | None) -> None:
        run = self._run
        run._steps = request.step
        if past is None:
            finished = await self._ask_model(scope, request)
            finished = msgspec.structs.replace(finished, at=run.now())
            run._write(finished)  # stored with the intents of its calls: one wait for all of them
        else:
            finished = past
            run._recall(past)
        run._charge(finished.usage)
        self._last_tokens = finished.usage.input_tokens + finished.usage.output_tokens
        journal = run._journal
        effects = self._loop.stored(
            finished,
            run.usage,
            made={call.call_id for call in finished.calls if journal.has_result(call.call_id)},
            asked={call.call_id for call in finished.calls if journal.answer(call.call_id) is not None},
        )
        await self._call(scope, effects)

    # ── the model ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _ask_model(self, scope: Scope, asked: Request) -> StepFinished:
        """The model's whole answer; a request that fails before it says anything is made again, a few times."""
        run, label = self._run, ""
        while True:
            run._write(StepStarted(run_id=run.run_id, step=asked.step, label=label, at=run.now()))
            try:
                async with scope.child("request"):
                    await self._read(asked.request)
                return self._loop.answered()
            except ModelFailed as error:
                again = self._loop.failed(error.retry_after_s)
                if again is None:
                    raise
                delay_s, asked = again
                label = plain(f"again, because: {error.message}")
            await scope.interrupt.sleep(delay_s)

    async def _read(self, request: ModelRequest) -> None:
        run, loop = self._run, self._loop
        lead = STEP_BREAK if run.transcript.size else ""
        async with opened(self._model, request, attachment=run.attachment) as parts:
            async for part in parts:
                loop.part(part)
                match part:
                    case TextPart(text=text):
                        if text:
                            await run.emit(plain(lead + text))
                            lead = ""
                    case ReasoningPart(text=text):
                        run._write(ReasoningDelta(run_id=run.run_id, text=plain(text), at=run.now()))
                    case EndPart():
                        return
                    case _:
                        pass

    # ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _call(self, scope: Scope, effects: Sequence[Effect]) -> None:
        """Make the step's calls, and ask what has to be asked, until all have their results."""
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
                        answer = self._run._journal.answer(question.question_id)
                        if answer is not None:
                            pending += loop.decided(answer)
                        else:
                            self._asking += 1
                            self._run._lines.add()
                            scope.spawn(self._ask(scope, question), name=f"approval of {question.tool}")
                    case Exceeded():
                        self._exceed(effect)
                    case Finish() | Steer():
                        over = True
                    case Request():
                        raise AssertionError("a request comes after steering only")
                    case _:
                        assert_never(effect)
            if over:
                return
            pending += await self._start(scope, starts)
            if not pending:
                for item in await self._next():
                    pending += loop.decided(item) if isinstance(item, Answer) else self._take(item, scope)

    async def _start(self, scope: Scope, starts: Sequence[StartCall]) -> list[Effect]:
        """Start calls, all after one wait for the log; what came of those whose results are in the journal."""
        run, loop = self._run, self._loop
        effects: list[Effect] = []
        fresh: list[tuple[StartCall, _OpenCall]] = []
        for start in starts:
            call = start.call
            tool = self._tools.get(call.name)  # a call that has its result may be of a tool that is gone
            idempotent = tool is not None and tool.idempotent
            past = begin_call(run, call.call_id, call.name, call.arguments, idempotent=idempotent)
            if past is not None:
                effects += loop.ended(call.call_id, past.status, result_text(past))
            else:
                opened = self._open[call.call_id] = _OpenCall(call.call_id, call.name)
                fresh.append((start, opened))
        if fresh:
            await run._recorder.written()
        for start, opened in fresh:
            self._launch(scope, start, opened)
        return effects

    def _launch(self, scope: Scope, start: StartCall, opened: _OpenCall) -> None:
        run, tool = self._run, self._tools[start.call.name]
        where: Placement = placement_of(tool.work) if tool.isolation == "auto" else tool.isolation
        opened.deadline_s = run._limits.call_s if tool.timeout_s is None else tool.timeout_s
        bounded = opened.deadline_s < math.inf
        opened.scope = own = scope.child(tool.name, deadline_s=opened.deadline_s if bounded else None)
        opened.view = Call(run, opened.call_id)
        own.open()
        if tool.timeout_s is not None and tool.timeout_s > self._step_s:
            opened.hold = scope.hold_deadline()
            opened.hold.__enter__()
        run._lines.add()
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
        except Exception as error:  # no thread to be had, say
            opened.problem = error
        own.close_when_done(functools.partial(self._post, opened))

    def _refuse(self, refusal: Refuse) -> None:
        run, call = self._run, refusal.call
        if refusal.problem is not None:
            run._log_failure(f"the approval rule of tool {call.name!r} failed", refusal.problem)
        if begin_call(run, call.call_id, call.name, call.arguments, idempotent=True) is None:
            end_call(run, call.call_id, "error", None, plain(refusal.text))

    async def _ask(self, scope: Scope, question: Question) -> None:
        surroundings = self._run._surroundings
        with scope.hold_deadline():
            try:
                await surroundings.suspend(question)
            finally:
                self._asking -= 1
                self._run._lines.remove()
            self._post(await surroundings.answered(question.question_id))

    def _post(self, item: _OpenCall | Answer) -> None:
        """A call has ended, or a person has answered. On the run's loop."""
        self._inbox.append(item)
        lines = self._run._lines
        if isinstance(item, Answer):
            if self._idle:
                lines.add()
        elif not self._idle:
            lines.remove()  # else the driver is busy in its place
        self._idle = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _next(self) -> list[_OpenCall | Answer]:
        """Wait for calls that end and people who answer."""
        if not self._inbox:
            self._idle = True
            self._run._lines.remove()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
                if self._idle:
                    self._idle = False
                    self._run._lines.add()
        taken, self._inbox = self._inbox, []
        return taken

    def _take(self, opened: _OpenCall, scope: Scope) -> list[Effect]:
        del self._open[opened.call_id]
        finished = self._report(opened, scope)
        return self._loop.ended(opened.call_id, finished.status, result_text(finished))

    def _report(self, opened: _OpenCall, scope: Scope) -> ToolFinished:
        """Write down what a call came to."""
        if opened.view is not None:
            opened.view._end()
        if opened.hold is not None:
            opened.hold.__exit__(None, None, None)
        status, result, error = self._outcome(opened, scope)
        return end_call(self._run, opened.call_id, status, result, error)

    def _outcome(self, opened: _OpenCall, step: Scope) -> tuple[Status, Any, str | None]:
        limit = self._run.agent.limits.result_bytes
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
            result = shown(handle.result(), limit_bytes=limit)
        except Interrupted as interrupted:
            if step.interrupt.triggered:
                return "interrupted", None, None
            cause = scope.interrupt.cause or interrupted.cause
            if cause.kind == "deadline":
                return "error", None, self._too_long(opened)
            return "error", None, f"{opened.name} was interrupted: {cause.reason or cause.kind}"
        except BaseException as problem:  # of the tool, whatever it raised: nothing is awaited here
            if step.interrupt.triggered:
                if not isinstance(problem, HoldfastError):  # as the end of its process
                    self._run._log_failure(f"tool {opened.name!r} failed while it was interrupted", problem)
                return "interrupted", None, redact(cut(told(problem), limit))
            if isinstance(problem, ToolFailed):
                return "error", None, cut(str(problem), limit)
            self._run._log_failure(f"tool {opened.name!r} failed", problem)
            return "error", None, redact(cut(told(problem), limit))
        ended_by = scope.interrupt.cause
        if ended_by is not None and ended_by.kind == "deadline" and not step.interrupt.triggered:
            last = cut(result if isinstance(result, str) else msgspec.json.encode(result).decode(), limit)
            return "error", None, f"{self._too_long(opened)}; before it was stopped it returned: {last}"
        return "ok", result, None

    def _too_long(self, opened: _OpenCall) -> str:
        return f"{opened.name} did not end within {opened.deadline_s:g} s"

    def _exceed(self, exceeded: Exceeded) -> None:
        self._run.interrupt.trigger(exceeded.text, kind="budget")
        self._run.interrupt.check()
