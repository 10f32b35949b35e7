"""A pgbouncer in transaction mode in front of the database: the store works, and signals take the direct way."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import holdfast
from holdfast.settings import Settings
from tests.postgres import UP_S

NOBODY = 65534
PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed (Debian's package pgbouncer)")


@pytest.fixture
def pooled_url(postgres_url: str) -> Iterator[str]:
    """The address of the database behind a pgbouncer that keeps no prepared statements."""
    assert PROGRAM is not None
    folder_of_server = postgres_url.partition("host=")[2]
    name = postgres_url.partition("@/")[2].partition("?")[0]
    with tempfile.TemporaryDirectory(prefix="pgb-") as made:
        folder = Path(made)
        config = folder / "pgbouncer.ini"
        config.write_text(
            f"[databases]\n{name} = host={folder_of_server} user=holdfast\n"
            f"[pgbouncer]\nunix_socket_dir = {folder}\nlisten_port = 6432\nauth_type = any\n"
            "pool_mode = transaction\ndefault_pool_size = 4\nmax_client_conn = 100\n"
        )
        folder.chmod(0o755)
        user = NOBODY if os.geteuid() == 0 else None  # it refuses to run as root
        if user is not None:
            os.chown(folder, user, user)
        process = subprocess.Popen(
            [PROGRAM, config], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            user=user, group=user, extra_groups=None if user is None else (),
        )  # fmt: skip
        url = f"postgresql://holdfast@:6432/{name}?host={folder}&prepared_statements=off"
        try:
            deadline = time.monotonic() + UP_S
            while True:
                try:
                    psycopg.connect(url.partition("&")[0], connect_timeout=5).close()
                    break
                except psycopg.OperationalError:
                    assert process.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.02)  # it has no other way to tell that it is up
            yield url
        finally:
            process.kill()
            process.wait(UP_S)


async def echo(run: holdfast.Run) -> str:
    return f"echo {run.text}"


async def talk(url: str, settings: Settings) -> tuple[int, bool]:
    """Talk to two hosts in turns; return how many signals the second received, and whether it still could."""
    async with (
        holdfast.Host(echo, store=url, settings=settings) as one,
        holdfast.Host(echo, store=url, settings=settings) as two,
    ):
        for n in range(30):
            host = one if n % 2 else two
            assert await host.session(f"s{n % 3}").ask(str(n)) == f"echo {n}"
        cluster = two.store.cluster
        assert cluster is not None
        while cluster.signals.problem == "not connected yet":
            await asyncio.sleep(0.01)
        works = cluster.signals.problem is None
        while works and cluster.signals.received == 0:
            await one.session("s0").ask("x")
        return cluster.signals.received, works


def test_two_hosts_work_behind_a_pgbouncer_and_signal_each_other_directly(pooled_url: str, postgres_url: str) -> None:
    settings = Settings(store_direct=postgres_url, cluster_poll_s=0.2)
    received, works = asyncio.run(asyncio.wait_for(talk(pooled_url, settings), 60))
    assert works
    assert received > 0


def test_two_hosts_work_behind_a_pgbouncer_without_signals(pooled_url: str) -> None:
    received, works = asyncio.run(asyncio.wait_for(talk(f"{pooled_url}&signals=off", Settings(cluster_poll_s=0.1)), 60))
    assert not works
    assert received == 0
