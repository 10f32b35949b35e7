"""The permission for which file tools ask: to change a file of the workspace that the session did not make."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.errors import InvalidArguments
from holdfast.protocol.access import NO_REQUEST, AccessRequest, describe, read_access
from holdfast.protocol.messages import Access
from holdfast.tools.sandbox.choice import are_programs_unwalled

if TYPE_CHECKING:
    from holdfast.agents.tool import SessionIdentity
    from holdfast.tools.files.workspace import Workspace

__all__ = ["change_rule", "plain_path"]


def change_rule(workspace: Workspace) -> Callable[[SessionIdentity, dict[str, Any]], AccessRequest]:
    """Return the rule of a file tool: whether its argument ``ask`` asks to change the file of its argument ``path``."""

    def rule(session: SessionIdentity, arguments: dict[str, Any]) -> AccessRequest:
        if arguments.get("ask") is not True or are_programs_unwalled() or not workspace.protect_existing:
            return NO_REQUEST
        path = read_access({"write": [arguments.get("path")]}).write[0]
        root = os.fspath(workspace.location_of(session))
        access = Access(write=(plain_path(path, root),))
        return AccessRequest(access=access, text=describe(access, root=root))

    return rule


def plain_path(path: str, root: str) -> str:
    """Return the absolute form of a path in the workspace. Raises `InvalidArguments` for any other path."""
    parts = path.split("/")
    whole = os.path.normpath(os.path.join(root, path))
    if ".." in parts or not (whole == root or whole.startswith(f"{root}/")):
        raise InvalidArguments(f"access to {path!r} cannot be granted: it is not a plain path in the workspace")
    return whole
