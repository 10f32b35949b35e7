"""Display of ``holdfast tail`` on a terminal: the conversation as the chat shows it, without an input line."""

from __future__ import annotations

import asyncio
import shlex

from holdfast.cli.approvals import asked
from holdfast.cli.chat_calls import CallLog, spent_time
from holdfast.cli.chat_screen import PlainScreen
from holdfast.cli.chat_view import TerminalChatView
from holdfast.cli.output import clean
from holdfast.protocol.events import Event, Gap, RunFinished, RunStarted, RunSuspended, ToolFinished, ToolStarted

__all__ = ["TailView"]

_LONG_CALL_S = 1.0


class TailView(TerminalChatView):
    """Display for a person who only reads.

    Parameters:
        session: key of the session, for the commands that answer a question.
    """

    def __init__(self, session: str) -> None:
        super().__init__(PlainScreen(), takes_commands=False)
        self._session = shlex.quote(session)
        self._began_at: dict[str, float] = {}
        self._started = CallLog()

    def follow(self, event: Event | Gap) -> None:
        """Show an event as it arrives, with a line for each question, each long call and each run that completes."""
        self.show(event, ours=False)
        match event:
            case RunStarted():
                self._began_at[event.run_id] = event.at
            case ToolStarted():
                self._started.start(event)
                asyncio.get_running_loop().call_later(_LONG_CALL_S, self._show_if_running, event.call_id)
            case ToolFinished():
                self._started.finish(event)
            case RunSuspended():
                do = 'answer "…"' if event.question.kind == "question" else "approve"
                self.line(f"asks: {asked(event.question)}")
                self.line(f"holdfast {do} -s {self._session}")
            case RunFinished():
                self._started.drop_running(event.run_id)
                began_at = self._began_at.pop(event.run_id, event.at)
                if event.status == "completed":
                    self.line(f"completed{spent_time(event.at - began_at)}")

    def _show_if_running(self, call_id: str) -> None:
        call = self._started.running.get(call_id)
        if call is not None:
            self.line(f"running: {clean(call.title)}")
