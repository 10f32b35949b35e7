"""Tools that a model may call: functions with a schema, and groups of them with a lifespan."""

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
from holdfast.protocol.model import ToolSpec
from holdfast.protocol.supervision import is_seconds

if TYPE_CHECKING:
    from holdfast.clock import Clock

__all__ = ["Approval", "Isolation", "Tool", "Toolset", "ToolsetContext", "as_tool", "tool", "wants_call"]

Isolation = Literal["auto", "loop", "thread", "process"]
Approval: TypeAlias = "bool | Callable[[dict[str, Any]], bool]"

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SECTION = re.compile(r"^(?:Parameters|Args|Arguments|Returns|Raises|Yields):\s*$", re.MULTILINE)


class _Check(Protocol):
    def __call__(self, arguments: dict[str, Any], /) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that a model may call. `tool` makes one from a function with type hints.

    Parameters:
        name: 1 to 64 letters, digits, ``_`` and ``-``.
        description: the description that the model sees.
        parameters: JSON Schema of an object: the keyword arguments of `work`.
        work: sync or async. If its first parameter is named ``call``, it gets the `Call`, which the model does not see.
            Raise `ToolFailed` for a message that the model gets unchanged; any other error is shown with its class.
        timeout_s: deadline of a call, in seconds; None: the host's default; infinity: no deadline (for a tool that
            waits for a person). On expiry, the call is stopped and the model gets an error.
        isolation: where it runs; ``auto`` runs sync functions in a thread. In a ``process``, it can be killed at any
            time; it is imported there, and `Call` has only ``call_id`` and ``output``.
        idempotent: whether the call may be repeated after a crash that left no result.
        exclusive: whether the run waits until the function has returned, even after a stop, however long that takes.
        approval: whether a person must approve each call, or a predicate that decides from the arguments.
        convert: converts the model's arguments to keyword arguments; raises `InvalidArguments`. Default: validate them
            against `parameters` and pass them unchanged.

    Raises:
        ConfigurationError: an invalid name, or parameters that are not the schema of an object.
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
                f"invalid tool name {self.name[:80]!r}",
                hint="use 1 to 64 letters, digits, underscores and hyphens: tool(name=...)",
            )
        if self.parameters.get("type") != "object":
            raise ConfigurationError(
                f"the parameters of the tool {self.name!r} must be the JSON Schema of an object",
                hint='pass {"type": "object", "properties": {...}}',
            )
        if self.timeout_s is not None and not is_seconds(self.timeout_s):
            raise ConfigurationError(
                f"invalid timeout_s of the tool {self.name!r}: {self.timeout_s!r:.100}",
                hint="pass a number of seconds, 0 or more",
            )
        if self.isolation not in get_args(Isolation):
            raise ConfigurationError(
                f"unknown isolation {self.isolation!r:.100} of the tool {self.name!r}",
                hint=f"choose {', '.join(get_args(Isolation))}",
            )
        object.__setattr__(self, "takes_call", wants_call(self.work))

    @property
    def spec(self) -> ToolSpec:
        """The specification that the model sees."""
        return ToolSpec(name=self.name, description=self.description, parameters=self.parameters)

    def check(self, arguments: object) -> dict[str, Any]:
        """Return the keyword arguments for `work`. Raises `InvalidArguments`, with a message for the model."""
        if not isinstance(arguments, dict):
            raise InvalidArguments("the arguments are not a JSON object")
        if self.convert is not None:
            return self.convert(arguments)
        check_schema(arguments, self.parameters)
        return arguments

    def needs_approval(self, arguments: dict[str, Any]) -> bool:
        """Return whether a person must approve a call with these arguments, as given by the model."""
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
    """Make a `Tool` from a function; usable with and without arguments.

    The schema comes from the type hints, its descriptions from the docstring's ``Parameters:`` or ``Args:``.

    Parameters:
        work: the function.
        name: default: the function's name.
        description: default: the docstring without its section on parameters.
        timeout_s, isolation, idempotent, exclusive, approval: see `Tool`.

    Raises:
        ConfigurationError: the function has parameters that a model cannot pass.
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
    """Return a `Tool` unchanged, or make one from a function. Raises `ConfigurationError` for anything else."""
    if isinstance(thing, Tool):
        return thing
    if callable(thing) and not inspect.isclass(thing):
        return tool(thing)
    raise ConfigurationError(
        f"{thing!r} is not a tool", hint="a tool is a function with type hints, a Tool, a Toolset or an Agent"
    )


def wants_call(work: Callable[..., Any]) -> bool:
    """Return whether the first parameter of the function is named ``call``."""
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


class ToolsetContext(Protocol):
    """The host, as a toolset sees it while the host is up."""

    @property
    def clock(self) -> Clock:
        """The host's clock."""
        ...

    @property
    def data_dir(self) -> Path | None:
        """The folder for small state that survives a restart; None with the memory store."""
        ...

    async def tell(self, principal: str, session_key: str, text: str) -> None:
        """Send a message to that session; it runs when the session is free, and is durable when this returns."""
        ...


class Toolset:
    """A group of tools with a lifespan: subclass it, and add an instance to an agent's tools.

    With ``executes``, a model may execute commands on this machine: a server then requires a token, even on loopback.
    With ``unwalled``, its programs run with the rights of the server's user, and could use any credential in a file or
    an environment variable: a server then accepts approvals only from a person.
    """

    executes: bool = False
    unwalled: bool = False

    def tools(self) -> Sequence[Tool]:
        """Return the current tools. Called at the start of each run."""
        raise NotImplementedError

    def folders(self) -> Sequence[Path]:
        """Return the folders in which the tools read or change files; a host refuses those that contain its files."""
        return ()

    def lifespan(self, home: ToolsetContext) -> AbstractAsyncContextManager[object]:
        """Return the context that the host enters at its start, outside any run, and exits when it closes."""
        return nullcontext()
