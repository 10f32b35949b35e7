"""The states of runs and messages together, and the agent loop, as machines that Hypothesis drives.

The session's decisions have theirs in `test_mailbox_policies`, the stores in `tests/storage/test_model.py`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast.errors import IllegalTransition, ModelFailed
from holdfast.protocol.agent_loop import (
    AgentLimits,
    Ask,
    Effect,
    Exceeded,
    Finish,
    Loop,
    Refuse,
    SendModelRequest,
    StartCall,
    Steer,
)
from holdfast.protocol.events import StepFinished
from holdfast.protocol.messages import Answer, Decision, Message, MessageState, RunState, Usage
from holdfast.protocol.model import CallPart, EndPart, ModelMessage, TextPart, ToolMessage, UserMessage
from holdfast.protocol.states import (
    TERMINAL_MESSAGE_STATES,
    TERMINAL_RUN_STATES,
    MessageInput,
    RunInput,
    next_message_state,
    next_run_state,
)
from tests.protocol.rules import check_request
from tests.protocol.test_agent_loop import TOOLS

REFUSED: set[tuple[RunState, RunInput]] = {
    ("running", "resume"),
    ("running", "stopped"),
    ("suspended", "complete"),
    ("suspended", "fail"),
    ("suspended", "stopped"),
    ("stopping", "suspend"),
    ("stopping", "resume"),
    ("stopping", "restart"),
}
"""What makes no sense: nobody asked for a stop or an answer, or the run waits for one, or it is to end."""
SETTLED_BY: dict[RunState, MessageInput] = {"completed": "complete", "failed": "fail", "interrupted": "interrupt"}


class RunsAndMessages(RuleBasedStateMachine):
    """A session's runs, one after the other, and its messages: each change goes through the tables."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[MessageState] = []
        self.settlements: list[int] = []
        self.holds: list[int] = []
        self.run: RunState | None = None
        self.asked = 0
        self.rolled_back = False

    def change(self, message: int, event: MessageInput) -> None:
        """Change a message as the table says."""
        self.messages[message] = next_message_state(self.messages[message], event)
        self.settlements[message] += self.messages[message] in TERMINAL_MESSAGE_STATES

    @rule()
    def accept(self) -> None:
        """A message comes."""
        self.messages.append("accepted")
        self.settlements.append(0)

    @precondition(lambda self: self.run is None and "accepted" in self.messages)
    @rule(many=st.integers(1, 3))
    def start(self, many: int) -> None:
        """A run takes the oldest messages."""
        self.holds = [at for at, state in enumerate(self.messages) if state == "accepted"][:many]
        for message in self.holds:
            self.change(message, "take")
        self.run, self.asked, self.rolled_back = "running", 0, False

    @precondition(lambda self: self.run in ("running", "suspended") and "accepted" in self.messages)
    @rule()
    def steer(self) -> None:
        """The run takes a message while it is on."""
        message = self.messages.index("accepted")
        self.change(message, "take")
        self.holds.append(message)

    @precondition(lambda self: self.messages)
    @rule(pick=st.integers(0, 99))
    def withdraw(self, pick: int) -> None:
        """Somebody takes a message back: only one that nobody has taken."""
        message = pick % len(self.messages)
        before = self.messages[message]
        if before == "accepted":
            self.change(message, "withdraw")
            assert self.messages[message] == "withdrawn"
        else:
            with pytest.raises(IllegalTransition):
                self.change(message, "withdraw")
            assert self.messages[message] == before

    @precondition(lambda self: self.run is not None)
    @rule(
        events=st.lists(st.sampled_from(["interrupt", "suspend", *get_args(RunInput)]), min_size=2, max_size=5),
        rollback=st.booleans(),
    )
    def happen(self, events: list[RunInput], rollback: bool) -> None:
        """Things happen to the run; when it ends, its messages are settled by that, all at once."""
        for event in events:
            if self.run is not None:
                self.happens(event, rollback)

    def happens(self, event: RunInput, rollback: bool) -> None:
        """One thing happens."""
        assert self.run is not None
        if event == "resume" and self.asked > 1:
            self.asked -= 1  # one answer of several
            return
        try:
            after = next_run_state(self.run, event)
        except IllegalTransition as refusal:
            assert (self.run, event) in REFUSED
            assert refusal.hint
            return
        assert (self.run, event) not in REFUSED
        self.judge(self.run, event, after)
        self.asked = self.asked + 1 if event == "suspend" else 0 if after != "suspended" else self.asked
        self.rolled_back |= rollback and event == "interrupt"
        self.run = after
        if after in TERMINAL_RUN_STATES:
            taken_back = self.rolled_back and after == "interrupted"
            for message in self.holds:
                self.change(message, "supersede" if taken_back else SETTLED_BY[after])
                assert self.messages[message] == ("superseded" if taken_back else after)
            self.run, self.holds = None, []

    @staticmethod
    def judge(before: RunState, event: RunInput, after: RunState) -> None:
        """What a run becomes, said without the table."""
        match event:
            case "crash" | "stopped":
                assert after == "interrupted"
            case "interrupt":
                assert after == "stopping"
            case "complete":
                assert after == "completed", "what was done counts, also while it is being stopped"
            case "fail":
                assert after == ("interrupted" if before == "stopping" else "failed")
            case "suspend":
                assert after == "suspended"
            case "resume":
                assert after == "running"
            case "restart":
                assert after == before

    @precondition(lambda self: any(state in TERMINAL_MESSAGE_STATES for state in self.messages))
    @rule(pick=st.integers(0, 99), event=st.sampled_from(get_args(MessageInput)))
    def comes_late(self, pick: int, event: MessageInput) -> None:
        """Nothing moves what is settled, nor a run that has ended."""
        settled = [state for state in self.messages if state in TERMINAL_MESSAGE_STATES]
        with pytest.raises(IllegalTransition):
            next_message_state(settled[pick % len(settled)], event)
        for run, late in itertools.product(sorted(TERMINAL_RUN_STATES), get_args(RunInput)):
            with pytest.raises(IllegalTransition):
                next_run_state(run, late)

    @invariant()
    def each_message_is_settled_once_and_by_its_run(self) -> None:
        """Taken is what the run holds, and nothing else; who is settled stays so."""
        assert [at for at, state in enumerate(self.messages) if state == "taken"] == sorted(self.holds)
        assert all(
            count == (state in TERMINAL_MESSAGE_STATES)
            for state, count in zip(self.messages, self.settlements, strict=True)
        )

    @invariant()
    def who_holds_the_slot_can_give_it_back(self) -> None:
        """From each state a crash and an interrupt lead on, so no session is wedged."""
        if self.run is not None:
            assert self.run not in TERMINAL_RUN_STATES
            assert next_run_state(self.run, "crash") == "interrupted"
            assert next_run_state(self.run, "interrupt") == "stopping"
            assert (self.run == "suspended") == (self.asked > 0)


Fed = tuple[str, tuple[Any, ...]]
REACHED: Counter[object] = Counter()
"""How often the loop did each thing that it can do."""
LIMITS = AgentLimits(steps=3, tool_calls=6, calls_at_once=2, retries=1, tokens=1000)
GOOD = {"plain": ("{}", {"text": "x"}), "careful": ("{}", {"text": "x"}), "again": ({"number": 1},)}
"""What each tool can be called with."""
BAD = (
    CallPart(name="no such tool", arguments="{}"),
    CallPart(name="plain", arguments="no JSON"),
    CallPart(name="careful", arguments={"number": 1}),
    CallPart(name="again", arguments={"number": "no number"}),
)
CALLS = st.sampled_from(
    [CallPart(name=name, arguments=arguments) for name in GOOD for arguments in GOOD[name]] * 2 + list(BAD)
)


class AgentLoop(RuleBasedStateMachine):
    """Everything that can be fed to the loop, in its order and out of it; and the same once more, as after a crash."""

    @initialize()
    def begin(self) -> None:
        """A run begins."""
        self.loop = self.made()
        self.fed: list[Fed] = []
        self.phase: Literal["steering", "requesting", "calling", "over"] = "steering"
        self.said: list[str] = []
        self.calls_of_step: dict[str, CallPart] = {}
        self.approved: set[str] = set()
        self.held: set[str] = set()
        self.results: dict[str, tuple[str, str]] = {}
        self.tokens = 0
        self.asked_for: set[str] = set()
        self.running: list[str] = []
        self.questions: list[str] = []
        self.finished: set[str] = set()
        self.calls = 0
        self.steered_in = 0
        self.failures = 0
        self.gave_up = False

    @staticmethod
    def made() -> Loop:
        """A fresh one."""
        return Loop(run_id="r", messages=[UserMessage(content="do it")], tools=TOOLS, limits=LIMITS)

    def feed(self, what: str, *values: Any) -> Any:
        """Feed it to the loop, and remember what a later attempt would find in the log."""
        result = getattr(self.loop, what)(*values)
        self.fed.append((what, values))
        return result

    @precondition(lambda self: self.phase == "over")
    @rule()
    def another(self) -> None:
        """The next run, so that no walk ends early."""
        REACHED["step", self.loop.step] += 1
        self.begin()

    @precondition(lambda self: self.phase == "steering")
    @rule(texts=st.lists(st.sampled_from(["", "go left"]), max_size=2))
    def steer(self, texts: list[str]) -> None:
        """The step begins, with what was steered to it."""
        messages = [Message(message_id=f"m{at}", seq=at, content=text) for at, text in enumerate(texts)]
        self.steered_in += len([text for text in texts if text])
        request = self.feed("steered", messages)
        self.failures = 0
        self.asked(request)

    def asked(self, request: SendModelRequest | Exceeded) -> None:
        """The loop asks the model, or a budget is used up."""
        if isinstance(request, Exceeded):
            assert self.loop.step > LIMITS.steps
            REACHED["all steps"] += 1
            self.phase = "over"
            return
        assert request.step == self.loop.step <= LIMITS.steps
        check_request(request.request.messages)
        words = [m.content for m in request.request.messages if isinstance(m, UserMessage)]
        assert "\n".join(words).count("go left") == self.steered_in, "a message that steers was lost, or came twice"
        self.phase, self.said = "requesting", []

    @precondition(lambda self: self.phase == "requesting")
    @rule(text=st.sampled_from(["", "hm ", "yes"]))
    def text(self, text: str) -> None:
        """The model says something."""
        self.feed("part", TextPart(text=text))
        self.said.append(text)

    @precondition(lambda self: self.phase == "requesting" and not self.said)
    @rule(retry_after_s=st.sampled_from([0.0, 0.0, 99.0, None]))
    def fail(self, retry_after_s: float | None) -> None:
        """The request fails before it said anything."""
        again = self.feed("failed", retry_after_s)
        assert (again is None) == (retry_after_s is None or self.failures >= LIMITS.retries)
        if again is None:
            self.phase, self.gave_up = "over", True
            return
        self.failures += 1
        delay_s, request = again
        assert 0 < delay_s <= 30
        self.asked(request)

    @precondition(lambda self: self.phase == "requesting" and any(self.said))
    @rule(sure=st.sampled_from([False, False, False, True]))
    def break_off(self, sure: bool) -> None:
        """The request fails after it said something: nobody can take that back, so it is not made again."""
        if sure:
            assert self.feed("failed", 0.0) is None
            self.phase, self.gave_up = "over", True

    @precondition(lambda self: self.phase == "requesting")
    @rule(
        calls=st.lists(CALLS, max_size=4) | st.lists(CALLS, min_size=1, max_size=2),
        tokens=st.sampled_from([0, 0, 0, 600]),
    )
    def answer(self, calls: list[CallPart], tokens: int) -> None:
        """The answer is whole; it is stored, and its calls begin."""
        for part in (*calls, EndPart(usage=Usage(output_tokens=tokens))):
            self.feed("part", part)
        try:
            step: StepFinished = self.loop.answered()
        except ModelFailed:
            assert not calls
            assert not "".join(self.said)
            assert self.loop.step == 1, "after a call there may be nothing to add"
            self.asked_again()
            return
        assert calls or "".join(self.said) or self.loop.step > 1, "an empty answer is none"
        assert step.text == "".join(self.said)
        assert len(step.calls) == len(calls)
        ids = {call.call_id for call in step.calls}
        assert not ids & (self.asked_for | self.finished), "a call's id was used before"
        self.asked_for = ids
        self.calls_of_step = {call.call_id: part for call, part in zip(step.calls, calls, strict=True)}
        self.results = {}
        self.tokens += tokens
        used = Usage(tool_calls=self.calls, output_tokens=self.tokens)
        effects = self.feed("stored", step, used)
        if not step.calls:
            assert effects == [Finish()]
            self.phase = "over"
        elif self.calls + len(step.calls) > LIMITS.tool_calls or self.tokens >= 1000:
            assert [type(effect) for effect in effects] == [Exceeded]
            REACHED["used up", self.tokens >= 1000] += 1
            self.phase = "over"
        else:
            self.phase = "calling"
            good = {call_id for call_id, part in self.calls_of_step.items() if part not in BAD}
            self.held = {call_id for call_id in good if self.calls_of_step[call_id].name != "careful"}
            self.do(effects)
            assert self.asked_for == good or not good, "refused what fits, or not what does not"
            assert set(self.questions) == good - self.held - set(self.running), "a person is asked of others"

    def asked_again(self) -> None:
        """An empty answer is a failure of the request."""
        again = self.feed("failed", 0.0)
        if again is None:
            self.phase, self.gave_up = "over", True
            return
        self.failures += 1
        self.asked(again[1])

    def do(self, effects: Sequence[Effect]) -> None:
        """What the loop asks for while its calls are on."""
        for effect in effects:
            REACHED[type(effect).__name__] += 1
            match effect:
                case StartCall(call=call):
                    assert call.call_id in self.asked_for
                    assert call.name != "careful" or call.call_id in self.approved, "made without leave"
                    self.held.remove(call.call_id)
                    self.running.append(call.call_id)
                case Ask(question=question):
                    self.questions.append(question.question_id)
                case Refuse(call=call, text=text):
                    self.end_of(call.call_id, "error", text)
                case Steer(step=step):
                    assert step == self.loop.step
                    assert not self.asked_for, "the next step begins while a call is open"
                    self.phase = "steering"
                    last = [m for m in self.loop.messages[-len(self.results) :] if isinstance(m, ToolMessage)]
                    expected = [(call_id, *self.results[call_id]) for call_id in self.calls_of_step]
                    assert [(m.call_id, m.status, m.content) for m in last] == expected, "not the results, in order"
                case _:
                    raise AssertionError(f"{effect} while calls are on")
        assert not self.held or len(self.running) == LIMITS.calls_at_once, "a call waits, and there is room"
        REACHED["held back"] += bool(self.held)

    def end_of(self, call_id: str, status: str, content: str) -> None:
        """The call has its result, the only one."""
        self.results[call_id] = (status, content)
        self.asked_for.remove(call_id)
        assert call_id not in self.finished
        self.finished.add(call_id)

    @precondition(lambda self: self.phase == "calling" and self.running)
    @rule(pick=st.integers(0, 9), status=st.sampled_from(["ok", "error", "interrupted"]))
    def end(self, pick: int, status: str) -> None:
        """A call ends."""
        call_id = self.running.pop(pick % len(self.running))
        self.calls += 1
        self.end_of(call_id, status, f"result of {call_id}")
        self.do(self.feed("ended", call_id, status, f"result of {call_id}"))

    @precondition(lambda self: self.phase == "calling" and self.questions)
    @rule(pick=st.integers(0, 9), decision=st.sampled_from(["approved", "denied", "expired"]))
    def decide(self, pick: int, decision: Decision) -> None:
        """A person decides about a call."""
        question = self.questions.pop(pick % len(self.questions))
        if decision == "approved":
            self.approved.add(question)
            self.held.add(question)
        self.do(self.feed("decided", Answer(question_id=question, decision=decision)))
        assert (question in self.finished) == (decision != "approved"), "made although it was not approved"

    @rule()
    def what_comes_out_of_its_order_is_refused(self) -> None:
        """And changes nothing."""
        wrong: dict[str, Callable[[], object]] = {
            "steering": lambda: self.loop.steered(()),
            "requesting": lambda: self.loop.failed(None),
            "calling": lambda: self.loop.ended("r.1.1", "ok", ""),
        }
        before = self.seen(self.loop)
        for phase, feed in wrong.items():
            if phase != self.phase:
                with pytest.raises(IllegalTransition):
                    feed()
        assert self.seen(self.loop) == before

    @rule()
    def after_a_crash_the_same_leads_to_the_same(self) -> None:
        """A new loop that is fed what the log has stands where this one stands, and takes over.

        Parts and failures of a request are not in the log: it is made anew.
        """
        again = self.made()
        for what, values in self.fed:
            if what in ("steered", "stored", "ended", "decided"):
                getattr(again, what)(*values)
        if self.gave_up:
            assert not again.over
            return
        assert self.seen(again) == self.seen(self.loop)
        if self.phase != "requesting":
            self.loop = again

    @staticmethod
    def seen(loop: Loop) -> tuple[int, bool, tuple[ModelMessage, ...]]:
        """Where a loop stands."""
        return loop.step, loop.over, loop.messages

    @invariant()
    def bounds_hold(self) -> None:
        """No more calls at once, in all, or steps than there may be; over is over."""
        if hasattr(self, "loop"):
            assert len(self.running) <= LIMITS.calls_at_once
            assert self.calls <= LIMITS.tool_calls
            assert self.loop.step <= LIMITS.steps + 1
            assert self.loop.over == (self.phase == "over")


RunsAndMessages.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestRunsAndMessages = RunsAndMessages.TestCase


def test_the_agent_loop_is_seen_in_all_that_it_can_do() -> None:
    """A machine whose walks end early proves nothing."""
    REACHED.clear()
    wanted = ["StartCall", "Ask", "Refuse", "Steer", "held back", "all steps", ("used up", True), ("used up", False)]
    for number in range(20):  # which walks are taken depends on the name, and on what else was imported
        walks = type(f"AgentLoop{number}", (AgentLoop,), {})
        run_state_machine_as_test(walks, settings=settings(max_examples=100, stateful_step_count=60))
        if all(REACHED[what] >= 3 for what in wanted):
            return
    pytest.fail(f"seen in 2,000 walks: {REACHED}")


@pytest.mark.nightly
@pytest.mark.parametrize("machine", [RunsAndMessages, AgentLoop])
def test_machines_for_long(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=1000, stateful_step_count=50))
