"""Operations on schedules, which send messages at set times."""

from __future__ import annotations

from typing import Annotated, cast

import msgspec
from msgspec import Meta

from holdfast import errors
from holdfast.host.scheduler import Schedule
from holdfast.protocol.messages import Policy, Receipt
from holdfast.protocol.schedules import Miss, ScheduleView
from holdfast.server.exchange import Answer, Exchange, encode
from holdfast.server.native import ALL, LIST_LIMIT, Body, Name, Native
from holdfast.server.operations import Query, Table

__all__ = ["TABLE"]

TABLE = Table()


class ScheduleBody(Body, frozen=True, kw_only=True):
    """A schedule: the session, the message, and the times: ``every_s``, or ``cron`` with ``timezone``.

    An existing schedule with this ``schedule_id`` is replaced. ``miss``: how to handle missed ticks: ``skip``,
    ``burst`` or ``delay``. ``overlap``: the policy of its messages.
    """

    session: Name
    text: str
    schedule_id: Name | None = None
    agent: Name | None = None
    every_s: float | None = None
    cron: Annotated[str, Meta(max_length=200)] | None = None
    timezone: Annotated[str, Meta(max_length=100)] = "UTC"
    overlap: str = "queue"
    miss: str = "skip"
    initial_delay_s: float | None = None
    jitter_s: float = 0.0
    max_runs: int | None = None


class PauseBody(Body, frozen=True, kw_only=True):
    """Whether the schedule is paused."""

    paused: bool


class NowBody(Body, frozen=True, kw_only=True):
    """An empty object; the body may be omitted."""


class ScheduleList(msgspec.Struct, frozen=True, kw_only=True):
    """Schedules, in order of creation."""

    schedules: list[ScheduleView]


_schedule_body = msgspec.json.Decoder(ScheduleBody)
_pause_body = msgspec.json.Decoder(PauseBody)
_now_body = msgspec.json.Decoder(NowBody)


def _schedule(native: Native, exchange: Exchange) -> Schedule:
    """Return the caller's schedule that the path names."""
    return native.host.find_schedule(exchange.path["schedule_id"], principal=exchange.caller.principal)


@TABLE.enter(
    "POST",
    "/v1/schedules",
    body=ScheduleBody,
    answers={201: ScheduleView},
    errors=(
        errors.InvalidSchedule,
        errors.InvalidKey,
        errors.UnknownAgent,
        errors.UnknownPolicy,
        errors.LimitExceeded,
        errors.Draining,
    ),
)
async def put_schedule(native: Native, exchange: Exchange) -> Answer:
    """Create or replace a schedule, which sends a session a message at set times.

    Sending an identical schedule with the same `schedule_id` changes nothing.
    """
    body = await exchange.body(_schedule_body)
    schedule = await native.session_named(exchange, body.session).schedule(
        body.text,
        every_s=body.every_s,
        cron=body.cron,
        timezone=body.timezone,
        schedule_id=body.schedule_id,
        agent=body.agent,
        overlap=cast(Policy, body.overlap),  # unknown policies are refused by name
        miss=cast(Miss, body.miss),  # so are unknown values of miss
        initial_delay_s=body.initial_delay_s,
        jitter_s=body.jitter_s,
        max_runs=body.max_runs,
    )
    return Answer(201, encode(await schedule.info()))


@TABLE.enter(
    "GET",
    "/v1/schedules",
    query=(
        Query("session", "string", "Return only schedules of this session."),
        Query(
            "limit",
            "integer",
            f"Maximum number of items (default 100, at most {LIST_LIMIT}).",
            least=1,
            most=LIST_LIMIT,
        ),
        ALL,
    ),
    answers={200: ScheduleList},
)
async def list_schedules(native: Native, exchange: Exchange) -> Answer:
    """List your schedules, in order of creation."""
    await exchange.take_turn()
    limit = exchange.whole("limit", least=1, most=LIST_LIMIT) or 100
    whose, session = native.whose(exchange), exchange.query("session")
    if whose is None and session is not None:
        raise errors.InvalidRequest("session and all exclude each other", hint="omit one of them")
    found = await native.host.schedules(principal=whose, session=session, limit=limit)
    return Answer(200, encode(ScheduleList(schedules=found)))


@TABLE.enter(
    "GET",
    "/v1/schedules/{schedule_id}",
    answers={200: ScheduleView},
    errors=(errors.UnknownSchedule, errors.InvalidKey),
)
async def get_schedule(native: Native, exchange: Exchange) -> Answer:
    """Return the schedule's current state: its next due time and the outcome of its ticks."""
    return Answer(200, encode(await _schedule(native, exchange).info()))


@TABLE.enter(
    "PATCH",
    "/v1/schedules/{schedule_id}",
    body=PauseBody,
    answers={200: ScheduleView},
    errors=(errors.UnknownSchedule, errors.ScheduleBroken, errors.InvalidKey),
)
async def pause_schedule(native: Native, exchange: Exchange) -> Answer:
    """Pause a schedule, or resume it with its next tick."""
    body = await exchange.body(_pause_body)
    schedule = _schedule(native, exchange)
    return Answer(200, encode(await (schedule.pause() if body.paused else schedule.resume())))


@TABLE.enter(
    "POST",
    "/v1/schedules/{schedule_id}/run",
    body=NowBody,
    optional_body=True,
    answers={202: Receipt},
    errors=(
        errors.UnknownSchedule,
        errors.ScheduleBroken,
        errors.ScheduleFinished,
        errors.ScheduleChanged,
        errors.SessionBusy,
        errors.MailboxFull,
        errors.SessionDeleted,
        errors.UnknownAgent,
        errors.InvalidKey,
        errors.Draining,
    ),
)
async def run_schedule(native: Native, exchange: Exchange) -> Answer:
    """Send the schedule's message now; its ticks do not change."""
    await exchange.body(_now_body, optional=True)
    schedule = _schedule(native, exchange)
    view = await schedule.info()
    await native.session_named(exchange, view.session).check_agent(view.agent)
    return Answer(202, encode(await schedule.run_now()))


@TABLE.enter(
    "DELETE",
    "/v1/schedules/{schedule_id}",
    answers={200: ScheduleView},
    errors=(errors.UnknownSchedule, errors.InvalidKey),
)
async def delete_schedule(native: Native, exchange: Exchange) -> Answer:
    """Delete a schedule and return its last state. Messages already sent are not withdrawn."""
    return Answer(200, encode(await _schedule(native, exchange).delete()))
