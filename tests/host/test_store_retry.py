"""Retries of failed store calls: which errors they survive, and when they end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.errors import StaleFence, StorageError, StoreCorrupt
from holdfast.host.store_retry import RETRY_S, retry, retry_delay_s, retry_until_drain
from holdfast.testing import run_virtual


class Store:
    """Fails with the given errors, in order, and then answers."""

    def __init__(self, *errors: StorageError) -> None:
        self.errors = list(errors)
        self.calls = 0
        self.reported: list[str] = []
        self.lifecycle = SimpleNamespace(draining=False)

    async def call(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"

    def store_failed(self, key: str | None, run_id: str | None, what: str, error: BaseException) -> None:
        self.reported.append(what)


def test_delays_grow_up_to_a_limit() -> None:
    delays = [retry_delay_s(tries) for tries in range(len(RETRY_S) + 3)]
    assert delays == sorted(delays)
    assert delays[-1] == RETRY_S[-1]


def test_a_call_is_repeated_until_the_store_answers_and_each_failure_is_reported() -> None:
    store: Any = Store(StorageError("full"), StorageError("full"))
    assert run_virtual(retry(store, "read", store.call)) == "answer"
    assert store.reported == ["read", "read"]


def test_a_bounded_retry_raises_the_last_error() -> None:
    store: Any = Store(*[StorageError(f"error {number}") for number in range(len(RETRY_S) + 1)])
    with pytest.raises(StorageError, match=f"error {len(RETRY_S)}"):
        run_virtual(retry(store, "read", store.call))


def test_a_lost_lease_is_not_retried() -> None:
    for calling in (
        lambda store: retry(store, "read", store.call),
        lambda store: retry_until_drain(store, store.call),
    ):
        store: Any = Store(StaleFence("lost"))
        with pytest.raises(StaleFence):
            run_virtual(calling(store))
        assert store.calls == 1


def test_a_retry_until_drain_outlasts_any_number_of_failures() -> None:
    store: Any = Store(*[StorageError("full")] * 50)
    seen: list[StorageError] = []
    assert run_virtual(retry_until_drain(store, store.call, seen.append)) == "answer"
    assert len(seen) == 50


def test_a_retry_until_drain_raises_once_the_host_drains_and_never_repeats_what_is_corrupt() -> None:
    store: Any = Store(StorageError("full"), StorageError("full"))
    store.lifecycle.draining = True
    with pytest.raises(StorageError, match="full"):
        run_virtual(retry_until_drain(store, store.call))
    assert store.calls == 1
    with pytest.raises(StoreCorrupt):
        corrupt: Any = Store(StoreCorrupt("unreadable"))
        run_virtual(retry_until_drain(corrupt, corrupt.call))
