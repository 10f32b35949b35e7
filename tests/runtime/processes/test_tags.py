"""Looks at all processes: what they prove, and what they do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.runtime.adoption.kill_passes import KillPasses
from holdfast.runtime.processes import procfs
from holdfast.runtime.processes import tags as process_tags
from holdfast.runtime.processes.seal import Seal

TAG = process_tags.make_tag(1000, 1, 7)


class Machine:
    """Stands for a kernel: while anybody looks, new processes are started; the newest alone lives.

    Parameters:
        births: how many are started while one is looked at.
        in_all: how many are started at all.
        tag: of all of them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, births: int, in_all: float, tag: int = TAG) -> None:
        self.newest = 100
        self.killed: list[int] = []
        self._births = births
        self._last = self.newest + in_all
        self._tag = tag
        monkeypatch.setattr(procfs, "all_pids", lambda: iter([1, self.newest]))
        monkeypatch.setattr(process_tags, "_newest_pid", lambda: self.newest)
        monkeypatch.setattr(process_tags, "tag_of", self.tag_of)
        monkeypatch.setattr(process_tags, "_strike", self.strike)

    def tag_of(self, pid: int, carrier: int = 0) -> int | None:
        for _ in range(self._births):
            if self.newest < self._last:
                self.newest += 1
        return None if pid == 1 else self._tag

    def strike(self, pid: int, tag: int, carried: object) -> bool:
        if pid != self.newest or pid in self.killed:
            return False
        self.killed.append(pid)
        return True


def kill(told: Callable[[dict[int, tuple[list[int], list[int]]]], object]) -> None:
    process_tags.kill(1, (), 10, {TAG: []}, 0.25, told, sealed=True)


def test_nothing_is_told_of_a_scope_whose_bomb_is_faster_than_any_look(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, births=1, in_all=float("inf"))
    told: dict[int, Any] = {}
    kill(told.update)
    assert told == {}


def test_others_wait_for_no_bomb_that_is_faster_than_any_look(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, births=1, in_all=float("inf"))
    told: list[dict[int, Any]] = []
    kill(told.append)
    assert told == [{}], "the next pass begins while this one still looks"


def test_a_look_goes_on_until_it_has_caught_up(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, births=1, in_all=5000)
    told: dict[int, Any] = {}
    kill(told.update)
    assert told == {TAG: (machine.killed, [])}
    assert machine.newest == machine.killed[-1] == 5100


def test_starts_of_others_are_no_reason_to_wait_once_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, births=1, in_all=5000, tag=process_tags.make_tag(1000, 1, 8))
    told: dict[int, Any] = {}
    kill(told.update)
    assert told == {TAG: ([], [])}


class KillerHere:
    """Stands for the process host: the kill is done in this thread."""

    def new_killer(self, carrier: int, sealed: bool, tags: Any, bound_s: float, told: Any) -> KillerHere:
        process_tags.kill(1, (), carrier, tags, bound_s, told, sealed=sealed)
        told(None)
        return self

    def submit(self) -> bool:
        return True


def test_what_was_never_caught_up_with_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, births=1, in_all=float("inf"))
    seal = Seal(10, 0, sealed=True, gave_up_privileges=False)
    passes = KillPasses(KillerHere(), seal, lambda: None, lambda tags: None)  # type: ignore[arg-type]
    assert asyncio.run(passes.ask({TAG: []}, 0.25).wait()).outcome == "unknown"
