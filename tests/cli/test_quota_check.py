"""The line of ``holdfast doctor`` about quotas: what each principal may use, and by how much that may be exceeded."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest

from holdfast.runtime.processes import cgroup_delegation
from holdfast.runtime.processes.cgroup_delegation import ProgramCgroups
from tests.cli.processes import run

QUOTAS = {
    "HOLDFAST_PRINCIPAL_PROGRAM_MEMORY_BYTES": str(2 << 30),
    "HOLDFAST_PRINCIPAL_PROGRAM_PROCESSES": "1500",
    "HOLDFAST_PRINCIPAL_PROGRAM_FILES": "4000",
    "HOLDFAST_PRINCIPAL_DISK_BYTES": str(10 << 30),
    "HOLDFAST_PRINCIPAL_INODES": "200000",
    "HOLDFAST_PORT": "9",
}
FILES_AND_DISK = "4,000 open files, 10 GiB and 200,000 files on disk, checked every 0.1 s, so exceeded by at most about"
DURING_A_WALK = "(and 100 MiB for each 10,000 files in a workspace)"


def quotas_of(folder: Path) -> str:
    checks = json.loads(run("doctor", "--json", folder=folder, **QUOTAS).stdout)["checks"]
    [found] = [check["found"] for check in checks if check["name"] == "program quotas"]
    assert isinstance(found, str)
    return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a delegated cgroup, whose speeds are known."""
    monkeypatch.setattr(cgroup_delegation, "take_cgroups", lambda: "none is delegated")
    monkeypatch.setattr("holdfast.cli.doctor._memory_speed", lambda: float(4 << 30))
    monkeypatch.setattr("holdfast.cli.doctor._disk_speed", lambda: float(1 << 30))
    monkeypatch.setattr("holdfast.cli.doctor._walk_speed", lambda: 102_400.0)


@pytest.mark.usefixtures("machine")
def test_measured_quotas_are_shown_with_their_excess_and_that_of_a_walk(tmp_path: Path) -> None:
    assert quotas_of(tmp_path) == (
        f"each principal: 2 GiB of memory, 1,500 processes, {FILES_AND_DISK} 1 GiB of memory and 256 MiB on disk "
        f"{DURING_A_WALK}, and what starts within 0.25 s "
        "(the kernel enforces memory and processes in a delegated cgroup; here, none is delegated)"
    )


@pytest.mark.usefixtures("machine")
def test_quotas_that_the_kernel_enforces_are_not_exceeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = ProgramCgroups(str(tmp_path), frozenset({"memory", "pids"}))
    monkeypatch.setattr(cgroup_delegation, "take_cgroups", lambda: both)
    assert quotas_of(tmp_path) == (
        "each principal: 2 GiB of memory and 1,500 processes, enforced by the kernel (cgroup v2); "
        f"{FILES_AND_DISK} 256 MiB on disk {DURING_A_WALK}, and what starts within 0.25 s"
    )


@pytest.mark.usefixtures("machine")
def test_a_full_disk_does_not_end_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> float:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("holdfast.cli.doctor._walk_speed", full)
    assert "an amount on disk that could not be measured (No space left on device), and what" in quotas_of(tmp_path)


def test_the_excess_is_measured_on_this_machine(tmp_path: Path) -> None:
    amount = r"[\d.,]+ (KiB|MiB|GiB)"
    assert re.search(rf"{amount} on disk \(and {amount} for each 10,000 files in a workspace\)", quotas_of(tmp_path))
