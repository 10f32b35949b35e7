"""`Model`, the interface between the agent loop and models."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Protocol, runtime_checkable

from holdfast.protocol.model import ModelRequest, Part

__all__ = ["Model", "opened"]


@runtime_checkable
class Model(Protocol):
    """A model. All runs that use the model share one instance, which keeps no state between requests."""

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
        """Open one request and yield an iterator of the answer's parts, as they arrive. The last part is an `EndPart`.

        Leaving the block closes the connection, even if some parts were not read. An interrupt cancels the task that
        reads the parts. A model does not retry requests, because the agent loop does.

        Parameters:
            request: messages, tools and settings of the request.
            attachment: async function that is called with an attachment's digest and returns the attachment's bytes. If
                None, the request only names its attachments.

        Raises:
            ModelFailed: if the request fails, either on opening or while parts are read; ``retry_after_s`` is set if a
                retry may help.
        """
        ...


@asynccontextmanager
async def opened(
    model: Model, request: ModelRequest, *, attachment: Callable[[str], Awaitable[bytes]] | None = None
) -> AsyncIterator[AsyncIterator[Part]]:
    """Open one request to a model; when the block is left, the parts are closed in the task that read them."""
    async with model.stream(request, attachment=attachment) as parts:
        if isinstance(parts, AsyncGenerator):
            async with aclosing(parts):
                yield parts
        else:
            yield parts
