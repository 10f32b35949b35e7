"""The agent loop as a machine: valid requests whatever happens, the same place after a crash, bounds that hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.agents.journal import Journal
from holdfast.agents.tool import Tool, tool
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
from holdfast.protocol.call_hash import hash_call
from holdfast.protocol.events import (
    Event,
    MessageSteered,
    RunRestarted,
    RunResumed,
    RunSuspended,
    StepFinished,
    TextDelta,
    ToolFinished,
    ToolStarted,
)
from holdfast.protocol.messages import Answer, Message, Usage
from holdfast.protocol.model import (
    CallPart,
    EndPart,
    ModelMessage,
    ReasoningPart,
    TextPart,
    ToolMessage,
    UserMessage,
    conversation,
    with_user,
)
from holdfast.protocol.transcript import RunTranscript, result_text
from tests.protocol.rules import check_request

RUN = "r_1"
ASKED = Message(message_id="m_1", seq=1, content="do it")


@tool
def plain(text: str = "") -> str:
    """A tool."""
    return text


@tool(idempotent=True)
def again(number: int) -> str:
    """An idempotent one."""
    return str(number)


@tool(approval=True)
def careful(text: str = "") -> str:
    """One that needs approval."""
    return text


TOOLS = {t.name: t for t in (plain, again, careful)}


def make_loop(tools: dict[str, Tool] | None = None, **limits: Any) -> Loop:
    return Loop(
        run_id=RUN,
        messages=[UserMessage(content="do it")],
        tools=TOOLS if tools is None else tools,
        limits=AgentLimits(**limits),
    )


def say(loop: Loop, *parts: Any, usage: Usage | None = None) -> list[Effect]:
    """Have the model answer with these parts in this step."""
    request = loop.steered(())
    assert isinstance(request, SendModelRequest)
    for part in parts:
        loop.part(TextPart(text=part) if isinstance(part, str) else part)
    loop.part(EndPart(usage=usage or Usage()))
    step = loop.answered()
    return loop.stored(step, step.usage)


def call(name: str = "plain", arguments: Any = "{}") -> CallPart:
    return CallPart(name=name, arguments=arguments)


# ── one by one ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_answer_without_calls_is_the_end() -> None:
    loop = make_loop()
    assert say(loop, "all ", "done") == [Finish()]
    assert loop.over


def test_calls_of_a_step_begin_together_and_the_next_step_after_the_last() -> None:
    loop = make_loop()
    first, second = say(loop, call(), call("again", {"number": "7"}))
    assert isinstance(first, StartCall)
    assert isinstance(second, StartCall)
    assert (first.call.call_id, second.call.call_id) == ("r_1.1.1", "r_1.1.2")
    assert second.values == {"number": 7}
    assert loop.ended("r_1.1.2", "ok", "7") == []
    assert loop.ended("r_1.1.1", "error", "no") == [Steer(step=2)]
    results = [m for m in loop.messages if isinstance(m, ToolMessage)]
    assert [(m.call_id, m.status) for m in results] == [("r_1.1.1", "error"), ("r_1.1.2", "ok")]


def test_only_so_many_calls_run_at_once() -> None:
    loop = make_loop(calls_at_once=3)
    started = say(loop, *[call()] * 10)
    running = [effect.call.call_id for effect in started if isinstance(effect, StartCall)]
    assert len(running) == 3
    made = 3
    while running:
        effects = loop.ended(running.pop(0), "ok", "x")
        fresh = [effect.call.call_id for effect in effects if isinstance(effect, StartCall)]
        made += len(fresh)
        running += fresh
        assert len(running) <= 3
    assert made == 10
    assert loop.step == 2


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (call("nothing"), "unknown tool 'nothing'; available tools: plain, again, careful"),
        (call("bad name!"), "unknown tool 'bad_name_'"),
        (call("plain", "{broken"), "the arguments are not a JSON object"),
        (call("plain", "[1]"), "the arguments are not a JSON object"),
        (call("again", {"number": "many"}), "invalid arguments"),
        (call("again", {}), "missing required field `number`"),
        (call("plain", {"other": 1}), "unknown field `other`"),
    ],
)
def test_a_call_that_cannot_be_made_is_told_to_the_model(asked: CallPart, text: str) -> None:
    loop = make_loop()
    effects = say(loop, asked)
    assert isinstance(effects[0], Refuse)
    assert text in effects[0].text
    assert effects[1:] == [Steer(step=2)]
    assert text in str(loop.messages[-1])
    check_request(loop.messages)


def test_a_rule_of_approval_that_raises_refuses_its_call() -> None:
    def rule(_: dict[str, Any]) -> bool:
        raise ValueError("broken rule")

    odd = tool(name="odd", approval=rule)(lambda: "x")
    effects = say(make_loop({"odd": odd}), call("odd"))
    assert isinstance(effects[0], Refuse)
    assert "broken rule" in effects[0].text


@pytest.mark.parametrize(
    ("decision", "text"),
    [("denied", "a person denied this call: not now"), ("expired", "the approval of this call expired")],
)
def test_a_call_that_is_not_approved_is_not_made_and_others_go_on(
    decision: Literal["denied", "expired"], text: str
) -> None:
    loop = make_loop()
    asked, other = say(loop, call("careful", {"text": "x"}), call())
    assert isinstance(asked, Ask)
    assert isinstance(other, StartCall)
    assert (asked.question.kind, asked.question.tool, asked.question.arguments) == (
        "approval",
        "careful",
        {"text": "x"},
    )
    assert loop.ended(other.call.call_id, "ok", "done") == []
    [refused, steer] = loop.decided(
        Answer(
            question_id=asked.question.question_id, decision=decision, text="not now" if decision == "denied" else ""
        )
    )
    assert isinstance(refused, Refuse)
    assert text in refused.text
    assert steer == Steer(step=2)


def test_an_approved_call_is_made() -> None:
    loop = make_loop()
    [asked] = say(loop, call("careful", {"text": "x"}))
    assert isinstance(asked, Ask)
    [start] = loop.decided(Answer(question_id=asked.question.question_id, decision="approved"))
    assert isinstance(start, StartCall)
    assert start.values == {"text": "x"}


def test_an_approval_of_another_call_makes_none() -> None:
    """The run was made again and asks for something else under the same id."""
    loop = make_loop()
    [asked] = say(loop, call("careful", {"text": "x"}))
    assert isinstance(asked, Ask)
    shown = msgspec.structs.replace(asked.question, arguments={"text": "y"})
    refused = loop.decided(
        Answer(question_id=asked.question.question_id, decision="approved", call_hash=hash_call(shown))
    )
    assert isinstance(refused[0], Refuse)
    assert "a different call" in refused[0].text
    assert not any(isinstance(effect, StartCall) for effect in refused)


def test_budgets_end_the_run_before_more_is_done() -> None:
    looping = make_loop(steps=3)
    for _ in range(3):
        [start] = say(looping, call())
        assert isinstance(start, StartCall)
        looping.ended(start.call.call_id, "ok", "x")
    assert isinstance(looping.steered(()), Exceeded)

    many = make_loop(tool_calls=200)
    [exceeded] = say(many, *[call()] * 1000)
    assert isinstance(exceeded, Exceeded)
    assert "1,000 more, of" not in exceeded.text
    assert "requests 1,000 more" in exceeded.text

    dear = make_loop(cost_usd=0.5)
    [exceeded] = say(dear, call(), usage=Usage(cost_usd=0.6))
    assert isinstance(exceeded, Exceeded)

    long = make_loop(tokens=100)
    [exceeded] = say(long, call(), usage=Usage(input_tokens=90, output_tokens=10))
    assert isinstance(exceeded, Exceeded)


def test_an_answer_that_is_whole_counts_although_it_used_the_budget_up() -> None:
    assert say(make_loop(tokens=100), "done", usage=Usage(input_tokens=1000)) == [Finish()]


def test_a_request_is_made_again_only_while_it_has_said_nothing() -> None:
    loop = make_loop(retries=2)
    loop.steered(())
    delays = []
    for _ in range(2):
        again = loop.failed(0.0)
        assert again is not None
        delays.append(again[0])
    assert delays == [0.5, 1.0]
    assert loop.failed(0.0) is None

    begun = make_loop()
    begun.steered(())
    begun.part(TextPart(text="I"))
    assert begun.failed(0.0) is None

    never = make_loop()
    never.steered(())
    assert never.failed(None) is None

    patient = make_loop()
    patient.steered(())
    again = patient.failed(1000.0)
    assert again is not None
    assert again[0] == 30.0


def test_an_answer_that_is_none_is_a_failure_of_the_model() -> None:
    cases: list[tuple[list[Any], str, bool]] = [
        ([], "broke off", True),
        ([TextPart(text="half")], "broke off", False),
        ([EndPart()], "an empty answer", True),
        ([ReasoningPart(text="hm"), EndPart()], "an empty answer", False),
        ([EndPart(reason="refused")], "refused to answer", False),
    ]
    for parts, text, repeated in cases:
        loop = make_loop()
        loop.steered(())
        for part in parts:
            loop.part(part)
        with pytest.raises(ModelFailed, match=text) as caught:
            loop.answered()
        assert (loop.failed(caught.value.retry_after_s) is not None) is repeated


def test_after_a_call_the_model_may_have_nothing_to_add() -> None:
    loop = make_loop()
    [start] = say(loop, call())
    assert isinstance(start, StartCall)
    loop.ended(start.call.call_id, "ok", "x")
    assert say(loop) == [Finish()]


def test_what_comes_out_of_its_order_is_refused() -> None:
    loop = make_loop()
    moves: list[Callable[[], object]] = [
        lambda: loop.part(TextPart(text="x")),
        loop.answered,
        lambda: loop.ended("r_1.1.1", "ok", ""),
        lambda: loop.failed(0.0),
    ]
    for move in moves:
        with pytest.raises(IllegalTransition, match="the agent loop is steering"):
            move()


# ── all of it ────────────────────────────────────────────────────────────────────────────────────────────────────────

ANSWERS = st.lists(
    st.one_of(
        st.sampled_from(["", " ", "text", "\n\n", "more "]),
        st.builds(
            call,
            st.sampled_from(["plain", "again", "careful", "nothing", "b√d", ""]),
            st.sampled_from(["", "{}", '{"number": 1}', '{"number": "x"}', "{", "[]", {"text": "t"}, "null", '"x"']),
        ),
    ),
    max_size=4,
)
ENDS = ("completed", "failed", "interrupted", "crashed", "restarted")


class Ended(Exception):  # noqa: N818
    """The run was ended at this event."""


class Played:
    """One run: its log, and what its live transcript says; every effect is done by drawing."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw
        self.log: list[Event] = []
        self.messages = [ASKED]
        self.requests: dict[int, Sequence[ModelMessage]] = {}
        self.calls = 0

    def attempt(self, stop_at: int) -> RunTranscript:
        """Play until the run is over or has so many events."""
        self.stop_at = stop_at
        self.journal = Journal(self.log)
        self.fold = RunTranscript(RUN, self.messages)
        loop = make_loop(steps=6, tool_calls=30, calls_at_once=2)
        running: dict[str, None] = {}
        while not loop.over:
            self._step(loop, running)
        return self.fold

    def write(self, event: Event) -> None:
        if len(self.log) >= self.stop_at:
            raise Ended
        self.log.append(msgspec.structs.replace(event, seq=len(self.log) + 1))
        self.fold.feed(event)

    def _step(self, loop: Loop, running: dict[str, None]) -> None:
        known = [m for m in self.messages if m.message_id in self.journal.steered(loop.step)]
        past = self.journal.step(RUN, loop.step)
        for message in known:
            self.fold.feed(MessageSteered(run_id=RUN, message_id=message.message_id, step=loop.step))
        if past is None and self.draw(st.integers(0, 3)) == 0:
            message = Message(
                message_id=f"m_{len(self.messages) + 1}", seq=0, content=self.draw(st.sampled_from(["", "steer"]))
            )
            if len(self.log) >= self.stop_at:
                raise Ended  # the store takes a message and writes its event together
            self.messages.append(message)
            self.fold.know([message])
            self.write(MessageSteered(run_id=RUN, message_id=message.message_id, step=loop.step))
            known.append(message)
        request = loop.steered(known)
        if isinstance(request, Exceeded):
            return
        messages = request.request.messages
        check_request(messages)
        assert self.requests.setdefault(loop.step, messages) == messages or past is None
        if past is None:
            past = self._answer(loop)
            if past is None:
                return
        else:
            self.fold.feed(past)
        effects = loop.stored(past, Usage(tool_calls=self.calls))
        while True:
            for effect in effects:
                self._do(loop, effect, running)
            if loop.over or any(isinstance(effect, Steer) for effect in effects):
                return
            effects = self._result(loop, running)

    def _answer(self, loop: Loop) -> StepFinished | None:
        for part in self.draw(ANSWERS):
            loop.part(TextPart(text=part) if isinstance(part, str) else part)
            if isinstance(part, str) and part:
                self.write(TextDelta(run_id=RUN, text=part))
        loop.part(EndPart())
        try:
            step = loop.answered()
        except ModelFailed:
            raise Ended from None
        self.write(step)
        return step

    def _do(self, loop: Loop, effect: Effect, running: dict[str, None]) -> None:
        match effect:
            case StartCall(call=asked):
                self.begin(asked.call_id, asked.name, asked.arguments, idempotent=TOOLS[asked.name].idempotent)
                running[asked.call_id] = None
            case Refuse(call=asked, text=text):
                if self.begin(asked.call_id, asked.name, asked.arguments, idempotent=True) is None:
                    self.write(ToolFinished(run_id=RUN, call_id=asked.call_id, status="error", error=text))
            case Ask(question=question):
                if self.journal.answer(question.question_id) is None:
                    self.write(RunSuspended(run_id=RUN, question=question))
                running[f"?{question.question_id}"] = None
            case _:
                pass

    def begin(self, call_id: str, name: str, arguments: Any, *, idempotent: bool) -> ToolFinished | None:
        past = self.journal.past(call_id, name, arguments)
        started = ToolStarted(run_id=RUN, call_id=call_id, name=name, arguments=arguments, idempotent=idempotent)
        if past is not None:
            self.fold.feed(started)
            self.fold.feed(past)
        else:
            self.write(started)
        return past

    def _result(self, loop: Loop, running: dict[str, None]) -> list[Effect]:
        chosen = self.draw(st.sampled_from(sorted(running)))
        del running[chosen]
        if chosen.startswith("?"):
            answer = self.journal.answer(chosen[1:])
            if answer is None:
                decision = self.draw(st.sampled_from(["approved", "denied", "expired"]))
                answer = Answer(question_id=chosen[1:], decision=decision)
                self.write(RunResumed(run_id=RUN, answer=answer))
            return loop.decided(answer)
        self.calls += 1
        past = self.journal._results.get(chosen)
        if past is None:
            status: Literal["ok", "error"] = self.draw(st.sampled_from(["ok", "error"]))
            past = ToolFinished(
                run_id=RUN,
                call_id=chosen,
                status=status,
                result=self.draw(st.sampled_from(["", "text", {"a": 1}, None, 3])) if status == "ok" else None,
                error="it failed" if status == "error" else None,
            )
            self.write(past)
        return loop.ended(chosen, past.status, result_text(past))


def next_request(entries: Sequence[Any]) -> tuple[ModelMessage, ...]:
    return tuple(with_user(conversation(entries), UserMessage(content="go on")))


def check_ended(fold: RunTranscript, status: Literal["completed", "failed", "interrupted"]) -> Sequence[ModelMessage]:
    entries = fold.entries(status=status)
    called = [e.call_id for e in entries if e.role == "tool_call"]
    results = [e.call_id for e in entries if e.role == "tool_result"]
    assert sorted(map(str, called)) == sorted(map(str, results))
    assert len(set(called)) == len(called)
    messages = next_request(entries)
    check_request(messages)
    return messages


def from_log(played: Played) -> RunTranscript:
    fold = RunTranscript(RUN, played.messages)
    for event in played.log:
        fold.feed(event)
    return fold


@settings(max_examples=400)
@given(st.data())
def test_whatever_ends_a_run_and_wherever_its_transcript_and_the_next_request_are_valid(data: st.DataObject) -> None:
    """Tool calls in every state (asked, waiting, running, ended, refused, denied) × completed, failed, interrupted,
    crashed, and restarted after any event, again and again."""
    played = Played(data.draw)
    stop_at = data.draw(st.integers(0, 40))
    for _ in range(4):
        try:
            fold = played.attempt(stop_at)
        except Ended:
            end = data.draw(st.sampled_from(ENDS))
            fold = played.fold
            logged = from_log(played)
            if end != "crashed" and data.draw(st.booleans()):
                for call_id in list(fold._open):  # as the driver does for each call that it stops
                    stopped = ToolFinished(run_id=RUN, call_id=call_id, status="interrupted")
                    fold.feed(stopped)
                    logged.feed(stopped)
                    played.log.append(stopped)
            if end != "restarted":
                live = check_ended(fold, "failed" if end == "failed" else "interrupted")
                assert check_ended(logged, "failed" if end == "failed" else "interrupted") == live
                return
            played.log.append(RunRestarted(run_id=RUN, attempt=2, discard_from=0))
            stop_at = len(played.log) + data.draw(st.integers(0, 20))
        else:
            live = check_ended(fold, "completed")
            assert check_ended(from_log(played), "completed") == live
            assert from_log(played).text == fold.text
            return


ENTRIES = st.lists(
    st.builds(
        lambda role, text, call_id: {
            "role": role,
            "content": text,
            "call_id": call_id if role.startswith("tool") else None,
            "name": "b√d name" if role.startswith("tool") else None,
        },
        st.sampled_from(["user", "assistant", "tool_call", "tool_result", "summary"]),
        st.sampled_from(["", " ", "text", "{}", "[1]", "{broken"]),
        st.sampled_from(["a", "b", "c", None]),
    ),
    max_size=12,
)


@settings(max_examples=400)
@given(ENTRIES)
def test_a_conversation_is_valid_whatever_the_transcript_holds(rows: list[dict[str, Any]]) -> None:
    """Imported and edited histories too: calls without results, results without calls, doubles, nothing at all."""
    from holdfast.protocol.messages import Entry

    check_request(next_request([Entry(**row) for row in rows]))
