"""``holdfast store move``: a kill at any instant leaves one store that is whole, and a second call ends the work."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from holdfast import Host, failpoints
from holdfast.errors import ConfigurationError, StoreCorrupt, StoreLocked
from holdfast.settings import default_store
from holdfast.storage.sqlite import relocation
from holdfast.storage.sqlite.filelock import FileLock
from holdfast.storage.sqlite.relocation import relocate_store

POINTS = [name for name in failpoints.names() if name.startswith("relocation.")]
MOVE = "import sys; from holdfast.storage.sqlite.relocation import relocate_store; relocate_store(*sys.argv[1:])"


async def echo(run: object) -> str:
    return "done"


def used(path: str, key: str) -> list[str]:
    """Use a store in a host, and give the sessions that it has then."""

    async def main() -> list[str]:
        async with Host(echo, store=f"sqlite:///{path}") as host:
            await host.session(key).ask("go")
            return sorted(view.key for view in await host.store.sessions(principal=None, limit=10))

    return asyncio.run(main())


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A store as an older version left it: in the folder itself, readable by all, with a token and state beside it."""
    path = tmp_path / "holdfast.db"
    used(str(path), "first")
    path.chmod(0o644)
    (tmp_path / "holdfast.db-token").write_text("hft_0\n")
    (tmp_path / "holdfast.db-token").chmod(0o600)
    (tmp_path / "holdfast.db.d" / "processes").mkdir(parents=True)
    (tmp_path / "holdfast.db.d" / "processes" / "note").write_text("n")
    return path


def in_place(tmp_path: Path) -> str:
    return default_store(environ={}, folder=tmp_path).removeprefix("sqlite:///")


def test_everything_moves_and_is_private(tmp_path: Path, old: Path) -> None:
    new = tmp_path / ".holdfast" / "holdfast.db"
    assert in_place(tmp_path) == str(old)
    assert relocate_store(str(old), str(new))
    assert in_place(tmp_path) == str(new)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".holdfast"]
    assert (new.parent / "holdfast.db-token").read_text() == "hft_0\n"
    assert (new.parent / "holdfast.db.d" / "processes" / "note").read_text() == "n"
    assert {stat.S_IMODE(path.stat().st_mode) for path in new.parent.glob("holdfast.db*") if path.is_file()} == {0o600}
    assert used(str(new), "second") == ["first", "second"]
    assert not relocate_store(str(old), str(new)), "a second time there is nothing to move"


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_step_leaves_a_whole_store_and_the_move_can_be_repeated(
    tmp_path: Path, old: Path, point: str
) -> None:
    new = tmp_path / ".holdfast" / "holdfast.db"
    argv = [sys.executable, "-c", MOVE, str(old), str(new)]
    killed = subprocess.run(argv, env={**os.environ, failpoints.VARIABLE: point}, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert used(in_place(tmp_path), "second") == ["first", "second"]
    relocate_store(str(old), str(new))
    assert used(in_place(tmp_path), "third") == ["first", "second", "third"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".holdfast"]
    assert (new.parent / "holdfast.db.d" / "processes" / "note").read_text() == "n"
    assert len(POINTS) == 4


def test_what_a_killed_host_left_in_the_log_moves_along(tmp_path: Path, old: Path) -> None:
    code = (
        "import os, sqlite3, sys\n"
        "c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "c.execute('PRAGMA wal_autocheckpoint = 0')\n"
        "c.execute('CREATE TABLE late (x)')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(old)], timeout=60, check=False)
    assert old.with_name("holdfast.db-wal").stat().st_size > 0
    new = tmp_path / ".holdfast" / "holdfast.db"
    relocate_store(str(old), str(new))
    with closing(sqlite3.connect(new)) as database:
        assert database.execute("SELECT count(*) FROM late").fetchone() == (0,)


def test_a_log_of_another_store_is_not_played_into_the_one_that_comes(tmp_path: Path, old: Path) -> None:
    other = tmp_path / "other" / ".holdfast" / "holdfast.db"
    other.parent.parent.mkdir()
    used(str(other), "somebody else's")
    code = (
        "import os, sqlite3, sys\n"
        "c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "c.execute('PRAGMA wal_autocheckpoint = 0')\n"
        "c.execute('UPDATE session SET key = 2')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(other)], timeout=60, check=False)
    other.unlink()
    log = other.with_name("holdfast.db-wal")
    assert log.stat().st_size > 0
    with pytest.raises(ConfigurationError, match="-wal already exists and belongs to another store"):
        relocate_store(str(old), str(other))
    assert used(str(old), "second") == ["first", "second"]
    log.unlink()
    other.with_name("holdfast.db-shm").unlink()
    assert relocate_store(str(old), str(other))
    assert used(str(other), "third") == ["first", "second", "third"]


def test_a_store_that_a_host_or_another_program_has_open_stays(tmp_path: Path, old: Path) -> None:
    new = tmp_path / ".holdfast" / "holdfast.db"

    async def main() -> None:
        async with Host(echo, store=f"sqlite:///{old}"):
            with pytest.raises(StoreLocked):
                await asyncio.to_thread(relocate_store, str(old), str(new))

    asyncio.run(main())
    lock = FileLock(f"{new}-lock")
    lock.acquire()
    with pytest.raises(StoreLocked):
        relocate_store(str(old), str(new))
    lock.release()
    with closing(sqlite3.connect(old, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM session").fetchone()
        with pytest.raises(StoreLocked):
            relocate_store(str(old), str(new))
    assert in_place(tmp_path) == str(old)
    assert used(str(old), "second") == ["first", "second"]


def test_what_is_no_store_of_ours_stays(tmp_path: Path) -> None:
    old, new = tmp_path / "holdfast.db", tmp_path / ".holdfast" / "holdfast.db"
    with pytest.raises(ConfigurationError, match="no store to move"):
        relocate_store(str(old), str(new))
    with closing(sqlite3.connect(old)) as database:
        database.execute("CREATE TABLE mine (x)")
        database.commit()
    with pytest.raises(StoreCorrupt):
        relocate_store(str(old), str(new))
    old.write_text("no database" * 1000)
    with pytest.raises(StoreCorrupt):
        relocate_store(str(old), str(new))
    old.unlink()
    old.symlink_to(tmp_path / "elsewhere.db")
    with pytest.raises(ConfigurationError, match="not a regular file"):
        relocate_store(str(old), str(new))
    assert relocation.relocate_store is relocate_store


def test_two_stores_are_never_made_into_one(tmp_path: Path, old: Path) -> None:
    new = tmp_path / ".holdfast" / "holdfast.db"
    used(str(new), "other")
    with pytest.raises(ConfigurationError, match="both exist"):
        relocate_store(str(old), str(new))
    assert used(str(old), "second") == ["first", "second"]
    assert used(str(new), "second") == ["other", "second"]
