"""A server's connections to the storm's database, through a relay that can be cut off or lose replies."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

__all__ = ["DatabaseLink"]

_SOCKET: Final = ".s.PGSQL.5432"
_PART_BYTES: Final = 1 << 16


class DatabaseLink:
    """A relay on a Unix socket. An async context manager; use it on one loop.

    Parameters:
        folder: existing empty folder for the socket, with a short path.
        target: folder of the socket that the connections lead to.
    """

    def __init__(self, folder: Path, target: Path) -> None:
        self._folder = folder
        self._target = target / _SOCKET
        self._passing = asyncio.Event()
        self._passing.set()
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self.lost = 0
        """Number of replies that were lost."""

    async def __aenter__(self) -> DatabaseLink:
        self._server = await asyncio.start_unix_server(self._serve, self._folder / _SOCKET)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self._passing.set()
        for connection in list(self._connections):
            connection.abort()

    def url(self, database: str = "postgres") -> str:
        """Return the URL of a database, for a store."""
        return f"postgresql://holdfast@/{database}?host={self._folder}"

    def redirect(self, target: Path) -> None:
        """Let new connections lead to the socket in another folder."""
        self._target = target / _SOCKET

    def cut(self) -> None:
        """Hold back everything, in both directions, until `heal`; new connections are accepted, but get no answer."""
        self._passing.clear()

    def heal(self) -> None:
        """Deliver what was held back, and everything after it."""
        self._passing.set()

    def lose_replies(self) -> None:
        """Deliver the next request of each connection, but not the reply: the connection ends instead."""
        for connection in self._connections:
            connection.loses = True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            replies, requests = await asyncio.open_unix_connection(self._target)
        except OSError:  # the database is down
            writer.close()
            return
        connection = _Connection(writer, requests)
        self._connections.add(connection)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(reader, requests, connection, are_replies=False))
                group.create_task(self._pass(replies, writer, connection, are_replies=True))
        finally:
            self._connections.discard(connection)

    async def _pass(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        connection: _Connection,
        *,
        are_replies: bool,
    ) -> None:
        with suppress(OSError):
            while part := await source.read(_PART_BYTES):
                await self._passing.wait()
                if are_replies and connection.loses:
                    self.lost += 1
                    break
                sink.write(part)
                await sink.drain()
        connection.abort()


class _Connection:
    """One connection of the server, and its continuation to the database."""

    def __init__(self, *writers: asyncio.StreamWriter) -> None:
        self._writers = writers
        self.loses = False

    def abort(self) -> None:
        """End both."""
        for writer in self._writers:
            writer.transport.abort()
