"""Wrappers around all ways in which Python starts a program, so that each start has an owner and a tag."""

from __future__ import annotations

import _posixsubprocess
import ctypes
import functools
import multiprocessing.process
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from holdfast.runtime.adoption.installation import ProgramAdoption
from holdfast.runtime.adoption.multiprocessing_internals import fork_server_pid, start_method_of
from holdfast.runtime.processes import procfs
from holdfast.runtime.processes.spec import host_marker

__all__ = ["StartHooks"]

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_SHARED = frozenset({"multiprocessing.resource_tracker", "multiprocessing.forkserver"})
"""Modules whose helper processes are shared. A helper is recognized by the starting module, not its command line."""


class StartHooks:
    """Patches of the functions with which this process starts programs.

    The patches stay in place while programs are adopted. If threads of ended scopes still run when the installation
    ends, the patches stay until a later installation ends, so that starts on these threads are refused.

    Parameters:
        adoption: installation that assigns each start to a scope or refuses it.
    """

    def __init__(self, adoption: ProgramAdoption) -> None:
        self.adoption = adoption
        self._limits = adoption.seal.limits()
        adoption.seal.put(0, adoption.tags.own)
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._subreaper = ctypes.c_int()
        self._prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(self._subreaper), 0, 0, 0)
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._plain: list[tuple[Any, str, Any]] = []
        _wrap(self)

    def pass_to(self, adoption: ProgramAdoption) -> None:
        """Pass all further starts to another installation."""
        self.adoption = adoption
        _wrap_uvloop(self)

    def put(self, place: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Wrap the function ``name`` of the module or class ``place``, unless the function is already wrapped."""
        if any(known[:2] == (place, name) for known in self._plain):
            return
        plain = getattr(place, name)
        self._plain.append((place, name, plain))
        setattr(place, name, wrapper(plain))

    def take_off(self) -> None:
        """Restore the wrapped functions, and the subreaper setting and resource limits of this process."""
        while self._plain:
            place, name, plain = self._plain.pop()
            setattr(place, name, plain)
        self._prctl(_PR_SET_CHILD_SUBREAPER, self._subreaper.value, 0, 0, 0)
        if self._limits is not None:
            self.adoption.tags.restore(self._limits)


def _wrap(hooks: StartHooks) -> None:
    """Wrap all ways to start a process."""
    hooks.put(subprocess, "_fork_exec", functools.partial(_around_fork_exec, hooks))
    hooks.put(_posixsubprocess, "fork_exec", functools.partial(_around_fork_exec, hooks))
    hooks.put(os, "system", functools.partial(_around_system, hooks))
    hooks.put(os, "fork", functools.partial(_around_fork, hooks))
    hooks.put(os, "forkpty", functools.partial(_around_fork, hooks))
    hooks.put(os, "posix_spawn", functools.partial(_around_posix_spawn, hooks))
    hooks.put(os, "posix_spawnp", functools.partial(_around_posix_spawn, hooks))
    hooks.put(multiprocessing.process.BaseProcess, "start", functools.partial(_around_start, hooks))
    _wrap_uvloop(hooks)


def _wrap_uvloop(hooks: StartHooks) -> None:
    """Wrap uvloop too, which starts programs in C, if it has been imported."""
    uvloop = sys.modules.get("uvloop")
    if uvloop is not None:
        hooks.put(uvloop.Loop, "subprocess_exec", functools.partial(_around_loop_start, hooks))
        hooks.put(uvloop.Loop, "subprocess_shell", functools.partial(_around_loop_start, hooks))


def _around_fork_exec(hooks: StartHooks, plain: Callable[..., int]) -> Callable[..., int]:
    def fork_exec(*arguments: Any) -> int:
        adoption = hooks.adoption
        if adoption.off():
            with adoption.unadopted():
                return plain(*arguments)
        owner = adoption.owner()
        words = arguments[0]
        with adoption.programs.start():
            if owner is None or _starts_what_is_shared():
                with adoption.tags.bequeath(None):
                    pid = plain(*arguments)
                adoption.programs.note_outside(pid)
                return pid
            tag = adoption.programs.tag_for(owner)
            environment = arguments[5]
            if environment is None:
                environment = [key + b"=" + value for key, value in os.environb.items()]
            marks = [key + b"=" + value for key, value in _marks(tag).items()]
            kept = [entry for entry in environment if not entry.startswith(_MARK_PREFIXES)]
            with adoption.tags.bequeath(tag):
                pid = plain(*arguments[:5], [*kept, *marks], *arguments[6:])
            adoption.programs.enter(owner, pid, _base(words[0]), tag)
            return pid

    return fork_exec


def _around_fork(hooks: StartHooks, plain: Callable[[], Any]) -> Callable[[], Any]:
    def fork() -> Any:
        adoption = hooks.adoption
        if adoption.off():
            with adoption.unadopted():
                return plain()
        owner = adoption.owner()
        tag = None if owner is None else adoption.programs.tag_for(owner)
        adoption.programs.begin()
        try:
            with adoption.tags.bequeath(tag):
                result = plain()
        except BaseException:
            adoption.programs.finish()
            raise
        pid = result if isinstance(result, int) else result[0]
        if pid == 0:  # a lock may be held forever here, by a thread that does not exist in the child
            if tag is not None:
                os.environb.update(_marks(tag))
            return result
        try:
            if owner is None or tag is None:
                adoption.programs.note_outside(pid)
            else:
                adoption.programs.enter(owner, pid, "fork", tag)
        finally:
            adoption.programs.finish()
        return result

    return fork


def _around_posix_spawn(hooks: StartHooks, plain: Callable[..., int]) -> Callable[..., int]:
    def posix_spawn(path: Any, argv: Any, env: Any, /, *rest: Any, **options: Any) -> int:
        adoption = hooks.adoption
        if adoption.off():
            with adoption.unadopted():
                return plain(path, argv, env, *rest, **options)
        owner = adoption.owner()
        with adoption.programs.start():
            if owner is None:
                with adoption.tags.bequeath(None):
                    pid = plain(path, argv, env, *rest, **options)
                adoption.programs.note_outside(pid)
                return pid
            tag = adoption.programs.tag_for(owner)
            own = os.environ if env is None else env  # None since 3.13
            marked = {os.fsencode(key): os.fsencode(value) for key, value in own.items()} | _marks(tag)
            with adoption.tags.bequeath(tag):
                pid = plain(path, argv, marked, *rest, **options)
            adoption.programs.enter(owner, pid, _base(path), tag)
            return pid

    return posix_spawn


def _around_start(hooks: StartHooks, plain: Callable[[Any], None]) -> Callable[[Any], None]:
    def start(self: Any) -> None:
        adoption = hooks.adoption
        owner = None if adoption.off() else adoption.owner()
        if owner is None or start_method_of(self) != "forkserver":
            plain(self)
            return
        tag = adoption.programs.tag_for(owner)
        with adoption.tags.bequeath_by(fork_server_pid(), tag):  # it is not our child but the server's
            plain(self)
        adoption.programs.enter(owner, self.pid, self.name, tag)

    return start


def _around_system(hooks: StartHooks, plain: Callable[[Any], int]) -> Callable[[Any], int]:
    def system(command: Any) -> int:
        adoption = hooks.adoption
        if adoption.off() and adoption.forked:
            return plain(command)
        code = subprocess.call(command, shell=True, close_fds=False)
        return -code if code < 0 else code << 8

    return system


def _around_loop_start(hooks: StartHooks, plain: Callable[..., Any]) -> Callable[..., Any]:
    async def start(self: Any, *arguments: Any, **options: Any) -> Any:
        adoption = hooks.adoption
        if adoption.off():
            begun = plain(self, *arguments, **options)
            return await (begun if adoption.forked else _Bequeathing(adoption, None, begun))
        owner = adoption.owner()
        with adoption.programs.start():
            if owner is None:
                result = await _Bequeathing(adoption, None, plain(self, *arguments, **options))
                adoption.programs.note_outside(result[0].get_pid())
                return result
            tag = adoption.programs.tag_for(owner)
            environment = os.environ if options.get("env") is None else options["env"]
            marks = {os.fsdecode(key): os.fsdecode(value) for key, value in _marks(tag).items()}
            options["env"] = {**environment, **marks}
            name = _base(arguments[1]) if len(arguments) > 1 else "program"
            begun = functools.partial(adoption.programs.enter_unnamed, owner, name, tag)
            result = await _Bequeathing(adoption, tag, plain(self, *arguments, **options), begun)
            adoption.programs.enter(owner, result[0].get_pid(), name, tag)
            return result

    return start


class _Bequeathing:
    """Awaits a start by uvloop, which creates the program before it waits for anything.

    Parameters:
        adoption: installation whose tags are used.
        tag: tag that the program inherits; None means the tag of programs started outside scopes.
        start: coroutine of uvloop that starts the program.
        begun: called once the program exists, because the caller may be cancelled during the rest of the start and then
            never learns the pid.
    """

    def __init__(
        self,
        adoption: ProgramAdoption,
        tag: int | None,
        start: Coroutine[Any, Any, Any],
        begun: Callable[[], object] = lambda: None,
    ) -> None:
        self._adoption = adoption
        self._tag = tag
        self._start = start
        self._begun = begun

    def __await__(self) -> Generator[Any, Any, Any]:
        try:
            with self._adoption.tags.bequeath(self._tag):
                awaited = self._start.send(None)
        except StopIteration as done:
            return done.value
        try:
            self._begun()
        except BaseException:
            self._start.close()
            raise
        while True:
            try:
                sent = yield awaited
            except GeneratorExit:
                self._start.close()
                raise
            except BaseException as error:
                step = functools.partial(self._start.throw, error)
            else:
                step = functools.partial(self._start.send, sent)
            try:
                awaited = step()
            except StopIteration as done:
                return done.value


def _starts_what_is_shared() -> bool:
    """Whether ``multiprocessing`` is starting one of its shared helper processes."""
    frame = sys._getframe(2)  # the caller of the wrapper
    if frame.f_globals.get("__name__") == "multiprocessing.util" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__") in _SHARED


_MARK_PREFIXES = (procfs.HOST_MARKER + b"=", procfs.SCOPE_MARKER + b"=")


def _marks(tag: int) -> dict[bytes, bytes]:
    return {procfs.HOST_MARKER: host_marker(), procfs.SCOPE_MARKER: b"%d" % tag}


def _base(path: Any) -> str:
    return os.path.basename(os.fsdecode(path))
