"""The settings of one of several workers: what limits a host is divided, so that all workers keep to it together."""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.errors import ConfigurationError
from holdfast.host.program_accounts import program_limits
from holdfast.settings import Settings

__all__ = ["worker_settings"]

_HOST: Final = ("max_runs", "max_connections", "memory_limit_bytes")
"""Limits of the host: refused if a worker would get too little of them."""
_PRINCIPAL: Final = (
    "principal_threads",
    "principal_abandoned",
    "principal_background",
    "principal_streams",
    "principal_connections",
    "principal_program_connections",
    "principal_program_traffic_bytes",
    "principal_program_processes",
    "principal_program_files",
)
"""Limits of each principal, which each worker has at least 1 of."""
_RATES: Final = ("principal_rate_per_s", "principal_fires_per_s")
_LEAST_MEMORY_BYTES: Final = 1_000_000


def worker_settings(settings: Settings, *, workers: int) -> Settings:
    """Return the settings of each of `workers` processes that together keep to `settings`.

    ``principal_memory_bytes`` stays as it is, because a large request is handled by a single worker. So does
    ``principal_runs``: all hosts of a store divide it among them (`holdfast.host.slot_queue.SlotQueue.share`).

    Raises:
        ConfigurationError: if a limit of the host is too small to be divided.
    """
    changes: dict[str, object] = {}
    for name in _HOST:
        whole = getattr(settings, name)
        least = _LEAST_MEMORY_BYTES if name == "memory_limit_bytes" else 1
        if whole // workers < least:
            raise ConfigurationError(
                f"{name}={whole:,} is too low for {workers} workers",
                hint=f"set it to {least * workers:,} or more, or start fewer workers",
            )
        changes[name] = whole // workers
    for name in _PRINCIPAL:
        changes[name] = max(1, getattr(settings, name) // workers)
    for name in _RATES:
        changes[name] = getattr(settings, name) / workers
    changes["principal_program_memory_bytes"] = max(1, program_limits(settings).memory_bytes // workers)
    return msgspec.structs.replace(settings, **changes)
