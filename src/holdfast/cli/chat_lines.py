"""Where ``holdfast chat`` takes its lines from."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from holdfast.cli.secret_input import hidden_typing

__all__ = ["InputLines", "LineQueue", "PlainLines"]

_LAST_LINE_S = 2.0


class InputLines(Protocol):
    """The lines that a person types or a program pipes in. All methods are called on the loop."""

    def begin(self) -> None:
        """Start to read input, unless that has begun already."""
        ...

    async def close(self) -> None:
        """Stop to read input, and give the terminal back as it was."""
        ...

    async def outlast(self, saying: asyncio.Task[None]) -> bool:
        """Wait until a line is sent. Return False if the input ends first and the line is still unsent soon after."""
        ...

    def __aiter__(self) -> AsyncIterator[str]:
        """Iterate over the lines until the input ends."""
        ...

    def discard(self) -> bool:
        """Discard what is typed and not entered yet. Return whether there was anything."""
        ...

    def take_entered(self) -> list[str]:
        """Remove the lines that were entered and not yet taken, and return them."""
        ...

    async def secret(self, ask: Callable[[], None]) -> str:
        """Return the next line, typed without echo; empty if the input has ended. `ask` runs once the echo is off."""
        ...


class LineQueue:
    """Lines that were entered and not yet taken, and whether the input has ended."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lines: deque[str | None] = deque()
        self._more: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()

    def put(self, line: str | None) -> None:
        """Add a line; None ends the input."""
        self._lines.append(line)
        if line is None and not self._ended.done():
            self._ended.set_result(None)
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def next(self) -> str | None:
        """Take the next line, as soon as there is one; None at the end of the input, also the next time."""
        while not self._lines:
            self._more = self._loop.create_future()
            await self._more
        line = self._lines.popleft()
        if line is None:
            self._lines.append(None)
        return line

    def take_all(self) -> list[str]:
        """Remove all lines and return them; the end of the input stays."""
        taken = [line for line in self._lines if line is not None]
        self._lines = deque(line for line in self._lines if line is None)
        return taken

    async def outlast(self, saying: asyncio.Task[None]) -> bool:
        """Wait until a line is sent. Return False if the input ends first and the line is still unsent soon after."""
        await asyncio.wait((saying, self._ended), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((saying,), timeout=_LAST_LINE_S)
        return saying.done()


class PlainLines:
    """Lines from stdin, read by a separate thread so that input never blocks the loop. The terminal edits them.

    `on_line` is called with each line when it arrives.
    """

    def __init__(self, on_line: Callable[[str], None] | None = None) -> None:
        self._queue = LineQueue()
        self._on_line = on_line
        self._loop = asyncio.get_running_loop()
        self._reading = False

    def begin(self) -> None:
        """Start the reading thread, unless it has been started already."""
        if not self._reading:
            self._reading = True
            threading.Thread(target=self._read, name="stdin", daemon=True).start()

    async def close(self) -> None:
        """Do nothing: the thread ends with the process."""

    def _read(self) -> None:
        rest = b""
        while True:
            try:
                chunk = os.read(0, 65_536)
            except OSError:
                chunk = b""
            *lines, rest = (rest + chunk).split(b"\n")
            if not chunk and rest:
                lines.append(rest)
            for line in lines:
                self._loop.call_soon_threadsafe(self._put, line.decode("utf-8", "replace"))
            if not chunk:
                self._loop.call_soon_threadsafe(self._queue.put, None)
                return

    def _put(self, line: str) -> None:
        if self._on_line is not None:
            self._on_line(line)
        self._queue.put(line)

    async def outlast(self, saying: asyncio.Task[None]) -> bool:
        """Wait until a line is sent. At a terminal, return False if the input ends first and it is still unsent."""
        if sys.stdin.isatty():
            return await self._queue.outlast(saying)
        await saying
        return True

    async def __aiter__(self) -> AsyncIterator[str]:
        while (line := await self._queue.next()) is not None:
            yield line

    def discard(self) -> bool:
        """Return False: the terminal has what is typed until it is entered."""
        return False

    def take_entered(self) -> list[str]:
        """Remove the lines that were entered and not yet taken, and return them."""
        return self._queue.take_all()

    async def secret(self, ask: Callable[[], None]) -> str:
        """Return the next line, typed without echo; empty if the input has ended. `ask` runs once the echo is off."""
        with hidden_typing(0):
            ask()
            line = await self._queue.next()
        return (line or "").strip()
