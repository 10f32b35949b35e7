"""Models with one fault each: how providers are spoken to wrongly. Each names the check that finds it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from holdfast.agents.model import Model
from holdfast.errors import ModelFailed
from holdfast.protocol.messages import Usage
from holdfast.protocol.model import (
    AssistantMessage,
    CallPart,
    EndPart,
    ModelRequest,
    Part,
    ReasoningPart,
    TextPart,
    UserMessage,
)

FAULTS: dict[str, Callable[[Model], Model]] = {}


class Around:
    """A model around another one, without a fault of its own."""

    name = "faulty"
    context_tokens: int | None = None

    def __init__(self, inner: Model) -> None:
        self.inner = inner

    @contextlib.asynccontextmanager
    async def stream(self, request: ModelRequest, *, attachment: Any = None) -> AsyncIterator[AsyncIterator[Part]]:
        async with self.inner.stream(request, attachment=attachment) as parts:
            yield self.parts(parts)

    async def parts(self, parts: AsyncIterator[Part]) -> AsyncIterator[Part]:
        async for part in parts:
            for changed in self.part(part):
                yield changed

    def part(self, part: Part) -> list[Part]:
        return [part]


def found_by(*checks: str) -> Callable[[Any], Any]:
    """The checks that find it."""

    def note(model: Any) -> Any:
        FAULTS.update(dict.fromkeys(checks, model))
        return model

    return note


@found_by("a_model_says_its_name_and_its_room")
class Nameless(Around):
    name = ""


@found_by("an_answer_comes_in_pieces_and_ends_with_one_end_part")
class AllAtOnce(Around):
    async def parts(self, parts: AsyncIterator[Part]) -> AsyncIterator[Part]:
        every = [part async for part in parts]
        yield TextPart(text="".join(part.text for part in every if isinstance(part, TextPart)))
        yield every[-1]


@found_by("what_a_request_cost_is_told", "why_an_answer_ended_is_told")
class TellsNothing(Around):
    def part(self, part: Part) -> list[Part]:
        return [EndPart(usage=Usage())] if isinstance(part, EndPart) else [part]


@found_by("calls_come_whole_and_in_order")
class LastCallOnly(Around):
    async def parts(self, parts: AsyncIterator[Part]) -> AsyncIterator[Part]:
        last = None
        async for part in parts:
            if isinstance(part, CallPart):
                last = part
                continue
            if isinstance(part, EndPart) and last is not None:
                yield last
            yield part


@found_by("broken_arguments_come_as_they_were_written")
class MendsArguments(Around):
    def part(self, part: Part) -> list[Part]:
        return [CallPart(name=part.name, arguments={})] if isinstance(part, CallPart) else [part]


@found_by("reasoning_is_no_part_of_the_answer")
class ThinksAloud(Around):
    def part(self, part: Part) -> list[Part]:
        return [TextPart(text=part.text)] if isinstance(part, ReasoningPart) else [part]


@found_by("whatever_a_stopped_run_left_is_taken")
class RefusesHalves(Around):
    def stream(self, request: ModelRequest, *, attachment: Any = None) -> Any:
        if any(isinstance(message, AssistantMessage) and message.partial for message in request.messages):
            raise ModelFailed("the history is not whole")
        return super().stream(request, attachment=attachment)


@found_by("attachments_that_are_gone_or_odd_do_not_spoil_a_request")
class NeedsAttachments(Around):
    @contextlib.asynccontextmanager
    async def stream(self, request: ModelRequest, *, attachment: Any = None) -> AsyncIterator[AsyncIterator[Part]]:
        for message in request.messages:
            for file in message.attachments if isinstance(message, UserMessage) else ():
                if attachment is not None:
                    await attachment(file.digest)
        async with super().stream(request, attachment=attachment) as parts:
            yield parts


@found_by("requests_at_the_same_time_keep_apart")
class Shared(Around):
    def __init__(self, inner: Model) -> None:
        super().__init__(inner)
        self.newest: AsyncIterator[Part] | None = None

    async def parts(self, parts: AsyncIterator[Part]) -> AsyncIterator[Part]:
        self.newest = parts
        while self.newest is not None:
            try:
                yield await anext(self.newest)
            except StopAsyncIteration:
                return


@found_by("a_cancel_closes_the_connection_at_once", "an_interrupt_ends_a_request_and_asks_nothing_again")
class TriesAgain(Around):
    @contextlib.asynccontextmanager
    async def stream(self, request: ModelRequest, *, attachment: Any = None) -> AsyncIterator[AsyncIterator[Part]]:
        yield self.twice(request)

    async def twice(self, request: ModelRequest) -> AsyncIterator[Part]:
        try:
            async with self.inner.stream(request) as parts:
                async for part in parts:
                    yield part
        except asyncio.CancelledError:
            async with self.inner.stream(request) as parts:
                async for part in parts:
                    yield part
            raise


@found_by("leaving_the_block_closes_the_connection")
class ReadsOn(Around):
    @contextlib.asynccontextmanager
    async def stream(self, request: ModelRequest, *, attachment: Any = None) -> AsyncIterator[AsyncIterator[Part]]:
        async with self.inner.stream(request) as parts:
            yield self.parts(parts)
            async for _ in parts:
                pass


@found_by("the_readers_own_error_is_its_own")
class TakesTheBlame(Around):
    @contextlib.asynccontextmanager
    async def stream(self, request: ModelRequest, *, attachment: Any = None) -> AsyncIterator[AsyncIterator[Part]]:
        try:
            async with self.inner.stream(request) as parts:
                yield parts
        except Exception as error:
            raise ModelFailed("the request failed") from error


@found_by("requests_leave_nothing_behind")
class KeepsATask(Around):
    kept: list[asyncio.Task[None]] = []  # noqa: RUF012 - shared on purpose

    def stream(self, request: ModelRequest, *, attachment: Any = None) -> Any:
        self.kept.append(asyncio.create_task(for_ever()))
        return super().stream(request, attachment=attachment)


async def for_ever() -> None:
    await asyncio.get_running_loop().create_future()


@found_by("a_failure_says_whether_to_try_again_and_is_not_repeated_here")
class HidesFailures(Around):
    async def parts(self, parts: AsyncIterator[Part]) -> AsyncIterator[Part]:
        try:
            async for part in parts:
                yield part
        except ModelFailed:
            yield EndPart()
