"""``holdfast ask``: send one message and print its answer while it is written."""

from __future__ import annotations

import asyncio
import shlex
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.approvals import asked
from holdfast.cli.exit_codes import Exit
from holdfast.cli.options import Files, Json, Key, Session, Url, User, seconds
from holdfast.cli.output import fit, note, say_json
from holdfast.cli.receipt_text import receipt_lines
from holdfast.cli.send import attach, message_text, say_outcome
from holdfast.cli.stop_progress import announce
from holdfast.cli.target import Target, absorb_ctrl_c, note_back, note_cut, run_with_client
from holdfast.errors import AlreadySettled, WaitExpired
from holdfast.protocol.events import Gap, RunRestarted, RunStarted, RunSuspended, TextDelta

if TYPE_CHECKING:
    from holdfast.client import Client, RemoteSession
    from holdfast.protocol.events import Event
    from holdfast.protocol.messages import Question, Receipt

__all__ = ["ask"]


def ask(
    text: Annotated[str | None, typer.Argument(help="Message text; read from stdin if - or omitted.")] = None,
    session: Session = "main",
    agent: Annotated[str | None, typer.Option("--agent", help="Agent that answers.")] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", "-t", parser=seconds, help="Wait at most this many seconds; the run continues."),
    ] = None,
    files: Files = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """Send a message and print the answer as it is written. Press Ctrl-C to interrupt the run.

    Only the answer is printed on stdout; with --json, only the outcome. The exit code is that of the outcome.
    """
    target = Target(url=url, key=key, user=user, session=session, as_json=json)
    content = message_text(text, files)

    async def work(client: Client) -> Exit:
        client.on_cut, client.on_back = note_cut, note_back
        remote = client.session(session)
        attached = [await attach(remote, file) for file in files or ()]
        answer: _Answer | None = None
        try:
            async with asyncio.timeout(timeout):
                receipt = await remote.send(content, agent=agent, attachments=attached)
                if receipt.disposition == "queued" and not target.as_json:
                    note("waiting: another run of this session is active")
                answer = _Answer(remote, receipt, silent=target.as_json)
                await answer.print_until_settled()
        except TimeoutError:
            if answer is None:
                raise WaitExpired(f"the server did not confirm the message within {timeout:g} s") from None
            answer.end_line()
            raise WaitExpired(f"the message is not settled after {timeout:g} s") from None
        except asyncio.CancelledError:
            absorb_ctrl_c()
            if answer is None:
                key = shlex.quote(session)
                note(f"the server has not confirmed the message; if it arrived, it runs: holdfast tail -s {key}")
                return Exit.INTERRUPTED
            await answer.interrupt()
            return Exit.INTERRUPTED
        settlement = await remote.message(receipt.message_id)
        if target.as_json:
            say_json(settlement)
        else:
            answer.complete(settlement.text)
        return say_outcome(settlement, session, as_json=target.as_json)

    return run_with_client(target, work)


class _Answer:
    """The answer to a message, printed on stdout piece by piece; everything else goes to stderr.

    Parameters:
        remote: the session.
        receipt: receipt of the message.
        silent: whether to print nothing on stdout.
    """

    def __init__(self, remote: RemoteSession, receipt: Receipt, *, silent: bool) -> None:
        self._remote = remote
        self._receipt = receipt
        self._silent = silent
        self._run_id: str | None = None
        self._printed = ""

    async def print_until_settled(self) -> None:
        """Print the answer until the message is settled."""
        events = self._remote.events(after=self._receipt.cursor, follow=self._receipt.message_id)
        async with aclosing(events):
            async for event in events:
                self._show(event)

    def _show(self, event: Event | Gap) -> None:
        match event:
            case RunStarted() if self._receipt.message_id in event.messages:
                self._run_id = event.run_id
            case TextDelta() if event.run_id == self._run_id:
                self._print(event.text)
            case RunRestarted() if event.run_id == self._run_id and self._printed:
                self.end_line()
                note("the server was restarted; the answer continues, and may repeat its last part")
            case RunSuspended() if event.run_id == self._run_id:
                self.end_line()
                self._ask_person(event.question)
            case Gap():
                self.end_line()
                key = shlex.quote(self._remote.key)
                note(f"a part of the answer is missing here; to read all of it: holdfast export -s {key}")

    def _ask_person(self, question: Question) -> None:
        key = shlex.quote(self._remote.key)
        note(f"the agent asks: {asked(question)}")
        if question.kind == "question":
            note(f'  answer it in another terminal: holdfast answer "…" -s {key}')
        else:
            note(f"  decide in another terminal: holdfast approve -s {key} (or deny)")

    def _print(self, text: str) -> None:
        if not self._silent and text:
            print(fit(text, sys.stdout), end="", flush=True)
            self._printed = text

    def end_line(self) -> None:
        """End the line that the answer has begun."""
        if self._printed and not self._printed.endswith("\n"):
            self._print("\n")

    def complete(self, text: str) -> None:
        """Print the whole answer unless its pieces were printed; end its last line."""
        if not self._printed:
            self._print(text)
        self.end_line()

    async def interrupt(self) -> None:
        """Interrupt the run, or withdraw the message if no run has taken it; print what was stopped on stderr."""
        self.end_line()
        if self._run_id is None:
            try:
                await self._remote.withdraw(self._receipt.message_id)
            except AlreadySettled:
                pass  # a run has just taken it
            else:
                note("withdrawn: no run had taken the message")
                return
        receipt = await announce(self._remote, self._remote.interrupt("Ctrl-C", run_id=self._run_id), note)
        for line in receipt_lines(receipt):
            note(line)
        if (await self._remote.message(self._receipt.message_id)).state == "interrupted":
            note(f"  run it again: holdfast retry -s {shlex.quote(self._remote.key)}")
