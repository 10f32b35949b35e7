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
    """What the stops of a host gave up and lives on, by session; the tree shows it until it has ended."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[str, str, list[Leftover]]] = {}

    def note(self, actor: SessionActor, scope: Scope) -> None:
        """A scope of that session has closed."""
        leftovers = scope.leftovers()
        if leftovers:
            self._forget()
            _, _, known = self._of.setdefault(actor.session, (actor.principal, actor.key, []))
            known.extend(leftovers)

    def sessions(self, principal: str | None) -> dict[int, str]:
        """Number and key of the sessions of which something is left; of one principal, or of all."""
        self._forget()
        return {number: key for number, (owner, key, _) in self._of.items() if principal in (None, owner)}

    def nodes(self, session: int, now: float) -> tuple[TreeNode, ...]:
        """What is left of one session. `now` as in `scope_nodes`."""
        self._forget()
        _, _, leftovers = self._of.get(session, ("", "", []))
        return tuple(_member_node(leftover.member(), now) for leftover in leftovers)

    def _forget(self) -> None:
        """Let go of what has ended."""
        for number, (_, _, leftovers) in list(self._of.items()):
            leftovers[:] = [leftover for leftover in leftovers if leftover.lives]
            if not leftovers:
                del self._of[number]


def scope_nodes(scopes: Iterable[Scope], now: float) -> tuple[TreeNode, ...]:
    """A node for each scope, with its members and its child scopes below it.

    Parameters:
        now: the loop's time, from which ages are counted.
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
