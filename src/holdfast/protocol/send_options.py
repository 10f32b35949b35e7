"""Options for sending a message: the keywords of `send` and `ask`, and the value into which they are collected."""

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
        policy: how the session handles the message if a run is already active.
        idempotency_key: key under which the session accepts only one message. Sending the message again with this key
            returns a receipt for the first message. None disables this check.
        agent: name of the agent of a new session, or of later runs in an existing session. None means the default agent
            or the session's agent, respectively.
        quiet_s, max_wait_s: for the policy ``collect``: the collected messages are due `quiet_s` seconds after the
            newest of them, but at most `max_wait_s` seconds after the first.
        attachments: attachments returned by `SessionAPI.attach`.
    """

    policy: Policy = "queue"
    idempotency_key: str | None = None
    agent: str | None = None
    quiet_s: float | None = None
    max_wait_s: float | None = None
    attachments: Sequence[Attachment] = ()
