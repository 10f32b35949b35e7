"""What was interrupted before its first word is marked as such, though its host is killed before it wrote the mark."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast import Agent, Host, Settings
from holdfast.agents.scripted import ScriptedModel
from holdfast.failpoints import VARIABLE
from holdfast.protocol.events import Event, StepStarted, TextDelta, encode_event
from holdfast.protocol.model import AssistantMessage, ModelRequest, UserMessage
from holdfast.protocol.stopping import Cause
from holdfast.storage import MemoryStore, SqliteStore
from holdfast.storage.port import InterruptRequest, Send, Store
from tests.host.interrupted_host import DELETE
from tests.protocol.rules import check_request

ROOT = Path(__file__).parents[2]
SETTINGS = Settings(grace_s=0.2, drain_timeout_s=0.2)
RUN = "r_1"


async def greeted(store: str | Store) -> tuple[str, list[str | None]]:
    """What the model reads between the request and a greeting after a start, and the marks of the transcript.

    The model refuses to be asked for what was interrupted.
    """
    requests: list[ModelRequest] = []

    def answer(request: ModelRequest) -> str:
        check_request(request.messages)
        requests.append(request)
        return "Hello."

    agent = Agent(name="agent", model=ScriptedModel(answer))
    async with asyncio.timeout(30), Host(agent, store=store, settings=SETTINGS) as host:
        session = host.session("s")
        assert await session.ask("hello") == "Hello."
        marks: list[str | None] = [entry.ended_by for entry in await session.transcript()]
    (request,) = requests
    first, note, last = request.messages
    assert isinstance(first, UserMessage) and first.content == DELETE
    assert isinstance(last, UserMessage) and last.content == "hello", "the two are not joined"
    assert isinstance(note, AssistantMessage)
    return note.text, marks


async def left_behind(store: Store, events: Sequence[Event]) -> None:
    """Leave the store as a host does that is killed between an interrupt and the end of its run."""
    await store.open(node_id="n_gone", at=1.0)
    sent = await store.send(
        Send(
            principal="local",
            key="s",
            agent="agent",
            default_agent="agent",
            message_id="m_1",
            content=DELETE,
            policy="queue",
            at=1.0,
            run_id=RUN,
        )
    )
    assert sent.claim is not None
    if events:
        await store.append(sent.claim.lease, [encode_event(event) for event in events])
    await store.interrupt(
        InterruptRequest(principal="local", key="s", cause=Cause(kind="user", reason="enough"), at=3.0)
    )
    await store.close()


SILENT: tuple[Event, ...] = (StepStarted(run_id=RUN, step=1),)
PARTLY: tuple[Event, ...] = (*SILENT, TextDelta(run_id=RUN, text="I will"))


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize(
    ("events", "word"),
    [((), "answered"), (SILENT, "answered"), (PARTLY, "finished")],
    ids=["first", "silent", "partly"],
)
def test_an_interrupt_that_was_recorded_before_a_crash_is_marked_after_it(
    kind: str, events: Sequence[Event], word: str, tmp_path: Path
) -> None:
    async def main() -> None:
        store: Store = MemoryStore() if kind == "memory" else SqliteStore(str(tmp_path / "store.db"))
        await left_behind(store, events)
        note, marks = await greeted(store)
        assert f"interrupted by the user before this was {word}" in note
        assert "not to be carried out unless it is asked for again" in note
        assert [mark for mark in marks if mark is not None] == ["user"]

    asyncio.run(main())


KILLS = (
    ("interrupt.after_commit",),
    ("commit_run.before_write",),
    ("commit_run.between_writes",),
    ("commit_run.before_commit",),
    ("commit_run.after_commit",),
    ("interrupt.after_commit", "commit_run.before_commit", "commit_run.after_commit"),
)
"""Where the host is killed; the further ones are those of the starts after it, which end its run."""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL here")
@pytest.mark.parametrize("points", KILLS, ids="+".join)
def test_an_interrupt_is_marked_though_the_host_is_killed_at_any_write_of_it(
    points: Sequence[str], tmp_path: Path
) -> None:
    database = tmp_path / "store.db"
    for point in points:
        killed = subprocess.run(
            [sys.executable, "-m", "tests.host.interrupted_host", str(database)],
            env={**os.environ, VARIABLE: f"sqlite.{point}"},
            cwd=ROOT,
            timeout=60,
            check=False,
        )
        assert killed.returncode == -signal.SIGKILL, point
    note, marks = asyncio.run(greeted(f"sqlite:///{database}"))
    assert "interrupted by the user before this was answered" in note
    assert [mark for mark in marks if mark is not None] == ["user"]
