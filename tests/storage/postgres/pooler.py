"""A pgbouncer in transaction mode, which keeps no prepared statements."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tests.postgres import UP_S

NOBODY = 65534
PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

needs_pgbouncer = pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed (Debian's package pgbouncer)")


@contextmanager
def pgbouncer(server: Path, database: str = "postgres") -> Iterator[Path]:
    """Stand in front of the server whose socket is in this folder; the folder of the pgbouncer's own socket."""
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(prefix="pgb-") as made:
        folder = Path(made)
        config = folder / "pgbouncer.ini"
        config.write_text(
            f"[databases]\n{database} = host={server} user=holdfast\n"
            f"[pgbouncer]\nunix_socket_dir = {folder}\nlisten_port = 5432\nauth_type = any\n"
            "pool_mode = transaction\ndefault_pool_size = 4\nmax_client_conn = 100\nserver_login_retry = 0.2\n"
        )
        folder.chmod(0o755)
        user = NOBODY if os.geteuid() == 0 else None  # it refuses to run as root
        if user is not None:
            os.chown(folder, user, user)
        process = subprocess.Popen(
            [PROGRAM, config], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            user=user, group=user, extra_groups=None if user is None else (),
        )  # fmt: skip
        try:
            deadline = time.monotonic() + UP_S
            while True:
                try:
                    psycopg.connect(f"host={folder} user=holdfast dbname={database}", connect_timeout=5).close()
                    break
                except psycopg.OperationalError:
                    assert process.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.02)  # it has no other way to tell that it is up
            yield folder
        finally:
            process.kill()
            process.wait(UP_S)
