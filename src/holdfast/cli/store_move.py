"""``holdfast store move``: move the store of an older version into Holdfast's own folder."""

from __future__ import annotations

from holdfast.cli.exits import Exit, exit_of
from holdfast.cli.output import note, say, say_error, say_json
from holdfast.errors import HoldfastError
from holdfast.settings import data_folder, names_store

__all__ = ["move_old_store"]


def move_old_store(*, as_json: bool) -> Exit:
    """Move ``holdfast.db`` and its companion files from beside the settings file into ``.holdfast``."""
    from holdfast.storage.sqlite.relocation import relocate_store

    new = data_folder() / "holdfast.db"
    old = new.parent.parent / new.name
    try:
        moved = relocate_store(str(old), str(new))
        named = names_store({})
    except HoldfastError as error:
        say_error(error, as_json=as_json)
        return exit_of(error)
    if as_json:
        say_json({"moved": moved, "store": f"sqlite:///{new}"})
        return Exit.OK
    say(f"the store is {new} now" if moved else f"the store was already {new}; the remains of {old} are removed")
    if named:
        note("The settings name a store; remove 'store' from them to use this one.")
    return Exit.OK
