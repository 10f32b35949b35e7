"""Confines a program: what of the machine it sees, whether it has a network, and how much it may use.

What holds depends on the machine; `find_isolation` tries it once and says so.

==================  =========================================================  ==========================
                    ``namespaces`` and ``bwrap``                                ``none``
==================  =========================================================  ==========================
network             none with ``deny``, not even this machine's loopback        whatever this process has
files               reads the system, the interpreter and what is named;        whatever this user may
                    writes the workspace, ``/tmp`` and ``/dev/shm`` (both its own, empty, in memory)
other processes     sees, signals and traces only its own                       all of this user's
limits per process  address space, CPU seconds, size of a file, open files      the same
processes           bounded: by ``RLIMIT_NPROC`` (Linux 5.14; not for real       not bounded
                    root), for root by the namespace (Linux 6.14, at least 301)
set-uid files       cannot be made, nor file capabilities                      the same, on Linux
==================  =========================================================  ==========================

Not confined by any: the kernel itself (a sandbox for mistakes and for what a model does, not for kernel exploits), the
disk space of the workspace, and memory and CPU summed over processes. Use containers or machines for those.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from holdfast.errors import NotSupported
from holdfast.runtime.processes import process_host
from holdfast.tools.environment import clean_environment
from holdfast.tools.system_call_filter import system_call_filter

__all__ = ["Isolation", "Sandbox", "find_isolation", "interpreter_paths"]

_START = str(Path(__file__).with_name("sandbox_start.py"))
_PROBE_S = 15.0
_PROBE = "import socket; raise SystemExit([name for _, name in socket.if_nameindex()] != ['lo'])"
_SYSTEM = (
    "/bin",
    "/lib",
    "/lib32",
    "/lib64",
    "/sbin",
    "/usr",
    "/etc/alternatives",
    "/etc/ca-certificates",
    "/etc/ca-certificates.conf",
    "/etc/group",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/pki",
    "/etc/protocols",
    "/etc/resolv.conf",
    "/etc/services",
    "/etc/ssl",
    "/etc/timezone",
)
_INTERPRETER = ("bin", "include", "lib", "lib64", "pyvenv.cfg")
_INSTALLATION = ("libexec", "share", "ssl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """What this machine can do to confine a program.

    Parameters:
        kind: ``namespaces`` (made by us), ``bwrap`` (made by bubblewrap), or ``none``.
        reason: why not something better; empty for ``namespaces``.
    """

    kind: Literal["namespaces", "bwrap", "none"]
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind} ({self.reason})" if self.reason else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """How a program is confined.

    Parameters:
        network: ``deny``: no network at all; where this machine cannot do that, programs are refused.
            ``allow``: the network of this process, its loopback included; where this machine has no isolation,
            programs then run with limits only.
        memory_bytes: address space of each process.
        cpu_s: CPU seconds of each process; SIGXCPU, and a second later SIGKILL.
        processes: processes and threads at once.
        open_files: open descriptors of each process.
        file_bytes: size of a file that it writes.
        scratch_bytes: size of its own ``/tmp`` and ``/dev/shm``, each.
        readable: files and folders that it may read besides the system and the interpreter.
    """

    network: Literal["deny", "allow"] = "deny"
    memory_bytes: int = 2 << 30
    cpu_s: int = 60
    processes: int = 64
    open_files: int = 256
    file_bytes: int = 256 << 20
    scratch_bytes: int = 64 << 20
    readable: tuple[str | os.PathLike[str], ...] = ()

    def check(self, isolation: Isolation) -> None:
        """Is that enough?

        Raises:
            NotSupported: the network is to be denied, and this machine cannot do that.
        """
        if self.network == "deny" and isolation.kind == "none":
            raise NotSupported(
                f"a program cannot be kept off the network here: {isolation.reason}",
                hint="allow user namespaces or install bubblewrap; or give network='allow' to run it with limits only",
            )

    def describe(self, isolation: Isolation) -> str:
        """What holds for a program, in a sentence or two that a model and an operator can use."""
        limits = (
            f"Each process may use {self.memory_bytes >> 20:,} MiB of memory, {self.cpu_s} CPU seconds and files of "
            f"{self.file_bytes >> 20:,} MiB."
        )
        if isolation.kind == "none":
            return f"Not isolated on this machine: it has the network and the files of the server's user. {limits}"
        network = "There is no network." if self.network == "deny" else "It has network access."
        return f"{network} It can write only in the workspace and in /tmp, which is emptied afterwards. {limits}"

    def command(
        self,
        argv: Sequence[str],
        *,
        isolation: Isolation,
        directory: str | os.PathLike[str],
        writable: Sequence[str | os.PathLike[str]] = (),
        readable: Sequence[str | os.PathLike[str]] = (),
        hidden: Sequence[str] = (),
    ) -> list[str]:
        """The words that start `argv` confined; with the exit code 125 and a line on standard error when that fails.

        Parameters:
            argv: the program, found by the PATH inside, and its arguments.
            isolation: what `find_isolation` found.
            directory: where it starts; must be in something that it may see.
            writable: folders that it may change.
            readable: what it may read besides the system and ``self.readable``.
            hidden: what of all that it finds empty, where it is there, but for what it may change; real paths.

        Raises:
            NotSupported: as `check`; or something to hide lies in a folder that it may change: what is not there yet
                cannot be hidden, and it could make it.
        """
        self.check(isolation)
        limits = {
            "memory_bytes": self.memory_bytes,
            "cpu_s": self.cpu_s,
            "processes": self.processes,
            "open_files": self.open_files,
            "file_bytes": self.file_bytes,
        }
        if isolation.kind == "none":
            return [*_start(limits | {"processes": None}, None), *argv]
        write = {os.path.realpath(path) for path in writable}
        _check_hidden(write, hidden)
        interpreter = [os.path.dirname(_START), *interpreter_paths(), os.path.realpath(sys.executable)]
        paths = [os.path.abspath(path) for path in (*_SYSTEM, *interpreter, *self.readable, *readable)]
        present = [path for path in paths if os.path.exists(path)]
        links = {path: os.readlink(path) for path in present if os.path.islink(path)}
        places: dict[str, Any] = {
            "network": self.network == "allow",
            "links": sorted(links.items()),
            "read": sorted({*present, *map(os.path.realpath, present)} - links.keys() - write),
            "write": sorted(write),
            "hidden": sorted(path for path in hidden if os.path.exists(path)),
            "directory": os.path.realpath(directory),
            "scratch_bytes": self.scratch_bytes,
        }
        if isolation.kind == "namespaces":
            return [*_start(limits, places), *argv]
        return [*_bubblewrap(places), *_start(limits, None), *argv]


def _start(limits: Mapping[str, int | None], places: dict[str, Any] | None) -> list[str]:
    calls = system_call_filter() if sys.platform == "linux" else None
    words = json.dumps({"limits": limits, "places": places, "filter": None if calls is None else calls.hex()})
    return [sys.executable, "-I", "-S", _START, words]


def interpreter_paths() -> list[str]:
    """Return what a script needs to see of this interpreter's installation, and nothing else of its folder.

    An environment may lie in, or be, the folder of a project: with settings, workspaces and whatever else is in it.
    """
    own = [os.path.join(sys.prefix, part) for part in _INTERPRETER]
    return own + [os.path.join(sys.base_prefix, part) for part in (*_INTERPRETER, *_INSTALLATION)]


def _check_hidden(write: Collection[str], hidden: Sequence[str]) -> None:
    for path in hidden:
        for folder in write:
            if path == folder or path.startswith(f"{folder.rstrip('/')}/"):
                raise NotSupported(
                    f"a program cannot be confined to {folder}: {path} of the host lies in it",
                    hint="give the tools a workspace apart from the folder of the store, such as one below it",
                )


def _bubblewrap(places: dict[str, Any]) -> list[str]:
    words = ["bwrap", "--unshare-all", *(["--share-net"] if places["network"] else []), "--die-with-parent"]
    words += ["--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for path, target in places["links"]:
        words += ["--symlink", target, path]
    shown = [*((path, "--ro-bind") for path in places["read"]), *((path, "--bind") for path in places["write"])]
    for path, how in sorted(shown):
        words += [how, path, path]
    for path in places["hidden"]:
        if any(path.startswith(f"{folder}/") for folder in (*places["read"], *places["write"])):
            words += ["--tmpfs", path] if os.path.isdir(path) else ["--ro-bind", "/dev/null", path]
            for folder in places["write"]:
                words += ["--bind", folder, folder] if folder.startswith(f"{path}/") else []
    return [*words, "--remount-ro", "/", "--chdir", places["directory"], "--"]


@functools.cache
def find_isolation() -> Isolation:
    """Try once, with a program that looks for a network, what this machine can do. It blocks: a second at most, rarely
    up to 30; call it from a thread. ``find_isolation.cache_clear()`` forgets the answer.
    """
    if not sys.platform.startswith("linux"):
        return Isolation(kind="none", reason="only Linux has namespaces")
    failed = _try(Isolation(kind="namespaces"))
    if failed is None:
        return Isolation(kind="namespaces")
    if os.geteuid() == 0:  # in bubblewrap root would still be root
        return Isolation(kind="none", reason=failed)
    if shutil.which("bwrap") is None:
        return Isolation(kind="none", reason=f"{failed}; bubblewrap is not installed")
    failed_too = _try(Isolation(kind="bwrap"))
    if failed_too is None:
        return Isolation(kind="bwrap", reason=failed)
    return Isolation(kind="none", reason=f"{failed}; {failed_too}")


def _try(isolation: Isolation) -> str | None:
    """None when a program can be kept off the network so, else why not."""
    argv = Sandbox().command([sys.executable, "-I", "-S", "-c", _PROBE], isolation=isolation, directory="/tmp")
    try:
        ended = process_host().run_blocking(argv, timeout_s=_PROBE_S, cwd="/", env=clean_environment(), name="sandbox")
    except (OSError, TimeoutError) as error:
        return f"{isolation.kind}: {error}"
    if ended.returncode == 0:
        return None
    said = ended.stderr.decode("utf-8", "replace").strip().splitlines()
    return said[-1] if said else f"{isolation.kind}: a program inside still saw the network"
