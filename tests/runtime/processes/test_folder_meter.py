"""What a meter reports of a folder is as new as the order to measure that it answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.runtime.processes import folder_meter
from holdfast.runtime.processes.folder_meter import FolderMeter


def test_an_order_to_measure_is_answered_by_a_walk_that_began_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk that was under way may have counted files that are deleted by now."""
    meter, place = FolderMeter(0), (os.fsencode(tmp_path), 1 << 40, 1 << 30)
    meter.obey(("measure", "alice", place, 1))
    monkeypatch.setattr(folder_meter, "_SLICE_S", -1.0)
    assert not meter.look(0.0), "the walk has only begun"
    meter.obey(("measure", "alice", place, 2))
    monkeypatch.setattr(folder_meter, "_SLICE_S", 60.0)
    (under_way,), (later,) = meter.look(0.1), meter.look(0.2)
    assert (under_way[-1], later[-1]) == (1, 2)
    assert not meter.look(0.3) and not meter.busy
