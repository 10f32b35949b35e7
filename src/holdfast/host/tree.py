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

__all__ = ["TaskTree"]

_COUNTED_PROCESSES = 200
"""Number of processes up to which one tree counts those of its programs, because counting blocks the loop."""


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
        nodes = _Nodes(self._context.loop.time())
        children = tuple(self._of_session(row, key, nodes) for row, key in shown.items())
        state = "draining" if self._context.lifecycle.draining else "open"
        return TreeNode(kind="host", name=self._context.node_id, state=state, children=children)

    def of_session(self, session: int, key: str) -> TreeNode:
        """Return the live tasks, threads and processes of one session."""
        self._forget()
        return self._of_session(session, key, _Nodes(self._context.loop.time()))

    def _of_session(self, session: int, key: str, nodes: _Nodes) -> TreeNode:
        _, _, abandoned = self._abandoned.get(session, ("", "", []))
        children = tuple(nodes.of_member(leftover.member()) for leftover in abandoned)
        live = self._directory.live.get(session)
        if live is None:
            return TreeNode(kind="session", name=key, state="idle", children=children)
        scopes = [live.active.scope] if live.active is not None else []
        children = (*nodes.of_scopes([*scopes, *live.background]), *children)
        return TreeNode(kind="session", name=key, state="running" if scopes else "idle", children=children)

    def note_abandoned(self, live: LiveSession, scope: Scope) -> None:
        """Record the members that are still running although their scope in the session `live` has closed."""
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


class _Nodes:
    """Creates the nodes of one tree.

    Parameters:
        now: the current time of the loop, from which the ages of members are computed.
    """

    __slots__ = ("_now", "_uncounted")

    def __init__(self, now: float) -> None:
        self._now = now
        self._uncounted = _COUNTED_PROCESSES

    def of_scopes(self, scopes: Iterable[Scope]) -> tuple[TreeNode, ...]:
        """Return a node for each scope, with its members and child scopes below it."""
        return tuple(
            TreeNode(
                kind="scope",
                name=scope.name,
                state=scope.state,
                children=(
                    *(self.of_member(member) for member in scope.members() if member.kind != "scope"),
                    *(self.of_member(leftover.member()) for leftover in scope.leftovers()),
                    *self.of_scopes(scope.children()),
                ),
            )
            for scope in scopes
        )

    def of_member(self, member: Member) -> TreeNode:
        """Return the node of a task, thread or program."""
        return TreeNode(
            kind=member.kind,
            name=member.name,
            state=member.state,
            age_s=max(0.0, self._now - member.started_at) if member.started_at else 0.0,
            pid=member.pid,
            processes=self._processes(member),
        )

    def _processes(self, member: Member) -> int:
        if member.count_processes is None or not self._uncounted:
            return 0
        count = member.count_processes(self._uncounted)
        self._uncounted -= count
        return count
