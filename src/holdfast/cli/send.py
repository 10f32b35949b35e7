"""``holdfast send``: send one message, and print its answer with ``--wait``."""

from __future__ import annotations

import asyncio
import mimetypes
import os
import select
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from holdfast.cli.exit_codes import Exit
from holdfast.cli.options import Files, Json, Key, Session, Url, User, Wait
from holdfast.cli.output import note, say, say_failure, say_json
from holdfast.cli.target import Target, absorb_ctrl_c, end_typed_line, run_with_client
from holdfast.errors import ConfigurationError, WaitExpired

if TYPE_CHECKING:
    from holdfast.client import Client, RemoteSession
    from holdfast.protocol.messages import Attachment, Policy, Receipt, Settlement

__all__ = ["ATTACH_IT", "WRITE_TEXT", "attach", "content_of", "finish", "message_text", "read", "say_outcome", "send"]

ATTACH_IT = "attach it: --attach FILE"
WRITE_TEXT = "write UTF-8 text to stdin, or pass it as an argument"
_PROGRESS_AFTER_S = 2.0


def content_of(text: str | None, *, binary_hint: str = ATTACH_IT) -> str:
    """Return `text`, or read stdin if `text` is ``-`` or None; on a terminal, explain how to end the input.

    Parameters:
        text: the text, ``-`` or None.
        binary_hint: what to do with bytes that are not text.

    Raises:
        ConfigurationError: if the text is not UTF-8.
    """
    if text is None or text == "-":
        try:
            if sys.stdin.isatty():
                note("type the message, then press Ctrl-D on an empty line")
                _wait_for_line()
            text = _read_stdin(binary_hint)
        except KeyboardInterrupt:
            end_typed_line()
            note("nothing was sent")
            raise typer.Exit(Exit.INTERRUPTED) from None
    try:
        text.encode()  # bytes that are not UTF-8 are lone surrogates in an argument
    except UnicodeEncodeError:
        raise _not_text(binary_hint) from None
    return text


def _wait_for_line() -> None:
    """Wait until stdin, a terminal, has a line; Ctrl-C also ends a wait that begins just after the signal came.

    A signal that comes right before a blocking read does not interrupt the read, so the signal wakes a socket, too.
    """
    woken, wakes = socket.socketpair()
    with woken, wakes:
        wakes.setblocking(False)
        before = signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        try:
            while sys.stdin not in select.select([sys.stdin, woken], [], [])[0]:
                woken.recv(4096)  # of a signal that is not a Ctrl-C
        finally:
            signal.set_wakeup_fd(before)


def _read_stdin(binary_hint: str) -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise _not_text(binary_hint) from None


def _not_text(hint: str) -> ConfigurationError:
    return ConfigurationError("the message is not UTF-8 text", hint=hint)


def message_text(text: str | None, files: Sequence[str] | None, *, binary_hint: str = ATTACH_IT) -> str:
    """Return the text of a message as `content_of` does.

    Raises:
        ConfigurationError: if the text is not UTF-8, or if it is blank and `files` is empty.
    """
    content = content_of(text, binary_hint=binary_hint)
    if not content.strip() and not files:
        raise ConfigurationError(
            "no message on stdin" if text in (None, "-") else "the message is empty",
            hint="pass the text as an argument, or write it to stdin",
        )
    return content


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
    files: Files = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """Send a message and print its receipt. With --wait, wait for the answer and print it instead."""
    target = Target(url=url, key=key, user=user, session=session, as_json=json)
    content = message_text(text, files)

    async def work(client: Client) -> Exit:
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
    """Upload a file, guessing the media type from its name. Raises `ConfigurationError` if the file is unreadable."""
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
    except asyncio.CancelledError:
        absorb_ctrl_c()
        key = shlex.quote(remote.key)
        note(f"stopped waiting; the run continues: holdfast tail -s {key}  (stop it: holdfast interrupt -s {key})")
        return Exit.INTERRUPTED
    if as_json:
        say_json(settlement)
    elif settlement.text:
        say(settlement.text.removesuffix("\n"))
    return say_outcome(settlement, remote.key, as_json=as_json)


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
        say(f"  follow  holdfast tail -s {shlex.quote(receipt.session)}")


def say_outcome(settlement: Settlement, session: str, *, as_json: bool) -> Exit:
    """Return the exit code of a settled message; print on stderr why it was not completed, unless as JSON.

    Parameters:
        settlement: how the message was settled.
        session: key of its session.
        as_json: whether the outcome is printed as JSON.
    """
    if settlement.state != "completed" and not as_json:
        cause = settlement.cause
        why = f"{cause.kind}{f': {cause.reason}' if cause.reason else ''}" if cause else settlement.error or ""
        say_failure(f"{settlement.state}{f' ({why})' if why else ''}")
        if cause is not None and cause.kind == "crash":
            note(f"  run it again: holdfast retry -s {shlex.quote(session)}")
    return {"completed": Exit.OK, "failed": Exit.FAILED}.get(settlement.state, Exit.INTERRUPTED)
