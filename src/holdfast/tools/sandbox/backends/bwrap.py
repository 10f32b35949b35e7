"""The backend ``bwrap``: walls that bubblewrap builds.

Invariants:

- The server's user is not root. Inside bubblewrap root would stay the machine's root, for whom the kernel does not
  limit processes; so the probe fails there.
- A path below a writable folder may be replaced with a link at any time, by another program of the session. So a second
  bubblewrap inside the first mounts these paths: there, a link leads only to what the program sees anyway.
- Neither paths nor variables are arguments: paths are passed in a file without a name, and variables are inherited.
- A network is a proxy on the loopback of bubblewrap's own namespace. The socket to the proxy is open in the first
  process of the wall until the last one inside has ended. The program never has it, and the system call filter keeps it
  from taking descriptors of other processes. See `loopback`.
- When the program ends, bubblewrap ends too, and the kernel kills what is left in the namespace of processes. An exit
  by a signal is reported as 128 plus the signal's number.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from holdfast.errors import NotSupported
from holdfast.runtime.process_host import process_host
from holdfast.runtime.walls import loopback
from holdfast.runtime.walls.call_filter import call_filter
from holdfast.runtime.walls.namespaces import host_paths
from holdfast.tools.sandbox.backends.memory_file import memory_files
from holdfast.tools.sandbox.backends.shell_limits import find_program, limited_inside, limited_outside
from holdfast.tools.sandbox.network import DIRECT_VARIABLES, PROXY_VARIABLES, network_request
from holdfast.tools.sandbox.plan import plan_wall
from holdfast.tools.sandbox.port import Launch
from holdfast.tools.sandbox.sandbox import Sandbox
from holdfast.tools.sandbox.system_paths import visible_paths

if TYPE_CHECKING:
    from holdfast.tools.sandbox.plan import WallPlan

__all__ = ["BubblewrapBackend"]

_PROBE_S: Final = 15.0
_FILTER_FD, _ARGUMENTS_FD, _INNER_FD = 3, 4, 5
_HELD_FD: Final = 9
"""Copy of the socket to the proxy for the first process of the wall: above all descriptors that can be passed, and the
last number that each shell can name."""
_OWN_PROCESSES: Final = 4
"""Processes of bubblewrap that the limit of processes may count."""


class BubblewrapBackend:
    """Starts programs behind walls that bubblewrap builds."""

    name = "bwrap"
    layers: tuple[str, ...] = ("namespaces",)
    missing: Mapping[str, str] = MappingProxyType({})

    def probe(self) -> str | None:
        """Return None if this machine can build the wall, otherwise the reason why it cannot. May block for seconds."""
        if not sys.platform.startswith("linux"):
            return "it needs Linux"
        if os.geteuid() == 0:
            return "inside bubblewrap root would still be root; run the server as an ordinary user"
        if shutil.which("bwrap") is None:
            return "bubblewrap is not installed"
        if not call_filter():
            return f"no system call filter is known for the processor {os.uname().machine}"
        with tempfile.TemporaryDirectory(prefix="holdfast-probe-") as folder:
            inner = os.path.join(folder, "protected")
            os.mkdir(inner)
            try:
                launch = self.launch(plan_wall(Sandbox(), folder=folder, protected=[inner]), ["/bin/sh", "-c", ":"])
                ended = process_host().run_blocking(
                    launch.argv,
                    timeout_s=_PROBE_S,
                    cwd=launch.directory,
                    env=launch.environment,
                    pass_fds=launch.pass_fds,
                    name="sandbox probe",
                )
            except (OSError, TimeoutError, NotSupported) as error:
                return str(error)
            for fd in launch.pass_fds:
                os.close(fd)
        if ended.returncode == 0:
            return None
        said = ended.stderr.decode("utf-8", "replace").strip().splitlines()
        return said[-1] if said else f"a program inside ended with exit code {ended.returncode}"

    def launch(self, plan: WallPlan, argv: Sequence[str]) -> Launch:
        """Return how to start a program behind the wall of a plan.

        Raises:
            NotSupported: if a program that starts the wall is not installed.
        """
        bwrap = find_program("bwrap")
        inside = (*limited_inside(plan.sandbox.processes + _OWN_PROCESSES), *argv)
        outer, inner = _mounts(plan)
        environment = {**plan.environment, "TMPDIR": "/tmp"}
        network = network_request(plan)
        outside: tuple[str, ...] = ()
        if network is not None:
            carrier = str(_INNER_FD + bool(inner))  # the descriptor that `open_network` adds
            outside = (f"exec {_HELD_FD}<&{carrier}",)
            outer = ["--sync-fd", str(_HELD_FD), *outer]
            inside = (*_opener(), carrier, ",".join(PROXY_VARIABLES), *inside)
            environment |= dict.fromkeys(DIRECT_VARIABLES, "")
        filtered = ("--cap-drop", "ALL", "--unshare-user", "--disable-userns", "--seccomp", str(_FILTER_FD))
        end = ("--remount-ro", "/proc", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", plan.directory)
        words: tuple[str, ...] = (bwrap, "--args", str(_ARGUMENTS_FD), "--")
        if inner:
            nested = ("--die-with-parent", "--bind", "/", "/", "--dev-bind", "/dev", "/dev")
            words = (*words, bwrap, "--args", str(_INNER_FD), "--")
            arguments = [(*_outer(plan), *outer), (*filtered, *nested, *inner, *end)]
        else:
            arguments = [(*filtered, *_outer(plan), *outer, *end)]
        fds = memory_files(call_filter() or b"", *map(_packed, arguments))
        return Launch(
            argv=(*limited_outside(plan.sandbox, idle=plan.idle, more=outside), *words, *inside),
            environment=environment,
            directory="/",
            pass_fds=fds,
            network_request=network,
        )


@functools.cache
def _opener() -> tuple[str, ...]:
    """Return the words that start `loopback` inside the wall, with the interpreter itself and not a link to it.

    A link may be in a folder that programs of the session can change.
    """
    text = Path(loopback.__file__).read_text("utf-8")
    return (os.path.realpath(sys.executable), "-I", "-S", "-c", text)


def _outer(plan: WallPlan) -> tuple[str, ...]:
    size = str(plan.sandbox.scratch_bytes)
    scratch = ("--size", size, "--perms", "1777", "--tmpfs")
    own = ("--proc", "/proc", *_covered_proc(), "--dev", "/dev", *scratch, "/dev/shm", *scratch, "/tmp")
    return ("--unshare-all", "--unshare-user", "--die-with-parent", *own)


def _covered_proc() -> list[str]:
    """Return arguments that cover what ``/proc`` tells of the host and of its user's keys."""
    files, folders = host_paths()
    words = [word for path in files for word in ("--ro-bind", "/dev/null", os.fsdecode(path))]
    for path in map(os.fsdecode, folders):
        words += ["--size", "4096", "--perms", "0755", "--tmpfs", path, "--remount-ro", path]
    return words


def _mounts(plan: WallPlan) -> tuple[list[str], list[str]]:
    """Return the mounts for the first bubblewrap, and those for the second one, which no link can lead astray."""
    readable, links = visible_paths(plan)
    shown = dict.fromkeys((*readable, *plan.protected), "--ro-bind") | dict.fromkeys(plan.writable, "--bind")
    covered = {path: os.path.isdir(path) for path in plan.hidden if _is_below(path, shown) and os.path.exists(path)}
    first = [word for path, target in links for word in ("--symlink", target, path)]
    second: list[str] = []
    for path in sorted({*shown, *covered}):  # deeper paths are mounted over their parents
        if path in covered:
            first += ["--tmpfs", path] if covered[path] else ["--ro-bind", "/dev/null", path]
        else:
            mounts = second if _is_below(path, plan.writable) else first
            mounts += [shown[path], path, path]
    for path, is_folder in covered.items():
        first += ["--remount-ro", path] if is_folder else []
    return first, second


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path.startswith(f"{folder.rstrip('/')}/") for folder in folders)


def _packed(words: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(word) + b"\0" for word in words)
