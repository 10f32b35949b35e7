"""The host's services for one run: the session's history, steering messages, and questions to people.

Invariants
- A person's answer is in the log before it is used. The answer is then delivered to the run, or kept until the run
  waits for it.
- A run is quiescent while all its parts wait for people, all its questions are durable, and every answer has been
  delivered. Only a quiescent run's deadline is paused, and only a quiescent run may be unloaded to wait for people.
- The result of a store call for the run is recorded when the store replies, even if the caller has ended. A steered
  message therefore belongs to the run that took it, even if the run was interrupted in the meantime.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from holdfast.errors import IllegalTransition, Interrupted, StaleFence, StorageError, UnknownAgent, UnknownAttachment
from holdfast.host import transcript_edits
from holdfast.host.budgets import PAGE_BYTES
from holdfast.host.live_session import LiveRun
from holdfast.host.session_directory import PAGE
from holdfast.host.store_retry import retry, retry_delay_s
from holdfast.protocol.events import MessageAccepted, MessageSteered, decode_event
from holdfast.protocol.messages import Answer, Entry, Grant, Message, Question
from holdfast.storage.port import Appended, Steered

if TYPE_CHECKING:
    from holdfast.agents.agent import Agent
    from holdfast.agents.ports import WalledStart
    from holdfast.host.agent_registry import AgentRegistry
    from holdfast.host.budgets import Charge
    from holdfast.host.context import HostContext
    from holdfast.host.event_writer import EventWriter
    from holdfast.host.grants import Grants
    from holdfast.host.live_session import LiveSession
    from holdfast.host.program_quotas import ProgramQuotas
    from holdfast.host.run_observer import RunObserver
    from holdfast.host.session_directory import SessionDirectory
    from holdfast.protocol.transcript import RunTranscript
    from holdfast.runtime import Scope
    from holdfast.storage.port import Claim

__all__ = ["AdaptedRun", "RunHostAdapter"]

Done = TypeVar("Done", Steered, Appended)

_OF_STEERING = ("message.accepted", "message.steered")


class AdaptedRun(LiveRun, Protocol):
    """Interface of the run that a `RunHostAdapter` serves."""

    @property
    def ended(self) -> bool:
        """Whether the run has ended on this host."""

    @property
    def transcript(self) -> RunTranscript:
        """The transcript of the run so far."""

    def lose(self, error: StaleFence) -> None:
        """End the run here without further writes, because another holder has the session."""


class RunHostAdapter:
    """Implements `holdfast.agents.ports.RunHost` for one run. Use it on the host's loop only.

    Parameters:
        steering: whether a ``steer`` message may already be waiting for the run.
    """

    __slots__ = (
        "_actor",
        "_agents",
        "_answers",
        "_asked",
        "_charge",
        "_claim",
        "_context",
        "_directory",
        "_expected",
        "_grants",
        "_history",
        "_observer",
        "_on_the_way",
        "_quiet",
        "_reading",
        "_run",
        "_scope",
        "_still",
        "_uses_workspace",
        "_writer",
        "clock",
        "is_quiescent",
        "programs",
        "steered",
        "steering",
        "unsure",
    )

    def __init__(
        self,
        context: HostContext,
        run: AdaptedRun,
        writer: EventWriter,
        claim: Claim,
        *,
        agents: AgentRegistry,
        directory: SessionDirectory,
        grants: Grants,
        programs: ProgramQuotas,
        observer: RunObserver,
        steering: bool,
    ) -> None:
        self._context = context
        self._run = run
        self._actor: LiveSession = run.actor
        self._scope: Scope = run.scope
        self._writer = writer
        self._claim = claim
        self._agents = agents
        self._directory = directory
        self._grants = grants
        self._observer = observer
        self._answers: dict[str, Answer] | None = None
        self._asked: set[str] = set()  # questions of parts of the run that do not wait for the answer yet
        self._quiet = False
        self._expected: dict[str, list[asyncio.Future[Answer]]] | None = None
        self._on_the_way = 0
        self._still: AbstractContextManager[None] | None = None
        self._history: Sequence[Entry] | None = None
        self._reading: asyncio.Lock | None = None
        self._charge: Charge | None = None
        cluster = context.store.cluster
        has_pool = cluster is not None and cluster.workspace_pool is not None
        self._uses_workspace = claim.workspace_pool is not None or not has_pool
        """Whether the store knows that the session has files here, or need not know it."""
        self.clock = context.clock
        self.programs = programs
        self.is_quiescent = False
        self.steering = steering
        self.steered: tuple[str, ...] = ()
        """Ids of the messages that the active run took after its claim, in order."""
        self.unsure = False
        """Whether `steered` may be incomplete, because a store error hid which messages the run took."""

    async def history(self) -> Sequence[Entry]:
        """Return the session's transcript before this run. A large one is read once and charged until the run ends.

        Raises:
            BudgetExceeded: if the transcript is larger than the principal's share of memory.
        """
        if self._reading is None:
            self._reading = asyncio.Lock()
        async with self._reading:  # a second reader would wait for the first charge of the same run
            if self._history is not None:
                return self._history
            actor = self._actor
            entries, charge = await transcript_edits.read(self._context, actor.principal, actor.session)
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

    async def agent_state(self, n: int) -> str:
        """Return the agent state that is stored with entry `n` of the transcript."""
        return await self._context.store.kept(self._actor.session, n)

    def find_agent(self, name: str) -> Agent:
        """Return the host's agent called `name`. Raises `UnknownAgent` if the host does not have it."""
        try:
            return self._agents.find(name)
        except UnknownAgent as error:
            there = ", ".join(sorted(self._agents.by_name))
            raise UnknownAgent(
                error.message,
                hint=f"available: {there}; add the agent to the host, or correct the name of the branch or child",
            ) from None

    def background(self, work: Callable[[], Awaitable[Any]], *, name: str) -> None:
        """Start `work` as background work of the session."""
        self._observer.start_background(self._actor, work, name=name, claim=self._claim)

    async def grants(self) -> Sequence[Grant]:
        """Return the grants that hold in the run's session now."""
        lease = self._claim.lease
        return await self._grants.for_call(self._actor.principal, lease.session)

    def watch_grants(self, on_revoked: Callable[[str], None]) -> Callable[[], None]:
        """Call `on_revoked` with the id of each grant of the run's principal that is revoked from now on."""
        return self._grants.watch(self._actor.principal, on_revoked)

    async def use_workspace(self) -> None:
        """Record that the session has files on this host; see `RunHost.use_workspace`."""
        if not self._uses_workspace:
            await self._insist(
                "use workspace", lambda: self._context.store.use_workspace(self._claim.lease), lambda _: None
            )
            self._uses_workspace = True

    async def launch(self, argv: Sequence[str], sandbox: object, options: Mapping[str, Any]) -> WalledStart:
        """Return how to start a program behind a wall; see `RunHost.launch`."""
        from holdfast.tools.walled import launch_of_options

        await self.use_workspace()
        return await launch_of_options(
            argv,
            sandbox,
            options,
            session=self._context.session_id(self._claim.number),
            principal=self._actor.principal,
        )

    async def attachment(self, digest: str) -> bytes:
        """Return the bytes of an attachment of the session's principal. Raises `UnknownAttachment`."""
        found = await self._context.store.attachment(self._actor.principal, digest)
        if found is None:
            raise UnknownAttachment(f"{self._actor.principal!r} has no attachment {digest[:80]!r}")
        return found[1]

    # ── steering ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def steer(self, step: int) -> Sequence[Message]:
        """Take the messages steered to this run. On return, the store has recorded that the run took them at `step`."""
        if not self.steering:
            return ()
        self.steering = False  # before the store looks: a later message sets it again
        await self._writer.written()  # so that they follow the run's earlier output in the log
        context, lease = self._context, self._claim.lease
        steered = await self._insist(
            "steer", lambda: context.store.steer(lease, step=step, at=context.now()), self._note_steered
        )
        return await self._steered_at(step) if self.unsure else steered.messages

    def _note_steered(self, done: Steered) -> None:
        self.steered += tuple(message.message_id for message in done.messages)
        self._run.transcript.know(done.messages)  # they are in the transcript even if the caller has ended
        self._context.incidents.counts["steered"] += len(done.messages)
        self._actor.publish(done.events)

    async def _steered_at(self, step: int) -> Sequence[Message]:
        """Read the messages that the run took at `step` from the log, because the store's reply was lost."""
        store, actor = self._context.store, self._actor
        accepted: dict[str, MessageAccepted] = {}
        taken: list[Message] = []
        after = self._claim.started_seq
        while page := await retry(
            self._context,
            "read",
            functools.partial(store.read_events, actor.session, after=after, limit=PAGE, limit_bytes=PAGE_BYTES),
        ):
            after = page[-1].seq
            for event in map(decode_event, (event for event in page if event.kind in _OF_STEERING)):
                if isinstance(event, MessageAccepted):
                    accepted[event.message_id] = event
                elif isinstance(event, MessageSteered) and (event.run_id, event.step) == (
                    self._claim.lease.run_id,
                    step,
                ):
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
        """Ask a person a question. On return, the question is durable."""
        context, lease, scope = self._context, self._claim.lease, self._scope
        scope.interrupt.check()
        now = context.now()
        question = msgspec.structs.replace(
            question, asked_at=question.asked_at or now, due_at=question.due_at or now + context.settings.question_ttl_s
        )
        self._asked.add(question.question_id)
        try:
            await self._writer.written()
            await self._insist(
                "suspend",
                lambda: context.store.suspend(lease, question),
                functools.partial(self._note_asked, question),
            )
        except IllegalTransition:
            # An interrupt of the run is recorded, and about to arrive.
            self._asked.discard(question.question_id)
            raise Interrupted(await scope.interrupt.wait()) from None
        except BaseException:
            self._asked.discard(question.question_id)
            raise

    def _note_asked(self, question: Question, done: Appended) -> None:
        if done.events:  # else it was already asked
            self._context.incidents.counts["suspended"] += 1
        self._actor.publish(done.events)
        self._observer.on_question(question.due_at)

    async def answered(self, question_id: str) -> Answer:
        """Wait for a person's answer to the question, and return the answer."""
        self._asked.discard(question_id)
        if self._answers is not None and question_id in self._answers:
            return self._answers[question_id]
        self._scope.interrupt.check()
        future: asyncio.Future[Answer] = self._context.loop.create_future()
        if self._expected is None:
            self._expected = {}
        self._expected.setdefault(question_id, []).append(future)
        self._update_quiescence()
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
        """Deliver a person's answer. A run that is being unloaded gets the answer when it resumes."""
        if self._answers is None:
            self._answers = {}
        if self._answers.setdefault(answer.question_id, answer) is not answer or self._run.phase != "running":
            return
        for future in (self._expected or {}).pop(answer.question_id, ()):
            if not future.done():
                self._on_the_way += 1
                future.set_result(answer)

    def on_quiescence(self, is_quiescent: bool) -> None:
        """Record whether all parts of the run wait for people."""
        self._quiet = is_quiescent
        self._update_quiescence()

    def _update_quiescence(self) -> None:
        """Update `is_quiescent`. If the run becomes quiescent, pause its deadline and notify the observer."""
        quiescent = self._quiet and bool(self._expected) and not self._asked and not self._on_the_way
        if quiescent == self.is_quiescent:
            return
        self.is_quiescent = quiescent
        if not quiescent:
            self.end_quiescence()
        elif not self._scope.closed:
            self._still = self._scope.hold_deadline()
            self._still.__enter__()
            self._observer.on_quiescent(self._run)

    def end_quiescence(self) -> None:
        """Mark the run as not quiescent, and resume its deadline."""
        self.is_quiescent = False
        still, self._still = self._still, None
        if still is not None:
            still.__exit__(None, None, None)

    async def _insist(
        self, what: str, verb: Callable[[], asyncio.Future[Done]], note: Callable[[Done], object]
    ) -> Done:
        """Call the store until the call succeeds. `note` is called with each result, in the order of the log."""

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
                self._context.store_failed(self._actor.key, self._claim.lease.run_id, what, error)

        tries = 0
        while True:
            done = verb()
            done.add_done_callback(answered, context=self._context.variables)
            try:
                result = await asyncio.shield(done)
            except StaleFence:
                raise
            except StorageError:
                await asyncio.sleep(retry_delay_s(tries))
                tries += 1
            else:
                if tries:
                    await self._directory.catch_up(self._actor)  # the lost reply had events
                return result
