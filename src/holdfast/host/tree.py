"""The task tree as people see it, from the scopes that are alive."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.protocol.messages import TreeNode
from holdfast.runtime import Scope

__all__ = ["scope_nodes"]


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
                *(
                    TreeNode(
                        kind=member.kind,
                        name=member.name,
                        state=member.state,
                        age_s=max(0.0, now - member.started_at),
                        pid=member.pid,
                    )
                    for member in scope.members()
                    if member.kind != "scope"
                ),
                *scope_nodes(scope.children(), now),
            ),
        )
        for scope in scopes
    )
