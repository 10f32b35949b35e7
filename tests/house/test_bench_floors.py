"""The floors that benchmarks compare with use today's tables: benchmarks are run by hand, and would break unseen."""

from __future__ import annotations

from benchmarks.bench_store import bare_loop_s


def test_the_bare_loop_writes_the_rows_of_today() -> None:
    assert bare_loop_s(batches=2) > 0
