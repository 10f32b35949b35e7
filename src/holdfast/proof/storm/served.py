"""Agents that a storm's own server serves, created from the server's environment variables."""

from __future__ import annotations

from holdfast.proof.storm.agent import agents_of_environment

__all__ = ["plain", "replayable"]

replayable, plain = agents_of_environment()
