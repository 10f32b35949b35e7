"""A PostgreSQL server for all tests of a run: real, without root's rights, without a port.

The first test that needs it starts it; the processes that pytest-xdist spreads the tests over share it. Each of them
holds a shared lock on a file. The server's keeper, a process of its own, waits for an exclusive lock on that file, and
then ends the server by its id. The kernel frees the locks of a killed process, so no server is left behind.
"""

import fcntl
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

import psycopg
import pytest

from holdfast.proof.storm.postgres_server import PostgresServer

UP_S = 60.0


def keep(users: str, up: int) -> None:
    """Start a server, tell its folder through the descriptor `up`, and end it when nobody holds the lock `users`."""
    with tempfile.TemporaryDirectory(prefix="pg-") as name:  # a short path: a Unix socket's may have 107 bytes
        server = PostgresServer(pathlib.Path(name))
        try:
            server.start()
            os.write(up, name.encode())
            os.close(up)
            with open(users, "r+b") as file:
                fcntl.lockf(file, fcntl.LOCK_EX)
                pathlib.Path(users).unlink()
        finally:
            server.stop()


def _shared_folder(base: pathlib.Path) -> pathlib.Path:
    """The folder of the run's server, which is started if there is none. This process uses it until it ends."""
    with open(base / "postgres-start", "a+b") as gate:
        fcntl.lockf(gate, fcntl.LOCK_EX)
        users, told = base / "postgres-users", base / "postgres-folder"
        is_up = users.exists()
        _held.append(open(users, "a+b"))  # noqa: SIM115 - the lock is held until the process ends
        if is_up:
            fcntl.lockf(_held[-1], fcntl.LOCK_SH)
            is_up = users.exists()  # else its keeper was faster
        if not is_up:
            _held.append(open(users, "a+b"))  # noqa: SIM115
            fcntl.lockf(_held[-1], fcntl.LOCK_SH)
            told.write_text(_start_keeper(users))
        return pathlib.Path(told.read_text())


_held: list[BinaryIO] = []


def _start_keeper(users: pathlib.Path) -> str:
    """Start the keeper as nobody's child, so that no test finds it among its own processes; return the folder."""
    up, told = os.pipe()
    code = (
        "import os, sys\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "from tests.postgres import keep\n"
        "keep(sys.argv[1], int(sys.argv[2]))\n"
    )
    with open(users.with_name("postgres-log"), "wb") as log:
        subprocess.run(
            [sys.executable, "-c", code, str(users), str(told)], check=True, pass_fds=(told,), stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, cwd=pathlib.Path(__file__).parents[1], timeout=UP_S,
        )  # fmt: skip
    os.close(told)
    with open(up, "rb") as file:
        folder = file.read().decode()
    if not folder:
        raise RuntimeError(f"no PostgreSQL: {users.with_name('postgres-log').read_text()}")
    return folder


@pytest.fixture(scope="session")
def postgres_database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a database of this process, on the server of this run."""
    base = tmp_path_factory.getbasetemp()
    worker_id = os.environ.get("PYTEST_XDIST_WORKER", "master")  # its fixture needs the plugin, which may be off
    folder = _shared_folder(base if worker_id == "master" else base.parent)
    name = f"tests_{worker_id}_{os.getpid()}"
    with psycopg.connect(f"host={folder} user=holdfast dbname=postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"postgresql://holdfast@/{name}?host={folder}"


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A server for this test alone, which may stop it."""
    with tempfile.TemporaryDirectory(prefix="pg-") as name:
        server = PostgresServer(pathlib.Path(name))
        server.start()
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture
def postgres_url(postgres_database: str) -> str:
    """The URL of an empty database: of a store that was never opened, or whose rows were all dropped."""
    with psycopg.connect(postgres_database, autocommit=True) as connection:
        rows = connection.execute(
            "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace "
            "AND relname <> 'holdfast_schema'"
        ).fetchall()
        if rows:
            connection.execute(f"TRUNCATE {', '.join(name for (name,) in rows)} RESTART IDENTITY")
    return postgres_database
