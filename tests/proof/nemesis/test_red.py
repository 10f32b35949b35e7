"""Each fault finds what it is there to find: a product that was made worse on purpose does not pass."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import pytest

from holdfast import failpoints
from holdfast.proof.nemesis import FAULTS, EpisodePlan, FaultOutcome, disks, episode, readers, run_against
from holdfast.proof.nemesis.runner import run_kills
from holdfast.proof.storm import killing, server, snapshot
from tests.proof.nemesis.storms import run_storm

SHORT = EpisodePlan(sessions=4, span_s=0.3, connections=600, seed=13)


class Worse(NamedTuple):
    """A fault, what makes the product worse, and what must be found."""

    fault: str
    code: str
    found: str


LOSES_WRITES = """
from holdfast.storage.sqlite import write_connection
def commit(self, real=write_connection.WriteConnection.commit):
    try:
        real(self)
    except Exception:
        self.roll_back()
write_connection.WriteConnection.commit = commit
"""
TELLS_NOTHING = """
from holdfast.storage.sqlite import errors
errors.translate = lambda error, path: error
"""
GIVES_UP_SLOW_COMMITS = """
import time
from holdfast.storage.sqlite import write_connection
begun = [0.0]
def begin(self, verbs, real=write_connection.WriteConnection.begin):
    begun[0] = time.monotonic()
    real(self, verbs)
def commit(self, real=write_connection.WriteConnection.commit):
    self.roll_back() if time.monotonic() - begun[0] > 0.09 and "open" not in self._verbs else real(self)
write_connection.WriteConnection.begin, write_connection.WriteConnection.commit = begin, commit
"""
WAITS_FOR_THE_CLOCK = """
from holdfast.storage.transactions import runs
runs.CLOCKS_DIFFER_S = 1e12
"""
FORGETS_LOST_SENDS = """
from holdfast.host.dispatcher import Dispatcher
async def look_after(self, request):
    if request.run_id is not None:
        self._queue.release(request.principal)
Dispatcher._look_after = look_after
"""
SHOWS_TWICE = """
from holdfast.host.live_session import LiveSession
def publish(self, events):
    if events and not self.log.closed:
        self.log.publish(events)
LiveSession.publish = publish
"""
WAITS_FOR_READERS = """
from holdfast.server.delivery import ResponseDelivery
async def put(self, message):
    await self._send(message)
ResponseDelivery.put = put
"""
KEEPS_SOCKETS = """
import os
from holdfast.server.write_coalescing import CoalescingProtocol
def made(self, transport, real=CoalescingProtocol.connection_made):
    os.dup(transport.get_extra_info("socket").fileno())
    real(self, transport)
CoalescingProtocol.connection_made = made
"""

DIES_OF_CONNECTIONS = """
import os
from holdfast.server.write_coalescing import CoalescingProtocol
made_so_far = [0]
def made(self, transport, real=CoalescingProtocol.connection_made):
    made_so_far[0] += 1
    if made_so_far[0] > 200:
        os._exit(3)
    real(self, transport)
CoalescingProtocol.connection_made = made
"""
KEEPS_READERS = """
from holdfast.host.log_reader import LogReader
async def aclose(self):
    self._closed = self._done = True
LogReader.aclose = aclose
"""
ANSWERS_BEFORE_THE_COMMIT = """
import time
from holdfast.storage.sql.writer import Writer, succeed
EARLY = {"revoke_key", "delete_session", "add_attachment"}
def write(self, tables, batch, real=Writer._write):
    connection, passing, answers = self._connection, self._connection.passing, []
    def noted(write):
        def action(tables):
            answers.append((write, write.action(tables)))
            return answers[-1][1]
        return write._replace(action=action)
    def passed(point, verbs):
        if point == "before_commit" and EARLY.intersection(verbs):
            for write, result in answers:
                if write.verb in EARLY:
                    self._loop.call_soon_threadsafe(succeed, write.future, result)
            time.sleep(1.0)  # the answer is on its way before the process dies
        passing(point, verbs)
    connection.passing = passed
    try:
        return real(self, tables, [noted(write) for write in batch])
    finally:
        connection.passing = passing
Writer._write = write
"""

WORSE = (
    Worse("disk-full", LOSES_WRITES, "no send was refused"),
    Worse("read-only", TELLS_NOTHING, "a send was refused with internal_error"),
    Worse("disk-slow", GIVES_UP_SLOW_COMMITS, "a message was acknowledged"),
    Worse("clock", WAITS_FOR_THE_CLOCK, "after the clock was set -3 h off"),
    Worse("signals", FORGETS_LOST_SENDS, "sent during lost answers"),
    Worse("signals", SHOWS_TWICE, "P7"),
    Worse("readers", WAITS_FOR_READERS, "a reader that never reads is not dropped"),
    Worse("connections", KEEPS_SOCKETS, "of descriptors after"),
    Worse("connections", KEEPS_READERS, "readers when all have gone"),
    Worse("connections", DIES_OF_CONNECTIONS, "the server ended by itself"),
)


def quietly(text: str) -> None:
    """Progress that nobody wants to see."""


@pytest.mark.nightly
@pytest.mark.parametrize("worse", WORSE, ids=lambda worse: f"{worse.fault}: {worse.found}")
def test_a_worse_product_is_found(worse: Worse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode, "_PROGRAM", worse.code + episode._PROGRAM)
    monkeypatch.setattr(episode, "_GOES_ON_S", 3.0)
    monkeypatch.setattr(disks, "_REFUSED_WITHIN_S", 2.0)
    monkeypatch.setattr(snapshot, "_STANDSTILL_S", 1.0)

    async def work() -> FaultOutcome:
        async with asyncio.timeout(100):
            return (await run_against(FAULTS[worse.fault], SHORT, quietly))[0]

    outcome = run_storm(work())
    assert not outcome.passed
    assert any(worse.found in found for found in outcome.found), outcome.found


@pytest.mark.nightly
def test_a_reader_that_dies_instead_of_misbehaving_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: object) -> None:
        raise ConnectionRefusedError("nobody is there")

    monkeypatch.setattr(readers, "_half_closes", refused)

    async def work() -> FaultOutcome:
        async with asyncio.timeout(100):
            return (await run_against(FAULTS["readers"], SHORT, quietly))[0]

    outcome = run_storm(work())
    assert outcome.found == ("the reader that closes its half died of ConnectionRefusedError: nobody is there",) * 6
    assert outcome.never == ("half closed",)


@pytest.mark.nightly
def test_a_store_that_answers_before_its_commit_is_found_at_the_failpoint_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "_PROGRAM", ANSWERS_BEFORE_THE_COMMIT + server._PROGRAM)
    points = tuple(f"sqlite.{verb}.before_commit" for verb in ("revoke_key", "delete_session", "add_attachment"))
    sought = {"was answered to be revoked, and is valid", "was answered to be gone, and is there", "was uploaded"}
    found: list[str] = []
    # One deletion is killed per round. If its session has a run then, the answer waits for the end of the run.
    for _ in range(4):
        outcome, _ = run_storm(run_kills(SHORT, quietly, points=points))
        found += outcome.found
        if all(any(text in told for told in found) for text in sought):
            return
    pytest.fail(f"not found in four rounds: {found}")


@pytest.mark.nightly
def test_a_failpoint_that_nobody_passes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(killing, "_HIT_S", 1.0)
    monkeypatch.setattr(failpoints, "_names", set(failpoints.names()))
    name = failpoints.register("sqlite.never.before_write")
    outcome, _ = run_storm(run_kills(SHORT, quietly, points=(name,)))
    assert outcome.found == (f"failpoint {name} was never hit",)
    assert not outcome.passed
