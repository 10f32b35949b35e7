"""When a schedule ticks, and what becomes of each tick: a pure machine of a cadence, its progress and the time.

Invariants:

- Every tick is handed out to be fired once, or is counted as missed; none is both, none is neither. Time that passes
  while a schedule is paused or finished has no ticks.
- A tick's jitter depends on the schedule and the tick alone: looking again, later or after a crash, changes nothing.
- Ticks are in the order of time, and a clock that is set back by less than `SET_BACK_S` repeats none: the schedule
  waits until the clock is there again. Set back further, the clock was wrong before: the schedule goes on from the new
  time. A tick that it comes by twice is told by its time, which is in the idempotency key of its message.
- One step goes over a bounded number of ticks; a schedule that missed more stays due until all of them are counted.

A tick counts as on time until `ON_TIME_S` after it was due. What becomes of those that were not looked at in time,
because the host was down or the clock jumped, is the miss policy:

- ``skip``: the newest is fired if it is still on time; all others are missed.
- ``delay``: the newest is fired, however late; all others are missed. Ticks of ``every_s`` are counted from then on.
- ``burst``: each is fired, one after the other, but no more than the newest `BURST_LIMIT`; older ones are missed.

Cron lines are read by cronsim, with five fields, or six with seconds first. When clocks change, they do what Debian's
cron does: a tick at a time of day that is left out comes right after the gap, one at a time of day that comes twice
comes the first time, and a line whose minute or hour begins with a star follows the clock through both.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, tzinfo
from itertools import islice, pairwise
from typing import Final, Literal, NamedTuple

import msgspec

from holdfast.errors import InvalidSchedule
from holdfast.protocol.messages import Policy, Value

__all__ = [
    "BURST_LIMIT",
    "LEAST_EVERY_S",
    "ON_TIME_S",
    "SET_BACK_S",
    "STEP_LIMIT",
    "Cadence",
    "Firing",
    "Miss",
    "Progress",
    "ScheduleSpec",
    "ScheduleView",
    "Step",
    "begin",
    "check_cadence",
    "counted",
    "resumed",
    "step",
]

Miss = Literal["skip", "burst", "delay"]

ON_TIME_S: Final = 60.0
"""A tick that is looked at this long after it was due is still on time, in seconds."""
BURST_LIMIT: Final = 100
"""Missed ticks that a ``burst`` fires."""
SET_BACK_S: Final = 3 * 3600.0
"""A clock that goes back by more was wrong before, in seconds (as cron has it)."""
STEP_LIMIT: Final = 1000
"""Ticks of a cron line that one step looks at."""
LEAST_EVERY_S: Final = 1.0
"""The shortest ``every_s`` of a durable schedule, in seconds."""
_MOST_S: Final = 10 * 366 * 86400.0
_CRON_LENGTH: Final = 200
_LOOK_AHEAD: Final = 20
"""Ticks of a cron line whose distances bound the jitter."""


class Cadence(Value, frozen=True, kw_only=True):
    """When to tick: at even distances or by a cron line, one of them.

    Parameters:
        every_s: the distance of ticks, in seconds.
        cron: a cron line: ``minute hour day month weekday``, or six fields with the second first.
        timezone: the zone in which the line is read, such as ``Europe/Berlin``; with ``every_s`` there is none.
        initial_delay_s: with ``every_s`` the time to the first tick (default: one distance); with ``cron`` no tick
            comes before this time is over. In seconds.
        jitter_s: each tick comes later by a part of this, the same however often one looks, in seconds.
        max_runs: after so many firings it is finished.
        miss: what becomes of ticks that were missed; see the module.
    """

    every_s: float | None = None
    cron: str | None = None
    timezone: str = "UTC"
    initial_delay_s: float | None = None
    jitter_s: float = 0.0
    max_runs: int | None = None
    miss: Miss = "skip"


class ScheduleSpec(Cadence, frozen=True, kw_only=True):
    """What a schedule does, and when.

    Parameters:
        session: the key of the session that gets the message; it comes into being with the first one.
        text: the message.
        agent: the agent that answers; None: the session's own.
        overlap: the policy of the message: what to do when a run of the session is on. ``reject`` leaves the tick out.
    """

    session: str
    text: str
    agent: str | None = None
    overlap: Policy = "queue"


class Firing(Value, frozen=True, kw_only=True):
    """What became of a tick.

    Parameters:
        outcome: ``fired``; ``missed`` by the miss policy; or the code of what refused it, such as ``busy``,
            ``mailbox_full``, ``unknown_agent`` or ``session_deleted``.
        tick_at: the tick, in seconds since the epoch; None for a run that was asked for by hand.
        at: when that was decided.
        message_id: of the message, if it was fired.
    """

    outcome: str
    tick_at: float | None = None
    at: float = 0.0
    message_id: str | None = None


class ScheduleView(ScheduleSpec, frozen=True, kw_only=True):
    """A schedule as it stands.

    Parameters:
        schedule_id: its id, among those of its principal.
        principal: whose it is.
        state: ``finished`` once it has no more ticks; ``broken`` if what is stored of it cannot be read: then only
            its ids and its session are known.
        next_at: when it fires next, jitter included; None while it is paused or finished.
        fired, missed, refused: how many of its ticks were.
        last: what became of the newest tick.
        problem: why its newest tick could not be fired, if a person has to do something about it.
    """

    schedule_id: str
    principal: str
    state: Literal["active", "paused", "finished", "broken"]
    fired: int
    missed: int
    refused: int
    next_at: float | None = None
    last: Firing | None = None
    problem: str | None = None
    created_at: float = 0.0
    updated_at: float = 0.0


class Progress(Value, frozen=True, kw_only=True):
    """How far a schedule has come.

    Parameters:
        anchor_at: the first tick; with ``every_s`` the others are at whole distances from it.
        tick_at: the first tick that is neither fired nor counted; None when there is none any more.
        due_at: when it is to be fired: the tick and its jitter.
        decided_at: the newest time at which something was decided.
        fired, missed, refused: ticks so far.
    """

    anchor_at: float
    tick_at: float | None
    due_at: float | None
    decided_at: float
    fired: int = 0
    missed: int = 0
    refused: int = 0


class Step(NamedTuple):
    """What a look at a schedule came to: the tick to be fired now, if any, and the progress with it gone over."""

    tick_at: float | None
    progress: Progress


# ── ticks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_cadence(cadence: Cadence, *, now: float, least_every_s: float = LEAST_EVERY_S) -> None:
    """Raise `InvalidSchedule` for a cadence that cannot be, or that never ticks.

    Parameters:
        now: seconds since the epoch.
        least_every_s: the shortest distance of ticks.
    """
    if (cadence.every_s is None) is (cadence.cron is None):
        raise InvalidSchedule(
            f"the schedule has {'neither every_s nor cron' if cadence.cron is None else 'both every_s and cron'}",
            hint="give one of them",
        )
    line: object = cadence.cron
    if not isinstance(line, (str, type(None))):
        raise InvalidSchedule(f"cron is {line!r}; it is a line of text, such as '30 9 * * MON-FRI'")
    if cadence.every_s is not None and cadence.timezone != "UTC":
        raise InvalidSchedule(
            f"timezone is {cadence.timezone!r}, and ticks of every_s are at even distances, in no time zone",
            hint="leave the timezone out, or give a cron line, which is read in it",
        )
    _ = _zone(cadence.timezone)
    if cadence.every_s is not None:
        _check_number("every_s", cadence.every_s, least_every_s)
    _check_number("jitter_s", cadence.jitter_s, 0.0)
    if cadence.initial_delay_s is not None:
        _check_number("initial_delay_s", cadence.initial_delay_s, 0.0)
    if cadence.every_s is not None and cadence.jitter_s > cadence.every_s:
        raise InvalidSchedule(
            f"jitter_s is {cadence.jitter_s:g}, more than every_s ({cadence.every_s:g})",
            hint="ticks would overtake each other: choose a smaller one",
        )
    runs: object = cadence.max_runs
    if runs is not None and (not isinstance(runs, int) or isinstance(runs, bool) or runs < 1):
        raise InvalidSchedule(f"max_runs is {runs!r}; it is a number of runs, 1 or more")
    if cadence.miss not in ("skip", "burst", "delay"):
        raise InvalidSchedule(f"there is no miss policy {cadence.miss!r}", hint="use skip, burst or delay")
    first_at = _first(cadence, now)
    if first_at is None:
        raise InvalidSchedule(
            f"the cron line {cadence.cron!r} never fires: no day of the next 50 years fits it",
            hint="correct its day, month and weekday",
        )
    if cadence.jitter_s and cadence.cron is not None:
        ticks = [first_at, *islice(_cron_ticks(cadence, first_at), _LOOK_AHEAD)]
        least_s = min((after - at for at, after in pairwise(ticks)), default=math.inf)
        if cadence.jitter_s > least_s:
            raise InvalidSchedule(
                f"jitter_s is {cadence.jitter_s:g}, more than the time between two ticks of the line ({least_s:g})",
                hint="ticks would overtake each other: choose a smaller one",
            )


def _check_number(name: str, value: object, least: float) -> None:
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= _MOST_S
    if not fits:
        raise InvalidSchedule(f"{name} is {value!r}; it is a number of seconds, from {least:g} to {_MOST_S:.0f}")


def _zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError, TypeError):  # OSError: the name of a folder of zones
        raise InvalidSchedule(
            f"there is no time zone {name!r}", hint="use a name such as Europe/Berlin or America/New_York, or UTC"
        ) from None


def _cron_ticks(cadence: Cadence, after: float) -> Iterator[float]:
    """The ticks of a cron line after a time, in order. Raises `InvalidSchedule`."""
    from cronsim import CronSim, CronSimError

    line = cadence.cron or ""
    if len(line) > _CRON_LENGTH:
        raise InvalidSchedule(f"a cron line has at most {_CRON_LENGTH} characters")
    zone = _zone(cadence.timezone)
    try:
        moments = CronSim(line, datetime.fromtimestamp(math.floor(after), zone))  # it rounds
    except CronSimError as error:
        raise InvalidSchedule(
            f"{line!r} is not a cron line: {error}",
            hint="write: minute hour day-of-month month day-of-week, such as 30 9 * * MON-FRI, "
            "with a day that the month has",
        ) from None
    except (OverflowError, ValueError, OSError):  # a clock outside of the calendar
        return
    try:
        for moment in moments:
            at = moment.timestamp()
            if at > after:  # in the hour that comes twice cronsim may go back to the first of the two
                after = at
                yield at
    except (OverflowError, ValueError):
        return


def _following(cadence: Cadence, anchor_at: float, after: float) -> float | None:
    """The first tick after a time; None if there is none any more."""
    if cadence.every_s is None:
        return next(_cron_ticks(cadence, after), None)
    k = math.floor((after - anchor_at) / cadence.every_s) + 1
    while anchor_at + k * cadence.every_s <= after:  # where the division rounded
        k += 1
    return anchor_at + k * cadence.every_s


def _first(cadence: Cadence, now: float) -> float | None:
    if cadence.every_s is not None:
        return now + (cadence.every_s if cadence.initial_delay_s is None else cadence.initial_delay_s)
    return _following(cadence, now, now + (cadence.initial_delay_s or 0.0))


def _due(cadence: Cadence, seed: str, tick_at: float) -> float:
    """When a tick is to be fired."""
    if not cadence.jitter_s:
        return tick_at
    drawn = hashlib.blake2b(f"{seed}\0{tick_at!r}".encode(), digest_size=8).digest()
    return tick_at + cadence.jitter_s * int.from_bytes(drawn, "big") / 2**64


def _waiting(
    cadence: Cadence, seed: str, progress: Progress, tick_at: float, now: float
) -> tuple[int, Callable[[int], float]]:
    """The ticks that are due, from the first on: how many, and each by its index. Of a line at most `STEP_LIMIT`."""
    if cadence.every_s is None:
        ticks = [tick_at]
        for tick in islice(_cron_ticks(cadence, tick_at), STEP_LIMIT - 1):
            if _due(cadence, seed, tick) > now:
                break
            ticks.append(tick)
        return len(ticks), ticks.__getitem__
    anchor_at, every_s = progress.anchor_at, cadence.every_s
    first = round((tick_at - anchor_at) / every_s)
    last = max(first, math.floor((now - anchor_at) / every_s) + 1)
    while last > first and _due(cadence, seed, anchor_at + last * every_s) > now:
        last -= 1
    return last - first + 1, lambda index: anchor_at + (first + index) * every_s


# ── the machine ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _aimed(cadence: Cadence, seed: str, progress: Progress, tick_at: float | None, now: float) -> Progress:
    return msgspec.structs.replace(
        progress,
        tick_at=tick_at,
        due_at=None if tick_at is None else _due(cadence, seed, tick_at),
        decided_at=now,
    )


def _set_back(cadence: Cadence, seed: str, progress: Progress, now: float) -> Progress:
    """The clock was wrong before: go on from the new time."""
    following = _following(cadence, progress.anchor_at, now)
    if following is not None:  # its first tick may have been in the time that is taken back
        progress = msgspec.structs.replace(progress, anchor_at=following)
    return _aimed(cadence, seed, progress, following, now)


def begin(cadence: Cadence, seed: str, now: float) -> Progress:
    """The progress of a schedule that was made just now.

    Parameters:
        seed: what tells the schedule from others; its jitter comes of it.
        now: seconds since the epoch.

    Raises:
        InvalidSchedule: the cron line or the zone cannot be read.
    """
    first = _first(cadence, now)
    anchor_at = now if first is None else first
    return _aimed(cadence, seed, Progress(anchor_at=anchor_at, tick_at=None, due_at=None, decided_at=now), first, now)


def step(cadence: Cadence, seed: str, progress: Progress, now: float) -> Step:
    """Look at a schedule: which tick is to be fired, and what was missed. Nothing changes while nothing is due.

    The tick is gone over: whoever calls this fires it, or says in `counted` that it was refused. Raises as `begin`.
    """
    first_at, due_at = progress.tick_at, progress.due_at
    if first_at is None or due_at is None:
        return Step(None, progress)
    if progress.decided_at - now > SET_BACK_S:
        return Step(None, _set_back(cadence, seed, progress, now))
    if now < due_at:
        return Step(None, progress)
    waiting, tick = _waiting(cadence, seed, progress, first_at, now)
    dropped = waiting - 1 if cadence.miss != "burst" else max(0, waiting - BURST_LIMIT)
    tick_at = tick(dropped)
    progress = msgspec.structs.replace(progress, missed=progress.missed + dropped)
    if cadence.every_s is None and waiting == STEP_LIMIT:  # there may be more: the next look goes on
        return Step(None, _aimed(cadence, seed, progress, tick_at, now))
    late = now - _due(cadence, seed, tick_at) > ON_TIME_S
    if cadence.miss == "delay" and cadence.every_s is not None and (dropped or late):
        progress = msgspec.structs.replace(progress, anchor_at=now)
        following = _following(cadence, now, now)
    else:
        following = _following(cadence, progress.anchor_at, tick_at)
    if cadence.miss == "skip" and late:
        progress = msgspec.structs.replace(progress, missed=progress.missed + 1)
        return Step(None, _aimed(cadence, seed, progress, following, now))
    return Step(tick_at, _aimed(cadence, seed, progress, following, now))


def counted(cadence: Cadence, progress: Progress, *, fired: bool) -> Progress:
    """The progress once a tick was fired, or refused. After ``max_runs`` firings there are no more ticks."""
    if not fired:
        return msgspec.structs.replace(progress, refused=progress.refused + 1)
    progress = msgspec.structs.replace(progress, fired=progress.fired + 1)
    if cadence.max_runs is not None and progress.fired >= cadence.max_runs:
        return msgspec.structs.replace(progress, tick_at=None, due_at=None)
    return progress


def resumed(cadence: Cadence, seed: str, progress: Progress, now: float) -> Progress:
    """The progress of a schedule that was paused: it goes on with the first tick from now on. Raises as `begin`."""
    if progress.tick_at is None:
        return progress
    if progress.decided_at - now > SET_BACK_S:
        return _set_back(cadence, seed, progress, now)
    after = max(now, math.nextafter(progress.anchor_at, -math.inf))  # not before its first tick
    return _aimed(cadence, seed, progress, _following(cadence, progress.anchor_at, after), now)
