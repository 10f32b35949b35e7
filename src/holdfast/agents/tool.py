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
from holdfast.protocol.access import NO_REQUEST, AccessRequest
from holdfast.protocol.model import ToolSpec
from holdfast.protocol.supervision import is_seconds

if TYPE_CHECKING:
    from holdfast.agents.program_usage import ProgramAccounts
    from holdfast.clock import Clock

__all__ = [
    "Approval",
    "Isolation",
    "SessionIdentity",
    "Tool",
    "Toolset",
    "ToolsetContext",
    "as_tool",
    "tool",
    "wants_call",
]

Isolation = Literal["auto", "loop", "thread", "process"]
Approval: TypeAlias = "bool | Callable[[dict[str, Any]], bool]"

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SECTION = re.compile(r"^(?:Parameters|Args|Arguments|Returns|Raises|Yields):\s*$", re.MULTILINE)


class _Check(Protocol):
    def __call__(self, arguments: dict[str, Any], /) -> dict[str, Any]: ...


class SessionIdentity(Protocol):
    """The session in which a call is made. A `Run` is one."""

    @property
    def principal(self) -> str:
        """Principal that owns the session."""
        ...

    @property
    def session_key(self) -> str:
        """Key of the session."""
        ...

    @property
    def session_id(self) -> str:
        """Number of the session, which is never used again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that a model may call. `tool` makes a `Tool` from a function with type hints.

    Parameters:
        name: name of the tool, of 1 to 64 letters, digits, ``_`` and ``-``.
        description: description that the model sees.
        parameters: JSON Schema of an object whose properties are the keyword arguments of `work`.
        work: sync or async function. If the function's first parameter is named ``call``, it receives the `Call`, which
            the model does not see. If the function raises `ToolFailed`, the model gets the message unchanged; for any
            other error, the model gets the class and the message.
        timeout_s: deadline of a call, in seconds. None means the host's default; infinity means no deadline, for a tool
            that waits for a person. When the deadline expires, the call is stopped and the model gets an error.
        isolation: where the function runs. ``auto`` runs an async function on the loop and a sync function in a thread.
            With ``process``, the function is imported and run in another process, which can be killed at any time, and
            its `Call` has only ``call_id`` and ``output``.
        idempotent: whether the call may be repeated after a crash that left no result.
        exclusive: whether the run waits until the function has returned, even after a stop, however long that takes.
        approval: whether a person must approve each call; or a predicate that is called with the model's arguments and
            returns whether a person must approve the call.
        convert: function that converts the model's arguments to keyword arguments for `work`, and raises
            `InvalidArguments` for invalid ones. If None, the arguments are validated against `parameters` and passed
            unchanged.
        access: function that is called with the session and the model's arguments, and returns what the call asks for
            beyond its wall; a person is asked unless earlier grants cover it. The result must depend on nothing else.
            The function raises `InvalidArguments` for access that cannot be granted. None means that no call asks.

    Raises:
        ConfigurationError: if the name, timeout or isolation is invalid, or if `parameters` is not the schema of an
            object.
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
    access: Callable[[SessionIdentity, dict[str, Any]], AccessRequest] | None = None
    takes_call: bool = field(init=False)
    """Whether `work` receives the `Call` as its first argument."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigurationError(
                f"invalid tool name {self.name[:80]!r}",
                hint="use 1 to 64 letters, digits, underscores and hyphens; set the name with tool(name=...)",
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
        """Validate the model's arguments and return the keyword arguments for `work`.

        Raises:
            InvalidArguments: if the arguments do not match `parameters`; the message is meant for the model.
        """
        if not isinstance(arguments, dict):
            raise InvalidArguments("the arguments are not a JSON object")
        if self.convert is not None:
            return self.convert(arguments)
        check_schema(arguments, self.parameters)
        return arguments

    def needs_approval(self, arguments: dict[str, Any]) -> bool:
        """Return whether a person must approve a call for which the model passed these arguments."""
        return bool(self.approval(arguments)) if callable(self.approval) else self.approval

    def request_of(self, session: SessionIdentity, arguments: dict[str, Any]) -> AccessRequest:
        """Return what a call asks for beyond its wall. Raises `InvalidArguments` if that cannot be granted."""
        return NO_REQUEST if self.access is None else self.access(session, arguments)


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
    access: Callable[[SessionIdentity, dict[str, Any]], AccessRequest] | None = None,
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
    access: Callable[[SessionIdentity, dict[str, Any]], AccessRequest] | None = None,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a `Tool` from a function. This decorator may be used with or without arguments.

    The schema is made from the function's type hints. The descriptions of the parameters are read from the docstring's
    section ``Parameters:``, ``Args:`` or ``Arguments:``.

    Parameters:
        work: sync or async function with type hints.
        name: name of the tool; None means the function's name.
        description: description that the model sees; None means the docstring up to its first section.
        timeout_s, isolation, idempotent, exclusive, approval, access: see the fields of `Tool` with the same names.

    Raises:
        ConfigurationError: if the function has a parameter that a model cannot pass.
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
            access=access,
        )

    return make if work is None else make(work)


def as_tool(thing: object) -> Tool:
    """Return a `Tool` unchanged, or make a tool from a function. Raises `ConfigurationError` for any other object."""
    if isinstance(thing, Tool):
        return thing
    if callable(thing) and not inspect.isclass(thing):
        return tool(thing)
    raise ConfigurationError(
        f"{thing!r} is not a tool", hint="pass a function with type hints, a Tool, a Toolset or an Agent"
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
    """The services of the host that a toolset may use during its lifespan."""

    @property
    def clock(self) -> Clock:
        """The host's clock."""
        ...

    @property
    def data_dir(self) -> Path | None:
        """The folder for small state that survives a restart; None if the host uses the memory store."""
        ...

    @property
    def programs(self) -> ProgramAccounts:
        """The host's accounts of what programs use."""
        ...

    async def tell(self, principal: str, session_key: str, text: str) -> None:
        """Send a message to a session. On return, the message is durable; its run starts when the session is free."""
        ...


class Toolset:
    """A group of tools with a lifespan. Subclass `Toolset`, and add an instance to an agent's tools.

    If ``executes`` is true, a model may execute commands on this machine, so a server requires a token even on
    loopback. If ``programs`` is true, the tools run programs that a model chooses, behind a wall or not, so a server
    requires a person's approval key for each approval. If ``unwalled`` is true, these programs run with the rights of
    the server's user and could use any credential in a file or an environment variable.
    """

    executes: bool = False
    programs: bool = False
    unwalled: bool = False

    def tools(self) -> Sequence[Tool]:
        """Return the current tools. Called at the start of each run."""
        raise NotImplementedError

    def folders(self) -> Sequence[Path]:
        """Return the folders in which the tools read or change files.

        A host rejects a folder that contains files of the host.
        """
        return ()

    def lifespan(self, home: ToolsetContext) -> AbstractAsyncContextManager[object]:
        """Return a context manager that the host enters when it starts, outside any run, and exits when it closes."""
        return nullcontext()
