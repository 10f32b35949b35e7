"""``holdfast init``: write an agent with a tool and a test into a new folder."""

from __future__ import annotations

import itertools
import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.exit_codes import Exit, exit_of
from holdfast.cli.init_files import FILES
from holdfast.cli.options import Json
from holdfast.cli.output import say, say_error, say_json
from holdfast.cli.own_command import own_command, own_python
from holdfast.errors import ConfigurationError, HoldfastError

__all__ = ["init"]


def init(
    folder: Annotated[str, typer.Argument(help="Folder to create; an empty one may exist.")] = ".",
    json: Json = False,
) -> Exit:
    """Write a new agent with a tool and a test."""
    path = Path(folder)
    try:
        _write(path)
    except HoldfastError as error:
        say_error(error, as_json=json)
        return exit_of(error)
    if json:
        say_json({"folder": str(path), "files": list(FILES)})
        return Exit.OK
    command, python = own_command(path), own_python(path)
    say(f"created {', '.join(str(path / name) for name in FILES)}")
    say()
    say("Next:")
    say()
    enter = [] if path.resolve() == Path.cwd() else [(f"cd {shlex.quote(folder)}", "")]
    here = [*enter, (f"{command} serve", "stays open")]
    there = [
        *enter,
        (f'{command} ask "one two three"', "sends a message"),
        (f"{python} -m pip install pytest", ""),
        (f"{python} -m pytest -q", "runs the test"),
    ]
    width = max(len(typed) for typed, _ in (*here, *there))
    for typed, effect in (*here, ("", ""), ("In another terminal:", ""), ("", ""), *there):
        say(f"  {typed:<{width}}    {effect}".rstrip())
    return Exit.OK


def _write(folder: Path) -> None:
    """Write the files. Raises `ConfigurationError` if the folder has other files or is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = os.listdir(folder)
        if any(not name.startswith(".") or name in FILES for name in there):
            raise ConfigurationError(
                f"folder {str(folder)!r} is not empty", hint=f"name a new one: holdfast init {_new_name()}"
            )
        for name, text in FILES.items():
            with open(folder / name, "x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigurationError(
            f"cannot write to {str(folder)!r}: {error.strerror}", hint="name another folder: holdfast init FOLDER"
        ) from None


def _new_name() -> str:
    """Return a name that no file or folder here has."""
    names = itertools.chain(["my-agent"], (f"my-agent-{number}" for number in itertools.count(2)))
    return next(name for name in names if not os.path.lexists(name))
