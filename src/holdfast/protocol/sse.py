"""The Server-Sent Events codec: frame encoders and an incremental decoder, without I/O.

Two kinds of frame are not events of the log. A ``gap`` frame names the events that a reader missed. A ``closed`` frame
is the last frame of a stream that the server ends; the id of this frame is the cursor from which to resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from holdfast.errors import LimitExceeded
from holdfast.protocol.events import Gap, Stored

__all__ = [
    "KEEP_ALIVE",
    "Closed",
    "Frame",
    "FrameDecoder",
    "encode_closed",
    "encode_events",
    "encode_frame",
    "encode_gap",
]

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment line that keeps an idle connection open; readers ignore it."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_encode = msgspec.json.Encoder().encode


class Closed(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="closed"):
    """The last frame of a stream that the server ends; not an event of the log. Resume with ``after=<cursor>``.

    Parameters:
        reason: why the server ends the stream. ``unauthorized`` means that the key was revoked or the token has
            expired; resume with another credential.
        cursor: position after the last event that was sent.
    """

    reason: Literal["shutdown", "slow_reader", "unauthorized"]
    cursor: str


class Frame(NamedTuple):
    """A decoded frame: the stream's last id so far (may be empty), the event's name and the event's data."""

    id: str
    event: str
    data: bytes


def encode_frame(event: str, data: bytes, *, frame_id: str = "") -> bytes:
    """Encode one frame. `data` may contain line breaks; `event` and `frame_id` must not.

    Raises:
        ValueError: if `event` or `frame_id` contains a line break or NUL.
    """
    if any(character in event + frame_id for character in "\r\n\0"):
        raise ValueError("the name and id of a frame must be single lines without NUL")
    head = f"id: {frame_id}\n" if frame_id else ""
    lines = b"\n".join(b"data: " + line for line in data.splitlines() or [b""])
    return b"%b%b\n%b\n\n" % (head.encode(), b"event: " + event.encode(), lines)


def encode_events(events: Sequence[Stored], number: int) -> bytes:
    """Encode stored events of the session with this number as frames, joined for one write."""
    return b"".join(
        [
            b'id: %d-%d\nevent: %b\ndata: {"seq":%d,%b\n\n' % (seq, number, kind.encode(), seq, body[1:])
            for seq, kind, body in events
        ]
    )


def encode_gap(gap: Gap, number: int) -> bytes:
    """Encode a ``gap`` frame, whose id is the cursor after the gap."""
    return encode_frame("gap", _encode(gap), frame_id=f"{gap.until}-{number}")


def encode_closed(closed: Closed, *, retry_ms: int) -> bytes:
    """Encode a ``closed`` frame with the reconnection delay in milliseconds."""
    return b"retry: %d\n" % retry_ms + encode_frame("closed", _encode(closed), frame_id=closed.cursor)


class FrameDecoder:
    """Decodes the bytes of a stream, split into chunks anywhere, into frames. Use one decoder per connection.

    Parameters:
        limit_bytes: maximum size of a frame, in bytes.

    The attribute ``retry_ms`` is the last reconnection delay that the server sent, in milliseconds; None if the server
    sent none.
    """

    __slots__ = ("_cut", "_cut_size", "_data", "_event", "_id", "_limit", "_size", "_skip_lf", "_start", "retry_ms")

    def __init__(self, *, limit_bytes: int = 128_000_000) -> None:
        self._limit = limit_bytes
        self._cut: list[bytes] = []  # pieces of a line that is still incomplete
        self._cut_size = 0
        self._skip_lf = False
        self._start = True
        self._size = 0
        self._id = ""
        self._event = ""
        self._data: list[bytes] = []
        self.retry_ms: int | None = None

    def feed(self, chunk: bytes) -> list[Frame]:
        """Return the frames that `chunk` completes.

        Raises:
            LimitExceeded: if a frame is larger than the limit. Do not use the decoder afterwards.
        """
        if self._skip_lf and chunk:
            self._skip_lf = False
            chunk = chunk.removeprefix(b"\n")
        if self._start and chunk:
            chunk = b"".join([*self._cut, chunk])
            self._keep([])
            if len(chunk) < 3 and _BYTE_ORDER_MARK.startswith(chunk):
                self._keep([chunk])
                return []
            self._start = False
            chunk = chunk.removeprefix(_BYTE_ORDER_MARK)
        lines = chunk.splitlines()
        if chunk[-1:] in (b"\n", b"\r"):
            last = b""
            self._skip_lf = chunk[-1:] == b"\r"
        else:
            last = lines.pop() if lines else b""
        frames: list[Frame] = []
        if lines:
            if self._cut:
                lines[0] = b"".join([*self._cut, lines[0]])
                self._keep([])
            for line in lines:
                self._line(line, frames)
        if last:
            self._cut.append(last)
            self._cut_size += len(last)
        if self._size + self._cut_size > self._limit:
            raise LimitExceeded(f"a frame exceeds {self._limit} bytes")
        return frames

    def _keep(self, pieces: list[bytes]) -> None:
        self._cut = pieces
        self._cut_size = sum(map(len, pieces))

    def _line(self, line: bytes, frames: list[Frame]) -> None:
        if line:
            self._field(line)
            return
        if self._data:
            frames.append(Frame(self._id, self._event or "message", b"\n".join(self._data)))
            self._data = []
        self._event = ""
        self._size = 0

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._size += len(value)
        elif name == b"event":
            self._event = value.decode("utf-8", "replace")
        elif name == b"id":
            if b"\0" not in value:
                self._id = value.decode("utf-8", "replace")
        elif name == b"retry" and value.isdigit():
            self.retry_ms = int(value)
