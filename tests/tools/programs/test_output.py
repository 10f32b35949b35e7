"""What is kept of a program's output: bounded, addressed, and nothing lost that was in the pipe."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.tools.plain_text import readable
from holdfast.tools.programs.output import Capture, OutputLog, Recording


def on_loops(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """On asyncio's own loop and on uvloop."""
    asyncio.run(scenario())
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


def test_a_drain_takes_what_is_in_the_pipe_though_somebody_holds_it() -> None:
    async def scenario() -> None:
        for close_first in (False, True):
            read, write = os.pipe()
            taken = bytearray()
            capture = Capture(read, taken.extend)
            os.write(write, b"x" * 60_000)
            if close_first:
                os.close(write)
            capture.drain()
            assert len(taken) == 60_000
            capture.close()
            if not close_first:
                os.close(write)

    on_loops(scenario)


def test_a_capture_reads_to_the_end_and_closes_its_descriptor() -> None:
    async def scenario() -> None:
        before = len(os.listdir("/proc/self/fd"))
        read, write = os.pipe()
        taken = bytearray()
        capture = Capture(read, taken.extend)
        total = 0
        os.set_blocking(write, False)
        async with asyncio.timeout(20):
            while total < 3_000_000:
                try:
                    total += os.write(write, b"x" * 65536)
                except BlockingIOError:
                    await asyncio.sleep(0)
            os.close(write)
            while len(taken) < total:
                await asyncio.sleep(0.001)
            while len(os.listdir("/proc/self/fd")) > before:
                await asyncio.sleep(0.001)
        capture.close()

    on_loops(scenario)


def test_one_that_is_closed_while_it_pauses_never_reads_again() -> None:
    async def scenario() -> None:
        read, write = os.pipe()
        capture = Capture(read, lambda data: None)
        capture._read = 10**12
        os.write(write, b"x")
        async with asyncio.timeout(30):
            while capture._pause is None:
                await asyncio.sleep(0)
        capture.close()
        again, more = os.pipe()  # takes the number that is free now
        os.write(more, b"y")
        await asyncio.sleep(0.1)  # longer than the pause
        assert os.read(again, 10) == b"y"
        for fd in (write, again, more):
            os.close(fd)

    on_loops(scenario)


pieces = st.lists(st.binary(max_size=40), max_size=20)


@given(pieces, st.integers(0, 50), st.integers(0, 200), st.integers(0, 60))
def test_a_log_has_the_newest_bytes_at_their_places(data: list[bytes], limit: int, offset: int, count: int) -> None:
    log = OutputLog(limit)
    for piece in data:
        log.feed(piece)
    whole = b"".join(data)
    assert log.total == len(whole) and log.first == max(0, len(whole) - limit)
    start, found = log.read(offset, count)
    assert found == whole[start : start + count]
    assert start == min(max(offset, log.first), log.total)
    assert log.last(count) == whole[max(log.first, len(whole) - count) :]
    assert len(log._kept) <= 2 * limit


@given(pieces, st.integers(2, 100))
def test_a_recording_has_the_first_and_the_last_bytes(data: list[bytes], limit: int) -> None:
    recording = Recording(limit)
    for piece in data:
        recording.feed(piece)
    whole = b"".join(data)
    text = recording.text()
    assert recording.total == len(whole)
    if len(whole) <= limit:
        assert text == readable(whole)
    else:
        assert " bytes omitted …]" in text


@given(st.text(st.sampled_from("aé漢😀"), min_size=30, max_size=60), st.integers(8, 24))
def test_no_character_is_cut_in_two(text: str, limit: int) -> None:
    recording = Recording(limit)
    recording.feed(text.encode())
    shown = recording.text()
    assert "\ufffd" not in shown
    head, note, tail = shown.split("\n")
    left_out = int(note.split()[1].replace(",", ""))
    assert text.startswith(head) and text.endswith(tail)
    assert left_out == len(text.encode()) - len(head.encode()) - len(tail.encode())


@given(st.binary(max_size=300))
def test_any_bytes_become_text_that_can_be_stored(data: bytes) -> None:
    text = readable(data)
    text.encode()
    assert not set(text) & {chr(code) for code in range(32) if chr(code) not in "\t\n\r"}


@pytest.mark.parametrize("size", [1_000_000])
@pytest.mark.parametrize("unit", [b"\x1b[", b"\x1b]", b"\r", b"a\r", b"\x1b", b"\x1b[;", b"\0", b"\xff"])
def test_no_output_makes_the_text_slow(unit: bytes, size: int) -> None:
    """A quadratic pattern would take minutes here; the timeout of the test is the bound."""
    readable(unit * (size // len(unit)))
