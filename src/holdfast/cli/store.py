"""``holdfast store move``: move the store of an older version into Holdfast's own folder."""

from __future__ import annotations

import typer

from holdfast.cli.command_group import RefusingGroup
from holdfast.cli.exit_codes import Exit, exit_of
from holdfast.cli.options import Json
from holdfast.cli.output import note, say, say_error, say_json
from holdfast.errors import HoldfastError
from holdfast.settings import data_folder, names_store

__all__ = ["app", "move"]

app = typer.Typer(
    cls=RefusingGroup,
    help="Manage the store file.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@app.command("move")
def move(json: Json = False) -> Exit:
    """Move ./holdfast.db of an older version into .holdfast/. Stop the server first."""
    from holdfast.storage.sqlite.relocation import relocate_store

    new = data_folder() / "holdfast.db"
    old = new.parent.parent / new.name
    try:
        moved = relocate_store(str(old), str(new))
        named = names_store({})
    except HoldfastError as error:
        say_error(error, as_json=json)
        return exit_of(error)
    if json:
        say_json({"moved": moved, "store": f"sqlite:///{new}"})
        return Exit.OK
    say(f"the store is {new} now" if moved else f"the store was already {new}; the remains of {old} are removed")
    if named:
        note("The settings name a store; remove 'store' from them to use this one.")
    return Exit.OK
