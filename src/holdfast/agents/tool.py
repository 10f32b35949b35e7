"""Tools that a model may call: functions with a schema, and groups of them with a life of their own."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args, overload

from holdfast.agents.schema import check_schema, read_signature
from holdfast.errors import ConfigurationError, InvalidArguments
from holdfast.protocol.branches import is_seconds
from holdfast.protocol.model import ToolSpec

if TYPE_CHECKING:
    from holdfast.clock import Clock

__all__ = ["Approval", "Home", "Isolation", "Tool", "Toolset", "as_tool", "tool", "wants_call"]

Isolation = Literal["auto", "loop", "thread", "process"]
Approval: TypeAlias = "bool | Callable[[dict[str, Any]], bool]"

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SECTION = re.compile(r"^(?:Parameters|Args|Arguments|Returns|Raises|Yields):\s*$", re.MULTILINE)


class _Check(Protocol):
    def __call__(self, arguments: dict[str, Any], /) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that a model may call. `tool` makes one of a function with type hints.

    Parameters:
        name: 1 to 64 letters, digits, ``_`` and ``-``.
        description: for the model.
        parameters: JSON Schema of an object; what `work` takes by keyword.
        work: sync or async. If its first parameter is named ``call`` it gets the `Call`, which the model does not see.
            Raise `ToolFailed` to tell the model something plainly; any other error is told with its class.
        timeout_s: deadline of a call, in seconds; None takes the host's, infinity none (a tool that waits for a
            person). The model gets an error then, and the call is stopped.
        isolation: where it runs; ``auto`` runs sync functions in a thread. In a ``process`` it can be killed whatever
            it does; it is imported there, and `Call` has only ``call_id`` and ``output``.
        idempotent: it may be made again after a crash that left no result.
        exclusive: the run does not end before the call is really gone, however long that takes.
        approval: a person must approve each call; or a predicate of its arguments that says so.
        convert: makes keyword arguments of what the model gave; raises `InvalidArguments`. Default: they are held
            against `parameters` and passed as they are.

    Raises:
        ConfigurationError: a name that no provider takes, or parameters that are no object's schema.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    work: Callable[..., Any]
    timeout_s: float | None = None
    isolation: Isolation = "auto"
    idempotent: bool = False
    exclusive: bool = False
    approval: Approval = False
    convert: _Check | None = None
    takes_call: bool = field(init=False)
    """Whether `work` gets the `Call`."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigurationError(
                f"{self.name[:80]!r} is no name for a tool",
                hint="use 1 to 64 letters, digits, underscores and hyphens: tool(name=...)",
            )
        if self.parameters.get("type") != "object":
            raise ConfigurationError(
                f"the parameters of the tool {self.name!r} are no schema of an object",
                hint='give {"type": "object", "properties": {...}}',
            )
        if self.timeout_s is not None and not is_seconds(self.timeout_s):
            raise ConfigurationError(
                f"the deadline of the tool {self.name!r} is {self.timeout_s!r:.100}, which is no length of time",
                hint="give timeout_s a number of seconds, 0 or more",
            )
        if self.isolation not in get_args(Isolation):
            raise ConfigurationError(
                f"the tool {self.name!r} shall run in {self.isolation!r:.100}, and there is no such place",
                hint=f"use {', '.join(get_args(Isolation))}",
            )
        object.__setattr__(self, "takes_call", wants_call(self.work))

    @property
    def spec(self) -> ToolSpec:
        """The tool as a model sees it."""
        return ToolSpec(name=self.name, description=self.description, parameters=self.parameters)

    def check(self, arguments: object) -> dict[str, Any]:
        """The keyword arguments for `work`. Raises `InvalidArguments`, with a text that the model can use."""
        if not isinstance(arguments, dict):
            raise InvalidArguments("the arguments are no JSON object")
        if self.convert is not None:
            return self.convert(arguments)
        check_schema(arguments, self.parameters)
        return arguments

    def needs_approval(self, arguments: dict[str, Any]) -> bool:
        """Whether a person must approve a call with these arguments (as the model gave them)."""
        return bool(self.approval(arguments)) if callable(self.approval) else self.approval


@overload
def tool(work: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float | None = None,
    isolation: Isolation = "auto",
    idempotent: bool = False,
    exclusive: bool = False,
    approval: Approval = False,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    work: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float | None = None,
    isolation: Isolation = "auto",
    idempotent: bool = False,
    exclusive: bool = False,
    approval: Approval = False,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a `Tool` of a function; usable with and without arguments.

    The schema comes from the type hints; what the docstring says under ``Parameters:`` or ``Args:`` describes them.

    Parameters:
        work: the function.
        name: default: the function's name.
        description: default: the docstring without its section on parameters.
        timeout_s, isolation, idempotent, exclusive, approval: see `Tool`.

    Raises:
        ConfigurationError: parameters that a model cannot give.
    """

    def make(work: Callable[..., Any]) -> Tool:
        signature = read_signature(work, skip=1 if wants_call(work) else 0)
        function = work.func if isinstance(work, functools.partial) else work
        return Tool(
            name=name or str(getattr(function, "__name__", type(function).__name__)),
            description=description if description is not None else _summary(inspect.getdoc(function) or ""),
            parameters=signature.parameters,
            work=work,
            timeout_s=timeout_s,
            isolation=isolation,
            idempotent=idempotent,
            exclusive=exclusive,
            approval=approval,
            convert=signature.check,
        )

    return make if work is None else make(work)


def as_tool(thing: object) -> Tool:
    """The tool that `thing` is: a `Tool` or a function. Raises `ConfigurationError` for what cannot be one."""
    if isinstance(thing, Tool):
        return thing
    if callable(thing) and not inspect.isclass(thing):
        return tool(thing)
    raise ConfigurationError(
        f"{thing!r} is not a tool", hint="a tool is a function with type hints, a Tool, a Toolset or an Agent"
    )


def wants_call(work: Callable[..., Any]) -> bool:
    """Whether the first parameter of the function is named ``call``."""
    function = work
    bound = 0
    while isinstance(function, functools.partial):
        bound += len(function.args)
        function = function.func
    if inspect.ismethod(function):
        bound += 1
        function = function.__func__
    code = getattr(function, "__code__", None)
    return code is not None and code.co_argcount > bound and code.co_varnames[bound] == "call"


def _summary(doc: str) -> str:
    return _SECTION.split(doc, maxsplit=1)[0].strip()


class Home(Protocol):
    """What a host offers to a toolset for as long as it is up."""

    @property
    def clock(self) -> Clock:
        """The host's time."""
        ...

    @property
    def data_dir(self) -> Path | None:
        """Where small state may be kept over a restart; None: nowhere, as with the memory store."""
        ...

    async def tell(self, principal: str, session_key: str, text: str) -> None:
        """Send a message to that session, to be run when it is free; durable when this returns."""
        ...


class Toolset:
    """A group of tools with a life of its own: derive from it, and put an object of it among an agent's tools.

    ``executes`` says that it does on this machine what a model says: a server then demands a token, even on loopback.
    ``unwalled`` says that programs of it run with the rights of the server's user, so that they could use any
    credential in a file or an environment: a server then takes an approval from a person only.
    """

    executes: bool = False
    unwalled: bool = False

    def tools(self) -> Sequence[Tool]:
        """The tools as they are now; asked at the start of each run."""
        raise NotImplementedError

    def folders(self) -> Sequence[Path]:
        """Return the folders in which it reads or changes files; a host refuses those that have files of its own."""
        return ()

    def lifespan(self, home: Home) -> AbstractAsyncContextManager[object]:
        """Entered once when the host starts, outside of any run, and left when it closes. By default nothing."""
        return nullcontext()
