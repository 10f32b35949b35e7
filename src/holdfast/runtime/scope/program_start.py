"""Start a program as a member of a scope."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from holdfast.runtime.scope.process_handle import ProcessHandle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.runtime.process_host import Process, ProcessHost
    from holdfast.runtime.processes.spec import Argument
    from holdfast.runtime.scope.state import ScopeState

__all__ = ["start_program"]


async def start_program(
    core: ScopeState, processes: ProcessHost, argv: Sequence[Argument], *, name: str | None, **options: Any
) -> Process:
    """Start a program that a scope owns; see `Scope.process`.

    Parameters:
        core: state of the scope.
        processes: host that starts the program.
        options: options of `ProcessHost.spawn`.
    """
    handle = ProcessHandle(core, name or " ".join(map(os.fsdecode, argv[:1])))
    core.enter(handle)
    try:
        process = await processes.spawn(argv, name=name, on_cut=handle.on_cut, leased=True, **options)
        await handle.take(process)
    except BaseException:
        if not handle.cut:  # otherwise it is discarded once nothing of the start is left
            core.on_loop(core.discard, handle, None)
        raise
    return process
