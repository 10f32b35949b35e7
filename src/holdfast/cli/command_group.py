"""The command group: one style for all errors, help for narrow terminals, and hints for renamed commands."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from holdfast.cli.near_names import close_names
from holdfast.old_names import COMMANDS, renamed_flag

if TYPE_CHECKING:
    from holdfast.errors import HoldfastError

__all__ = ["HelpfulCommand", "RefusingGroup"]

_MOST_COLUMNS = 80
_LEAST_COLUMNS = 30
_NARROW_COLUMNS = 60
_WITH_TEXT = frozenset(("answer", "ask", "send"))
_REPHRASED = (
    (re.compile(r"No such option: (\S+).*"), r"no such option '\1'"),
    (re.compile(r"No such command ('.*?').*", re.DOTALL), r"no such command \1"),
    (re.compile(r"Value error, "), ""),
    (re.compile(r"\. Choose from:\s+"), ": choose "),
    (re.compile(r",\n\t"), ", "),
    (re.compile(r"Input should be a valid (?:integer|number).*"), "use a number"),
    (re.compile(r"Input should be greater than or equal to (\S+)"), r"use \1 or more"),
    (re.compile(r"Input should be less than or equal to (\S+)"), r"use \1 or less"),
    (re.compile(r"Got unexpected extra argument\(s\) \((.*)\)", re.DOTALL), r"unexpected argument: \1"),
)

_TYPE = re.compile(r"<(?:list\[)?([\w ]+)\]?>")
"""Matches the type of an option's value as typer shows it, such as ``<list[str]>``."""
_VALUES = {"str": "TEXT", "int": "N", "float": "SECONDS", "int range": "N", "float range": "N"}
"""What the help shows in place of a type; the options that take a float are durations."""


class HelpfulCommand(TyperCommand):
    """A command whose help fits the terminal and ends with an example, the epilog."""

    def get_help(self, ctx: Any) -> str:
        """Return the help."""
        return _help(self, ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return what follows the command in its usage line: ``[OPTIONS]``, and each argument in capital letters."""
        return [self.options_metavar or "", *map(_argument_text, self._arguments(ctx))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments as in the usage line, and the options."""
        arguments = [(_argument_text(one), one.get_help_record(ctx)) for one in self._arguments(ctx)]
        records = [record for one in self._options(ctx) if (record := one.get_help_record(ctx))]
        options = [(_TYPE.sub(lambda found: _VALUES.get(found[1], "VALUE"), flags), text) for flags, text in records]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl([(text, record[1]) for text, record in arguments if record])
        if options:
            with formatter.section("Options"):
                formatter.write_dl(options)

    def _arguments(self, ctx: Any) -> list[Any]:
        return [one for one in self.get_params(ctx) if one.param_type_name == "argument"]

    def _options(self, ctx: Any) -> list[Any]:
        return [one for one in self.get_params(ctx) if one.param_type_name == "option"]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the example."""
        _write_example(self.epilog, formatter)


class RefusingGroup(TyperGroup):
    """The commands of ``holdfast``."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command that the arguments name, and exit with its code; print errors as all commands do."""
        as_json = "--json" in (sys.argv if args is None else args)
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except typer.TyperException as error:
            if not standalone_mode:
                raise
            code = _say_usage_error(error, as_json=as_json)
        except typer.Abort:  # the input ended at a prompt
            if not standalone_mode:
                raise
            print("holdfast: cancelled", file=sys.stderr)
            code = 1
        except OSError as error:
            from holdfast.cli.target import end_output

            if not standalone_mode:
                raise
            code = end_output(error, as_json=as_json)
        except Exception as error:
            from holdfast.errors import HoldfastError

            if not standalone_mode or not isinstance(error, HoldfastError):
                raise
            code = _say_error(error, as_json=as_json)
        if standalone_mode:
            sys.exit(code)
        return code

    def invoke(self, ctx: Any) -> Any:
        """Run the command; exit with the documented code if a Ctrl-C comes where the command does not expect it."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            from holdfast.cli.exit_codes import Exit

            raise typer.Exit(Exit.INTERRUPTED) from None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the group's arguments; without any, print the help on stderr and exit as for a usage error."""
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            typer.echo(ctx.get_help(), err=True)
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command named in the arguments; fail with a usage error if the name or a flag was renamed."""
        name = args[0]
        if name in COMMANDS and self.get_command(ctx, name) is None:
            ctx.fail(f"the command {name!r} was renamed; use {COMMANDS[name]!r}")
        found = renamed_flag(name, args[1:])
        if found is not None:
            ctx.fail(f"the option {found[0]} was renamed; use {found[1]}")
        return super().resolve_command(ctx, args)

    def get_help(self, ctx: Any) -> str:
        """Return the help."""
        return _help(self, ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the subcommands with their whole summaries."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(1000)) for name, one in self.commands.items()])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the example."""
        _write_example(self.epilog, formatter)


def _help(command: TyperCommand | TyperGroup, ctx: Any) -> str:
    """Return a command's help, as wide as the terminal; on a narrow one, each text stands below its term."""
    columns = shutil.get_terminal_size().columns
    formatter = ctx.make_formatter()
    formatter.width = max(min(columns, _MOST_COLUMNS), _LEAST_COLUMNS) - 2
    if columns < _NARROW_COLUMNS:
        formatter.write_dl = functools.partial(formatter.write_dl, col_max=4)
    command.format_help(ctx, formatter)
    return re.sub(" +$", "", formatter.getvalue(), flags=re.MULTILINE).rstrip("\n")


def _argument_text(argument: Any) -> str:
    """Return an argument as the help shows it: ``KEY``, ``[TEXT]``, ``SESSION...``."""
    if argument.metavar is not None:
        return str(argument.metavar)
    name = argument.name.upper() if argument.required else f"[{argument.name.upper()}]"
    return name if argument.nargs == 1 else f"{name}..."


def _write_example(example: str | None, formatter: Any) -> None:
    if example:
        with formatter.section("Example"):
            formatter.write(f"  {example}\n")


def _say_usage_error(error: typer.TyperException, *, as_json: bool) -> int:
    """Print a usage error and the command that helps; return the exit code."""
    from holdfast.errors import ConfigurationError

    message = error.format_message().strip()
    hint = ""
    if near := _near(message):
        hint = f"did you mean {near}? "
    for pattern, text in _REPHRASED:
        message = pattern.sub(text, message)
    ctx: Any = getattr(error, "ctx", None)
    if ctx is not None and (
        meant := _agent_meant(message, ctx) or _quoted(message, ctx) or _session_meant(message, ctx)
    ):
        hint = meant
    elif ctx is not None:
        what = "commands" if isinstance(ctx.command, TyperGroup) else "options"
        hint += f"'{ctx.command_path} --help' lists the {what}"
    message = message[:1].lower() + message[1:].removesuffix(".")
    return _say_error(ConfigurationError(message, hint=hint.strip()), as_json=as_json)


def _near(message: str) -> str | None:
    """Return the suggestions in a message of typer that are close to what was typed, as the message shows them."""
    said = re.search(
        r"(?:option:|command) '?([^\s'.]+).*(?:Did you mean|\(Possible options:) ([^?)]+)", message, re.DOTALL
    )
    if said is None:
        return None
    shown = re.split(r", | or ", said[2])
    close = close_names(said[1], [name.strip("'") for name in shown])
    return ", ".join(name for name in shown if name.strip("'") in close) or None


def _agent_meant(message: str, ctx: Any) -> str | None:
    """Return a hint for an agent that was typed as a command, or as an option; None if it was something else."""
    if found := re.match(r"no such command '(.*)'", message, re.IGNORECASE):
        spec = found[1]
        file = spec.partition(":")[0]
        if spec.endswith(".py") or ":" in spec or os.path.isfile(f"{file}.py"):
            return f"to serve this agent: holdfast serve {spec}; to run it once: holdfast run {spec}"
    if "'--agent'" in message and ctx.info_name in ("serve", "run"):
        return f"name the agent without an option: holdfast {ctx.info_name} hello.py"
    return None


def _quoted(message: str, ctx: Any) -> str | None:
    """Return the command with its text in quotes if only the quotes are missing; otherwise None."""
    more = message.partition("unexpected argument: ")[2]
    text = ctx.params.get("text")
    if not more or ctx.command.name not in _WITH_TEXT or not isinstance(text, str):
        return None
    whole = f"{text} {more}".strip(".")
    quoted = shlex.quote(whole) if any(c in whole for c in '"$`\\!') else f'"{whole}"'
    return f"quote the text: {ctx.command_path} {quoted}"


def _session_meant(message: str, ctx: Any) -> str | None:
    """Return a hint if the name of a session was typed as an argument of a command that takes it as an option."""
    name = message.partition("unexpected argument: ")[2]
    if not name or " " in name.strip() or "session" not in ctx.params or ctx.command.name in _WITH_TEXT:
        return None
    return f"if that is a session: {ctx.command_path} -s {shlex.quote(name.strip())}"


def _say_error(error: HoldfastError, *, as_json: bool) -> int:
    from holdfast.cli.exit_codes import exit_of
    from holdfast.cli.output import say_error

    say_error(error, as_json=as_json)
    return exit_of(error)
