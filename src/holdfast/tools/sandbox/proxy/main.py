"""The proxy's process: opens and closes gates as the host orders, and reports what programs used.

Invariants
- The process has nothing of the server's: a minimal environment, no descriptors but its socket to the host, and memory
  that other programs cannot read. It ends when the host closes the socket.
- A gate exists from the host's order until the host closes it, or until the other end of the program's socket is
  closed, which happens when the program's wall ends.
- Nothing is logged but kinds and places of unexpected errors, as their texts may hold parts of requests.

The host sends JSON objects in packets: ``{"open": number, "principal", "hosts", "networks", "budgets"}`` with one
descriptor, on which the program's wall sends a listening socket; ``{"close": number}``; and ``{"usage": number}``,
which the proxy answers with ``{"number", "sent_bytes", "received_bytes", "connections", "refused"}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from holdfast.tools.addresses import AddressRules
from holdfast.tools.sandbox.proxy.budgets import NetworkBudgets, Traffic, TrafficTable
from holdfast.tools.sandbox.proxy.gate import Gate
from holdfast.tools.sandbox.proxy.rules import HostRules
from holdfast.tools.sandbox.proxy.stream import wait_readable
from holdfast.undumpable import make_undumpable

__all__ = ["main", "receive_listener"]

_PACKET_BYTES = 1 << 18
_LOOKUP_THREADS = 64
_RESERVED_DESCRIPTORS = 64
_ENDED_PROGRAMS = 1000
_SHARE = 4
"""A principal gets at most this fraction of the process's connections."""


class _Program:
    """One program's gate.

    Parameters:
        gate: the gate.
        orders: socket on which the program's wall sends the listening socket.
    """

    def __init__(self, gate: Gate, orders: socket.socket) -> None:
        self.gate = gate
        self._orders = orders

    async def run(self) -> None:
        """Serve the program until the other end of its socket is closed, or the task is cancelled."""
        principal = self.gate.traffic.principal
        principal.programs += 1
        try:
            listener = await receive_listener(self._orders)
            if listener is None:
                return
            serving = asyncio.get_running_loop().create_task(self.gate.serve(listener))
            try:
                await _wait_for_end(self._orders)
            finally:
                serving.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await serving
        finally:
            principal.programs -= 1
            self._orders.close()


async def receive_listener(orders: socket.socket) -> socket.socket | None:
    """Return the first descriptor that arrives, if it is a listening TCP socket; None for anything else."""
    await wait_readable(orders)
    try:
        _, descriptors, _, _ = socket.recv_fds(orders, 64, 4)
    except OSError:
        return None
    for fd in descriptors[1:]:
        os.close(fd)
    if not descriptors:
        return None
    try:
        sock = socket.socket(fileno=descriptors[0])
    except OSError:  # not a socket
        os.close(descriptors[0])
        return None
    if _is_listener(sock):
        return sock
    sock.close()
    return None


def _is_listener(sock: socket.socket) -> bool:
    listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM and listens == 1


async def _wait_for_end(orders: socket.socket) -> None:
    """Return at the end of the stream; discard what else arrives."""
    while True:
        await wait_readable(orders)
        try:
            data, descriptors, _, _ = socket.recv_fds(orders, 64, 4)
        except OSError:
            return
        for fd in descriptors:
            os.close(fd)
        if not data:
            return


class _Proxy:
    def __init__(self, control: socket.socket, connections: int) -> None:
        self._control = control
        self._of_principal = max(1, connections // _SHARE)
        self._traffic = TrafficTable()
        self._answering = asyncio.Lock()
        self._programs: dict[int, tuple[_Program, asyncio.Task[None]]] = {}

    async def run(self) -> None:
        """Carry out the host's orders until the host closes the socket."""
        self._control.setblocking(False)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await wait_readable(self._control)
                data, descriptors, _, _ = socket.recv_fds(self._control, _PACKET_BYTES, 1)
                if not data:
                    break
                match json.loads(data):
                    case {"open": int(number)} as order:
                        program = self._new_program(order, socket.socket(fileno=descriptors[0]))
                        task = tasks.create_task(program.run())
                        self._programs[number] = program, task
                        self._forget_ended()
                    case {"usage": int(number)}:
                        tasks.create_task(self._report(number))
                    case {"close": int(number)}:
                        if number in self._programs:
                            self._programs.pop(number)[1].cancel()
            for _, task in self._programs.values():
                task.cancel()

    def _new_program(self, order: dict[str, Any], orders: socket.socket) -> _Program:
        orders.setblocking(False)
        budgets = NetworkBudgets(**order["budgets"])
        budgets = budgets._replace(
            principal_connections=min(budgets.principal_connections, self._of_principal),
        )
        traffic = Traffic(budgets, self._traffic.of(order["principal"]))
        return _Program(Gate(HostRules(order["hosts"]), AddressRules(order["networks"], None), traffic), orders)

    def _forget_ended(self) -> None:
        """Drop the counters of programs that ended long ago, in case the host did not close them."""
        ended = [number for number, (_, task) in self._programs.items() if task.done()]
        for number in ended[:-_ENDED_PROGRAMS]:
            del self._programs[number]

    async def _report(self, number: int) -> None:
        report: dict[str, Any] = {"number": number, "sent_bytes": 0, "received_bytes": 0, "connections": 0}
        report["refused"] = []
        if number in self._programs:
            gate = self._programs[number][0].gate
            report["sent_bytes"] = gate.traffic.sent_bytes
            report["received_bytes"] = gate.traffic.received_bytes
            report["connections"] = gate.traffic.connections
            report["refused"] = list(gate.refused.items())
        async with self._answering:
            with contextlib.suppress(ConnectionError):  # the host has ended
                await asyncio.get_running_loop().sock_sendall(self._control, json.dumps(report).encode())


def _report_fault(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Write kind and place of an unexpected error, but not its text."""
    error = context.get("exception")
    places = traceback.extract_tb(error.__traceback__) if error is not None else []
    place = f" in {places[-1].filename}:{places[-1].lineno}" if places else ""
    sys.stderr.write(f"holdfast network proxy: {type(error).__name__}{place}\n")


def main() -> None:
    """Run the proxy with its socket to the host as standard input."""
    make_undumpable()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    control = socket.socket(fileno=os.dup(0))

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(_LOOKUP_THREADS, "lookup"))
        loop.set_exception_handler(_report_fault)
        await _Proxy(control, (most - _RESERVED_DESCRIPTORS) // 2).run()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())
