"""Packs: consecutive events or transcript entries, encoded as one body that a row stores.

Packs of events have two forms, distinguished by the first byte. Appends use the plain form, which has a line
``<kind> <json>`` for each event and is the cheapest to write. Merged appends of a run use the compact form, which
begins with `_COMPACT`. The rest is deflated: one line of JSON that describes groups of consecutive events, then the
bytes that differ between events. A group of deltas stores the kind, and the JSON around the time and the text, once.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from holdfast.protocol.events import Stored, encode_json
from holdfast.protocol.messages import Entry

__all__ = [
    "entries_after",
    "journal",
    "merge_packs",
    "pack_entries",
    "pack_events",
    "unpack_entries",
    "unpack_events",
]

_COMPACT: Final = b"\x01"
"""First byte of the compact form. A plain pack begins with the first letter of a kind."""
_LEVEL: Final = 1
_AT: Final = b'"at":'
_TEXT: Final = b'"text":"'
_TAIL: Final = b'"}'
_DIGITS: Final = 7
_DIGITS_OF_WHOLE: Final = 11
_TICKS: Final = 10**_DIGITS
"""Ticks per second: times of deltas are in units of 0.1 µs, the precision of a float that holds a current time."""
_NOT_OF_A_RUN: Final = ("message.accepted", "history.edited")


def journal(packs: Iterable[Iterable[Stored]]) -> Iterable[Stored]:
    """Return the events of one run from its packs, without the events of the session that these packs also contain."""
    return (event for pack in packs for event in pack if event.kind not in _NOT_OF_A_RUN)


_entry_decoder = msgspec.json.Decoder(Entry)


def pack_events(events: Iterable[Stored]) -> bytes:
    """Return one body for consecutive events, with a line ``<kind> <json>`` for each event.

    The JSON contains no line breaks, and kinds contain no spaces.
    """
    return b"\n".join([b"%b %b" % (kind.encode(), body) for _, kind, body in events])


class _Group(msgspec.Struct, array_like=True, gc=False):
    """Consecutive events of one kind in a compact pack.

    Parameters:
        sizes: bytes of each event's text or, if `around` is empty, of each event's JSON.
        around: for deltas, the JSON before the time, and between the time and the text.
        ticks: for deltas, the time of the first event, then the time of each event after the previous one.
    """

    kind: str
    sizes: list[int]
    around: tuple[str, ...] = ()
    ticks: list[int] = []


_groups_decoder = msgspec.json.Decoder(list[_Group])


def merge_packs(packs: Iterable[bytes]) -> bytes:
    """Return one body for consecutive packs in the plain form: in the compact form if it is the shorter one."""
    plain = b"\n".join(packs)
    groups: list[_Group] = []
    parts: list[bytes] = []
    start = middle = b""
    before = 0
    for line in plain.split(b"\n"):
        found = _split(line, start, middle) if start and line.startswith(start) else None
        if found is None:
            kind, _, text = line.partition(b" ")
            around = _around(text)
            if around is not None:
                start, middle = b"%b %b" % (kind, around[0]), around[1]
                found = _split(line, start, middle)
            if around is None or found is None:
                start = b""
                groups.append(_Group(kind.decode(), []))
            else:
                groups.append(_Group(kind.decode(), [], (around[0].decode(), around[1].decode()), []))
            before = 0
        group = groups[-1]
        if found is not None:
            ticks, text = found
            group.ticks.append(ticks - before)
            before = ticks
        group.sizes.append(len(text))
        parts.append(text)
    compact = _COMPACT + zlib.compress(b"%b\n%b" % (encode_json(groups), b"".join(parts)), _LEVEL)
    return compact if len(compact) < len(plain) else plain


def _around(body: bytes) -> tuple[bytes, bytes] | None:
    """Return the JSON of what may be a delta up to its time, and between its time and its text.

    Takes time proportional to the size of the body, whatever it contains.
    """
    at = body.find(_AT)
    after = body.find(b",", at)
    text = body.find(_TEXT, after)
    if at < 0 or after < 0 or text < 0:
        return None
    return body[: at + len(_AT)], body[after : text + len(_TEXT)]


def _split(line: bytes, start: bytes, middle: bytes) -> tuple[int, bytes] | None:
    """Return the time in ticks and the text of a delta's line; None if they would not give its exact JSON.

    Parameters:
        line: the line, which begins with `start`.
        start, middle: the line up to the time, and between the time and the text.
    """
    end = line.find(middle, len(start))
    if end < 0 or not line.endswith(_TAIL, end + len(middle)):
        return None
    whole, _, fraction = line[len(start) : end].partition(b".")
    if not (whole.isdigit() and fraction.isdigit() and len(whole) <= _DIGITS_OF_WHOLE and len(fraction) <= _DIGITS):
        return None
    if (whole[:1] == b"0" != whole) or (fraction[-1:] == b"0" != fraction):
        return None
    return int(whole + fraction.ljust(_DIGITS, b"0")), line[end + len(middle) : -len(_TAIL)]


def _seconds(ticks: int) -> bytes:
    """Format a time as in the JSON of events."""
    whole, fraction = divmod(ticks, _TICKS)
    return b"%d.%b" % (whole, (b"%07d" % fraction).rstrip(b"0") or b"0")


def _expand(last_seq: int, body: bytes) -> list[Stored]:
    """Return the events of a compact pack."""
    header, _, rest = zlib.decompress(memoryview(body)[1:]).partition(b"\n")
    groups = _groups_decoder.decode(header)
    seq = last_seq - sum([len(group.sizes) for group in groups])
    out = []
    start = 0
    for group in groups:
        head, middle = (part.encode() for part in group.around or ("", ""))
        ticks = 0
        for index, size in enumerate(group.sizes):
            seq += 1
            json = rest[start : start + size]
            start += size
            if group.around:
                ticks += group.ticks[index]
                json = b"".join((head, _seconds(ticks), middle, json, _TAIL))
            out.append(Stored(seq, group.kind, json))
    return out


def unpack_events(last_seq: int, body: bytes) -> list[Stored]:
    """Return the events of a pack of either form that ends at ``last_seq``."""
    if body[:1] == _COMPACT:
        return _expand(last_seq, body)
    lines = body.split(b"\n")
    seq = last_seq - len(lines)
    out = []
    for line in lines:
        seq += 1
        kind, _, json = line.partition(b" ")
        out.append(Stored(seq, kind.decode(), json))
    return out


def pack_entries(entries: Iterable[Entry]) -> bytes:
    """Return one body for consecutive transcript entries, with a line of JSON for each entry."""
    return b"\n".join([encode_json(entry) for entry in entries])


class _Numbered(msgspec.Struct):
    """The number of an entry, decoded without its other fields."""

    n: int = 0


_number_decoder = msgspec.json.Decoder(_Numbered)


def entries_after(body: bytes, after: int) -> Iterator[tuple[Entry, int]]:
    """Yield the entries of a pack with n > `after`, decoded lazily, each with the length of its JSON in bytes."""
    start = 0
    while start < len(body):
        end = body.find(b"\n", start)
        line = memoryview(body)[start : len(body) if end < 0 else end]
        if _number_decoder.decode(line).n > after:
            yield _entry_decoder.decode(line), len(line)
        start += len(line) + 1


def unpack_entries(body: bytes) -> list[Entry]:
    """Return the entries of a pack."""
    return [_entry_decoder.decode(line) for line in body.split(b"\n")]
