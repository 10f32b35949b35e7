"""Names that were renamed since earlier versions. An old name is refused, with a hint that contains the new name.

The changelog lists all renamed names, including metrics and response fields, whose use Holdfast cannot detect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

__all__ = ["COMMANDS", "FLAGS", "METRICS", "RESPONSE_FIELDS", "ROUTES", "SETTINGS", "hint_of_route", "renamed_flag"]

SETTINGS: Mapping[str, str] = {
    "body_s": "body_timeout_s",
    "drain_s": "drain_timeout_s",
    "kill_after_s": "abandon_after_s",
    "run_s": "run_timeout_s",
    "step_s": "step_timeout_s",
    "suspend_s": "question_ttl_s",
    "tool_s": "tool_timeout_s",
}
"""Renamed settings, which are keys of ``holdfast.toml``, arguments and, in upper case after ``HOLDFAST_``, environment
variables."""

COMMANDS: Mapping[str, str] = {"branch": "fork"}
"""Renamed subcommands of ``holdfast``, which are also slash commands of ``holdfast chat``."""

FLAGS: Mapping[tuple[str, str], str] = {("serve", "--drain"): "--drain-timeout"}
"""Renamed command-line flags: ``(command, old flag)`` to the new flag."""

ROUTES: Mapping[str, str] = {"/v1/sessions/{key}/branch": "/v1/sessions/{key}/fork"}
"""Renamed paths of the HTTP API."""

METRICS: Mapping[str, str] = {
    "holdfast_events_total": "holdfast_host_events_total",
    "holdfast_readers": "holdfast_event_subscribers",
    "holdfast_sessions_in_line": "holdfast_sessions_awaiting_slot",
}

RESPONSE_FIELDS: Mapping[str, str] = {
    "in_line": "awaiting_slot",
    "parked": "suspended",
    "readers": "event_subscribers",
}
"""Renamed fields of the host's statistics and of a drain report."""


def hint_of_route(path: str) -> str | None:
    """Return a hint with the new path pattern if `path` is an old path of the HTTP API; otherwise return None."""
    for old, new in ROUTES.items():
        if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", old), path):
            return f"it was renamed; use {new}"
    return None


def renamed_flag(command: str, arguments: Sequence[str]) -> tuple[str, str] | None:
    """Return the old and the new name of the first renamed flag among a command's arguments.

    Return None if `arguments` contains no renamed flag before ``--``.
    """
    for argument in arguments:
        if argument == "--":
            return None
        flag = argument.partition("=")[0]
        if (command, flag) in FLAGS:
            return flag, FLAGS[command, flag]
    return None
