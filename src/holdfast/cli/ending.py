"""``holdfast interrupt``, ``stop`` and ``drain``: stop work, and report what is proven gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.cli.connection import Target, run_with_client
from holdfast.cli.exits import Exit
from holdfast.cli.output import counted, note, say, say_json, say_receipt
from holdfast.protocol.stopping import StopReceipt

if TYPE_CHECKING:
    from holdfast.client import Client

__all__ = ["drain", "interrupt", "stop"]


def interrupt(target: Target, session: str, reason: str, *, run_id: str | None, grace_s: float | None) -> Exit:
    """Interrupt the active run, or exactly `run_id`."""

    async def work(client: Client) -> Exit:
        receipt = await client.session(session).interrupt(reason, run_id=run_id, grace_s=grace_s)
        if target.as_json:
            say_json(receipt)
        else:
            say_receipt(receipt)
        return _exit_of(receipt)

    return run_with_client(target, work)


def stop(target: Target, session: str, reason: str, *, grace_s: float | None) -> Exit:
    """Stop all work of the session."""

    async def work(client: Client) -> Exit:
        stopped = await client.session(session).stop(reason, grace_s=grace_s)
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


def drain(target: Target, *, deadline_s: float | None) -> Exit:
    """Drain the server and print the report."""

    async def work(client: Client) -> Exit:
        if not target.as_json:
            note("draining: no new work is accepted; waiting for active runs …")
        body = {} if deadline_s is None else {"deadline_s": deadline_s}
        response = await client.request("POST", "/v1/drain", body=body, reply_s=(deadline_s or 0.0) + 3600.0)
        report: dict[str, Any] = msgspec.json.decode(response.content)
        if target.as_json:
            say_json(report)
        else:
            say(
                f"drained after {report['elapsed_s']:.1f} s: {counted(report['finished'], 'run')} finished, "
                f"{len(report['parked'])} to resume at the next start, {len(report['interrupted'])} interrupted; "
                f"messages queued in {counted(report['waiting'], 'session')}"
            )
            for orphan in report["orphans"]:
                say(f"still running: {orphan}")
        return Exit.FAILED if report["orphans"] else Exit.OK

    return run_with_client(target, work)
