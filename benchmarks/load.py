"""The load generator: raw HTTP/1.1 on kept connections, so that the client costs little."""

from __future__ import annotations

import asyncio
import time

__all__ = ["Caller", "load", "request"]


def request(method: str, path: str, body: bytes = b"") -> bytes:
    """The bytes of a request on a connection that is kept."""
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    if body:
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


class Caller(asyncio.Protocol):
    """One kept connection that sends the same request again and again, and times each answer."""

    def __init__(self, payload: bytes, until: float, latencies: list[float]) -> None:
        self._payload = payload
        self._until = until
        self._latencies = latencies
        self._buffer = b""
        self._sent_at = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._sent_at = time.perf_counter()
        self._transport.write(self._payload)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        if not _is_whole(head, body):
            return
        now = time.perf_counter()
        if not head.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(self._buffer.decode()))
            return
        self._buffer = b""
        self._latencies.append(now - self._sent_at)
        if now < self._until:
            self._send()
        else:
            self._transport.close()
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionResetError())


def _is_whole(head: bytes, body: bytes) -> bool:
    """Whether the body of an answer has come: by its length, or by its last chunk."""
    length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return len(body) >= int(length) if length else body.endswith(b"0\r\n\r\n")


async def load(port: int, payloads: list[bytes], seconds: float) -> tuple[float, list[float]]:
    """Requests per second and their latencies, with one connection for each payload."""
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    began = time.perf_counter()
    callers = [
        (await loop.create_connection(lambda p=payload: Caller(p, began + seconds, latencies), "127.0.0.1", port))[1]  # type: ignore[misc]
        for payload in payloads
    ]
    await asyncio.gather(*(caller.done for caller in callers))
    return len(latencies) / (time.perf_counter() - began), latencies
