"""``holdfast help`` and ``version``."""

from __future__ import annotations

import os
import platform
from typing import Annotated

import typer

import holdfast
from holdfast.cli.commands import COMMANDS, app, version_line
from holdfast.cli.exit_codes import Exit
from holdfast.cli.options import Json
from holdfast.version import __version__

__all__ = ["show_help", "version"]


def show_help(
    command: Annotated[list[str] | None, typer.Argument(metavar="[COMMAND]...", help="Command to explain.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the table of commands as JSON.")] = False,
) -> Exit:
    """Show the help of a command."""
    if json:
        from holdfast.cli.output import say_json

        listed = (
            {"name": name, "group": spec.group, "summary": spec.summary, "example": spec.example}
            for name, spec in COMMANDS.items()
        )
        say_json({"commands": list(listed)})
    else:
        app([*(command or ()), "--help"], prog_name="holdfast")
    return Exit.OK


def version(json: Json = False) -> Exit:
    """Show the versions of Holdfast and Python."""
    if json:
        from holdfast.cli.output import say_json

        say_json(
            {"version": __version__, "python": platform.python_version(), "path": os.path.dirname(holdfast.__file__)}
        )
    else:
        typer.echo(version_line())
    return Exit.OK
