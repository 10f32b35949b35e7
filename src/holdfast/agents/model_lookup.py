"""Find a model by its name, ``provider:model``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.agents.model import Model

__all__ = ["find_model"]


def find_model(name: str) -> Model:
    """Return the model of that name: ``provider:model``, ``scripted:demo``, or ``scripted:<text>``, which always
    answers with that text.

    Raises:
        ConfigurationError: the provider is unknown, or its key is missing.
        MissingExtra: the packages for real models are not installed.
    """
    provider, colon, rest = name.partition(":")
    if not (colon and provider and rest):
        raise ConfigurationError(
            f"invalid model name {name!r}", hint="write provider:model, such as openai:gpt-5 or scripted:hello"
        )
    if provider == "scripted":
        from holdfast.agents.demo_model import demo_model
        from holdfast.agents.scripted import ScriptedModel

        return demo_model() if rest == "demo" else ScriptedModel(rest, name=name, keep_requests=0)
    from holdfast.agents.providers.models import pydantic_model

    return pydantic_model(name)
