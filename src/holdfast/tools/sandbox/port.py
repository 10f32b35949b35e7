"""The port of wall builders: each backend turns a `WallPlan` into a start of a program behind a wall."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from holdfast.runtime.walls.spec import WallSpec
    from holdfast.tools.sandbox.account import Account
    from holdfast.tools.sandbox.plan import WallPlan
    from holdfast.tools.sandbox.proxy.link import NetworkAccess

__all__ = ["Launch", "NetworkRequest", "SandboxBackend"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRequest:
    """The network that a program needs; for the parameters, see `NetworkProxy.open`."""

    principal: str
    hosts: tuple[str, ...]
    networks: tuple[str, ...]
    connections: int
    bytes_limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How to start a program behind a wall; the values for `Scope.process` and `ProcessHost.spawn`.

    Parameters:
        argv: the program and its arguments, with the backend's own program in front if it has one.
        environment: complete environment for `argv`.
        directory: folder in which `argv` starts.
        wall: the wall that the runtime builds; None if `argv` builds it.
        account: what the program's use of resources counts for; None if it is not counted.
        pass_fds: descriptors that `argv` gets as 3, 4, … in this order. The caller closes its copies after the start.
        confirm: for ``confirm`` of `ProcessHost.spawn`, if programs run outside of the process tree of `argv`.
        network_request: the network that the program needs; None without one.
        network: the program's network, added by `network.open_network`, which also adds its descriptor. The caller
            closes it when the program has ended.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    directory: str
    wall: WallSpec | None = None
    pass_fds: tuple[int, ...] = ()
    confirm: Callable[[], bool] | None = None
    network_request: NetworkRequest | None = None
    network: NetworkAccess | None = None
    account: Account | None = None


class SandboxBackend(Protocol):
    """Builds walls in one way."""

    @property
    def name(self) -> str:
        """Name of the backend in the setting ``sandbox``."""
        ...

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers of the wall on this machine, such as ``("namespaces", "landlock")``; empty without a wall."""
        ...

    @property
    def missing(self) -> Mapping[str, str]:
        """Layers that this machine lacks although the wall would have them, each with the reason."""
        ...

    def probe(self) -> str | None:
        """Return None if this machine can build the wall, otherwise the reason why it cannot. May block for seconds."""
        ...

    def launch(self, plan: WallPlan, argv: Sequence[str]) -> Launch:
        """Return how to start a program behind the wall of a plan. May block for file system calls.

        Raises:
            NotSupported: if this backend cannot enforce the plan on this machine.
        """
        ...
