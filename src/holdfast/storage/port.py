"""Public interface of the storage layer: `Store`, and the values that its methods take and return.

Rules for every store, checked by the conformance suite (`holdfast.testing.suites.store`):

- Each writing method is one transaction: when it is answered, all of it is durable, or none of it.
- ``append``, ``commit_run`` and every write of a run check its `Lease` (fence **and** run id) inside the write and
  raise `StaleFence` if it does not hold.
- One counter per session numbers all its events, without gaps.
- Results are returned in the order in which they became durable.
- Readiness and limits come from counters in the session row.
- Methods that a caller retries after a lost reply have no second effect and the same answer: `send` by idempotency key,
  `claim`, `commit_run` and `interrupt` by run id, `append` by its number under the lease.
- A write continues whatever happens to its caller: methods that write return an `asyncio.Future`, which the caller may
  drop, shield or add done callbacks to. Errors are raised by the future, never by the method, because hosts write from
  callbacks. The futures of one session are resolved in the order of its event numbers, and a future's done
  callbacks run in the order in which they were added (as in asyncio), so a host can publish from them.

A store does not know tasks or agents. Call all methods on the event loop that opened it. To keep the rows elsewhere,
write a `holdfast.storage.backend.Backend`.
"""

from __future__ import annotations

from holdfast.storage.store import Store
from holdfast.storage.values import (
    ALL_BYTES,
    ALL_ENTRIES,
    Answered,
    Appended,
    Claim,
    Committed,
    DueQuestion,
    DueSchedule,
    Edited,
    EditHistory,
    Fire,
    Fired,
    InterruptRequest,
    InterruptResult,
    KeyRecord,
    Lease,
    NotReady,
    Parked,
    PutSchedule,
    Ready,
    RunCommit,
    Send,
    SendResult,
    Steered,
    Stopped,
    StoreInfo,
)

__all__ = [
    "ALL_BYTES",
    "ALL_ENTRIES",
    "Answered",
    "Appended",
    "Claim",
    "Committed",
    "DueQuestion",
    "DueSchedule",
    "EditHistory",
    "Edited",
    "Fire",
    "Fired",
    "InterruptRequest",
    "InterruptResult",
    "KeyRecord",
    "Lease",
    "NotReady",
    "Parked",
    "PutSchedule",
    "Ready",
    "RunCommit",
    "Send",
    "SendResult",
    "Steered",
    "Stopped",
    "Store",
    "StoreInfo",
]
