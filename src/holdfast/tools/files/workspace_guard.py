"""Folders that cannot be workspaces, because they contain the host's settings, data or code.

An agent that can write the settings, the store, a module of the host or the host's interpreter can take over the host
at its next start. So a workspace may neither contain nor lie in any of these, not even through links, and even if the
settings file does not exist yet. The same holds for files that other programs run or trust: system folders, the SSH
keys in the home folder (and so the home folder itself), and the internals of a Git repository, whose hooks run with
the next commit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import PurePath

from holdfast.errors import ConfigurationError
from holdfast.settings import config_file, data_folder
from holdfast.tools.sandbox.system_paths import interpreter_paths

__all__ = ["WORKSPACES", "check_folder", "own_paths"]

WORKSPACES = "workspaces"
"""Subfolder of Holdfast's data folder that holds session workspaces by default."""

_SYSTEM = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/sbin", "/sys", "/var/spool"),
    *("/usr/bin", "/usr/include", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/sbin", "/usr/share"),
    *("/usr/local/bin", "/usr/local/etc", "/usr/local/lib", "/usr/local/sbin"),
)
_SHARED_MEMORY = "/dev/shm"
_IN_REPOSITORY = ("HEAD", "objects", "refs")


def check_folder(folder: str | os.PathLike[str], private: Mapping[str, str] | None = None) -> None:
    """Check that an agent may work in `folder`.

    Parameters:
        folder: root of a workspace; the folder need not exist.
        private: additional paths that the workspace may not contain, each with what it is, such as ``the store``.

    Raises:
        ConfigurationError: if `folder` contains or lies in a protected file or folder, which the message names.
    """
    root = os.path.realpath(folder)
    for what, path in _protected(private or {}):
        if _contains(root, path):
            raise ConfigurationError(
                f"the workspace {root} contains {what} ({path}), which an agent could then change",
                hint="choose a folder that contains only the agent's files, such as --workspace work; "
                "by default each session gets its own",
            )
    for what, path in _closed(root):
        if _contains(path, root) and not _contains(_workspaces(), root):
            raise ConfigurationError(
                f"the workspace {root} lies in {what} ({path})",
                hint="choose another folder, such as --workspace work",
            )


def own_paths() -> tuple[str, ...]:
    """Return the real paths, other than the store's, that confined programs may never see; they need not exist."""
    return (_real(config_file()), _real(data_folder()), _real(".env"))


def _protected(private: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield "the settings file", _real(config_file())
    yield "Holdfast's own folder", _real(data_folder())
    yield "the file of secrets", _real(".env")
    for path, what in private.items():
        yield what, os.path.realpath(path)
    for prefix in {sys.prefix, sys.base_prefix}:
        yield "the Python environment", os.path.realpath(prefix)
    for place in sys.path:
        yield "a folder that Python imports from", os.path.realpath(place or ".")
    for folder, name in _modules():
        yield "code of the host", os.path.join(folder, name)
    yield from _of_everybody()


def _closed(root: str) -> Iterator[tuple[str, str]]:
    yield "Holdfast's own folder", _real(data_folder())
    for path in interpreter_paths():
        yield "the Python environment", os.path.realpath(path)
    yield "Holdfast's code", os.path.realpath(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    if not _contains(_SHARED_MEMORY, root):
        yield from _of_everybody()
    for folder in (root, *map(str, PurePath(root).parents)):
        if os.path.basename(folder) == ".git" or all(
            os.path.exists(os.path.join(folder, name)) for name in _IN_REPOSITORY
        ):
            yield "the internals of a Git repository", folder


def _of_everybody() -> Iterator[tuple[str, str]]:
    for path in _SYSTEM:
        yield "a system folder", os.path.realpath(path)
    yield "the folder of your SSH keys", os.path.realpath(os.path.expanduser("~/.ssh"))


def _modules() -> set[tuple[str, str]]:
    """Return the folder and name of each loaded module's file, with links resolved."""
    folders: dict[str, str] = {}
    found = set()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str):
            continue
        if os.path.islink(file):
            file = os.path.realpath(file)
        folder, name = os.path.split(file)
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        found.add((folders[folder], name))
    return found


def _workspaces() -> str:
    return os.path.join(_real(data_folder()), WORKSPACES)


def _real(path: str | os.PathLike[str]) -> str:
    """Resolve the links in the parent folders of `path`, but not its last part: the name itself is protected."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)


def _contains(folder: str, path: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")
