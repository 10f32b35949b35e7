"""Plan of one program's wall: a `Sandbox` applied to a session's workspace, with every path resolved."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.errors import ConfigurationError, NotSupported
from holdfast.tools.sandbox.environment import clean_environment
from holdfast.tools.sandbox.proxy.rules import ANY_HOST

if TYPE_CHECKING:
    from holdfast.tools.sandbox.sandbox import Network, Sandbox

__all__ = ["WallPlan", "plan_wall"]

_PathLike = str | os.PathLike[str]
_WITH_SUBFOLDERS = ("/tmp", "/dev/shm")
_PRIVATE_FOLDERS = (*_WITH_SUBFOLDERS, "/", "/dev", "/dev/pts", "/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class WallPlan:
    """All that one program may see, change, reach and use up. Backends turn a plan into a wall; they decide nothing.

    Parameters:
        session: name of the session, whose programs may share namespaces; empty shares nothing.
        principal: owner of the session, for accounting.
        directory: real path of the folder in which the program starts.
        readable, writable: real paths that exist, in addition to the system and the interpreter.
        links: names under which readable and writable paths are known, each with the real path.
        protected: real paths below writable ones that stay read-only.
        hidden: real paths that must not be visible, whether or not they exist.
        network, hosts: network access; see `Sandbox`.
        environment: the complete environment of the program, secrets included.
        sandbox: the limits.
        interpreter: whether this process's Python installation is visible.
        idle: whether the program runs at the lowest priority; otherwise it has this process's.
    """

    session: str
    principal: str
    directory: str
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    protected: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    network: Network = "none"
    hosts: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(repr=False)
    sandbox: Sandbox
    interpreter: bool = True
    idle: bool = True

    @property
    def host_rules(self) -> tuple[str, ...]:
        """Rules of hosts for the proxy; empty without a network."""
        match self.network:
            case "none":
                return ()
            case "hosts":
                return self.hosts
            case "all":
                return (ANY_HOST, *self.hosts)


def plan_wall(
    sandbox: Sandbox,
    *,
    folder: _PathLike,
    directory: _PathLike | None = None,
    session: str = "",
    principal: str = "",
    environment: Mapping[str, str] | None = None,
    readable: Sequence[_PathLike] = (),
    writable: Sequence[_PathLike] = (),
    protected: Sequence[_PathLike] = (),
    hidden: Sequence[str] = (),
    hosts: Sequence[str] = (),
    secrets: Sequence[str] = (),
    idle: bool = True,
) -> WallPlan:
    """Return the plan for one program. Blocks for file system calls.

    Parameters:
        sandbox: what the agent's profile allows.
        folder: the session's workspace, which the program may change.
        directory: folder in which the program starts; None means `folder`.
        session: name of the session; empty for a program of its own.
        principal: owner of the session.
        environment: complete environment without secrets; None uses `clean_environment`.
        readable, writable, hosts, secrets: granted in addition to the sandbox's, for this program only.
        protected: paths in the workspace that stay read-only; those that do not exist are ignored.
        hidden: real paths that must not be visible.
        idle: see `WallPlan`.

    Raises:
        ConfigurationError: if a path does not exist, or is one that each wall replaces, such as ``/tmp``, or if the
            variable of a secret is not set.
        NotSupported: if a hidden path lies in a writable folder, because the program could create it.
    """
    root = _resolved(folder)
    write = tuple(dict.fromkeys((root, *map(_resolved, (*sandbox.writable, *writable)))))
    read = tuple(dict.fromkeys(map(_resolved, (*sandbox.readable, *readable))))
    for path in (*write, *read):
        _check_shareable(path)
    for path in hidden:
        for one in write:
            if path == one or path.startswith(f"{one.rstrip('/')}/"):
                raise NotSupported(
                    f"folder {one} contains {path} of the host, so programs are not confined there",
                    hint="give the tools a workspace that does not contain the store, such as a subfolder",
                )
    base = dict(clean_environment() if environment is None else environment)
    for name in (*sandbox.secrets, *secrets):
        value = os.environ.get(name)
        if value is None:
            raise ConfigurationError(
                f"the secret {name!r} of the sandbox is not set in the environment",
                hint=f"set the variable {name} of the server, or remove it from the sandbox's secrets",
            )
        base[name] = value
    more = (*sandbox.hosts, *hosts)
    return WallPlan(
        session=session,
        principal=principal,
        directory=_resolved(directory) if directory is not None else root,
        readable=read,
        writable=write,
        links=tuple(_links((folder, *sandbox.readable, *readable, *sandbox.writable, *writable))),
        protected=tuple(os.path.realpath(path) for path in protected if os.path.lexists(path)),
        hidden=tuple(hidden),
        network="hosts" if more and sandbox.network == "none" else sandbox.network,
        hosts=tuple(dict.fromkeys(more)),
        environment=base,
        sandbox=sandbox,
        idle=idle,
    )


def _check_shareable(path: str) -> None:
    """Refuse folders that each wall replaces with its own."""
    if path in _PRIVATE_FOLDERS or path.startswith("/proc/"):
        raise ConfigurationError(
            f"the folder {path} cannot be shared with walled programs, because each of them has its own",
            hint="choose a subfolder" if path in _WITH_SUBFOLDERS else "name another path",
        )


def _links(paths: Iterable[_PathLike]) -> Iterator[tuple[str, str]]:
    """Yield the paths that are links; a link inside of another link is not needed, as the other one leads to it."""
    for path in paths:
        name = os.path.abspath(path)
        if os.path.islink(name) and os.path.realpath(os.path.dirname(name)) == os.path.dirname(name):
            yield name, os.path.realpath(name)


def _resolved(path: _PathLike) -> str:
    try:
        return os.path.realpath(path, strict=True)
    except OSError as error:
        raise ConfigurationError(
            f"the sandbox's path {os.fspath(path)!r} is not usable: {error.strerror}",
            hint="create it, or remove it from the sandbox",
        ) from error
