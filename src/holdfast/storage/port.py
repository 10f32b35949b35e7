"""Public interface of the storage layer: `Store`, and the values that the methods of `Store` take and return.

The conformance suite (`holdfast.testing.suites.store`) checks these rules for every store:

- Each writing method is one transaction: when its future is resolved, either all of its writes are durable or none.
- Each write for a run, such as ``append`` and ``commit_run``, checks the run's `Lease` (fence **and** run id) inside
  the transaction and raises `StaleFence` if the lease has become invalid.
- Each session numbers its events with one counter, without gaps.
- Results are returned in the order in which they became durable.
- Readiness and limits are computed from counters in the session row.
- A method that a caller retries after a lost reply has no second effect and returns the same result. A repeated `send`
  is recognized by its idempotency key, a repeated `claim`, `commit_run` or `interrupt` by its run id, and a repeated
  `append` by its number under the lease.
- A write continues even if its caller is cancelled. Methods that write return an `asyncio.Future`, which the caller may
  drop, shield or add done callbacks to. Errors are raised by the future, never by the method, because hosts write from
  callbacks. The futures of one session are resolved in the order of its event numbers, and a future's done callbacks
  run in the order in which they were added (as in asyncio), so a host can publish events from them.

Stores are independent of tasks and agents. Call all methods on the event loop that opened the store. To keep the rows
elsewhere, write a `holdfast.storage.backend.Backend`.
"""

from __future__ import annotations

from holdfast.storage.cluster import Cluster, SessionEvents, SignalKind, Signals
from holdfast.storage.store import Store
from holdfast.storage.values import (
    ALL_BYTES,
    ALL_ENTRIES,
    Answered,
    Append,
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
    NodeReply,
    NodeRequest,
    NotReady,
    OldEvents,
    Parked,
    PutSchedule,
    Ready,
    RequestKind,
    RunCommit,
    Send,
    SendResult,
    Served,
    Steered,
    Stopped,
    StopRequest,
    StoreHealth,
    StoreInfo,
)

__all__ = [
    "ALL_BYTES",
    "ALL_ENTRIES",
    "Answered",
    "Append",
    "Appended",
    "Claim",
    "Cluster",
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
    "NodeReply",
    "NodeRequest",
    "NotReady",
    "OldEvents",
    "Parked",
    "PutSchedule",
    "Ready",
    "RequestKind",
    "RunCommit",
    "Send",
    "SendResult",
    "Served",
    "SessionEvents",
    "SignalKind",
    "Signals",
    "Steered",
    "StopRequest",
    "Stopped",
    "Store",
    "StoreHealth",
    "StoreInfo",
]
