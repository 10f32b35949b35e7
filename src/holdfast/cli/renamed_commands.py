"""The command group, which rejects old names of commands and flags and states the new names."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from holdfast.old_names import COMMANDS, renamed_flag

__all__ = ["RefusingGroup"]


class RefusingGroup(TyperGroup):
    """The commands of ``holdfast``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments name; an old name is a usage error that states the new name."""
        name = args[0]
        if name in COMMANDS and self.get_command(ctx, name) is None:
            ctx.fail(f"the command {name!r} was renamed; use {COMMANDS[name]!r}")
        found = renamed_flag(name, args[1:])
        if found is not None:
            ctx.fail(f"the option {found[0]} was renamed; use {found[1]}")
        return super().resolve_command(ctx, args)
