"""The table of commands. A command's module is imported when the command runs, which keeps ``holdfast --help`` fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from holdfast.cli.renamed_commands import RefusingGroup

if TYPE_CHECKING:
    from holdfast.cli.exit_codes import Exit

__all__ = ["app", "main"]

COMMANDS: Mapping[str, tuple[str, str]] = {
    "serve": ("serve:serve", "Start a server."),
    "chat": ("chat:chat", "Chat with an agent."),
    "send": ("send:send", "Send a message and print its receipt, or its answer with --wait."),
    "ps": ("inspect:ps", "List sessions with their active runs and queued messages."),
    "tree": ("inspect:tree", "Show the live tasks, threads and processes."),
    "interrupt": ("stop:interrupt", "Interrupt the active run; queued messages run next."),
    "stop": ("stop:stop", "Stop all work of a session and withdraw its queued messages."),
    "tail": ("inspect:tail", "Follow a session's events."),
    "export": (
        "history:export",
        "Export a session's transcript as Markdown, as JSON lines, or as an archive for import.",
    ),
    "questions": ("approvals:questions", "List the open approvals and questions of a session."),
    "approve": ("approvals:approve", "Approve a call."),
    "deny": ("approvals:deny", "Deny a call that waits for approval."),
    "answer": ("approvals:answer", "Answer a question from a run."),
    "retry": ("history:retry", "Remove the last run from the transcript and run its messages again."),
    "undo": (
        "history:undo",
        "Remove the last run, or the last edit, from the transcript and print the removed entries.",
    ),
    "compact": ("history:compact", "Summarize the old part of the transcript with the agent's model."),
    "fork": ("history:fork", "Copy a session's transcript into a new session, to continue from there."),
    "import": ("history:import_archive", "Start a new session with the history of an archive."),
    "drain": ("stop:drain", "Drain a server: finish active runs, accept no new work."),
    "doctor": (
        "doctor:doctor",
        "Check store, disk, process control, ports, versions and orphans, and print a fix for each problem.",
    ),
    "storm": ("storm:storm", "Test the promises under load: double texts, interrupts, disconnects, kills."),
    "check": ("check:check", "Test an agent framework's promises."),
    "keys": ("keys:app", "Create, list and revoke API keys."),
    "schedule": ("schedules:app", "Send messages on a schedule."),
    "store": ("store:app", "Manage the store file."),
}
"""For each command, the function that runs it (or the `typer.Typer` with its subcommands), and its line in the help."""


class _Commands(Mapping[str, TyperCommand | TyperGroup]):
    """Commands by name, each imported when it is looked up."""

    def __init__(self) -> None:
        self._loaded: dict[str, TyperCommand | TyperGroup] = {}

    def __getitem__(self, name: str) -> TyperCommand | TyperGroup:
        if name not in self._loaded:
            self._loaded[name] = _load(name, COMMANDS[name][0])
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


def _load(name: str, place: str) -> TyperCommand | TyperGroup:
    module, _, attribute = place.partition(":")
    found = getattr(importlib.import_module(f"holdfast.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        return typer.main.get_group(found)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.command(name)(found)
    return cast(TyperCommand, typer.main.get_command(alone))


class _CommandGroup(RefusingGroup):
    """The group of all commands, which lists them without importing them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = cast(Any, _Commands())

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands in the help."""
        limit = formatter.width - 6 - max(map(len, COMMANDS))
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, TyperCommand(name, help=summary).get_short_help_str(limit))
                    for name, (_, summary) in COMMANDS.items()
                ]
            )


def _exit(code: Exit | None, **_options: object) -> None:
    sys.exit(code)


app = typer.Typer(
    cls=_CommandGroup,
    name="holdfast",
    help="Host AI agents for many users at once, and keep them under control.",
    epilog=(
        "Exit codes: 0 success · 1 failed, or work is left · 2 usage · 3 unreachable · 4 refused · 5 interrupted · "
        "6 wait expired · 7 store"
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    result_callback=_exit,
)


def main() -> None:
    """Entry point of the ``holdfast`` command."""
    app(prog_name="holdfast")


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Host AI agents for many users at once, and keep them under control."""
    if version:
        from holdfast.version import __version__

        typer.echo(__version__)
        raise typer.Exit
