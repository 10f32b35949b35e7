"""``holdfast run``: run an agent once in this process, without a server or a store file."""

from __future__ import annotations

import asyncio
import logging
import shlex
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.agent_spec import find_agent, log_import_failure
from holdfast.cli.approvals import whole
from holdfast.cli.exit_codes import Exit, exit_of
from holdfast.cli.options import Json
from holdfast.cli.output import fit, note, say_error, say_json
from holdfast.cli.receipt_text import receipt_lines
from holdfast.cli.send import WRITE_TEXT, message_text
from holdfast.cli.stop_progress import announce
from holdfast.cli.target import absorb_ctrl_c, run
from holdfast.errors import ConfigurationError, HoldfastError, NotSupported, RunError

if TYPE_CHECKING:
    from holdfast.host import Host, Session
    from holdfast.protocol.messages import Receipt

__all__ = ["run_agent"]


def run_agent(
    spec: Annotated[
        str, typer.Argument(metavar="AGENT", help="File or module, and a name in it: hello.py, hello:agent.")
    ],
    text: Annotated[str | None, typer.Argument(help="Message text; read from stdin if - or omitted.")] = None,
    json: Json = False,
) -> Exit:
    """Run an agent once, without a server."""
    from holdfast.host import Host
    from holdfast.logs import configure_logging, install_hooks
    from holdfast.settings import load_settings

    try:
        settings = load_settings({"store": "memory://"})
        configure_logging(settings.log_level)
        install_hooks()
        content = _message(spec, text)
        logging.getLogger("holdfast.agents").addFilter(_has_traceback)
        host = Host(find_agent(spec), settings=settings)
    except HoldfastError as error:
        log_import_failure(error)
        say_error(error, as_json=json)
        return exit_of(error)
    return run(lambda: _answer(host, spec, content, as_json=json), as_json=json)


def _has_traceback(record: logging.LogRecord) -> bool:
    """Return whether a record of a failed agent has more than the last line of this command."""
    return record.levelno < logging.ERROR or record.exc_text is not None


def _message(spec: str, text: str | None) -> str:
    """Return `text`, or stdin. Raises `ConfigurationError` if stdin is a terminal, or as `message_text` does."""
    if text in (None, "-") and sys.stdin.isatty():
        raise ConfigurationError(
            "no message", hint=f'holdfast run {spec} "…"; to talk to it: holdfast serve {spec}, then holdfast chat'
        )
    return message_text(text, None, binary_hint=WRITE_TEXT)


async def _answer(host: Host, spec: str, content: str, *, as_json: bool) -> Exit:
    from holdfast.logs import flush_logs
    from holdfast.protocol.session_api import answer

    async with host:
        session = host.session("main")
        try:
            receipt = await session.send(content)
            shown = await _print(session, spec, receipt, silent=as_json)
            settlement = await session.message(receipt.message_id)
        except asyncio.CancelledError:
            absorb_ctrl_c()
            stopped = await announce(session, session.interrupt("Ctrl-C"), note)
            for line in receipt_lines(stopped):
                note(line)
            return Exit.INTERRUPTED
        finally:
            report = await host.drain(deadline_s=0.0)  # ends the run at once if this was interrupted
    if as_json:
        say_json(settlement)
    elif shown or settlement.text:
        rest = "" if shown else settlement.text
        end = "" if (shown or rest).endswith("\n") else "\n"
        print(fit(rest, sys.stdout), end=end, flush=True)
    for work in report.ended_background:
        note(f"ended background work: {work}")
    try:
        answer(settlement)
    except RunError as error:
        flush_logs()  # the traceback comes first
        if not as_json:
            note(f"holdfast: {error.message}")
        return exit_of(error)
    return Exit.OK


async def _print(session: Session, spec: str, receipt: Receipt, *, silent: bool) -> str:
    """Print the answer piece by piece until the message is settled, and return the last piece.

    Raises:
        NotSupported: if the agent asks a person.
    """
    from holdfast.protocol.events import RunSuspended, TextDelta

    last = ""
    async with aclosing(session.events(after=receipt.cursor, follow=receipt.message_id)) as events:
        async for event in events:
            match event:
                case TextDelta(run_id=receipt.run_id, text=text) if text and not silent:
                    print(fit(text, sys.stdout), end="", flush=True)
                    last = text
                case RunSuspended(question=question):
                    raise NotSupported(
                        f"the agent asks a person: {whole(question)}",
                        hint=f"serve it to answer: holdfast serve {shlex.quote(spec)}, then holdfast chat",
                    )
    return last
