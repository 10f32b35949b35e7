"""The backend ``linux``: walls of namespaces, Landlock and a system call filter, which the runtime builds itself."""

from __future__ import annotations

import hashlib
import marshal
import os
import resource
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from holdfast.errors import NotSupported
from holdfast.runtime.process_host import process_host
from holdfast.runtime.walls.call_filter import call_filter
from holdfast.runtime.walls.landlock import SCOPES_ABI, landlock_abi
from holdfast.runtime.walls.spec import WallPath, WallSpec, wall_path
from holdfast.tools.sandbox.network import DIRECT_VARIABLES, PROXY_VARIABLES, network_request
from holdfast.tools.sandbox.plan import plan_wall
from holdfast.tools.sandbox.port import Launch
from holdfast.tools.sandbox.sandbox import Sandbox
from holdfast.tools.sandbox.system_paths import SYSTEM_PATHS, interpreter_paths

if TYPE_CHECKING:
    from holdfast.tools.sandbox.plan import WallPlan

__all__ = ["LinuxBackend"]

_LAYERS: Final = ("namespaces", "landlock")
_PROBE_S = 15.0
_FIRST_FD = 3
_PLAIN = 2
"""Version of `marshal` whose bytes depend on the values only; those of later versions depend on references, too."""


class LinuxBackend:
    """Starts programs behind walls that the runtime builds in the forked child.

    Parameters:
        layers: layers to use; `probe` fails if one of them is missing. None uses those that this machine has.
    """

    name = "linux"

    def __init__(self, layers: Sequence[str] | None = None) -> None:
        self._forced = layers is not None
        self._layers = _LAYERS if layers is None else tuple(layers)
        self._probed = False
        self._reason: str | None = None
        self._missing: dict[str, str] = {}

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers of the wall on this machine."""
        self.probe()
        return self._layers

    @property
    def missing(self) -> Mapping[str, str]:
        """Layers that this machine lacks, each with the reason."""
        self.probe()
        return self._missing

    def probe(self) -> str | None:
        """Return None if this machine can build the wall, otherwise the reason why it cannot."""
        if not self._probed:
            self._reason = self._find_reason()
            self._probed = True
        return self._reason

    def _find_reason(self) -> str | None:
        if not sys.platform.startswith("linux"):
            return "it needs Linux"
        if not call_filter():
            return f"no system call filter is known for the processor {os.uname().machine}"
        abi = landlock_abi()
        if "landlock" in self._layers and abi == 0:
            self._lacks("landlock", "Landlock is not available (the kernel lacks it or has it disabled)")
        if "namespaces" in self._layers and (failed := self._try()) is not None:
            self._lacks("namespaces", f"namespaces are not available ({failed})")
        if self._layers == ("landlock",) and abi < SCOPES_ABI:
            self._lacks("landlock", f"Landlock alone needs ABI {SCOPES_ABI} (Linux 6.12), and this kernel has {abi}")
        reasons = "; ".join(self._missing.values())
        return reasons if reasons and (self._forced or not self._layers) else None

    def _lacks(self, layer: str, reason: str) -> None:
        self._layers = tuple(one for one in self._layers if one != layer)
        self._missing[layer] = reason

    def _try(self) -> str | None:
        """Return None if a program starts behind a wall with namespaces, otherwise the reason why it does not."""
        with tempfile.TemporaryDirectory(prefix="holdfast-probe-") as folder:
            launch = self._launch(plan_wall(Sandbox(), folder=folder), ["/bin/sh", "-c", ":"])
            try:
                ended = process_host().run_blocking(
                    launch.argv,
                    timeout_s=_PROBE_S,
                    cwd=launch.directory,
                    env=launch.environment,
                    wall=launch.wall,
                    name="sandbox probe",
                )
            except (OSError, TimeoutError) as error:
                return str(error)
            return None if ended.returncode == 0 else f"a program inside ended with exit code {ended.returncode}"

    def launch(self, plan: WallPlan, argv: Sequence[str]) -> Launch:
        """Return how to start a program behind the wall of a plan.

        Raises:
            NotSupported: if the plan needs namespaces, which this machine does not have.
        """
        self.probe()
        if "namespaces" not in self._layers:
            _check_without_namespaces(plan)
        return self._launch(plan, argv)

    def _launch(self, plan: WallPlan, argv: Sequence[str]) -> Launch:
        namespaces = "namespaces" in self._layers
        readable, links = _visible(plan)
        writable = [wall_path(path) for path in plan.writable]
        hidden = [wall_path(path) for path in plan.hidden if os.path.exists(path)]
        network = network_request(plan)
        reach = () if network is None else (network.hosts, network.networks, network.connections, network.bytes_limit)
        shown = (readable, writable, links, hidden, reach)
        digest = hashlib.blake2b(marshal.dumps(shown, _PLAIN), digest_size=16).hexdigest()
        wall = WallSpec(
            key=f"{plan.session}\0{digest}".encode() if plan.session and namespaces else b"",
            namespaces=namespaces,
            landlock="landlock" in self._layers,
            readable=readable,
            writable=writable,
            links=links,
            hidden=hidden,
            protected=[wall_path(path) for path in plan.protected if os.path.exists(path)],
            scratch_bytes=plan.sandbox.scratch_bytes,
            processes=plan.sandbox.processes,
            limits=_limits(plan.sandbox),
            call_filter=call_filter(alone=not namespaces) or b"",
            listen_fd=-1 if network is None else _FIRST_FD,
            proxy_variables=() if network is None else [os.fsencode(name) for name in PROXY_VARIABLES],
            idle=plan.idle,
        )
        environment = dict(plan.environment) | ({"TMPDIR": "/tmp"} if namespaces else {})
        if network is not None:
            environment |= dict.fromkeys(DIRECT_VARIABLES, "")
        return Launch(
            argv=tuple(argv),
            environment=environment,
            directory=plan.directory,
            wall=wall,
            network_request=network,
        )


def _visible(plan: WallPlan) -> tuple[list[WallPath], list[tuple[bytes, bytes]]]:
    """Return the readable paths and symbolic links of the visible file system; what does not exist is left out."""
    found, links = _system(interpreter=plan.interpreter)
    write = {os.fsencode(path) for path in plan.writable}
    if plan.links:
        granted = {os.fsencode(path): os.fsencode(target) for path, target in plan.links}
        links = sorted((granted | dict(links)).items())
    if plan.readable or not write.isdisjoint(path[0] for path in found):
        more = {wall_path(path) for path in plan.readable}
        found = sorted(path for path in {*found, *more} if path[0] not in write)
    return found, links


def _system(*, interpreter: bool) -> tuple[list[WallPath], list[tuple[bytes, bytes]]]:
    """Return the paths and links of the system; they are looked up again only if a file has changed."""
    known = _systems.get(interpreter)
    if known is None or any(_identity(path[0]) != path[1:3] for path in known[0]):
        paths = [*SYSTEM_PATHS, *([*interpreter_paths(), os.path.realpath(sys.executable)] if interpreter else [])]
        present = [path for path in paths if os.path.lexists(path)]
        links = {
            path: os.readlink(path) for path in present if os.path.islink(path) and _is_plain(os.path.dirname(path))
        }
        real = {os.path.realpath(path) for path in present if os.path.exists(path)}
        known = (
            [wall_path(path) for path in sorted(real)],
            sorted((os.fsencode(path), os.fsencode(target)) for path, target in links.items()),
        )
        _systems[interpreter] = known
    return known


def _is_plain(path: str) -> bool:
    """Return whether no part of a path is a link."""
    return os.path.realpath(path) == os.path.abspath(path)


_systems: dict[bool, tuple[list[WallPath], list[tuple[bytes, bytes]]]] = {}


def _identity(path: bytes) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _limits(sandbox: Sandbox) -> dict[int, int]:
    return {
        resource.RLIMIT_AS: sandbox.memory_bytes,
        resource.RLIMIT_CPU: sandbox.cpu_s,
        resource.RLIMIT_FSIZE: sandbox.file_bytes,
        resource.RLIMIT_NOFILE: sandbox.open_files,
        resource.RLIMIT_CORE: 0,
    }


def _check_without_namespaces(plan: WallPlan) -> None:
    if plan.network != "none":
        raise NotSupported(
            f"network access {plan.network!r} needs namespaces, which this machine lacks",
            hint="allow user namespaces on this machine, or use bwrap (setting sandbox)",
        )
    hint = "allow user namespaces on this machine, or use bwrap, podman or docker (setting sandbox)"
    if plan.protected:
        raise NotSupported("read-only paths in the workspace need namespaces, which this machine lacks", hint=hint)
    visible = _parents(plan.hidden) & {*plan.readable, *plan.writable}
    if visible:
        raise NotSupported(
            f"{sorted(visible)[0]} contains paths of the host, and hiding them needs namespaces", hint=hint
        )


def _parents(paths: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for path in paths:
        while path not in found:
            found.add(path)
            path = os.path.dirname(path)
    return found
