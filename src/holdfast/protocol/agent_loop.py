"""The agent loop as a state machine without I/O or clock: it turns model answers and results into effects to perform.

A step is one request to the model and the calls in the model's answer:

    steering ──steered──▶ requesting ──stored──▶ calling ──the last call has ended──▶ steering …
        │                   │  ▲ │                   │  ▲
        ▼                   └──┘ ▼                   └──┘ ended, decided
       over              failed  over: an answer without calls, or an exhausted budget

Invariants
- Effects depend only on inputs, so the steps, answers and results in the log always lead to the same state. This is how
  a run resumes after a crash.
- The messages of each request are valid (`holdfast.protocol.model.conversation`): before the next step starts, every
  call of a step has exactly one result, and results are in the order of the calls.
- No call starts before its step is stored, and at most `AgentLimits.calls_at_once` calls run at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from holdfast.errors import ConfigurationError, IllegalTransition, InvalidArguments, ModelFailed, format_error
from holdfast.protocol.access import NO_REQUEST, AccessRequest, approval_question, is_covered
from holdfast.protocol.call_hash import is_for_another_call
from holdfast.protocol.events import StepFinished, encode_json, plain
from holdfast.protocol.messages import Access, Answer, Message, Question, Usage, Value
from holdfast.protocol.model import (
    AssistantMessage,
    CallPart,
    EndPart,
    ModelMessage,
    ModelRequest,
    Part,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolMessage,
    ToolSpec,
    UserMessage,
    read_arguments,
    tool_name,
    with_user,
)

__all__ = [
    "AgentLimits",
    "Ask",
    "Effect",
    "Exceeded",
    "Finish",
    "Loop",
    "LoopTool",
    "Refuse",
    "SendModelRequest",
    "StartCall",
    "Steer",
]

State = Literal["steering", "requesting", "calling", "over"]
_LEAST = {
    "steps": 1,
    "tool_calls": 0,
    "tokens": 1,
    "cost_usd": 0,
    "calls_at_once": 1,
    "retries": 0,
    "result_bytes": 1,
    "context_tokens": 1,
    "children": 1,
    "depth": 0,
}
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0


class AgentLimits(Value, frozen=True, kw_only=True):
    """Limits of an agent with a model. A run that reaches a budget is interrupted with cause ``budget``.

    Parameters:
        steps: maximum number of steps in one run. Retries and summaries do not count as steps.
        tool_calls: maximum number of tool calls in one run. If the calls of a step exceed the remaining budget, none of
            these calls starts.
        tokens: maximum number of input and output tokens of one run; None means unlimited.
        cost_usd: maximum cost of one run, enforced only if the model layer knows the price; None means unlimited.
        calls_at_once: maximum number of calls of one step that run at the same time; further calls wait.
        step_timeout_s: deadline of a step, including its calls, in seconds; None means the host's ``step_timeout_s``.
            The deadline is paused during a call of a tool with a longer deadline and while a question to a person is
            open.
        retries: maximum number of retries of a request that failed before any output.
        result_bytes: maximum size of a result shown to the model, in bytes. A longer result is truncated in the middle.
        context_tokens: estimated size of a request, in tokens, above which the history is summarized before the request
            is sent; None means three quarters of the model's context window.
        children: maximum number of children of one run that are active at the same time; further children wait.
        depth: maximum nesting depth of children.

    A child's usage also counts towards the budgets of its parents, except for the number of steps.

    Raises:
        ConfigurationError: if a limit is below its minimum.
    """

    steps: int = 50
    tool_calls: int = 200
    tokens: int | None = None
    cost_usd: float | None = None
    calls_at_once: int = 16
    step_timeout_s: float | None = None
    retries: int = 2
    result_bytes: int = 50_000
    context_tokens: int | None = None
    children: int = 8
    depth: int = 4

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ConfigurationError(f"invalid AgentLimits({name}={value!r}); it must be {least} or more")
        if self.step_timeout_s is not None and not self.step_timeout_s > 0:
            raise ConfigurationError(
                f"invalid AgentLimits(step_timeout_s={self.step_timeout_s!r}); it must be more than 0"
            )

    def exceeded(self, used: Usage, *, asked: int = 0) -> str | None:
        """Return a description of the budget that `used` and `asked` further calls exhaust, or None."""
        tokens = used.input_tokens + used.output_tokens
        if self.tokens is not None and tokens >= self.tokens:
            return f"the run used {tokens:,} tokens; the limit is {self.tokens:,}"
        if self.cost_usd is not None and used.cost_usd >= self.cost_usd:
            return f"the run cost {used.cost_usd:.4g} USD; the limit is {self.cost_usd:.4g}"
        if used.tool_calls + asked > self.tool_calls:
            more = f" and requests {asked:,} more" if asked else ""
            return f"the run made {used.tool_calls:,} calls of {self.tool_calls:,}{more}"
        return None


class LoopTool(Protocol):
    """The part of a tool's interface that the loop uses."""

    @property
    def spec(self) -> ToolSpec:
        """The tool's specification, as shown to the model."""
        ...

    def check(self, arguments: object) -> dict[str, Any]:
        """Validate the arguments and return them as keyword arguments. Raises `InvalidArguments`."""
        ...

    def needs_approval(self, arguments: dict[str, Any]) -> bool:
        """Return whether a person must approve a call with these arguments."""
        ...


class Steer(Value, frozen=True, kw_only=True):
    """Fetch the messages that were steered to the run, and pass them to `Loop.steered`."""

    step: int


class SendModelRequest(Value, frozen=True, kw_only=True):
    """Send the request to the model.

    Pass each part of the model's answer to `Loop.part`, store the step that `Loop.answered` returns, then call
    `Loop.stored`.
    """

    step: int
    request: ModelRequest


class StartCall(Value, frozen=True, kw_only=True):
    """Call the tool with ``values`` as keyword arguments. When the call has ended, call `Loop.ended`.

    Parameters:
        call: the call.
        values: the keyword arguments.
        approved: access that a person approved for this call; empty if no person was asked for access.
    """

    call: ToolCall
    values: dict[str, Any]
    approved: Access = Access()


class Ask(Value, frozen=True, kw_only=True):
    """Ask a person to approve a call, then pass the answer to `Loop.decided`."""

    call: ToolCall
    question: Question


class Refuse(Value, frozen=True, kw_only=True):
    """Record a call that was not made. The loop expects no method call in response.

    Parameters:
        call: the call.
        text: why the call was not made; the model sees this text as the call's result.
        problem: exception that the tool's approval rule raised, for the log; None if it raised none.
    """

    call: ToolCall
    text: str
    problem: Any = None


class Finish(Value, frozen=True, kw_only=True):
    """Complete the run, because the model's last answer contains no calls."""


class Exceeded(Value, frozen=True, kw_only=True):
    """Interrupt the run because a budget is exhausted."""

    text: str


Effect = Steer | SendModelRequest | StartCall | Ask | Refuse | Finish | Exceeded


class Loop:
    """The state machine for one run of an agent with a model.

    Parameters:
        run_id: id of the run or child, used as the prefix of call ids.
        messages: valid messages that the model sees before the first step.
        instructions: the agent's instructions.
        tools: the agent's tools, by name.
        settings: the agent's settings for the model layer.
        limits: the agent's limits; None means the defaults of `AgentLimits`.
        request_of: function that returns what a call of a tool with these arguments asks for beyond its wall. It raises
            `InvalidArguments` if that cannot be granted. Its result depends on nothing but the call.
    """

    __slots__ = (
        "_begun",
        "_calls",
        "_failures",
        "_instructions",
        "_limits",
        "_messages",
        "_open",
        "_parts",
        "_request_of",
        "_requests",
        "_results",
        "_run_id",
        "_running",
        "_said",
        "_settings",
        "_specs",
        "_state",
        "_tools",
        "_waiting",
        "step",
    )

    def __init__(
        self,
        *,
        run_id: str,
        messages: Sequence[ModelMessage],
        instructions: str = "",
        tools: Mapping[str, LoopTool] | None = None,
        settings: dict[str, Any] | None = None,
        limits: AgentLimits | None = None,
        request_of: Callable[[str, dict[str, Any]], AccessRequest] = lambda *_: NO_REQUEST,
    ) -> None:
        self._run_id = run_id
        self._messages: list[ModelMessage] = list(messages)
        self._instructions = instructions
        self._tools: Mapping[str, LoopTool] = tools or {}
        self._specs = tuple(tool.spec for tool in self._tools.values())
        self._settings = settings or {}
        self._limits = limits or AgentLimits()
        self._state: State = "steering"
        self._begun = False  # whether the model has sent a part in this request
        self._failures = 0
        self._said = False  # whether an earlier step of this run produced text or calls
        self._parts: list[Part] = []
        self._calls: tuple[ToolCall, ...] = ()
        self._open: dict[str, ToolCall] = {}
        self._results: dict[str, ToolMessage] = {}
        self._waiting: deque[StartCall] = deque()
        self._running = 0
        self._request_of = request_of
        self._requests: dict[str, AccessRequest] = {}  # of calls about which a person is asked
        self.step = 1
        """Number of the current step, from 1."""

    @property
    def over(self) -> bool:
        """Whether the loop has ended."""
        return self._state == "over"

    @property
    def messages(self) -> tuple[ModelMessage, ...]:
        """The messages that the next request will contain."""
        return tuple(self._messages)

    def replace(self, messages: Sequence[ModelMessage]) -> None:
        """Replace the messages of the next request. `messages` must be valid."""
        self._leave("steering", "replace")
        self._messages = list(messages)

    def steered(self, messages: Sequence[Message]) -> SendModelRequest | Exceeded:
        """Add the messages that were steered to the run before this step, and return the step's request.

        Return `Exceeded` if the run has already taken its maximum number of steps.
        """
        self._leave("steering", "steered")
        for message in messages:
            said = UserMessage(content=message.content, attachments=message.attachments)
            self._messages = with_user(self._messages, said)
        if self.step > self._limits.steps:
            return self._exceed(f"the run took {self._limits.steps:,} steps and requests another")
        self._state = "requesting"
        self._failures = 0
        return self._request()

    def _request(self) -> SendModelRequest:
        self._begun = False
        self._parts = []
        return SendModelRequest(
            step=self.step,
            request=ModelRequest(
                messages=tuple(self._messages),
                instructions=self._instructions,
                tools=self._specs,
                settings=self._settings,
            ),
        )

    def part(self, part: Part) -> None:
        """Add a part of the model's answer."""
        self._leave("requesting", "part")
        self._begun = True
        self._parts.append(part)

    def failed(self, retry_after_s: float | None) -> tuple[float, SendModelRequest] | None:
        """Handle a failed request. Return a delay in seconds and the request to send after it, or None to give up.

        Parameters:
            retry_after_s: minimum delay before a retry, in seconds; None if the error is permanent.
        """
        self._leave("requesting", "failed")
        if self._begun or retry_after_s is None or self._failures >= self._limits.retries:
            self._state = "over"
            return None
        delay_s = min(max(retry_after_s, FIRST_DELAY_S * 2**self._failures), LONGEST_DELAY_S)
        self._failures += 1
        return delay_s, self._request()

    def answered(self) -> StepFinished:
        """Return the complete answer, which must be stored before its calls start.

        Raises `ModelFailed` if the answer is incomplete, is empty because the model refused, or is empty in the first
        step.
        """
        self._leave("requesting", "answered")
        end = self._parts[-1] if self._parts else None
        if not isinstance(end, EndPart):
            raise ModelFailed("the model's answer broke off before it was complete", retry_after_s=0.0)
        text = "".join(part.text for part in self._parts if isinstance(part, TextPart))
        asked = [part for part in self._parts if isinstance(part, CallPart)]
        if not text and not asked:
            if end.reason == "refused":
                raise ModelFailed("the model refused to answer")
            if not self._said:  # after a call there may be nothing to add
                self._begun = any(isinstance(part, ReasoningPart) for part in self._parts)
                raise ModelFailed("the model gave an empty answer", retry_after_s=0.0)
        return StepFinished(
            run_id=self._run_id,
            step=self.step,
            text=text,
            calls=tuple(self._call(number, part) for number, part in enumerate(asked, 1)),
            usage=msgspec.structs.replace(end.usage, steps=1, tool_calls=0),
            model=end.model,
            state=end.state,
        )

    def _call(self, number: int, part: CallPart) -> ToolCall:
        # Round-trip as the log will: the first attempt and later ones see the same arguments.
        if isinstance(part.arguments, dict):
            arguments = msgspec.json.decode(encode_json(part.arguments))
        else:
            arguments = read_arguments(plain(part.arguments))
        return ToolCall(call_id=f"{self._run_id}.{self.step}.{number}", name=tool_name(part.name), arguments=arguments)

    def stored(
        self,
        step: StepFinished,
        used: Usage,
        *,
        made: Collection[str] = (),
        asked: Collection[str] = (),
        granted: Access = NO_REQUEST.access,
    ) -> list[Effect]:
        """Continue the run after a step was stored in this attempt or an earlier one.

        Parameters:
            step: step returned by `answered`.
            used: usage of the run and its children so far, including this step but not its calls.
            made: ids of calls that have a result from an earlier attempt. These results are kept even if the tools have
                changed.
            asked: ids of calls about which an earlier attempt asked a person. The answers apply even if the approval
                rules or the grants have changed.
            granted: access that the session has from earlier grants. A call that asks for no more is not asked about.
        """
        self._leave("requesting", "stored")
        self._parts = []
        self._said = True
        if step.text or step.calls:
            text = step.text if step.text.strip() else ""
            if text or step.calls:
                self._messages.append(AssistantMessage(text=text, calls=step.calls, state=step.state))
        if not step.calls:
            self._state = "over"
            return [Finish()]
        if problem := self._limits.exceeded(used, asked=len(step.calls)):
            return [self._exceed(problem)]
        self._state = "calling"
        self._calls = step.calls
        self._open = {call.call_id: call for call in step.calls}
        self._results = {}
        effects: list[Effect] = []
        for call in step.calls:
            if call.call_id in made:
                self._waiting.append(StartCall(call=call, values={}))
            else:
                effects += self._consider(call, asked=call.call_id in asked, granted=granted)
        return effects + self._next()

    def _consider(self, call: ToolCall, *, asked: bool, granted: Access) -> list[Effect]:
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return self._refuse(call, f"unknown tool {call.name!r}; available tools: {known}")
        if isinstance(call.arguments, str):
            return self._refuse(call, f"the arguments are not a JSON object: {call.arguments[:200]!r}")
        try:
            values = tool.check(call.arguments)
            request = self._request_of(call.name, call.arguments)
            covered = is_covered(request.access, granted)
            approval = asked or not covered or tool.needs_approval(call.arguments)
        except InvalidArguments as error:
            return self._refuse(call, f"invalid arguments: {error.message}")
        except Exception as error:  # raised by the tool author's rule
            return self._refuse(call, f"the approval rule failed: {format_error(error)}", error)
        if approval:
            self._requests[call.call_id] = request
            return [Ask(call=call, question=_question_of(call, request))]
        self._waiting.append(StartCall(call=call, values=values))
        return []

    def _refuse(self, call: ToolCall, text: str, problem: Exception | None = None) -> list[Effect]:
        self._settle(call, "error", text)
        return [Refuse(call=call, text=text, problem=problem)]

    def decided(self, answer: Answer) -> list[Effect]:
        """Handle a person's answer to the approval question for a call."""
        self._leave("calling", "decided")
        call = self._open[answer.question_id]
        reason = f": {answer.text}" if answer.text else ""
        request = self._requests.pop(answer.question_id)
        if is_for_another_call(answer, _question_of(call, request)):
            return self._refuse(call, "a person approved a different call; this one was not made") + self._next()
        match answer.decision:
            case "approved":
                assert not isinstance(call.arguments, str)
                values = self._tools[call.name].check(call.arguments)
                self._waiting.append(StartCall(call=call, values=values, approved=request.access))
                return self._next()
            case "expired":
                refused = self._refuse(call, "the approval of this call expired; it was not made")
            case _:
                refused = self._refuse(call, f"a person denied this call{reason}; it was not made")
        return refused + self._next()

    def ended(self, call_id: str, status: Literal["ok", "error", "interrupted"], content: str) -> list[Effect]:
        """Handle the end of a call after its result was recorded."""
        self._leave("calling", "ended")
        self._running -= 1
        self._settle(self._open[call_id], status, content)
        return self._next()

    def _settle(self, call: ToolCall, status: Literal["ok", "error", "interrupted"], content: str) -> None:
        del self._open[call.call_id]
        self._results[call.call_id] = ToolMessage(
            call_id=call.call_id, name=call.name, content=content or "(nothing)", status=status
        )

    def _next(self) -> list[Effect]:
        """Return the calls that may start now and, after the last call has ended, the start of the next step."""
        effects: list[Effect] = []
        while self._waiting and self._running < self._limits.calls_at_once:
            self._running += 1
            effects.append(self._waiting.popleft())
        if not self._open:
            self._messages += [self._results[call.call_id] for call in self._calls]
            self._calls, self._results = (), {}
            self.step += 1
            self._state = "steering"
            effects.append(Steer(step=self.step))
        return effects

    def _exceed(self, text: str) -> Exceeded:
        self._state = "over"
        return Exceeded(text=text)

    def _leave(self, state: State, happened: str) -> None:
        if self._state != state:
            raise IllegalTransition(f"the agent loop is {self._state}; it does not accept {happened!r} in this state")


def _question_of(call: ToolCall, request: AccessRequest) -> Question:
    return approval_question(call.call_id, call.name, call.arguments, request)
