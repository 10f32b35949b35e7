"""The environment that programs of tools get: what a program needs to work, and no secret of the host's."""

from __future__ import annotations

import fnmatch
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
"""So that no program waits for a person who is not there."""


def is_secret(name: str) -> bool:
    """Whether an environment variable of this name is taken for a secret."""
    return any(fnmatch.fnmatchcase(name.upper(), pattern) for pattern in _SECRET)


def clean_environment(passed: Sequence[str] = (), added: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a program of a tool.

    It keeps honest programs from telling secrets; it is no wall: a program of the same user can read what that user
    can, this process's own environment too.

    Parameters:
        passed: further names, or patterns such as ``XDG_*``, of this process's variables to hand on.
        added: variables with their values; they win.

    Raises:
        ConfigurationError: `passed` names a secret, or `added` a variable of Holdfast's.
    """
    for name in passed:
        if is_secret(name):
            raise ConfigurationError(
                f"the environment variable {name} looks like a secret and is not handed to the programs of tools",
                hint="if they need it, give its value on purpose: environment={...}",
            )
    for name in added or {}:
        if name.upper().startswith("HOLDFAST_"):
            raise ConfigurationError(f"{name} cannot be given to the programs of tools: HOLDFAST_* is the host's own")
    patterns = (*_PASSED, *passed)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not is_secret(name) and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }
    return {"PATH": os.defpath} | _QUIET | kept | dict(added or {})
