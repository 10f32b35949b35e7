"""Packs: consecutive events or transcript entries, encoded as one body that a row stores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from holdfast.protocol.events import Stored, encode_json
from holdfast.protocol.messages import Entry

__all__ = ["entries_after", "journal", "pack_entries", "pack_events", "unpack_entries", "unpack_events"]

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


def unpack_events(last_seq: int, body: bytes) -> list[Stored]:
    """Return the events of a pack that ends at ``last_seq``."""
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
