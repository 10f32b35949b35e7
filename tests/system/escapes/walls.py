"""The walls that are tried, and how a program is started behind one.

`Starter` runs in the test's process and asks a process of its own (`starter`), which runs as the wall's user.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.tools.sandbox.backends.container import PodmanBackend
from holdfast.tools.sandbox.backends.linux import LinuxBackend
from holdfast.tools.sandbox.choice import BACKENDS
from tests.system.escapes.escape import Limits
from tests.system.escapes.proxies import FRIEND
from tests.system.escapes.stage import Stage, as_user

__all__ = [
    "NOBODY",
    "WALLS",
    "Starter",
    "Wall",
    "import_path",
    "interpreter_for",
    "start_unwalled",
    "start_walled",
    "started",
]

NOBODY = 65534
_ROOT = Path(__file__).resolve().parents[3]
_READY_S = 20.0
_LAYERS = {
    "linux-both": ("namespaces", "landlock"),
    "linux-namespaces": ("namespaces",),
    "linux-landlock": ("landlock",),
}
_NETWORK = "-network"
_ANSWER_S = 90.0


@dataclass(frozen=True)
class Wall:
    """A backend with its layers, as one user.

    Parameters:
        name: ``none``, ``linux-namespaces``, ``linux-landlock``, ``linux-both``, ``bwrap`` or ``podman``; those with
            namespaces also with ``-network`` at the end: then the network leads to every public host and port, and to
            one address that is not public, `FRIEND`.
        user: ``root`` or ``user``.
    """

    name: str
    user: str

    def __str__(self) -> str:
        return f"{self.name}-{self.user}"

    @property
    def base(self) -> str:
        """Its name without the network."""
        return self.name.removesuffix(_NETWORK)

    @property
    def has_network(self) -> bool:
        """Whether its programs reach public hosts, through the proxy."""
        return self.name != self.base

    @property
    def has_proxy(self) -> bool:
        """Whether its programs have a proxy. Without a wall, that is one which checks nothing."""
        return self.has_network or self.name == "none"

    @property
    def uid(self) -> int:
        """The user that starts programs behind it."""
        return 0 if self.user == "root" else NOBODY if os.geteuid() == 0 else os.geteuid()

    @property
    def unwalled(self) -> Wall:
        """The same user without a wall."""
        return Wall("none", self.user)

    @property
    def missing(self) -> str:
        """Why it cannot be tried here; empty if it can."""
        if self.user == "root" and os.geteuid() != 0:
            return "only root can try walls as root"
        if self.user == "user" and interpreter_for(self.uid) is None:
            return "an ordinary user cannot import Holdfast here: the checkout or the environment is not readable to it"
        if self.base not in ("none", *_LAYERS) and self.base not in BACKENDS:
            return f"there is no backend {self.base}"
        if self.base == "bwrap" and self.user == "root":
            return "bubblewrap is refused as root"
        if self.base == "bwrap" and shutil.which("bwrap") is None:
            return "bubblewrap is not installed"
        if self.base in _LAYERS and (reason := _reason(self.base)):
            return reason
        if self.name == "podman":
            return PodmanBackend().probe() or ""
        return ""


WALLS = tuple(
    Wall(name, user)
    for name in (
        *("linux-both", "linux-both-network", "linux-namespaces", "linux-namespaces-network"),
        *("linux-landlock", "bwrap", "bwrap-network", "podman"),
    )
    for user in ("root", "user")
)


class Starter:
    """Asks for programs to be started, from any thread."""

    def __init__(self, wall: Wall, process: subprocess.Popen[bytes]) -> None:
        self.wall, self.process = wall, process
        self._ids = itertools.count()
        self._waiting: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def run(self, argv: Sequence[str], *, workspace: Path, limits: Limits, session: str = "") -> tuple[int | None, str]:
        """Run a program behind the wall; its exit code, None if it was stopped, and its output.

        Parameters:
            session: programs of one session and workspace may share namespaces.
        """
        number, answered = next(self._ids), queue.Queue[dict[str, Any]]()
        self._waiting[number] = answered
        asked = {
            "id": number,
            "wall": self.wall.name,
            "argv": list(argv),
            "workspace": str(workspace),
            "session": session,
            "limits": dataclasses.asdict(limits),
        }
        assert self.process.stdin is not None
        with self._lock:
            self.process.stdin.write(json.dumps(asked).encode() + b"\n")
            self.process.stdin.flush()
        answer = answered.get(timeout=limits.timeout_s + _ANSWER_S)
        return answer["returncode"], base64.b64decode(answer["output"]).decode("utf-8", "replace")

    def listen(self) -> None:
        """Hand out the answers, until the process ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            self._waiting.pop(answer["id"]).put(answer)


@functools.cache
def _reason(name: str) -> str:
    """Why this machine cannot build a wall with these layers; empty if it can."""
    return LinuxBackend(_LAYERS[name]).probe() or ""


@functools.cache
def interpreter_for(uid: int) -> str | None:
    """An interpreter of this version with which a user can import Holdfast."""
    code = (
        f"import sys, ssl; assert sys.version_info[:2] == {sys.version_info[:2]!r}; import tests.system.escapes.starter"
    )
    environment = {"PYTHONPATH": import_path(), "PYTHONDONTWRITEBYTECODE": "1"}
    for path in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        with contextlib.suppress(OSError):
            command = [path, "-c", code]
            if not subprocess.run(
                command, capture_output=True, check=False, cwd="/", env=environment, **as_user(uid)
            ).returncode:
                return path
    return None


def import_path() -> str:
    """Where programs of every user import Holdfast and these tests from."""
    return os.pathsep.join([str(_ROOT), str(_ROOT / "src"), *(at for at in sys.path if at.endswith("site-packages"))])


@contextmanager
def started(wall: Wall, stage: Stage) -> Iterator[Starter]:
    """A starter behind whose wall programs run, with secrets in its environment."""
    secret_file = stage.shared / "held"
    secret_file.write_text(stage.secret)
    os.chown(secret_file, stage.uid, stage.uid)
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(stage.shared),
        "PYTHONPATH": import_path(),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PROVIDER_API_KEY": stage.secret,
        "HOLDFAST_JWT_SECRET": stage.secret,
        "PLAIN_SETTING": stage.secret,
        "DBUS_SESSION_BUS_ADDRESS": f"unix:path={stage.at['bus']}",
        "SSH_AUTH_SOCK": str(stage.at["bus"]),
    }
    program = interpreter_for(wall.uid) or sys.executable
    process = subprocess.Popen(
        [program, "-m", "tests.system.escapes.starter", str(secret_file)],
        cwd="/",
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        **as_user(wall.uid),
    )
    try:
        assert process.stdout is not None and process.stdin is not None
        ready = process.stdout.readline()
        assert ready, "the starter did not start"
        said = json.loads(ready)
        stage.at |= {"starter": said["pid"], "descriptors": said["descriptors"], "walled": wall.name != "none"}
        starter = Starter(wall, process)
        listening = threading.Thread(target=starter.listen, daemon=True)
        listening.start()
        yield starter
        process.stdin.close()
        process.wait(_READY_S)
        listening.join(_READY_S)
        process.stdout.close()
    finally:
        process.kill()
        process.wait()


def start_unwalled(asked: dict[str, Any]) -> tuple[int | None, bytes]:
    """Start a program as anything would that takes no care: it has everything that its starter has."""
    with tempfile.TemporaryFile() as output:  # a pipe would end only with the last process that holds it
        with subprocess.Popen(
            asked["argv"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=asked["workspace"],
            close_fds=False,
        ) as program:
            try:
                program.wait(asked["limits"]["timeout_s"])
            except subprocess.TimeoutExpired:
                program.kill()
        output.seek(0)
        return program.returncode, output.read()


@functools.cache
def _linux(name: str) -> LinuxBackend:
    """The backend with some layers only; a machine that lacks one of them cannot try this wall."""
    backend = LinuxBackend(_LAYERS[name])
    reason = backend.probe()
    assert reason is None, reason
    return backend


def start_walled(asked: dict[str, Any]) -> tuple[int | None, bytes]:
    """Start a program behind the wall that was asked for."""
    from holdfast.tools.sandbox.sandbox import Sandbox
    from tests.tools.sandbox.walled import run_walled

    limits, wall = asked["limits"], Wall(asked["wall"], "root")
    sandbox = Sandbox(
        network="all" if wall.has_network else "none",
        hosts=("*:*",) if wall.has_network else (),
        allow_networks=(FRIEND,),
        connections=limits["connections"],
        network_bytes=limits["network_bytes"],
        memory_bytes=limits["memory_bytes"],
        processes=limits["processes"],
        open_files=limits["open_files"],
        file_bytes=limits["file_bytes"],
        cpu_s=limits["cpu_s"],
        scratch_bytes=limits["scratch_bytes"],
    )
    workspace = asked["workspace"]
    principal = "alice" if workspace.endswith("own") else "bob"
    try:
        ended = run_walled(
            asked["argv"],
            folder=workspace,
            principal=principal,
            session=f"{principal}/{asked['session']}",
            sandbox=sandbox,
            backend=_linux(wall.base) if wall.base in _LAYERS else wall.base,
            timeout_s=limits["timeout_s"],
        )
    except TimeoutError:
        return None, b""
    return ended.returncode, ended.output.encode()
