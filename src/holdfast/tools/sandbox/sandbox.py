"""The public value `Sandbox`: what an agent's programs may see, change, reach and use up, for all or by principal."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from holdfast.errors import ConfigurationError, ToolFailed
from holdfast.tools.addresses import AddressRules
from holdfast.tools.sandbox.proxy.rules import HostRules

__all__ = ["Network", "Sandbox", "SandboxChoice", "sandbox_of"]

_log = logging.getLogger("holdfast.tools")

Network = Literal["none", "hosts", "all"]

_LIMITS = (
    "network_bytes",
    "connections",
    "memory_bytes",
    "cpu_s",
    "processes",
    "open_files",
    "file_bytes",
    "scratch_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """Access and limits of a walled program, beyond its session's workspace.

    Every program sees the system read-only, its workspace, and a private, initially empty ``/tmp`` and ``/dev/shm`` in
    memory. It sees no other process, and nothing of the host or of other sessions. Limits are per process unless
    described otherwise.

    Parameters:
        network: ``none`` (the default); ``hosts``, which reaches `hosts`; or ``all``, which reaches every public host,
            and `hosts`. Both go through a proxy for HTTP, HTTPS and SOCKS 5, and need namespaces.
        hosts: hosts that the program may reach, such as ``pypi.org`` or ``*.example.org``, on the ports 80 and 443, or
            on another one (``example.org:8443``, ``example.org:*``). This machine, private and link-local addresses
            stay out of reach, whatever a name resolves to.
        allow_networks: networks that are not public and that hosts may lead to nevertheless, such as ``10.1.0.0/16``.
        network_bytes: maximum number of bytes that a program sends and receives.
        connections: maximum number of open connections of a program.
        readable: files and folders that the program may read.
        writable: folders that the program may change.
        secrets: names of environment variables of this process that the program gets.
        readable_on_request: files and folders that a call may ask to read. A person must grant what a call asks for.
        secrets_on_request: names of environment variables that a call may ask for.
        memory_bytes: maximum address space.
        cpu_s: maximum CPU time in seconds; at the limit, the process receives SIGXCPU, and SIGKILL a second later.
        processes: maximum number of concurrent processes and threads of the session. For real root, this needs Linux
            6.14, counts each program apart, and is 300 higher.
        open_files: maximum number of open descriptors; at most half of what this process may open, so that a program
            cannot use up what the server needs to start programs.
        file_bytes: maximum size of a file that the program writes.
        scratch_bytes: maximum size of the program's own ``/tmp``, and of its own ``/dev/shm``.

    Raises:
        ConfigurationError: if the values contradict each other, a host or network is invalid, or a limit is not
            positive.
    """

    network: Network = "none"
    hosts: tuple[str, ...] = ()
    allow_networks: tuple[str, ...] = ()
    network_bytes: int = 1 << 30
    connections: int = 256
    readable: tuple[str | os.PathLike[str], ...] = ()
    writable: tuple[str | os.PathLike[str], ...] = ()
    secrets: tuple[str, ...] = ()
    readable_on_request: tuple[str | os.PathLike[str], ...] = ()
    secrets_on_request: tuple[str, ...] = ()
    memory_bytes: int = 8 << 30
    cpu_s: int = 3600
    processes: int = 512
    open_files: int = 1024
    file_bytes: int = 4 << 30
    scratch_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        """Check the values."""
        if self.network not in ("none", "hosts", "all"):
            raise ConfigurationError(f"unknown network {self.network!r}", hint="choose none, hosts or all")
        if self.hosts and self.network == "none":
            raise ConfigurationError("the sandbox names hosts, but its network is 'none'", hint='set network="hosts"')
        for name in (
            "hosts",
            "allow_networks",
            "readable",
            "writable",
            "secrets",
            "readable_on_request",
            "secrets_on_request",
        ):
            if isinstance(getattr(self, name), str):
                raise ConfigurationError(f"the sandbox's {name} is a string", hint=f"use a tuple: {name}=(…,)")
        HostRules(self.hosts)
        AddressRules(self.allow_networks)
        for name in _LIMITS:
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"the sandbox's {name} is {getattr(self, name)}", hint="use a positive number")

    def describe(self) -> str:
        """Return a short description of the confinement for models and operators."""
        network = {
            "none": "No network access.",
            "hosts": f"Network access only to {', '.join(self.hosts) or 'no host'}.",
            "all": "Network access to public hosts.",
        }[self.network]
        return (
            f"{network} It can write only to the workspace and to /tmp, which is emptied afterwards. Each process may "
            f"use {self.memory_bytes >> 20:,} MiB of memory, {self.cpu_s} CPU seconds and files of "
            f"{self.file_bytes >> 20:,} MiB."
        )


SandboxChoice = Sandbox | Callable[[str], Sandbox]
"""A sandbox for all, or a function that returns the sandbox of a principal.

The function is called at each start of a program, on the host's loop or in a thread, so it must not block. It must
return the same sandbox for a principal while a run of the principal continues; otherwise a run that resumes may ask a
person again.
"""


def sandbox_of(choice: SandboxChoice, principal: str) -> Sandbox:
    """Return the sandbox of a principal.

    Raises:
        ToolFailed: if the function fails or returns something else, so that the program is not started. The reason is
            in the log only, because it may concern other principals.
    """
    if isinstance(choice, Sandbox):
        return choice
    try:
        found = choice(principal)
    except Exception:
        _log.exception("the function that chooses sandboxes failed for principal %r", principal)
    else:
        if isinstance(found, Sandbox):
            return found
        _log.error("the function that chooses sandboxes returned %.100r for principal %r", found, principal)
    raise ToolFailed("no sandbox is known for this user, so nothing was started; tell the user to ask the operator")
