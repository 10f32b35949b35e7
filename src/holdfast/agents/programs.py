"""Programs that an agent's own code starts, behind a wall if it gives a sandbox."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.agents.context import RunContext
    from holdfast.runtime import Process, Scope

__all__ = ["start_program"]


async def start_program(
    context: RunContext, scope: Scope, argv: Sequence[str], sandbox: object, options: Mapping[str, Any]
) -> Process:
    """Start a program in a scope of a run. Behind a wall, it counts for the run's principal.

    Parameters:
        sandbox: see `RunHost.launch`; None starts the program without a wall.
        options: options of `Scope.process`.
    """
    if sandbox is None:
        return await scope.process(argv, **options)
    start = await context.host.launch(argv, sandbox, options)
    process = None
    try:
        process = await scope.process(**start.options, cgroup=context.host.programs.cgroup_of(context.principal))
    finally:
        for fd in start.options["pass_fds"]:
            os.close(fd)
        if start.on_gone is not None and (process is None or not process.tree.gone.add(start.on_gone)):
            start.on_gone()
    _ = context.host.programs.watch(context.principal, process, folder=Path(start.options["cwd"]), shared=True)
    return process
