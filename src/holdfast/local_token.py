"""The local token, which clients must present, even on loopback, to a server with agents that run what a model writes.

It is in a file beside the store, readable by its owner only. So programs that may read the store can find the token;
other users of the machine, browser pages and containers that share the network cannot. Every start creates a new one.
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
    """Whether only this machine can reach a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def token_path(store: str) -> Path | None:
    """Return the path of the token of the store with this URL; None for a store without a file."""
    file = store.removeprefix("sqlite:///")
    return Path(f"{file}-token").absolute() if file and file != store else None


def read_token(store: str) -> str | None:
    """Return the token of a store; None if it is missing or not readable by this user only."""
    path = token_path(store)
    return None if path is None else _read(path)


def keep_token(store: str) -> tuple[str, Path]:
    """Create a token for a store; return it and its file. For a store without a file, use a temporary file.

    The caller must remove the file in the end. The file of an earlier start is replaced.

    Raises:
        ConfigurationError: the file is not writable.
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
    """Delete a token that is no longer needed."""
    path = token_path(store)
    if path is not None and _read(path) is not None:
        path.unlink(missing_ok=True)


def _read(path: Path) -> str | None:
    """Return the token in a file that belongs to this user, is private to it, and is not a symbolic link."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        private = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
        text = file.read(_LIMIT).decode("ascii", "replace").strip() if private else ""
    return text if _TOKEN.fullmatch(text) else None
