"""The command lines of the backend docker, against a stand-in of its command. No test runs a daemon of docker."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.errors import NotSupported
from holdfast.runtime.process_host import process_host
from holdfast.runtime.walls.call_filter import REFUSED_CALLS
from holdfast.testing import SANDBOX_CHECKS, run_sandbox_check
from holdfast.tools.sandbox.backends import container
from holdfast.tools.sandbox.backends.container import DockerBackend, PodmanBackend
from holdfast.tools.sandbox.backends.container_profile import call_profile
from holdfast.tools.sandbox.backends.container_watcher import host_label
from holdfast.tools.sandbox.plan import plan_wall
from holdfast.tools.sandbox.sandbox import Sandbox
from tests.tools.sandbox.walled import run_walled

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="containers need Linux")


class StandIn:
    """The folder of a stand-in: what it was asked, and how it is to behave."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "containers").mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("docker_stand_in.py"), folder / "stand_in.py")
        command = folder / "docker"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {folder}/stand_in.py "$@"\n')
        command.chmod(0o755)

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]

    @property
    def run(self) -> list[str]:
        return [words for words in self.calls if words[0] == "run"][-1]


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn(tmp_path / "engine")
    monkeypatch.setenv("PATH", f"{made.folder}:{os.environ['PATH']}")
    return made


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "workspace" / "kept").mkdir(parents=True)
    return tmp_path / "workspace"


def test_a_program_runs_with_its_output_exit_code_and_folder(docker: StandIn, workspace: Path) -> None:
    backend = DockerBackend()
    assert backend.probe() is None
    ended = run_walled("pwd; cat; exit 7", folder=workspace, backend=backend, input=b"given")
    assert (ended.output, ended.returncode) == (f"{workspace}\ngiven", 7)
    assert ended.tree.outcome == "gone"
    assert not list((docker.folder / "containers").iterdir())


WITHOUT_A_WALL = (
    "output_and_exit_code_come_back",
    "arguments_arrive_unchanged",
    "standard_input_arrives",
    "large_output_is_complete",
    "death_by_a_signal_is_visible",
    "a_missing_program_is_an_error",
    "the_workspace_can_be_changed",
    "the_environment_is_complete_and_no_more",
    "secrets_are_no_arguments",
    "processor_time_is_limited",
    "a_stop_ends_everything",
    "a_stop_lets_the_program_clean_up",
    "a_plan_that_cannot_be_enforced_is_refused",
)
"""Checks of the suite that do not need a wall, which the stand-in does not build."""


@pytest.mark.parametrize("name", WITHOUT_A_WALL)
def test_backend_conforms_as_far_as_a_stand_in_can(docker: StandIn, name: str) -> None:
    run_sandbox_check(next(check for check in SANDBOX_CHECKS if check.__name__ == name), DockerBackend)


def test_the_container_is_closed_by_its_options(docker: StandIn, workspace: Path) -> None:
    sandbox = Sandbox(memory_bytes=64 << 20, processes=7, scratch_bytes=1 << 20, open_files=99)
    kept = workspace / "kept"
    run_walled("true", folder=workspace, backend=DockerBackend(), sandbox=sandbox, protected=[kept])
    words = docker.run
    pairs = list(pairwise(words))
    for flag in ("--rm", "--interactive", "--read-only"):
        assert flag in words
    for pair in (
        ("--network", "none"),
        ("--cap-drop", "all"),
        ("--security-opt", "no-new-privileges"),
        ("--pull", "never"),
        ("--user", f"{os.geteuid()}:{os.getegid()}"),
        ("--memory", str(64 << 20)),
        ("--pids-limit", "11"),
        ("--shm-size", str(1 << 20)),
        ("--ulimit", "nofile=1024:1024"),  # the engine's own; the program's is below
        ("--label", f"holdfast.host={host_label()}"),
        ("--mount", f"type=bind,source={workspace},target={workspace}"),
        ("--mount", f"type=bind,source={kept},target={kept},readonly"),
    ):
        assert pair in pairs, f"{pair} is missing in {words}"
    assert "ulimit -n 99 " in words[words.index("-c") + 1]
    writable = [value for flag, value in pairs if flag == "--mount" and not value.endswith(",readonly")]
    assert writable == [f"type=bind,source={workspace},target={workspace}"]
    assert "--privileged" not in words
    assert "docker.sock" not in " ".join(words)


def test_only_a_program_that_serves_the_host_has_its_priority(docker: StandIn, workspace: Path) -> None:
    served = run_walled("nice", folder=workspace, backend=DockerBackend(), idle=False)
    assert served.output == f"{os.getpriority(os.PRIO_PROCESS, 0)}\n"
    assert run_walled("nice", folder=workspace, backend=DockerBackend()).output == "19\n"


def test_secrets_are_in_no_command_line(docker: StandIn, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE_LINE", "hunter2")
    monkeypatch.setenv("TWO_LINES", "begin\nhunter3")
    sandbox = Sandbox(secrets=("ONE_LINE", "TWO_LINES"))
    ended = run_walled(
        'printf "%s|%s" "$ONE_LINE" "$TWO_LINES"', folder=workspace, backend=DockerBackend(), sandbox=sandbox
    )
    assert ended.output == "hunter2|begin\nhunter3"
    assert "hunter" not in (docker.folder / "calls").read_text()


def test_an_engine_that_hangs_is_refused_in_time(
    docker: StandIn, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "_ANSWER_S", 0.3)
    (docker.folder / "hangs").touch()
    assert "did not answer within 0.3 s" in str(DockerBackend().probe())
    with pytest.raises(NotSupported, match=r"docker version did not answer within 0\.3 s"):
        DockerBackend().launch(plan_wall(Sandbox(), folder=workspace), ["true"])


def test_an_engine_that_fails_says_why(docker: StandIn) -> None:
    (docker.folder / "stand_in.py").write_text("import sys; sys.exit('Cannot connect to the Docker daemon')")
    assert "docker version failed: Cannot connect to the Docker daemon" in str(DockerBackend().probe())


def test_a_container_that_stays_makes_the_receipt_unknown(docker: StandIn, workspace: Path) -> None:
    (docker.folder / "keeps").touch()
    ended = run_walled("true", folder=workspace, backend=DockerBackend())
    assert ended.returncode == 0
    assert ended.tree.outcome == "unknown"


def test_the_container_of_a_killed_client_is_removed_before_the_receipt(docker: StandIn, workspace: Path) -> None:
    plan = plan_wall(Sandbox(), folder=workspace)
    launch = DockerBackend().launch(plan, ["/bin/sh", "-c", "echo > started; exec sleep 600"])
    process = process_host().spawn_blocking(
        launch.argv,
        stdin=subprocess.DEVNULL,
        cwd=launch.directory,
        env=launch.environment,
        pass_fds=launch.pass_fds,
        confirm=launch.confirm,
    )
    for fd in launch.pass_fds:
        os.close(fd)
    until(lambda: (workspace / "started").exists())
    assert list((docker.folder / "containers").iterdir())
    assert process.kill_tree_blocking(bound_s=20.0).outcome == "gone"
    assert not list((docker.folder / "containers").iterdir())


def test_the_containers_of_a_dead_host_are_removed_at_the_next_start(docker: StandIn) -> None:
    containers = docker.folder / "containers"
    (containers / "of-a-dead-host").write_text("1.1")
    (containers / "of-this-host").write_text(host_label())
    assert DockerBackend().probe() is None
    assert [path.name for path in containers.iterdir()] == ["of-this-host"]


def test_podman_removes_the_containers_of_a_dead_host_at_the_next_start() -> None:
    reason = PodmanBackend().probe()
    if reason is not None:
        pytest.skip(f"podman: {reason}")
    made = []
    image = next(
        line
        for line in subprocess.check_output(
            ["podman", "images", "--format", "{{.Repository}}:{{.Tag}}"], text=True
        ).split()
        if line.startswith("localhost/holdfast-system:")
    )
    for label in ("1.1", host_label()):
        words = ["podman", "create", "--pull", "never", "--label", f"holdfast.host={label}", image, "/bin/true"]
        made.append(subprocess.check_output(words, text=True).strip())
    try:
        assert PodmanBackend().probe() is None
        left = subprocess.check_output(
            ["podman", "ps", "--all", "--no-trunc", "--format", "{{.ID}}"], text=True
        ).split()
        assert set(left) & set(made) == {made[1]}
    finally:
        subprocess.run(["podman", "rm", "--force", "--ignore", *made], check=True, stdout=subprocess.DEVNULL)


_HOST = """\
import subprocess, sys, time
from holdfast.runtime.process_host import process_host
from holdfast.tools.sandbox.backends.container import DockerBackend
from holdfast.tools.sandbox.plan import plan_wall
from holdfast.tools.sandbox.sandbox import Sandbox

argv = ["/bin/sh", "-c", "echo > started; sleep 600"]
launch = DockerBackend().launch(plan_wall(Sandbox(), folder=sys.argv[1]), argv)
process = process_host().spawn_blocking(
    launch.argv, cwd="/", env=launch.environment, pass_fds=launch.pass_fds, confirm=launch.confirm
)
process.wait_blocking()
"""


def test_no_container_survives_the_sigkill_of_its_host(docker: StandIn, workspace: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _HOST, str(workspace)]) as host:
        until(lambda: (workspace / "started").exists())
        assert list((docker.folder / "containers").iterdir())
        host.kill()
    until(lambda: not list((docker.folder / "containers").iterdir()))


def test_a_replaced_path_ends_the_start(docker: StandIn, workspace: Path) -> None:
    backend = DockerBackend()
    plan = plan_wall(Sandbox(), folder=workspace, protected=[workspace / "kept"])
    launch = backend.launch(plan, ["echo", "ran"])
    (workspace / "kept").rename(workspace / "moved")
    (workspace / "kept").symlink_to("/etc")
    ended = process_host().run_blocking(
        launch.argv, cwd="/", env=launch.environment, pass_fds=launch.pass_fds, confirm=launch.confirm
    )
    for fd in launch.pass_fds:
        os.close(fd)
    assert (ended.returncode, ended.stdout) == (125, b"")
    assert b"a path was replaced" in ended.stderr


def test_paths_that_an_engine_would_misread_are_refused(docker: StandIn, tmp_path: Path) -> None:
    folder = tmp_path / "a,readonly"
    folder.mkdir()
    with pytest.raises(NotSupported, match="comma"):
        DockerBackend().launch(plan_wall(Sandbox(), folder=folder), ["true"])


def test_the_profile_blocks_set_uid_modes_and_namespaces() -> None:
    profile = json.loads(call_profile())
    rules = [(name, rule.get("args", [])) for rule in profile["syscalls"] for name in rule["names"]]
    assert {(name, ()) for name in REFUSED_CALLS} <= {(name, tuple(map(str, args))) for name, args in rules}
    assert {"ptrace", "fallocate", "shmget"} <= set(REFUSED_CALLS)
    assert ("clone3", []) in rules
    masks = {args[0]["valueTwo"] for name, args in rules if name == "fchmodat" and args}
    assert masks == {0o4000, 0o2000}


def until(seen: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Wait until a program of the test has done something in the file system."""
    import time

    end = time.monotonic() + limit_s
    while not seen():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)
