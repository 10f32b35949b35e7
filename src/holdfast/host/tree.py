"""Task tree for display, built from the live sessions and their scopes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from holdfast.protocol.messages import TreeNode
from holdfast.runtime import Member, Scope

if TYPE_CHECKING:
    from holdfast.host.context import HostContext
    from holdfast.host.live_session import LiveSession
    from holdfast.host.session_directory import SessionDirectory
    from holdfast.runtime.scope.abandoned import AbandonedMember

__all__ = ["TaskTree", "scope_nodes"]


class TaskTree:
    """The tree of a host's live sessions and runs, with the tasks, threads and processes of each.

    Abandoned tasks and threads stay in the tree, in the state ``abandoned``, until they end.
    """

    __slots__ = ("_abandoned", "_context", "_directory")

    def __init__(self, context: HostContext, directory: SessionDirectory) -> None:
        self._context = context
        self._directory = directory
        self._abandoned: dict[int, tuple[str, str, list[AbandonedMember]]] = {}

    def of_host(self, principal: str | None) -> TreeNode:
        """Return the tree of the host for `principal`; None includes all principals."""
        shown = {
            live.session: live.key
            for live in self._directory.live.values()
            if not live.idle and principal in (None, live.principal)
        }
        self._forget()
        shown |= {row: key for row, (owner, key, _) in self._abandoned.items() if principal in (None, owner)}
        children = tuple(self.of_session(row, key) for row, key in shown.items())
        state = "draining" if self._context.lifecycle.draining else "open"
        return TreeNode(kind="host", name=self._context.node_id, state=state, children=children)

    def of_session(self, session: int, key: str) -> TreeNode:
        """Return the live tasks, threads and processes of one session."""
        now = self._context.loop.time()
        self._forget()
        _, _, abandoned = self._abandoned.get(session, ("", "", []))
        nodes = tuple(_member_node(leftover.member(), now) for leftover in abandoned)
        live = self._directory.live.get(session)
        if live is None:
            return TreeNode(kind="session", name=key, state="idle", children=nodes)
        scopes = [live.active.scope] if live.active is not None else []
        nodes = (*scope_nodes([*scopes, *live.background], now), *nodes)
        return TreeNode(kind="session", name=key, state="running" if scopes else "idle", children=nodes)

    def note_abandoned(self, live: LiveSession, scope: Scope) -> None:
        """Record the members of a closed scope of the session `live` that are still alive."""
        leftovers = scope.leftovers()
        if leftovers:
            self._forget()
            _, _, known = self._abandoned.setdefault(live.session, (live.principal, live.key, []))
            known.extend(leftovers)

    def _forget(self) -> None:
        """Drop abandoned members that have ended."""
        for session, (_, _, leftovers) in list(self._abandoned.items()):
            leftovers[:] = [leftover for leftover in leftovers if leftover.is_alive]
            if not leftovers:
                del self._abandoned[session]


def scope_nodes(scopes: Iterable[Scope], now: float) -> tuple[TreeNode, ...]:
    """Return a node for each scope, with its members and child scopes below it.

    Parameters:
        now: the current time of the loop, from which the ages of members are computed.
    """
    return tuple(
        TreeNode(
            kind="scope",
            name=scope.name,
            state=scope.state,
            children=(
                *(_member_node(member, now) for member in scope.members() if member.kind != "scope"),
                *(_member_node(leftover.member(), now) for leftover in scope.leftovers()),
                *scope_nodes(scope.children(), now),
            ),
        )
        for scope in scopes
    )


def _member_node(member: Member, now: float) -> TreeNode:
    age_s = max(0.0, now - member.started_at) if member.started_at else 0.0
    return TreeNode(kind=member.kind, name=member.name, state=member.state, age_s=age_s, pid=member.pid)
