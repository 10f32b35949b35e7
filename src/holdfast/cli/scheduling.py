"""``holdfast schedule``: send messages on a schedule."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, tzinfo
from typing import TYPE_CHECKING, Any, cast
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from holdfast.cli.connection import Target, run_with_client
from holdfast.cli.exits import Exit
from holdfast.cli.output import note, say, say_json, say_table
from holdfast.cli.sending import content_of

if TYPE_CHECKING:
    from holdfast.client import Client, RemoteSchedule
    from holdfast.protocol.messages import Policy
    from holdfast.protocol.schedules import Miss, ScheduleView

__all__ = ["add", "pause", "remove", "resume", "run_now", "show"]


def add(
    target: Target,
    session: str,
    text: str | None,
    *,
    every_s: float | None,
    cron: str | None,
    timezone: str,
    schedule_id: str | None,
    agent: str | None,
    overlap: str,
    miss: str,
    initial_delay_s: float | None,
    jitter_s: float,
    max_runs: int | None,
) -> Exit:
    """Create or replace a schedule that sends `text`, or the content of stdin."""
    content = content_of(text)

    async def work(client: Client) -> None:
        schedule = await client.schedule(
            session,
            content,
            every_s=every_s,
            cron=cron,
            timezone=timezone,
            schedule_id=schedule_id,
            agent=agent,
            overlap=cast("Policy", overlap),
            miss=cast("Miss", miss),
            initial_delay_s=initial_delay_s,
            jitter_s=jitter_s,
            max_runs=max_runs,
        )
        _say(await schedule.info(), as_json=target.as_json)

    return run_with_client(target, work)


def show(target: Target, *, session: str | None, limit: int, everybody: bool) -> Exit:
    """List schedules."""

    async def work(client: Client) -> None:
        views = await client.schedules(session=session, limit=limit, everybody=everybody)
        if target.as_json:
            say_json({"schedules": views})
            return
        if not views:
            note("no schedules: 'holdfast schedule add' creates one")
        say_table(
            ("schedule", "session", "state", "when", "next", "fired", "missed", "refused", "last"),
            (
                (
                    view.schedule_id,
                    view.session,
                    view.state,
                    _when(view),
                    _next(view),
                    str(view.fired),
                    str(view.missed),
                    str(view.refused),
                    view.last.outcome if view.last else "-",
                )
                for view in views
            ),
        )
        for view in views:
            if view.problem:
                say(f"{view.schedule_id}: {view.problem}")

    return run_with_client(target, work)


def pause(target: Target, schedule_id: str) -> Exit:
    """Pause a schedule."""
    return _change(target, schedule_id, lambda schedule: schedule.pause())


def resume(target: Target, schedule_id: str) -> Exit:
    """Resume a schedule."""
    return _change(target, schedule_id, lambda schedule: schedule.resume())


def remove(target: Target, schedule_id: str) -> Exit:
    """Delete a schedule, and print its last state."""

    async def work(client: Client) -> None:
        view = await client.find_schedule(schedule_id).delete()
        if target.as_json:
            say_json(view)
            return
        say(f"{view.schedule_id}: deleted; it was {view.state}, {_when(view)}, to session {view.session}")
        say(f"  ticks   {_counts(view)}")

    return run_with_client(target, work)


def _change(
    target: Target, schedule_id: str, change: Callable[[RemoteSchedule], Coroutine[Any, Any, ScheduleView]]
) -> Exit:
    async def work(client: Client) -> None:
        _say(await change(client.find_schedule(schedule_id)), as_json=target.as_json)

    return run_with_client(target, work)


def run_now(target: Target, schedule_id: str) -> Exit:
    """Send a schedule's message now."""

    async def work(client: Client) -> None:
        receipt = await client.find_schedule(schedule_id).run_now()
        if target.as_json:
            say_json(receipt)
        else:
            say(f"{receipt.disposition}: message {receipt.message_id} of session {receipt.session}")

    return run_with_client(target, work)


def _say(view: ScheduleView, *, as_json: bool) -> None:
    if as_json:
        say_json(view)
        return
    say(f"{view.schedule_id}: {view.state}, {_when(view)}, to session {view.session}")
    say(f"  next    {_next(view)}")
    say(f"  ticks   {_counts(view)}")
    if view.problem:
        say(f"  problem {view.problem}")


def _counts(view: ScheduleView) -> str:
    return f"{view.fired} fired, {view.missed} missed, {view.refused} refused"


def _when(view: ScheduleView) -> str:
    if view.every_s is not None:
        return f"every {view.every_s:g} s"
    return "-" if view.cron is None else f"{view.cron} ({view.timezone})"  # None: it is broken


def _next(view: ScheduleView) -> str:
    """Return when it fires next: in the schedule's time zone, or else in UTC; never in this machine's zone."""
    if view.next_at is None:
        return "-"
    try:
        zone: tzinfo = ZoneInfo(view.timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # only the server knows this zone
        zone = UTC
    return f"{datetime.fromtimestamp(view.next_at, zone):%Y-%m-%d %H:%M:%S %Z}"
