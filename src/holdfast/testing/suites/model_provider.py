"""Scripted provider behind a model, for the checks of models (`holdfast.testing.suites.model`)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from holdfast.agents.model import Model
from holdfast.testing.model_server import ModelServer, Reply
from holdfast.testing.suites.check_runner import not_offered

__all__ = ["ModelSubject", "Provider", "served_model", "unscripted_model"]


class Provider(Protocol):
    """A model under test, and the requests that the model's provider has received."""

    @property
    def model(self) -> Model:
        """The model under test."""
        ...

    @property
    def scripted(self) -> bool:
        """Whether the provider's answers come from the script."""
        ...

    @property
    def requests(self) -> int:
        """Number of requests that the provider has received, including refused requests."""
        ...

    async def begun(self, pieces: int) -> None:
        """Wait until the first request has arrived and `pieces` pieces of the answer have been sent."""
        ...

    async def quiet(self) -> None:
        """Wait until each answer has been sent completely, has failed as scripted, or was closed by the client."""
        ...


ModelSubject = Callable[[Sequence[Reply]], AbstractAsyncContextManager[Provider]]
"""A function that takes scripted replies and returns a context manager, which yields a `Provider` for a model under
test. The provider answers the model's requests with the replies, in order."""


def served_model(make: Callable[[ModelServer], Model]) -> ModelSubject:
    """Return the subject for models that speak one of the protocols of the `ModelServer`.

    Parameters:
        make: called with the server; returns a model that uses the server at ``server.url``. Environment variables for
            the model are in ``server.environment``.
    """

    @contextlib.asynccontextmanager
    async def subject(script: Sequence[Reply]) -> AsyncIterator[Provider]:
        async with ModelServer(script) as server:
            yield _Served(server, make(server))

    return subject


class _Served:
    def __init__(self, server: ModelServer, model: Model) -> None:
        self._server = server
        self.model = model
        self.scripted = True

    @property
    def requests(self) -> int:
        return len(self._server.exchanges)

    async def begun(self, pieces: int) -> None:
        await (await self._server.requests(1)).until(pieces=pieces)

    async def quiet(self) -> None:
        for exchange in self._server.exchanges:
            await exchange.until(ended=True)


def unscripted_model(model: Model) -> ModelSubject:
    """Return the subject for a model with unscripted answers, such as a real provider's model.

    Checks that need scripted answers are skipped.
    """

    @contextlib.asynccontextmanager
    async def subject(script: Sequence[Reply]) -> AsyncIterator[Provider]:
        if any(reply != Reply(text=reply.text, pace_s=reply.pace_s) for reply in script):
            raise not_offered("scripted answers")
        yield _Unscripted(model)

    return subject


class _Unscripted:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.scripted = False

    @property
    def requests(self) -> int:
        raise not_offered("observation of the provider's requests")

    async def begun(self, pieces: int) -> None:
        raise not_offered("observation of the provider's requests")

    async def quiet(self) -> None:
        """Do nothing: the provider cannot be observed."""
