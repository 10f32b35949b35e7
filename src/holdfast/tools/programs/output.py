"""Bounded capture of a program's output, rendered as text for a model.

Invariants
- No code here waits for the end of a pipe, so a process that keeps a pipe open causes no delay.
- Memory use stays within the given limits, whatever the program writes. A program that writes too fast blocks on its
  own full pipe and does not slow down the loop.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.errors import Interrupted, RunClosed
from holdfast.tools.plain_text import plain, readable, unfinished

if TYPE_CHECKING:
    from holdfast.agents.run import Call

__all__ = ["Capture", "LiveOutput", "OutputLog", "Recording"]

_CHUNK_BYTES = 65536
_FREE_BYTES = 1_000_000
_PACE_S = 0.001
_PACE_LIMIT_S = 0.05
_SLOWER_EVERY_BYTES = 100_000_000
_DRAIN_BYTES = 1 << 20
_LIVE_EVERY_S = 0.05
_HELD_CHARACTERS = 64

_UNFINISHED_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*|[()])?\Z")


class OutputLog:
    """The newest bytes of a stream, addressed by their offset in the whole stream.

    Parameters:
        limit_bytes: maximum number of bytes to keep.
    """

    __slots__ = ("_kept", "limit_bytes", "total")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.total = 0
        """Number of bytes fed in total."""
        self._kept = bytearray()

    @property
    def first(self) -> int:
        """Offset of the oldest byte that is kept."""
        return self.total - min(len(self._kept), self.limit_bytes)

    def feed(self, data: bytes) -> None:
        """Append data. Only the newest `limit_bytes` bytes remain readable; older bytes are dropped in batches."""
        self.total += len(data)
        self._kept += data[-self.limit_bytes :] if self.limit_bytes else b""
        if len(self._kept) > 2 * self.limit_bytes:
            del self._kept[: len(self._kept) - self.limit_bytes]

    def read(self, offset: int, limit_bytes: int) -> tuple[int, bytes]:
        """Return the actual start offset, and at most `limit_bytes` bytes from there.

        The start offset is `offset`, or the offset of the oldest kept byte if that is greater.
        """
        start = min(max(offset, self.first), self.total)
        index = len(self._kept) - (self.total - start)
        return start, bytes(self._kept[index : index + limit_bytes])

    def last(self, limit_bytes: int) -> bytes:
        """Return at most the newest `limit_bytes` bytes."""
        return self.read(self.total - limit_bytes, limit_bytes)[1]


class Recording:
    """The first and last bytes of a stream, and the number of bytes omitted between them.

    Parameters:
        limit_bytes: maximum number of bytes to keep, half of them from the beginning.
    """

    __slots__ = ("_head", "_head_bytes", "_tail", "total")

    def __init__(self, limit_bytes: int) -> None:
        self._head_bytes = limit_bytes // 2
        self._head = bytearray()
        self._tail = OutputLog(limit_bytes - self._head_bytes)
        self.total = 0
        """Number of bytes fed in total."""

    def feed(self, data: bytes) -> None:
        """Append data."""
        self.total += len(data)
        room = self._head_bytes - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail.feed(data)

    def text(self) -> str:
        """Return the kept bytes as text; one line replaces the bytes omitted between them, if any."""
        head = bytes(self._head)
        tail = self._tail.last(self._tail.limit_bytes)
        left_out = self.total - len(head) - len(tail)
        if not left_out:
            return readable(head + tail)
        cut = unfinished(head)
        head = head[: len(head) - cut]
        begin = next((n for n, byte in enumerate(tail[:4]) if byte & 0xC0 != 0x80), 0)
        left_out += cut + begin  # the parts of a character that was cut
        return f"{readable(head)}\n[… {left_out:,} bytes omitted …]\n{readable(tail[begin:])}"


class Capture:
    """Reader of a pipe or pseudo-terminal on the running loop.

    Parameters:
        fd: descriptor of the read end. The `Capture` owns the descriptor and closes it at end of file, in `drain` or
            in `close`.
        feed: called with each chunk of data that has been read.
    """

    def __init__(self, fd: int, feed: Callable[[bytes], object]) -> None:
        self._fd = fd
        self._feed = feed
        self._read = 0
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._open = True
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._on_readable)

    def _take(self) -> bool:
        """Read a chunk of data if available, and return whether data was read."""
        try:
            data = os.read(self._fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # a pseudo-terminal that no process has open
            data = b""
        if not data:
            self.close()
            return False
        self._read += len(data)
        self._feed(data)
        return True

    def _on_readable(self) -> None:
        if self._take() and self._open and self._read > _FREE_BYTES:
            self._loop.remove_reader(self._fd)
            pace_s = min(_PACE_S * (1 + self._read // _SLOWER_EVERY_BYTES), _PACE_LIMIT_S)
            self._pause = self._loop.call_later(pace_s, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        if self._open:
            self._loop.add_reader(self._fd, self._on_readable)

    def drain(self) -> None:
        """Read a bounded amount of available data without waiting, then close."""
        goal = self._read + _DRAIN_BYTES
        while self._open and self._read < goal and self._take():
            pass
        self.close()

    def close(self) -> None:
        """Stop reading and close the descriptor. Idempotent."""
        if not self._open:
            return
        self._open = False
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


class LiveOutput:
    """Stream of a program's output to the output of a tool call, up to a limit.

    Parameters:
        call: the tool call that the output is streamed to.
        limit_bytes: maximum number of bytes to stream; if the output exceeds the limit, a line notes the truncation.
    """

    def __init__(self, call: Call, limit_bytes: int) -> None:
        self._call = call
        self._room = limit_bytes
        self._pending = bytearray()
        self._held = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._cut = False

    def feed(self, data: bytes) -> None:
        """Add a chunk of output, which is streamed shortly afterwards."""
        if self._cut:
            return
        self._pending += data[: self._room]
        self._cut = len(data) > self._room
        self._room -= min(len(data), self._room)
        if self._timer is None:
            self._timer = self._loop.call_later(_LIVE_EVERY_S, self._show)

    def _show(self, *, last: bool = False) -> None:
        self._timer = None
        text = self._held + self._decoder.decode(bytes(self._pending), last)
        self._pending.clear()
        self._held = ""
        unfinished = _UNFINISHED_ESCAPE.search(text, max(0, len(text) - _HELD_CHARACTERS))
        if unfinished is not None and not last:
            self._held = unfinished[0]
            text = text[: unfinished.start()]
        text = plain(text)
        if self._cut and not self._room:
            self._room = -1
            text += "\n[live output truncated; the result contains the end]\n"
        if text:
            with contextlib.suppress(RunClosed, Interrupted):  # the run has ended
                _ = self._call.output(text)

    def close(self) -> None:
        """Stream the remaining output."""
        if self._timer is not None:
            self._timer.cancel()
        self._show(last=True)
