"""Stores with one fault each in what becomes of a session whose agent is gone."""

from __future__ import annotations

import asyncio

from holdfast.errors import SessionAgentMissing
from holdfast.storage import MemoryStore
from holdfast.storage.port import Appended, Claim, Lease, NotReady, Parked, Send, SendResult, Served
from tests.testing.suites.store_faults import changed, found_by


@found_by("a_session_without_its_agent_is_refused_and_stays_as_it_was")
class AcceptsAnyAgent(MemoryStore):
    def send(self, request: Send) -> asyncio.Future[SendResult]:
        return super().send(changed(request, served=None))


@found_by("a_duplicate_for_a_missing_agent_is_still_a_duplicate")
class ChecksTheAgentFirst(MemoryStore):
    def send(self, request: Send) -> asyncio.Future[SendResult]:
        row = self.backend.tables.find(request.principal, request.key)
        if row is not None and request.agent is None and request.served and row.agent not in request.served:
            raise SessionAgentMissing("gone")
        return super().send(request)


@found_by("the_default_agent_takes_over_the_sessions_of_the_agents_named")
class TakesNothingOver(MemoryStore):
    def send(self, request: Send) -> asyncio.Future[SendResult]:
        return super().send(changed(request, takes_over=frozenset()))


@found_by("a_run_that_its_rescuer_hands_over_is_marked_so")
class LosesTheMark(MemoryStore):
    def park(
        self, lease: Lease, *, at: float, restarts: bool = False, handed_over: bool = False
    ) -> asyncio.Future[Parked]:
        return super().park(lease, at=at, restarts=restarts)


@found_by("only_the_run_that_holds_a_session_may_tie_it_to_files")
class TiesSessionsOfOthers(MemoryStore):
    def use_workspace(self, lease: Lease) -> asyncio.Future[Appended]:
        done: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        done.set_result(Appended(events=()))
        return done


@found_by("a_run_continues_only_with_the_version_of_its_agent")
class ContinuesAnyVersion(MemoryStore):
    def claim(
        self, session: int, *, run_id: str, at: float, served: Served | None = None
    ) -> asyncio.Future[Claim | NotReady]:
        return super().claim(session, run_id=run_id, at=at)
