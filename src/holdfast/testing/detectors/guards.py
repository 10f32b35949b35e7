"""Detectors of forbidden calls in a test: calls that access the network or block a running event loop.

Invariants:

- A forbidden call raises at once and is recorded, so the test fails even if the code swallows the error.
- Nothing is patched outside the ``with`` blocks; the audit hook stays installed, but does nothing outside them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ipaddress
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

__all__ = ["BlockedLoop", "NetworkRefused", "blocking_refused", "is_loopback", "network_refused"]


class NetworkRefused(RuntimeError):
    """A test that may not use the network tried to reach another machine."""


class BlockedLoop(RuntimeError):
    """A test made a blocking call on a running event loop, which would have stalled everything else on the loop."""


# Network

_refusals: list[list[str]] = []
_audit_installed = False


def is_loopback(host: object) -> bool:
    """Return whether the host of a socket address is this machine."""
    if host is None:
        return True
    name = (host.decode("ascii", "replace") if isinstance(host, bytes) else str(host)).partition("%")[0]
    if name in ("", "localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    inner = getattr(address, "ipv4_mapped", None) or address
    return bool(inner.is_loopback or inner.is_unspecified)  # to nowhere is to this machine


def _is_number(host: object) -> bool:
    try:
        ipaddress.ip_address(str(host).partition("%")[0])
    except ValueError:
        return False
    return True


def _audit(event: str, values: tuple[Any, ...]) -> None:
    __tracebackhide__ = True
    if not _refusals:
        return
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        address = values[1]
        if not isinstance(address, tuple) or is_loopback(address[0]):  # a path is a Unix socket's
            return
        wanted = f"{address[0]}, port {address[1]}"
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        if is_loopback(values[0]) or _is_number(values[0]):
            return
        wanted = f"the address of {values[0]!r}"
    elif event in ("socket.gethostbyaddr", "socket.getnameinfo"):
        host = values[0][0] if isinstance(values[0], tuple) else values[0]
        if is_loopback(host):
            return
        wanted = f"the name of {host!r}"
    else:
        return
    error = NetworkRefused(
        f"this test has no network, and wanted {wanted}; "
        "give the code a fake (for models: the scripted one), or serve what it needs on 127.0.0.1"
    )
    _refusals[-1].append(str(error))
    raise error


@contextmanager
def network_refused() -> Iterator[list[str]]:
    """Refuse name lookups and connections to other machines, in all threads; yield the list of refusals.

    Only Python's own sockets are covered, not those of C extensions such as uvloop.
    """
    global _audit_installed
    if not _audit_installed:
        _audit_installed = True
        sys.addaudithook(_audit)
    refused: list[str] = []
    _refusals.append(refused)
    try:
        yield refused
    finally:
        _refusals.remove(refused)


# Blocking

_Blocks = Callable[..., bool]


def _always(*_: Any, **__: Any) -> bool:
    return True


def _sleeps(seconds: float) -> bool:
    return seconds > 0


def _waits_on_socket(one: socket.socket, *_: Any) -> bool:
    return one.gettimeout() != 0


def _runs_still(program: subprocess.Popen[Any], *_: Any, **__: Any) -> bool:
    return program.poll() is None


def _is_unfinished(future: concurrent.futures.Future[Any], timeout: float | None = None) -> bool:
    return not future.done() and timeout != 0


def _is_unset(event: threading.Event, timeout: float | None = None) -> bool:
    caller = sys._getframe(2).f_globals.get("__name__")
    return not event.is_set() and timeout != 0 and caller != "threading"  # Thread.start waits for a moment only


def _is_empty(one: queue.Queue[Any], block: bool = True, timeout: float | None = None) -> bool:
    return block and one.empty() and timeout != 0


_A_PROGRAM = "use asyncio.create_subprocess_exec, or scope.process(…)"
_IN_A_THREAD = "a plain function as a @tool, scope.spawn(fn, on='thread') or asyncio.to_thread keep the loop free"
_BLOCKING: tuple[tuple[Any, str, _Blocks, str], ...] = (
    (time, "sleep", _sleeps, "use `await asyncio.sleep(…)`"),
    (os, "system", _always, _A_PROGRAM),
    (subprocess, "run", _always, _A_PROGRAM),
    (subprocess, "call", _always, _A_PROGRAM),
    (subprocess.Popen, "wait", _runs_still, _A_PROGRAM),
    (subprocess.Popen, "communicate", _runs_still, _A_PROGRAM),
    (concurrent.futures.Future, "result", _is_unfinished, "await asyncio.wrap_future(…)"),
    (concurrent.futures.Future, "exception", _is_unfinished, "await asyncio.wrap_future(…)"),
    (threading.Event, "wait", _is_unset, "use asyncio.Event, or holdfast.runtime's Interrupt"),
    (queue.Queue, "get", _is_empty, "use holdfast.runtime's BoundedQueue, or asyncio.Queue"),
    *(
        (socket.socket, name, _waits_on_socket, "use asyncio's streams, or an asynchronous client")
        for name in ("accept", "connect", "recv", "recv_into", "recvfrom", "send", "sendall", "sendto")
    ),
    (socket, "getaddrinfo", _always, "use `await loop.getaddrinfo(…)`"),
)


@contextmanager
def blocking_refused() -> Iterator[list[str]]:
    """Refuse blocking calls in threads that run an event loop; yield the list of refusals.

    Blocking C code is not detected, nor are functions that were imported by name earlier (``from time import sleep``).
    """
    refused: list[str] = []
    with ExitStack() as stack:
        for owner, name, blocks, instead in _BLOCKING:
            stack.enter_context(_guarded(owner, name, blocks, instead, refused))
        yield refused


@contextmanager
def _guarded(owner: Any, name: str, blocks: _Blocks, instead: str, refused: list[str]) -> Iterator[None]:
    plain = getattr(owner, name)
    own = name in vars(owner)

    def guarded(*values: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        if asyncio._get_running_loop() is not None and blocks(*values, **options):
            error = BlockedLoop(
                f"{owner.__name__}.{name} blocks the event loop it is called on; {instead}; or: {_IN_A_THREAD}"
            )
            refused.append(str(error))
            raise error
        return plain(*values, **options)

    setattr(owner, name, guarded)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, plain)
        else:
            delattr(owner, name)
