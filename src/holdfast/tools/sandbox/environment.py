"""Environment variables for programs that tools start, without the host's secrets."""

from __future__ import annotations

import fnmatch
import functools
import os
from collections.abc import Mapping, Sequence

from holdfast.errors import ConfigurationError

__all__ = ["clean_environment", "is_secret"]

_PASSED = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LANGUAGE",
    "LC_*",
    "TZ",
    "TMPDIR",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "SYSTEMROOT",
)
_SECRET = (
    "HOLDFAST_*",
    "*API_KEY*",
    "*APIKEY*",
    "*ACCESS_KEY*",
    "*PRIVATE_KEY*",
    "*_KEY",
    "*TOKEN*",
    "*SECRET*",
    "*PASSWORD*",
    "*PASSWD*",
    "*CREDENTIAL*",
    "*_DSN",
    "*DATABASE_URL*",
)
_QUIET = {"PAGER": "cat", "GIT_PAGER": "cat", "GIT_TERMINAL_PROMPT": "0", "TERM": "dumb"}
"""Variables that prevent programs from waiting for user input."""


@functools.lru_cache(2048)
def is_secret(name: str) -> bool:
    """Return whether an environment variable of this name counts as a secret."""
    return any(fnmatch.fnmatchcase(name.upper(), pattern) for pattern in _SECRET)


@functools.lru_cache(2048)
def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def clean_environment(passed: Sequence[str] = (), added: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a program that a tool starts.

    Leaving out secrets prevents programs from leaking them by accident, but is not a security boundary: walls are. A
    program without a wall can read everything that its user can read.

    Parameters:
        passed: names, or patterns such as ``XDG_*``, of additional variables of this process to pass on.
        added: variables to add, with their values; they replace variables of this process. None adds no variables.

    Raises:
        ConfigurationError: if `passed` names a secret, or if `added` sets a ``HOLDFAST_*`` variable.
    """
    for name in passed:
        if is_secret(name):
            raise ConfigurationError(
                f"environment variable {name} looks like a secret and is not passed on to tool programs",
                hint="to pass it deliberately, set its value with environment={...}",
            )
    for name in added or {}:
        if name.upper().startswith("HOLDFAST_"):
            raise ConfigurationError(f"{name} is reserved: HOLDFAST_* variables are not passed to tool programs")
    patterns = (*_PASSED, *passed)
    kept = {name: value for name, value in os.environ.items() if not is_secret(name) and _matches(name, patterns)}
    return {"PATH": os.defpath} | _QUIET | kept | dict(added or {})
