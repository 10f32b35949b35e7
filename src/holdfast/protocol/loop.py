"""The agent loop as a machine without I/O or time: what the model said goes in, what is to be done next comes out.

A step is one request to the model and the calls it asks for:

    steering ──steered──▶ requesting ──stored──▶ calling ──the last call has ended──▶ steering …
        │                   │  ▲ │                   │  ▲
        ▼                   └──┘ ▼                   └──┘ ended, decided
       over              failed  over: an answer without calls, or a budget that is used up

Invariants
- What it asks for is decided by what was fed to it and by nothing else, so the same steps, answers and results from the
  log lead to the same place: that is how a run goes on after a crash.
- The messages of each request are valid (`holdfast.protocol.model.conversation`): every call of a step has exactly one
  result, in the order of the calls, before the next step begins.
- No call begins before its step is stored; at most `AgentLimits.calls_at_once` of them run at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from holdfast.errors import ConfigurationError, IllegalTransition, InvalidArguments, ModelFailed, told
from holdfast.protocol.call_hash import is_for_another_call
from holdfast.protocol.events import StepFinished, encode_json, plain
from holdfast.protocol.messages import Answer, Message, Question, Usage, Value
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
    "Request",
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
    """Bounds of an agent with a model. A run that reaches a budget is interrupted with cause ``budget``.

    Parameters:
        steps: requests to the model in one run.
        tool_calls: calls in one run; a step that asks for more than are left is not begun.
        tokens: input and output tokens of one run.
        cost_usd: what one run may cost, where the model layer knows the price.
        calls_at_once: calls of one step that run at the same time; the others wait.
        step_s: deadline of a step, request and calls; None takes the host's. A tool with a longer deadline of its own,
            and a person who is asked, hold it meanwhile.
        retries: how often a request that failed before it said anything is made again.
        result_bytes: what the model sees of one result; the middle of a longer one is left out.
        context_tokens: what is said before a request is summed up when it has more tokens (estimated); None: three
            quarters of what the model takes.
        children: children of one run that work at the same time; others wait.
        depth: how deep children may nest.

    What children use counts for their parents too, but for the number of steps.

    Raises:
        ConfigurationError: a bound that nothing could work within.
    """

    steps: int = 50
    tool_calls: int = 200
    tokens: int | None = None
    cost_usd: float | None = None
    calls_at_once: int = 16
    step_s: float | None = None
    retries: int = 2
    result_bytes: int = 50_000
    context_tokens: int | None = None
    children: int = 8
    depth: int = 4

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ConfigurationError(f"AgentLimits({name}={value!r}): it is {least} or more")
        if self.step_s is not None and not self.step_s > 0:
            raise ConfigurationError(f"AgentLimits(step_s={self.step_s!r}): it is more than 0")

    def exceeded(self, used: Usage, *, asked: int = 0) -> str | None:
        """What is used up, or will be with the calls that are asked for, in words; None while nothing is."""
        tokens = used.input_tokens + used.output_tokens
        if self.tokens is not None and tokens >= self.tokens:
            return f"the run used {tokens:,} tokens of {self.tokens:,}"
        if self.cost_usd is not None and used.cost_usd >= self.cost_usd:
            return f"the run cost {used.cost_usd:.4g} USD of {self.cost_usd:.4g}"
        if used.tool_calls + asked > self.tool_calls:
            more = f" and asks for {asked:,} more" if asked else ""
            return f"the run made {used.tool_calls:,} calls of {self.tool_calls:,}{more}"
        return None


class LoopTool(Protocol):
    """A tool as the loop needs it."""

    @property
    def spec(self) -> ToolSpec:
        """As the model sees it."""
        ...

    def check(self, arguments: object) -> dict[str, Any]:
        """What the function gets. Raises `InvalidArguments`."""
        ...

    def needs_approval(self, arguments: dict[str, Any]) -> bool:
        """Whether a person must approve this call."""
        ...


class Steer(Value, frozen=True, kw_only=True):
    """Look for messages that were steered to the run, and tell with `Loop.steered`."""

    step: int


class Request(Value, frozen=True, kw_only=True):
    """Ask the model; feed its parts to `Loop.part`, store what `Loop.answered` makes of them, tell `Loop.stored`."""

    step: int
    request: ModelRequest


class StartCall(Value, frozen=True, kw_only=True):
    """Call the tool, and tell `Loop.ended`. ``values`` is what its function gets by keyword."""

    call: ToolCall
    values: dict[str, Any]


class Ask(Value, frozen=True, kw_only=True):
    """Ask a person for leave to make a call, and tell `Loop.decided`."""

    call: ToolCall
    question: Question


class Refuse(Value, frozen=True, kw_only=True):
    """Write down that a call was not made, and why. The model is told; there is nothing to answer.

    Parameters:
        problem: what a rule of the tool's author raised, to be logged.
    """

    call: ToolCall
    text: str
    problem: Any = None


class Finish(Value, frozen=True, kw_only=True):
    """The model's answer is whole."""


class Exceeded(Value, frozen=True, kw_only=True):
    """A budget is used up: interrupt the run."""

    text: str


Effect = Steer | Request | StartCall | Ask | Refuse | Finish | Exceeded


class Loop:
    """One run of an agent with a model; see the module.

    Parameters:
        run_id: the run's, or the child's; the ids of its calls begin with it.
        messages: what the model sees before the first step, valid.
        instructions, tools, settings: of the agent.
        limits: its bounds.
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
    ) -> None:
        self._run_id = run_id
        self._messages: list[ModelMessage] = list(messages)
        self._instructions = instructions
        self._tools: Mapping[str, LoopTool] = tools or {}
        self._specs = tuple(tool.spec for tool in self._tools.values())
        self._settings = settings or {}
        self._limits = limits or AgentLimits()
        self._state: State = "steering"
        self._begun = False  # the model has said something in this request
        self._failures = 0
        self._said = False  # an earlier step of this run said or did something
        self._parts: list[Part] = []
        self._calls: tuple[ToolCall, ...] = ()
        self._open: dict[str, ToolCall] = {}
        self._results: dict[str, ToolMessage] = {}
        self._waiting: deque[StartCall] = deque()
        self._running = 0
        self.step = 1
        """The number of the step that is on, from 1."""

    @property
    def over(self) -> bool:
        """Whether nothing comes any more."""
        return self._state == "over"

    @property
    def messages(self) -> tuple[ModelMessage, ...]:
        """What the model sees in the next request."""
        return tuple(self._messages)

    def replace(self, messages: Sequence[ModelMessage]) -> None:
        """Go on with these messages, valid ones, in the place of what was said so far."""
        self._leave("steering", "replace")
        self._messages = list(messages)

    def steered(self, messages: Sequence[Message]) -> Request | Exceeded:
        """What was steered to the run before this step; then the step's request."""
        self._leave("steering", "steered")
        for message in messages:
            said = UserMessage(content=message.content, attachments=message.attachments)
            self._messages = with_user(self._messages, said)
        if self.step > self._limits.steps:
            return self._exceed(f"the run took {self._limits.steps:,} steps and asks for more")
        self._state = "requesting"
        self._failures = 0
        return self._request()

    def _request(self) -> Request:
        self._begun = False
        self._parts = []
        return Request(
            step=self.step,
            request=ModelRequest(
                messages=tuple(self._messages),
                instructions=self._instructions,
                tools=self._specs,
                settings=self._settings,
            ),
        )

    def part(self, part: Part) -> None:
        """A part of the model's answer."""
        self._leave("requesting", "part")
        self._begun = True
        self._parts.append(part)

    def failed(self, retry_after_s: float | None) -> tuple[float, Request] | None:
        """The request failed. The time to wait in seconds and the next one, or None: it is not made again.

        Parameters:
            retry_after_s: when it may succeed; None: never.
        """
        self._leave("requesting", "failed")
        if self._begun or retry_after_s is None or self._failures >= self._limits.retries:
            self._state = "over"
            return None
        delay_s = min(max(retry_after_s, FIRST_DELAY_S * 2**self._failures), LONGEST_DELAY_S)
        self._failures += 1
        return delay_s, self._request()

    def answered(self) -> StepFinished:
        """The whole answer, to be stored before its calls begin. Raises `ModelFailed` for one that is none."""
        self._leave("requesting", "answered")
        end = self._parts[-1] if self._parts else None
        if not isinstance(end, EndPart):
            raise ModelFailed("the model broke off its answer", retry_after_s=0.0)
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
        # As the log will have them: the first attempt and later ones see the same.
        if isinstance(part.arguments, dict):
            arguments = msgspec.json.decode(encode_json(part.arguments))
        else:
            arguments = read_arguments(plain(part.arguments))
        return ToolCall(call_id=f"{self._run_id}.{self.step}.{number}", name=tool_name(part.name), arguments=arguments)

    def stored(
        self, step: StepFinished, used: Usage, *, made: Collection[str] = (), asked: Collection[str] = ()
    ) -> list[Effect]:
        """The step is stored, now or in an earlier attempt.

        Parameters:
            step: as `answered` gave it.
            used: by the run and its children so far, this step included; without its calls.
            made: calls that have their result from an earlier attempt: it counts, whatever the tools are now.
            asked: calls that a person decided about in an earlier attempt: that counts, whatever the rules are now.
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
                effects += self._consider(call, asked=call.call_id in asked)
        return effects + self._next()

    def _consider(self, call: ToolCall, *, asked: bool) -> list[Effect]:
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return self._refuse(call, f"there is no tool {call.name!r}; the tools are: {known}")
        if isinstance(call.arguments, str):
            return self._refuse(call, f"the arguments are no JSON object: {call.arguments[:200]!r}")
        try:
            values = tool.check(call.arguments)
            approval = asked or tool.needs_approval(call.arguments)
        except InvalidArguments as error:
            return self._refuse(call, f"the arguments do not fit: {error.message}")
        except Exception as error:  # of a rule that the tool's author wrote
            return self._refuse(call, f"whether it may be called cannot be told: {told(error)}", error)
        if approval:
            return [Ask(call=call, question=_question_of(call))]
        self._waiting.append(StartCall(call=call, values=values))
        return []

    def _refuse(self, call: ToolCall, text: str, problem: Exception | None = None) -> list[Effect]:
        self._settle(call, "error", text)
        return [Refuse(call=call, text=text, problem=problem)]

    def decided(self, answer: Answer) -> list[Effect]:
        """A person's answer to the question of that call."""
        self._leave("calling", "decided")
        call = self._open[answer.question_id]
        reason = f": {answer.text}" if answer.text else ""
        if is_for_another_call(answer, _question_of(call)):
            return self._refuse(call, "the call that a person approved was another one; it was not made") + self._next()
        match answer.decision:
            case "approved":
                assert not isinstance(call.arguments, str)
                self._waiting.append(StartCall(call=call, values=self._tools[call.name].check(call.arguments)))
                return self._next()
            case "expired":
                refused = self._refuse(call, "nobody approved this call in time; it was not made")
            case _:
                refused = self._refuse(call, f"a person denied this call{reason}; it was not made")
        return refused + self._next()

    def ended(self, call_id: str, status: Literal["ok", "error", "interrupted"], content: str) -> list[Effect]:
        """A call has ended, and its result is written down."""
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
        """The calls that there is room for; after the last one has ended, the next step."""
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
            raise IllegalTransition(f"the agent loop is {self._state} and cannot take {happened!r}")


def _question_of(call: ToolCall) -> Question:
    """What is asked before a call is made."""
    return Question(
        question_id=call.call_id,
        kind="approval",
        text=f"May {call.name} be called?",
        tool=call.name,
        arguments=call.arguments,
    )
