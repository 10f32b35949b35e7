"""Running storms in the process of a test."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = ["run_storm", "sockets_may_be_left"]

T = TypeVar("T")


@contextmanager
def sockets_may_be_left() -> Iterator[None]:
    """The HTTP library leaves sockets to the garbage collector, and that is no error here.

    It leaves one when a connection is cut while it is made; and, after a server has died, those that were idle, if the
    next request, which closes them one by one, is cancelled.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


def run_storm(work: Coroutine[Any, Any, T]) -> T:
    """What it returns."""
    with sockets_may_be_left():
        return asyncio.run(work)
