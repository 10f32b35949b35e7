"""Choose the backend that builds walls: by the setting ``sandbox``, or the first that this machine supports.

Only backends against which the escapes of the tests were run are chosen without being named.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, cast

from holdfast.errors import ConfigurationError, NotSupported
from holdfast.settings import load_settings
from holdfast.tools.sandbox.port import SandboxBackend

__all__ = [
    "AUTOMATIC",
    "BACKENDS",
    "BackendChoice",
    "BackendName",
    "are_programs_unwalled",
    "find_backend",
    "find_choice",
    "use_backend",
]

BackendName = Literal["auto", "linux", "bwrap", "podman", "docker", "none"]

BACKENDS: Final = {
    "linux": "holdfast.tools.sandbox.backends.linux:LinuxBackend",
    "bwrap": "holdfast.tools.sandbox.backends.bwrap:BubblewrapBackend",
    "podman": "holdfast.tools.sandbox.backends.container:PodmanBackend",
    "docker": "holdfast.tools.sandbox.backends.container:DockerBackend",
    "none": "holdfast.tools.sandbox.backends.unwalled:UnwalledBackend",
}
"""Class of each backend, by the name in the setting; the classes take no arguments."""

AUTOMATIC: Final = ("linux", "bwrap")
"""Backends that ``auto`` tries, in this order."""

_chosen: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """The backend that builds the walls, and why others were rejected.

    Parameters:
        backend: the backend.
        rejected: backends that ``auto`` prefers and that this machine does not support, each with the reason.
    """

    backend: SandboxBackend
    rejected: Mapping[str, str]

    @property
    def lacks(self) -> tuple[str, ...]:
        """Layers of the wall that this machine lacks, and backends that would be preferred; empty if none."""
        return (*self.backend.missing, *self.rejected)

    def describe(self) -> str:
        """Return the backend with its layers, the reasons for missing layers, and why others were rejected."""
        text = f"{self.backend.name} ({', '.join(self.backend.layers)})"
        if self.backend.missing:
            text += f" only: {'; '.join(self.backend.missing.values())}"
        return text + "".join(f"; not {name}: {reason}" for name, reason in self.rejected.items())


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Use the backend `name` for this process's tools until the block exits; a host does so with its setting."""
    global _chosen
    _chosen = (*_chosen, name)
    try:
        yield
    finally:
        left = list(_chosen)
        left.remove(name)
        _chosen = tuple(left)


def find_backend(name: str | None = None) -> SandboxBackend:
    """Return the backend that builds the walls of this process's tools; see `find_choice`."""
    return find_choice(name).backend


def find_choice(name: str | None = None) -> BackendChoice:
    """Return the backend that builds the walls of this process's tools, with the reasons; the result is cached.

    The first call may block for seconds, so call this function from a thread.

    Parameters:
        name: name of a backend, or ``auto``; None means the host's setting ``sandbox``.

    Raises:
        NotSupported: if this machine cannot build the wall. The error names the remedy.
        ConfigurationError: if the name is unknown.
    """
    found = _find(name or (_chosen[-1] if _chosen else load_settings().sandbox))
    if isinstance(found, NotSupported):
        raise found
    return found


def are_programs_unwalled() -> bool:
    """Return whether the operator chose that programs run without a wall. May block for seconds."""
    try:
        return find_backend().name == "none"
    except NotSupported:
        return False


@functools.cache
def _find(name: str) -> BackendChoice | NotSupported:
    rejected: dict[str, str] = {}
    for one in AUTOMATIC if name == "auto" else (name,):
        if one not in BACKENDS:
            if name == "auto":
                continue
            raise ConfigurationError(f"unknown sandbox {one!r}", hint=f"choose auto or {', '.join(BACKENDS)}")
        module, _, made = BACKENDS[one].partition(":")
        backend = cast("SandboxBackend", getattr(importlib.import_module(module), made)())
        reason = backend.probe()
        if reason is None:
            return BackendChoice(backend=backend, rejected=rejected)
        rejected[one] = reason
    hint = 'allow user namespaces or Landlock (see "holdfast doctor")' if name == "auto" else "choose another sandbox"
    return NotSupported(
        f"this machine cannot confine programs: {'; '.join(f'{one}: {reason}' for one, reason in rejected.items())}",
        hint=f'{hint}, or set sandbox = "none" to run programs with all rights of the server\'s user',
    )
