"""Detector of growing memory: repeated work that leaves more objects behind each time.

A single run is not enough: caches, pools and imports keep the objects that they create. So the work is repeated a few
times to fill them, then a few times more to measure. After each run, the detector counts objects by class, and items in
each list, dict, set and deque that the garbage collector tracks. It reports only counts that grew with **every** run.

The detector finds objects kept by Holdfast, by the code under test, and by other libraries. It does not find: growth in
only some of the runs; memory allocated by C code; a growing dict of only strings and numbers (the collector does not
track it); a container that is replaced by a larger one; or a string that is replaced by a longer one. Caches of the
standard library and records of pytest's fixtures are ignored. A cache of another library, or a ``deque(maxlen=…)``,
that grows with every run is reported although it is bounded.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

__all__ = ["grown"]

_WARM_UP = 3
_TOLD = 5
_Census = tuple[dict[str, int], dict[int, int]]
_CONTAINERS = (list, dict, set, deque)
_PLAIN = frozenset(sys.stdlib_module_names) | {"_pytest", "pytest"}


def grown(work: Callable[[], object], *, repeat: int) -> list[str]:
    """Run `work` repeatedly, and return a line for each class or container that grew with every counted run.

    A few warm-up runs precede the counted runs.

    Parameters:
        work: function to run; called without arguments. It must create its own event loop if it needs one.
        repeat: number of counted runs. More runs give more certainty; use 5 or more.
    """
    censuses: list[_Census] = [({}, {}) for _ in range(repeat + 1)]  # made before, so that they do not count
    for _ in range(_WARM_UP):
        _do(work)
    for census in censuses:
        _do(work)
        _count(*census)
    classes = _growing([by_class for by_class, _ in censuses])
    homes = [
        f"{home} holds about {more:,} more each time"
        for one, more in _growing([held for _, held in censuses]).items()
        if (home := _home_of(one)) is not None
    ]
    told = [f"about {more:,} more {name} each time" for name, more in classes.items() if not _is_plain(name)]
    return (homes + told)[:_TOLD]


def _do(work: Callable[[], object]) -> None:
    work()
    for handler in logging.getLogger().handlers:
        if hasattr(handler, "records") and hasattr(handler, "reset"):
            handler.reset()  # pytest's own, which keeps what a test logs until it ends
    gc.collect()


def _count(by_class: dict[str, int], held: dict[int, int]) -> None:
    """Count the objects of each class in ``by_class``, and the items of each container in ``held``.

    The collector does not track a dict of only names and numbers, so these two dicts do not count themselves.
    """
    for one in gc.get_objects():
        kind = type(one)
        name = f"{kind.__module__}.{kind.__qualname__}"
        by_class[name] = by_class.get(name, 0) + 1
        if isinstance(one, _CONTAINERS):
            held[id(one)] = len(one)


def _growing(counts: list[dict[Any, int]]) -> dict[Any, int]:
    """Return the keys whose count grew each time, with the average growth, fastest first."""
    growing = {}
    for key, last in counts[-1].items():
        known = [count.get(key, -1) for count in counts]
        if known[0] >= 0 and all(before < after for before, after in pairwise(known)):
            growing[key] = (last - known[0]) // (len(counts) - 1)
    return dict(sorted(growing.items(), key=lambda one: -one[1]))


def _is_plain(name: str) -> bool:
    """Whether a dotted name belongs to the standard library or to pytest."""
    return name.partition(".")[0] in _PLAIN


def _home_of(number: int) -> str | None:
    """Return a description of where a container is stored, or None if the container is gone or ignored."""
    found = next((one for one in gc.get_objects() if id(one) == number), None)
    if found is None:
        return None
    kind = type(found).__name__
    for owner, name in _names_of(found):
        if isinstance(owner, ModuleType):
            return None if _is_plain(owner.__name__) else f"the {kind} {owner.__name__}.{name}"
        if type(owner).__module__.startswith("_pytest."):
            return None
        return f"the {kind} {type(owner).__qualname__}.{name}"
    return f"a {kind}" if not found else f"a {kind} of {type(next(iter(found))).__name__}"


def _names_of(thing: object) -> Iterator[tuple[object, str]]:
    """Yield the modules and objects that have ``thing`` as an attribute, each with the attribute's name."""
    for holder in gc.get_referrers(thing):
        owners = gc.get_referrers(holder) if isinstance(holder, dict) else [holder]
        for owner in owners:
            attributes = getattr(owner, "__dict__", None)
            if isinstance(attributes, dict):
                yield from ((owner, str(name)) for name, value in attributes.items() if value is thing)
            yield from ((owner, name) for name in _slots(owner) if getattr(owner, name, None) is thing)


def _slots(owner: object) -> list[str]:
    slots = [vars(kind).get("__slots__") or () for kind in type(owner).__mro__]
    return [name for names in slots for name in names if isinstance(name, str) and not name.startswith("__")]
