"""All escapes, in the order of their classes."""

from __future__ import annotations

from tests.system.escapes import (
    approvals,
    bombs,
    channels,
    files,
    kernel,
    network,
    planting,
    principals,
    privileges,
    processes,
    proxied,
)

__all__ = ["ESCAPES"]

ESCAPES = (
    *files.ESCAPES,
    *processes.ESCAPES,
    *channels.ESCAPES,
    *network.ESCAPES,
    *proxied.ESCAPES,
    *privileges.ESCAPES,
    *kernel.ESCAPES,
    *planting.ESCAPES,
    *approvals.ESCAPES,
    *principals.ESCAPES,
    *bombs.ESCAPES,
)
