"""Memory that grows: what is done again and again takes more each time, and nothing gives it back.

One run says nothing about memory: caches, pools and imports keep what they made. So it is done a few times until all of
that is there, then a few times more. Lines of code whose memory grew **every** time are told, if they make up half a
kilobyte together; the interpreter itself keeps a name now and then. That finds what is kept by us, by the code under
test and by the libraries between; it does not find what grows only now and then, and what C code takes for itself.
"""

from __future__ import annotations

import gc
import linecache
import logging
import tracemalloc
from collections.abc import Callable
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["grown"]

_WARM_UP = 3
_TOLD = 5
_LEAST_BYTES = 16
_ENOUGH_BYTES = 512
_Place = tuple[str, int]
_NOT_OURS = (tracemalloc.__file__, linecache.__file__, __file__, "<frozen", "<unknown>")


def grown(work: Callable[[], object], *, repeat: int) -> list[str]:
    """Do something `repeat` times, and a few times before; the lines of code whose memory grew every time, for people.

    Parameters:
        work: what is done. It makes its own event loop, if it needs one.
        repeat: the more, the surer; 5 and more are worth it.
    """
    for _ in range(_WARM_UP):
        _do(work)
    sizes: list[dict[_Place, int]] = []
    with _traced():
        for _ in range(repeat + 1):
            _do(work)
            sizes.append(_sizes())
    growing = _growing(sizes)
    if sum(by_bytes for by_bytes, _ in growing) < _ENOUGH_BYTES:
        return []
    return [
        f"{name}:{line}: about {by_bytes:,} bytes more each time: {linecache.getline(name, line).strip()}"
        for by_bytes, (name, line) in growing[:_TOLD]
    ]


def _do(work: Callable[[], object]) -> None:
    work()
    for handler in logging.getLogger().handlers:
        if hasattr(handler, "records") and hasattr(handler, "reset"):
            handler.reset()  # pytest's own, which keeps what a test logs until it ends
    gc.collect()


@contextmanager
def _traced() -> Iterator[None]:
    was_on = tracemalloc.is_tracing()
    if not was_on:
        tracemalloc.start()
    try:
        yield
    finally:
        if not was_on:
            tracemalloc.stop()


def _sizes() -> dict[_Place, int]:
    """Bytes that are held now, by the line that took them."""
    found: dict[_Place, int] = {}
    for statistic in tracemalloc.take_snapshot().statistics("lineno"):
        frame = statistic.traceback[0]
        if not frame.filename.startswith(_NOT_OURS):
            found[frame.filename, frame.lineno] = statistic.size
    return found


def _growing(sizes: list[dict[_Place, int]]) -> list[tuple[int, _Place]]:
    """Places that hold more each time, those first that grow fastest."""
    growing = []
    for place, last in sizes[-1].items():
        steps = [after.get(place, 0) - before.get(place, 0) for before, after in pairwise(sizes)]
        if all(step >= _LEAST_BYTES for step in steps):
            growing.append(((last - sizes[0].get(place, 0)) // len(steps), place))
    return sorted(growing, reverse=True)
