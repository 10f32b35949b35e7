"""Confinement of programs: visible files, network access and resource limits.

The confinement depends on the machine; `find_isolation` determines which kind this machine provides.

==================  =========================================================  ==========================
                    ``namespaces`` and ``bwrap``                                ``none``
==================  =========================================================  ==========================
network             with ``deny``, no access, not even to the loopback          same as this process
files               can read the system, the interpreter and ``readable``       same as this user
                    paths; can write the workspace and a private, initially
                    empty ``/tmp`` and ``/dev/shm`` in memory
other processes     can see, signal and trace only its own processes            same as this user
limits per process  address space, CPU seconds, file size, open files           same limits
processes           limited by ``RLIMIT_NPROC`` (from Linux 5.14); for real     no limit
                    root, by ``pid_max`` (from Linux 6.14, at least 301)
set-uid files       cannot create set-uid files or file capabilities            same, on Linux
==================  =========================================================  ==========================

The sandbox protects against mistakes and against misbehaving models, but not against kernel exploits. It does not limit
the disk space of the workspace, or the memory and CPU time of all processes together. To limit these, use containers or
separate machines.
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
from holdfast.runtime.process_host import process_host
from holdfast.tools.sandbox.environment import clean_environment
from holdfast.tools.sandbox.system_call_filter import system_call_filter

__all__ = ["Isolation", "Sandbox", "find_isolation", "interpreter_paths"]

_START = str(Path(__file__).with_name("launcher.py"))
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
    """The isolation that this machine can provide.

    Parameters:
        kind: ``namespaces`` (created by Holdfast), ``bwrap`` (namespaces created by bubblewrap), or ``none``.
        reason: reason why a better kind of isolation is not available; empty for ``namespaces``.
    """

    kind: Literal["namespaces", "bwrap", "none"]
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind} ({self.reason})" if self.reason else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """Limits and access of a confined program.

    Parameters:
        network: ``deny`` blocks network access; if this machine cannot enforce that, programs are refused. ``allow``
            gives programs this process's network access, including loopback; on a machine without isolation, programs
            then run with limits only.
        memory_bytes: maximum address space of each process, in bytes.
        cpu_s: maximum CPU time of each process, in seconds; at the limit, the process receives SIGXCPU, and SIGKILL a
            second later.
        processes: maximum number of concurrent processes and threads; ignored on a machine without isolation.
        open_files: maximum number of open descriptors of each process.
        file_bytes: maximum size of a file that the program writes, in bytes.
        scratch_bytes: maximum size in bytes of the program's own ``/tmp``, and of its own ``/dev/shm``; not enforced
            with bubblewrap.
        readable: files and folders that the program may read in addition to the system and the interpreter.
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
        """Check that `isolation` can enforce the setting `network`.

        Raises:
            NotSupported: if `network` is ``deny`` and this machine cannot enforce that.
        """
        if self.network == "deny" and isolation.kind == "none":
            raise NotSupported(
                f"network isolation is not available on this machine: {isolation.reason}",
                hint="allow user namespaces or install bubblewrap; or set network='allow' to run with limits only",
            )

    def describe(self, isolation: Isolation) -> str:
        """Return a short description of the confinement for models and operators."""
        limits = (
            f"Each process may use {self.memory_bytes >> 20:,} MiB of memory, {self.cpu_s} CPU seconds and files of "
            f"{self.file_bytes >> 20:,} MiB."
        )
        if isolation.kind == "none":
            return f"Not isolated on this machine: it has the server user's network and file access. {limits}"
        network = "No network access." if self.network == "deny" else "It has network access."
        return f"{network} It can write only to the workspace and to /tmp, which is emptied afterwards. {limits}"

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
        """Return the command that runs `argv` confined.

        If the confinement cannot be set up, the command exits with 125 and writes one line to standard error.

        Parameters:
            argv: program, which is looked up in the sandbox's PATH, and its arguments.
            isolation: isolation of this machine, as returned by `find_isolation`.
            directory: working folder of the program; must be inside a visible path.
            writable: folders that the program may change.
            readable: paths that the program may read in addition to the system and ``self.readable``.
            hidden: real paths that are replaced with empty files and folders if they exist; writable folders below
                them stay visible.

        Raises:
            NotSupported: if `check` fails, or if a hidden path lies in a writable folder, because a path that does not
                exist yet cannot be hidden, and the program could create it.
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
    """Return the parts of this interpreter's installation that a script needs.

    The other contents of the installation's folder are left out, because it may be a project folder, with settings,
    workspaces and other files.
    """
    own = [os.path.join(sys.prefix, part) for part in _INTERPRETER]
    return own + [os.path.join(sys.base_prefix, part) for part in (*_INTERPRETER, *_INSTALLATION)]


def _check_hidden(write: Collection[str], hidden: Sequence[str]) -> None:
    for path in hidden:
        for folder in write:
            if path == folder or path.startswith(f"{folder.rstrip('/')}/"):
                raise NotSupported(
                    f"folder {folder} contains {path} of the host, so programs are not confined there",
                    hint="give the tools a workspace that does not contain the store, such as a subfolder",
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
    """Find out how this machine can isolate programs, by running small programs; the result is cached.

    The first call usually blocks for at most a second, rarely for up to 30 seconds, so call this function from a
    thread. ``find_isolation.cache_clear()`` clears the cached result.
    """
    if not sys.platform.startswith("linux"):
        return Isolation(kind="none", reason="namespaces need Linux")
    failed = _try(Isolation(kind="namespaces"))
    if failed is None:
        return Isolation(kind="namespaces")
    if os.geteuid() == 0:  # inside bubblewrap root would still be root
        return Isolation(kind="none", reason=failed)
    if shutil.which("bwrap") is None:
        return Isolation(kind="none", reason=f"{failed}; bubblewrap is not installed")
    failed_too = _try(Isolation(kind="bwrap"))
    if failed_too is None:
        return Isolation(kind="bwrap", reason=failed)
    return Isolation(kind="none", reason=f"{failed}; {failed_too}")


def _try(isolation: Isolation) -> str | None:
    """Return None if `isolation` blocks a program's network access, or else the reason why it does not."""
    argv = Sandbox().command([sys.executable, "-I", "-S", "-c", _PROBE], isolation=isolation, directory="/tmp")
    try:
        ended = process_host().run_blocking(argv, timeout_s=_PROBE_S, cwd="/", env=clean_environment(), name="sandbox")
    except (OSError, TimeoutError) as error:
        return f"{isolation.kind}: {error}"
    if ended.returncode == 0:
        return None
    said = ended.stderr.decode("utf-8", "replace").strip().splitlines()
    return said[-1] if said else f"{isolation.kind}: a program inside still had network access"
