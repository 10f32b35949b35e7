"""Agents named on the command line: ``hello``, ``hello.py``, ``pkg/hello.py:agent`` or ``pkg.hello:agent``.

A module is searched in the current folder first. For a file, the folder of its outermost package comes first.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING

from holdfast.cli.near_names import close_names
from holdfast.errors import ConfigurationError, HoldfastError, MissingExtra
from holdfast.logs import flush_logs, log_failure, one_line
from holdfast.user_code import is_installed, nearest, user_frames

if TYPE_CHECKING:
    from holdfast.agents import Agent

__all__ = ["find_agent", "log_import_failure"]

_log = logging.getLogger("holdfast.cli")

_PREFERRED = ("agent", "app")
"""Names of the agent that a module without an explicit name provides, best first."""
_LISTED = 10
_MISSING = object()
_RUN_TYPE = re.compile(r"\b(?:Run|Any|object)\b")
"""Matches annotations of a parameter that can take a run."""
_USE_SPEC = (
    "an agent is a function that takes the run: async def agent(run): …; name its file or module: hello.py, hello:agent"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Location:
    """A module and the place that it is imported from.

    Parameters:
        module: dotted name of the module.
        folder: folder that comes first on ``sys.path``.
        file: file that the module must come from; None if any is right.
        shown: text that names the module in messages.
    """

    module: str
    folder: Path
    file: Path | None
    shown: str


def find_agent(spec: str) -> Agent:
    """Import and return the agent that `spec` names.

    Parameters:
        spec: a file or a module, and optionally a colon and a name in it. Without a name, the module's ``agent`` is
            taken, or else its ``app``, or else the only agent that it defines.

    Raises:
        ConfigurationError: if the file, the module or the name does not exist, the import fails, the module defines
            several agents, or the object is not an agent.
    """
    place, _, name = spec.partition(":")
    if not place:
        raise ConfigurationError(f"{spec!r} does not name an agent", hint="use FILE.py, MODULE or MODULE:AGENT")
    location = _locate(place)
    module = _import(location)
    return _named(module, name) if name else _only(module, location)


def log_import_failure(error: HoldfastError) -> None:
    """Log the traceback of the user's error behind a `ConfigurationError`, if there is one, and wait for the log.

    A syntax error or a missing extra is not logged, nor a failure of the system without frames in the user's code, such
    as a folder that cannot be created: the message of `error` has all of it.
    """
    if isinstance(error.__cause__, (Exception, SystemExit)) and isinstance(error, ConfigurationError):
        cause, frames = error.__cause__, error.__cause__.__traceback__
        if isinstance(error, MissingExtra) or (isinstance(cause, SyntaxError) and cause.filename):
            return
        while frames is not None and is_installed(frames.tb_frame.f_code.co_filename):
            frames = frames.tb_next  # the import machinery, above the user's own code
        if frames is None:
            if isinstance(cause, OSError):
                return
            frames = cause.__traceback__
        log_failure(_log, "startup failed", cause.with_traceback(frames))
        flush_logs()  # the error itself comes last


# ── the module ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _locate(place: str) -> _Location:
    """Return the location of a file or a module. Raises `ConfigurationError` if the file does not exist."""
    here = Path.cwd()
    if not (place.startswith(".") or place.endswith(".py") or os.sep in place or Path(place).is_file()):
        file = here.joinpath(*place.split(".")).with_suffix(".py")
        return _Location(module=place, folder=here, file=file if file.is_file() else None, shown=place)
    path = Path(place if place.endswith(".py") or Path(place).exists() else f"{place}.py")
    if path.is_dir():
        raise ConfigurationError(f"{place!r} is a folder", hint=_files_in(path))
    if path.suffix != ".py":
        raise ConfigurationError(f"{place!r} is not a Python file", hint="name a file that ends in .py, or a module")
    if not path.is_file():
        near = close_names(path.stem, [file.stem for file in path.parent.glob("*.py")])
        where = "here" if path.parent == Path() else f"in {nearest(path.parent)}"
        hint = f"did you mean {path.with_name(near[0])}.py?" if near else f"this folder is {here}"
        raise ConfigurationError(f"no file {path.name!r} {where}", hint=hint)
    path = path.resolve()
    folder, parts = path.parent, [path.stem]
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return _Location(module=".".join(parts), folder=folder, file=path, shown=place)


def _import(location: _Location) -> ModuleType:
    name = location.module
    if (folder := str(location.folder)) not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigurationError(
                f"cannot import {location.shown}: {_where(error)}{one_line(error)}", hint="install the missing package"
            ) from error
        raise ConfigurationError(f"no module named {name!r}", hint=_other_module(location)) from None
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"cannot import {location.shown}: {_where(error)}{_without_place(error)}", hint="fix that module"
        ) from error
    found = getattr(module, "__file__", None) or "Python itself"
    if location.file is not None and not (os.path.exists(found) and location.file.samefile(found)):
        raise ConfigurationError(
            f"{nearest(location.file)} cannot be imported: {name!r} is the name of another module, from {found}",
            hint="rename the file",
        )
    return module


def _files_in(folder: Path) -> str:
    """Return a hint for a folder that was named in place of a file in it."""
    names = sorted(file.name for file in folder.glob("*.py") if not file.name.startswith("_"))
    return (
        f"name a Python file in it: {_listed(str(folder / name) for name in names)}"
        if names
        else ("name a Python file, or a module: hello.py, pkg.hello")
    )


def _other_module(location: _Location) -> str:
    """Return a hint for a module that does not exist: the agent that a dot names in place of a colon, or a near name.

    The modules before the dot were imported by the attempt to import the whole.
    """
    before, _, last = location.module.rpartition(".")
    module = sys.modules.get(before)
    if module is not None and not hasattr(module, "__path__"):
        if hasattr(module, last):
            return f"did you mean {before}:{last}?"
        return f"{before} is a module, and its agents are named after a colon: {_specs(module) or 'it has none'}"
    near = close_names(location.module, [file.stem for file in location.folder.glob("*.py")])
    return f"did you mean {near[0]}?" if near else "run the command in the module's folder, or install the module"


def _without_place(error: BaseException) -> str:
    """Return an error in one line, without the file and line that Python adds to a syntax error."""
    return f"{type(error).__name__}: {error.msg}" if isinstance(error, SyntaxError) else one_line(error)


def _where(error: BaseException) -> str:
    """Return the file and line where an import failed, preferably in the user's own code."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{nearest(Path(error.filename))}, line {error.lineno}: "
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and frame.filename not in (__file__, importlib.__file__)
    ]
    ours = user_frames(frames) or frames
    return f"{nearest(Path(ours[-1].filename))}, line {ours[-1].lineno}: " if ours else ""


# ── the agent in the module ──────────────────────────────────────────────────────────────────────────────────────────


def _named(module: ModuleType, name: str) -> Agent:
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, _MISSING)
        if found is _MISSING:
            agents = _agents_in(module)
            near = close_names(name, agents)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigurationError(
                f"{module.__name__} has no {name!r}", hint=f"{hint}agents there: {_listed(agents) or 'none'}"
            )
    return _agent_called(module, name, found)


def _only(module: ModuleType, location: _Location) -> Agent:
    """Return the agent of a module for which no name was given."""
    from holdfast.agents import agent as decorator

    for name in _PREFERRED:
        found = getattr(module, name, None)
        if found is not None and found is not decorator and not inspect.ismodule(found):
            return _agent_called(module, name, found)
    agents = _agents_in(module)
    if len(agents) == 1:
        return _agent_called(module, agents[0], getattr(module, agents[0]))
    if agents:
        raise ConfigurationError(
            f"{location.shown} defines several agents",
            hint=f"choose one: {_specs(module)}",
        )
    folder = Path(location.shown)
    hint = _files_in(folder) if getattr(module, "__path__", None) and folder.is_dir() else _USE_SPEC
    raise ConfigurationError(f"{location.shown} defines no agent", hint=hint)


def _agent_called(module: ModuleType, name: str, found: object) -> Agent:
    """Return the agent for an object of a module. An object without a name of its own gets `name`.

    Raises:
        ConfigurationError: if the object is not an agent.
    """
    from holdfast.agents import Agent, as_agent
    from holdfast.agents import agent as decorator

    spec = f"{module.__name__}:{name}"
    if found is decorator:
        raise ConfigurationError(
            f"{spec} is the decorator, not an agent", hint=f"agents there: {_listed(_agents_in(module)) or 'none'}"
        )
    try:
        agent = as_agent(found)
    except ConfigurationError as error:
        raise ConfigurationError(f"{spec}: {error.message}", hint=error.hint) from None
    own = found.name if isinstance(found, Agent) else getattr(found, "__name__", "<instance>")
    return replace(agent, name=name.rpartition(".")[2]) if own.startswith("<") else agent


def _agents_in(module: ModuleType) -> list[str]:
    """Return the names of a module's agents: its `Agent` objects, or else its functions that take a run.

    Async functions are preferred to sync ones, and among them those whose parameter is named or annotated as the run:
    the others may be helpers.
    """
    from holdfast.agents import Agent

    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    own = {
        name: value
        for name, value in public.items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and _takes_run(value)
    }
    return (
        [name for name, value in public.items() if isinstance(value, Agent)]
        or [name for name, value in own.items() if _is_async(value) and _names_run(value)]
        or [name for name, value in own.items() if _is_async(value)]
        or list(own)
    )


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def _takes_run(function: FunctionType) -> bool:
    """Return whether a function may be called with a run alone.

    Its first parameter must be annotated as a run or not at all, and the one of a sync function must also be named so.
    """
    try:
        signature = inspect.signature(function)
        signature.bind(None)
    except (TypeError, ValueError):
        return False
    first = next(iter(signature.parameters.values()))
    if first.annotation is not first.empty:
        return bool(_RUN_TYPE.search(inspect.formatannotation(first.annotation)))
    return _is_async(function) or _is_named_run(first)


def _names_run(function: FunctionType) -> bool:
    """Return whether the first parameter of a function that takes a run is named or annotated as one."""
    first = next(iter(inspect.signature(function).parameters.values()))
    return first.annotation is not first.empty or _is_named_run(first)


def _is_named_run(parameter: inspect.Parameter) -> bool:
    return parameter.name.lstrip("_") == "run"


def _specs(module: ModuleType) -> str:
    """Return the agents of a module as they can be typed."""
    return _listed(f"{module.__name__}:{name}" for name in _agents_in(module))


def _listed(names: Iterable[str]) -> str:
    all_names = list(names)
    more = f", … and {len(all_names) - _LISTED} more" if len(all_names) > _LISTED else ""
    return ", ".join(all_names[:_LISTED]) + more
