"""The storm's load: a server that drains while it is read is an outage, not a fault of the storm."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from holdfast.errors import Draining, HoldfastError, InvalidRequest
from holdfast.proof.limits import Limits
from holdfast.proof.storm.load import Load
from holdfast.proof.storm.recorder import StormRecorder
from holdfast.proof.storm.session import StormMessage, StormSession


class Refusing:
    """A host that refuses every read with the same error; also a session of it."""

    principals = ("ann",)

    def __init__(self, error: HoldfastError) -> None:
        self.up = asyncio.Event()
        self.up.set()
        self._error = error

    def session(self, principal: str, key: str) -> Any:
        return self

    async def sessions(self, principal: str) -> Any:
        raise self._error

    def __getattr__(self, verb: str) -> Any:
        async def refuse(*_: object, **__: object) -> None:
            raise self._error

        return refuse


async def read_everything(error: HoldfastError) -> None:
    access: Any = Refusing(error)
    load = Load(access, StormRecorder(), Limits(), sessions=1, rate=1.0, seed=1)
    session = StormSession("ann", "s", None, random.Random(1), exists=True)
    session.sent.append(StormMessage("k", "text", "queue", None, False, message_id="m_1"))
    for act in (load._read, load._settlement, load._pry):
        await act(session)


def test_reads_that_a_draining_server_refuses_do_not_end_the_storm() -> None:
    asyncio.run(read_everything(Draining("the server is shutting down; this request timed out")))


def test_other_refusals_of_reads_end_the_storm() -> None:
    with pytest.raises(InvalidRequest):
        asyncio.run(read_everything(InvalidRequest("unreadable")))
