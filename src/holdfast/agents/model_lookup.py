"""Find a model by its name, ``provider:model``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.agents.model import Model

__all__ = ["find_model"]


def find_model(name: str) -> Model:
    """Return the model with this name.

    The name is ``provider:model`` for a real model, ``scripted:demo`` for the demo model, or ``scripted:<text>`` for a
    model that always answers with the text.

    Raises:
        ConfigurationError: if the name is invalid, the provider is unknown, or the provider's key is missing.
        MissingExtra: if the packages for real models are not installed.
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
