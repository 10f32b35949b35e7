"""The local token, which a server requires even on loopback if its agents execute code that a model has written.

The token is stored in a file beside the store, and only the file's owner can read it. A program that may read the store
can therefore read the token. Other users of the machine, web pages and containers that share the network cannot. The
server creates a new token at every start.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
import tempfile
from pathlib import Path

from holdfast import ids
from holdfast.errors import ConfigurationError

__all__ = ["is_loopback", "keep_token", "read_token", "remove_token", "token_path"]

_PREFIX = "hft_"
_TOKEN = re.compile(r"hft_[0-9a-z]{32}")
_LIMIT = 200


def is_loopback(host: str) -> bool:
    """Return whether a server that listens on `host` is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def token_path(store: str) -> Path | None:
    """Return the path of the token file for the store with the URL `store`; None if the store is not a file."""
    file = store.removeprefix("sqlite:///")
    return Path(f"{file}-token").absolute() if file and file != store else None


def read_token(store: str) -> str | None:
    """Return the local token for the store with the URL `store`.

    Return None if the token file is missing, belongs to another user, or is accessible to other users.
    """
    path = token_path(store)
    return None if path is None else _read(path)


def keep_token(store: str) -> tuple[str, Path]:
    """Create a local token for the store with the URL `store`, and return the token and the path of its file.

    The token file of an earlier start is replaced. If the store is not a file, the token is written to a temporary
    file. The caller must delete the token file when the server stops.

    Raises:
        ConfigurationError: if the token file cannot be written.
    """
    path = token_path(store)
    token = ids.secret(_PREFIX)
    folder = None if path is None else path.parent
    try:
        descriptor, name = tempfile.mkstemp(prefix="holdfast-", suffix="-token", dir=folder)  # mode 0600
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(f"{token}\n")
        fresh = Path(name)
        return token, fresh if path is None else fresh.replace(path)
    except OSError as error:
        raise ConfigurationError(
            f"failed to write the local token to {path or tempfile.gettempdir()}: {error.strerror}",
            hint="make that folder writable",
        ) from None


def remove_token(store: str) -> None:
    """Delete the local token of the store with the URL `store`.

    Do nothing if the token file is missing, is accessible to other users, or contains something else.
    """
    path = token_path(store)
    if path is not None and _read(path) is not None:
        path.unlink(missing_ok=True)


def _read(path: Path) -> str | None:
    """Return the token in the file at `path`; None if the file has no valid token or is not safe to read.

    A file is safe to read if it belongs to this user, other users have no access, and it is not a symbolic link.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        private = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
        text = file.read(_LIMIT).decode("ascii", "replace").strip() if private else ""
    return text if _TOKEN.fullmatch(text) else None
