"""Adoption of programs that foreign code starts in a scope, so that they end with the scope.

While adoption is installed, each program that Python starts with ``subprocess``, ``asyncio.create_subprocess_*``,
``multiprocessing``, ``os.system``, ``os.fork`` and ``os.posix_spawn`` in a scope becomes a `ForeignProcess` of that
scope. Invariants:

- The code that started a program still gets its exit status: this module never reaps a pid that foreign code owns. It
  reaps only orphans that were reparented to this process, which is a child subreaper while adoption is installed.
- Each scope has a tag (`holdfast.runtime.processes.tags`), which contains the scope's number; everything started in the
  scope inherits the tag. If the tag is sealed (`holdfast.runtime.processes.seal`), no process can lose it. The tag is
  also set in the program's environment, where the start function allows that. Attribution does not depend on parents,
  sessions or groups.
- A process that C code starts on some thread is unclaimed: it carries the tag of this process. It belongs to a scope if
  its parent is a thread that still works for that scope and has worked for no other scope since the process was
  started. Otherwise the process is reported to the operator; while it lives, no scope that was open at its start may
  report that nothing is left.
- The members of a scope are complete: if descendants of an adopted program outlive it (strays), they are adopted before
  the program's end is reported.
- Each adopted program is identified by a pidfd that was opened while its pid could not be reused.
- A program has its tag from its first moment: the tag is set on this process during the start, and only one start runs
  at a time.

Known gap: a process that an extension's C code starts on another thread during a start gets the tag of that start.

Resources that several scopes share must be started outside any scope: a process pool whose workers were started in a
scope ends with that scope. The resource tracker and the fork server of ``multiprocessing`` are known to be shared and
left alone.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from holdfast.runtime.adoption.installation import ProgramAdoption
from holdfast.runtime.adoption.start_hooks import StartHooks
from holdfast.runtime.process_host import ProcessHost, process_host
from holdfast.runtime.processes import procfs
from holdfast.runtime.processes.foreign_process import ForeignProcess, Owner
from holdfast.runtime.processes.seal import current as current_seal
from holdfast.runtime.processes.seal import seal
from holdfast.runtime.processes.tree import KILL_BOUND_S, TreeResult
from holdfast.runtime.processes.zygote_link import supported
from holdfast.runtime.scope.program_adopter import set_program_adopter

__all__ = [
    "Restorer",
    "install",
    "kill_everything",
    "kill_trees",
    "leave_thread",
    "look_soon",
    "may_have_started",
    "strangers",
]

_ANSWER_S = 1.0
_AGAIN_S = (0.01, 0.1)
"""Delays before a kill whose zygote was killed is sent to another zygote, which takes a moment to be available."""

_adoption: ProgramAdoption | None = None
_hooks: StartHooks | None = None


class Restorer:
    """Undoes an `install`; can be used as a context manager."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo

    def restore(self) -> None:
        """End the adoption of programs. Idempotent."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Restorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


async def kill_trees(
    roots: Sequence[ForeignProcess], *, owner: Owner | None = None, bound_s: float = KILL_BOUND_S
) -> TreeResult:
    """Kill the adopted programs of one or more scopes and everything that these programs started.

    A fork of the zygote does the killing, so a busy interpreter does not delay it; concurrent kills share one fork. On
    return, the killed processes no longer run. The code that started a program still gets its exit status.

    Parameters:
        roots: programs adopted by one or more scopes; everything that belongs to these scopes is killed.
        owner: scope whose programs are killed in addition, even if all its known programs have ended; None adds no
            scope.
        bound_s: time limit in seconds.
    """
    adoption = _adoption
    if adoption is None:
        return TreeResult(proven=not roots)
    tags: dict[int, list[tuple[int, int]]] = {root.tag: [] for root in roots}
    for root in roots:
        if not root.ended:
            tags[root.tag].append((root.pid, root.started))
    if owner is not None:
        tags.setdefault(adoption.programs.tag_for(owner), [])
    if not tags:
        return TreeResult()
    result = await _kill(adoption, tags, roots, bound_s)
    return replace(result, killed=tuple(dict.fromkeys((*result.killed, *adoption.programs.take_refused(tags)))))


async def kill_everything(*, bound_s: float = KILL_BOUND_S) -> TreeResult:
    """Kill everything that foreign code in any scope, or C code in this process, has started.

    Called when a host ends.
    """
    adoption = _adoption
    if adoption is None:
        return TreeResult()
    return await _kill(adoption, {tag: [] for tag in (adoption.tags.own, *adoption.programs.all_tags())}, (), bound_s)


async def _kill(
    adoption: ProgramAdoption, tags: dict[int, list[tuple[int, int]]], roots: Sequence[ForeignProcess], bound_s: float
) -> TreeResult:
    end_at = time.monotonic() + bound_s
    for again_s in (*_AGAIN_S, None):
        answer = adoption.passes.ask(tags, bound_s)
        try:
            async with asyncio.timeout(bound_s + _ANSWER_S):
                result = await answer.wait()
        except TimeoutError:
            result = answer.value or TreeResult(proven=False)  # it may have come while the loop was blocked
        bound_s = end_at - time.monotonic()
        if result != TreeResult(proven=False) or bound_s <= 0 or again_s is None:
            break
        await asyncio.sleep(again_s)  # the zygote was killed during it: ask another one
    if result == TreeResult(proven=False):  # no zygote could be asked: at least the roots can be killed
        result = TreeResult(killed=_kill_roots(roots), proven=False)
    return result


def leave_thread() -> None:
    """Assign programs that C code started on the calling thread to the scope that the thread is about to leave."""
    adoption = _adoption
    if adoption is None or adoption.forked:
        return
    listed = procfs.read_text("/proc/thread-self/children")
    if listed and not all(map(adoption.programs.is_known, map(int, listed.split()))):
        adoption.strangers.claim()


def may_have_started(owner: Owner) -> bool:
    """Whether foreign code was observed to start a program in this scope."""
    return _adoption is not None and _adoption.programs.known_tag(owner) is not None


def strangers(since: float) -> int:
    """Return the number of live processes that a scope may have started but that cannot be attributed to it.

    C code started these processes. They are not killed, but reported to the operator. Processes that were certainly
    started on a thread of a scope are assigned to that scope and do not count.

    Parameters:
        since: time at which the scope was opened, in clock ticks since boot.
    """
    if _adoption is None:
        return 0
    return _adoption.strangers.strangers_since(_adoption.strangers.claim(), since)


def look_soon(loop: asyncio.AbstractEventLoop, since: float, tell: Callable[[int], object]) -> None:
    """Call ``tell`` with the result of `strangers`; one search answers all pending requests.

    ``tell`` is called in one of the loop's next iterations. Each iteration answers only some requests, so that the ends
    of many scopes do not stall the loop. A search soon after another one is delayed, because it reads a file for each
    thread; stops that end shortly after each other then share its result.
    """
    adoption = _adoption
    if adoption is None:
        tell(0)
        return
    if getattr(loop, "virtual", False):  # the explorer's loops have no programs
        tell(0)
        return
    adoption.strangers.look_soon(loop, since, tell)


def _kill_roots(roots: Sequence[ForeignProcess]) -> tuple[int, ...]:
    return tuple(root.pid for root in roots if root.signal(signal.SIGKILL))


class _Adopter:
    """The `ProgramAdopter` of this process."""

    __slots__ = ()

    def may_have_started(self, owner: Owner, /) -> bool:
        return may_have_started(owner)

    def strangers(self, since: float, /) -> int:
        return strangers(since)

    def look_soon(self, loop: asyncio.AbstractEventLoop, since: float, tell: Callable[[int], object], /) -> None:
        look_soon(loop, since, tell)

    async def kill_trees(self, roots: Sequence[ForeignProcess], owner: Owner, bound_s: float, /) -> TreeResult:
        return await kill_trees(roots, owner=owner, bound_s=bound_s)


set_program_adopter(_Adopter())  # a scope asks for it only once this module is imported


def install(
    current: Callable[[], Owner | None],
    processes: ProcessHost | None = None,
    *,
    sealed: bool = True,
    home: Callable[[int], Owner | None] = lambda thread: None,
    lingers: Callable[[], bool] = lambda: False,
) -> Restorer:
    """Adopt programs that foreign code starts in a scope, from now on and in the whole process.

    Parameters:
        current: returns the scope of the running code; it may raise to refuse a start.
        processes: process host whose zygote does the killing; None means the process host of this process. The zygote
            is started now, so that it can kill the remaining programs if this process is killed.
        sealed: whether to make tags indelible, permanently for this process; see `holdfast.runtime.processes.seal` for
            the cost.
        home: returns the scope that the thread with this native id works for; None if it works for no scope. A thread
            that stops working for a scope must call `leave_thread`.
        lingers: returns whether threads of ended scopes still run. If so when the installation ends, nothing more is
            adopted, but ``current`` is still called to refuse their starts until the next installation takes over.

    Raises:
        RuntimeError: already installed.
    """
    global _adoption, _hooks
    if _adoption is not None:
        raise RuntimeError("foreign processes are already adopted; call restore() of the first install() first")
    if not supported():
        return Restorer(lambda: None)
    if _hooks is not None and sealed and not current_seal().sealed:  # their tag would block a seal
        _hooks.take_off()
        _hooks = None
    processes = process_host() if processes is None else processes
    adoption = ProgramAdoption(current, processes, seal() if sealed else current_seal(), home, lingers)
    processes.start()
    if _hooks is None:
        _hooks = StartHooks(adoption)
    else:
        _hooks.pass_to(adoption)
    processes.set_tick(adoption.programs.tick)
    _adoption = adoption

    def undo() -> None:
        global _adoption, _hooks
        adoption.ended = True
        _adoption = None
        processes.set_tick(None)
        adoption.programs.close()
        if _hooks is not None and not lingers():
            _hooks.take_off()
            _hooks = None

    return Restorer(undo)
