"""The host, as seen by one run: its history, its steering messages, and its questions to people.

Invariants
- A person's decision is delivered to the run once, or kept until the run asks; it is in the log before either.
- A run is at rest while every part of it waits for people, all its questions are durable, and every answer has been
  delivered. Only then is its deadline paused, and only then may it be unloaded.
- The result of a store call for the run is recorded when the store answers, even if the caller has ended: a steered
  message belongs to the run that took it, even if the run was interrupted in the meantime.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from holdfast.errors import IllegalTransition, Interrupted, StaleFence, StorageError, UnknownAgent, UnknownAttachment
from holdfast.host import history
from holdfast.host.budgets import PAGE_BYTES
from holdfast.host.patience import patiently, retry_after_s
from holdfast.protocol.events import MessageAccepted, MessageSteered, decode_event
from holdfast.protocol.messages import Answer, Entry, Message, Question
from holdfast.storage.port import Appended, Steered

if TYPE_CHECKING:
    from holdfast.agents.agent import Agent
    from holdfast.host.active import ActiveRun
    from holdfast.host.budgets import Charge
    from holdfast.host.host import Host

__all__ = ["RunSurroundings"]

Done = TypeVar("Done", Steered, Appended)

PAGE = 1024
_OF_STEERING = ("message.accepted", "message.steered")


class RunSurroundings:
    """`holdfast.agents.ports.RunHost` of one run. On the host's loop only.

    Parameters:
        steering: whether a ``steer`` message may wait for the run.
    """

    __slots__ = (
        "_answers",
        "_asked",
        "_charge",
        "_expected",
        "_history",
        "_host",
        "_on_the_way",
        "_reading",
        "_run",
        "_still",
        "_told",
        "clock",
        "resting",
        "steered",
        "steering",
        "unsure",
    )

    def __init__(self, host: Host, run: ActiveRun, *, steering: bool) -> None:
        self._host = host
        self._run = run
        self._answers: dict[str, Answer] | None = None
        self._asked: set[str] = set()  # by parts of the run that do not wait for the answer yet
        self._told = False
        self._expected: dict[str, list[asyncio.Future[Answer]]] | None = None
        self._on_the_way = 0
        self._still: AbstractContextManager[None] | None = None
        self._history: Sequence[Entry] | None = None
        self._reading: asyncio.Lock | None = None
        self._charge: Charge | None = None
        self.clock = host.clock
        self.resting = False
        self.steering = steering
        self.steered: tuple[str, ...] = ()
        """Ids of the messages that the active run took after its claim, in order."""
        self.unsure = False
        """Whether a store error left it unknown which messages the run took."""

    async def history(self) -> Sequence[Entry]:
        """Return the transcript before this run; a large one is read once, and charged until the run ends.

        Raises:
            BudgetExceeded: larger than the principal's share of memory.
        """
        if self._reading is None:
            self._reading = asyncio.Lock()
        async with self._reading:  # a second reader would wait for the first charge of the same run
            if self._history is not None:
                return self._history
            actor = self._run.actor
            entries, charge = await history.read(self._host, actor.principal, actor.session)
            if charge.amount:
                self._history, self._charge = entries, charge
                if self._run.ended:
                    self.release()
            return entries

    def release(self) -> None:
        """Release the charge for the history of the ended run."""
        if self._charge is not None:
            self._charge.release()
            self._charge = None

    async def kept(self, n: int) -> str:
        """Return the agent state kept with the transcript's entry `n`."""
        return await self._host.store.kept(self._run.actor.session, n)

    def find_agent(self, name: str) -> Agent:
        """Return the host's agent of that name. Raises `UnknownAgent`."""
        try:
            return self._host.find_agent(name)
        except UnknownAgent as error:
            there = ", ".join(sorted(self._host.agents))
            raise UnknownAgent(
                error.message,
                hint=f"available: {there}; add the agent to the host, or correct the name of the branch or child",
            ) from None

    def background(self, work: Callable[[], Awaitable[Any]], *, name: str) -> None:
        """Start background work of the session."""
        self._host.start_background(self._run.actor, work, name=name)

    async def attachment(self, digest: str) -> bytes:
        """Return the bytes of an attachment of the session's principal. Raises `UnknownAttachment`."""
        found = await self._host.store.attachment(self._run.actor.principal, digest)
        if found is None:
            raise UnknownAttachment(f"{self._run.actor.principal!r} has no attachment {digest[:80]!r}")
        return found[1]

    # ── steering ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def steer(self, step: int) -> Sequence[Message]:
        """Take the messages steered to this run. That it took them before this step is durable on return."""
        if not self.steering:
            return ()
        self.steering = False  # before the store looks: a later message sets it again
        await self._run.written()  # so that they follow the run's earlier output in the log
        host, run = self._host, self._run
        steered = await self._insist(
            "steer", lambda: host.store.steer(run.lease, step=step, at=host.now()), self._note_steered
        )
        return await self._steered_at(step) if self.unsure else steered.messages

    def _note_steered(self, done: Steered) -> None:
        self.steered += tuple(message.message_id for message in done.messages)
        self._run.run.transcript.know(done.messages)  # they are in the transcript even if the caller has ended
        self._host.incidents.counts["steered"] += len(done.messages)
        self._run.actor.publish(done.events)

    async def _steered_at(self, step: int) -> Sequence[Message]:
        """Return the messages that the run took before a step, from the log, as the store's reply was lost."""
        store, actor = self._host.store, self._run.actor
        accepted: dict[str, MessageAccepted] = {}
        taken: list[Message] = []
        after = self._run.started_seq
        while page := await patiently(
            self._host,
            "read",
            functools.partial(store.read_events, actor.session, after=after, limit=PAGE, limit_bytes=PAGE_BYTES),
        ):
            after = page[-1].seq
            for event in map(decode_event, (event for event in page if event.kind in _OF_STEERING)):
                if isinstance(event, MessageAccepted):
                    accepted[event.message_id] = event
                elif isinstance(event, MessageSteered) and (event.run_id, event.step) == (self._run.run_id, step):
                    message = accepted[event.message_id]
                    taken.append(
                        Message(
                            message_id=message.message_id,
                            seq=message.seq,
                            content=message.content,
                            policy=message.policy,
                            accepted_at=message.at,
                            attachments=message.attachments,
                        )
                    )
        return taken

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────

    async def suspend(self, question: Question) -> None:
        """Ask a person; the question is durable on return."""
        host, run = self._host, self._run
        run.scope.interrupt.check()
        now = host.now()
        question = msgspec.structs.replace(
            question, asked_at=question.asked_at or now, due_at=question.due_at or now + host.settings.suspend_s
        )
        self._asked.add(question.question_id)
        try:
            await run.written()
            await self._insist(
                "suspend",
                lambda: host.store.suspend(run.lease, question),
                functools.partial(self._note_asked, question),
            )
        except IllegalTransition:
            # An interrupt of the run is recorded, and about to arrive.
            self._asked.discard(question.question_id)
            raise Interrupted(await run.scope.interrupt.wait()) from None
        except BaseException:
            self._asked.discard(question.question_id)
            raise

    def _note_asked(self, question: Question, done: Appended) -> None:
        if done.events:  # else it was already asked
            self._host.incidents.counts["suspended"] += 1
        self._run.actor.publish(done.events)
        self._host.upkeep.question_due(question.due_at)

    async def answered(self, question_id: str) -> Answer:
        """Wait for a person's decision."""
        self._asked.discard(question_id)
        if self._answers is not None and question_id in self._answers:
            return self._answers[question_id]
        self._run.scope.interrupt.check()
        future: asyncio.Future[Answer] = self._host.loop.create_future()
        if self._expected is None:
            self._expected = {}
        self._expected.setdefault(question_id, []).append(future)
        self._look()
        try:
            return await future
        finally:
            if future.done() and not future.cancelled():
                self._on_the_way -= 1
            else:
                self._forget(question_id, future)

    def _forget(self, question_id: str, future: asyncio.Future[Answer]) -> None:
        expected = self._expected and self._expected.get(question_id)
        if expected and future in expected:
            expected.remove(future)
            if not expected and self._expected is not None:
                del self._expected[question_id]

    def take_answer(self, answer: Answer) -> None:
        """Deliver a person's decision. A run that is being unloaded gets it when it resumes."""
        if self._answers is None:
            self._answers = {}
        if self._answers.setdefault(answer.question_id, answer) is not answer or self._run.leaving:
            return
        for future in (self._expected or {}).pop(answer.question_id, ()):
            if not future.done():
                self._on_the_way += 1
                future.set_result(answer)

    def at_rest(self, resting: bool) -> None:
        """Note whether all parts of the run wait for people."""
        self._told = resting
        self._look()

    def _look(self) -> None:
        """Update `resting`: all questions are durable and awaited, and every answer has been delivered."""
        resting = self._told and bool(self._expected) and not self._asked and not self._on_the_way
        if resting == self.resting:
            return
        self.resting = resting
        if not resting:
            self.end_rest()
        elif not self._run.scope.closed:
            self._still = self._run.scope.hold_deadline()
            self._still.__enter__()
            self._host.run_rests(self._run)

    def end_rest(self) -> None:
        """Resume the run's deadline."""
        self.resting = False
        still, self._still = self._still, None
        if still is not None:
            still.__exit__(None, None, None)

    async def _insist(
        self, what: str, verb: Callable[[], asyncio.Future[Done]], note: Callable[[Done], object]
    ) -> Done:
        """Call the store until it answers. `note` gets the result in the order of the log."""

        def answered(done: asyncio.Future[Done]) -> None:
            error = done.exception()
            if self._run.ended:
                return
            if error is None:
                note(done.result())
            elif isinstance(error, StaleFence):
                self._run.lose(error)
            elif isinstance(error, StorageError):
                self.unsure = self.unsure or what == "steer"
                self._host.store_failed(self._run.actor.key, self._run.run_id, what, error)

        tries = 0
        while True:
            done = verb()
            done.add_done_callback(answered, context=self._host.context)
            try:
                result = await asyncio.shield(done)
            except StaleFence:
                raise
            except StorageError:
                await asyncio.sleep(retry_after_s(tries))
                tries += 1
            else:
                if tries:
                    await self._host.catch_up(self._run.actor)  # the lost reply had events
                return result
