"""The table of commands. A command's module is imported when the command runs, which keeps ``holdfast --help`` fast."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from holdfast.cli.command_group import HelpfulCommand, RefusingGroup

if TYPE_CHECKING:
    from holdfast.cli.exit_codes import Exit

__all__ = ["COMMANDS", "COMPLETE_VARIABLE", "CommandSpec", "app", "support_completion", "version_line"]

COMPLETE_VARIABLE = "_HOLDFAST_COMPLETE"
"""Environment variable with which a shell asks for completions."""

_EXIT_CODES = (
    "0 success · 1 failure, or work still running · 2 usage error · 3 server unreachable · 4 refused · 5 interrupted · "
    "6 wait timed out · 7 store error"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    """A row of the table of commands.

    Parameters:
        place: the module and the function that runs the command, or the `typer.Typer` with its subcommands.
        group: heading under which the help lists the command.
        summary: its line in the help, which is the first sentence of the function's docstring.
        example: one command line that shows how to use it.
    """

    place: str
    group: str
    summary: str
    example: str


def _row(name: str, group: str, place: str, summary: str, example: str = "") -> tuple[str, CommandSpec]:
    example = f"holdfast {name} {example}".rstrip()
    return name, CommandSpec(place=place, group=group, summary=summary, example=example)


COMMANDS: Mapping[str, CommandSpec] = dict(
    (
        _row("chat", "Talk", "chat:chat", "Chat with an agent.", "-s shopping"),
        _row(
            "ask", "Talk", "ask:ask", "Send a message and print the answer as it is written.", '"steps 5" -s shopping'
        ),
        _row("send", "Talk", "send:send", "Send a message and print its receipt.", '"steps 5" -s shopping'),
        _row(
            "tail",
            "Talk",
            "logs:tail",
            "Follow a session: on a terminal as text, piped as events.",
            "-s shopping",
        ),
        _row("logs", "Talk", "logs:logs", "Show a session's newest events.", "-s shopping -n 50"),
        _row(
            "export",
            "Talk",
            "history:export",
            "Export a session as Markdown, JSON lines or an archive.",
            "-s shopping -o shopping.md",
        ),
        _row("ps", "Look", "ps:ps", "List sessions with their active runs and queued messages."),
        _row("tree", "Look", "tree:tree", "Show the live tasks, threads and programs.", "-s shopping"),
        _row(
            "questions",
            "Look",
            "approvals:questions",
            "List the open approvals and questions of a session.",
            "-s shopping",
        ),
        _row("doctor", "Look", "doctor:doctor", "Check this machine and the server, and suggest fixes."),
        _row("approve", "Decide", "approvals:approve", "Approve a call.", "-s shopping"),
        _row(
            "deny",
            "Decide",
            "approvals:deny",
            "Deny a call that waits for approval.",
            '-s shopping -r "not this folder"',
        ),
        _row("answer", "Decide", "approvals:answer", "Answer a question from a run.", '"the blue one" -s shopping'),
        _row("grants", "Decide", "grants:app", "List and revoke grants.", "list"),
        _row(
            "interrupt", "Stop", "stop:interrupt", "Interrupt the active run; queued messages run next.", "-s shopping"
        ),
        _row(
            "stop",
            "Stop",
            "stop:stop",
            "Stop a session's work and withdraw its queued messages.",
            '-s shopping -r "wrong list"',
        ),
        _row("withdraw", "Stop", "withdraw:withdraw", "Withdraw a queued message.", "-s shopping"),
        _row("rm", "Stop", "rm:rm", "Delete sessions with all their messages.", "shopping --yes"),
        _row("retry", "History", "history:retry", "Run the messages of the last run again.", "-s shopping --wait 60"),
        _row("undo", "History", "history:undo", "Remove the last run or edit from the transcript.", "-s shopping"),
        _row(
            "compact",
            "History",
            "history:compact",
            "Summarize the older part of the transcript.",
            "-s shopping --keep 10",
        ),
        _row("fork", "History", "history:fork", "Copy a transcript into a new session.", "plan-b -s shopping"),
        _row(
            "import",
            "History",
            "history:import_archive",
            "Start a new session with the history of an archive.",
            "shopping.json -s copy",
        ),
        _row("init", "Run a server", "init:init", "Write a new agent with a tool and a test.", "my-agent"),
        _row("run", "Run a server", "run_file:run_agent", "Run an agent once, without a server.", 'hello "hi"'),
        _row("serve", "Run a server", "serve:serve", "Start a server.", "hello --port 8421"),
        _row(
            "drain",
            "Run a server",
            "stop:drain",
            "Drain a server: finish active runs, accept no new work.",
            "--deadline 30",
        ),
        _row("keys", "Run a server", "keys:app", "Create, list and revoke API keys.", "create alice"),
        _row(
            "schedule",
            "Run a server",
            "schedules:app",
            "Send messages on a schedule.",
            'add "count a" -s hourly --every 3600',
        ),
        _row("store", "Run a server", "store:app", "Manage the store file.", "move"),
        _row("storm", "Prove", "storm:storm", "Test the promises under load, interrupts and kills.", "--seconds 20"),
        _row(
            "cluster-demo",
            "Prove",
            "cluster_demo:cluster_demo",
            "Test a cluster of servers under load and faults.",
            "--seconds 60",
        ),
        _row("check", "Prove", "check:check", "Test an agent framework's promises.", "holdfast"),
        _row(
            "completion",
            "Help",
            "completion:completion",
            "Print a script that completes commands and session names.",
            "bash > ~/.local/share/bash-completion/completions/holdfast",
        ),
        _row("help", "Help", "about:show_help", "Show the help of a command.", "send"),
        _row("version", "Help", "about:version", "Show the versions of Holdfast and Python."),
    )
)
"""The commands, in the order of the help."""


class _Commands(Mapping[str, TyperCommand | TyperGroup]):
    """Commands by name, each imported when it is looked up."""

    def __init__(self) -> None:
        self._loaded: dict[str, TyperCommand | TyperGroup] = {}

    def __getitem__(self, name: str) -> TyperCommand | TyperGroup:
        if name not in self._loaded:
            self._loaded[name] = _load(name, COMMANDS[name])
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


def _load(name: str, spec: CommandSpec) -> TyperCommand | TyperGroup:
    module, _, attribute = spec.place.partition(":")
    found = getattr(importlib.import_module(f"holdfast.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        for command in found.registered_commands:
            command.cls = HelpfulCommand
        group = typer.main.get_group(found)
        group.epilog = spec.example
        return group
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.command(name, cls=HelpfulCommand, epilog=spec.example)(found)
    return cast(TyperCommand, typer.main.get_command(alone))


@dataclass(frozen=True, slots=True)
class _Completion:
    """A completed word, as typer prints it."""

    value: str
    help: str
    type: str = "plain"


class _CommandGroup(RefusingGroup):
    """The group of all commands, which lists them without importing them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = cast(Any, _Commands())

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments name. From here on, Ctrl-C is an exception that it may handle."""
        found = super().resolve_command(ctx, args)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return found

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command that the arguments name, or complete the command line for a shell that asks for it."""
        if COMPLETE_VARIABLE in os.environ:
            support_completion()
        return super().main(*args, **options)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete the name of a command without importing any."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [_Completion(name, spec.summary) for name, spec in COMMANDS.items() if name.startswith(incomplete)]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands in the help, by group."""
        widest = max(map(len, COMMANDS))
        for group in dict.fromkeys(spec.group for spec in COMMANDS.values()):
            rows = [(name.ljust(widest), spec.summary) for name, spec in COMMANDS.items() if spec.group == group]
            with formatter.section(group):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the exit codes, and where the docs are."""
        with formatter.section("Exit codes"):
            formatter.write_text(_EXIT_CODES)
        with formatter.section("Docs"):
            formatter.write_text("docs/index.md in the source tree; 'holdfast COMMAND --help' shows an example")


def support_completion() -> None:
    """Make typer complete for the shells that it knows. It does so only for an app with its own two options."""
    import typer.completion

    typer.completion.get_completion_inspect_parameters()


def version_line() -> str:
    """Return the version, the version of Python, and the folder of the package."""
    import platform

    import holdfast
    from holdfast.version import __version__

    return f"holdfast {__version__} (Python {platform.python_version()}, {os.path.dirname(holdfast.__file__)})"


def _exit(code: Exit | None, **_options: object) -> None:
    sys.exit(code)


app = typer.Typer(
    cls=_CommandGroup,
    name="holdfast",
    help="Host AI agents for many users at once, and keep them under control.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    result_callback=_exit,
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Host AI agents for many users at once, and keep them under control."""
    if version:
        typer.echo(version_line())
        raise typer.Exit
