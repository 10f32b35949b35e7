"""Validate a message, submit it to the store, and carry out the store's decision."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from typing import TYPE_CHECKING

from holdfast import ids
from holdfast.errors import Draining, InvalidKey, InvalidRequest
from holdfast.protocol.events import format_cursor
from holdfast.protocol.messages import Attachment, Receipt, check_seconds, check_text
from holdfast.storage.port import Send

if TYPE_CHECKING:
    from holdfast.host.agent_registry import AgentRegistry
    from holdfast.host.context import HostContext
    from holdfast.host.dispatcher import Dispatcher
    from holdfast.host.slot_queue import SlotQueue
    from holdfast.protocol.send_options import SendOptions
    from holdfast.storage.port import SendResult

__all__ = ["MessageSender", "check_key", "receipt_of"]

KEY_LENGTH = 200


def check_key(key: str) -> str:
    """Return `key` if it is a valid session key. Raises `InvalidKey` otherwise."""
    given: object = key
    if not isinstance(given, str):
        raise InvalidKey(f"a session key must be text (str), not {given!r}")
    if not 0 < len(given) <= KEY_LENGTH or not given.isprintable() or "/" in given:
        raise InvalidKey(f"{given[:KEY_LENGTH]!r} is not a session key")
    return given


def receipt_of(key: str, result: SendResult) -> Receipt:
    """Return the receipt for the sender of an accepted message."""
    return Receipt(
        session=key,
        seq=result.seq,
        message_id=result.message_id,
        disposition=result.disposition,
        cursor=format_cursor(result.seq - 1, result.number),
        run_id=result.run_id,
    )


class MessageSender:
    """Sends messages to sessions. Use it on the host's loop only."""

    __slots__ = ("_agents", "_context", "_dispatcher", "_queue")

    def __init__(self, context: HostContext, agents: AgentRegistry, queue: SlotQueue, dispatcher: Dispatcher) -> None:
        self._context = context
        self._agents = agents
        self._queue = queue
        self._dispatcher = dispatcher

    async def send(
        self,
        principal: str,
        key: str,
        content: str,
        options: SendOptions,
        *,
        message_id: str | None = None,
        handle_agent: str | None = None,
        agents: frozenset[str] | None = None,
        retry_of: str | None = None,
    ) -> Receipt:
        """Send a message to a session. Raises the errors of `SessionAPI.send`.

        Parameters:
            message_id: id of the message; None creates an id.
            handle_agent: the agent to use if `options` does not name one. It is not compared when a message with the
                same idempotency key is sent again.
            agents: names of the agents that the sender may use; None allows all agents.
            retry_of: id of the run whose request the message repeats; None for an ordinary message.
        """
        context = self._context
        idempotency_key, attachments = options.idempotency_key, options.attachments
        if not isinstance(content, str):
            raise InvalidRequest("a message's content must be text (str)")
        if not isinstance(idempotency_key, (str, type(None))):
            raise InvalidRequest("an idempotency key must be text (str)")
        if "\0" in content or "\0" in (idempotency_key or ""):
            raise InvalidRequest("the message contains a NUL character", hint="remove it from the content and the key")
        for attachment in attachments:
            if not isinstance(attachment, Attachment):
                raise InvalidRequest("attachments must be values returned by attach()")
        check_text(content + (idempotency_key or ""))
        check_seconds(quiet_s=options.quiet_s, max_wait_s=options.max_wait_s)
        body_hash = b""
        if idempotency_key is not None:
            if not 0 < len(idempotency_key) <= KEY_LENGTH:
                raise InvalidRequest(f"an idempotency key must have 1 to {KEY_LENGTH} characters")
            digests = (attachment.digest for attachment in attachments)
            hashed = "\0".join((options.policy, options.agent or "", content, *digests))
            body_hash = hashlib.blake2b(hashed.encode(), digest_size=16).digest()
        agent = options.agent or handle_agent
        if agent is not None:
            self._agents.find(agent, among=agents)
        if context.lifecycle.draining:
            raise Draining("this host is shutting down and accepts no new messages")
        settings = context.settings
        request = Send(
            principal=principal,
            key=key,
            agent=agent,
            default_agent=self._agents.default,
            message_id=message_id or ids.message_id(),
            content=content,
            policy=options.policy,
            at=context.now(),
            idempotency_key=idempotency_key,
            body_hash=body_hash,
            run_id=self._queue.reserve(principal),
            quiet_s=settings.quiet_s if options.quiet_s is None else options.quiet_s,
            max_wait_s=settings.max_wait_s if options.max_wait_s is None else options.max_wait_s,
            mailbox_limit=settings.mailbox_limit,
            mailbox_size=settings.mailbox_size,
            session_limit=settings.principal_sessions,
            stored_limit=context.stored_limit,
            attachments=tuple(attachments),
            retry_of=retry_of,
            agents=agents,
            served=self._agents.served,
            takes_over=self._agents.takes_over,
        )
        done = context.store.send(request)
        done.add_done_callback(
            functools.partial(self._dispatcher.on_send_committed, request), context=context.variables
        )
        try:
            result = await asyncio.shield(done)
        finally:
            del done  # breaks a cycle of its error and this frame, which would keep the message in memory
        return receipt_of(key, result)
