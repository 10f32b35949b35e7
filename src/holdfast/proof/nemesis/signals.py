"""Signal faults between the parts of a server: late or lost answers, repeated hints, a paused process."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil

from holdfast.proof.nemesis.episode import Episode

__all__ = ["signals"]

_LATE_S = 0.1
_LOSE_EVERY = 4
_HINTS = 20
_BETWEEN_S = 0.05
_PAUSES = 3
_ALONE = 3


async def signals(episode: Episode) -> None:
    """Delay the store's answers, lose some of them, repeat hints to the host, and pause the server's process."""
    span_s = episode.ask.span_s
    episode.progress("the store's answers come late")
    await episode.pull(late_s=_LATE_S)
    await episode.send_alone(_ALONE)
    await episode.watch(span_s)
    await episode.pull(late_s=0.0)
    await episode.goes_on("late answers")
    await episode.nobody_is_left("late answers")
    episode.progress(f"one of {_LOSE_EVERY} answers of the store is lost")
    await episode.pull(lose_every=_LOSE_EVERY)
    await episode.send_alone(8 * _ALONE)
    await episode.watch(span_s)
    await episode.pull(lose_every=0)
    await episode.goes_on("lost answers")
    await episode.nobody_is_left("lost answers")
    episode.progress("every hint comes again and again")
    for _ in range(max(1, round(span_s / _BETWEEN_S / 4))):
        await episode.send_alone(_ALONE)
        await episode.pull(hints=_HINTS)
        await episode.watch(_BETWEEN_S)
    await episode.pull()
    await episode.goes_on("repeated hints")
    await episode.nobody_is_left("repeated hints")
    for _ in range(_PAUSES):
        episode.progress("the process is paused")
        os.kill(episode.server.pid, signal.SIGSTOP)
        episode.tally.injected["paused"] += 1
        try:
            await asyncio.sleep(span_s / 2)
            state = psutil.Process(episode.server.pid).status()
            episode.tally.check(state == psutil.STATUS_STOPPED, f"the process was to be paused, and is {state}")
        finally:
            os.kill(episode.server.pid, signal.SIGCONT)
        await episode.watch(_BETWEEN_S)
    await episode.goes_on("a pause")
