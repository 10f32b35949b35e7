"""``holdfast interrupt``, ``stop`` and ``drain``: stop work, and report what is proven gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from holdfast.cli.exit_codes import Exit
from holdfast.cli.options import Grace, Json, Key, Reason, Session, Url, User, seconds
from holdfast.cli.output import counted, note, say, say_json, say_receipt
from holdfast.cli.target import Target, run_with_client
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
    target = Target(url=url, key=key, user=user, as_json=json)

    async def work(client: Client) -> Exit:
        receipt = await client.session(session).interrupt(reason, run_id=run_id, grace_s=grace)
        if target.as_json:
            say_json(receipt)
        else:
            say_receipt(receipt)
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
    """Stop all work of a session and withdraw its queued messages."""
    target = Target(url=url, key=key, user=user, as_json=json)

    async def work(client: Client) -> Exit:
        stopped = await client.session(session).stop(reason, grace_s=grace)
        if target.as_json:
            say_json(stopped)
        else:
            say_receipt(stopped.receipt)
            for message in stopped.withdrawn:
                say(f"withdrawn: {message.message_id} {message.content[:60]!r}")
        return _exit_of(stopped.receipt)

    return run_with_client(target, work)


def _exit_of(receipt: StopReceipt) -> Exit:
    return Exit.OK if receipt.outcome == "gone" else Exit.FAILED


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
        if not target.as_json:
            note("draining: no new work is accepted; waiting for active runs …")
        body = {} if deadline is None else {"deadline_s": deadline}
        response = await client.request("POST", "/v1/drain", body=body, reply_s=(deadline or 0.0) + 3600.0)
        report: dict[str, Any] = msgspec.json.decode(response.content)
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
        return Exit.FAILED if report["orphans"] else Exit.OK

    return run_with_client(target, work)
