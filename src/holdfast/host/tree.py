"""Task tree for people, built from the live scopes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from holdfast.protocol.messages import TreeNode
from holdfast.runtime import Member, Scope

if TYPE_CHECKING:
    from holdfast.host.actor import SessionActor
    from holdfast.runtime.leftovers import Leftover

__all__ = ["LeftBehind", "scope_nodes"]


class LeftBehind:
    """Abandoned tasks and threads that are still alive, by session; the tree shows them until they end."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[str, str, list[Leftover]]] = {}

    def note(self, actor: SessionActor, scope: Scope) -> None:
        """Record the leftovers of a session's closed scope."""
        leftovers = scope.leftovers()
        if leftovers:
            self._forget()
            _, _, known = self._of.setdefault(actor.session, (actor.principal, actor.key, []))
            known.extend(leftovers)

    def sessions(self, principal: str | None) -> dict[int, str]:
        """Return number and key of the sessions with leftovers; of one principal, or of all (None)."""
        self._forget()
        return {number: key for number, (owner, key, _) in self._of.items() if principal in (None, owner)}

    def nodes(self, session: int, now: float) -> tuple[TreeNode, ...]:
        """Return the leftovers of one session. `now` as in `scope_nodes`."""
        self._forget()
        _, _, leftovers = self._of.get(session, ("", "", []))
        return tuple(_member_node(leftover.member(), now) for leftover in leftovers)

    def _forget(self) -> None:
        """Drop leftovers that have ended."""
        for number, (_, _, leftovers) in list(self._of.items()):
            leftovers[:] = [leftover for leftover in leftovers if leftover.lives]
            if not leftovers:
                del self._of[number]


def scope_nodes(scopes: Iterable[Scope], now: float) -> tuple[TreeNode, ...]:
    """Return a node for each scope, with its members and child scopes below it.

    Parameters:
        now: the loop's time, for computing ages.
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
