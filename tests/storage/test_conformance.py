"""Every store keeps the rules of the port."""

import pytest

from holdfast.storage import MemoryStore, SqliteStore
from holdfast.storage.postgres import PostgresStore
from holdfast.testing.suites.store import STORE_CHECKS, run_store_check


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("yielding", [False, True], ids=["at-once", "yielding"])
def test_memory_store_conforms(check, yielding):
    store = MemoryStore(yielding=yielding)
    run_store_check(check, lambda: store)


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_sqlite_store_conforms(check, tmp_path):
    run_store_check(check, lambda: SqliteStore(str(tmp_path / "store.db")))


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_postgres_store_conforms(check, postgres_url):
    run_store_check(check, lambda: PostgresStore(postgres_url))
