"""Built-in toolsets. To use a toolset, add an instance of its class to an agent's tools.

Each name is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lazy import lazy_names

if TYPE_CHECKING:
    from holdfast.tools.files.toolset import Files
    from holdfast.tools.files.workspace import Workspace
    from holdfast.tools.mcp.server import McpServer
    from holdfast.tools.programs.processes import Processes
    from holdfast.tools.programs.python import Python
    from holdfast.tools.programs.terminal import Terminal
    from holdfast.tools.sandbox.sandbox import Sandbox
    from holdfast.tools.web.browser import Browser
    from holdfast.tools.web.fetch import Web

__all__ = ["Browser", "Files", "McpServer", "Processes", "Python", "Sandbox", "Terminal", "Web", "Workspace"]

if not TYPE_CHECKING:  # or else type checkers would accept any name
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "web.browser": ("Browser",),
            "files.toolset": ("Files",),
            "mcp.server": ("McpServer",),
            "programs.processes": ("Processes",),
            "programs.python": ("Python",),
            "sandbox.sandbox": ("Sandbox",),
            "programs.terminal": ("Terminal",),
            "web.fetch": ("Web",),
            "files.workspace": ("Workspace",),
        },
    )
