"""Run tests of bubblewrap's walls as an ordinary user: it is refused as root, as which the tests may run."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from holdfast.tools.sandbox.backends.bwrap import BubblewrapBackend
from holdfast.tools.sandbox.backends.linux import LinuxBackend
from holdfast.tools.sandbox.port import SandboxBackend
from tests.system.escapes.stage import as_user
from tests.system.escapes.walls import NOBODY, Wall, import_path, interpreter_for

__all__ = ["NETWORKED", "networked_backend", "run_as_ordinary_user"]

NETWORKED = ("linux", "bwrap")
"""Names of the backends whose walls have a network."""

_ROOT = Path(__file__).resolve().parents[3]
_LIMIT_S = 110.0


def networked_backend(name: str) -> SandboxBackend:
    """Return a backend of `NETWORKED`, or skip the test if this machine or this user cannot use its network."""
    backend: SandboxBackend = LinuxBackend() if name == "linux" else BubblewrapBackend()
    if (reason := backend.probe()) is not None or "namespaces" not in backend.layers:
        pytest.skip(f"{name}: {reason or backend.layers}")
    return backend


def run_as_ordinary_user(*words: str) -> None:
    """Run tests as the user nobody, and assert that they passed, and that none was skipped because of bubblewrap.

    Parameters:
        words: arguments of pytest.
    """
    if os.geteuid() != 0:
        pytest.skip("this user's own run has these tests")
    if reason := Wall("bwrap", "user").missing:
        pytest.skip(reason)
    program = interpreter_for(NOBODY)
    assert program is not None
    folder = Path(tempfile.mkdtemp(prefix="holdfast-nobody-", dir="/var/tmp"))  # pytest's own are not open to it
    os.chown(folder, NOBODY, NOBODY)
    options = ("-p", "no:cacheprovider", "--basetemp", str(folder / "tests"), "-q")
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": import_path()}
    try:
        ended = subprocess.run(
            [program, "-m", "pytest", *options, *words],
            cwd=_ROOT,
            env={**environment, "TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            **as_user(NOBODY),
        )
    finally:
        shutil.rmtree(folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " passed" in ended.stdout and ": bwrap: " not in ended.stdout, ended.stdout
