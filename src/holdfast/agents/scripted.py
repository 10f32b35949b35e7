"""A model that follows a script, with delays and faults, for demos and tests; it needs no key and no network."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TypeAlias

from holdfast.errors import ModelFailed
from holdfast.protocol.messages import Usage
from holdfast.protocol.model import (
    ENDED_NOTES,
    AssistantMessage,
    CallPart,
    EndPart,
    ModelMessage,
    ModelRequest,
    Part,
    TextPart,
)
from holdfast.runtime import current_interrupt

__all__ = ["Pause", "ScriptedModel"]


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause before the next part, in seconds; an interrupt ends the pause."""

    seconds: float


Piece: TypeAlias = "str | Part | Pause | BaseException"
"""A text, a part, a pause, or an error to raise at this point."""
ScriptedAnswer: TypeAlias = "Piece | Sequence[Piece]"
Script: TypeAlias = "str | Sequence[ScriptedAnswer] | Callable[[ModelRequest], ScriptedAnswer]"


KEPT_REQUESTS = 1000
"""Default maximum number of requests to keep for tests; it bounds the memory use of a long-running model."""


class ScriptedModel:
    """A model whose answers come from a script.

    Parameters:
        script: a text to use as every answer, a sequence of answers, or a function that is called with the request and
            returns the answer. The answers of a sequence are used in order, once in each session; an answer of which
            nothing was stored before an interrupt is used again. An answer is a text, a call (`CallPart`), or a
            sequence of texts, parts, pauses and errors. If the answer has no `EndPart`, one is added.
        name: display name of the model.
        chunk: number of characters in each piece of a text.
        delay_s: pause before each piece, in seconds.
        context_tokens: size of the context window, in tokens; None if unknown.
        keep_requests: number of the newest requests to keep in ``requests``; use 0 in production.

    Any number of runs on one event loop may share the model. The attributes ``requests`` and ``open`` are for tests.
    """

    def __init__(
        self,
        script: Script,
        *,
        name: str = "scripted",
        chunk: int = 24,
        delay_s: float = 0.0,
        context_tokens: int | None = None,
        keep_requests: int = KEPT_REQUESTS,
    ) -> None:
        self._script = script
        self._chunk = chunk
        self._delay_s = delay_s
        self.name = name
        self.context_tokens = context_tokens
        self.requests: list[ModelRequest] = []
        """The most recent requests, oldest first."""
        self._keep_requests = keep_requests
        self.open = 0
        """Number of requests in progress."""

    def stream(
        self, request: ModelRequest, *, attachment: Callable[[str], Awaitable[bytes]] | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Part]]:
        """See `Model.stream`; attachments are ignored."""
        return self._stream(request)

    @contextlib.asynccontextmanager
    async def _stream(self, request: ModelRequest) -> AsyncIterator[AsyncIterator[Part]]:
        self.requests.append(request)
        if len(self.requests) > self._keep_requests:
            del self.requests[0]
        self.open += 1
        parts = self._parts(self._answer(request))
        try:
            yield parts
        finally:
            self.open -= 1
            await parts.aclose()

    def _answer(self, request: ModelRequest) -> Sequence[Piece]:
        script = self._script
        if callable(script):
            answer = script(request)
        elif isinstance(script, str):
            answer = script
        else:
            said = sum(_is_answer(message) for message in request.messages)
            if said >= len(script):
                raise ModelFailed(
                    f"the script has {len(script)} answers, and one more was requested",
                    hint="a list is used once in each session: start another session, or use a function as the script",
                )
            answer = script[said]
        return answer if isinstance(answer, Sequence) and not isinstance(answer, str) else (answer,)

    async def _parts(self, answer: Sequence[Piece]) -> AsyncGenerator[Part, None]:
        said = 0
        called = False
        for piece in answer:
            match piece:
                case BaseException():
                    raise piece
                case Pause(seconds=seconds):
                    await _sleep(seconds)
                case str():
                    for at in range(0, len(piece), self._chunk):
                        await _sleep(self._delay_s)
                        yield TextPart(text=piece[at : at + self._chunk])
                    said += len(piece)
                case EndPart():
                    yield piece
                    return
                case _:
                    called = called or isinstance(piece, CallPart)
                    await _sleep(self._delay_s)
                    yield piece
        yield EndPart(
            usage=Usage(input_tokens=1, output_tokens=1 + said // 4),
            reason="calls" if called else "stop",
            model=self.name,
        )


def _is_answer(message: ModelMessage) -> bool:
    return isinstance(message, AssistantMessage) and (bool(message.calls) or message.text not in ENDED_NOTES)


async def _sleep(seconds: float) -> None:
    if seconds <= 0:
        return
    interrupt = current_interrupt()
    if interrupt is None:
        await asyncio.sleep(seconds)
    else:
        await interrupt.sleep(seconds)
