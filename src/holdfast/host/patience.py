"""Delay before the host retries a failed store call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from holdfast.errors import StaleFence, StorageError

if TYPE_CHECKING:
    from holdfast.host.host import Host

__all__ = ["RETRY_S", "patiently", "retry_after_s"]

T = TypeVar("T")

RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


def retry_after_s(tries: int) -> float:
    """Return the delay before the next try, after `tries` failures."""
    return RETRY_S[min(tries, len(RETRY_S) - 1)]


async def patiently(host: Host, what: str, verb: Callable[[], Awaitable[T]]) -> T:
    """Call the store and return its result, retrying for some seconds on errors.

    Parameters:
        what: name of the call in incident reports.
    """
    for delay_s in RETRY_S:
        try:
            return await verb()
        except StaleFence:
            raise
        except StorageError as error:
            host.store_failed(None, None, what, error)
            await asyncio.sleep(delay_s)
    return await verb()
