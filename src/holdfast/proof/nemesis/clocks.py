"""Clock faults: the server's wall clock is set forward and back by hours, under load and between two starts."""

from __future__ import annotations

import asyncio

from holdfast import ids
from holdfast.client import RemoteSchedule
from holdfast.clock import system_clock
from holdfast.errors import HoldfastError
from holdfast.proof.nemesis.episode import Episode

__all__ = ["QUESTION_TTL_S", "clock_jumps"]

QUESTION_TTL_S = 3600.0
"""Time, in seconds, after which an open question expires in this episode."""

_JUMPS_S = (3 * 3600.0, -3 * 3600.0, 26 * 3600.0, -26 * 3600.0, 0.0)
_QUIET_S = 0.3
_MOST_WAIT_S = 0.6
_IN_TIME_S = 8.0
_EVERY_S = 1.0
_POLL_S = 0.05


async def clock_jumps(episode: Episode) -> None:
    """Set the server's clock while the server runs and between two starts, and check what depends on time.

    Each time the clock is set, a batch is being collected, a schedule ticks and idempotency keys are stored. Open
    questions are checked if the storm's own agents are served.
    """
    first = episode.content("emit")
    session = episode.admin.session(f"known-{ids.message_id()}")
    sent = await session.send(first, idempotency_key="known", agent=None)
    planned = await episode.admin.session(f"planned-{ids.message_id()}").schedule(
        episode.content("emit"), every_s=_EVERY_S, miss="skip"
    )
    for clock_s in _JUMPS_S:
        episode.progress(f"the clock is {clock_s / 3600:+g} h off")
        await _collects_in_time(episode, clock_s)
        await _is_set(episode, clock_s)
        await episode.watch(episode.ask.span_s / len(_JUMPS_S))
        again = await session.send(first, idempotency_key="known", agent=None)
        episode.tally.check(
            again.disposition == "duplicate" and again.message_id == sent.message_id,
            f"a repeated message was not known any more with the clock {clock_s / 3600:+g} h off",
        )
        await _fires(episode, planned, clock_s)
        await episode.goes_on(f"the clock was set {clock_s / 3600:+g} h off")
    await planned.delete()
    if not episode.ask.agents:
        await _question_is_open(episode)
    for clock_s in (-5 * 3600.0, 0.0):
        await _restart(episode, clock_s)


async def _collects_in_time(episode: Episode, clock_s: float) -> None:
    """Set the clock while a batch of messages is being collected, and check that the messages complete in time."""
    session = episode.admin.session(f"collects-{ids.message_id()}")
    receipt = await session.send(
        episode.content("emit"), policy="collect", quiet_s=_QUIET_S, max_wait_s=_MOST_WAIT_S, agent=None
    )
    second = await session.send(
        episode.content("emit"), policy="collect", quiet_s=_QUIET_S, max_wait_s=_MOST_WAIT_S, agent=None
    )
    await episode.pull(clock_s=clock_s)
    for message_id in (receipt.message_id, second.message_id):
        state = await _state_within(episode, session.key, message_id)
        episode.tally.check(
            state == "completed",
            f"a message that was to wait {_MOST_WAIT_S:g} s is {state} {_IN_TIME_S:g} s after the clock was set "
            f"{clock_s / 3600:+g} h off",
        )


async def _is_set(episode: Episode, clock_s: float) -> None:
    """Check that the server dates a new session by the clock as it is now set."""
    session = episode.admin.session(f"dated-{ids.message_id()}")
    await session.send(episode.content("emit"), agent=None)
    off_s = (await session.info()).created_at - system_clock.now() - clock_s
    episode.tally.check(
        abs(off_s) < _IN_TIME_S, f"the server dates a session {off_s:+.0f} s off a clock set {clock_s / 3600:+g} h off"
    )


async def _fires(episode: Episode, planned: RemoteSchedule, clock_s: float) -> None:
    """Check that a schedule still fires within a few seconds after the clock was set."""
    before = (await planned.info()).fired
    end = system_clock.monotonic() + _IN_TIME_S
    after = before
    while after == before and system_clock.monotonic() < end:
        await asyncio.sleep(_POLL_S)
        after = (await planned.info()).fired
    episode.tally.check(
        after > before,
        f"a schedule of every {_EVERY_S:g} s is silent for {_IN_TIME_S:g} s after the clock was set "
        f"{clock_s / 3600:+g} h off",
    )


async def _state_within(episode: Episode, key: str, message_id: str) -> str:
    session = episode.admin.session(key)
    try:
        return (await session.wait(message_id, timeout_s=_IN_TIME_S)).state
    except HoldfastError:
        return (await session.message(message_id)).state


async def _question_is_open(episode: Episode) -> None:
    """Check that a question stays open if the clock is set back, and expires if it is set forward before a restart."""
    tally = episode.tally
    asked = [episode.admin.session(f"asks-{ids.message_id()}") for _ in range(2)]
    receipts = [
        await session.send(episode.content("ask", "emit"), idempotency_key="ask", agent=None) for session in asked
    ]
    for session in asked:
        tally.check(await _open_questions(session, 1), "a question does not come to be open")
    await episode.pull(clock_s=-2 * QUESTION_TTL_S)
    if tally.check(await _open_questions(asked[0], 1), "a question is gone after the clock was set back"):
        await asked[0].answer((await asked[0].questions())[0].question_id, "yes")
    state = await _state_within(episode, asked[0].key, receipts[0].message_id)
    tally.check(state == "completed", f"a message whose question was answered is {state}")
    await _restart(episode, 2 * QUESTION_TTL_S)
    tally.check(await _open_questions(asked[1], 0), "a question has not expired though its time is over")
    state = await _state_within(episode, asked[1].key, receipts[1].message_id)
    tally.check(state == "completed", f"a message whose question expired is {state}")


async def _open_questions(session: object, count: int) -> bool:
    """Wait up to about five seconds until the session has `count` open questions; return False on a timeout."""
    for _ in range(100):
        if len(await session.questions()) == count:  # type: ignore[attr-defined]
            return True
        await asyncio.sleep(0.05)
    return False


async def _restart(episode: Episode, clock_s: float) -> None:
    """Kill the server, set its clock, start the next server, and check the clock and a new message."""
    episode.progress(f"killed, and started with the clock {clock_s / 3600:+g} h off")
    await episode.kill()
    episode.set_clock(clock_s)
    episode.tally.injected["set between two starts"] += 1
    await episode.start_again(f"the clock was set {clock_s / 3600:+g} h off")
    await _is_set(episode, clock_s)
    await episode.watch(episode.ask.span_s / 3)
    await episode.goes_on(f"a start with the clock {clock_s / 3600:+g} h off")
