"""A storm tells a session that stands still from one that has much to do: only the first broke a promise."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.clock import SystemClock
from holdfast.errors import ServerUnreachable
from holdfast.proof.storm import quiescence
from holdfast.proof.storm.human_in_the_loop import People
from holdfast.proof.storm.quiescence import STANDSTILL_S, quiescent
from holdfast.protocol.messages import Question, SessionView

LOOK_S = 0.4


class Hands:
    """A clock that each look at a session moves on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    hands = Hands()
    monkeypatch.setattr(SystemClock, "monotonic", staticmethod(hands.monotonic))
    monkeypatch.setattr(quiescence, "_POLL_S", 0.0)
    return hands


class Asking:
    """A session with messages of which each asks once; a run is over two looks after its question was answered."""

    def __init__(self, key: str, hands: Hands, messages: int, *, stuck: bool = False) -> None:
        self.key = key
        self._hands = hands
        self._left = messages
        self._stuck = stuck
        self._steps = 0

    async def questions(self) -> list[Question]:
        open_ = self._left and self._steps % 3 == 0
        return [Question(question_id=f"{self.key} {self._left}", kind="question", text="how?")] if open_ else []

    async def answer(self, question_id: str, text: str) -> None:
        self._steps += 1

    async def info(self) -> SessionView:
        self._hands.now += LOOK_S
        if not self._stuck and self._steps % 3:
            self._steps += 1
            self._left -= self._steps % 3 == 0
        return SessionView(
            key=self.key,
            principal="admin",
            number=1,
            agent="storm",
            state="running" if self._left else "idle",
            seq=self._steps,
            waiting=max(0, self._left - 1),
            run_id=f"r_{self._left}" if self._left else None,
        )


def settled(sessions: Callable[[str], Any]) -> list[str]:
    async def settle() -> list[str]:
        async with asyncio.timeout(10):
            known: dict[str, Any] = {}
            client = SimpleNamespace(session=lambda key: known.setdefault(key, sessions(key)))
            return await People(client, random.Random(1)).settle()  # type: ignore[arg-type]

    return asyncio.run(settle())


def test_sessions_that_have_much_to_answer_and_get_on_come_to_rest(hands: Hands) -> None:
    began = hands.now
    assert settled(lambda key: Asking(key, hands, messages=12)) == []
    assert hands.now - began > 2 * STANDSTILL_S


def test_a_session_that_stands_still_is_told_and_no_other(hands: Hands) -> None:
    began = hands.now
    wrong = settled(lambda key: Asking(key, hands, messages=3, stuck=key.startswith("person-2")))
    assert len(wrong) == 1
    assert "session person-2" in wrong[0]
    assert "does not come to rest" in wrong[0]
    assert hands.now - began < 2 * STANDSTILL_S


class Parked(Asking):
    """A session whose run waits for an answer; what is done to it is noted."""

    def __init__(self, hands: Hands) -> None:
        super().__init__("person", hands, 1)
        self.done: list[str] = []

    async def answer(self, question_id: str, text: str) -> None:
        self.done.append("answer")
        await super().answer(question_id, text)

    async def send(self, content: str, **_: object) -> SimpleNamespace:
        self.done.append("send")
        return SimpleNamespace(message_id=f"m_{len(self.done)}")


def test_who_steers_a_session_that_asks_answers_first(hands: Hands) -> None:
    session = Parked(hands)

    async def steer() -> None:
        async with asyncio.timeout(10):
            await People(SimpleNamespace(session=lambda key: session), random.Random(1)).steer()  # type: ignore[arg-type]

    asyncio.run(steer())
    assert session.done == ["answer", "send", "send", "send"]


def looked(answers: Iterator[SessionView | Exception], hands: Hands) -> str | None:
    async def look() -> SessionView:
        hands.now += LOOK_S
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def bounded() -> str | None:
        async with asyncio.timeout(10):
            return await quiescent("s", look)

    return asyncio.run(bounded())


IDLE = SessionView(key="s", principal="ann", number=1, agent="storm", state="idle", seq=1, waiting=0)


def test_a_server_that_cannot_be_asked_for_a_while_is_no_answer(hands: Hands) -> None:
    refusals = [ServerUnreachable("nobody there")] * int(0.5 * STANDSTILL_S / LOOK_S)
    assert looked(iter((*refusals, IDLE)), hands) is None


def test_a_session_of_a_server_that_never_answers_is_told(hands: Hands) -> None:
    refusals = [ServerUnreachable("nobody there")] * int(2 * STANDSTILL_S / LOOK_S)
    assert "does not come to rest" in (looked(iter(refusals), hands) or "")
