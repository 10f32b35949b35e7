"""Options of a message: as keywords of `send` and `ask`, and as the value that the layers below them pass on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from holdfast.protocol.messages import Attachment, Policy, Value

__all__ = ["SendKeywords", "SendOptions"]


class SendKeywords(TypedDict, total=False):
    """The keywords of `SessionAPI.send` and `SessionAPI.ask`; see `SendOptions`."""

    policy: Policy
    idempotency_key: str | None
    agent: str | None
    quiet_s: float | None
    max_wait_s: float | None
    attachments: Sequence[Attachment]


class SendOptions(Value, frozen=True, kw_only=True):
    """Options for sending a message.

    Parameters:
        policy: what to do if a run is already active.
        idempotency_key: a message with this key is accepted once; a repeat returns the receipt of the first send.
        agent: the agent for a new session; in an existing one, the agent for later runs.
        quiet_s, max_wait_s: for ``collect``, in seconds.
        attachments: attachments returned by `SessionAPI.attach`.
    """

    policy: Policy = "queue"
    idempotency_key: str | None = None
    agent: str | None = None
    quiet_s: float | None = None
    max_wait_s: float | None = None
    attachments: Sequence[Attachment] = ()
