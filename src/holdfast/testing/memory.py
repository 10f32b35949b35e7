"""Memory that grows: what is done again and again leaves more behind each time, and nothing gives it back.

One run says nothing about memory: caches, pools and imports keep what they made. So it is done a few times until all of
that is there, then a few times more, and what is there is counted after each: objects by their class, and what every
list, dict, set and deque holds. What has grown **every** time is told, and nothing else.

That finds what is kept by us, by the code under test and by the libraries between. It does not find what grows only now
and then, nor what C code takes for itself; a cache that takes a new entry with every run grows, too, until it is full.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

__all__ = ["grown"]

_WARM_UP = 3
_TOLD = 5
_Census = tuple[dict[str, int], dict[int, int]]
_CONTAINERS = (list, dict, set, deque)
_PLAIN = frozenset(sys.stdlib_module_names)


def grown(work: Callable[[], object], *, repeat: int) -> list[str]:
    """Do something `repeat` times, and a few times before; what grew every time, each as a line for people.

    Parameters:
        work: what is done. It makes its own event loop, if it needs one.
        repeat: the more, the surer; 5 and more are worth it.
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
    telling = {name: more for name, more in classes.items() if name.partition(".")[0] not in _PLAIN} or classes
    return (homes + [f"about {more:,} more {name} each time" for name, more in telling.items()])[:_TOLD]


def _do(work: Callable[[], object]) -> None:
    work()
    for handler in logging.getLogger().handlers:
        if hasattr(handler, "records") and hasattr(handler, "reset"):
            handler.reset()  # pytest's own, which keeps what a test logs until it ends
    gc.collect()


def _count(by_class: dict[str, int], held: dict[int, int]) -> None:
    """Fill in how many objects of each class there are, and how much each container holds.

    Dicts of numbers and names only are none that the collector tracks: they do not count themselves.
    """
    for one in gc.get_objects():
        kind = type(one)
        name = f"{kind.__module__}.{kind.__qualname__}"
        by_class[name] = by_class.get(name, 0) + 1
        if isinstance(one, _CONTAINERS):
            held[id(one)] = len(one)


def _growing(counts: list[dict[Any, int]]) -> dict[Any, int]:
    """What is more each time, with how much; those first that grow fastest."""
    growing = {}
    for key, last in counts[-1].items():
        known = [count.get(key, -1) for count in counts]
        if known[0] >= 0 and all(before < after for before, after in pairwise(known)):
            growing[key] = (last - known[0]) // (len(counts) - 1)
    return dict(sorted(growing.items(), key=lambda one: -one[1]))


def _home_of(number: int) -> str | None:
    """Where a container is kept, for people; None if it is not there any more."""
    found = next((one for one in gc.get_objects() if id(one) == number), None)
    if found is None:
        return None
    kind = type(found).__name__
    for name, owner in _names_of(found, gc.get_referrers(found)):
        return f"the {kind} {owner}.{name}"
    return f"a {kind}" if not found else f"a {kind} of {type(next(iter(found))).__name__}"


def _names_of(thing: object, holders: Iterable[object]) -> Iterable[tuple[str, str]]:
    """The names under which modules and objects have it."""
    for holder in holders:
        if not isinstance(holder, dict):
            names = [name for name in _slots(holder) if getattr(holder, name, None) is thing]
            yield from ((name, type(holder).__qualname__) for name in names)
            continue
        names = [name for name, value in holder.items() if value is thing and isinstance(name, str)]
        if "__name__" in holder and "__builtins__" in holder:
            yield from ((name, str(holder["__name__"])) for name in names)
        else:
            owners = [one for one in gc.get_referrers(holder) if getattr(one, "__dict__", None) is holder]
            yield from ((name, type(one).__qualname__) for name in names for one in owners)


def _slots(holder: object) -> list[str]:
    return [
        name
        for kind in type(holder).__mro__
        for name in (vars(kind).get("__slots__") or ())
        if isinstance(name, str) and not name.startswith("__")
    ]
