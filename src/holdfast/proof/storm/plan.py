"""Content of a storm's messages: a few pieces of work for the agent, encoded as JSON."""

from __future__ import annotations

import random
from typing import Literal

import msgspec

__all__ = ["Piece", "Plan", "decode_plan", "encode_plan", "make_plan", "until_told"]

Piece = Literal[
    "emit",
    "call",
    "task",
    "thread",
    "process",
    "child",
    "parallel",
    "tidy",
    "stuck",
    "nap",
    "fail",
    "once",
    "raw",
    "wait",
    "ask",
    "listen",
    "pour",
    "probe",
    "access",
    "bomb",
    "hold",
]
"""``emit``: emit text; ``call``: make an idempotent call; ``once``: make a call that is not idempotent; ``task``,
``thread``, ``child``: start a task, a thread or a child run; ``process``: run a process tree that ignores SIGTERM;
``parallel``: run tasks and a thread in parallel; ``tidy``: run a task with slow cleanup; ``stuck``: block a thread;
``nap``: sleep; ``fail``: raise an error; ``raw``: start a program without using the runtime; ``wait``: run a task, a
thread and a process tree that wait for the interrupt; ``ask``: ask a person a question; ``listen``: take steering
messages; ``pour``: emit more data than a socket's buffers hold; ``probe``: run a program that tries to leave its
wall; ``access``: make a call that asks for access beyond its wall; ``bomb``: run a program that takes more than its
quota; ``hold``: run a walled program that waits."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Work for an agent, as the content of a message.

    Parameters:
        name: name of the plan, unique within the storm.
        pieces: pieces of work, which are done one after another.
        span_s: duration of each piece that takes time, in seconds.
        bomb: name of the bomb that the piece ``bomb`` throws.
    """

    name: str
    pieces: tuple[Piece, ...]
    span_s: float = 0.02
    bomb: str = ""


_decoder = msgspec.json.Decoder(Plan)

_USUAL: tuple[Piece, ...] = ("emit", "emit", "call", "task", "nap")
_RICH: tuple[Piece, ...] = ("emit", "call", "once", "task", "thread", "child", "parallel", "tidy", "nap")


def until_told(plan: Plan) -> Plan:
    """Return a copy of the plan with an additional last piece, which waits for the interrupt in several branches."""
    return msgspec.structs.replace(plan, pieces=(*plan.pieces, "wait"))


def encode_plan(plan: Plan) -> str:
    """Encode the plan as the content of a message."""
    return msgspec.json.encode(plan).decode()


def decode_plan(content: str) -> Plan:
    """Decode the plan in the content of a message. Raises `msgspec.DecodeError` if the content is not a plan."""
    return _decoder.decode(content)


def make_plan(name: str, chance: random.Random, *, span_s: float) -> Plan:
    """Return a random plan: mostly small, sometimes large, rarely with an error or with work that resists a stop."""
    lot = chance.random()
    pieces: list[Piece]
    if lot < 0.55:
        pieces = chance.choices(_USUAL, k=chance.randint(1, 3))
    else:
        pieces = chance.choices(_RICH, k=chance.randint(2, 4))
    if lot > 0.9:
        pieces.insert(chance.randrange(len(pieces) + 1), "process")
    elif lot > 0.88:
        pieces.append("raw")
    if 0.5 < lot < 0.52:
        pieces.append("stuck")
    if 0.6 < lot < 0.64:
        pieces.append("probe")
    if lot < 0.04:
        pieces.append("fail")
    return Plan(name=name, pieces=tuple(pieces), span_s=span_s * chance.uniform(0.5, 2.0))
