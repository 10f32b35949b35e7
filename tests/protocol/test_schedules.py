"""Each tick is fired once or counted, whatever the clock does; cron lines keep to the clocks of their zone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import InvalidSchedule
from holdfast.protocol.schedules import (
    BURST_LIMIT,
    ON_TIME_S,
    SET_BACK_S,
    STEP_LIMIT,
    Cadence,
    Miss,
    Progress,
    begin,
    check_cadence,
    counted,
    resumed,
    step,
)

NOW = 1_790_000_000.25
DAY_S = 86400.0
BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"


def at(text: str, zone: str = "UTC", *, fold: int = 0) -> float:
    """Seconds since the epoch of a local time."""
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).timestamp()


def ticks(cadence: Cadence, start: float, end: float) -> list[float]:
    """What an ever watchful host fires from one time to another: it looks exactly when something is due."""
    progress = begin(cadence, "s", start)
    fired = []
    while progress.due_at is not None and progress.due_at < end:
        tick_at, progress = step(cadence, "s", progress, progress.due_at)
        assert tick_at is not None
        fired.append(tick_at)
    return fired


def local(times: list[float], zone: str) -> list[str]:
    return [datetime.fromtimestamp(time, ZoneInfo(zone)).isoformat(" ", "minutes")[5:] for time in times]


# ── the clocks of a zone ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("zone", "day", "cron", "expected"),
    [
        (BERLIN, "2026-03-29", "30 2 * * *", ["03-29 03:00+02:00", "03-30 02:30+02:00"]),
        (BERLIN, "2026-03-29", "0 3 * * *", ["03-29 03:00+02:00", "03-30 03:00+02:00"]),
        (BERLIN, "2026-03-29", "0 */2 * * *", ["03-29 00:00+01:00", "03-29 04:00+02:00", "03-29 06:00+02:00"]),
        (BERLIN, "2026-10-25", "30 2 * * *", ["10-25 02:30+02:00", "10-26 02:30+01:00"]),
        (BERLIN, "2026-10-25", "*/30 2 * * *", [
            "10-25 02:00+02:00", "10-25 02:30+02:00", "10-25 02:00+01:00", "10-25 02:30+01:00", "10-26 02:00+01:00",
        ]),
        (NEW_YORK, "2026-03-08", "15 2 * * *", ["03-08 03:00-04:00", "03-09 02:15-04:00"]),
        (NEW_YORK, "2026-11-01", "15 1 * * *", ["11-01 01:15-04:00", "11-02 01:15-05:00"]),
        (NEW_YORK, "2026-11-01", "0 9 * * *", ["11-01 09:00-05:00", "11-02 09:00-05:00"]),
        ("UTC", "2026-03-29", "30 2 * * *", ["03-29 02:30+00:00", "03-30 02:30+00:00"]),
    ],
)  # fmt: skip
def test_a_cron_line_keeps_to_the_clock_when_clocks_change(zone: str, day: str, cron: str, expected: list[str]) -> None:
    start = at(f"{day} 00:00", zone) - 1
    found = local(ticks(Cadence(cron=cron, timezone=zone), start, start + 3 * DAY_S), zone)
    assert found[: len(expected)] == expected


def test_in_the_hour_that_comes_twice_no_tick_is_in_the_past() -> None:
    cadence = Cadence(cron="30 2 * * *", timezone=BERLIN)
    second_time = at("2026-10-25 02:15", BERLIN, fold=1)
    first = begin(cadence, "s", second_time).tick_at
    assert first is not None
    assert local([first], BERLIN) == ["10-26 02:30+01:00"]


@pytest.mark.parametrize("zone", [BERLIN, NEW_YORK, "Australia/Lord_Howe", "America/Santiago", "Africa/Casablanca"])
@pytest.mark.parametrize(("hour", "minute"), [(0, 0), (1, 30), (2, 0), (2, 30), (3, 0), (12, 0), (23, 59)])
def test_a_daily_line_ticks_once_on_every_day_of_a_year(zone: str, hour: int, minute: int) -> None:
    start = at("2026-01-01 00:00", zone) - 1
    found = ticks(Cadence(cron=f"{minute} {hour} * * *", timezone=zone), start, at("2027-01-01 00:00", zone))
    days = [datetime.fromtimestamp(time, ZoneInfo(zone)).date() for time in found]
    assert days == [date(2026, 1, 1) + timedelta(days=n) for n in range(365)]


@given(st.floats(0, 2e9), st.sampled_from([BERLIN, NEW_YORK, "UTC", "Asia/Kathmandu", "Pacific/Apia"]))
@settings(max_examples=60, deadline=None)
def test_ticks_come_after_the_time_that_is_asked_for(now: float, zone: str) -> None:
    for cron in ("*/7 * * * *", "5 2 * * *", "0 0 29 2 *", "*/10 * * * * *", "0 12 * * MON#1"):
        cadence = Cadence(cron=cron, timezone=zone)
        before = now
        for _ in range(4):
            tick = begin(cadence, "s", before).tick_at
            assert tick is not None and tick > before
            before = tick


def test_a_tick_right_after_the_time_that_is_asked_for_is_not_rounded_away() -> None:
    tick = at("2026-06-01 12:00")
    assert begin(Cadence(cron="0 * * * *"), "s", math.nextafter(tick, 0)).tick_at == tick
    assert begin(Cadence(cron="0 * * * *"), "s", tick).tick_at == tick + 3600.0


# ── every tick, once ─────────────────────────────────────────────────────────────────────────────────────────────────


def every_tick(cadence: Cadence, start: float) -> Iterator[float]:
    """All ticks in order, told without the machine: by counting seconds in UTC."""
    if cadence.every_s is not None:
        delay_s = cadence.every_s if cadence.initial_delay_s is None else cadence.initial_delay_s
        yield from (start + delay_s + n * cadence.every_s for n in range(10**9))
        return
    assert cadence.cron is not None and cadence.timezone == "UTC"
    minutes, hours = (
        range(span) if field == "*" else [int(part) for part in field.split(",")]
        for field, span in zip(cadence.cron.split(), (60, 24), strict=False)
    )
    day = datetime.fromtimestamp(start, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    while True:
        for hour in hours:
            for minute in minutes:
                time = (day + timedelta(hours=hour, minutes=minute)).timestamp()
                if time > start:
                    yield time
        day += timedelta(days=1)


CADENCES = st.one_of(
    st.builds(
        Cadence,
        every_s=st.sampled_from([1.0, 7.0, 60.0, 3600.0, 86400.0, 0.1 + 60]),
        initial_delay_s=st.sampled_from([None, 0.0, 5.0, 100_000.0]),
        jitter_s=st.sampled_from([0.0, 0.5]),
        miss=st.sampled_from(["skip", "burst"]),
    ),
    st.builds(
        Cadence,
        cron=st.sampled_from(["* * * * *", "0,30 * * * *", "15 3,15 * * *", "0 9 * * *"]),
        jitter_s=st.sampled_from([0.0, 20.0]),
        miss=st.sampled_from(["skip", "burst", "delay"]),
    ),
)
PAUSES = st.lists(st.one_of(st.floats(0.0, 200.0), st.floats(-3000.0, 30_000.0), st.just(2 * DAY_S)), max_size=25)


@given(CADENCES, PAUSES)
@settings(max_examples=60, deadline=None)
def test_every_tick_is_fired_or_counted_once_and_in_order(cadence: Cadence, pauses: list[float]) -> None:
    progress, now, fired = begin(cadence, "s", NOW), NOW, 0
    known = every_tick(cadence, NOW)
    gone = 0
    for pause in pauses:
        now += pause
        while True:
            tick_at, after = step(cadence, "s", progress, now)
            passed = after.missed - progress.missed + (tick_at is not None)
            skipped = [next(known) for _ in range(passed)]
            gone += passed
            if tick_at is not None:
                assert tick_at == pytest.approx(skipped[-1], abs=1e-4), "not the newest of those that are gone over"
                assert now >= tick_at
                if cadence.miss == "skip":
                    assert now - tick_at <= ON_TIME_S + cadence.jitter_s
                after = counted(cadence, after, fired=True)
                fired += 1
            if after == progress:
                break
            progress = after
        assert progress.due_at is None or progress.due_at > now, "what is due is not left"
        assert gone == progress.fired + progress.missed
        assert progress.fired == fired


@given(st.lists(st.floats(0.0, 5000.0), max_size=20), st.sampled_from([10.0, 300.0]))
@settings(max_examples=80, deadline=None)
def test_delay_fires_once_for_all_that_was_missed_and_counts_from_then_on(pauses: list[float], every_s: float) -> None:
    cadence = Cadence(every_s=every_s, miss="delay")
    progress, now, last = begin(cadence, "s", NOW), NOW, NOW
    for pause in pauses:
        now += pause
        before = progress
        tick_at, progress = step(cadence, "s", progress, now)
        if before.due_at is None or now < before.due_at:
            assert tick_at is None and progress == before
            continue
        assert tick_at is not None and tick_at > last
        last = tick_at
        missed = progress.missed - before.missed
        assert missed == math.floor((now - before.due_at) / every_s)
        assert progress.due_at is not None
        if missed or now - tick_at > ON_TIME_S:
            assert progress.due_at == now + every_s
        else:
            assert progress.due_at == pytest.approx(tick_at + every_s)
        assert step(cadence, "s", progress, now).tick_at is None


@pytest.mark.parametrize(("miss", "fires"), [("skip", 1), ("delay", 1), ("burst", BURST_LIMIT)])
def test_a_long_absence_is_counted_to_the_last_tick_in_bounded_steps(miss: Miss, fires: int) -> None:
    cadence = Cadence(cron="* * * * *", miss=miss)
    progress = begin(cadence, "s", NOW)
    now = NOW + 30 * DAY_S
    fired = looks = 0
    while progress.due_at is not None and progress.due_at <= now:
        tick_at, progress = step(cadence, "s", progress, now)
        fired += tick_at is not None
        looks += 1
    assert fired == fires
    assert progress.missed + fired == 30 * 24 * 60
    assert looks <= 30 * 24 * 60 / (STEP_LIMIT - BURST_LIMIT) + fires + 1


def test_an_absence_of_a_year_is_one_step_for_even_distances() -> None:
    cadence = Cadence(every_s=1.0)
    tick_at, progress = step(cadence, "s", begin(cadence, "s", NOW), NOW + 365 * DAY_S)
    assert tick_at == NOW + 365 * DAY_S
    assert progress.missed == 365 * 86400 - 1


def test_a_tick_that_is_late_but_on_time_is_fired_and_one_that_is_too_late_is_not() -> None:
    for late_s, fires in ((ON_TIME_S, True), (ON_TIME_S + 1, False)):
        cadence = Cadence(every_s=3600.0)
        tick_at, progress = step(cadence, "s", begin(cadence, "s", NOW), NOW + 3600.0 + late_s)
        assert (tick_at is not None, progress.missed) == (fires, 0 if fires else 1)


# ── jitter, ends, pauses, clocks that were wrong ─────────────────────────────────────────────────────────────────────


def test_jitter_is_the_same_however_often_and_late_one_looks_and_differs_between_schedules() -> None:
    cadence = Cadence(every_s=60.0, jitter_s=30.0)
    one = begin(cadence, "one", NOW)
    delays = []
    for _ in range(200):
        assert one.tick_at is not None and one.due_at is not None
        delays.append(one.due_at - one.tick_at)
        assert step(cadence, "one", one, one.due_at - 0.001).tick_at is None
        again = step(cadence, "one", one, one.due_at)
        assert again == step(cadence, "one", one, one.due_at)
        one = again.progress
    assert all(0 <= delay < 30.0 for delay in delays)
    assert 10 < sum(delays) / len(delays) < 20
    other = begin(cadence, "other", NOW)
    assert other.tick_at is not None and other.due_at is not None
    assert other.due_at - other.tick_at != delays[0]


def test_a_schedule_is_finished_after_its_runs_and_refusals_do_not_count() -> None:
    cadence = Cadence(every_s=10.0, max_runs=2)
    progress = begin(cadence, "s", NOW)
    for fired in (True, False, True):
        assert progress.due_at is not None
        progress = counted(cadence, step(cadence, "s", progress, progress.due_at).progress, fired=fired)
    assert (progress.fired, progress.refused, progress.tick_at, progress.due_at) == (2, 1, None, None)
    assert step(cadence, "s", progress, NOW + 1e6) == (None, progress)
    assert resumed(cadence, "s", progress, NOW + 1e6) == progress


def test_a_schedule_that_is_resumed_goes_on_with_its_next_tick_and_not_before_its_first() -> None:
    cadence = Cadence(every_s=10.0, initial_delay_s=1000.0)
    progress = begin(cadence, "s", NOW)
    assert resumed(cadence, "s", progress, NOW + 50.0).tick_at == NOW + 1000.0
    late = resumed(cadence, "s", progress, NOW + 1234.0)
    assert (late.tick_at, late.missed) == (NOW + 1240.0, 0)
    daily = Cadence(cron="0 0 * * *", initial_delay_s=3 * DAY_S)
    progress = begin(daily, "s", NOW)
    assert progress.tick_at is not None and progress.tick_at > NOW + 3 * DAY_S
    assert resumed(daily, "s", progress, NOW + 60.0).tick_at == progress.tick_at


@pytest.mark.parametrize("cadence", [Cadence(every_s=3600.0), Cadence(cron="0 * * * *")])
def test_a_clock_that_goes_back_a_little_repeats_nothing_and_one_that_was_wrong_is_not_waited_for(
    cadence: Cadence,
) -> None:
    progress = begin(cadence, "s", NOW)
    assert progress.due_at is not None
    tick_at, progress = step(cadence, "s", progress, progress.due_at)
    assert tick_at is not None
    assert step(cadence, "s", progress, tick_at - SET_BACK_S + 10).progress == progress
    wrong = step(cadence, "s", progress, NOW + 3650 * DAY_S).progress
    back = step(cadence, "s", wrong, NOW + 7200.0)
    assert back.tick_at is None
    assert back.progress.missed == wrong.missed
    assert back.progress.due_at is not None
    assert 0 < back.progress.due_at - (NOW + 7200.0) <= 3600.0
    assert resumed(cadence, "s", back.progress, NOW + 7300.0).due_at == back.progress.due_at


@pytest.mark.parametrize("cadence", [Cadence(every_s=3600.0), Cadence(cron="0 * * * *")])
def test_a_schedule_that_was_made_and_paused_under_a_wrong_clock_is_resumed_by_the_right_one(cadence: Cadence) -> None:
    wrong = begin(cadence, "s", NOW + 365 * DAY_S)
    for now in (NOW, NOW + 7200.0):
        wrong = resumed(cadence, "s", wrong, now)
        assert wrong.due_at is not None
        assert 0 < wrong.due_at - now <= 3600.0


# ── what cannot be ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("cadence", "word"),
    [
        (Cadence(), "neither"),
        (Cadence(every_s=1.0, cron="* * * * *"), "both"),
        (Cadence(every_s=0.5), "every_s"),
        (Cadence(every_s=math.nan), "every_s"),
        (Cadence(every_s=math.inf), "every_s"),
        (Cadence(every_s=True), "every_s"),
        (Cadence(every_s="5"), "every_s"),  # type: ignore[arg-type]
        (Cadence(every_s=5.0, jitter_s=-1.0), "jitter_s"),
        (Cadence(every_s=5.0, jitter_s=6.0), "overtake"),
        (Cadence(every_s=5.0, initial_delay_s=-1.0), "initial_delay_s"),
        (Cadence(every_s=5.0, max_runs=0), "max_runs"),
        (Cadence(every_s=5.0, max_runs=True), "max_runs"),
        (Cadence(every_s=5.0, miss="sometimes"), "sometimes"),  # type: ignore[arg-type]
        (Cadence(cron=""), "cron expression"),
        (Cadence(cron="* * * *"), "cron expression"),
        (Cadence(cron="61 * * * *"), "minute"),
        (Cadence(cron=5), "must be a string"),  # type: ignore[arg-type]
        (Cadence(cron="* " * 200), "characters"),
        (Cadence(cron="0 0 30 2 *"), "day-of-month"),
        (Cadence(cron="* * */20 * 1L"), "never fires"),
        (Cadence(cron="0 0 * * *", timezone="Mars/Base"), "Mars/Base"),
        (Cadence(cron="0 0 * * *", timezone="Europe"), "Europe"),
        (Cadence(cron="0 0 * * *", timezone="../../etc/passwd"), "time zone"),
        (Cadence(cron="0 0 * * *", timezone=""), "time zone"),
        (Cadence(cron="0 0 * * *", timezone="a\0b"), "time zone"),
        (Cadence(cron="0 9,10 * * MON", jitter_s=3601.0), "two ticks"),
        (Cadence(every_s=5.0, timezone="Mars/Base"), "Mars/Base"),
        (Cadence(every_s=5.0, timezone=BERLIN), "'Europe/Berlin', but ticks of every_s do not depend on a time zone"),
        (Cadence(every_s=5.0, timezone=None), "time zone"),  # type: ignore[arg-type]
    ],
)
def test_a_cadence_that_cannot_be_is_refused_by_name(cadence: Cadence, word: str) -> None:
    with pytest.raises(InvalidSchedule, match=word) as refusal:
        check_cadence(cadence, now=NOW)
    assert refusal.value.code == "invalid_schedule"
    assert refusal.value.hint


@pytest.mark.parametrize(
    ("cadence", "words"),
    [
        (Cadence(every_s=0.5), r"every_s is 0\.5; it must be a number of seconds from 1 to 316224000"),
        (Cadence(cron=5), "cron is 5; it must be a string"),  # type: ignore[arg-type]
        (Cadence(cron="0 0 30 2 *"), "with a day that exists in the month"),
    ],
)
def test_a_refusal_says_what_would_do(cadence: Cadence, words: str) -> None:
    with pytest.raises(InvalidSchedule, match=words):
        check_cadence(cadence, now=NOW)


def test_jitter_may_be_as_long_as_the_shortest_time_between_two_ticks() -> None:
    for line, jitter_s in (("0 9,10 * * MON", 3600.0), ("0 0 1 1 *", DAY_S), ("* * * * *", 60.0)):
        check_cadence(Cadence(cron=line, jitter_s=jitter_s), now=NOW)


def test_a_clock_out_of_the_calendar_ends_a_schedule_and_breaks_nothing() -> None:
    progress = begin(Cadence(cron="0 0 * * *"), "s", 1e15)
    assert progress == Progress(anchor_at=1e15, tick_at=None, due_at=None, decided_at=1e15)
