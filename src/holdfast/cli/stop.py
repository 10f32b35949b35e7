"""``holdfast interrupt``, ``stop`` and ``drain``: stop work, and report work that may still be running."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from holdfast.cli.exit_codes import Exit
from holdfast.cli.options import Grace, Json, Key, Reason, Session, Url, User, seconds
from holdfast.cli.output import counted, note, say, say_json
from holdfast.cli.receipt_text import say_receipt
from holdfast.cli.stop_progress import announce
from holdfast.cli.target import Target, run_with_client
from holdfast.clock import system_clock
from holdfast.protocol.stopping import StopReceipt

if TYPE_CHECKING:
    from holdfast.client import Client

__all__ = ["drain", "interrupt", "stop"]


def interrupt(
    session: Session = "main",
    reason: Reason = "",
    run_id: Annotated[str | None, typer.Option("--run", help="Interrupt only this run, not a later one.")] = None,
    grace: Grace = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """Interrupt the active run; queued messages run next. Exit 1 if some work could not be stopped."""
    target = Target(url=url, key=key, user=user, session=session, as_json=json)

    async def work(client: Client) -> Exit:
        remote = client.session(session)
        asked_at = system_clock.monotonic()
        receipt = await announce(remote, remote.interrupt(reason, run_id=run_id, grace_s=grace), note)
        if target.as_json:
            say_json(receipt)
        else:
            say_receipt(receipt, waited_s=system_clock.monotonic() - asked_at)
        return _exit_of(receipt)

    return run_with_client(target, work)


def stop(
    session: Session = "main",
    reason: Reason = "",
    grace: Grace = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """Stop a session's work and withdraw its queued messages. Exit 1 if some work could not be stopped."""
    target = Target(url=url, key=key, user=user, session=session, as_json=json)

    async def work(client: Client) -> Exit:
        remote = client.session(session)
        asked_at = system_clock.monotonic()
        stopped = await announce(remote, remote.stop(reason, grace_s=grace), note)
        if target.as_json:
            say_json(stopped)
        else:
            say_receipt(stopped.receipt, waited_s=system_clock.monotonic() - asked_at)
            for message in stopped.withdrawn:
                say(f"withdrawn: {message.message_id} {message.content[:60]!r}")
        return _exit_of(stopped.receipt)

    return run_with_client(target, work)


def _exit_of(receipt: StopReceipt) -> Exit:
    return Exit.OK if receipt.outcome == "gone" else Exit.FAILED


class _DrainTold(msgspec.Struct):
    """The report of a drain, all of whose fields are required."""

    finished: int
    suspended: list[str]
    interrupted: list[str]
    waiting: int
    orphans: list[str]
    ended_background: list[str]
    elapsed_s: float


class _ProcessTold(msgspec.Struct):
    pid: int


class _ServerTold(msgspec.Struct):
    statistics: _ProcessTold


def drain(
    deadline: Annotated[
        float | None, typer.Option("--deadline", parser=seconds, help="Time for runs to finish, in seconds.")
    ] = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> Exit:
    """Drain a server: finish active runs, accept no new work. Lists any work left (exit 1). Requires an admin key."""
    target = Target(url=url, key=key, as_json=json)

    async def work(client: Client) -> Exit:
        from holdfast.client.wire import decode

        if not target.as_json:
            note("draining: no new work is accepted; waiting for active runs …")
        body = {} if deadline is None else {"deadline_s": deadline}
        response = await client.request("POST", "/v1/drain", body=body, reply_s=(deadline or 0.0) + 3600.0)
        report = msgspec.structs.asdict(decode(response, _DrainTold))
        if target.as_json:
            say_json(report)
        else:
            say(
                f"drained after {report['elapsed_s']:.1f} s: {counted(report['finished'], 'run')} finished, "
                f"{len(report['suspended'])} to resume at the next start, {len(report['interrupted'])} interrupted; "
                f"messages queued in {counted(report['waiting'], 'session')}"
            )
            for orphan in report["orphans"]:
                say(f"still running: {orphan}")
            pid = (await client.read("/v1/server", _ServerTold)).statistics.pid
            note(f"the server still answers reads; end it with Ctrl-C in its terminal, or: kill {pid}")
        return Exit.FAILED if report["orphans"] else Exit.OK

    return run_with_client(target, work)
