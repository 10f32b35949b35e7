"""A gate on this machine's loopback, with names of the test's own, and a server that it leads to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

from holdfast.errors import ToolFailed
from holdfast.tools.addresses import AddressRules
from holdfast.tools.sandbox.proxy.budgets import NetworkBudgets, PrincipalTraffic, Traffic
from holdfast.tools.sandbox.proxy.gate import DEADLINES, Deadlines, Gate
from holdfast.tools.sandbox.proxy.rules import HostRules

__all__ = ["Names", "gate_for", "listening", "talk"]


class Names:
    """A name server: the addresses of each name, and the names that were asked for."""

    def __init__(self, **addresses: Sequence[str]) -> None:
        self.addresses = {name.replace("_", "."): list(found) for name, found in addresses.items()}
        self.asked: list[str] = []

    def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        try:
            return self.addresses[host]
        except KeyError:
            pass
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except OSError as error:
            raise ToolFailed(f"unknown host {host!r}") from error
        return [str(address[0]) for *_, address in found]


def listening(host: str = "127.0.0.1") -> socket.socket:
    """A listening socket on a free port."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.bind((host, 0))
    listener.listen(4096)
    return listener


@contextlib.asynccontextmanager
async def gate_for(
    hosts: Sequence[str],
    *,
    networks: Sequence[str] = ("127.0.0.1",),
    names: Names | None = None,
    budgets: NetworkBudgets | None = None,
    principal: PrincipalTraffic | None = None,
    deadlines: Deadlines = DEADLINES,
) -> AsyncIterator[tuple[Gate, int]]:
    """A gate and the port on which it listens."""
    traffic = Traffic(budgets or NetworkBudgets(), principal or PrincipalTraffic())
    addresses = AddressRules(networks, None)
    gate = Gate(HostRules(hosts), addresses, traffic, deadlines=deadlines, resolve=names or Names())
    listener = listening()
    port = listener.getsockname()[1]
    serving = asyncio.create_task(gate.serve(listener))
    try:
        yield gate, port
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        assert traffic.open == 0
        assert listener.fileno() < 0


async def talk(port: int, *parts: bytes, end: bool = False) -> bytes:
    """Send the parts on a connection of its own, and return all that comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
            if end:
                writer.write_eof()
        async with asyncio.timeout(30):
            return await _read_all(reader)
    finally:
        writer.close()


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionError):
        while more := await reader.read(65536):
            data += more
    return data


def run(main: Any) -> None:
    """Run a test's coroutine, within a bound."""

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main

    asyncio.run(bounded())
