"""After a delete nothing of the session can be read, at once: 410 for its owner, 404 for anybody else."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from holdfast import Host, Run, Settings
from holdfast.errors import SessionDeleted, UnknownSession
from holdfast.host.session import Session

SECRET = "the secret word is xylophone"
SETTINGS = Settings(grace_s=5.0, abandon_after_s=20.0, drain_timeout_s=0.2)


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Both stores."""
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/store.db"


async def echo(run: Run) -> str:
    """Says what it was told; waits where it is asked to."""
    await run.emit(run.text)
    if run.text.startswith("wait"):
        await asyncio.sleep(3600)
    return ""


def hosted(scenario: Callable[[Host], Coroutine[Any, Any, None]], store: str, settings: Settings = SETTINGS) -> None:
    """Run the scenario on a host."""

    async def main() -> None:
        async with asyncio.timeout(60):
            async with Host(echo, store=store, settings=settings) as host:
                await scenario(host)

    asyncio.run(main())


async def readings(session: Session, run_id: str, message_id: str) -> dict[str, Coroutine[Any, Any, Any]]:
    """Every way to look at a session."""

    async def events() -> list[Any]:
        return [event async for event in session.events()]

    return {
        "info": session.info(),
        "transcript": session.transcript(),
        "transcript_page": session.transcript_page(after=0, limit=10),
        "export": session.export(),
        "runs": session.runs(),
        "run": session.run(run_id),
        "events": events(),
        "mailbox": session.mailbox(),
        "tree": session.tree(),
        "questions": session.questions(),
        "message": session.message(message_id),
        "wait": session.wait(message_id),
        "branch": session.fork("copy"),
        "retry": session.retry(),
        "undo": session.undo(),
        "compact": session.compact(),
        "schedule": session.schedule("x", every_s=3600.0),
        "send": session.send("x"),
        "delete": session.delete(),
    }


async def filled(host: Host) -> tuple[Session, str, str]:
    """A session with a secret in it, the id of its run, and of its message."""
    session = host.session("s", principal="bob")
    receipt = await session.send(SECRET)
    settlement = await session.wait(receipt.message_id)
    assert settlement.run_id is not None
    return session, settlement.run_id, receipt.message_id


async def check_gone(session: Session, run_id: str, message_id: str) -> None:
    """Every reading is refused, as deleted for the owner and as unknown for others."""
    for name, reading in (await readings(session, run_id, message_id)).items():
        with pytest.raises(SessionDeleted):
            await reading
            raise AssertionError(f"{name} still answers")
    other = Session(session._parts, "mallory", "s", None)
    with pytest.raises(UnknownSession):
        await other.transcript()


def test_nothing_of_a_deleted_session_can_be_read(store: str) -> None:
    async def scenario(host: Host) -> None:
        session, run_id, message_id = await filled(host)
        await session.delete()
        await check_gone(session, run_id, message_id)

    hosted(scenario, store)


def test_a_session_that_is_deleted_while_it_has_a_run_can_be_read_no_more(store: str) -> None:
    async def scenario(host: Host) -> None:
        session, run_id, message_id = await filled(host)
        receipt = await session.send(f"wait, {SECRET}")
        reader = session.events(after=receipt.cursor)
        seen = []
        async for event in reader:
            seen.append(event.kind)
            if event.kind == "text.delta":
                break
        deleting = asyncio.create_task(session.delete())
        seen += [event.kind async for event in reader]
        assert seen[-1] == "session.deleted", "an open stream ends with it"
        await deleting
        await check_gone(session, run_id, message_id)
        while host.live:
            await asyncio.sleep(0.01)
        row = (await host.store.find_session("bob", "s") or (0,))[0]
        assert await host.store.transcript(row) == ()
        assert SECRET not in str([await host.store.runs(row), await host.store.read_events(row, after=0, limit=1000)])

    hosted(scenario, store)


def test_a_stream_that_is_behind_gets_no_contents_after_the_delete(store: str) -> None:
    async def scenario(host: Host) -> None:
        session, _, _ = await filled(host)
        reader = await session.open_log()
        await session.delete()
        frames = [frame async for frame in reader]
        await reader.aclose()
        assert SECRET not in str(frames)
        last = frames[-1]
        assert isinstance(last, list | tuple) and last[-1].kind == "session.deleted"

    hosted(scenario, store)


def test_after_a_restart_it_is_still_gone_and_after_the_purge_the_key_is_new(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/store.db"
    ids: list[str] = []

    async def delete(host: Host) -> None:
        session, *found = await filled(host)
        ids.extend(found)
        await session.delete()

    async def still_gone(host: Host) -> None:
        await check_gone(host.session("s", principal="bob"), *ids)

    async def new(host: Host) -> None:
        session = host.session("s", principal="bob")
        while True:
            try:
                assert await session.ask("hello") == "hello"
            except SessionDeleted:
                await asyncio.sleep(0.01)
            else:
                return

    hosted(delete, store)
    hosted(still_gone, store)
    hosted(new, store, Settings(grace_s=0.2, tombstone_s=0.0, prune_every_s=0.05))


def test_the_rows_are_gone_from_the_file(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        session, _, _ = await filled(host)
        await session.delete()

    hosted(scenario, f"sqlite:///{tmp_path}/store.db")
    with sqlite3.connect(tmp_path / "store.db") as connection:
        assert SECRET not in "\n".join(connection.iterdump())
        for table in ("message", "run", "edit", "kept", "attachment_use"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table
    connection.close()


def test_the_contents_leave_the_memory() -> None:
    async def scenario(host: Host) -> None:
        session, _, _ = await filled(host)
        (held,) = host.store.backend.tables.sessions.values()  # type: ignore[attr-defined]

        def contents() -> str:
            return str([getattr(held, name) for name in held.__slots__ if name != "row"])

        assert "xylophone" in contents()
        await session.delete()
        assert "xylophone" not in contents()

    hosted(scenario, "memory://")


def test_an_export_that_is_on_while_the_session_is_deleted_is_whole_or_refused(store: str) -> None:
    async def scenario(host: Host) -> None:
        session, _, _ = await filled(host)
        exporting = [asyncio.create_task(session.export()) for _ in range(5)]
        await session.delete()
        for done in await asyncio.gather(*exporting, return_exceptions=True):
            assert isinstance(done, SessionDeleted) or SECRET in str(done), done

    hosted(scenario, store)
