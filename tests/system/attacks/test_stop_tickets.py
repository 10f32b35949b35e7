"""However often one user interrupts idle sessions, another's stop that is not done yet can still be asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.system.attacks.harness import ATTACKER, BYSTANDER, AttackedServer, attacked_server

AGENTS = tuple(f"tests.system.attacks.agents:{name}" for name in ("echo", "endless", "stubborn"))


async def ticket(server: AttackedServer) -> str:
    """Where the bystander asks for its stop, which is under way."""
    async with server.http(BYSTANDER) as mine:
        sent = await mine.post("/v1/sessions/b/messages", json={"content": "go", "agent": "stubborn"})
        assert sent.status_code == 202, sent.text
        async with mine.stream("GET", "/v1/sessions/b/events") as events:
            async for line in events.aiter_lines():
                if "it runs" in line:
                    break
        pending = await mine.post("/v1/sessions/b/interrupt?wait=0", json={"grace_s": 10})
        assert pending.status_code == 202, pending.text
        return str(pending.headers["location"])


async def interrupt_idle(server: AttackedServer, count: int) -> None:
    """Interrupt a session without a run that often, as fast as the server takes it."""
    async with server.http(ATTACKER) as http:
        assert (await http.post("/v1/sessions/m/messages?wait=10", json={"content": "hi"})).status_code == 200

        async def some(share: int) -> int:
            done = 0
            while done < share:
                answer = await http.post("/v1/sessions/m/interrupt", json={})
                assert answer.status_code in (200, 202, 429), answer.text
                if answer.status_code == 429:
                    await asyncio.sleep(float(answer.headers["retry-after"]))
                else:
                    done += 1
            return done

        assert sum(await asyncio.gather(*(some(count // 20) for _ in range(20)))) == count


async def attack(folder: Path, count: int) -> None:
    async with attacked_server(folder, agents=AGENTS) as server:
        location = await ticket(server)
        async with server.bystander(sends=100):
            await interrupt_idle(server, count)
        async with server.http(BYSTANDER) as mine:
            async with asyncio.timeout(30):
                while (result := await mine.get(location)).status_code == 202:
                    await asyncio.sleep(0.05)
            assert result.status_code == 200, result.text
            assert result.json()["outcome"] == "gone"
            assert (await mine.get(location)).status_code == 200, "it may be asked for again"
        async with server.http(ATTACKER) as http:
            assert (await http.get(location)).status_code == 404, "it is another's"
        await server.check()


def test_twelve_hundred_idle_interrupts_evict_no_stop_of_another(tmp_path):
    """1,000 results are kept of each principal, so these are more than the attacker's own share."""
    asyncio.run(attack(tmp_path, 1_200))


@pytest.mark.nightly
def test_ten_thousand_idle_interrupts_evict_no_stop_of_another(tmp_path):
    asyncio.run(attack(tmp_path, 10_000))
