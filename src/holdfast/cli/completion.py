"""``holdfast completion``: the script that completes commands and options in a shell."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from enum import StrEnum
from typing import Annotated

import typer
import typer.completion
import typer.main

from holdfast.cli.commands import COMPLETE_VARIABLE, app, support_completion
from holdfast.cli.exit_codes import Exit
from holdfast.cli.options import Json

__all__ = ["Shell", "completion"]


class Shell(StrEnum):
    """Shells with completion."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(help="Shell that is to run the script.")],
    json: Json = False,
) -> Exit:
    """Print a script that completes commands and session names."""
    support_completion()
    printed = io.StringIO()
    with redirect_stdout(printed):
        typer.completion.shell_complete(
            typer.main.get_command(app), {}, "holdfast", COMPLETE_VARIABLE, f"source_{shell}"
        )
    script = printed.getvalue().strip()
    if json:
        from holdfast.cli.output import say_json

        say_json({"shell": shell, "script": script})
    else:
        typer.echo(script)
    return Exit.OK
