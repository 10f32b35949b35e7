"""Requests between hosts about their parts of a session: to stop background work, to shorten a grace period, or to show
the tree.

Invariants
- A request is a row in the store for one host, and the reply is written into it. Signals and polls only decide when to
  look at it. The request for a stop is written with the stop itself: if the host that stops ends, others still stop.
- A host has a row for each session with background work, written before the work begins. So a stop at any host reaches
  all of it.
- A host that is gone does not reply, and neither does a host that is frozen until its lease is over. Their programs are
  killed by then, so the receipt has the proof ``lease``, also of the first stop after the host was gone.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.errors import StorageError
from holdfast.host.coalesced_tasks import CoalescedTasks
from holdfast.host.store_retry import retry
from holdfast.protocol.messages import TreeNode
from holdfast.protocol.stopping import Cause, StopReceipt, join_receipts
from holdfast.storage.port import StopRequest

if TYPE_CHECKING:
    from holdfast.host.context import HostContext
    from holdfast.host.log_follower import LogFollower
    from holdfast.host.session_directory import SessionDirectory
    from holdfast.host.tree import TaskTree
    from holdfast.storage.port import Cluster, NodeReply, NodeRequest

__all__ = ["NodeRequests"]

_TREE_S: Final = 2.0
"""Time that the tree of another host may take, in seconds."""
_MARGIN_S: Final = 5.0
_LOOK_EVERY_S: Final = 0.5
"""Interval at which replies are looked for without a signal."""

_decode_stop = msgspec.json.Decoder(StopRequest).decode
_decode_receipt = msgspec.json.Decoder(StopReceipt).decode
_decode_tree = msgspec.json.Decoder(TreeNode).decode


class NodeRequests:
    """Sends requests to other hosts, and carries out those of others. Use it on the host's loop only.

    Parameters:
        cluster: the hosts that share the store.
        follower: follows the logs of sessions, and is woken when a request has a reply.
    """

    __slots__ = ("_cluster", "_context", "_directory", "_follower", "_handling", "_looks", "_tree")

    def __init__(
        self,
        context: HostContext,
        directory: SessionDirectory,
        tree: TaskTree,
        *,
        cluster: Cluster,
        follower: LogFollower,
    ) -> None:
        self._context = context
        self._directory = directory
        self._tree = tree
        self._cluster = cluster
        self._follower = follower
        self._looks = CoalescedTasks(context, self._look, name="requests")
        self._handling: dict[int, asyncio.Task[bytes]] = {}
        """The requests that this host carries out, each once; until a look shows that the reply was recorded."""

    # ── asking ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def receipts(
        self, requests: Sequence[int], session: int, key: str, cause: Cause, *, grace_s: float | None
    ) -> list[StopReceipt]:
        """Return the receipts of the other hosts that were asked to stop the session's background work.

        Parameters:
            requests: ids of the requests, which were recorded with the stop.
            grace_s: grace period of the stop, in seconds; None for the default.
        """
        context = self._context
        settings, began = context.settings, context.loop.time()
        grace = settings.grace_s if grace_s is None else grace_s
        limit_s = grace + settings.abandon_after_s + 2 * context.store.health().lease_s + _MARGIN_S
        try:
            replies = await self._replies(requests, session, limit_s)
        except StorageError as error:
            context.store_failed(key, None, "receipts of other hosts", error)
            left = ("background work on other hosts (the store does not answer)",)
            return [StopReceipt(scope=key, cause=cause, outcome="unknown", unattributed=left)]
        return [_receipt_of(reply, key, cause, context.loop.time() - began) for reply in replies]

    async def complete_tree(self, own: TreeNode, session: int) -> TreeNode:
        """Return this host's tree of a session with those of the other hosts that have a part of the session."""
        try:
            requests = await self._cluster.ask(session, "tree", own.name.encode())
            others = [_tree_of(reply) for reply in await self._replies(requests, session, _TREE_S)]
        except StorageError:  # a read-only database, for example
            others = [TreeNode(kind="host", name="other hosts", state="no answer")]
        if not others:
            return own
        runs = any(part.state == "running" for other in others for part in other.children)
        state = "running" if runs or own.state == "running" else own.state
        return msgspec.structs.replace(own, state=state, children=(*own.children, *others))

    async def _replies(self, requests: Sequence[int], session: int, limit_s: float) -> Sequence[NodeReply]:
        """Wait for the replies to requests about a session, at most `limit_s` and until this host must end.

        Requests without a reply stay, so that a host that looks later still carries them out.

        Raises:
            StorageError: if the store does not answer.
        """
        if not requests:
            return ()
        context, cluster = self._context, self._cluster
        ends_at = context.loop.time() + limit_s
        while True:
            changed = self._follower.change(session)
            replies = await retry(context, "replies", lambda: cluster.replies(requests))
            left_s = 0.0 if context.lifecycle.past_deadline else ends_at - context.loop.time()
            if left_s <= 0 or all(reply.body is not None or reply.is_gone for reply in replies):
                break
            await asyncio.wait((changed,), timeout=min(left_s, _LOOK_EVERY_S, context.settings.cluster_poll_s))
        over = [
            request for request, reply in zip(requests, replies, strict=True) if reply.body is not None or reply.is_gone
        ]
        cluster.drop_requests(over).add_done_callback(_ignore)  # those that stay are swept later
        return replies

    # ── answering ────────────────────────────────────────────────────────────────────────────────────────────────

    def look(self) -> None:
        """Look for requests of other hosts soon."""
        self._looks.request(0)

    async def _look(self, _: int) -> None:
        done = [request_id for request_id, handling in self._handling.items() if handling.done()]
        found = await self._cluster.requests()
        for request in found:
            handling = self._handling.get(request.request_id)
            if handling is None:
                handle = self._carry_out(request)
                handling = self._handling[request.request_id] = self._context.start_task(handle, "handle a request")
                handling.add_done_callback(functools.partial(self._handled, request))
            elif request.request_id in done:  # the reply was not recorded
                self._handled(request, handling)
        for request_id in {*done} - {request.request_id for request in found}:
            self._handling.pop(request_id, None)

    def _handled(self, request: NodeRequest, handling: asyncio.Task[bytes]) -> None:
        if handling.cancelled():
            return
        error = handling.exception()
        if error is not None:
            del self._handling[request.request_id]  # a later look repeats it
            self._context.store_failed(None, None, f"request {request.kind!r} of another host", error)
        elif request.kind == "interrupt":  # its reply is not awaited
            self._cluster.drop_requests((request.request_id,)).add_done_callback(_ignore)
        else:
            self._cluster.reply(request, handling.result()).add_done_callback(_ignore)  # a later look finds out

    async def _carry_out(self, request: NodeRequest) -> bytes:
        match request.kind:
            case "stop":
                asked = _decode_stop(request.body)
                live = self._directory.live.get(request.session)
                receipts = []
                if live is not None:
                    stops = live.stop_background(
                        self._context.start_task, asked.cause, grace_s=asked.grace_s, before_seq=asked.before_seq
                    )
                    receipts = [await stop for stop in stops]
                    self._directory.forget_walls(live)
                nothing = StopReceipt(scope=asked.key, cause=asked.cause)
                return msgspec.json.encode(join_receipts(nothing, *receipts))
            case "interrupt":
                asked = _decode_stop(request.body)
                live = self._directory.live.get(request.session)
                run = None if live is None else live.active
                if run is not None and run.run_id == asked.run_id:
                    run.stop(asked.cause, grace_s=asked.grace_s)
                return b""
            case "tree":
                part = self._tree.of_session(request.session, request.body.decode())
                state = "draining" if self._context.lifecycle.draining else "open"
                node = TreeNode(kind="host", name=self._context.node_id, state=state, children=(part,))
                return msgspec.json.encode(node)


def _ignore(done: asyncio.Future[None]) -> None:
    """Retrieve the error of a write that is repeated, or that another write makes up for."""
    if not done.cancelled():
        done.exception()


def _receipt_of(reply: NodeReply, key: str, cause: Cause, elapsed_s: float) -> StopReceipt:
    if reply.body is not None:
        return _decode_receipt(reply.body)
    why = "which is gone" if reply.is_gone else f"which did not answer within {elapsed_s:.0f} s"
    return StopReceipt(
        scope=key,
        cause=cause,
        outcome="unknown",
        unattributed=(f"background work on another host ({why})",),
        proof="lease" if reply.is_gone else "observed",
        elapsed_s=elapsed_s,
    )


def _tree_of(reply: NodeReply) -> TreeNode:
    if reply.body is not None:
        return _decode_tree(reply.body)
    return TreeNode(kind="host", name="another host", state="gone" if reply.is_gone else "no answer")
