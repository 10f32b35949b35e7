"""Transactions of the store: functions that check a request, change the session's row and write through `Tables`.

Each function is called inside one transaction. If a function refuses a request, it raises **before** the first change,
so that nothing is written. None of the functions awaits, blocks or reads a clock.
"""

from __future__ import annotations

from holdfast.storage.transactions.attachments import add_attachment
from holdfast.storage.transactions.grants import revoke_grant
from holdfast.storage.transactions.messages import send, steer, withdraw
from holdfast.storage.transactions.questions import answer, park, suspend
from holdfast.storage.transactions.runs import append, append_all, claim, commit_run, rescue, restart
from holdfast.storage.transactions.schedules import delete_schedule, fire_schedule, pause_schedule, put_schedule
from holdfast.storage.transactions.stops import delete_session, interrupt, stop_session
from holdfast.storage.transactions.transcript_edits import edit_history
from holdfast.storage.transactions.workspaces import use_workspace

__all__ = [
    "add_attachment",
    "answer",
    "append",
    "append_all",
    "claim",
    "commit_run",
    "delete_schedule",
    "delete_session",
    "edit_history",
    "fire_schedule",
    "interrupt",
    "park",
    "pause_schedule",
    "put_schedule",
    "rescue",
    "restart",
    "revoke_grant",
    "send",
    "steer",
    "stop_session",
    "suspend",
    "use_workspace",
    "withdraw",
]
