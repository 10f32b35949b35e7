"""The port to models: what a model is to the agent loop, and how one is found by its name."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Protocol, runtime_checkable

from holdfast.errors import ConfigurationError
from holdfast.protocol.model import ModelRequest, Part

__all__ = ["Model", "find_model", "opened"]


@runtime_checkable
class Model(Protocol):
    """A model. It is shared by all runs of its agents and keeps nothing of one request for another."""

    @property
    def name(self) -> str:
        """For people, such as ``openai:gpt-5``."""
        ...

    @property
    def context_tokens(self) -> int | None:
        """How much one request may hold, in tokens; None where that is not known."""
        ...

    def stream(
        self, request: ModelRequest, *, attachment: Callable[[str], Awaitable[bytes]] | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Part]]:
        """Open one request. Parts as they come; the last one is `EndPart`.

        Leaving the block closes the connection, whatever was read of it; an interrupt cancels the task that reads. A
        request is never repeated here: the loop does that.

        Parameters:
            request: what the model gets.
            attachment: the bytes of an attachment by its digest; None: attachments are only named.

        Raises:
            ModelFailed: in the block or while parts are read; ``retry_after_s`` says whether to try again.
        """
        ...


@asynccontextmanager
async def opened(
    model: Model, request: ModelRequest, *, attachment: Callable[[str], Awaitable[bytes]] | None = None
) -> AsyncIterator[AsyncIterator[Part]]:
    """One request of a model. What is left of it is closed by the task that reads it, however the block ends."""
    async with model.stream(request, attachment=attachment) as parts:
        if isinstance(parts, AsyncGenerator):
            async with aclosing(parts):
                yield parts
        else:
            yield parts


def find_model(name: str) -> Model:
    """The model of that name: ``provider:model``, ``scripted:demo``, or ``scripted:<text>`` that always says that text.

    Raises:
        ConfigurationError: no such provider, or its key is missing.
        MissingExtra: the packages for real models are not installed.
    """
    provider, colon, rest = name.partition(":")
    if not (colon and provider and rest):
        raise ConfigurationError(
            f"{name!r} names no model", hint="write provider:model, such as openai:gpt-5 or scripted:hello"
        )
    if provider == "scripted":
        from holdfast.agents.demo_model import demo_model
        from holdfast.agents.scripted import ScriptedModel

        return demo_model() if rest == "demo" else ScriptedModel(rest, name=name, keep_requests=0)
    from holdfast.agents.adapters.pydantic_models import pydantic_model

    return pydantic_model(name)
