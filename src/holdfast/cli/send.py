"""``holdfast send``: send one message, and print its answer with ``--wait``."""

from __future__ import annotations

import asyncio
import mimetypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from holdfast.cli.exit_codes import Exit
from holdfast.cli.options import Json, Key, Session, Url, User, Wait
from holdfast.cli.output import note, say, say_json
from holdfast.cli.target import Target, run_with_client
from holdfast.errors import ConfigurationError, WaitExpired

if TYPE_CHECKING:
    from holdfast.client import Client, RemoteSession
    from holdfast.protocol.messages import Attachment, Policy, Receipt, Settlement

__all__ = ["attach", "content_of", "finish", "read", "send"]

_PROGRESS_AFTER_S = 2.0


def content_of(text: str | None) -> str:
    """Return `text`, or read stdin if `text` is ``-`` or None; on a terminal, explain how to end the input."""
    if text is not None and text != "-":
        return text
    if sys.stdin.isatty():
        note("type the message, then press Ctrl-D on an empty line")
    return sys.stdin.read()


def send(
    text: Annotated[str | None, typer.Argument(help="Message text; read from stdin if - or omitted.")] = None,
    session: Session = "main",
    wait: Wait = None,
    policy: Annotated[
        str, typer.Option("--policy", help="Policy: queue, steer, collect, interrupt, rollback or reject.")
    ] = "queue",
    agent: Annotated[str | None, typer.Option("--agent", help="Agent that answers.")] = None,
    idempotency_key: Annotated[
        str | None, typer.Option("--idempotency-key", help="Accept a message with this idempotency key only once.")
    ] = None,
    files: Annotated[
        list[str] | None, typer.Option("--attach", "-f", metavar="FILE", help="Attach a file (repeatable).")
    ] = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """Send a message and print its receipt, or its answer with --wait."""
    target = Target(url=url, key=key, user=user, as_json=json)
    content = content_of(text)

    async def work(client: Client) -> Exit:
        if text in (None, "-") and not content and not files:
            raise ConfigurationError("no message on stdin", hint="pass it as an argument, or write it to stdin")
        remote = client.session(session)
        attached = [await attach(remote, file) for file in files or ()]
        receipt = await remote.send(
            content,
            policy=cast("Policy", policy),
            agent=agent,
            idempotency_key=idempotency_key,
            attachments=attached,
        )
        return await finish(remote, receipt, wait, as_json=target.as_json)

    return run_with_client(target, work)


async def attach(remote: RemoteSession, file: str) -> Attachment:
    """Upload a file with the media type that its name implies. Raises `ConfigurationError` if it is not readable."""
    media_type = mimetypes.guess_type(file)[0] or "application/octet-stream"
    return await remote.attach(read(file), media_type=media_type, name=os.path.basename(file))


def read(file: str) -> bytes:
    """Return the content of a file. Raises `ConfigurationError` if the file is not readable."""
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{file} is not readable: {error.strerror}", hint="name another file") from None


async def finish(remote: RemoteSession, receipt: Receipt, wait_s: float | None, *, as_json: bool) -> Exit:
    """Wait for the answer and print it; without `wait_s`, print the receipt and do not wait.

    Raises:
        WaitExpired: if the message is not settled within `wait_s` seconds; the receipt is printed first.
    """
    if wait_s is None:
        _say_receipt(receipt, as_json=as_json)
        return Exit.OK
    try:
        settlement = await _settled(remote, receipt, wait_s)
    except WaitExpired:
        _say_receipt(receipt, as_json=as_json)
        raise
    return _say_settlement(settlement, as_json=as_json)


async def _settled(remote: RemoteSession, receipt: Receipt, wait_s: float) -> Settlement:
    """Wait until the message is settled; show the elapsed time if stderr is a terminal."""
    if not sys.stderr.isatty():
        return await remote.wait(receipt.message_id, timeout_s=wait_s)
    loop = asyncio.get_running_loop()
    began = loop.time()
    timer: asyncio.TimerHandle | None = None

    def tick() -> None:
        nonlocal timer
        print(f"\r… {loop.time() - began:.0f} s", end="", file=sys.stderr, flush=True)
        timer = loop.call_later(1.0, tick)

    timer = loop.call_later(_PROGRESS_AFTER_S, tick)
    try:
        return await remote.wait(receipt.message_id, timeout_s=wait_s)
    finally:
        timer.cancel()
        if loop.time() - began > _PROGRESS_AFTER_S:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _say_receipt(receipt: Receipt, *, as_json: bool) -> None:
    if as_json:
        say_json(receipt)
    else:
        say(f"{receipt.disposition}: message {receipt.message_id} of session {receipt.session}")
        if receipt.run_id:
            say(f"  run     {receipt.run_id}")
        say(f"  cursor  {receipt.cursor}")


def _say_settlement(settlement: Settlement, *, as_json: bool) -> Exit:
    if as_json:
        say_json(settlement)
    else:
        if settlement.text:
            say(settlement.text.removesuffix("\n"))
        if settlement.state != "completed":
            cause = settlement.cause
            why = f"{cause.kind}{f': {cause.reason}' if cause.reason else ''}" if cause else settlement.error or ""
            note(f"holdfast: {settlement.state}{f' ({why})' if why else ''}")
    return {"completed": Exit.OK, "failed": Exit.FAILED}.get(settlement.state, Exit.INTERRUPTED)
