"""``holdfast schedule``: send messages on a schedule."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, tzinfo
from typing import TYPE_CHECKING, Annotated, Any, cast
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import typer

from holdfast.cli.command_group import RefusingGroup
from holdfast.cli.exit_codes import Exit
from holdfast.cli.options import Json, Key, Session, Url, User, seconds
from holdfast.cli.output import note, say, say_json, say_table
from holdfast.cli.send import WRITE_TEXT, content_of
from holdfast.cli.target import Target, run_with_client

if TYPE_CHECKING:
    from holdfast.client import Client, RemoteSchedule
    from holdfast.protocol.messages import Policy
    from holdfast.protocol.schedules import Miss, ScheduleView

__all__ = ["add", "app", "list_schedules", "pause", "remove", "resume", "run_now"]

app = typer.Typer(
    cls=RefusingGroup,
    help="Send messages on a schedule.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

ScheduleId = Annotated[str, typer.Argument(metavar="SCHEDULE", help="Schedule ID.")]


@app.command("add")
def add(
    text: Annotated[str | None, typer.Argument(help="Message text; read from stdin if - or omitted.")] = None,
    session: Session = "main",
    every: Annotated[
        float | None, typer.Option("--every", parser=seconds, help="Interval between ticks, in seconds.")
    ] = None,
    cron: Annotated[str | None, typer.Option("--cron", help="Cron expression, such as '30 9 * * MON-FRI'.")] = None,
    timezone: Annotated[
        str, typer.Option("--timezone", help="Time zone of the cron expression, such as Europe/Berlin.")
    ] = "UTC",
    schedule_id: Annotated[
        str | None, typer.Option("--id", help="Schedule ID; replaces the schedule with this ID (default: generated).")
    ] = None,
    agent: Annotated[str | None, typer.Option("--agent", help="Agent that answers.")] = None,
    overlap: Annotated[str, typer.Option("--overlap", help="Policy if a run is active, as for send.")] = "queue",
    miss: Annotated[
        str,
        typer.Option(
            "--miss", help="After missed ticks: skip them, delay (fire once, late) or burst (fire up to 100)."
        ),
    ] = "skip",
    initial_delay: Annotated[
        float | None, typer.Option("--initial-delay", parser=seconds, help="Delay before the first tick, in seconds.")
    ] = None,
    jitter: Annotated[
        float, typer.Option("--jitter", parser=seconds, help="Delay each tick by up to this many seconds.")
    ] = 0.0,
    max_runs: Annotated[int | None, typer.Option("--max-runs", help="Finish after this many firings.")] = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """Create a schedule that sends a message, with --every or --cron."""
    target = Target(url=url, key=key, user=user, as_json=json)
    content = content_of(text, binary_hint=WRITE_TEXT)

    async def work(client: Client) -> None:
        schedule = await client.schedule(
            session,
            content,
            every_s=every,
            cron=cron,
            timezone=timezone,
            schedule_id=schedule_id,
            agent=agent,
            overlap=cast("Policy", overlap),
            miss=cast("Miss", miss),
            initial_delay_s=initial_delay,
            jitter_s=jitter,
            max_runs=max_runs,
        )
        _say(await schedule.info(), as_json=target.as_json)

    return run_with_client(target, work)


@app.command("ls")
def list_schedules(
    session: Annotated[
        str | None, typer.Option("--session", "-s", help="List only the schedules of this session.")
    ] = None,
    everybody: Annotated[
        bool, typer.Option("--all", "-a", help="List the schedules of all principals (admin).")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", help="Maximum number to list.", min=1, max=1000)] = 100,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """List schedules with their next tick, counts of earlier ticks, and last outcome."""
    target = Target(url=url, key=key, user=user, as_json=json)

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


@app.command("pause")
def pause(schedule_id: ScheduleId, url: Url = None, key: Key = None, user: User = None, json: Json = False) -> Exit:
    """Pause a schedule until it is resumed."""
    target = Target(url=url, key=key, user=user, as_json=json)
    return _change(target, schedule_id, lambda schedule: schedule.pause())


@app.command("resume")
def resume(schedule_id: ScheduleId, url: Url = None, key: Key = None, user: User = None, json: Json = False) -> Exit:
    """Resume a schedule from its next tick on."""
    target = Target(url=url, key=key, user=user, as_json=json)
    return _change(target, schedule_id, lambda schedule: schedule.resume())


@app.command("run")
def run_now(schedule_id: ScheduleId, url: Url = None, key: Key = None, user: User = None, json: Json = False) -> Exit:
    """Send a schedule's message now, without changing its ticks."""
    target = Target(url=url, key=key, user=user, as_json=json)

    async def work(client: Client) -> None:
        receipt = await client.find_schedule(schedule_id).run_now()
        if target.as_json:
            say_json(receipt)
        else:
            say(f"{receipt.disposition}: message {receipt.message_id} of session {receipt.session}")

    return run_with_client(target, work)


@app.command("rm")
def remove(schedule_id: ScheduleId, url: Url = None, key: Key = None, user: User = None, json: Json = False) -> Exit:
    """Delete a schedule."""
    target = Target(url=url, key=key, user=user, as_json=json)

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
    """Return the next time at which the schedule fires, in the schedule's time zone if known, or else in UTC."""
    if view.next_at is None:
        return "-"
    try:
        zone: tzinfo = ZoneInfo(view.timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # only the server knows this zone
        zone = UTC
    return f"{datetime.fromtimestamp(view.next_at, zone):%Y-%m-%d %H:%M:%S %Z}"
