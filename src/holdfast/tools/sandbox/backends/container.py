"""The backends ``podman`` and ``docker``: each program runs in a container of its own, made by the engine's command.

Invariants:

- A container is never shared by two programs: only the end of a container proves that a program left nothing behind.
- The first process of a container is a shell that starts the program. When the program ends, the container ends.
- Containers carry this host's marker as a label. When a program's tree is gone, its container is removed and the engine
  is asked whether it is gone; without that answer the receipt is ``unknown``. If this process dies, a watcher
  outside of it removes its containers; the next start removes what was left even so.
- Neither variables nor the profile of system calls are arguments: the engine's command reads them from descriptors.
- The system and the interpreter of this machine are mounted read-only into an image that has only links; nothing is
  pulled from a registry.
- A path is checked inside the container: if it is not the file that was checked outside, the program is not started.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import os
import resource
import shlex
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from holdfast import ids
from holdfast.clock import system_clock
from holdfast.errors import NotSupported
from holdfast.runtime.process_host import Completed, process_host
from holdfast.runtime.walls.namespaces import host_paths
from holdfast.tools.sandbox.backends.container_profile import call_profile
from holdfast.tools.sandbox.backends.container_watcher import host_label, is_host_alive, start_watcher
from holdfast.tools.sandbox.backends.memory_file import memory_files
from holdfast.tools.sandbox.backends.shell_limits import lowered, open_files, process_limit, ulimits
from holdfast.tools.sandbox.plan import plan_wall
from holdfast.tools.sandbox.port import Launch
from holdfast.tools.sandbox.sandbox import Sandbox
from holdfast.tools.sandbox.system_paths import visible_paths

if TYPE_CHECKING:
    from holdfast.tools.sandbox.plan import WallPlan

__all__ = ["DockerBackend", "PodmanBackend"]

_ANSWER_S: Final = 15.0
"""Maximum time for an answer of the engine; an engine that takes longer counts as broken."""
_PROBE_S: Final = 60.0
_TRUST_S: Final = 10.0
"""Time after an answer during which the engine is not asked again whether it answers."""
_OWN_PROCESSES: Final = 4
_OWN_THREADS_ROOTLESS: Final = 1024
"""Room for what the kernel counts together without a cgroup: all containers of the user, and podman's own threads."""
_ENGINE_FILES, _ENGINE_PROCESSES = 1024, 4096
"""Descriptors and processes that the engine may need to start a container; it would set more than it may itself."""
_LEAST_MEMORY: Final = 6 << 20
_VARIABLES_FD, _PROFILE_FD = 3, 4
_PASSED: Final = ("PATH", "HOME", "USER", "LANG", "XDG_", "DOCKER_", "CONTAINER", "REGISTRY_AUTH_FILE", "TMPDIR")
_FIRST_PROCESS: Final = """\
fail() { echo "sandbox: $1" >&2; exit 125; }
{ %(limits)s; } || fail 'cannot set the limits'
%(checks)s
exec 3<&0 4>&2 2>/dev/null
trap 'kill -TERM -1' TERM
%(nice)senv --default-signal=TERM,INT,HUP,QUIT /bin/sh -c 'exec "$@"' sandbox "$@" <&3 2>&4 3<&- 4>&- &
program=$!
exec 3<&- 4>&- </dev/null
while :; do wait "$program"; code=$?; kill -0 "$program" || exit "$code"; done
"""


class _ContainerBackend:
    """Starts each program in a container of its own.

    Parameters:
        engine: name of the engine's command.
        options: options of its ``run`` command that only this engine has.
        is_daemon: whether a daemon runs the containers, so that the process tree of the command proves nothing.
    """

    layers: tuple[str, ...] = ("container",)
    missing: Mapping[str, str] = MappingProxyType({})

    def __init__(self, engine: str, options: Sequence[str], *, is_daemon: bool) -> None:
        self.name = engine
        self._options = tuple(options)
        self._is_daemon = is_daemon
        self._bounds_by_cgroup = is_daemon or os.geteuid() == 0  # rootless, the kernel counts per user namespace
        self._answered_at = -_TRUST_S

    def probe(self) -> str | None:
        """Return None if this machine can build the wall, otherwise the reason. May block for a minute."""
        if not sys.platform.startswith("linux"):
            return "it needs Linux"
        if shutil.which(self.name) is None:
            return f"{self.name} is not installed"
        try:
            self._ask("version", timeout_s=_ANSWER_S)
            self._remove_left_over()
            if self._run("image", "inspect", _image()[0]).returncode:
                self._ask("import", "-", _image()[0], input=_image()[1], timeout_s=_PROBE_S)
            return self._try()
        except (NotSupported, OSError) as error:
            return str(error)

    def _try(self) -> str | None:
        """Return None if a program starts in a container, otherwise the reason why it does not."""
        with tempfile.TemporaryDirectory(prefix="holdfast-probe-") as folder:
            launch = self.launch(plan_wall(Sandbox(), folder=folder), ["/bin/sh", "-c", "exit 42"])
            try:
                ended = process_host().run_blocking(
                    launch.argv,
                    timeout_s=_PROBE_S,
                    cwd=launch.directory,
                    env=launch.environment,
                    pass_fds=launch.pass_fds,
                    confirm=launch.confirm,
                    name="sandbox probe",
                )
            except TimeoutError:
                return f"{self.name} did not start a container within {_PROBE_S:g} s"
            finally:
                for fd in launch.pass_fds:
                    os.close(fd)
        return None if ended.returncode == 42 else _last_line(ended)

    def launch(self, plan: WallPlan, argv: Sequence[str]) -> Launch:
        """Return how to start a program in a new container. May block for seconds.

        Raises:
            NotSupported: if the engine does not answer, or cannot enforce the plan.
        """
        if plan.network != "none":
            raise NotSupported(
                f"programs in containers of {self.name} get no network, because its loopback would be this machine's",
                hint='use the sandbox "linux" (see "holdfast doctor"), or the network "none"',
            )
        if system_clock.monotonic() > self._answered_at + _TRUST_S:
            self._ask("version", timeout_s=_ANSWER_S)
        if self._is_daemon:
            start_watcher(self.name, _client_environment())
        name = ids.secret("holdfast-")
        variables, inherited = _variables({**plan.environment, "TMPDIR": "/tmp"})
        words = [self.name, "run", "--rm", "--interactive", "--name", name, "--label", f"holdfast.host={host_label()}"]
        words += ["--pull", "never", "--read-only", "--cap-drop", "all", "--security-opt", "no-new-privileges"]
        words += ["--security-opt", f"seccomp=/dev/fd/{_PROFILE_FD}", "--env-file", f"/dev/fd/{_VARIABLES_FD}"]
        words += [word for variable in inherited for word in ("--env", variable)]
        words += ["--network", "none", "--log-driver", "none"]
        words += ["--oom-score-adj", "1000", *self._options, *self._bounds(plan.sandbox)]
        words += _mounts(plan, "" if self._is_daemon else ",notmpcopyup")
        script = _FIRST_PROCESS % {
            "limits": " && ".join(self._limits(plan.sandbox)),
            "checks": _checks(plan),
            "nice": "nice -n 19 " if plan.idle else "",
        }
        words += ["--workdir", plan.directory, "--entrypoint", "/bin/sh", _image()[0], "-c", script, "sandbox", *argv]
        return Launch(
            argv=tuple(words),
            environment={**_client_environment(), **inherited},
            directory="/",
            pass_fds=memory_files(variables, call_profile()),
            confirm=functools.partial(self._remove, name),
        )

    def _limits(self, sandbox: Sandbox) -> list[str]:
        """Return shell commands for the limits that hold inside; outside, they would limit the engine as well."""
        if self._is_daemon:  # its containers share the count of processes of the server's user
            return ulimits(sandbox)
        return [*ulimits(sandbox), process_limit(self._processes(sandbox))]

    def _processes(self, sandbox: Sandbox) -> int:
        own = _OWN_PROCESSES if self._bounds_by_cgroup else _OWN_THREADS_ROOTLESS
        return lowered(resource.RLIMIT_NPROC, sandbox.processes + own)

    def _bounds(self, sandbox: Sandbox) -> list[str]:
        size = str(sandbox.scratch_bytes)
        files = max(open_files(sandbox), lowered(resource.RLIMIT_NOFILE, _ENGINE_FILES))
        words = ["--tmpfs", f"/tmp:rw,nosuid,nodev,exec,size={size},mode=1777", "--shm-size", size]
        words += ["--ulimit", f"nofile={files}:{files}"]
        if not self._is_daemon:
            processes = max(self._processes(sandbox), lowered(resource.RLIMIT_NPROC, _ENGINE_PROCESSES))
            words += ["--ulimit", f"nproc={processes}:{processes}"]
        if self._bounds_by_cgroup:
            memory = str(max(sandbox.memory_bytes, _LEAST_MEMORY))
            return [*words, "--memory", memory, "--pids-limit", str(self._processes(sandbox))]
        return [*words, "--cgroups", "disabled"]

    def _remove(self, name: str) -> bool:
        """Remove a container if it still exists; return whether it is certain that it does not."""
        try:
            if self._containers(f"name=^{name}$"):
                self._run("rm", "--force", name)
                return not self._containers(f"name=^{name}$")
        except (NotSupported, OSError):
            return False
        return True

    def _remove_left_over(self) -> None:
        """Remove the containers of hosts that are gone."""
        for container in self._containers("label=holdfast.host"):
            told = self._run("inspect", "--format", '{{index .Config.Labels "holdfast.host"}}', container)
            if told.returncode:
                continue  # it is gone
            if not is_host_alive(told.stdout.decode("utf-8", "replace").strip()):
                self._run("rm", "--force", container)

    def _containers(self, condition: str) -> list[str]:
        told = self._ask("ps", "--all", "--filter", condition, "--format", "{{.ID}}", timeout_s=_ANSWER_S)
        return [line for line in told.splitlines() if line]

    def _ask(self, *words: str, input: bytes = b"", timeout_s: float) -> str:
        ended = self._run(*words, input=input, timeout_s=timeout_s)
        if ended.returncode:
            raise NotSupported(
                f"{self.name} {words[0]} failed: {_last_line(ended)}",
                hint=f"check that {self.name} works for this user, or choose another sandbox",
            )
        return ended.stdout.decode("utf-8", "replace")

    def _run(self, *words: str, input: bytes = b"", timeout_s: float = _ANSWER_S) -> Completed:
        try:
            ended = process_host().run_blocking(
                [self.name, *words], input=input, timeout_s=timeout_s, cwd="/", env=_client_environment()
            )
        except TimeoutError as error:
            raise NotSupported(
                f"{self.name} {words[0]} did not answer within {timeout_s:g} s",
                hint=f"check the engine ({self.name} info), or choose another sandbox",
            ) from error
        if not ended.returncode:
            self._answered_at = system_clock.monotonic()
        return ended


class PodmanBackend(_ContainerBackend):
    """Starts each program in a container of podman, rootless for an ordinary user."""

    def __init__(self) -> None:
        masked = ("--security-opt", f"mask={':'.join(map(os.fsdecode, itertools.chain(*host_paths())))}")
        super().__init__("podman", ("--read-only-tmpfs=false", "--no-hosts", *masked), is_daemon=False)


class DockerBackend(_ContainerBackend):
    """Starts each program in a container of docker, as the server's user and group."""

    def __init__(self) -> None:
        super().__init__("docker", ("--user", f"{os.geteuid()}:{os.getegid()}"), is_daemon=True)


def _mounts(plan: WallPlan, empty: str) -> Iterator[str]:
    """Yield the mounts of a plan; the option `empty` makes the engine's temporary folders empty at first."""
    shown = dict.fromkeys(visible_paths(plan)[0], ",readonly")
    shown |= dict.fromkeys(plan.protected, ",readonly") | dict.fromkeys(plan.writable, "")
    named = [(path, path, how) for path, how in shown.items()]
    named += [(target, name, shown[target]) for name, target in plan.links if target in shown]
    for source, target, how in named:
        if any(sign in source + target for sign in ',"\n'):
            raise NotSupported(
                f"container engines cannot mount the path {source!r}, which contains a comma, quote or line break",
                hint="rename it, or choose another sandbox",
            )
        yield from ("--mount", f"type=bind,source={source},target={target}{how}")
    for path in plan.hidden:
        if os.path.exists(path) and any(path.startswith(f"{folder}/") for folder in shown):
            covered = ("--tmpfs", f"{path}:ro,size=4k,mode=555{empty}") if os.path.isdir(path) else _covering_file(path)
            yield from covered


def _covering_file(path: str) -> tuple[str, str]:
    return "--mount", f"type=bind,source=/dev/null,target={path},readonly"


def _checks(plan: WallPlan) -> str:
    """Return shell commands that fail unless each path of the plan is the file that exists outside."""
    lines = []
    for path in sorted({*plan.writable, *plan.protected, *plan.readable}):
        found = os.lstat(path)
        wanted = f"{found.st_dev}:{found.st_ino}"
        lines.append(f'[ "$(stat -c %d:%i -- {shlex.quote(path)})" = {wanted} ] || fail "a path was replaced"')
    return "\n".join(lines)


def _variables(environment: Mapping[str, str]) -> tuple[bytes, dict[str, str]]:
    """Return the variables for a file, and those with line breaks, which the engine's command must inherit.

    Raises:
        NotSupported: if a variable with a line break would change the engine's command itself.
    """
    broken = {name: value for name, value in environment.items() if "\n" in value}
    for name in broken:
        if name.startswith(_PASSED):
            raise NotSupported(f"the variable {name} contains a line break, which container engines do not accept")
    lines = [f"{name}={value}\n" for name, value in environment.items() if name not in broken]
    return os.fsencode("".join(lines)), broken


def _client_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_PASSED)}


@functools.cache
def _image() -> tuple[str, bytes]:
    """Return the name and the archive of an image with the links of the visible system and nothing else."""
    links = visible_paths(plan_wall(Sandbox(), folder="/usr"))[1]  # they are the same with every workspace
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as image:
        for folder in ("dev", "etc", "proc", "sys", "tmp"):
            made = tarfile.TarInfo(folder)
            made.type, made.mode = tarfile.DIRTYPE, 0o755
            image.addfile(made)
        for path, target in links:
            link = tarfile.TarInfo(path.lstrip("/"))
            link.type, link.linkname, link.mode = tarfile.SYMTYPE, target, 0o777
            image.addfile(link)
    content = archive.getvalue()
    return f"localhost/holdfast-system:{hashlib.blake2b(content, digest_size=8).hexdigest()}", content


def _last_line(ended: Completed) -> str:
    said = ended.stderr.decode("utf-8", "replace").strip().splitlines()
    return said[-1] if said else f"exit code {ended.returncode}"
