"""Notice that the reader of stdout is gone while nothing is written."""

from __future__ import annotations

import asyncio
import os
import select
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["until_reader_leaves"]

_STDOUT = 1


@asynccontextmanager
async def until_reader_leaves() -> AsyncIterator[None]:
    """Raise `BrokenPipeError` in the block as soon as stdout is a pipe that has lost its reader."""
    if not stat.S_ISFIFO(os.fstat(_STDOUT).st_mode):
        yield
        return
    loop = asyncio.get_running_loop()

    def on_ready() -> None:
        if _has_no_reader():
            scope.reschedule(loop.time())
        loop.remove_reader(_STDOUT)

    try:
        async with asyncio.timeout(None) as scope:
            loop.add_reader(_STDOUT, on_ready)
            try:
                yield
            finally:
                loop.remove_reader(_STDOUT)
    except TimeoutError:
        if scope.expired():
            raise BrokenPipeError from None
        raise


def _has_no_reader() -> bool:
    poll = select.poll()
    poll.register(_STDOUT, 0)
    return bool(poll.poll(0))
