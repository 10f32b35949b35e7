"""The host's side of the proxy: starts its process, opens the network for programs, and learns what they used.

Invariants
- There is one process per Python process, started with the first program that needs the network. It ends when a host
  closes and no program uses it, and dies with this process, as every program does.
- If the proxy's process dies, its programs get "connection refused" from then on, which their usage reports as
  ``lost``. The next `NetworkProxy.open` starts a new process.
- Methods are callable from any loop; answers arrive on the reading thread of the process host.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import NotSupported, ToolFailed
from holdfast.runtime.oneshot import Oneshot
from holdfast.runtime.process_host import Process, ProcessHost, process_host
from holdfast.runtime.processes.spec import START_S, backlog_pauses
from holdfast.runtime.processes.tree import KILL_BOUND_S
from holdfast.tools.addresses import AddressRules
from holdfast.tools.sandbox.proxy.budgets import NetworkBudgets
from holdfast.tools.sandbox.proxy.rules import HostRules

__all__ = ["NetworkAccess", "NetworkProxy", "NetworkUsage", "ProxyProcess", "network_proxy"]

_BOOT = "import sys; sys.path.append({top!r}); from holdfast.tools.sandbox.proxy.main import main; main()"
_ANSWER_S = 5.0
_STARTS = 3
_PACKET_BYTES = 1 << 18
_SHOWN_REFUSALS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkUsage:
    """Network use of one program so far.

    Parameters:
        sent_bytes: number of bytes that the program has sent.
        received_bytes: number of bytes that the program has received.
        connections: number of connections that the program has opened to the proxy.
        refused: hosts that the proxy refused or did not reach, with the last reason; only the latest hosts.
        lost: whether the proxy's process has ended, so that the program has no network any more and the
            rest is unknown.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    connections: int = 0
    refused: tuple[tuple[str, str], ...] = ()
    lost: bool = False

    def describe(self) -> str:
        """Return a line for the model about what was refused or lost; empty if nothing was."""
        texts = list(dict.fromkeys(text for _, text in self.refused))
        parts = texts[-_SHOWN_REFUSALS:]
        if len(texts) > len(parts):
            parts.append(f"and {len(texts) - len(parts)} more")
        if self.lost:
            parts.append("the network proxy has ended; start the program again to reconnect it")
        return f"network: {'; '.join(parts)}" if parts else ""


class NetworkAccess:
    """The network of one program, from `NetworkProxy.open` until `close`.

    The caller starts the program with the descriptor that `take_fd` returns, and calls `close` when it has ended.
    """

    def __init__(self, proxy: NetworkProxy, link: ProxyProcess, number: int, ours: socket.socket) -> None:
        self._proxy = proxy
        self._link = link
        self._number = number
        self._ours = ours
        self._closed = False

    def take_fd(self) -> int:
        """Return the descriptor for the program's wall; the caller closes its copy after the start.

        The wall sends a listening socket of the program's network over it. The network ends with the last copy.
        """
        return self._ours.detach()

    async def usage(self) -> NetworkUsage:
        """Return the program's use of the network so far; nothing after `close`."""
        return await self._link.ask_usage(self._number)

    def close(self) -> None:
        """End the program's network and all its connections, without waiting for their end. Idempotent."""
        self._ours.close()
        if not self._closed:
            self._closed = True
            self._link.send_now({"close": self._number})
            self._proxy.on_access_closed()


class ProxyProcess:
    """One process of the proxy, and the socket to it."""

    def __init__(self, processes: ProcessHost) -> None:
        self._processes = processes
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._lock = threading.Lock()
        self._pending: dict[int, list[Oneshot[NetworkUsage]]] = {}
        self.started: Oneshot[bool] = Oneshot()
        self.process: Process | None = None
        self.is_lost = False
        self._has_answered = False

    @property
    def is_closed(self) -> bool:
        """Whether the socket to the process is closed."""
        return self._control.fileno() < 0

    async def start(self) -> None:
        """Start the process.

        Raises:
            OSError: the process failed to start; see `ProcessHost.spawn`.
        """
        top = str(Path(__file__).parents[4])
        boot = _BOOT.format(top=top)
        try:
            self.process = await self._processes.spawn(
                [sys.executable, "-I", "-S", "-c", boot],
                stdin=self._theirs.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                cwd="/",
                env={"PATH": os.defpath, "LANG": "C.UTF-8"},
                name="network proxy",
            )
            self._theirs.close()
            self._processes.watch(self._control.fileno(), self._hear)
            self.started.set(True)
        finally:
            if self.started.set(False):
                self.is_lost = True
                self._theirs.close()
                self._control.close()

    async def send(self, order: dict[str, Any], fds: Sequence[int] = ()) -> bool:
        """Send an order; return False if the process has ended.

        Raises:
            TimeoutError: the process takes no orders.
        """
        for pause_s in backlog_pauses():
            sent = self.send_now(order, fds)
            if sent is not None:
                return sent
            await asyncio.sleep(pause_s)
        return False

    def send_now(self, order: dict[str, Any], fds: Sequence[int] = ()) -> bool | None:
        """Send an order; return False if the process has ended, and None if too many orders are waiting."""
        with self._lock:
            if self.is_lost:
                return False
            try:
                socket.send_fds(self._control, [json.dumps(order).encode()], fds)
            except BlockingIOError:
                return None
            except OSError:  # it has ended, and the reading thread did not hear of it yet
                self.is_lost = True
                return False
        return True

    async def ask_usage(self, number: int) -> NetworkUsage:
        """Return the usage of a program; empty if the process does not answer in time."""
        answer: Oneshot[NetworkUsage] = Oneshot()
        with self._lock:
            self._pending.setdefault(number, []).append(answer)
        try:
            async with asyncio.timeout(_ANSWER_S if self._has_answered else START_S):
                if not await self.send({"usage": number}):
                    return NetworkUsage(lost=True)
                return await answer.wait()
        except TimeoutError:
            return NetworkUsage(lost=self.is_lost)
        finally:
            with self._lock:
                waiting = self._pending.get(number, [])
                if answer in waiting:
                    waiting.remove(answer)
                if not waiting:
                    self._pending.pop(number, None)

    def _hear(self) -> None:
        """Take one message from the process. Runs in the reading thread."""
        try:
            data = self._control.recv(_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            report: dict[str, Any] = json.loads(data)
            usage = _read_usage(report)
            number = int(report["number"])
        except (ValueError, KeyError, TypeError):  # the end, or not from our program any more
            self._lose()
            return
        self._has_answered = True
        with self._lock:
            answers = self._pending.pop(number, [])
        for answer in answers:
            answer.set(usage)

    def end(self) -> None:
        """Kill the process."""
        with self._lock:
            self.is_lost = True
        if self.process is not None:
            self.process.tree.ask_kill(0.0, KILL_BOUND_S)

    def leave_to_parent(self) -> None:
        """Close the socket in a forked child, because the process belongs to the parent."""
        self._lock = threading.Lock()
        self.is_lost = True
        self._control.close()
        self._theirs.close()

    def _lose(self) -> None:
        """Note the end of the process. Runs in the reading thread."""
        self._processes.unwatch(self._control.fileno())
        with self._lock:
            self._control.close()
            pending, self._pending = self._pending, {}
        for answers in pending.values():
            for answer in answers:
                answer.set(NetworkUsage(lost=True))
        self.end()


def _read_usage(report: dict[str, Any]) -> NetworkUsage:
    return NetworkUsage(
        sent_bytes=int(report["sent_bytes"]),
        received_bytes=int(report["received_bytes"]),
        connections=int(report["connections"]),
        refused=tuple((str(host), str(text)) for host, text in report["refused"]),
    )


class NetworkProxy:
    """The network of this process's walled programs; `network_proxy` returns the shared one.

    Parameters:
        processes: process host that the proxy's process runs under.

    Attributes:
        link: the latest process of the proxy; None before the first one.
        principal_connections, principal_bytes: limits of each principal for programs that are opened from now on; see
            `NetworkBudgets`.
    """

    def __init__(self, processes: ProcessHost) -> None:
        self._processes = processes
        self._lock = threading.Lock()
        self.link: ProxyProcess | None = None
        self.principal_connections = NetworkBudgets().principal_connections
        self.principal_bytes = NetworkBudgets().principal_bytes
        self._number = 0
        self._open = 0
        processes.on_close_idle(self.close_if_unused)

    async def open(
        self,
        principal: str,
        hosts: Sequence[str],
        *,
        networks: Sequence[str] = (),
        connections: int = NetworkBudgets().program_connections,
        bytes_limit: int = NetworkBudgets().program_bytes,
    ) -> NetworkAccess:
        """Open the network for one program.

        Parameters:
            principal: owner of the program, whose budgets the program shares.
            hosts: rules for hosts that the program may reach; see `HostRules`.
            networks: networks that are not public and may be reached nevertheless; see `AddressRules`.
            connections: maximum number of open connections of the program.
            bytes_limit: maximum number of bytes that the program sends and receives.

        Raises:
            ConfigurationError: if a host or network is invalid.
            NotSupported: if this system has no sockets that keep packets apart.
            ToolFailed: if the proxy does not start.
        """
        if not hasattr(socket, "SOCK_SEQPACKET") or not sys.platform.startswith("linux"):
            raise NotSupported("network access through the proxy needs Linux", hint="use network='none' here")
        HostRules(hosts)
        AddressRules(networks)
        with self._lock:
            self._open += 1
            self._number += 1
            number = self._number
        order: dict[str, Any] = {"open": number, "principal": principal, "hosts": list(hosts)}
        budgets = NetworkBudgets(connections, bytes_limit, self.principal_connections, self.principal_bytes)
        order |= {"networks": list(networks), "budgets": budgets._asdict()}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            for _ in range(_STARTS):
                link = await self._started()
                if link is not None and await link.send(order, [theirs.fileno()]):
                    return NetworkAccess(self, link, number, ours)
            raise ToolFailed("the network proxy does not start; see the server's log")
        except BaseException:
            ours.close()
            self.on_access_closed()
            raise
        finally:
            theirs.close()

    @property
    def open_count(self) -> int:
        """Number of programs whose network is open."""
        return self._open

    def on_access_closed(self) -> None:
        """Count the end of one program's network."""
        with self._lock:
            self._open -= 1

    def close_if_unused(self) -> None:
        """End the process if no program uses it; the next `open` starts a new one."""
        with self._lock:
            link = None if self._open else self.link
            if link is not None:
                self.link = None
        if link is not None:
            link.end()

    def leave_to_parent(self) -> None:
        """Forget the process in a forked child, because it belongs to the parent."""
        self._lock = threading.Lock()
        self._open = 0
        link, self.link = self.link, None
        if link is not None:
            link.leave_to_parent()

    async def _started(self) -> ProxyProcess | None:
        """Return the running process, and start it first if needed; None if the start failed."""
        with self._lock:
            link = self.link
            is_first = link is None or link.is_lost
            if link is None or is_first:
                link = self.link = ProxyProcess(self._processes)
        if is_first:
            with contextlib.suppress(OSError):
                await link.start()
        return link if await link.started.wait() else None


@functools.cache
def network_proxy() -> NetworkProxy:
    """Return the `NetworkProxy` of this Python process."""
    proxy = NetworkProxy(process_host())
    os.register_at_fork(after_in_child=proxy.leave_to_parent)
    return proxy
