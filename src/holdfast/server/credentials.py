"""Credentials in use: a register of the requests and event streams in progress, by credential.

Rules
- When a key is revoked, or the first key of a server is created, all requests without a valid credential end
  immediately.
- A token expires when the wall clock reaches the token's ``exp``. For a request in progress, the token also expires
  when the lifetime that the token had left at the start of the request has passed on the monotonic clock. Setting the
  wall clock back therefore does not extend a request or stream; setting it forward may end one.
- Registering or releasing a request takes constant time. One timer for the whole server checks for expiry, and runs
  only while a credential that can expire is registered.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from holdfast.clock import Clock

__all__ = ["LOOK_EVERY_S", "CredentialUse", "CredentialsInUse"]

K = TypeVar("K")

LOOK_EVERY_S = 0.25
"""Time in seconds between two expiry checks. An open stream ends no later than the second check after its token
expires."""

_NO_MORE = "the token has expired"


class CredentialUse:
    """A request or stream in progress under a credential, returned by `CredentialsInUse.hold`.

    Create it in the task that handles the request. Use it as a context manager, or call `release` when the request
    ends. If the credential becomes invalid, the task is cancelled, and the attribute ``ended`` contains the reason.

    Parameters:
        owner: register that contains this use.
        credential: id of an API key, ``jwt`` or ``local``.
        buckets: numbers of the expiry checks that end the request, the first by wall clock, the second by monotonic
            clock; None if the credential never expires.
    """

    __slots__ = ("_owner", "_task", "buckets", "credential", "ended")

    def __init__(self, owner: CredentialsInUse, credential: str, buckets: tuple[int, int] | None) -> None:
        self.credential = credential
        self.buckets = buckets
        self.ended: str | None = None
        self._owner = owner
        self._task = asyncio.current_task()

    def __enter__(self) -> CredentialUse:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Remove this use from the register. Idempotent."""
        self._owner.forget(self)

    def end(self, reason: str) -> None:
        """Cancel the request, because its credential is no longer valid. A second call does not cancel again."""
        self.release()
        if self.ended is None:
            self.ended = reason
            if self._task is not None:
                self._task.cancel()

    def absorb(self) -> None:
        """Undo the cancellation that `end` requested, so that the task can send the reason to the client."""
        if self._task is not None:
            self._task.uncancel()


class CredentialsInUse:
    """Register of a server's requests and streams in progress, by credential. Use it from one event loop only.

    Parameters:
        clock: source of wall-clock and monotonic time.
    """

    __slots__ = ("_by_credential", "_by_monotonic", "_by_wall", "_clock", "_timer")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_credential: defaultdict[str, set[CredentialUse]] = defaultdict(set)
        self._by_wall: defaultdict[int, set[CredentialUse]] = defaultdict(set)
        self._by_monotonic: defaultdict[int, set[CredentialUse]] = defaultdict(set)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def count(self) -> int:
        """Number of requests and streams in progress."""
        return sum(map(len, self._by_credential.values()))

    @property
    def ticking(self) -> bool:
        """Whether the expiry timer is active."""
        return self._timer is not None

    def hold(self, credential: str, expires_at: float | None) -> CredentialUse:
        """Register the current task as the handler of a request with a credential.

        Parameters:
            credential: id of an API key, ``jwt`` or ``local``.
            expires_at: expiry time of the credential in seconds since the epoch; None if the credential never expires.
        """
        buckets = None
        if expires_at is not None:
            left_s = expires_at - self._clock.now()
            buckets = (_bucket(expires_at), _bucket(self._clock.monotonic() + left_s))
        use = CredentialUse(self, credential, buckets)
        self._by_credential[credential].add(use)
        if buckets is not None:
            self._by_wall[buckets[0]].add(use)
            self._by_monotonic[buckets[1]].add(use)
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self.look)
        return use

    def forget(self, use: CredentialUse) -> None:
        """Remove `use` from the register. Idempotent."""
        _discard(self._by_credential, use.credential, use)
        if use.buckets is not None:
            _discard(self._by_wall, use.buckets[0], use)
            _discard(self._by_monotonic, use.buckets[1], use)

    def end_all_but(self, valid: Iterable[str], reason: str) -> int:
        """End all requests whose credential is not in `valid`, and return how many were ended."""
        over = self._by_credential.keys() - set(valid)
        ended = [use for credential in over for use in self._by_credential[credential]]
        for use in ended:
            use.end(reason)
        return len(ended)

    def look(self) -> None:
        """End requests whose credential has expired, and restart the timer if other credentials can expire."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for uses, now in ((self._by_wall, self._clock.now()), (self._by_monotonic, self._clock.monotonic())):
            for due in [bucket for bucket in uses if bucket * LOOK_EVERY_S <= now]:
                for use in list(uses.get(due, ())):
                    use.end(_NO_MORE)
        if self._by_wall:
            self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self.look)


def _bucket(at: float) -> int:
    """Return the number of the first expiry check at or after the time `at`."""
    return math.ceil(at / LOOK_EVERY_S)


def _discard(register: defaultdict[K, set[CredentialUse]], key: K, use: CredentialUse) -> None:
    uses = register.get(key)
    if uses is not None:
        uses.discard(use)
        if not uses:
            del register[key]
