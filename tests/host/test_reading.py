"""Reading logs: cursors, gaps, slow and vanished readers, deletion, eviction, caps and fairness. On virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from holdfast import Host, Run, Settings, agent
from holdfast.errors import (
    IdempotencyMismatch,
    InvalidCursor,
    InvalidRequest,
    LimitExceeded,
    MailboxFull,
    SessionDeleted,
    UnknownMessage,
    UnknownPolicy,
    UnknownSession,
    WaitExpired,
)
from holdfast.events import Gap
from holdfast.protocol.events import format_cursor
from holdfast.storage import MemoryStore
from holdfast.testing import VirtualClock, run_virtual


@agent
async def talker(run: Run) -> None:
    """Says as many words as the message asks for."""
    for number in range(int(run.text)):
        await run.emit(f"{number} ")


@agent
async def sleeper(run: Run) -> str:
    """Sleeps for an hour."""
    await asyncio.sleep(3600)
    return "rested"


def virtual(scenario: Any, **settings: Any) -> None:
    """Run the scenario on a host in virtual time."""

    async def main() -> None:
        given = Settings(**{"drain_timeout_s": 1, "grace_s": 1, **settings})
        async with Host(talker, agents=[sleeper], store=MemoryStore(), settings=given, clock=VirtualClock()) as host:
            await scenario(host)

    coroutine: Coroutine[Any, Any, None] = main()
    run_virtual(coroutine)


def test_a_cursor_resumes_at_any_event_without_loss_or_repeat() -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s")
        sent = await session.send("50")
        await session.wait(sent.message_id)
        whole = [event async for event in session.events(follow=sent.message_id)]
        assert [event.seq for event in whole if not isinstance(event, Gap)] == list(range(1, len(whole) + 1))
        for cut in range(len(whole)):
            rest = [e async for e in session.events(after=format_cursor(cut, 1), follow=sent.message_id)]
            assert rest == whole[cut:]
        after_all = format_cursor(len(whole), 1)
        assert [e async for e in session.events(after=after_all, follow=sent.message_id)] == []

    virtual(scenario)


def test_readers_that_come_and_go_while_a_run_talks_see_everything_once() -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s")
        sent = await session.send("3000")
        seen: list[int] = []
        cursor: str | None = None
        while len(seen) < 3000 + 4:
            async with aclosing(session.events(after=cursor, follow=sent.message_id)) as events:
                taken = 0
                async for event in events:
                    assert not isinstance(event, Gap)
                    seen.append(event.seq)
                    cursor = format_cursor(event.seq, 1)
                    taken += 1
                    if taken == 700:
                        break
            await asyncio.sleep(0.001)
        assert seen == list(range(1, 3005))
        assert host.readers == 0

    virtual(scenario)


@pytest.mark.parametrize(
    "cursor", ["", "x", "1", "-1-1", "1-", "1-2", "99-1", "1-1-1", "1\0-1", "¹-1", "9" * 30 + "-1"]
)
def test_a_cursor_that_is_not_the_sessions_is_refused(cursor: str) -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s")
        await session.ask("1")
        with pytest.raises(InvalidCursor):
            await anext(aiter(session.events(after=cursor)))

    virtual(scenario)


def test_pruned_events_are_an_explicit_gap_and_the_transcript_stays() -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s")
        await session.ask("5")
        before = len(await session.transcript())
        await asyncio.sleep(7300)  # the hourly prune finds the run's events old
        second = await session.send("1")
        events = [event async for event in session.events(follow=second.message_id)]
        assert isinstance(events[0], Gap)
        assert (events[0].after, events[0].reason) == (0, "pruned")
        rest = [event.seq for event in events[1:] if not isinstance(event, Gap)]
        assert rest == list(range(events[0].until + 1, events[0].until + 1 + len(rest)))
        assert len(await session.transcript()) == before + 2

    virtual(scenario, event_retention_s=60)


def test_unknown_sessions_messages_and_policies_are_named() -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s")
        for refused in (session.info(), session.transcript(), session.wait("m_x"), session.tree(), session.delete()):
            with pytest.raises(UnknownSession):
                await refused
        with pytest.raises(UnknownSession):
            await anext(aiter(session.events(follow="m_none")))
        await session.ask("1")
        with pytest.raises(UnknownMessage):
            await anext(aiter(session.events(follow="m_x")))
        with pytest.raises(UnknownPolicy):
            await session.send("1", policy="shout")  # type: ignore[arg-type]
        with pytest.raises(UnknownSession):  # another principal's
            await host.session("s", principal="mallory").info()

    virtual(scenario)


def test_an_idempotency_key_runs_once_and_refuses_another_body() -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s")
        first = await session.send("1", idempotency_key="k")
        again = await session.send("1", idempotency_key="k")
        assert (again.message_id, again.disposition) == (first.message_id, "duplicate")
        assert await session.ask("1", idempotency_key="k") == "0 "
        with pytest.raises(IdempotencyMismatch):
            await session.send("2", idempotency_key="k")
        assert await host.session("s", principal="other").ask("2", idempotency_key="k") == "0 1 "
        assert len(await session.runs()) == 1

    virtual(scenario)


def test_a_full_mailbox_refuses_and_stores_nothing() -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s", agent="sleeper")
        await session.send("x")
        for _ in range(3):
            await session.send("x")
        with pytest.raises(MailboxFull, match="its limit is 3"):
            await session.send("x")
        assert len(await session.mailbox()) == 3
        with pytest.raises(WaitExpired):
            await session.wait((await session.mailbox())[0].message.message_id, timeout_s=1)
        await session.stop()

    virtual(scenario, mailbox_limit=3)


def test_a_deleted_session_ends_its_readers_refuses_sends_and_its_key_becomes_free_again() -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s", agent="sleeper")
        await session.send("x")

        async def read() -> list[str]:
            return [event.kind async for event in session.events() if not isinstance(event, Gap)]

        reading = asyncio.ensure_future(read())
        await asyncio.sleep(0.1)
        assert (await session.delete()).receipt.outcome == "gone"
        assert (await reading)[-1] == "session.deleted"
        with pytest.raises(SessionDeleted):
            await session.send("1", agent="talker")
        await asyncio.sleep(7300)
        assert await session.ask("1", agent="talker") == "0 "
        assert (await session.info()).number == 2

    virtual(scenario, tombstone_s=60)


def test_an_idle_session_leaves_the_memory_and_comes_back_when_used() -> None:
    async def scenario(host: Host) -> None:
        for number in range(100):
            await host.session(f"s{number}").ask("1")
        assert len(host.actors) == 100
        reader = asyncio.ensure_future(anext(aiter(host.session("s0").events(after=format_cursor(5, 1)))))
        await asyncio.sleep(200)
        assert len(host.actors) == 1  # the one with a reader
        sent = await host.session("s0").send("2")
        event = await reader
        assert not isinstance(event, Gap)
        assert event.seq == 6
        await host.session("s0").wait(sent.message_id)
        assert len(await host.session("s7").transcript()) == 2

    virtual(scenario, evict_after_s=60)


def test_principals_take_turns_and_none_passes_its_cap() -> None:
    order: list[str] = []
    running: dict[str, int] = {}

    @agent
    async def turn(run: Run) -> None:
        running[run.principal] = running.get(run.principal, 0) + 1
        assert running[run.principal] <= 2
        assert sum(running.values()) <= 3
        await asyncio.sleep(1)
        running[run.principal] -= 1
        order.append(run.principal)

    async def main() -> None:
        settings = Settings(max_runs=3, principal_runs=2)
        async with Host(turn, store=MemoryStore(), settings=settings, clock=VirtualClock()) as host:
            waits = []
            for principal, count in (("greedy", 60), ("a", 6), ("b", 6)):
                for number in range(count):
                    session = host.session(f"s{number}", principal=principal)
                    waits.append((session, await session.send("x")))
            for session, sent in waits:
                await session.wait(sent.message_id)

    run_virtual(main())
    assert order.index("a") < 6
    last_polite = max(n for n, who in enumerate(order) if who in ("a", "b"))
    assert last_polite < 30, "the polite ones waited for the greedy one"


def test_one_session_with_a_long_mailbox_does_not_keep_its_place_while_others_wait() -> None:
    order: list[str] = []

    @agent
    async def note(run: Run) -> None:
        await asyncio.sleep(1)
        order.append(run.session_key)

    async def main() -> None:
        settings = Settings(max_runs=1, principal_runs=1)
        async with Host(note, store=MemoryStore(), settings=settings, clock=VirtualClock()) as host:
            long, short = host.session("long"), host.session("short", principal="other")
            waits = [(long, await long.send("x")) for _ in range(5)] + [(short, await short.send("x"))]
            for session, sent in waits:
                await session.wait(sent.message_id)

    run_virtual(main())
    assert order.index("short") <= 1


def test_collected_messages_make_one_run_after_the_quiet() -> None:
    @agent
    async def join(run: Run) -> str:
        return run.text.replace("\n", "+")

    async def main() -> None:
        async with Host(join, store=MemoryStore(), clock=VirtualClock()) as host:
            session = host.session("s")
            sent = []
            for number in range(4):
                sent.append(await session.send(str(number), policy="collect", quiet_s=2, max_wait_s=100))
                await asyncio.sleep(1)
            texts = {(await session.wait(receipt.message_id)).text for receipt in sent}
            assert texts == {"0+1+2+3"}
            pressed = [await session.send(str(n), policy="collect", quiet_s=1000, max_wait_s=3) for n in range(2)]
            assert (await session.wait(pressed[1].message_id, timeout_s=4)).text == "0+1"

    run_virtual(main())


def test_a_principal_has_a_limit_of_sessions() -> None:
    async def scenario(host: Host) -> None:
        for number in range(2):
            await host.session(f"s{number}").ask("1")
        with pytest.raises(LimitExceeded, match="2 sessions"):
            await host.session("s2").send("1")

    virtual(scenario, principal_sessions=2)


@pytest.mark.parametrize("text", ["\ud800", "a\0b", "x\udfffy"])
def test_text_that_cannot_be_stored_is_refused_with_a_hint(text: str) -> None:
    async def scenario(host: Host) -> None:
        with pytest.raises(InvalidRequest) as refusal:
            await host.session("s").send(text)
        assert refusal.value.hint
        assert await host.session("s").ask("1") == "0 "

    virtual(scenario)
