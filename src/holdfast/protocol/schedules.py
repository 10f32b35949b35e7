"""The ticks of a schedule: a pure state machine that decides when a schedule ticks and what happens to each tick.

Invariants:

- Every tick is either returned once for firing or counted as missed, never both. A schedule has no ticks while it is
  paused or after it has finished.
- A tick's jitter depends only on the schedule and the tick, so checking the schedule again, even after a crash, does
  not change it.
- Ticks are in chronological order. If the clock is set back by at most `SET_BACK_S`, no tick is repeated: the schedule
  waits until the clock catches up. If the clock is set back further, the time before the change was presumably wrong,
  so the schedule continues from the new time. A repeated tick is recognized by its time, which is part of the
  idempotency key of the tick's message.
- One step handles a bounded number of ticks. A schedule that missed more ticks stays due until all are counted.

A tick is on time until `ON_TIME_S` after its due time. The miss policy determines what happens to ticks that are not
handled on time, because the host was down or the clock jumped:

- ``skip``: the newest tick fires if it is still on time; all other ticks are missed.
- ``delay``: the newest tick fires, however late; all other ticks are missed. The intervals of ``every_s`` then count
  from this firing.
- ``burst``: the newest `BURST_LIMIT` ticks fire one after the other; older ticks are missed.

Cron expressions are parsed by cronsim. They have five fields, or six with seconds first. At daylight saving changes
they behave as in Debian's cron: a time of day that is skipped fires right after the gap, and a time of day that occurs
twice fires only the first time. An expression with a minute or hour field that begins with ``*`` follows the clock
instead.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, tzinfo
from itertools import islice, pairwise
from typing import Final, Literal, NamedTuple, TypedDict

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
    "ScheduleKeywords",
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
"""Time after a tick's due time within which the tick still counts as on time, in seconds."""
BURST_LIMIT: Final = 100
"""Maximum number of missed ticks that ``burst`` fires."""
SET_BACK_S: Final = 3 * 3600.0
"""If the clock is set back by more than this, in seconds, the time before the change is presumed wrong (as in cron)."""
STEP_LIMIT: Final = 1000
"""Maximum number of ticks of a cron expression in one step."""
LEAST_EVERY_S: Final = 1.0
"""The shortest ``every_s`` of a durable schedule, in seconds."""
_MOST_S: Final = 10 * 366 * 86400.0
_CRON_LENGTH: Final = 200
_LOOK_AHEAD: Final = 20
"""Number of cron ticks whose intervals bound the jitter."""


class Cadence(Value, frozen=True, kw_only=True):
    """The times at which a schedule ticks, given either as a fixed interval or as a cron expression.

    Parameters:
        every_s: interval between ticks, in seconds; None if `cron` is given.
        cron: cron expression ``minute hour day month weekday``, or six fields with the second first; None if `every_s`
            is given.
        timezone: time zone of the cron expression, such as ``Europe/Berlin``; not allowed with `every_s`.
        initial_delay_s: time to the first tick, in seconds; None means one interval. With `cron`, this is the minimum
            time to the first tick, and None means 0.
        jitter_s: maximum delay of a tick, in seconds. The delay depends only on the schedule and the tick.
        max_runs: number of firings after which the schedule is finished; None means unlimited.
        miss: policy for missed ticks: ``skip``, ``burst`` or ``delay``, as described in the module.
    """

    every_s: float | None = None
    cron: str | None = None
    timezone: str = "UTC"
    initial_delay_s: float | None = None
    jitter_s: float = 0.0
    max_runs: int | None = None
    miss: Miss = "skip"


class ScheduleSpec(Cadence, frozen=True, kw_only=True):
    """The message that a schedule sends, and the schedule's cadence.

    Parameters:
        session: key of the session that gets the message. If the session does not exist, the first message creates it.
        text: text of the message.
        agent: name of the agent that answers; None means the session's agent, or the default agent for a new session.
        overlap: policy of the message if a run is already active; ``reject`` skips the tick.
    """

    session: str
    text: str
    agent: str | None = None
    overlap: Policy = "queue"


class ScheduleKeywords(TypedDict, total=False):
    """The keywords of `SessionAPI.schedule`; see `ScheduleSpec`."""

    every_s: float | None
    cron: str | None
    timezone: str
    initial_delay_s: float | None
    jitter_s: float
    max_runs: int | None
    miss: Miss
    agent: str | None
    overlap: Policy


class Firing(Value, frozen=True, kw_only=True):
    """The outcome of a tick or of a manual run.

    Parameters:
        outcome: ``fired``; ``missed``, if the miss policy dropped the tick; ``duplicate``, if the tick's message had
            already been sent; or the code of the error with which the message was refused, such as ``busy``,
            ``mailbox_full``, ``unknown_agent`` or ``session_deleted``.
        tick_at: time of the tick, in seconds since the epoch; None for a manual run.
        at: time at which the outcome was decided, in seconds since the epoch.
        message_id: id of the message that was sent; None if no message was sent.
    """

    outcome: str
    tick_at: float | None = None
    at: float = 0.0
    message_id: str | None = None


class ScheduleView(ScheduleSpec, frozen=True, kw_only=True):
    """The current state of a schedule.

    Parameters:
        schedule_id: id of the schedule, unique among the schedules of its principal.
        principal: owner of the schedule.
        state: ``active``; ``paused``; ``finished`` after the last tick; or ``broken`` if the stored definition is
            unreadable, in which case only the ids and the session of the schedule are known.
        next_at: time of the next firing, including jitter; None while the schedule is paused, finished or broken.
        fired, missed, refused: numbers of ticks that fired, were missed and were refused; `fired` includes manual runs.
        last: newest outcome of a tick or a manual run; None before the first outcome.
        problem: why the schedule is broken, or why its newest tick did not fire if a person must solve the problem;
            otherwise None.
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
    """The progress of a schedule.

    Parameters:
        anchor_at: reference time of the ticks. With ``every_s``, all ticks are whole intervals away from this time. It
            is the time of the first tick, until a late firing (``delay``) or a clock that was set back moves it.
        tick_at: time of the first tick that is neither fired nor counted; None after the last tick.
        due_at: time at which to fire that tick, which is `tick_at` plus the tick's jitter; None after the last tick.
        decided_at: time at which `tick_at` was last determined.
        fired, missed, refused: numbers of ticks that fired, were missed and were refused so far; `fired` includes
            manual runs.
    """

    anchor_at: float
    tick_at: float | None
    due_at: float | None
    decided_at: float
    fired: int = 0
    missed: int = 0
    refused: int = 0


class Step(NamedTuple):
    """The result of checking a schedule: the tick to fire now (None if no tick fires), and the new progress."""

    tick_at: float | None
    progress: Progress


# ── ticks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_cadence(cadence: Cadence, *, now: float, least_every_s: float = LEAST_EVERY_S) -> None:
    """Raise `InvalidSchedule` if the cadence is invalid or never ticks.

    Parameters:
        cadence: cadence to check.
        now: current time, in seconds since the epoch.
        least_every_s: shortest allowed ``every_s``, in seconds.
    """
    if (cadence.every_s is None) is (cadence.cron is None):
        raise InvalidSchedule(
            f"the schedule has {'neither every_s nor cron' if cadence.cron is None else 'both every_s and cron'}",
            hint="give one of them",
        )
    line: object = cadence.cron
    if not isinstance(line, (str, type(None))):
        raise InvalidSchedule(f"cron is {line!r}; it must be a string, such as '30 9 * * MON-FRI'")
    if cadence.every_s is not None and cadence.timezone != "UTC":
        raise InvalidSchedule(
            f"timezone is {cadence.timezone!r}, but ticks of every_s do not depend on a time zone",
            hint="omit the timezone, or give a cron expression",
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
            hint="ticks would overtake each other; choose a smaller jitter_s",
        )
    runs: object = cadence.max_runs
    if runs is not None and (not isinstance(runs, int) or isinstance(runs, bool) or runs < 1):
        raise InvalidSchedule(f"max_runs is {runs!r}; it must be a whole number, 1 or more")
    if cadence.miss not in ("skip", "burst", "delay"):
        raise InvalidSchedule(f"unknown miss policy {cadence.miss!r}", hint="use skip, burst or delay")
    first_at = _first(cadence, now)
    if first_at is None:
        raise InvalidSchedule(
            f"the cron expression {cadence.cron!r} never fires: no day in the next 50 years matches",
            hint="correct its day, month and weekday",
        )
    if cadence.jitter_s and cadence.cron is not None:
        ticks = [first_at, *islice(_cron_ticks(cadence, first_at), _LOOK_AHEAD)]
        least_s = min((after - at for at, after in pairwise(ticks)), default=math.inf)
        if cadence.jitter_s > least_s:
            raise InvalidSchedule(
                f"jitter_s is {cadence.jitter_s:g}, more than the time between two ticks ({least_s:g})",
                hint="ticks would overtake each other; choose a smaller jitter_s",
            )


def _check_number(name: str, value: object, least: float) -> None:
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= _MOST_S
    if not fits:
        raise InvalidSchedule(f"{name} is {value!r}; it must be a number of seconds from {least:g} to {_MOST_S:.0f}")


def _zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError, TypeError):  # OSError: the name of a folder of zones
        raise InvalidSchedule(
            f"unknown time zone {name!r}", hint="use a name such as Europe/Berlin or America/New_York, or UTC"
        ) from None


def _cron_ticks(cadence: Cadence, after: float) -> Iterator[float]:
    """Yield the ticks of the cron expression later than `after`, in order. Raises `InvalidSchedule`."""
    from cronsim import CronSim, CronSimError

    line = cadence.cron or ""
    if len(line) > _CRON_LENGTH:
        raise InvalidSchedule(f"cron expression too long; the limit is {_CRON_LENGTH} characters")
    zone = _zone(cadence.timezone)
    try:
        moments = CronSim(line, datetime.fromtimestamp(math.floor(after), zone))  # it rounds
    except CronSimError as error:
        raise InvalidSchedule(
            f"{line!r} is not a cron expression: {error}",
            hint="use: minute hour day-of-month month day-of-week, such as 30 9 * * MON-FRI, "
            "with a day that exists in the month",
        ) from None
    except (OverflowError, ValueError, OSError):  # a clock outside the calendar
        return
    try:
        for moment in moments:
            at = moment.timestamp()
            if at > after:  # in a repeated hour, cronsim may return to its first occurrence
                after = at
                yield at
    except (OverflowError, ValueError):
        return


def _following(cadence: Cadence, anchor_at: float, after: float) -> float | None:
    """Return the first tick later than `after`; None if no tick is later."""
    if cadence.every_s is None:
        return next(_cron_ticks(cadence, after), None)
    k = math.floor((after - anchor_at) / cadence.every_s) + 1
    while anchor_at + k * cadence.every_s <= after:  # the division rounded down
        k += 1
    return anchor_at + k * cadence.every_s


def _first(cadence: Cadence, now: float) -> float | None:
    if cadence.every_s is not None:
        return now + (cadence.every_s if cadence.initial_delay_s is None else cadence.initial_delay_s)
    return _following(cadence, now, now + (cadence.initial_delay_s or 0.0))


def _due(cadence: Cadence, seed: str, tick_at: float) -> float:
    """Return the time at which to fire a tick: the tick plus its jitter."""
    if not cadence.jitter_s:
        return tick_at
    drawn = hashlib.blake2b(f"{seed}\0{tick_at!r}".encode(), digest_size=8).digest()
    return tick_at + cadence.jitter_s * int.from_bytes(drawn, "big") / 2**64


def _waiting(
    cadence: Cadence, seed: str, progress: Progress, tick_at: float, now: float
) -> tuple[int, Callable[[int], float]]:
    """Return the number of due ticks from `tick_at` on, and a function that maps an index to a tick.

    For a cron expression, at most `STEP_LIMIT` ticks are counted.
    """
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
    """Return the progress after the clock was set back: the schedule continues from the new time."""
    following = _following(cadence, progress.anchor_at, now)
    if following is not None:  # its first tick may lie in the time taken back
        progress = msgspec.structs.replace(progress, anchor_at=following)
    return _aimed(cadence, seed, progress, following, now)


def begin(cadence: Cadence, seed: str, now: float) -> Progress:
    """Return the progress of a new schedule.

    Parameters:
        cadence: cadence of the schedule.
        seed: text that identifies the schedule; the jitter of each tick is derived from it.
        now: current time, in seconds since the epoch.

    Raises:
        InvalidSchedule: if the cron expression or the time zone is invalid.
    """
    first = _first(cadence, now)
    anchor_at = now if first is None else first
    return _aimed(cadence, seed, Progress(anchor_at=anchor_at, tick_at=None, due_at=None, decided_at=now), first, now)


def step(cadence: Cadence, seed: str, progress: Progress, now: float) -> Step:
    """Return the tick to fire now, and count missed ticks.

    If no tick is due, the progress is unchanged, unless the clock was set back by more than `SET_BACK_S`. If a tick is
    returned, the returned progress is already at the tick after it; the caller fires the tick and calls `counted` with
    the outcome.
    Raises `InvalidSchedule` if the cron expression or the time zone is invalid.
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
    if cadence.every_s is None and waiting == STEP_LIMIT:  # there may be more: the next step continues
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
    """Return the progress after a tick was fired or refused. After ``max_runs`` firings, the schedule is finished."""
    if not fired:
        return msgspec.structs.replace(progress, refused=progress.refused + 1)
    progress = msgspec.structs.replace(progress, fired=progress.fired + 1)
    if cadence.max_runs is not None and progress.fired >= cadence.max_runs:
        return msgspec.structs.replace(progress, tick_at=None, due_at=None)
    return progress


def resumed(cadence: Cadence, seed: str, progress: Progress, now: float) -> Progress:
    """Return the progress of a resumed schedule, which continues with its first tick after `now`.

    Raises `InvalidSchedule` if the cron expression or the time zone is invalid.
    """
    if progress.tick_at is None:
        return progress
    if progress.decided_at - now > SET_BACK_S:
        return _set_back(cadence, seed, progress, now)
    after = max(now, math.nextafter(progress.anchor_at, -math.inf))  # not before its first tick
    return _aimed(cadence, seed, progress, _following(cadence, progress.anchor_at, after), now)
