"""The SSE codec: what is encoded is decoded, however the bytes are cut."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import LimitExceeded
from holdfast.protocol.events import Gap, Stored, TextDelta, decode_event, encode_event
from holdfast.protocol.sse import (
    KEEP_ALIVE,
    Closed,
    Frame,
    FrameDecoder,
    encode_closed,
    encode_events,
    encode_frame,
    encode_gap,
)

line = st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]), min_size=1)
frames = st.lists(st.tuples(line, line, st.text(st.characters(exclude_categories=["Cs"]))), min_size=1, max_size=8)


def fed(data: bytes, cuts: list[int]) -> list[Frame]:
    decoder = FrameDecoder()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [frame for start, end in itertools.pairwise(edges) for frame in decoder.feed(data[start:end])]


@given(frames, st.lists(st.integers(min_value=0), max_size=12))
def test_frames_survive_any_cut(values: list[tuple[str, str, str]], cuts: list[int]) -> None:
    data = b"".join(encode_frame(event, text.encode(), frame_id=frame_id) for frame_id, event, text in values)
    normal = [Frame(i, event, b"\n".join(text.encode().splitlines())) for i, event, text in values]
    assert fed(data, cuts) == normal


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=5), st.lists(st.integers(0)))
def test_stored_events_come_back_with_their_cursor(texts: list[str], cuts: list[int]) -> None:
    stored = [
        Stored(seq, *encode_event(TextDelta(at=1.5, run_id="r_1", text=text))) for seq, text in enumerate(texts, 7)
    ]
    decoded = fed(encode_events(stored, 3), cuts)
    assert [(frame.id, frame.event) for frame in decoded] == [(f"{one.seq}-3", "text.delta") for one in stored]
    assert [msgspec.json.decode(frame.data, type=TextDelta) for frame in decoded] == list(map(decode_event, stored))


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_every_line_ending_of_the_standard_is_understood(end: bytes) -> None:
    data = end.join(
        [b"\xef\xbb\xbf: a comment", b"id:1", b"event: x", b"data:a", b"data: b", b"", b"data: c", b"", b""]
    )
    expected = [Frame("1", "x", b"a\nb"), Frame("1", "message", b"c")]
    for cut in range(len(data)):
        assert fed(data, [cut]) == expected
    assert fed(data, list(range(len(data)))) == expected


def test_a_comment_or_a_frame_without_data_is_no_frame() -> None:
    decoder = FrameDecoder()
    assert decoder.feed(KEEP_ALIVE + b"event: x\nid: 9\n\nretry: 250\n\nretry: soon\n\nid: a\0b\n\ndata\n\n") == [
        Frame("9", "message", b"")
    ]
    assert decoder.retry_ms == 250


def test_a_frame_that_is_too_large_is_refused() -> None:
    decoder = FrameDecoder(limit_bytes=100)
    decoder.feed(b"data: " + b"x" * 60)
    with pytest.raises(LimitExceeded):
        decoder.feed(b"x" * 60)
    decoder = FrameDecoder(limit_bytes=100)
    with pytest.raises(LimitExceeded):
        for _ in range(10):
            decoder.feed(b"data: " + b"x" * 20 + b"\n")


@pytest.mark.parametrize("bad", ["a\nb", "a\rb", "a\0b"])
def test_a_name_or_id_of_several_lines_cannot_be_encoded(bad: str) -> None:
    with pytest.raises(ValueError, match="single lines"):
        encode_frame(bad, b"")
    with pytest.raises(ValueError, match="single lines"):
        encode_frame("x", b"", frame_id=bad)


def test_gap_and_closed_frames_say_where_to_go_on() -> None:
    decoder = FrameDecoder()
    gap = Gap(after=3, until=8, reason="pruned")
    closed = Closed(reason="shutdown", cursor="9-4")
    first, second = decoder.feed(encode_gap(gap, 4) + encode_closed(closed, retry_ms=500))
    assert (first.id, first.event, msgspec.json.decode(first.data, type=Gap)) == ("8-4", "gap", gap)
    assert (second.id, second.event, msgspec.json.decode(second.data, type=Closed)) == ("9-4", "closed", closed)
    assert decoder.retry_ms == 500
