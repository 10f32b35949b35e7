"""The archive of events: what retention deletes is on disk before, and what cannot be written is kept."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast import Agent, Host, Run, Settings, agent
from holdfast.agents.scripted import ScriptedModel
from holdfast.errors import ConfigurationError, StorageError
from holdfast.host.event_archive import EventArchive
from holdfast.protocol.events import Stored, TextDelta, encode_event
from holdfast.storage import MemoryStore, SqliteStore
from holdfast.storage.port import OldEvents, Store
from holdfast.testing import VirtualClock, run_virtual
from holdfast.tools import Files, Workspace

KEPT_FOR_S = 60
PRUNED_AFTER_S = 3700
"""Time until the next hourly pruning has taken place."""


@agent
async def talker(run: Run) -> None:
    await run.emit(f"{run.text}\n")


def virtual(scenario: Any, folder: Path, store: Store, **more: Any) -> None:
    """Run the scenario on a host in virtual time that archives its events in `folder`."""

    async def main() -> None:
        settings = Settings(
            **{"event_retention_s": KEPT_FOR_S, "event_archive": str(folder), "drain_timeout_s": 1, **more}
        )
        async with Host(talker, store=store, settings=settings, clock=VirtualClock()) as host:
            await scenario(host)

    run_virtual(main())


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(folder.iterdir()) for line in file.read_bytes().splitlines()]


def old(*texts: str, principal: str = "ann", key: str = "k") -> OldEvents:
    events = [Stored(seq, *encode_event(TextDelta(run_id="r", text=text))) for seq, text in enumerate(texts, 1)]
    return OldEvents(session=7, principal=principal, key=key, events=tuple(events))


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_events_are_in_the_archive_before_they_are_deleted(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "a" / "b"
    store: Store = MemoryStore() if kind == "memory" else SqliteStore(str(tmp_path / "s.db"))

    async def scenario(host: Host) -> None:
        last: dict[tuple[str, str], int] = {}
        for principal, key in (("ann", "k"), ("bob", "k"), ("ann", "l")):
            session = host.session(key, principal=principal)
            for text in ("one", "two"):
                sent = await session.send(text)
                await session.wait(sent.message_id)
            last[principal, key] = (await session.info()).seq
        await host.session("gone", principal="ann").ask("secret")
        await host.session("gone", principal="ann").delete()
        while host.incidents.counts["events_archived"] < sum(last.values()):
            await asyncio.sleep(PRUNED_AFTER_S)

        lines = lines_of(folder)
        for (principal, key), seq in last.items():
            found = [line for line in lines if (line["principal"], line["session"]) == (principal, key)]
            assert [line["seq"] for line in found] == list(range(1, seq + 1))
            assert [line["text"] for line in found if line["kind"] == "text.delta"] == ["one\n", "two\n"]
            assert await host.store.oldest_seq(found[0]["number"]) == seq + 1
            assert {line["number"] for line in found} == {(await host.session(key, principal=principal).info()).number}
        assert "secret" not in json.dumps(lines), "a deleted session is not archived"
        assert host.incidents.counts["events_archived"] == len(lines)
        for file in folder.iterdir():
            assert file.stat().st_mode & 0o077 == 0, "other users must not read it"
        assert folder.stat().st_mode & 0o077 == 0

    virtual(scenario, folder, store)


def test_what_cannot_be_written_is_kept_and_written_later(tmp_path: Path) -> None:
    folder = tmp_path / "archive"

    async def scenario(host: Host) -> None:
        session = host.session("k")
        await session.ask("one")
        number = (await session.info()).number
        folder.rename(tmp_path / "unmounted")
        await asyncio.sleep(PRUNED_AFTER_S)
        assert await host.store.oldest_seq(number) == 1, "nothing is lost"
        assert any(incident.kind == "event_archive" for incident in host.incidents.newest)
        (tmp_path / "unmounted").rename(folder)
        await asyncio.sleep(PRUNED_AFTER_S)
        assert [line["seq"] for line in lines_of(folder)] == list(range(1, len(lines_of(folder)) + 1))
        assert await host.store.oldest_seq(number) > 1

    virtual(scenario, folder, MemoryStore())


def test_events_that_were_written_but_not_deleted_are_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "archive"

    class Interrupted(MemoryStore):
        failures = 1

        async def drop_old_events(self, read: Any, *, before: float) -> int:
            if self.failures:
                self.failures -= 1
                raise StorageError("the host ends here")
            return await super().drop_old_events(read, before=before)

    async def scenario(host: Host) -> None:
        await host.session("k").ask("one")
        await asyncio.sleep(PRUNED_AFTER_S)
        once = lines_of(folder)
        await asyncio.sleep(PRUNED_AFTER_S)
        assert once
        assert lines_of(folder) == once * 2

    virtual(scenario, folder, Interrupted())


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size` bytes, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_no_torn_line(tmp_path: Path) -> None:
    archive = EventArchive(str(tmp_path / "archive"), "n_1")
    archive.open()
    assert archive.add([old("one", "two")], at=0.0) == 2
    (file,) = (tmp_path / "archive").iterdir()
    assert file.name == "events-1970-01-01-n_1.jsonl"
    before = file.read_bytes()
    with files_of_at_most(len(before) + 100), pytest.raises(OSError, match="File too large"):
        archive.add([old("x" * 1000)], at=0.0)
    assert file.read_bytes() == before
    archive.add([old("three")], at=0.0)
    assert [line["text"] for line in lines_of(tmp_path / "archive")] == ["one", "two", "three"]


def test_lines_hold_any_text_and_any_name(tmp_path: Path) -> None:
    archive = EventArchive(str(tmp_path), "n_1")
    odd = '"},{\n\u2028\ud800'
    archive.add([old(odd, principal=odd, key=odd)], at=0.0)
    (line,) = lines_of(tmp_path)
    assert line["principal"] == line["session"] == line["text"] == '"},{\n\u2028\\ud800'


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    archive = EventArchive(str(tmp_path), "n_1")
    (tmp_path / "events-1970-01-01-n_1.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        archive.add([old("one")], at=0.0)
    assert not (tmp_path / "elsewhere").exists()


def test_a_host_whose_archive_cannot_be_a_folder_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def never(host: Host) -> None:
        raise AssertionError("it started")

    with pytest.raises(ConfigurationError, match="file cannot be used: it is not a folder"):
        virtual(never, tmp_path / "file", MemoryStore())


def test_no_workspace_may_contain_the_archive(tmp_path: Path) -> None:
    tools = Files(Workspace(tmp_path / "work"))

    worker = Agent(name="worker", model=ScriptedModel(["done"]), tools=[tools])

    async def main() -> None:
        settings = Settings(event_archive=str(tmp_path / "work" / "archive"))
        async with Host(worker, store=MemoryStore(), settings=settings):
            raise AssertionError("it started")

    with pytest.raises(ConfigurationError, match="contains the archive of events"):
        asyncio.run(main())
