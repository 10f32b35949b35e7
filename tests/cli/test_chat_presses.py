"""In a chat, a second Ctrl-C at once stops the session, also when the interrupt of the first has its receipt."""

from __future__ import annotations

import asyncio
from typing import Any

from holdfast.cli.chat import TWICE_S, _Conversation
from holdfast.cli.chat_lines import PlainLines
from holdfast.cli.chat_place import ChatPlace
from holdfast.cli.chat_view import JsonChatView
from holdfast.protocol.events import RunStarted
from holdfast.protocol.messages import SessionStop
from holdfast.protocol.stopping import Cause, StopReceipt
from holdfast.testing import run_virtual


class Stops:
    """A session that records what ends it, and is quick about it."""

    key = "s"

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def interrupt(self, reason: str, *, run_id: str | None = None) -> StopReceipt:
        self.asked.append(f"interrupt {run_id}")
        return StopReceipt(scope="r", cause=Cause(kind="user", reason=reason, at=1.0))

    async def stop(self, reason: str) -> SessionStop:
        self.asked.append("stop")
        return SessionStop(session="s", receipt=StopReceipt(scope="s", cause=Cause(kind="stop", at=1.0)))


def pressed_twice(pause_s: float) -> list[str]:
    """Interrupt a run that ends at once, while the next one starts, and press Ctrl-C again after a pause."""
    session: Any = Stops()
    client: Any = None

    async def main() -> None:
        conversation = _Conversation(client, session, None, ChatPlace(JsonChatView(), PlainLines()))
        await asyncio.sleep(1)
        async with asyncio.TaskGroup() as conversation._group:
            conversation._note(RunStarted(run_id="r1", agent="a", at=1.0, messages=()))
            conversation._on_ctrl_c()
            await asyncio.sleep(0.05)
            conversation._note(RunStarted(run_id="r2", agent="a", at=1.0, messages=()))
            await asyncio.sleep(pause_s - 0.05)
            conversation._on_ctrl_c()

    run_virtual(main())
    asked: list[str] = session.asked
    return asked


def test_a_second_press_at_once_stops_the_session_and_a_later_one_interrupts_the_next_run() -> None:
    assert pressed_twice(TWICE_S * 0.9) == ["interrupt r1", "stop"]
    assert pressed_twice(TWICE_S * 1.1) == ["interrupt r1", "interrupt r2"]
