"""Transcripts over HTTP whose entries are large for their principal's share of memory."""

from __future__ import annotations

import asyncio

import pytest

from holdfast import Run, agent
from holdfast.errors import BudgetExceeded
from holdfast.protocol.messages import Entry, SessionExport
from tests.server.live import Live, served

SHARE = 1_000_000


@agent
async def echo(run: Run) -> str:
    return run.text


def served_with_a_small_share(scenario) -> None:
    served(
        scenario,
        echo,
        memory_limit_bytes=3 * SHARE,
        principal_memory_bytes=SHARE,
        principal_stored_bytes=10**9,
        stream_stall_s=2,
    )


@pytest.mark.parametrize("size", [250_000, 330_000, 900_000])
def test_neighbouring_entries_that_fill_the_share_each_are_read_one_after_the_other(size: int) -> None:
    async def scenario(server: Live) -> None:
        entries = tuple(Entry(role="user", content=f"{n}" * size) for n in range(4))
        session = server.host.session("large", principal="local")
        await session.import_history(SessionExport(key="x", agent="echo", entries=entries))
        for path, count in (("transcript", 1), ("export", 1), ("transcript", 3)):
            answers = await asyncio.gather(
                *(server.http.get(f"/v1/sessions/large/{path}", timeout=25) for _ in range(count))
            )
            for answer in answers:
                assert [entry["content"][:1] for entry in answer.json()["entries"]] == ["0", "1", "2", "3"]
        memory = server.host.budgets.memory
        while memory.used:
            await asyncio.sleep(0.01)

    served_with_a_small_share(scenario)


def test_what_waits_in_memory_has_at_most_a_share_too() -> None:
    async def scenario(server: Live) -> None:
        memory = server.host.budgets.memory
        with memory.charge("local", SHARE):
            waiting = [
                asyncio.ensure_future(memory.wait_for("local", SHARE // 2, within_s=60, in_memory=True))
                for _ in range(2)
            ]
            await asyncio.sleep(0)
            for amount in (1, SHARE):
                with pytest.raises(BudgetExceeded):
                    await memory.wait_for("local", amount, within_s=60, in_memory=True)
            bodies = asyncio.ensure_future(memory.wait_for("local", SHARE, within_s=60))
            await asyncio.sleep(0)
            assert not bodies.done(), "what is not in memory yet waits"
        for one in (*waiting, bodies):
            (await one).release()

    served_with_a_small_share(scenario)
