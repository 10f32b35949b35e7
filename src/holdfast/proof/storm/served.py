"""Agents that a storm's own server serves, built from its environment."""

from __future__ import annotations

from holdfast.proof.storm.agent import agents_of_environment

__all__ = ["plain", "replayable"]

replayable, plain = agents_of_environment()
