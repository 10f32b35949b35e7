"""Changes of a workspace's files by tools that run in the server: files that are written, edited, fetched or drawn.

Invariants
- Every tool that writes a file into a workspace does so with `change_workspace`.
- A file that the session did not make is changed only if a person granted it.
- Before anything is written, the principal's quota of the disk and the disk's reserve are checked. A file counts with
  its full size until the workspace is measured again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from holdfast.errors import ToolFailed
from holdfast.runtime import check_interrupt, current_scope
from holdfast.tools.files.workspace import ChangeGuard
from holdfast.tools.sandbox.choice import are_programs_unwalled

if TYPE_CHECKING:
    from holdfast.agents.program_usage import ProgramAccounts
    from holdfast.agents.run import Call
    from holdfast.protocol.messages import Access
    from holdfast.tools.files.entries import Version
    from holdfast.tools.files.workspace import Workspace

__all__ = ["OTHER_NAME", "REPEAT_AND_ASK", "WorkspaceChange", "change_workspace"]

T = TypeVar("T")

REPEAT_AND_ASK = "to ask a person for permission, repeat the call with ask set to true"
"""Advice for a tool whose argument ``ask`` asks for access."""
OTHER_NAME = "choose a name that does not exist yet"
"""Advice for a tool that cannot ask."""


class _NoRoom(Exception):
    """The workspace must not grow, as far as known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceChange:
    """A change of one session's workspace. Use it on the thread that got it.

    Parameters:
        workspace: the session's workspace.
        guard: decides what may be changed; None allows everything.
        principal: the principal that its files count for.
        programs: the accounts of the host.
    """

    workspace: Workspace
    guard: ChangeGuard | None
    principal: str
    programs: ProgramAccounts

    def replace(self, path: str, data: bytes, *, expected: Version | Literal["any"] = "any") -> str:
        """Write a file atomically; see `Workspace.replace`. Nothing is written to a full workspace."""
        place = self.workspace
        fault = self.programs.admit_write(self.principal, place.charged, len(data), shared=place.shared)
        if fault:
            raise _NoRoom(fault)
        return place.replace(path, data, check=check_interrupt, expected=expected, guard=self.guard)


async def change_workspace(call: Call, workspace: Workspace, work: Callable[[WorkspaceChange], T], *, advice: str) -> T:
    """Change files of a run's workspace on a thread, and return what `work` returns.

    Parameters:
        call: the call that changes them.
        work: makes the change; it runs again if the workspace has room after all.
        advice: what to do if the session did not make a file.

    Raises:
        ToolFailed: if the workspace is full, or a file must not or cannot be changed.
    """
    scope = current_scope()
    assert scope is not None, "tools run in a scope"
    run = call.run
    await run.use_workspace()
    programs = run.context.host.programs
    granted = await call.granted() if workspace.protect_existing else None

    def change(*, again: bool) -> T | WorkspaceChange:
        own = workspace.of(run)
        made = WorkspaceChange(
            workspace=own, guard=_guard(own, call, granted, advice), principal=run.principal, programs=programs
        )
        try:
            return work(made)
        except _NoRoom as full:
            if again:
                raise ToolFailed(f"nothing was written: {full}") from None
            return made

    changed = await scope.spawn(functools.partial(change, again=False), on="thread", name="change")
    if isinstance(changed, WorkspaceChange):  # it was full, or not measured yet
        place = changed.workspace
        await programs.measure(run.principal, place.charged, shared=place.shared)
        changed = await scope.spawn(functools.partial(change, again=True), on="thread", name="change")
    assert not isinstance(changed, WorkspaceChange)
    return changed


def _guard(workspace: Workspace, call: Call, granted: Access | None, advice: str) -> ChangeGuard | None:
    if granted is None or are_programs_unwalled():
        return None
    return ChangeGuard(made=workspace.made_by(call.run), root=workspace.root, granted=granted, advice=advice)
