"""A walled program that ends at once is started like any other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.tools.sandbox.backends.linux import LinuxBackend
from tests.tools.sandbox.walled import run_walled

BACKEND = LinuxBackend()


@pytest.mark.skipif(BACKEND.probe() is not None, reason=f"no walls here: {BACKEND.probe()}")
def test_a_program_that_ended_before_anybody_heard_of_its_start_has_started(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        ended = list(threads.map(lambda _: run_walled("exit 7", folder=tmp_path, backend=BACKEND), range(120)))
    assert {one.returncode for one in ended} == {7}
