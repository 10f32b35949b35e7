"""``holdfast serve --model`` runs walled as an ordinary user, with no further step: with a home, or without one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import NotSupported
from holdfast.tools.sandbox.choice import find_backend
from tests.cli.processes import LIMIT_S
from tests.system.escapes.stage import as_user
from tests.system.escapes.walls import NOBODY, import_path, interpreter_for

UNNAMED = 54_321
"""A user id that the machine's user database does not know, as in many containers."""
HOMES = {"own": "{folder}", "missing": "/nonexistent", "unset": None}
"""Values of ``HOME``; None leaves it unset."""


class Walk:
    """A folder of an ordinary user, and the commands that it types there.

    Parameters:
        folder: a folder that belongs to the user.
        uid: the user.
        home: the value of its ``HOME``; None leaves it unset.
    """

    def __init__(self, folder: Path, uid: int, home: str | None) -> None:
        program = interpreter_for(uid)
        if program is None:
            pytest.skip(
                f"user {uid} cannot import Holdfast here: the checkout or the environment is not readable to it"
            )
        self.folder = folder
        self.holdfast = [program, "-c", "import sys; from holdfast.cli import main; sys.exit(main())"]
        self.environment = {
            "PATH": os.defpath,
            "LANG": "C.UTF-8",
            "NO_COLOR": "1",
            "PYTHONPATH": import_path(),
            "PYTHONDONTWRITEBYTECODE": "1",
            "ANTHROPIC_API_KEY": "sk-ant-walk",
        }
        if home is not None:
            self.environment["HOME"] = home.format(folder=folder)
        self._user = as_user(uid)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command."""
        return subprocess.Popen(
            [*self.holdfast, *arguments],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **self._user,
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        """Run a command to its end; its exit code and what it wrote."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=LIMIT_S)
        return process.returncode, out + err


def _user(who: str) -> int:
    if os.geteuid() != 0:
        if who == "unnamed":
            pytest.skip("only root can be a user without a name")
        return os.geteuid()
    return NOBODY if who == "named" else UNNAMED


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the user owns and reaches, which pytest's own are not."""
    path = Path(tempfile.mkdtemp(prefix="holdfast-walk-")).resolve()
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize(("who", "home"), [("named", "own"), ("named", "missing"), ("unnamed", "unset")])
def test_an_ordinary_user_serves_walled_programs_with_no_further_step(folder: Path, who: str, home: str) -> None:
    try:
        find_backend("auto")
    except NotSupported as error:
        pytest.skip(error.message)
    uid = _user(who)
    os.chown(folder, uid, uid)
    walk = Walk(folder, uid, HOMES[home])
    server = walk.start("serve", "--model", "scripted:demo", "--workspace", "work", "--port", "0", "--json")
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line, server.communicate(timeout=LIMIT_S)
        ready: dict[str, Any] = json.loads(line)
        walk.environment["HOLDFAST_URL"] = ready["url"]

        token = Path(ready["token_file"]).read_text().strip()
        tried = f"cat {ready['token_file']} /proc/{ready['pid']}/environ; env"
        code, said = walk.run("send", "--wait", "60", f"run id -u; echo at $HOME; {tried}")
        assert code == 0, said
        assert said.startswith(f"{uid}\nat {folder}/work\n")
        assert token not in said and "sk-ant-walk" not in said

        code, said = walk.run("send", "--wait", "60", "make a report about the files here")
        assert (code, "written to report.md" in said) == (0, True), said
        assert "sales.csv" in (folder / "work" / "report.md").read_text()

        if home == "own":
            code, said = walk.run("doctor")
            assert code == 0, said
            assert "programs run behind" in said
            walls = [line for line in said.splitlines() if line.startswith("ok      wall  ")]
            assert len(walls) == 8 and all(line.endswith(": held") for line in walls), said
    finally:
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=LIMIT_S)
    assert server.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["event"] == "stopped"
    assert "Traceback" not in err
