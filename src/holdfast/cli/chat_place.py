"""Where ``holdfast chat`` is held: a terminal with or without cursor control, a pipe, or a program that reads JSON."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.cli.chat_commands import completions
from holdfast.cli.chat_lines import InputLines, PlainLines
from holdfast.cli.chat_screen import PlainScreen, can_edit_lines
from holdfast.cli.chat_view import ChatView, JsonChatView, PipedChatView, TerminalChatView
from holdfast.cli.exit_codes import Exit

if TYPE_CHECKING:
    from holdfast.protocol.messages import SettledAs

__all__ = ["ChatPlace", "open_place"]

_EXITS: dict[SettledAs, Exit] = {
    "completed": Exit.OK,
    "failed": Exit.FAILED,
    "interrupted": Exit.INTERRUPTED,
    "superseded": Exit.INTERRUPTED,
    "withdrawn": Exit.INTERRUPTED,
}
_BAD_TO_WORSE = (Exit.OK, Exit.WAITED, Exit.INTERRUPTED, Exit.REFUSED, Exit.FAILED)


@dataclass(slots=True, eq=False)
class ChatPlace:
    """Display and input of a chat, through all of its sessions.

    Parameters:
        screen: shows the conversation.
        lines: what is typed or piped in.
        agents: names of the server's agents, for completion.
        has_person: whether a person types the lines.
        keeps_input_line: whether the input stays below what is printed, and has a history; else a prompt would be torn
            by the answer.
        outcome: exit code so far.
    """

    screen: ChatView
    lines: InputLines
    agents: list[str] = field(default_factory=list)
    has_person: bool = True
    keeps_input_line: bool = False
    outcome: Exit = Exit.OK

    def settle(self, state: SettledAs) -> None:
        """Take over how a message of this chat was settled."""
        self.worsen(_EXITS[state])

    def worsen(self, outcome: Exit) -> None:
        """Take over an exit code that is worse than the one so far; a person has seen what happened."""
        if not self.has_person and (
            outcome not in _BAD_TO_WORSE
            or (self.outcome in _BAD_TO_WORSE and _BAD_TO_WORSE.index(outcome) > _BAD_TO_WORSE.index(self.outcome))
        ):
            self.outcome = outcome


def open_place(*, as_json: bool) -> ChatPlace:
    """Return the display and the input that fit stdin, stdout and the flags."""
    has_person = sys.stdin.isatty()
    if as_json:
        return ChatPlace(JsonChatView(), PlainLines(), has_person=has_person)
    if not (has_person and sys.stdout.isatty()):
        return ChatPlace(PipedChatView(), PlainLines(), has_person=has_person)
    if not can_edit_lines():
        view = TerminalChatView(PlainScreen())
        return ChatPlace(view, PlainLines(view.heard))
    from holdfast.cli.chat_history import history_path, open_history
    from holdfast.cli.chat_input import PromptLines, PromptScreen

    agents: list[str] = []
    screen = PromptScreen(open_history(history_path()), lambda typed: completions(typed, agents))
    view = TerminalChatView(screen)
    return ChatPlace(view, PromptLines(screen, view.heard), agents, keeps_input_line=True)
