"""The local token: what every program shows, on loopback too, to a server whose agents do what a model says.

It lies beside the store in a file that only its owner can read, so that whoever may read the store finds it, and other
users of the machine, pages in a browser and containers that share the network do not. There is a new one at each start.
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
    """Where the token of the store with this URL lies; None for a store without a file."""
    file = store.removeprefix("sqlite:///")
    return Path(f"{file}-token").absolute() if file and file != store else None


def read_token(store: str) -> str | None:
    """The token of a store; None if there is none, or it is not ours to read."""
    path = token_path(store)
    return None if path is None else _read(path)


def keep_token(store: str) -> tuple[str, Path]:
    """A new token for a store, and the file that has it; for a store without a file a temporary one.

    The caller takes the file away in the end. What an earlier start left is replaced.

    Raises:
        ConfigurationError: the file cannot be written.
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
            f"the local token cannot be kept in {path or tempfile.gettempdir()}: {error.strerror}",
            hint="make that folder writable",
        ) from None


def remove_token(store: str) -> None:
    """Take away a token that nothing needs any more."""
    path = token_path(store)
    if path is not None and _read(path) is not None:
        path.unlink(missing_ok=True)


def _read(path: Path) -> str | None:
    """The token in a file that belongs to this user and that nobody else can read or replace by a link."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        private = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
        text = file.read(_LIMIT).decode("ascii", "replace").strip() if private else ""
    return text if _TOKEN.fullmatch(text) else None
