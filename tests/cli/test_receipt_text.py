"""The words of a receipt: what ended, what was forced and why, and what is left."""

from __future__ import annotations

import pytest

from holdfast.cli.receipt_text import counts_in_words, receipt_lines
from holdfast.protocol.stopping import Abandoned, Cause, StopCounts, StopReceipt


@pytest.mark.parametrize(
    ("stopped", "words"),
    [
        (StopCounts(), "nothing was running"),
        (StopCounts(tasks=2, threads=1), "2 tasks, 1 thread"),
        (StopCounts(tasks=1, programs=1, processes=1), "1 task, 1 program"),
        (StopCounts(tasks=1, programs=1, processes=8), "1 task, 1 program (8 processes)"),
        (StopCounts(programs=3, processes=3), "3 programs"),
        (StopCounts(threads=1, programs=2, processes=9), "1 thread, 2 programs (9 processes)"),
    ],
)
def test_a_program_is_counted_once_and_its_processes_beside_it(stopped: StopCounts, words: str) -> None:
    assert counts_in_words(stopped) == words


@pytest.mark.parametrize(
    ("waited_s", "first"),
    [
        (0.0, "gone after 8 ms: nothing was running"),
        (0.3, "gone after 8 ms: nothing was running"),
        (11.24, "gone after 11.2 s (8 ms after the server took the request): nothing was running"),
    ],
)
def test_a_stop_that_a_blocked_server_took_late_counts_from_its_request(waited_s: float, first: str) -> None:
    cause = Cause(kind="user", reason="", origin="n", at=0.0)
    receipt = StopReceipt(scope="s", cause=cause, outcome="gone", elapsed_s=0.008)
    assert receipt_lines(receipt, waited_s=waited_s) == [first]


def test_a_receipt_of_an_older_version_counts_processes_only() -> None:
    assert counts_in_words(StopCounts(tasks=1, processes=2)) == "1 task, 2 processes"


def test_a_forced_member_stands_with_its_reason_and_without_one_in_a_receipt_of_an_older_version() -> None:
    receipt = StopReceipt(
        scope="r",
        cause=Cause(kind="user"),
        outcome="unknown",
        stopped=StopCounts(tasks=1, programs=1, processes=4),
        forced=("stubborn\x1b[1m tree", "commit"),
        force_reasons=("ignored SIGTERM for 0.5 s", ""),
        abandoned=(Abandoned(kind="thread", name="stuck"),),
        survivors=(7, 8),
        elapsed_s=0.5123,
    )
    assert receipt_lines(receipt) == [
        "unknown after 512 ms: 1 task, 1 program (4 processes) ended",
        "forced: stubborn·[1m tree (ignored SIGTERM for 0.5 s), commit",
        "abandoned: thread stuck; its output no longer counts",
        "a thread cannot be ended from outside: call holdfast.runtime.check_interrupt() in it, "
        'or run it in a process (tools: isolation="process", run.call: on="process")',
        "not proven dead: pid 7, 8",
    ]
    old = StopReceipt(scope="r", cause=Cause(kind="user"), forced=("a", "b"))
    assert receipt_lines(old)[1] == "forced: a, b"
