"""What a storm's own server serves: the storm's agents, made of the environment."""

from __future__ import annotations

from holdfast.testing.storm.agent import agents_of_environment

__all__ = ["plain", "replayable"]

replayable, plain = agents_of_environment()
