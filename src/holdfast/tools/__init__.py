"""Built-in tools. Each group is a `Toolset`: add an instance of it to an agent's tools.

Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lazy import lazy_names

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

__all__ = ["Browser", "Files", "McpServer", "Processes", "Python", "Sandbox", "Terminal", "Web", "Workspace"]

if not TYPE_CHECKING:  # or else type checkers would accept any name
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "browser": ("Browser",),
            "files": ("Files",),
            "mcp": ("McpServer",),
            "processes": ("Processes",),
            "python": ("Python",),
            "sandbox": ("Sandbox",),
            "terminal": ("Terminal",),
            "web": ("Web",),
            "workspace": ("Workspace",),
        },
    )
