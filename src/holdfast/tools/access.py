"""Access of a tool's calls beyond their wall: what a call asks for, and what people granted.

Invariants
- What a call asks for depends only on its arguments, its session and the tool's profile, so a run that resumes asks
  the same question. Every path is absolute, lies in the session's workspace or in ``readable_on_request``, and has no
  ``..``; secrets are those of ``secrets_on_request``. No person can grant anything else.
- A granted path is used only if no part of it is a link. The wall is built for the file that was found then: if another
  file takes its place before the wall stands, the program is not started.
- A program that started with access from a grant is ended when the grant is revoked.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Any, TypedDict

from holdfast.errors import InvalidArguments, ToolFailed
from holdfast.protocol.access import NO_REQUEST, AccessRequest, describe, is_covered, join, read_access
from holdfast.protocol.messages import Access
from holdfast.runtime import current_scope
from holdfast.tools.commands.danger import is_dangerous_call
from holdfast.tools.files.change_rule import plain_path
from holdfast.tools.sandbox.choice import are_programs_unwalled
from holdfast.tools.sandbox.sandbox import sandbox_of
from holdfast.tools.walled import HeldAccess

if TYPE_CHECKING:
    from holdfast.agents.run import Run
    from holdfast.agents.tool import SessionIdentity
    from holdfast.tools.files.workspace import Workspace
    from holdfast.tools.sandbox.sandbox import Sandbox, SandboxChoice

__all__ = ["AccessArgument", "access_rule", "hold_access"]


class AccessArgument(TypedDict, total=False):
    """Access beyond the sandbox that a call asks for. A person must grant it."""

    write: list[str]
    """Files and folders of the workspace to change that this session did not make."""
    read: list[str]
    """Files and folders outside of the workspace to read."""
    hosts: list[str]
    """Hosts to reach, each with its port, such as api.example.org:443."""
    secrets: list[str]
    """Names of secrets to get as environment variables."""


def access_rule(
    workspace: Workspace, sandbox: SandboxChoice
) -> Callable[[SessionIdentity, dict[str, Any]], AccessRequest]:
    """Return the rule of a tool that runs programs: what its argument ``access`` asks for."""

    def rule(session: SessionIdentity, arguments: dict[str, Any]) -> AccessRequest:
        asked = read_access(arguments.get("access"))
        if not asked or are_programs_unwalled():  # without a wall, every access is open
            return NO_REQUEST
        root = os.fspath(workspace.location_of(session))
        own = sandbox_of(sandbox, session.principal)
        known = [os.path.abspath(path) for path in own.readable_on_request]
        access = Access(
            write=tuple(plain_path(path, root) for path in asked.write),
            read=tuple(_one_of(path, root, known) for path in asked.read),
            hosts=asked.hosts,
            secrets=tuple(_known_secret(name, own) for name in asked.secrets),
        )
        hint = " (the command is not known to be harmless)" if is_dangerous_call(arguments) else ""
        return AccessRequest(access=access, text=describe(access, root=root) + hint)

    return rule


def _one_of(path: str, root: str, known: list[str]) -> str:
    whole = os.path.normpath(os.path.join(root, path))
    if ".." in path.split("/") or not any(whole == one or whole.startswith(f"{one}/") for one in known):
        raise InvalidArguments(
            f"access to read {path!r} cannot be granted: the workspace is readable anyway, and the operator offers "
            f"{', '.join(known) or 'no other path'}"
        )
    return whole


def _known_secret(name: str, sandbox: Sandbox) -> str:
    if name not in sandbox.secrets_on_request:
        offered = ", ".join(sandbox.secrets_on_request) or "no secret"
        raise InvalidArguments(f"the secret {name!r} cannot be granted; the operator offers {offered}")
    return name


@contextlib.asynccontextmanager
async def hold_access(
    run: Run, approved: Access, workspace: Workspace, request: AccessRequest
) -> AsyncIterator[HeldAccess]:
    """Yield what a program of the current scope may touch; the program must have ended when the block ends.

    Within the block, what appears in the workspace counts as made by the session, and the scope is interrupted when a
    grant is revoked whose access the program has.

    Parameters:
        run: run of the call.
        approved: access that a person approved for this call.
        workspace: workspace of the tool.
        request: what the call asks for.

    Raises:
        ToolFailed: if a grant that covered the request was revoked in the meantime, or a granted path is unusable.
    """
    if are_programs_unwalled():
        yield HeldAccess()
        return
    scope = current_scope()
    assert scope is not None, "tools run in a scope"
    host = run.context.host
    held: set[str] | None = None
    revoked: set[str] = set()

    def on_revoked(grant_id: str) -> None:
        if held is None:
            revoked.add(grant_id)
        elif grant_id in held:
            scope.interrupt.trigger("a person revoked the access that it was granted", kind="stop")

    with contextlib.ExitStack() as stack:
        stack.callback(host.watch_grants(on_revoked))  # before the read, so that no revocation is missed
        grants = [grant for grant in await host.grants() if grant.grant_id not in revoked]
        held = {grant.grant_id for grant in grants}
        standing = join(*[grant.access for grant in grants])
        if not is_covered(request.access, join(approved, standing)):
            raise ToolFailed("the access was revoked in the meantime; ask for it again if you still need it")
        # Secrets are passed only to calls that ask for them; what else was granted holds for every call.
        access = join(approved, Access(read=standing.read, write=standing.write, hosts=standing.hosts))
        own = await scope.spawn(workspace.of, run, on="thread", name="workspace")
        protected: tuple[str, ...] = ()
        made = None
        if workspace.protect_existing:
            made = own.made_by(run)
            protected = made.begin()
            stack.callback(made.end)
        protected = tuple(path for path in protected if not _is_below(path, access.write))
        made_there = made.paths() if made is not None and os.fspath(own.root) in protected else ()
        yield HeldAccess(
            writable=made_there
            + tuple(
                path
                for path in access.write
                if _is_below(path, protected) and _is_plain(path, is_asked=path in request.access.write)
            ),
            readable=tuple(path for path in access.read if _is_plain(path, is_asked=path in request.access.read)),
            hosts=access.hosts,
            secrets=request.access.secrets,
            protected=protected,
            workspace=own,
        )


def _is_below(path: str, folders: Iterable[str]) -> bool:
    """Return whether a path is one of the folders, or lies in one."""
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _is_plain(path: str, *, is_asked: bool) -> bool:
    """Return whether a granted path exists and has no link in it. Raises `ToolFailed` if not, and this call asked."""
    if os.path.lexists(path) and os.path.realpath(path) == path:
        return True
    if is_asked:
        raise ToolFailed(f"{path} does not exist, or a part of it is a link; ask for an existing folder or file")
    return False
