"""The private names of the standard library that Holdfast uses exist in the Python that runs."""

from __future__ import annotations

import asyncio
import importlib
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from pkgutil import resolve_name
from typing import Any

import pytest

from tests.house.source_graph import STDLIB_INTERNALS


@contextmanager
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    try:
        yield made
    finally:
        made.close()


@contextmanager
def instance(make: Callable[[], Any]) -> Iterator[Any]:
    yield make()


EXAMPLES: dict[str, Callable[[], Any]] = {
    "asyncio.BaseEventLoop": loop,
    "multiprocessing.forkserver.ForkServer": lambda: instance(forkserver.ForkServer),
    "multiprocessing.resource_tracker.ResourceTracker": lambda: instance(resource_tracker.ResourceTracker),
    "threading.Condition": lambda: instance(threading.Condition),
    "threading.Event": lambda: instance(threading.Event),
    "threading.RLock": lambda: instance(threading.RLock),
    "threading.Thread": lambda: instance(threading.Thread),
}
"""Objects whose attributes their classes do not know."""


@pytest.mark.parametrize("module", STDLIB_INTERNALS)
def test_each_private_name_exists_in_this_python(module: str) -> None:
    names = importlib.import_module(module).PRIVATE_NAMES
    missing = [f"{owner}.{name}" for owner in names for name in names[owner] if not exists(owner, name)]
    assert not missing, f"Python {platform.python_version()} lacks {', '.join(missing)}, which {module} stands on"


def exists(owner: str, name: str) -> bool:
    if owner in EXAMPLES:
        with EXAMPLES[owner]() as example:
            return hasattr(example, name)
    return hasattr(resolve_name(owner), name)


def test_a_name_that_is_missing_is_noticed() -> None:
    assert not exists("asyncio.Handle", "_no_such_name")
    assert not exists("threading.Event", "_no_such_name")
