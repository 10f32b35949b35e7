"""Programs of sessions run at the lowest priority, and those that serve the host at the host's, behind every wall."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.escapes.stage import as_user
from tests.system.escapes.walls import NOBODY, Wall, import_path, interpreter_for

_START = """\
import os, sys
from holdfast.errors import HoldfastError
from holdfast.runtime.process_host import process_host
from holdfast.tools.sandbox.choice import find_backend, use_backend
from holdfast.tools.sandbox.sandbox import Sandbox
from holdfast.tools.walled import launch_of_host, prepare_launch

def niceness(start):
    launch = start(["nice"], sandbox=Sandbox(), folder="work", environment={"PATH": os.defpath})
    ended = process_host().run_blocking(
        launch.argv, cwd=launch.directory, env=launch.environment, wall=launch.wall, pass_fds=launch.pass_fds
    )
    for fd in launch.pass_fds:
        os.close(fd)
    return (ended.stdout + ended.stderr).decode().strip()

os.mkdir("work")  # beside the store, which no program may see
with use_backend(sys.argv[1]):
    try:
        find_backend()
    except HoldfastError as error:
        print(f"missing: {error}")
    else:
        print(niceness(launch_of_host), niceness(prepare_launch))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can enter and change, which pytest's own are not."""
    path = Path(tempfile.mkdtemp(prefix="holdfast-priority-", dir="/var/tmp")).resolve()
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("backend", ["linux", "bwrap"])
def test_only_a_program_that_serves_the_host_has_its_priority(folder: Path, backend: str) -> None:
    if backend == "bwrap" and (reason := Wall(backend, "user").missing):
        pytest.skip(reason)
    uid = NOBODY if os.geteuid() == 0 and backend == "bwrap" else os.geteuid()
    program = interpreter_for(uid)
    assert program is not None
    found = subprocess.run(
        [program, "-c", _START, backend],
        cwd=folder,
        env={"PATH": os.defpath, "HOME": str(folder), "PYTHONPATH": import_path(), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        **as_user(uid),
    ).stdout.strip()
    if found.startswith("missing: "):
        pytest.skip(found)
    assert found == f"{os.getpriority(os.PRIO_PROCESS, 0)} 19"
