"""A kill looks until a scope was found empty twice in a row: who is struck may have started others just before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.runtime.processes import tags as process_tags

Looks = list[list[tuple[int, int]]]
Told = dict[int, tuple[list[int], list[int]]]


@pytest.fixture(autouse=True)
def everybody_can_be_struck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tags, "_strike", lambda pid, tag, carried: True)


def chased(looks: Looks, tags: list[int], *, bound_s: float = 60.0) -> tuple[list[Told], int]:
    """What was told after looks that find this, and how many looks there were."""
    told: list[Told] = []
    left: Iterator[list[tuple[int, int]]] = iter(looks)
    count = 0

    def look() -> list[tuple[int, int]]:
        nonlocal count
        count += 1
        return next(left)

    process_tags._Chase(lambda pid, tag: True, bound_s, told.append).run(tags, look, list)
    return told, count


def test_two_looks_in_a_row_that_find_nobody_prove_that_nobody_is_left() -> None:
    assert chased([[], []], [1]) == ([{1: ([], [])}], 2)


def test_who_was_missed_by_one_look_is_found_by_the_next() -> None:
    told, count = chased([[(10, 1)], [], [(11, 1)], [], []], [1])
    assert told[-1] == {1: ([10, 11], [])}
    assert count == 5


def test_each_scope_is_told_once_and_as_soon_as_it_is_empty() -> None:
    told, count = chased([[(10, 1), (20, 2)], [(20, 2)], [], [(21, 2)], [], []], [1, 2])
    done = [each for each in told if each]
    assert done == [{1: ([10], [])}, {2: ([20, 21], [])}]
    assert count == 6


def test_who_is_still_there_at_the_bound_is_named() -> None:
    told, _ = chased([[(10, 1)]] * 3, [1], bound_s=0.0)
    assert told == [{1: ([], [10])}]
