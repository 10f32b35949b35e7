"""Built-in tools. Each group is a `Toolset`: add an instance of it to an agent's tools.

Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.tools.browser import Browser
    from holdfast.tools.files import Files
    from holdfast.tools.mcp import McpServer
    from holdfast.tools.processes import Processes
    from holdfast.tools.python import Python
    from holdfast.tools.sandbox import Sandbox
    from holdfast.tools.terminal import Terminal
    from holdfast.tools.web import Web
    from holdfast.tools.workspace import Workspace

_HOMES = {
    "Browser": "browser",
    "Files": "files",
    "McpServer": "mcp",
    "Processes": "processes",
    "Python": "python",
    "Sandbox": "sandbox",
    "Terminal": "terminal",
    "Web": "web",
    "Workspace": "workspace",
}

__all__ = ["Browser", "Files", "McpServer", "Processes", "Python", "Sandbox", "Terminal", "Web", "Workspace"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
