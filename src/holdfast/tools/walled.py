"""Prepare programs of tools to run behind the wall of their session: the one way for everything that runs programs.

Invariants
- A program whose wall cannot be built is not started. Only the operator's setting ``sandbox = "none"`` runs programs
  without a wall.
- No wall shows files of this process's hosts: settings, Holdfast's folder, files of secrets, stores.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.agents.ports import WalledStart
from holdfast.errors import HoldfastError, InvalidRequest, ToolFailed
from holdfast.runtime import current_scope
from holdfast.tools.files.private_paths import private_paths
from holdfast.tools.files.workspace_guard import own_paths
from holdfast.tools.sandbox.account import Account
from holdfast.tools.sandbox.choice import are_programs_unwalled, find_backend
from holdfast.tools.sandbox.environment import clean_environment
from holdfast.tools.sandbox.network import open_network
from holdfast.tools.sandbox.plan import plan_wall
from holdfast.tools.sandbox.port import Launch
from holdfast.tools.sandbox.sandbox import Sandbox

if TYPE_CHECKING:
    from holdfast.agents.run import Run
    from holdfast.tools.files.workspace import Workspace

__all__ = [
    "HeldAccess",
    "are_programs_unwalled",
    "launch_of_host",
    "launch_of_options",
    "prepare_launch",
    "prepare_launch_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldAccess:
    """Access of one program in addition to its profile.

    Parameters:
        writable: paths that it may change, although they lie in protected ones.
        readable, hosts, secrets: what it may read, reach and get.
        protected: paths in the workspace that it may not change.
        workspace: the session's workspace; None if it is not known yet.
    """

    writable: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    protected: tuple[str, ...] = ()
    workspace: Workspace | None = None


async def prepare_launch_of(
    run: Run,
    argv: Sequence[str],
    *,
    workspace: Workspace,
    sandbox: Sandbox,
    environment: Mapping[str, str],
    folder: str = ".",
    readable: Sequence[str | os.PathLike[str]] = (),
    held: HeldAccess,
    may_free: bool = False,
) -> Launch:
    """Return how to start a program in a folder of the run's workspace, which is made if it is new.

    The caller closes the descriptors and the network of the result; `Program.start` does so.

    The program counts for the run's principal, and ties the session to hosts that have the workspace.

    Parameters:
        argv: the program and its arguments.
        environment: complete environment without secrets. Behind a wall, ``HOME`` becomes the workspace.
        folder: folder to start in, relative to the workspace.
        readable: paths that the program may read in addition to the sandbox's.
        held: what people granted, and what the program may not change.
        may_free: whether the program may start in a full workspace, too, to delete files; it can then write none.

    Raises:
        ToolFailed: if no such folder exists, the workspace is full, the wall cannot be built, or the proxy does not
            start.
    """
    scope = current_scope()
    assert scope is not None, "tools run in a scope"
    await run.use_workspace()
    programs = run.context.host.programs

    def prepare(*, again: bool = False) -> Launch | Account:
        own = held.workspace or workspace.of(run)
        full = programs.known_fault(run.principal, own.charged, shared=own.shared)
        account = Account(programs=programs, principal=run.principal, folder=own.charged, shared=own.shared, full=full)
        if full and not (again and may_free):
            return account
        launch = prepare_launch(
            argv,
            sandbox=dataclasses.replace(sandbox, file_bytes=1) if full else sandbox,
            folder=own.root,
            directory=own.folder(folder),
            session=run.session_id,
            principal=run.principal,
            environment=environment,
            readable=readable,
            held=held,
        )
        return dataclasses.replace(launch, account=account)

    prepared = await scope.spawn(prepare, on="thread", name="prepare")
    if isinstance(prepared, Account):  # it was full; files may have been deleted since
        assert prepared.folder is not None, "it is a workspace"
        await programs.measure(run.principal, prepared.folder, shared=prepared.shared)
        prepared = await scope.spawn(functools.partial(prepare, again=True), on="thread", name="prepare")
    if isinstance(prepared, Account):
        raise ToolFailed(prepared.full)
    return await open_network(prepared)


def prepare_launch(
    argv: Sequence[str],
    *,
    sandbox: Sandbox,
    folder: str | os.PathLike[str],
    directory: str | os.PathLike[str] | None = None,
    session: str = "",
    principal: str = "",
    environment: Mapping[str, str],
    readable: Sequence[str | os.PathLike[str]] = (),
    held: HeldAccess | None = None,
) -> Launch:
    """Return how to start a program behind a wall; for the parameters, see `plan_wall`. Blocks for file system calls.

    Raises:
        ToolFailed: if the wall cannot be built. The text is for a model and its user.
    """
    try:
        return _launch(
            argv,
            sandbox,
            folder=folder,
            directory=directory,
            session=session,
            principal=principal,
            environment=environment,
            readable=readable,
            held=held or HeldAccess(),
        )
    except HoldfastError as error:
        raise ToolFailed(f"{error}. Tell the user that the operator must decide this.") from error
    except OSError as error:
        raise ToolFailed(f"cannot confine the program: {error}") from error


def launch_of_host(
    argv: Sequence[str],
    *,
    sandbox: Sandbox,
    folder: str | os.PathLike[str],
    principal: str = "",
    environment: Mapping[str, str],
    home: str | None = None,
    readable: Sequence[str | os.PathLike[str]] = (),
) -> Launch:
    """Return how to start a program that the host itself keeps running. Blocks for file system calls.

    The program gets the host's priority, so that busy programs of one principal do not hold up what others wait for.

    Parameters:
        folder: the folder in which the program starts, and which it may change.
        principal: the principal that it runs for; empty if it serves all.
        environment: complete environment without secrets.
        home: value of ``HOME`` behind a wall; None means `folder`.
        readable: paths that the program may read in addition to the sandbox's.

    Raises:
        NotSupported: if this machine cannot build the wall.
        ConfigurationError: if a path or a secret of the sandbox is missing.
    """
    return _launch(
        argv,
        sandbox,
        folder=folder,
        session="",
        principal=principal,
        environment=environment,
        home=home,
        readable=readable,
        held=HeldAccess(),
        idle=False,
    )


async def launch_of_options(
    argv: Sequence[str], sandbox: object, options: Mapping[str, Any], *, session: str, principal: str
) -> WalledStart:
    """Return how to start a program of an agent's own code behind a wall.

    Parameters:
        sandbox: a `Sandbox`.
        options: options of `Scope.process` for the program; ``cwd`` is the folder that the program may change.

    Raises:
        TypeError: if `sandbox` is not a `Sandbox`.
        InvalidRequest: if ``cwd`` is missing.
        NotSupported: if this machine cannot build the wall.
        ConfigurationError: if a path or a secret of the sandbox is missing.
        ToolFailed: if the proxy of the program's network does not start.
    """
    if not isinstance(sandbox, Sandbox):
        raise TypeError(f"sandbox is {sandbox!r:.100}; it must be a holdfast.tools.Sandbox")
    if options.get("cwd") is None:
        raise InvalidRequest(
            "a program behind a wall needs a folder to work in", hint="set cwd to the folder that it may change"
        )
    environment = options.get("env")
    scope = current_scope()
    assert scope is not None, "a run's code runs in a scope"

    def prepare() -> Launch | Exception:
        try:
            return _launch(
                argv,
                sandbox,
                folder=options["cwd"],
                session=session,
                principal=principal,
                environment=clean_environment() if environment is None else environment,
                held=HeldAccess(),
            )
        except Exception as error:  # the caller's, not the scope's
            return error

    prepared = await scope.spawn(prepare, on="thread", name="prepare")
    if isinstance(prepared, Exception):
        raise prepared
    launch = await open_network(prepared)
    walled = {"argv": launch.argv, "cwd": launch.directory, "env": launch.environment, "wall": launch.wall}
    return WalledStart(
        options={**options, **walled, "confirm": launch.confirm, "pass_fds": launch.pass_fds},
        on_gone=None if launch.network is None else launch.network.close,
    )


def _launch(
    argv: Sequence[str],
    sandbox: Sandbox,
    *,
    folder: str | os.PathLike[str],
    directory: str | os.PathLike[str] | None = None,
    session: str,
    principal: str,
    environment: Mapping[str, str],
    home: str | None = None,
    readable: Sequence[str | os.PathLike[str]] = (),
    held: HeldAccess,
    idle: bool = True,
) -> Launch:
    backend = find_backend()
    walled = backend.name != "none"
    plan = plan_wall(
        sandbox,
        folder=folder,
        directory=directory,
        session=session,
        principal=principal,
        environment={**environment, "HOME": home or os.path.realpath(folder)} if walled else environment,
        readable=(*readable, *held.readable),
        writable=held.writable,
        protected=held.protected,
        hosts=held.hosts,
        secrets=held.secrets,
        hidden=(*own_paths(), *private_paths()) if walled else (),
        idle=idle,
    )
    if not {*held.writable, *held.readable} <= {*plan.writable, *plan.readable}:
        raise ToolFailed("a granted path was replaced with a link, so the program was not started")
    return backend.launch(plan, argv)
