"""Retry failed store calls, either for some seconds or until the host drains."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from holdfast.errors import StaleFence, StorageError, StoreCorrupt

if TYPE_CHECKING:
    from holdfast.host.context import HostContext

__all__ = ["RETRY_S", "retry", "retry_delay_s", "retry_until_drain"]

T = TypeVar("T")

RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


def retry_delay_s(tries: int) -> float:
    """Return the delay before the next retry, in seconds, given the number of earlier retries."""
    return RETRY_S[min(tries, len(RETRY_S) - 1)]


async def retry(context: HostContext, what: str, call: Callable[[], Awaitable[T]]) -> T:
    """Call the store and return the result. If the call fails with `StorageError`, retry it for a few seconds.

    `StaleFence` is raised at once.

    Parameters:
        what: name of the call in incident reports.
        call: function that makes the call.
    """
    for delay_s in RETRY_S:
        try:
            return await call()
        except StaleFence:
            raise
        except StorageError as error:
            context.store_failed(None, None, what, error)
            await asyncio.sleep(delay_s)
    return await call()


async def retry_until_drain(
    context: HostContext, call: Callable[[], Awaitable[T]], on_error: Callable[[StorageError], object] | None = None
) -> T:
    """Call the store until the call succeeds. Once the host drains, raise `StorageError` instead of retrying.

    Parameters:
        call: function that makes the call.
        on_error: callback, called with each `StorageError` except `StaleFence` and `StoreCorrupt`, which are raised at
            once.
    """
    tries = 0
    while True:
        try:
            return await call()
        except (StaleFence, StoreCorrupt):
            raise
        except StorageError as error:
            if on_error is not None:
                on_error(error)
            if context.lifecycle.draining:
                raise
            await asyncio.sleep(retry_delay_s(tries))
            tries += 1
