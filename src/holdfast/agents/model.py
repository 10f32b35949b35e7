"""The port to models: the interface that the agent loop needs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Protocol, runtime_checkable

from holdfast.protocol.model import ModelRequest, Part

__all__ = ["Model", "opened"]


@runtime_checkable
class Model(Protocol):
    """A model. All runs of its agents share it; it keeps no state between requests."""

    @property
    def name(self) -> str:
        """The display name, such as ``openai:gpt-5``."""
        ...

    @property
    def context_tokens(self) -> int | None:
        """The size of the context window, in tokens; None if unknown."""
        ...

    def stream(
        self, request: ModelRequest, *, attachment: Callable[[str], Awaitable[bytes]] | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Part]]:
        """Open one request. It yields parts as they arrive; the last one is `EndPart`.

        Leaving the block closes the connection, even if not all parts were read; an interrupt cancels the task that
        reads them. A model never retries a request: the agent loop does.

        Parameters:
            request: the messages, tools and settings.
            attachment: returns the bytes of an attachment by its digest; None: attachments are only named.

        Raises:
            ModelFailed: on opening, or while parts are read; ``retry_after_s`` is set if a retry may help.
        """
        ...


@asynccontextmanager
async def opened(
    model: Model, request: ModelRequest, *, attachment: Callable[[str], Awaitable[bytes]] | None = None
) -> AsyncIterator[AsyncIterator[Part]]:
    """Open one request to a model; the task that reads it also closes it, however the block ends."""
    async with model.stream(request, attachment=attachment) as parts:
        if isinstance(parts, AsyncGenerator):
            async with aclosing(parts):
                yield parts
        else:
            yield parts
