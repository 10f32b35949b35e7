"""Who else may read a store, and what lies beside it: modes, owners, links, and journals that are not its own."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from holdfast import Host
from holdfast.errors import ConfigurationError, HoldfastError, StoreCorrupt, StoreReadOnly
from holdfast.storage import SqliteStore

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
not_as_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def opened(path: Path) -> dict[str, int]:
    """Open a store, write and read in it, and give the modes of what lies in its folder meanwhile."""

    async def agent(run: object) -> str:
        return "done"

    async def main() -> dict[str, int]:
        async with Host(agent, store=f"sqlite:///{path}") as host:
            await host.session("s").ask("go")
            return {one.name: stat.S_IMODE(one.lstat().st_mode) for one in path.parent.iterdir()}

    return asyncio.run(main())


@pytest.mark.usefixtures("umask")
def test_its_own_folder_is_0700_and_all_files_are_0600_whatever_the_umask(tmp_path: Path) -> None:
    modes = opened(tmp_path / ".holdfast" / "holdfast.db")
    assert set(modes) == {".gitignore", *(f"holdfast.db{suffix}" for suffix in ("", "-wal", "-shm", "-lock"))}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE((tmp_path / ".holdfast").stat().st_mode) == 0o700
    assert (tmp_path / ".holdfast" / ".gitignore").read_text() == "*\n"


@pytest.mark.usefixtures("umask")
def test_a_file_that_was_named_is_0600_too(tmp_path: Path) -> None:
    assert set(opened(tmp_path / "named.db").values()) == {0o600}


def refused(path: Path) -> HoldfastError:
    with pytest.raises(HoldfastError) as caught:
        opened(path)
    assert caught.value.hint
    return caught.value


def test_a_folder_of_its_own_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ".holdfast"
    folder.mkdir(mode=0o755)
    error = refused(folder / "holdfast.db")
    assert "accessible to other users: its mode is 755" in error.message and error.hint == f"chmod 700 {folder}"


def test_a_folder_of_its_own_that_is_a_link_or_a_file_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (tmp_path / ".holdfast").symlink_to(elsewhere)
    assert "is a symbolic link" in refused(tmp_path / ".holdfast" / "holdfast.db").message
    assert list(elsewhere.iterdir()) == []
    (tmp_path / ".holdfast").unlink()
    (tmp_path / ".holdfast").touch(0o600)
    assert "is not a folder" in refused(tmp_path / ".holdfast" / "holdfast.db").message


def test_a_database_in_its_own_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ".holdfast"
    folder.mkdir(mode=0o700)
    (folder / "holdfast.db").symlink_to(tmp_path / "victim")
    assert "is not a regular file" in refused(folder / "holdfast.db").message
    (tmp_path / "victim").touch()
    assert "is not a regular file" in refused(folder / "holdfast.db").message
    assert (tmp_path / "victim").read_bytes() == b""


def test_a_lock_file_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "x.db-lock").symlink_to(tmp_path / "victim")
    with pytest.raises(StoreReadOnly):
        opened(tmp_path / "x.db")
    assert (tmp_path / "victim").read_text() == "precious"


@as_root
def test_a_folder_or_database_of_somebody_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ".holdfast"
    opened(folder / "holdfast.db")
    os.chown(folder, 65534, 65534)
    assert "belongs to nobody, but this process runs as root" in refused(folder / "holdfast.db").message
    os.chown(folder, 0, 0)
    os.chown(folder / "holdfast.db", 65534, 65534)
    assert "holdfast.db belongs to nobody" in refused(folder / "holdfast.db").message


@not_as_root
def test_where_the_folder_cannot_be_made_the_error_says_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert "failed to create" in refused(tmp_path / ".holdfast" / "holdfast.db").message
    finally:
        tmp_path.chmod(0o700)


def test_a_named_store_in_a_folder_that_is_not_there_is_refused_as_before(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such folder"):
        opened(tmp_path / "none" / "x.db")
    with pytest.raises(StoreReadOnly):
        opened(tmp_path / "none" / ".holdfast" / "x.db")


@pytest.mark.parametrize("what", ["file", "folder", "link", "dangling"])
def test_a_journal_beside_a_store_is_set_aside_whatever_it_is(tmp_path: Path, what: str) -> None:
    path, journal = tmp_path / "x.db", tmp_path / "x.db-journal"
    opened(path)
    if what == "file":
        journal.write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(504))
    elif what == "folder":
        journal.mkdir()
    else:
        journal.symlink_to(tmp_path / ("x.db-lock" if what == "link" else "none"))
    opened(path)
    assert not os.path.lexists(journal)
    assert os.path.lexists(tmp_path / "x.db-refused-journal")


def test_a_journal_that_another_connection_moves_first_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, journal = tmp_path / "x.db", tmp_path / "x.db-journal"
    opened(path)
    journal.write_bytes(b"not its own")
    replace = os.replace

    def replaced_by_both(source: str, target: str) -> None:
        replace(source, target)  # the other connection's
        replace(source, target)

    monkeypatch.setattr(os, "replace", replaced_by_both)
    opened(path)
    assert not os.path.lexists(journal)
    assert (tmp_path / "x.db-refused-journal").read_bytes() == b"not its own"


def test_a_journal_beside_a_database_in_another_mode_is_left_and_the_store_refused(tmp_path: Path) -> None:
    path, journal = tmp_path / "x.db", tmp_path / "x.db-journal"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE mine (x)")
        database.commit()
    journal.write_bytes(b"kept")
    with pytest.raises(StoreCorrupt, match="not in WAL mode"):
        asyncio.run(_open(path))
    assert journal.read_bytes() == b"kept"


async def _open(path: Path) -> None:
    store = SqliteStore(str(path))
    try:
        await store.open(node_id="n_1", at=0.0)
    finally:
        await store.close()


SIDES = ["-wal", "-shm"]


def closed_store(folder: Path) -> Path:
    folder.mkdir(mode=0o777)
    opened(folder / "named.db")
    return folder / "named.db"


@pytest.mark.parametrize("suffix", SIDES)
def test_a_log_that_is_a_link_is_refused_and_nothing_is_written_through_it(tmp_path: Path, suffix: str) -> None:
    store = closed_store(tmp_path / "shared")
    target = tmp_path / "target"
    Path(f"{store}{suffix}").symlink_to(target)
    assert f"{store}{suffix} is not a regular file" in refused(store).message
    assert not target.exists()


@as_root
@pytest.mark.parametrize("suffix", ["", *SIDES])
def test_a_file_that_another_user_put_in_a_shared_folder_is_refused(tmp_path: Path, suffix: str) -> None:
    store = closed_store(tmp_path / "shared")
    forged = Path(f"{store}{suffix}")
    forged.touch()
    os.chown(forged, 65534, 65534)
    error = refused(store)
    assert f"{forged} belongs to" in error.message and error.hint


@as_root
def test_root_may_open_the_store_of_the_folder_s_owner(tmp_path: Path) -> None:
    store = closed_store(tmp_path / "theirs")
    os.chown(store.parent, 65534, 65534)
    os.chown(store, 65534, 65534)
    assert opened(store)
