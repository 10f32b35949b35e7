"""One principal's bombs are ended and told: each quota, and nothing else. All bombs are small and end by themselves."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.host.program_quotas import REACTION_S, shown_bytes
from holdfast.runtime.processes import procfs
from holdfast.runtime.processes.meter_link import MeterLink
from tests.host.placed_programs import MIB, Place, run, scope_of

pytestmark = pytest.mark.skipif(not procfs.supported(), reason="programs are watched only on Linux")

BOMBS: dict[str, tuple[str, dict[str, int], str]] = {
    "memory of one process": (
        "import time\nkept = []\nfor _ in range(200): kept.append(b'x' * (4 << 20)); time.sleep(0.01)\ntime.sleep(60)",
        {"memory_bytes": 200 * MIB},
        "of memory; the limit is 200 MiB",
    ),
    "memory of many processes": (
        "import os, time\n"
        "for number in range(12):\n"
        "    if os.fork() == 0:\n"
        "        kept = b'x' * (30 << 20); time.sleep(60)\n"
        "    time.sleep(0.02)\n"
        "time.sleep(60)",
        {"memory_bytes": 200 * MIB},
        "of memory; the limit is 200 MiB",
    ),
    "files in memory that nothing maps": (
        "import os, time\nfile = os.memfd_create('x')\nchunk = bytes(4 << 20)\n"
        "for _ in range(200): os.write(file, chunk); time.sleep(0.01)\ntime.sleep(60)",
        {"memory_bytes": 200 * MIB},
        "of memory; the limit is 200 MiB",
    ),
    "shared memory": (
        "import mmap, time\nshared = mmap.mmap(-1, 800 << 20)\n"
        "for _ in range(200): shared.write(b'x' * (4 << 20)); time.sleep(0.01)\ntime.sleep(60)",
        {"memory_bytes": 200 * MIB},
        "of memory; the limit is 200 MiB",
    ),
    "forks": (
        "import os, time\nfor _ in range(200): os.fork() == 0 and time.sleep(60)\ntime.sleep(60)",
        {"processes": 40},
        "processes and threads; the limit is 40",
    ),
    "threads": (
        "import _thread, time\n"
        "for _ in range(200): _thread.start_new_thread(time.sleep, (60,)); time.sleep(0.001)\ntime.sleep(60)",
        {"processes": 40},
        "processes and threads; the limit is 40",
    ),
    "descriptors": (
        "import os, time\nif os.fork(): time.sleep(60)\n"
        "for _ in range(900): os.open('/dev/null', 0); time.sleep(0.0005)\ntime.sleep(60)",
        {"files": 300},
        "open files; the limit is 300",
    ),
    "disk": (
        "import time\nfor number in range(200): open(f'f{number}', 'wb').write(bytes(1 << 20)); time.sleep(0.01)\n"
        "time.sleep(60)",
        {"disk_bytes": 40 * MIB},
        "; the limit is 40 MiB; delete files",
    ),
    "a file without a name": (
        "import os, time\nfile = open('f', 'wb', 0); os.unlink('f')\n"
        "for _ in range(200): file.write(bytes(1 << 20)); time.sleep(0.01)\ntime.sleep(60)",
        {"disk_bytes": 40 * MIB},
        "; the limit is 40 MiB; delete files",
    ),
    "inodes": (
        "import time\nfor number in range(20_000): open(f'f{number}', 'wb'); number % 50 or time.sleep(0.005)\n"
        "time.sleep(60)",
        {"inodes": 1000},
        "files and folders; the limit is 1,000; delete files",
    ),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_ended_and_its_result_says_why(tmp_path: Path, bomb: str) -> None:
    source, limits, why = BOMBS[bomb]

    async def body() -> None:
        place = Place(tmp_path, **limits)
        async with scope_of(place) as scope:
            bystander, watched_bystander = await place.start(scope, "import time; time.sleep(60)", principal="bob")
            process, watched = await place.start(scope, source)
            result = await process.wait_gone()
            assert (result.outcome, process.returncode) == ("gone", -9)
            assert watched.ended_because.endswith(why), watched.ended_because
            assert "alice" in watched.ended_because
            assert [(who, text.endswith(why)) for who, _, text in place.reports] == [("alice", True)]
            assert sum(place.quotas.ended.values()) == 1
            assert (bystander.returncode, watched_bystander.ended_because) == (None, "")

    run(body)


STEP = 4 * MIB
_STEPS = 250
GREEDY = {
    "memory_bytes": f"kept.append(b'x' * {STEP})",
    "disk_bytes": f"open(f'f{{number}}', 'wb').write(bytes({STEP}))",
}


@pytest.mark.parametrize("quota", GREEDY)
def test_the_overshoot_is_what_is_used_within_the_stated_time(tmp_path: Path, quota: str) -> None:
    """A step takes at least 10 ms; the bound is four times the stated one, as this machine may be busy."""
    source = (
        "import os, time\nkept = []\ncount = os.open('count', os.O_CREAT | os.O_WRONLY)\n"
        f"for number in range({_STEPS}):\n"
        f"    {GREEDY[quota]}; os.pwrite(count, b'%04d' % number, 0); time.sleep(0.01)\ntime.sleep(60)"
    )

    async def body() -> None:
        limit = 100 * MIB
        place = Place(tmp_path, **{quota: limit})
        async with scope_of(place) as scope:
            process, watched = await place.start(scope, source)
            await process.wait_gone()
            assert "the limit is 100 MiB" in watched.ended_because
        used = int((tmp_path / "count").read_bytes()) * STEP
        assert used <= limit + 4 * REACTION_S / 0.01 * STEP

    run(body)


def test_many_programs_that_are_small_alone_are_above_the_quota_together_and_the_largest_is_ended(
    tmp_path: Path,
) -> None:
    async def body() -> None:
        place = Place(tmp_path, memory_bytes=150 * MIB)
        hold = "import time; kept = b'x' * ({} << 20); time.sleep(60)"
        async with scope_of(place) as scope:
            first, watched_first = await place.start(scope, hold.format(40))
            second, watched_second = await place.start(scope, hold.format(70))
            other, watched_other = await place.start(scope, hold.format(120), principal="bob")
            third, watched_third = await place.start(scope, hold.format(55))
            await second.wait_gone()
            assert "alice's programs used" in watched_second.ended_because
            await asyncio.sleep(0.5)  # time to end more than needed
            assert [one.returncode for one in (first, third, other)] == [None, None, None]
            assert [one.ended_because for one in (watched_first, watched_third, watched_other)] == ["", "", ""]
            assert place.quotas.usage()["memory"]["bob"] > 100 * MIB

    run(body)


def test_memory_that_forks_share_counts_once(tmp_path: Path) -> None:
    source = (
        "import os, time\nkept = b'x' * (60 << 20)\n"
        "for _ in range(10): os.fork() == 0 and time.sleep(60)\nopen('ready', 'w'); time.sleep(60)"
    )

    async def body() -> None:
        place = Place(tmp_path, memory_bytes=200 * MIB)
        async with scope_of(place) as scope:
            process, watched = await place.start(scope, source)
            while not (tmp_path / "ready").exists():
                await asyncio.sleep(0.01)
            while place.quotas.usage()["processes"].get("alice", 0) != 11:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            assert (process.returncode, watched.ended_because) == (None, "")
            assert place.quotas.usage()["memory"]["alice"] < 200 * MIB

    run(body)


def test_no_meter_runs_once_no_program_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meters() -> set[int]:
        return {pid for pid in procfs.all_pids() if procfs.command_name(pid).strip() == b"holdfast-meter"}

    async def body() -> None:
        place = Place(tmp_path)
        before = meters()
        async with scope_of(place) as scope:
            source = "import os, time\nwhile not os.path.exists('end'): time.sleep(0.01)"
            process, _ = await place.start(scope, source)
            while not (mine := meters() - before):
                await asyncio.sleep(0.01)
            (tmp_path / "end").touch()
            await process.wait_gone()
            while any(procfs.command_name(pid) for pid in mine):
                await asyncio.sleep(0.1)
            assert place.quotas.usage()["memory"] == {}

    run(body)


def test_a_meter_that_is_killed_is_replaced_and_knows_what_to_watch(tmp_path: Path) -> None:
    source, limits, why = BOMBS["forks"]

    async def body() -> None:
        place = Place(tmp_path, **limits)
        before = set(procfs.all_pids())
        async with scope_of(place) as scope:
            process, watched = await place.start(scope, f"import time; time.sleep(0.5)\n{source}")
            for pid in set(procfs.all_pids()) - before:
                if procfs.command_name(pid).strip() == b"holdfast-meter":
                    os.kill(pid, 9)
            await process.wait_gone()
            assert watched.ended_because.endswith(why)

    run(body)


def test_a_full_workspace_refuses_programs_until_files_are_deleted(tmp_path: Path) -> None:
    async def body() -> None:
        place = Place(tmp_path, disk_bytes=4 * MIB)
        (tmp_path / "large").write_bytes(bytes(6 * MIB))
        async with scope_of(place) as scope:
            assert place.quotas.known_fault("alice", tmp_path) == "", "it is not measured yet"
            process, _ = await place.start(scope, "pass")
            await process.wait_gone()
            while not place.quotas.usage()["disk"].get("alice"):
                await asyncio.sleep(0.02)
            fault = place.quotas.known_fault("alice", tmp_path)
            assert fault == "the workspace of user alice holds 6 MiB; the limit is 4 MiB; delete files"
            (tmp_path / "large").unlink()
            await place.quotas.measure("alice", tmp_path)
            assert place.quotas.known_fault("alice", tmp_path) == ""

    run(body)


def test_what_a_program_wrote_is_measured_although_it_ended_before_it_was_watched(tmp_path: Path) -> None:
    async def body() -> None:
        place = Place(tmp_path, disk_bytes=4 * MIB)
        async with scope_of(place) as scope:
            source = f"open('large', 'wb').write(bytes({6 * MIB}))"
            process = await scope.process([sys.executable, "-I", "-S", "-c", source], cwd=tmp_path)
            await process.wait_gone()
            assert place.quotas.watch("alice", process, folder=tmp_path).ended_because == ""
            while not place.quotas.usage()["disk"].get("alice"):
                await asyncio.sleep(0.02)
            assert "delete files" in place.quotas.known_fault("alice", tmp_path)

    run(body)


def test_a_measurement_whose_request_was_lost_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A meter that is about to end leaves the request unread."""
    ask, asked = MeterLink.ask, []

    def lossy(link: MeterLink, message: tuple[Any, ...]) -> None:
        asked.append(message)
        if len(asked) > 1:
            ask(link, message)

    monkeypatch.setattr(MeterLink, "ask", lossy)
    monkeypatch.setattr("holdfast.host.program_quotas._ASK_AGAIN_S", 0.01)

    async def body() -> None:
        quotas = Place(tmp_path, disk_bytes=4 * MIB).quotas
        (tmp_path / "large").write_bytes(bytes(6 * MIB))
        await quotas.measure("alice", tmp_path)
        assert "delete files" in quotas.known_fault("alice", tmp_path)
        assert len(asked) > 1
        quotas.close()

    run(body)


def test_a_measurement_that_began_before_it_was_asked_for_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(MeterLink, "ask", lambda link, message: asked.append(message))

    async def body() -> None:
        quotas = Place(tmp_path, disk_bytes=4 * MIB).quotas
        measuring = asyncio.create_task(quotas.measure("alice", tmp_path))
        await asyncio.sleep(0)
        ((_, _, (path, *_), number),) = asked
        quotas._hear(("folder", "alice", path, 6 * MIB, 1, "", number - 1))
        for _ in range(20):  # turns in which a wrong answer would end it
            await asyncio.sleep(0)
        assert not measuring.done() and "delete files" in quotas.known_fault("alice", tmp_path)
        quotas._hear(("folder", "alice", path, 0, 0, "", number))
        await measuring
        assert quotas.known_fault("alice", tmp_path) == ""
        quotas.close()

    run(body)


@pytest.mark.parametrize("ending", ["it gives up", "its call is cancelled"])
def test_a_measurement_that_nobody_awaits_keeps_no_callback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr("holdfast.runtime.processes.meter_link.MeterLink.ask", lambda link, message: None)
    if ending == "it gives up":
        monkeypatch.setattr("holdfast.host.program_quotas._MEASURE_S", 0.01)

    async def body() -> None:
        quotas = Place(tmp_path).quotas
        measuring = asyncio.create_task(quotas.measure("alice", tmp_path))
        await asyncio.sleep(0)
        (known,) = quotas._folders.values()
        assert len(known.measured) == 1
        if ending == "its call is cancelled":
            measuring.cancel()
        await asyncio.wait([measuring])
        assert known.measured == []
        quotas.close()

    run(body)


def test_a_program_that_only_deletes_in_a_full_workspace_is_not_ended(tmp_path: Path) -> None:
    async def body() -> None:
        place = Place(tmp_path, disk_bytes=4 * MIB)
        for number in range(8):
            (tmp_path / f"f{number}").write_bytes(bytes(MIB))
        source = "import os, time\nfor number in range(8): os.unlink(f'f{number}'); time.sleep(0.15)\ntime.sleep(0.3)"
        async with scope_of(place) as scope:
            process, watched = await place.start(scope, source)
            await process.wait_gone()
            assert (process.returncode, watched.ended_because) == (0, "")

    run(body)


def test_of_a_workspace_that_is_shared_only_the_growth_counts(tmp_path: Path) -> None:
    async def body() -> None:
        place = Place(tmp_path, disk_bytes=20 * MIB)
        (tmp_path / "project").write_bytes(bytes(30 * MIB))
        async with scope_of(place) as scope:
            first, _ = await place.start(scope, "import time; time.sleep(0.5)", shared=True)
            await first.wait_gone()
            assert first.returncode == 0
            assert place.quotas.known_fault("alice", tmp_path, shared=True) == ""
            source, _, _ = BOMBS["disk"]
            process, watched = await place.start(scope, source, shared=True)
            await process.wait_gone()
            assert "the limit is 20 MiB" in watched.ended_because

    run(body)


def test_what_writes_is_ended_before_the_reserve_of_the_disk_is_used_up_and_nothing_else(tmp_path: Path) -> None:
    space = os.statvfs(tmp_path)
    free = space.f_bavail * space.f_frsize

    async def body() -> None:
        place = Place(tmp_path, reserve_bytes=free + (1 << 30))  # as if it were used up already
        async with scope_of(place) as scope:
            idle, watched_idle = await place.start(scope, "import time; time.sleep(60)", principal="bob")
            process, watched = await place.start(scope, BOMBS["disk"][0])
            await process.wait_gone()
            assert "kept in reserve" in watched.ended_because
            assert (idle.returncode, watched_idle.ended_because) == (None, "")
            assert "kept in reserve" in place.quotas.known_fault("alice", tmp_path)

    run(body)


def test_what_others_delete_on_the_same_disk_does_not_hide_what_a_program_writes(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source, limits, why = BOMBS["disk"]
    other = tmp_path_factory.mktemp("other") / "large"
    with other.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 500 * MIB)

    async def body() -> None:
        place = Place(tmp_path, **limits)
        async with scope_of(place) as scope:
            process, watched = await place.start(scope, source)
            while not (tmp_path / "f5").exists():
                await asyncio.sleep(0.01)
            other.unlink()
            await process.wait_gone()
            assert watched.ended_because.endswith(why), watched.ended_because

    run(body)


def test_no_link_mount_or_nesting_leads_a_walk_astray(tmp_path: Path) -> None:
    from holdfast.runtime.processes.folder_usage import FolderWalk

    outside = tmp_path / "outside"
    folder = tmp_path / "folder"
    folder.mkdir()
    outside.mkdir()
    (outside / "large").write_bytes(bytes(MIB))
    (folder / "link").symlink_to(outside)
    (folder / "up").symlink_to("..")
    (folder / "one").write_bytes(bytes(65536))
    os.link(folder / "one", folder / "two")
    walk = FolderWalk(os.fsencode(folder), 1 << 40, 1 << 30)
    for _ in walk.steps():
        pass
    assert walk.fault == ""
    assert 65536 <= walk.bytes < 65536 + 65536
    assert walk.inodes == 3, "two links and one file with two names"
    deep = os.open(folder, os.O_RDONLY)
    for _ in range(200):
        os.mkdir("d", dir_fd=deep)
        below = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(deep)
    walk = FolderWalk(os.fsencode(folder), 1 << 40, 1 << 30)
    for _ in walk.steps():
        pass
    assert "nested more than 100 levels" in walk.fault


def test_a_walk_ends_above_its_limit(tmp_path: Path) -> None:
    from holdfast.runtime.processes.folder_usage import FolderWalk

    for number in range(500):
        (tmp_path / str(number)).touch()
    walk = FolderWalk(os.fsencode(tmp_path), 1 << 40, 100)
    for _ in walk.steps():
        pass
    assert walk.inodes == 101


@pytest.mark.parametrize(
    ("amount", "shown"),
    [(512, "512 bytes"), (2048, "2 KiB"), (2_254_857_830, "2.1 GiB"), (1 << 31, "2 GiB"), (300 * MIB + 5, "300 MiB")],
)
def test_bytes_are_shown_as_a_person_says_them(amount: int, shown: str) -> None:
    assert shown_bytes(amount) == shown
