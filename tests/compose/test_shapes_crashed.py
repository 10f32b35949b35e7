"""Each shape after a crash behind each entry of its log: what was finished is not done again, and the run completes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast.agents.journal import stands
from holdfast.protocol.events import (
    ChildFinished,
    ChildStarted,
    Event,
    RunRestarted,
    TextDelta,
    ToolFinished,
    ToolStarted,
    encode_event,
)
from holdfast.storage import MemoryStore
from holdfast.storage.port import Send
from holdfast.testing import run_virtual
from tests.compose.kit import SHAPES, Ledger, check, echo, host, log_of, settled

OF_THE_AGENT = (ChildStarted, ChildFinished, TextDelta, ToolStarted, ToolFinished)


async def crashed(events: Sequence[Event]) -> MemoryStore:
    """A store whose holder ended when the run had written these events."""
    store = MemoryStore()
    await store.open(node_id="n_gone", at=1.0)
    sent = await store.send(
        Send(
            principal="local",
            key="s",
            agent="outer",
            default_agent="outer",
            message_id="m_1",
            content="go",
            policy="queue",
            at=1.0,
            run_id="r_1",
        )
    )
    assert sent.claim is not None
    if events:
        await store.append(sent.claim.lease, [encode_event(event) for event in events])
    await store.close()
    return store


async def life(name: str, ledger: Ledger, events: Sequence[Event]) -> tuple[str, list[Event]]:
    """The next host's: the answer, and what it wrote."""
    async with host([ledger.outer(SHAPES[name](ledger)), echo], await crashed(events)) as one:
        settlement = await settled(one, "m_1")
        assert settlement.state == "completed", settlement.error
        await check(one, ledger, "m_1", whole=False)
        log = await log_of(one)
        restarts = [event for event in log if isinstance(event, RunRestarted)]
        since = restarts[-1].seq
        written = [event for event in log if event.seq > since and isinstance(event, OF_THE_AGENT)]
        return settlement.text, [event for event in written if getattr(event, "run_id", "").startswith("r_1")]


RESTARTS = ("one for one", "rest for one", "one for all", "first", "some", "two of four")
CASES = [(name, None) for name in SHAPES] + [(name, ("a", 1)) for name in RESTARTS]


@pytest.mark.parametrize(("name", "fails"), CASES)
def test_after_a_crash_at_any_entry_of_the_log_nothing_finished_is_done_again(
    name: str, fails: tuple[str, int] | None
) -> None:
    async def play() -> None:
        text, written = await life(name, Ledger(fails, times=1), ())
        assert len(written) > 6
        for cut in range(len(written) + 1):
            before = written[:cut]
            failed = any(isinstance(event, ChildFinished) and event.status == "failed" for event in before)
            again, more = await life(name, Ledger(None if failed else fails, times=1), before)
            if name not in ("first", "two of four"):
                assert again == text
            children = {event.child_id for event in before if isinstance(event, ChildFinished) and stands(event)}
            assert not children & {event.child_id for event in more if isinstance(event, ChildStarted)}
            calls = {event.call_id for event in before if isinstance(event, ToolFinished)}
            assert not calls & {event.call_id for event in more if isinstance(event, ToolStarted)}

    run_virtual(play())
