"""What holds for all tests: no network but this machine's own, and the same Hypothesis examples on every run."""

from __future__ import annotations

import gc
import ipaddress
import os
import signal
import socket
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests.postgres import own_postgres, postgres_database, postgres_url

__all__ = ["own_postgres", "postgres_database", "postgres_url"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a shell: the programs that tests start, and end by SIGINT, would ignore it too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("holdfast", deadline=None, derandomize=True)
settings.load_profile("holdfast")


def is_here(address: Any) -> bool:
    """Whether a socket address is on this machine."""
    if not isinstance(address, tuple):
        return True  # a Unix socket
    host = str(address[0]).partition("%")[0]
    try:
        return host in ("", "localhost") or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are processors, as most tests mostly wait; bounded, as each has its own memory."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 7) + 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """`frontrun` skips a test that did not ask for it, and then nobody looks at its threads: it fails instead."""
    report = yield
    if report.skipped and "frontrun CLI" in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} explores threads: it needs a fixture that sets FRONTRUN_ACTIVE"
    return report


@pytest.fixture(autouse=True, scope="module")
def imported_once() -> None:
    """What is there before a file's tests stays: the many collections of garbage need not look at it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def network_off() -> Iterator[None]:
    """A test that reaches for the network fails at once, and says where it wanted to go."""
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex

    def guard(address: Any) -> None:
        if not is_here(address):
            raise RuntimeError(f"tests have no network, and this one wanted to reach {address}")

    def guarded_connect(self: socket.socket, address: Any) -> None:
        guard(address)
        connect(self, address)

    def guarded_connect_ex(self: socket.socket, address: Any) -> int:
        guard(address)
        return connect_ex(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded_connect)
        patch.setattr(socket.socket, "connect_ex", guarded_connect_ex)
        yield
