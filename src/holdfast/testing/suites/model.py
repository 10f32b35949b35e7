"""Conformance suite for the model port (`holdfast.agents.model`): run it on your own model.

With pytest, for a model that speaks OpenAI's or Anthropic's protocol::

    SUBJECT = served_model(lambda server: MyModel(url=server.url))

    @pytest.mark.parametrize("check", MODEL_CHECKS, ids=lambda check: check.__name__)
    def test_my_model_conforms(check):
        run_model_check(check, SUBJECT)

For other protocols, write your own `ModelSubject`, a function of about ten lines; `served_model` in
`holdfast.testing.suites.model_provider` is an example.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from holdfast.agents.model import Model, opened
from holdfast.errors import ModelFailed, UnknownAttachment
from holdfast.protocol.messages import Attachment, Usage
from holdfast.protocol.model import (
    AssistantMessage,
    CallPart,
    EndPart,
    ModelRequest,
    Part,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolMessage,
    ToolSpec,
    UserMessage,
    read_arguments,
)
from holdfast.runtime import Scope
from holdfast.testing.detectors.leaks import Inventory
from holdfast.testing.model_server import Reply
from holdfast.testing.suites.check_runner import run_check
from holdfast.testing.suites.model_provider import ModelSubject, Provider

__all__ = ["MODEL_CHECKS", "ModelCheck", "run_model_check"]

ModelCheck = Callable[[ModelSubject], Awaitable[None]]
"""A function that checks one rule for models and raises `AssertionError` if the model breaks the rule."""

_CHECKS: list[ModelCheck] = []
_AT_ONCE_S = 3.0
_TEXT = "Some words of an answer that is long enough for several pieces."
_LONG = Reply(text="many words " * 600, pace_s=0.01)
_ADD = ToolSpec(
    name="add",
    description="Add two numbers.",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
)


def run_model_check(check: ModelCheck, subject: ModelSubject) -> None:
    """Run one check on a new event loop, for at most 30 seconds.

    Raises:
        AssertionError: if the model breaks a rule of the port; a note on the error names the rule.
        TimeoutError: if the check takes longer.
        unittest.SkipTest: if the check does not apply to the subject; test runners report the check as skipped.
    """
    run_check(check, subject, port="holdfast/agents/model.py")


def _check(check: ModelCheck) -> ModelCheck:
    _CHECKS.append(check)
    return check


def _ask(text: str = "Write the numbers from one to two hundred in words.", *, tools: bool = False) -> ModelRequest:
    return ModelRequest(messages=(UserMessage(content=text),), tools=(_ADD,) if tools else ())


async def _parts(model: Model, request: ModelRequest, **more: Any) -> list[Part]:
    async with opened(model, request, **more) as parts:
        return [part async for part in parts]


def _text(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def _end(parts: Sequence[Part]) -> EndPart:
    ends = [part for part in parts if isinstance(part, EndPart)]
    assert len(ends) == 1, f"an answer has one end part, and this has {len(ends)}"
    assert parts[-1] is ends[0], f"the end part is the last one, and {type(parts[-1]).__name__} comes after it"
    return ends[0]


async def _quiet(provider: Provider, what: str) -> None:
    """Check that no answer is in progress, according to the provider."""
    try:
        async with asyncio.timeout(_AT_ONCE_S):
            await provider.quiet()
    except TimeoutError:
        raise AssertionError(f"{what}, but {_AT_ONCE_S:g} s later the connection is open and costs tokens") from None


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@_check
async def a_model_says_its_name_and_its_room(subject: ModelSubject) -> None:
    """``name`` is a display name; ``context_tokens`` is a number, or None if unknown."""
    async with subject([]) as provider:
        model = provider.model
        assert isinstance(model, Model), f"{type(model).__name__} lacks some of: name, context_tokens, stream"
        name: object = model.name
        assert isinstance(name, str) and name, f"its name is {name!r}"
        room: object = model.context_tokens
        assert room is None or (isinstance(room, int) and room > 0), f"its context_tokens is {room!r}"


@_check
async def an_answer_comes_in_pieces_and_ends_with_one_end_part(subject: ModelSubject) -> None:
    """Text arrives while it is generated, not at the end; the last part is the only `EndPart`."""
    async with subject([Reply(text=_TEXT)]) as provider:
        parts = await _parts(provider.model, _ask())
        end = _end(parts)
        pieces = [part for part in parts if isinstance(part, TextPart)]
        assert len(pieces) > 1, f"the text comes in {len(pieces)} piece"
        assert all(part.text for part in pieces), "there is a piece without text"
        if provider.scripted:
            assert _text(parts) == _TEXT, f"the provider sent {_TEXT!r}, the parts contain {_text(parts)!r}"
            assert end.reason == "stop", f"it ended by itself, but the reason is {end.reason!r}"
            assert provider.requests == 1, f"one answer took {provider.requests} requests"


@_check
async def what_a_request_cost_is_told(subject: ModelSubject) -> None:
    """The end part contains the token counts that the provider reported."""
    async with subject([Reply(text=_TEXT, usage=Usage(input_tokens=21, output_tokens=7))]) as provider:
        usage = _end(await _parts(provider.model, _ask())).usage
        assert (usage.input_tokens, usage.output_tokens) == (21, 7), f"the provider counted 21 and 7, reported: {usage}"


@_check
async def calls_come_whole_and_in_order(subject: ModelSubject) -> None:
    """Each call in an answer is a separate part with complete arguments; the end part's reason is ``calls``."""
    wanted = [("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})]
    async with subject([Reply(text="I add.", calls=wanted)]) as provider:
        parts = await _parts(provider.model, _ask("add", tools=True))
        calls = [part for part in parts if isinstance(part, CallPart)]
        found = [(call.name, _arguments(call)) for call in calls]
        assert found == wanted, f"the provider asked for {wanted}, the parts ask for {found}"
        assert _text(parts) == "I add.", f"the text beside them is {_text(parts)!r}"
        assert _end(parts).reason == "calls", f"the reason is {_end(parts).reason!r}"


def _arguments(call: CallPart) -> dict[str, Any] | str:
    return read_arguments(call.arguments) if isinstance(call.arguments, str) else call.arguments


@_check
async def broken_arguments_come_as_they_were_written(subject: ModelSubject) -> None:
    """Arguments that are not a JSON object are passed on as text: the loop reports them, and the session continues."""
    for broken in ('{"a": 1, ', "[1, 2]", "add them"):
        async with subject([Reply(calls=[("add", broken)]), Reply(text=_TEXT)]) as provider:
            parts = await _parts(provider.model, _ask("add", tools=True))
            found = [_arguments(part) for part in parts if isinstance(part, CallPart)]
            assert found == [broken], f"the provider wrote {broken!r}, the parts have {found}"
            history = (
                UserMessage(content="add"),
                AssistantMessage(
                    calls=(ToolCall(call_id="c.1", name="add", arguments=broken),), state=_end(parts).state
                ),
                ToolMessage(call_id="c.1", name="add", content="the arguments are not JSON", status="error"),
            )
            again = await _parts(provider.model, ModelRequest(messages=history, tools=(_ADD,)))
            assert _text(again) == _TEXT, f"the request after it is answered with {_text(again)!r}"


@_check
async def why_an_answer_ended_is_told(subject: ModelSubject) -> None:
    """An answer that was cut off at the token limit, or refused, is not mistaken for a complete answer."""
    for reason in ("length", "refused"):
        async with subject([Reply(text=_TEXT, reason=reason)]) as provider:
            found = _end(await _parts(provider.model, _ask())).reason
            assert found == reason, f"the provider ended with {reason!r}, the end part has {found!r}"


@_check
async def reasoning_is_no_part_of_the_answer(subject: ModelSubject) -> None:
    """The model's reasoning comes as `ReasoningPart`, or not at all."""
    async with subject([Reply(reasoning="Let me think.", text=_TEXT)]) as provider:
        parts = await _parts(provider.model, _ask())
        assert _text(parts) == _TEXT, f"the answer is {_text(parts)!r}, not {_TEXT!r}"
        thought = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
        assert thought in ("", "Let me think."), f"the reasoning is {thought!r}"


@_check
async def whatever_a_stopped_run_left_is_taken(subject: ModelSubject) -> None:
    """The provider accepts requests with calls, results of every status, truncated answers and blank texts."""
    ids = ("r_1/é.1", "r_1/é.2")
    with_calls = (
        UserMessage(content="add"),
        AssistantMessage(calls=tuple(ToolCall(call_id=one, name="add", arguments={"a": 1, "b": 2}) for one in ids)),
        ToolMessage(call_id=ids[0], name="add", content="3"),
        ToolMessage(call_id=ids[1], name="add", content="stopped", status="interrupted"),
        UserMessage(content="and now?"),
    )
    cut = (
        UserMessage(content="  "),
        AssistantMessage(text=" \n", partial=True),
        UserMessage(content="again"),
        AssistantMessage(text="I beg", partial=True),
        UserMessage(content="one"),
        UserMessage(content="two"),
    )
    async with subject([Reply(text=_TEXT)] * 2) as provider:
        for messages in (with_calls, cut):
            request = ModelRequest(messages=messages, instructions="Be exact.", tools=(_ADD,))
            assert _text(await _parts(provider.model, request)), "the answer is empty"


@_check
async def attachments_that_are_gone_or_odd_do_not_spoil_a_request(subject: ModelSubject) -> None:
    """A request that names deleted files, or files that the provider does not support, is still answered."""
    files = (
        Attachment(digest="a" * 64, media_type="image/png", name="cat.png", size_bytes=6),
        Attachment(digest="b" * 64, media_type="application/x-odd", name="odd.bin", size_bytes=2),
        Attachment(digest="c" * 64, media_type="image/png", name="gone.png"),
    )

    async def load(digest: str) -> bytes:
        if digest == "c" * 64:
            raise UnknownAttachment(digest)
        return b"\x89PNG\r\n"

    request = ModelRequest(messages=(UserMessage(content="what is this?", attachments=files),))
    async with subject([Reply(text=_TEXT)] * 2) as provider:
        for attachment in (None, load):
            assert _text(await _parts(provider.model, request, attachment=attachment)), "the answer is empty"


@_check
async def requests_at_the_same_time_keep_apart(subject: ModelSubject) -> None:
    """Each of several concurrent requests gets its own answer, and cancelling one does not affect the others."""
    texts = [f"answer number {n}, " * 10 for n in range(4)]
    async with subject([Reply(text=text, pace_s=0.002) for text in texts]) as provider:
        tasks = [asyncio.create_task(_parts(provider.model, _ask(f"question {n}"))) for n in range(len(texts))]
        await asyncio.sleep(0.01)
        tasks[0].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        whole = [answer for answer in answers if isinstance(answer, list)]
        for error in answers[1:]:
            if isinstance(error, BaseException):
                raise AssertionError(f"one request was cancelled, and another raised {error!r}") from error
        assert len(whole) >= len(texts) - 1
        if provider.scripted:
            found = [_text(parts) for parts in whole]
            assert len(set(found)) == len(found) and set(found) <= set(texts), f"the answers are mixed: {found}"


# ── cancel ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_WAITS: dict[str, tuple[Reply, int]] = {
    "before the provider answers at all": (Reply(headers_s=math.inf), 0),
    "before the first piece": (Reply(text="never", pace_s=math.inf), 0),
    "between two pieces": (Reply(text="some words and then none", fault="stall", after=2), 2),
}


@_check
async def a_cancel_closes_the_connection_at_once(subject: ModelSubject) -> None:
    """Cancelling the reading task ends the request, wherever the task waits; the request is not retried."""
    for where, (reply, pieces) in _WAITS.items():
        async with subject([reply, Reply(text=_TEXT)]) as provider:
            asking = asyncio.create_task(_parts(provider.model, _ask()))
            await provider.begun(pieces)
            asking.cancel()
            await _quiet(provider, f"the request was cancelled {where}")
            await asyncio.wait({asking})
            assert asking.cancelled(), f"cancelled {where} it raises {asking.exception()!r}, and not CancelledError"
            assert provider.requests == 1, f"cancelled {where} it was asked {provider.requests} times"


@_check
async def an_interrupt_ends_a_request_and_asks_nothing_again(subject: ModelSubject) -> None:
    """When its scope is stopped, a request ends without force and is not retried."""
    for where, (reply, pieces) in _WAITS.items():
        async with subject([reply, Reply(text=_TEXT)]) as provider:
            scope = Scope("run", detached=True).open()
            handle = scope.spawn(_parts(provider.model, _ask()), name="request")
            await provider.begun(pieces)
            receipt = await scope.stop("enough")
            assert (receipt.outcome, receipt.forced) == ("gone", ()), f"stopped {where} the receipt is {receipt}"
            assert handle.done()
            await _quiet(provider, f"the run was stopped {where}")
            await asyncio.sleep(0.05)
            assert provider.requests == 1, f"stopped {where} it was asked {provider.requests} times: a retry"


@_check
async def leaving_the_block_closes_the_connection(subject: ModelSubject) -> None:
    """Leaving the block after part of the answer ends the request, so that it causes no further cost."""
    async with subject([_LONG]) as provider:
        try:
            async with asyncio.timeout(None) as limit, opened(provider.model, _ask()) as parts:
                async for _ in parts:
                    break
                limit.reschedule(asyncio.get_running_loop().time() + _AT_ONCE_S)
        except TimeoutError:
            raise AssertionError(f"leaving the block takes longer than {_AT_ONCE_S:g} s: the model reads on") from None
        await _quiet(provider, "the block was left after the first part")


@_check
async def the_readers_own_error_is_its_own(subject: ModelSubject) -> None:
    """An error raised in the block propagates unchanged, and the connection is closed."""
    async with subject([_LONG]) as provider:
        error = LookupError("mine")
        try:
            async with opened(provider.model, _ask()) as parts:
                async for _ in parts:
                    raise error
        except Exception as raised:
            assert raised is error, f"the reader raised {error!r}, and out came {raised!r}"
        else:
            raise AssertionError("the error raised in the block was swallowed")
        await _quiet(provider, "the block was left by an error")


@_check
async def requests_leave_nothing_behind(subject: ModelSubject) -> None:
    """Requests that are read completely, abandoned or cancelled leave no task or descriptor behind."""

    async def use() -> None:
        async with subject([Reply(text=_TEXT), _LONG, _LONG]) as provider:
            await _parts(provider.model, _ask())
            async with opened(provider.model, _ask()) as parts:
                async for _ in parts:
                    break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    await _parts(provider.model, _ask())
            await _quiet(provider, "all requests have ended")

    await use()  # warm-up: makes what exists once per process
    before = Inventory(("tasks", "fds"))
    await use()
    left = await asyncio.to_thread(before.left_since, patience_s=5.0)
    assert not left, "left behind: " + "; ".join(left)


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────────

_FAILURES: dict[str, tuple[Reply, bool]] = {
    "status 429": (Reply(status=429, retry_after_s=7), True),
    "status 500": (Reply(status=500), True),
    "status 529": (Reply(status=529), True),
    "status 400": (Reply(status=400), False),
    "status 401": (Reply(status=401), False),
    "status 404": (Reply(status=404), False),
    "a connection that is cut": (Reply(text=_TEXT, fault="cut"), True),
    "a connection that is cut in a call": (Reply(calls=[("add", {"a": 1})], fault="cut", after=0), True),
    "an answer that just stops": (Reply(text=_TEXT, fault="short"), True),
    "an answer that just stops in a call": (Reply(calls=[("add", {"a": 1})], fault="short"), True),
    "garbage in the answer": (Reply(text=_TEXT, fault="garbage"), True),
    "an error in the answer": (Reply(text=_TEXT, fault="error"), True),
}


@_check
async def a_failure_says_whether_to_try_again_and_is_not_repeated_here(subject: ModelSubject) -> None:
    """A failure is a `ModelFailed` whose ``retry_after_s`` is set if a retry may help; only the loop retries.

    An answer that breaks off is a failure, too: a partial text or partial arguments never count as complete.
    """
    for what, (reply, again) in _FAILURES.items():
        async with subject([reply, Reply(text=_TEXT)]) as provider:
            try:
                parts = await _parts(provider.model, _ask(tools=True))
            except ModelFailed as error:
                found = error
            except Exception as error:
                raise AssertionError(f"{what} raised {type(error).__name__} instead of ModelFailed") from error
            else:
                raise AssertionError(f"{what} passes for an answer: {_text(parts)!r}")
            after = found.retry_after_s
            assert (after is not None) is again, (
                f"after {what} another try {'helps' if again else 'is useless'}: {found}"
            )
            if reply.retry_after_s is not None:
                assert after == reply.retry_after_s, (
                    f"the provider asks to wait {reply.retry_after_s} s, reported: {after}"
                )
            if reply.status != 200:
                assert found.provider_status == reply.status, f"{what} is reported as {found.provider_status}"
            assert str(found), "the error has no text"
            assert provider.requests == 1, f"{what} led to {provider.requests} requests: a retry that cannot be stopped"
            assert _text(await _parts(provider.model, _ask())) == _TEXT, (
                f"after {what} the next request is not answered"
            )


MODEL_CHECKS: Sequence[ModelCheck] = tuple(_CHECKS)
