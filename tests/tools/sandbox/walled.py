"""Run a command behind a wall, for tests: the one entry that the tests of walls and escapes share.

    ended = run_walled("id; ls /", folder=tmp_path, layers=("namespaces",))
    assert ended.returncode == 0 and "root" in ended.output

Two calls with the same `session` share the session's kept namespaces, as two calls of an agent's tools do. A sandbox
with a network gets its own network without a proxy, unless the call asks to be `connected`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.runtime.process_host import TreeResult, process_host
from holdfast.tools.sandbox.backends.linux import LinuxBackend
from holdfast.tools.sandbox.choice import find_backend
from holdfast.tools.sandbox.network import open_network
from holdfast.tools.sandbox.plan import plan_wall
from holdfast.tools.sandbox.port import SandboxBackend
from holdfast.tools.sandbox.sandbox import Sandbox

__all__ = ["ALL_LAYERS", "Ended", "reason_against", "run_walled"]

ALL_LAYERS = (("namespaces",), ("landlock",), ("namespaces", "landlock"))
"""Every combination of layers of the backend ``linux``."""


@functools.cache
def linux_backend(layers: tuple[str, ...]) -> LinuxBackend:
    """Return the backend that uses exactly these layers."""
    return LinuxBackend(layers)


def reason_against(layers: Sequence[str]) -> str | None:
    """Return why this machine cannot build a wall of these layers, for `pytest.mark.skipif`; None if it can."""
    return linux_backend(tuple(layers)).probe()


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended.

    Parameters:
        output: standard output and standard error, in this order.
        returncode: exit code, or the negative number of the signal that ended it.
        tree: proof that nothing of it is left.
    """

    output: str
    returncode: int
    tree: TreeResult


def run_walled(
    command: str | Sequence[str],
    *,
    folder: str | os.PathLike[str],
    principal: str = "alice",
    session: str = "",
    sandbox: Sandbox | None = None,
    layers: Sequence[str] | None = None,
    backend: str | SandboxBackend = "linux",
    environment: Mapping[str, str] | None = None,
    input: bytes = b"",
    timeout_s: float = 30.0,
    connected: bool = False,
    **granted: Any,
) -> Ended:
    """Run a shell command line, or a program with its arguments, behind a wall, and wait until its tree is gone.

    Parameters:
        folder: the session's workspace, in which the command starts.
        layers: of the backend ``linux``: ``("namespaces",)``, ``("landlock",)`` or both; None uses what there is.
        backend: name of a backend, or a backend.
        connected: whether the proxy serves the network of the sandbox. No event loop may run in this thread then.
        granted: further parameters of `plan_wall`, such as ``protected``, ``hidden``, ``readable`` or ``directory``.

    Raises:
        NotSupported: if this machine cannot build the wall.
        OSError: if the wall or the program failed to start.
    """
    builder: SandboxBackend
    if layers is not None:
        builder = linux_backend(tuple(layers))
        if (reason := builder.probe()) is not None:
            raise AssertionError(f"these layers are missing here: {reason}")
    else:
        builder = find_backend(backend) if isinstance(backend, str) else backend
    plan = plan_wall(
        sandbox or Sandbox(),
        folder=folder,
        principal=principal,
        session=session,
        environment=environment,
        **granted,
    )
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    launch = builder.launch(plan, argv)
    if connected:
        launch = asyncio.run(open_network(launch))
    with contextlib.ExitStack() as opened:
        for fd in launch.pass_fds:
            opened.callback(os.close, fd)
        passed = launch.pass_fds
        if launch.network is not None:
            opened.callback(launch.network.close)
        elif launch.network_request is not None:  # nobody serves the network
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            opened.callback(ends[0].close)
            opened.callback(ends[1].close)
            passed = (*passed, ends[1].fileno())
        ended = process_host().run_blocking(
            launch.argv,
            input=input,
            timeout_s=timeout_s,
            name="walled",
            cwd=launch.directory,
            env=launch.environment,
            wall=launch.wall,
            pass_fds=passed,
            confirm=launch.confirm,
        )
    output = (ended.stdout + ended.stderr).decode("utf-8", "replace")
    return Ended(output=output, returncode=ended.returncode, tree=ended.tree)
