"""Floods by one principal of what is allowed: schedules, messages, lists, and requests one byte below each bound."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest

from tests.system.attacks.harness import ATTACKER, attacked_server
from tests.system.attacks.test_large_answers import fill_mailbox


async def make_schedules(http: httpx2.AsyncClient) -> None:
    """As many schedules as a principal may have, all of them due each second."""
    statuses: Counter[int] = Counter()
    for number in range(1001):
        schedule = {"session": f"s{number}", "text": "x" * 100, "every_s": 1, "schedule_id": f"s{number}"}
        statuses[(await http.post("/v1/schedules", json=schedule)).status_code] += 1
    assert statuses[201] == 1000 and statuses.total() == 1001, statuses


async def flood(
    http: httpx2.AsyncClient, method: str, path: str, over: asyncio.Event, body: dict[str, str] | None = None
) -> Counter[int]:
    """The same request again and again, one at a time; the statuses of the answers."""
    statuses: Counter[int] = Counter()
    while not over.is_set():
        with suppress(httpx2.HTTPError):
            statuses[(await http.request(method, path, json=body)).status_code] += 1
    return statuses


LISTS = [
    "/v1/sessions?limit=1000",
    "/v1/sessions/s0/runs",
    "/v1/sessions/s0/mailbox",
    "/v1/sessions/s0/tree",
    "/v1/sessions/s0/transcript",
    "/v1/tree",
    "/v1/schedules",
    "/v1/server",
    "/",
    "/openapi.json",
]


async def attack(folder: Path, *, sends: int, schedules: bool = False, lists: int = 0, mailboxes: int = 0) -> None:
    """Let a bystander work while that goes on, and judge."""
    async with attacked_server(folder) as server, server.http(ATTACKER) as http:
        if schedules:
            await make_schedules(http)
        if lists:
            await fill_mailbox(server, "s0", messages=50, size=2_000)
        over = asyncio.Event()
        message = {"content": "x" * 60_000, "agent": "endless"}
        async with asyncio.TaskGroup() as group:
            flooding = [group.create_task(flood(http, "GET", path, over)) for path in LISTS * lists]
            for number in range(mailboxes):
                path = f"/v1/sessions/m{number}/messages"
                flooding.append(group.create_task(flood(http, "POST", path, over, message)))
            async with server.bystander(sends=sends, stops=3 if sends < 1000 else 20):
                pass
            over.set()
        for task in flooding:
            statuses = task.result()
            assert set(statuses) <= {200, 202, 403, 429, 503}, statuses
        await server.check(latency=sends >= 2000)


def test_a_thousand_schedules_that_fire_at_once_keep_nobody_out(tmp_path):
    asyncio.run(attack(tmp_path, sends=100, schedules=True))


def test_mailboxes_that_are_filled_as_fast_as_it_goes_keep_nobody_out(tmp_path):
    asyncio.run(attack(tmp_path, sends=100, mailboxes=10))


def test_lists_that_are_asked_for_again_and_again_keep_nobody_out(tmp_path):
    asyncio.run(attack(tmp_path, sends=100, lists=2))


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.parametrize("what", [{"schedules": True}, {"mailboxes": 50}, {"lists": 10}], ids=str)
def test_floods_of_what_is_allowed_slow_nobody(tmp_path, what):
    asyncio.run(attack(tmp_path, sends=2000, **what))
