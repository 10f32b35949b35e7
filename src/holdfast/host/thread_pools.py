"""One thread pool for each principal, so that no principal can use up the threads of another principal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.runtime import ThreadPool

if TYPE_CHECKING:
    from holdfast.settings import Settings

__all__ = ["ThreadPools"]


class ThreadPools:
    """The thread pools of a host's principals."""

    __slots__ = ("_by_principal", "_settings")

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._by_principal: dict[str, ThreadPool] = {}

    def __len__(self) -> int:
        return len(self._by_principal)

    def of(self, principal: str) -> ThreadPool:
        """Return the principal's thread pool, creating it on first use."""
        pool = self._by_principal.get(principal)
        if pool is None:
            pool = self._by_principal[principal] = ThreadPool(
                max_threads=self._settings.principal_threads,
                abandoned_limit=self._settings.principal_abandoned,
                name=f"holdfast-{principal}"[:40],
            )
        return pool

    def close_unused(self, is_live: Callable[[str], bool]) -> None:
        """Close the pools of principals for which `is_live` returns False. Pools with abandoned threads stay open."""
        for principal in [name for name in self._by_principal if not is_live(name)]:
            if not self._by_principal[principal].statistics().abandoned:
                self._by_principal.pop(principal).close()

    def close(self) -> None:
        """Close all pools."""
        for pool in self._by_principal.values():
            pool.close()
