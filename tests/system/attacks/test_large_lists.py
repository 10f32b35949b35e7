"""Lists that are read whole, single large entries, and imports of many small values: none of them takes the memory."""

from __future__ import annotations

import asyncio
import json

from tests.system.attacks.harness import ATTACKER, AttackedServer, attacked_server
from tests.system.attacks.test_large_answers import fill, read_whole, unread


async def post(server: AttackedServer, path: str, body: bytes) -> int:
    """Post as the attacker; the status."""
    async with server.http(ATTACKER) as http:
        return (await http.post(path, content=body, headers={"content-type": "application/json"})).status_code


async def import_entries(server: AttackedServer, key: str, entries: list[dict[str, object]]) -> int:
    """Import a history; the status."""
    export = {"format": 1, "key": "there", "agent": "echo", "entries": entries, "attachments": {}}
    return await post(server, f"/v1/sessions/{key}/import", json.dumps(export).encode())


def test_lists_of_large_runs_take_little_more_than_themselves(tmp_path):
    async def main() -> None:
        async with attacked_server(tmp_path) as server:
            await fill(server, messages=60, size=950_000)
            async with server.bystander():
                sizes = await asyncio.gather(*(read_whole(server, "/v1/sessions/s/runs") for _ in range(3)))
                assert max(sizes) > 60 * 950_000, "the list is whole"
                await asyncio.gather(*(read_whole(server, "/v1/sessions/s/runs") for _ in range(3)))
            await server.check()

    asyncio.run(main())


def test_forty_unread_answers_of_one_large_entry_are_in_memory_one_at_a_time(tmp_path):
    async def main() -> None:
        async with attacked_server(tmp_path) as server:
            entry = {"n": 1, "role": "user", "content": "x" * 16_000_000}
            assert await import_entries(server, "s", [entry]) == 201
            async with server.bystander():
                writers = await unread(server, "/v1/sessions/s/transcript?limit=1", 40)
            await server.check()
            for writer in writers:
                writer.transport.abort()

    asyncio.run(main())


def test_an_import_of_a_million_small_values_is_refused_before_they_are_made(tmp_path):
    async def main() -> None:
        async with attacked_server(tmp_path) as server:
            entries = ",".join(f'{{"n":{n + 1},"role":"user","content":"a"}}' for n in range(700_000))
            many = f'{{"format":1,"key":"k","agent":"echo","entries":[{entries}],"attachments":{{}}}}'.encode()
            call = '{"call_id":"c","name":"t","arguments":[' + ",".join(["0"] * 1_500_000) + "]}"
            entries = f'{{"n":1,"role":"assistant","content":"","tool_calls":[{call}]}}'
            numbers = f'{{"format":1,"key":"k","agent":"echo","entries":[{entries}],"attachments":{{}}}}'.encode()
            async with server.bystander():
                for body in (many, numbers):
                    assert await post(server, "/v1/sessions/i/import", body) == 413
            await server.check()

    asyncio.run(main())
