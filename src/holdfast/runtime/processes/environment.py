"""The environment of the runtime's own processes.

``/proc/<pid>/environ`` shows the initial environment of a process for as long as the process lives, even if variables
are deleted later. So the zygote and workers get only the variables that an interpreter and its libraries need to start;
provider keys stay in the host.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence

__all__ = ["start_environment"]

_PASSED = (
    "HOME",
    "LANG",
    "LANGUAGE",
    "LC_*",
    "LD_LIBRARY_PATH",
    "LOGNAME",
    "PATH",
    "PYTHON*",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
    "TMPDIR",
    "TZ",
    "USER",
    "VIRTUAL_ENV",
)


def start_environment(named: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment for a process of the runtime.

    Parameters:
        named: names of further variables of this process to pass on, or patterns such as ``AWS_*``.
    """
    patterns = (*_PASSED, *named)
    return {
        name: value
        for name, value in os.environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }
