"""Short forms of the store's methods, for the checks of the conformance suite (`holdfast.testing.suites.store`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count, pairwise
from typing import Any, Literal, cast

from holdfast.errors import HoldfastError
from holdfast.protocol.events import Stored, TextDelta, encode_event
from holdfast.protocol.stopping import Cause
from holdfast.storage.port import (
    Appended,
    Claim,
    Committed,
    InterruptRequest,
    InterruptResult,
    RunCommit,
    Send,
    SendResult,
    Store,
)

__all__ = ["Check", "Driver", "MakeStore", "interrupt_of", "opened", "refused"]

MakeStore = Callable[[], Store]
"""A function that returns a store object; all objects that the function returns share the same data."""
Check = Callable[[MakeStore], Awaitable[None]]
"""A function that checks one rule of the port and raises `AssertionError` if the store breaks the rule."""


@asynccontextmanager
async def opened(make_store: MakeStore, *, at: float = 1.0) -> AsyncIterator[Driver]:
    """Yield a driver of a store that is open within the block; all blocks with the same ``make_store`` share data.

    An error that the block raises gets a note with the store method that was called last and the method's description
    in the port.
    """
    store = make_store()
    await store.open(node_id=f"n_{at}", at=at)
    watched = _Watched(store)
    try:
        yield Driver(cast("Store", watched))
    except Exception as error:
        error.add_note(f"the store method that was called last: {watched.told()}")
        raise
    finally:
        await store.close()


class _Watched:
    """Proxy of a store that records the name of the method that was called last."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._verb = "open"

    def __getattr__(self, name: str) -> Any:
        self._verb = name
        return getattr(self._store, name)

    def told(self) -> str:
        """Return the method that was called last, with the first line of the method's description in the port."""
        doc = (getattr(Store, self._verb, None).__doc__ or "").strip().partition("\n")[0]
        return f"Store.{self._verb}: {doc}" if doc else f"Store.{self._verb}"


class Driver:
    """Wrapper whose methods call the store's methods with new ids and default times."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._count = count(1)

    def fresh(self, prefix: str) -> str:
        """Return a new unique id that starts with ``prefix``."""
        return f"{prefix}_{id(self):x}_{next(self._count)}"

    def send(
        self,
        content: str = "hello",
        *,
        key: str = "k",
        principal: str = "p",
        policy: str = "queue",
        room: bool = True,
        at: float = 10.0,
        **more: Any,
    ) -> asyncio.Future[SendResult]:
        """Call `Store.send` with `more` as fields of the `Send`; ``room=False`` means that no run slot is free."""
        request = Send(
            principal=principal,
            key=key,
            agent=more.pop("agent", None),
            default_agent="demo",
            message_id=more.pop("message_id", None) or self.fresh("m"),
            content=content,
            policy=policy,
            at=at,
            run_id=more.pop("run_id", self.fresh("r")) if room else None,
            **more,
        )
        return self.store.send(request)

    async def start(self, content: str = "hello", **more: Any) -> Claim:
        """Send a message to an idle session, and return the claim of the run that starts."""
        result = await self.send(content, **more)
        assert result.disposition == "started", f"an idle session must start, not {result.disposition}"
        assert result.claim is not None, "a start carries its claim"
        return result.claim

    def commit(
        self,
        claim: Claim,
        status: Literal["completed", "failed", "interrupted"] = "completed",
        *,
        at: float = 20.0,
        **more: Any,
    ) -> asyncio.Future[Committed]:
        """Call `Store.commit_run` with `more` as fields of the `RunCommit`."""
        return self.store.commit_run(RunCommit(lease=claim.lease, status=status, at=at, **more))

    def say(self, claim: Claim, *texts: str, nth: int = 0) -> asyncio.Future[Appended]:
        """Append a ``text.delta`` event for each text."""
        events = [encode_event(TextDelta(run_id=claim.lease.run_id, text=text)) for text in texts]
        return self.store.append(claim.lease, events, nth=nth)

    async def log(self, session: int) -> list[Stored]:
        """Read the session's whole log in small batches, check it for gaps, and return its events."""
        events: list[Stored] = []
        while True:
            more = await self.store.read_events(session, after=events[-1].seq if events else 0, limit=3)
            if not more:
                break
            events.extend(more)
        _without_holes(events)
        return events

    async def kinds(self, session: int) -> list[str]:
        """Return the kind of each event in the session's log."""
        return [event.kind for event in await self.log(session)]

    def interrupt(
        self, *, key: str = "k", run_id: str | None = None, at: float = 15.0, reason: str = "enough"
    ) -> Awaitable[InterruptResult]:
        """Call `Store.interrupt` for the run `run_id`, or by default for the active run."""
        return self.store.interrupt(interrupt_of(key=key, run_id=run_id, at=at, reason=reason))


def interrupt_of(
    *, key: str = "k", run_id: str | None = None, at: float = 15.0, reason: str = "enough"
) -> InterruptRequest:
    """Return a user's request to interrupt a session of the principal ``p``."""
    return InterruptRequest(
        principal="p", key=key, cause=Cause(kind="user", reason=reason, at=at), at=at, run_id=run_id
    )


def _without_holes(events: Sequence[Stored]) -> None:
    for before, after in pairwise(events):
        assert after.seq == before.seq + 1, f"the log goes from {before.seq} to {after.seq}"


async def refused(answer: Awaitable[object], error: type[HoldfastError]) -> HoldfastError:
    """Await ``answer``, and return the ``error`` that it raises. Raise `AssertionError` if ``answer`` succeeds."""
    try:
        result = await answer
    except error as refusal:
        return refusal
    raise AssertionError(f"{error.__name__} was expected, not {result!r}")
