"""Tools that come with Holdfast. Each group is a `Toolset`: put an object of it among an agent's tools.

Names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.tools.files import Files
    from holdfast.tools.mcp import McpServer
    from holdfast.tools.processes import Processes
    from holdfast.tools.terminal import Terminal
    from holdfast.tools.workspace import Workspace

_HOMES = {
    "McpServer": "mcp",
    "Files": "files",
    "Processes": "processes",
    "Terminal": "terminal",
    "Workspace": "workspace",
}

__all__ = ["Files", "McpServer", "Processes", "Terminal", "Workspace"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
