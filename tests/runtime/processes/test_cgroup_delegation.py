"""Which cgroup is used, from what the kernel shows. How they behave is tested in `tests/host/test_program_cgroups.py`.

A folder stands for the file system of cgroups: these tests say nothing about what the kernel does.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.runtime.processes import cgroup_delegation
from holdfast.runtime.processes.cgroup_delegation import Hierarchy, ProgramCgroups, find_delegated, find_hierarchy
from holdfast.runtime.processes.program_cgroup import count_event

SYSTEMD = "33 24 0:29 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
MIXED = (
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)
FORBIDDEN = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")


@pytest.mark.parametrize(
    ("mounts", "membership", "found"),
    [
        (SYSTEMD, "0::/a.slice/b.service\n", Hierarchy("/sys/fs/cgroup", "/sys/fs/cgroup/a.slice/b.service")),
        (MIXED, "4:memory:/x\n0::/\n", Hierarchy("/sys/fs/cgroup/unified", "/sys/fs/cgroup/unified")),
        (SYSTEMD.replace(" / ", " /outer ", 1), "0::/outer/a\n", Hierarchy("/sys/fs/cgroup", "/sys/fs/cgroup/a")),
        (SYSTEMD.replace("/sys/fs", "/a\\040b"), "0::/\n", Hierarchy("/a b/cgroup", "/a b/cgroup")),
        (SYSTEMD.replace(" / ", " /outer ", 1), "0::/other\n", "no cgroup v2 is mounted that contains this process"),
        (SYSTEMD, "0::/../other\n", "no cgroup v2 is mounted that contains this process"),
        ("", "0::/\n", "no cgroup v2 is mounted that contains this process"),
        (MIXED, "4:memory:/x\n", "the kernel has no cgroup v2"),
    ],
)
def test_own_cgroup_is_found_where_it_is_mounted(mounts: str, membership: str, found: Hierarchy | str) -> None:
    assert find_hierarchy(mounts, membership) == found


def make(folder: Path, *, kind: str = "domain", mark: bool = False) -> Path:
    folder.mkdir(parents=True)
    for name in ("cgroup.procs", "cgroup.subtree_control"):
        (folder / name).touch()
    if kind:
        (folder / "cgroup.type").write_text(kind + "\n")
    if mark:
        try:
            os.setxattr(folder, "user.delegate", b"1")
        except OSError:
            pytest.skip("the file system of the tests' folder keeps no attributes of users")
    return folder


def found(mount: Path, own: Path) -> str | None:
    """Return the name of the delegated cgroup, relative to the mount; None if there is none."""
    try:
        return os.path.relpath(find_delegated(Hierarchy(str(mount), str(own))), mount)
    except cgroup_delegation._Unusable as error:
        assert str(own) in str(error)
        return None


def test_a_cgroup_that_systemd_marked_is_delegated_and_so_is_the_one_above_a_subgroup(tmp_path: Path) -> None:
    mount = make(tmp_path / "mount", kind="")
    service = make(mount / "system.slice" / "a.service", mark=True)
    assert found(mount, service) == "system.slice/a.service"
    assert found(mount, make(service / "main")) == "system.slice/a.service"
    assert found(mount, make(service / "main" / "deeper")) is None, "somebody else manages what is between"


def test_the_root_of_a_namespace_is_delegated_and_that_of_the_machine_is_not(tmp_path: Path) -> None:
    container = make(tmp_path / "container")
    assert found(container, container) == "."
    assert found(container, make(container / "holdfast-server")) == "."
    machine = make(tmp_path / "machine", kind="")
    assert found(machine, machine) is None
    if os.geteuid() == 0:
        assert found(machine, make(machine / "x.scope")) is None, "root may write it, but that is no delegation"
    threaded = make(tmp_path / "threaded", kind="domain threaded")
    assert found(threaded, threaded) is None


def test_a_cgroup_of_this_user_below_that_of_another_is_delegated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = make(tmp_path / "mount", kind="")
    service = make(mount / "a.service")
    me = os.geteuid() or 1000
    owners = {str(service): me, str(service / "inner"): me}
    real = os.stat

    class Owned:
        def __init__(self, path: str) -> None:
            self.st_uid = owners.get(path, 0)

    monkeypatch.setattr(os, "geteuid", lambda: me)
    monkeypatch.setattr(os, "stat", lambda path, **more: Owned(str(path)) if not more else real(path))
    assert found(mount, service) == "a.service"
    inner = service / "inner"
    monkeypatch.setattr(os, "stat", real)
    make(inner)
    make(inner / "deeper")
    monkeypatch.setattr(os, "stat", lambda path, **more: Owned(str(path)) if not more else real(path))
    assert found(mount, inner / "deeper") is None, "the user's service manager owns the one above, too"


@FORBIDDEN
def test_a_cgroup_that_is_mounted_read_only_or_belongs_to_another_is_not_delegated(tmp_path: Path) -> None:
    container = make(tmp_path / "container")
    (container / "cgroup.subtree_control").chmod(0o444)
    assert found(container, container) is None


def test_limits_are_those_of_the_enabled_controllers(tmp_path: Path) -> None:
    (tmp_path / "memory.swap.max").touch()
    both = ProgramCgroups(str(tmp_path), frozenset({"cpu", "memory", "pids"}))
    assert both.spec_of("alice", memory_bytes=10, processes=20)[1] == {
        b"memory.max": b"10",
        b"memory.swap.max": b"0",
        b"pids.max": b"20",
    }
    (tmp_path / "memory.swap.max").unlink()
    assert (
        b"memory.swap.max"
        not in ProgramCgroups(str(tmp_path), both.controllers).spec_of("alice", memory_bytes=10, processes=20)[1]
    ), "a kernel that does not count swap"
    one = ProgramCgroups(str(tmp_path), frozenset({"pids"}))
    assert one.spec_of("alice", memory_bytes=10, processes=20)[1] == {b"pids.max": b"20"}


def test_no_name_of_an_owner_leads_elsewhere_or_to_the_cgroup_of_another(tmp_path: Path) -> None:
    cgroups = ProgramCgroups(str(tmp_path), frozenset({"pids"}))
    owners = ["alice", "al/ice", "al.ice", "../../x", "", "cgroup.procs", "ä" * 300, "\udcff", "alice 1"]
    paths = [Path(os.fsdecode(cgroups.spec_of(owner, memory_bytes=1, processes=1)[0])) for owner in owners]
    assert {path.parent for path in paths} == {tmp_path}
    assert len({path.name for path in paths}) == len(owners)
    assert all(len(path.name) < 60 and ".." not in path.name for path in paths)
    assert cgroups.used("alice", "memory") == 0


def test_events_are_read_by_name(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("low 0\noom 2\noom_kill 3\noom_group_kill 1\n")
    folder = os.fsencode(tmp_path)
    assert [count_event(folder, b"memory.events", name) for name in (b"oom", b"oom_kill", b"high")] == [2, 3, 0]
    assert count_event(folder, b"missing", b"oom") == 0
