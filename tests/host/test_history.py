"""Transcripts that are changed by hand: retried, undone, summed up, branched, exported and imported; attachments."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import Host, Run, agent
from holdfast.agents.agent import Agent
from holdfast.agents.scripted import ScriptedModel
from holdfast.errors import (
    Draining,
    HistoryChanged,
    InvalidKey,
    InvalidRequest,
    LimitExceeded,
    ModelFailed,
    NothingToUndo,
    NotSupported,
    SessionBusy,
    UnknownAttachment,
)
from holdfast.host.session import Session
from holdfast.protocol.events import HistoryEdited, decode_event
from holdfast.protocol.messages import Attachment, Entry, SessionExport
from holdfast.settings import Settings
from holdfast.storage import MemoryStore
from holdfast.testing import VirtualClock, explore, run_virtual

TRIES: list[str] = []


async def double(n: int) -> int:
    """A tool."""
    return 2 * n


@agent
async def talker(run: Run) -> str:
    """Says how often it was asked, with a call before."""
    TRIES.append(run.text)
    await run.call(double, len(TRIES))
    return f"{run.text} {len(TRIES)}"


@agent
async def sleeper(run: Run) -> None:
    """Never ends by itself."""
    await run.emit("half")
    await asyncio.sleep(1e9)


@agent
async def reader(run: Run) -> str:
    """Says what is attached."""
    return ", ".join([(await run.attachment(a.digest)).decode() for m in run.messages for a in m.attachments])


def modelled(script: Any = "a summary") -> Agent:
    """An agent with a model."""
    return Agent(name="modelled", model=ScriptedModel(script))


def virtual(
    scenario: Callable[[Host], Awaitable[None]], *, model: Agent | None = None, store: Any = None, **settings: Any
) -> None:
    """Run it on a host in memory."""

    async def main() -> None:
        TRIES.clear()
        agents = [talker, sleeper, reader, model or modelled()]
        chosen = Settings(grace_s=1.0, **settings)
        async with Host(agents=agents, store=store or MemoryStore(), settings=chosen, clock=VirtualClock()) as host:
            await scenario(host)

    run_virtual(main())


def lines(entries: list[Entry]) -> list[str]:
    """The texts of a transcript, calls left out."""
    return [f"{entry.role}: {entry.content}" for entry in entries if not entry.role.startswith("tool")]


async def ends(session: Session) -> list[Entry]:
    """The transcript, checked."""
    entries = await session.transcript()
    calls = [entry.call_id for entry in entries if entry.role == "tool_call"]
    assert calls == [entry.call_id for entry in entries if entry.role == "tool_result"]
    assert [entry.n for entry in entries] == sorted({entry.n for entry in entries})
    return entries


def test_retry_asks_again_in_the_place_of_the_last_run() -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s")
        await session.ask("a")
        await session.ask("b")
        receipt = await session.retry()
        assert (await session.wait(receipt.message_id)).text == "b 3"
        assert lines(await ends(session)) == ["user: a", "assistant: a 1", "user: b", "assistant: b 3"]
        assert (await session.message(receipt.message_id)).state == "completed"
        await session.send("x", agent="sleeper")
        with pytest.raises(SessionBusy):
            await session.retry()
        await session.stop()
        receipt = await session.retry()
        await asyncio.sleep(0.1)
        await session.stop()
        assert lines(await ends(session))[-2:] == ["user: x", "assistant: half"]

    virtual(scenario)


def test_retry_of_a_failed_run_takes_the_failure_away_and_of_nothing_is_refused() -> None:
    @agent
    async def moody(run: Run) -> str:
        TRIES.append("")
        if len(TRIES) == 1:
            raise ValueError("no")
        return "yes"

    async def main() -> None:
        TRIES.clear()
        async with Host(moody, store=MemoryStore(), clock=VirtualClock()) as host:
            session = host.session("s")
            receipt = await session.send("x")
            assert (await session.wait(receipt.message_id)).state == "failed"
            again = await session.retry()
            assert (await session.wait(again.message_id)).text == "yes"
            assert lines(await ends(session)) == ["user: x", "assistant: yes"]
            await session.undo()
            with pytest.raises((NothingToUndo, HistoryChanged)):
                await session.retry()
            with pytest.raises(NothingToUndo):
                await session.undo()

    run_virtual(main())


def test_undo_takes_the_last_run_away_and_tells_readers() -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s")
        await session.ask("a")
        await session.ask("b")
        seen: list[HistoryEdited] = []

        async def watch() -> None:
            async for event in session.events():
                if isinstance(event, HistoryEdited):
                    seen.append(event)
                    return

        watching = asyncio.ensure_future(watch())
        await asyncio.sleep(0.1)
        removed = await session.undo()
        assert lines(removed) == ["user: b", "assistant: b 2"]
        assert lines(await ends(session)) == ["user: a", "assistant: a 1"]
        await watching
        assert (seen[0].edit, seen[0].from_n, seen[0].added) == ("undo", removed[0].n, 0)
        assert await session.ask("c") == "c 3"
        assert lines(await ends(session)) == ["user: a", "assistant: a 1", "user: c", "assistant: c 3"]

    virtual(scenario)


def test_compact_sums_up_all_but_the_last_messages_and_undo_brings_them_back() -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s")
        for text in "abcd":
            await session.ask(text, agent="talker")
        before = await ends(session)
        await session.send("e", agent="modelled")  # from now on this agent's session
        await asyncio.sleep(1)
        entries = await session.compact(keep=2)
        assert lines(entries) == [
            "summary: a summary",
            "user: d",
            "assistant: d 4",
            "user: e",
            "assistant: a summary",
        ]
        assert entries == await ends(session)
        assert await session.compact(keep=2) == entries, "there is nothing more to sum up"
        await session.undo()
        assert (await ends(session))[: len(before)] == before
        assert lines(await session.compact(keep=0)) == ["summary: a summary"]
        for wrong in (-1,):
            with pytest.raises(InvalidRequest):
                await session.compact(keep=wrong)

    virtual(scenario)


def test_compact_refuses_a_session_that_changes_meanwhile_an_agent_without_a_model_and_a_model_that_fails() -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s")
        for text in "ab":
            await session.ask(text, agent="talker")
        with pytest.raises(NotSupported):
            await session.compact(keep=1)
        await session.ask("c", agent="modelled")
        before = await ends(session)

        async def undo_meanwhile() -> None:
            await asyncio.sleep(0.5)
            await session.undo()

        undoing = asyncio.ensure_future(undo_meanwhile())
        with pytest.raises(HistoryChanged):
            await session.compact(keep=1)
        await undoing
        assert await ends(session) == before[:-2]
        sleeping = await session.send("x", agent="sleeper")
        with pytest.raises(SessionBusy):
            await session.compact(keep=1)
        await session.interrupt()
        await session.wait(sleeping.message_id)

    slow = ScriptedModel("a summary", delay_s=1.0)
    virtual(scenario, model=Agent(name="modelled", model=slow))

    async def failing(host: Host) -> None:
        session = host.session("s", agent="modelled")
        for _ in range(2):
            receipt = await session.send("x")
            await session.wait(receipt.message_id)
        before = await ends(session)
        with pytest.raises(ModelFailed):
            await session.compact(keep=1)
        assert await ends(session) == before

    broken = ScriptedModel(lambda _: ModelFailed("out of order"))
    virtual(failing, model=Agent(name="modelled", model=broken))

    async def too_slow(host: Host) -> None:
        session = host.session("s", agent="talker")
        for _ in range(2):
            await session.ask("x")
        await session.ask("now", agent="talker")
        host.agents["talker"] = host.agents["modelled"]
        with pytest.raises(ModelFailed, match=r"within 5 s"):
            await session.compact(keep=1)
        compacting = asyncio.ensure_future(session.compact(keep=1))
        await asyncio.sleep(1)
        await host.close()
        with pytest.raises((Draining, ModelFailed)):
            await compacting

    virtual(too_slow, model=Agent(name="modelled", model=ScriptedModel("x", delay_s=100.0)), step_timeout_s=5.0)


def test_compact_never_parts_a_call_from_its_result() -> None:
    def user(text: str) -> Entry:
        return Entry(role="user", content=text)

    call = Entry(role="tool_call", content="{}", call_id="c", name="t")
    result = Entry(role="tool_result", content="1", call_id="c", name="t")
    said = Entry(role="assistant", content="so")
    entries = (user("a"), said, user("b"), call, user("steered"), result, said, user("c"), said)

    async def scenario(host: Host) -> None:
        session = host.session("s")
        await session.import_history(SessionExport(key="x", agent="modelled", entries=entries))
        kept = await session.compact(keep=2)
        assert [entry.content for entry in kept] == ["a summary", "b", "{}", "steered", "1", "so", "c", "so"]

    virtual(scenario)


def test_a_branch_has_a_copy_of_its_own() -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s")
        await session.ask("a")
        await session.ask("b")
        entries = await ends(session)
        view = await session.fork("whole")
        assert (view.key, view.agent, view.state) == ("whole", "talker", "idle")
        call = next(entry for entry in entries if entry.role == "tool_call" and entry.n > 4)
        await session.fork("part", through_n=call.n)
        assert lines(await ends(host.session("part"))) == ["user: a", "assistant: a 1", "user: b"]
        assert [entry.role for entry in await ends(host.session("part"))][-2:] == ["tool_call", "tool_result"]
        await host.session("whole").ask("c")
        assert await ends(session) == entries
        with pytest.raises(SessionBusy):
            await session.fork("whole")
        with pytest.raises(InvalidKey):
            await session.fork("a/b")
        with pytest.raises(InvalidRequest, match="through_n"):
            await session.fork("less than nothing", through_n=-1)
        on = await session.send("x", agent="sleeper")
        assert (await session.fork("during")).state == "idle"
        assert len(await ends(host.session("during"))) == len(entries)
        await session.interrupt()
        await session.wait(on.message_id)

    virtual(scenario)


def test_an_export_goes_through_json_and_begins_a_session_elsewhere() -> None:
    exported: list[bytes] = []

    async def there(host: Host) -> None:
        session = host.session("s", principal="alice")
        attachment = await session.attach(b"\x00hello", media_type="text/plain", name="a.txt")
        await session.ask("a")
        await session.ask("see", agent="reader", attachments=[attachment])
        exported.append(msgspec.json.encode(await session.export()))

    async def here(host: Host) -> None:
        export = msgspec.json.decode(exported[0], type=SessionExport)
        session = host.session("t", principal="bob")
        view = await session.import_history(export)
        assert (view.key, view.agent, view.principal) == ("t", "reader", "bob")
        assert lines(await ends(session)) == ["user: a", "assistant: a 1", "user: see", "assistant: \x00hello"]
        kept = [a for entry in await ends(session) for a in entry.attachments]
        assert (await session.attachment(kept[0].digest))[1] == b"\x00hello"
        again = await session.export()
        plain = [msgspec.structs.replace(entry, n=0) for entry in export.entries]
        assert [msgspec.structs.replace(entry, n=0) for entry in again.entries] == plain
        with pytest.raises(SessionBusy):
            await session.import_history(export)

    virtual(there)
    virtual(here)


def test_an_import_that_is_not_whole_is_refused_and_leaves_nothing() -> None:
    call = Entry(role="tool_call", content="{}", call_id="c", name="t")
    result = Entry(role="tool_result", content="1", call_id="c", name="t")
    named = Entry(role="user", content="x", attachments=(Attachment(digest="0" * 64, media_type="text/plain"),))
    bad: list[Any] = [(call,), (result,), (result, call), (call, call, result), (named,)]
    odd: list[dict[str, Any]] = [{"content": None}, {"content": 5}, {"status": "odd"}, {"role": "god"}, {"call_id": 5}]
    bad += [(msgspec.structs.replace(named, attachments=(), **fields),) for fields in odd] + [None, ("x",)]

    async def scenario(host: Host) -> None:
        session = host.session("s")
        for entries in bad:
            with pytest.raises(InvalidRequest):
                await session.import_history(SessionExport(key="x", agent="talker", entries=entries))
        forged = SessionExport(key="x", agent="talker", entries=(named,), attachments={"0" * 64: b"something else"})
        with pytest.raises(InvalidRequest, match="digest"):
            await session.import_history(forged)
        assert not await host.sessions()

    virtual(scenario)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_run_sees_the_whole_of_a_very_long_transcript_and_so_does_who_reads_it(kind: str, tmp_path: Path) -> None:
    said = 10_001

    @agent
    async def counting(run: Run) -> str:
        return str(len(await run.history()))

    async def scenario() -> None:
        store = MemoryStore() if kind == "memory" else f"sqlite:///{tmp_path / 'long.db'}"
        async with asyncio.timeout(20), Host(counting, store=store) as host:
            session = host.session("s")
            entries = tuple(Entry(role="user", content="x") for _ in range(said))
            await session.import_history(SessionExport(key="x", agent="counting", entries=entries))
            assert await session.ask("how many?") == str(said)
            assert len(await session.transcript()) == said + 2

    asyncio.run(scenario())


def test_a_transcript_that_is_replaced_while_it_is_read_is_read_as_before_or_as_after() -> None:
    class Slow(MemoryStore):
        """Lets something else happen after a read of the transcript."""

        between: Callable[[], Awaitable[Any]] | None = None

        async def transcript(self, *args: Any, **options: Any) -> Any:
            found = await super().transcript(*args, **options)
            if self.between is not None and len(found) > 4:
                between, self.between = self.between, None
                await between()
            return found

    store = Slow()

    async def scenario(host: Host) -> None:
        session = host.session("s")
        entries = tuple(Entry(role="user", content=str(number)) for number in range(2500))
        await session.import_history(SessionExport(key="x", agent="modelled", entries=entries))
        store.between = session.undo
        assert len(await session.transcript()) in (0, 2500)

    virtual(scenario, store=store)


def test_attachments_are_kept_once_bounded_and_private() -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s", principal="alice")
        first = await session.attach(b"12345", media_type="text/plain", name="a.txt")
        assert (first.size_bytes, len(first.digest)) == (5, 64)
        assert await session.attach(b"12345", media_type="text/plain") == first
        with pytest.raises(LimitExceeded, match="11 bytes"):
            await session.attach(b"12345678901", media_type="text/plain")
        await session.attach(b"1234567890", media_type="text/plain")
        with pytest.raises(LimitExceeded):
            await session.attach(b"123456", media_type="text/plain")
        await host.session("s", principal="bob").attach(b"123456", media_type="text/plain")
        with pytest.raises(UnknownAttachment):
            await host.session("s", principal="bob").attachment(first.digest)
        with pytest.raises(UnknownAttachment):
            await host.session("s", principal="bob").send("x", attachments=[first])
        assert (await session.attachment(first.digest)) == (first, b"12345")
        assert await session.ask("x", agent="reader", attachments=[first]) == "12345"
        assert (await ends(session))[0].attachments == (first,)
        for media_type, name in (("text", ""), ("", ""), ("a/b\r\nx: y", ""), ("a/b", "../x"), ("a/b", "x\n")):
            with pytest.raises(InvalidRequest):
                await session.attach(b"", media_type=media_type, name=name)
        with pytest.raises(InvalidRequest):
            await session.attach("text", media_type="text/plain")  # type: ignore[arg-type]

    virtual(scenario, attachment_limit_bytes=10, principal_attachments_bytes=16)


def test_edits_and_runs_at_the_same_time_leave_one_of_them_refused_and_the_transcript_whole() -> None:
    async def scenario() -> None:
        TRIES.clear()
        agents = [talker, modelled()]
        async with Host(agents=agents, store=MemoryStore(yielding=True), clock=VirtualClock()) as host:
            session = host.session("s")
            for text in "ab":
                await session.ask(text, agent="modelled")

            async def edit(work: Awaitable[object]) -> None:
                try:
                    await work
                except (SessionBusy, HistoryChanged, NothingToUndo):
                    pass

            sent = asyncio.ensure_future(session.send("c", agent="modelled"))
            await asyncio.gather(
                edit(session.undo()), edit(session.retry()), edit(session.compact(keep=1)), edit(session.fork("t"))
            )
            await session.wait((await sent).message_id)
            while (await session.info()).state != "idle" or (await session.info()).waiting:
                await asyncio.sleep(0.05)
            entries = await ends(session)
            stored = await host.store.read_events((await session.info()).number, after=0, limit=1000)
            assert [e.seq for e in map(decode_event, stored)] == list(range(1, len(stored) + 1))
            runs = [entry.run_id for entry in entries if entry.role == "user"]
            assert len(runs) == len(set(runs))

    explore(scenario, schedules=60, seed=1)
