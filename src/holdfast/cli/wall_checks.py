"""The section of ``holdfast doctor`` about walls: which wall programs get, and attempts to break through it.

The attempts run behind a real wall, in a new workspace, beside files that stand for the server's. They change nothing
on a machine whose wall holds; what a broken wall lets them write is removed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.cli.check_result import Check
from holdfast.errors import HoldfastError
from holdfast.local_token import token_path
from holdfast.settings import Settings

if TYPE_CHECKING:
    from holdfast.tools.sandbox.choice import BackendChoice

__all__ = ["check_walls"]

_ATTEMPTS_S: Final = 60.0
_SECRET: Final = "planted-by-holdfast-doctor"

_WRITE: Final = "write to the system"
_FUNCTIONS: Final = {
    "read the store": "can_read(STORES)",
    "read the local token": "can_read(TOKENS)",
    "read the server's environment": "can_read([f'/proc/{pid}/environ' for pid in PIDS])",
    "reach the API on loopback": "can_connect()",
    "signal the server": "any(can_signal(pid) for pid in PIDS)",
    "read another workspace": "can_read(OTHERS)",
    _WRITE: "write(SYSTEM)",
    "make a user namespace": "can_enter()",
}
"""Attempts by name, each with the expression that is true if it succeeds; a write is looked for from outside."""

_REMEDIES: Final = {
    "namespaces": "allow user namespaces, without which programs get no network and are refused in workspaces with "
    "files of others: see the sysctls user.max_user_namespaces, kernel.unprivileged_userns_clone and "
    "kernel.apparmor_restrict_unprivileged_userns, or the options of the container's engine",
    "landlock": "use a kernel with Landlock (Linux 5.13 or newer), and name it in its boot parameter lsm",
    "linux": "allow what linux needs, for its second layer and faster starts: see the sysctls "
    "user.max_user_namespaces, kernel.unprivileged_userns_clone and kernel.apparmor_restrict_unprivileged_userns; or "
    'accept this sandbox: set sandbox = "bwrap"',
}
"""What to do about a missing layer of the wall, or a sandbox that ``auto`` would prefer."""

_SCRIPT: Final = """\
import ctypes, os, socket
def can_read(paths):
    for path in paths:
        try:
            with open(path, "rb") as file:
                file.read(1)
            return True
        except OSError:
            pass
    return False
def write(paths):
    for path in paths:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except OSError:
            pass
def can_connect():
    for host in ("127.0.0.1", "0.0.0.0", "localhost"):
        try:
            socket.create_connection((host, PORT), 2).close()
            return True
        except OSError:
            pass
    return False
def can_signal(pid):
    try:
        os.kill(pid, 0)
        return True
    except OSError:
        return False
def can_enter():
    pid = os.fork()
    if pid == 0:
        os._exit(ctypes.CDLL(None).unshare(0x10000000) != 0)
    return os.waitpid(pid, 0)[1] == 0
"""


def check_walls(settings: Settings) -> Iterator[Check]:
    """Check the wall of programs: its backend and layers, and that no attempt breaks through it. May take seconds."""
    from holdfast.tools.sandbox.choice import find_choice, use_backend

    with use_backend(settings.sandbox):
        try:
            choice = find_choice()
        except HoldfastError as error:
            yield Check(name="walls", state="fault", found=error.message, advice=error.hint)
            return
        if not choice.backend.layers:
            yield Check(
                name="walls",
                state="advice",
                found="none: programs run with all rights of the server's user, as the setting sandbox demands",
                advice="remove the setting, unless you trust all users who can send messages",
            )
            return
        yield _wall_of(choice)
        try:
            broken = _break_through(settings)
        except (HoldfastError, OSError) as error:
            yield Check(
                name="wall attempts",
                state="fault",
                found=f"the attempts to break through did not run: {error}",
                advice="programs of tools will fail in the same way; fix the cause or choose another sandbox",
            )
            return
    for attempt, is_broken in broken.items():
        yield Check(
            name="wall",
            state="fault" if is_broken else "ok",
            found=f"{attempt}: {'A PROGRAM CAN' if is_broken else 'held'}",
            advice="choose another sandbox, and report this with the kernel's version" if is_broken else "",
        )


def _wall_of(choice: BackendChoice) -> Check:
    """Return the result for a wall that this machine builds: its layers, and why it is not a better one."""
    found = f"programs run behind {choice.describe()}"
    if not choice.lacks:
        return Check(name="walls", state="ok", found=found)
    advice = "; ".join(_REMEDIES.get(name, f"make {name} available") for name in choice.lacks)
    return Check(name="walls", state="advice", found=found, advice=advice)


def _break_through(settings: Settings) -> Mapping[str, bool]:
    """Run the attempts behind a wall; return for each whether it succeeded."""
    from holdfast.runtime.process_host import process_host
    from holdfast.tools.sandbox.choice import find_backend
    from holdfast.tools.sandbox.plan import plan_wall
    from holdfast.tools.sandbox.sandbox import Sandbox

    with tempfile.TemporaryDirectory(prefix="holdfast-doctor-") as folder, _listener() as port:
        root = Path(os.path.realpath(folder))
        for name in ("workspace", "other", "server"):
            (root / name).mkdir()
        planted = [root / "server" / "holdfast.db", root / "server" / "holdfast.db-token", root / "other" / "file"]
        for path in planted:
            path.write_text(_SECRET)
        store = Path(settings.store.removeprefix("sqlite:///")).absolute()
        token = token_path(settings.store)
        written = [os.path.join(path, f".{root.name}") for path in ("/usr", "/etc", "/", sys.prefix)]
        values = {
            "STORES": [str(planted[0]), str(store)],
            "TOKENS": [str(planted[1]), *([str(token)] if token else [])],
            "OTHERS": [str(planted[2]), "../other/file", f"/proc/self/root{planted[2]}"],
            "PIDS": [os.getpid(), os.getppid()],
            "SYSTEM": written,
            "PORT": port,
        }
        lines = [f"{name} = {value!r}" for name, value in values.items()]
        lines += [f"print({name!r}, int(bool({call})), sep='\\t')" for name, call in _FUNCTIONS.items()]
        plan = plan_wall(Sandbox(), folder=root / "workspace")
        launch = find_backend().launch(plan, [sys.executable, "-I", "-S", "-c", "\n".join([_SCRIPT, *lines])])
        try:
            ended = process_host().run_blocking(
                launch.argv,
                timeout_s=_ATTEMPTS_S,
                cwd=launch.directory,
                env=launch.environment,
                wall=launch.wall,
                pass_fds=launch.pass_fds,
                confirm=launch.confirm,
                name="wall attempts",
            )
        finally:
            for fd in launch.pass_fds:
                os.close(fd)
            reached = [path for path in written if os.path.exists(path)]  # a wall may have a folder of its own there
            for made in reached:
                os.unlink(made)
    found = dict(line.split("\t") for line in ended.stdout.decode().splitlines())
    if ended.returncode or found.keys() != _FUNCTIONS.keys():
        raise OSError(ended.stderr.decode("utf-8", "replace").strip() or f"exit code {ended.returncode}")
    return {name: result == "1" for name, result in found.items()} | {_WRITE: bool(reached)}


@contextlib.contextmanager
def _listener() -> Iterator[int]:
    """Listen on a port of the loopback, as the server's API does."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]
