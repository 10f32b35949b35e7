"""What walled programs of different sessions, and the host, do not learn of each other."""

from __future__ import annotations

import functools
import os
import secrets
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.runtime.process_host import process_host
from holdfast.tools.sandbox.plan import plan_wall
from holdfast.tools.sandbox.sandbox import Sandbox
from tests.tools.sandbox.walled import ALL_LAYERS, linux_backend, reason_against, run_walled

NAMESPACES = tuple(layers for layers in ALL_LAYERS if "namespaces" in layers)
KEPT = ("user", "net", "uts")
"""Namespaces that are kept for a session; the number of another one may be used again."""


@pytest.mark.parametrize("layers", NAMESPACES)
def test_proc_says_nothing_of_the_machine(tmp_path: Path, layers: tuple[str, ...]) -> None:
    if (reason := reason_against(layers)) is not None:
        pytest.skip(reason)
    names = ("cmdline", "kallsyms", "keys", "key-users", "partitions", "diskstats", "interrupts", "locks", "modules")
    there = [name for name in names if os.path.exists(f"/proc/{name}")]
    assert "cmdline" in there and Path("/proc/cmdline").read_bytes()
    command = f"cd /proc && cat {' '.join(there)}; ls bus fs irq 2>/dev/null | grep -v :"
    for session in ("", "s", "s"):
        ended = run_walled(command, folder=tmp_path, layers=layers, session=session)
        assert ended.output.strip() == "", ended
    made = run_walled("cat /proc/sys/user/max_user_namespaces", folder=tmp_path, layers=layers)
    assert made.output == "0\n", "a program that makes a user namespace has all capabilities in it"


@pytest.mark.parametrize("layers", NAMESPACES)
def test_sessions_share_no_namespace_even_in_one_folder(tmp_path: Path, layers: tuple[str, ...]) -> None:
    if (reason := reason_against(layers)) is not None:
        pytest.skip(reason)

    def namespaces(session: str, principal: str) -> dict[str, str]:
        command = "; ".join(f"readlink /proc/self/ns/{kind}" for kind in KEPT)
        ended = run_walled(command, folder=tmp_path, layers=layers, session=session, principal=principal)
        return dict(zip(KEPT, ended.output.split(), strict=True))

    first = namespaces("one", "alice")
    assert namespaces("one", "alice") == first, "they are kept for a session"
    other = namespaces("two", "bob")
    assert not set(other.values()) & set(first.values())
    for session in ("one", "two"):
        process_host().forget_walls(session)


@pytest.mark.parametrize("layers", NAMESPACES)
def test_concurrent_programs_of_one_session_have_each_a_file_system(tmp_path: Path, layers: tuple[str, ...]) -> None:
    if (reason := reason_against(layers)) is not None:
        pytest.skip(reason)
    for name in ("ready", "go"):
        os.mkfifo(tmp_path / name)
    run = functools.partial(run_walled, folder=tmp_path, layers=layers, session="both")
    mounts = [run("grep -c . /proc/self/mountinfo").output for _ in range(3)]
    assert len(set(mounts)) == 1, "none has the mounts of an earlier one"
    with ThreadPoolExecutor() as threads:
        first = threads.submit(
            run, "touch /tmp/first; echo >ready; read x <go; cd /tmp; ls -d first second 2>/dev/null"
        )
        second = threads.submit(
            run, f"read x <ready; touch /tmp/second; cd /tmp; ls -d first second 2>/dev/null; echo >{tmp_path}/go"
        )
    assert (first.result().output, second.result().output) == ("first\n", "second\n")
    process_host().forget_walls("both")


@pytest.mark.parametrize("layers", NAMESPACES)
def test_concurrent_programs_of_one_session_share_a_loopback(tmp_path: Path, layers: tuple[str, ...]) -> None:
    """And with it the user namespace, in which the kernel counts the session's processes."""
    if (reason := reason_against(layers)) is not None:
        pytest.skip(reason)
    os.mkfifo(tmp_path / "port")
    first = """
import os, socket
listener = socket.create_server(("127.0.0.1", 0))
open("port", "w").write(str(listener.getsockname()[1]))
listener.settimeout(20)
listener.accept()[0].sendall(os.readlink("/proc/self/ns/user").encode())
"""
    second = """
import os, socket
there = socket.create_connection(("127.0.0.1", int(open("port").read())), 20).recv(99).decode()
print(there == os.readlink("/proc/self/ns/user"))
"""
    run = functools.partial(run_walled, folder=tmp_path, layers=layers, session="loopback")
    assert run("true").returncode == 0  # its namespaces are kept from here on
    with ThreadPoolExecutor() as threads:
        ended = [threads.submit(run, [sys.executable, "-I", "-S", "-c", code]) for code in (first, second)]
    assert ended[1].result().output == "True\n", [one.result() for one in ended]
    process_host().forget_walls("loopback")


@pytest.mark.parametrize("layers", ALL_LAYERS)
def test_a_folder_on_the_way_that_became_a_link_shows_nothing(tmp_path: Path, layers: tuple[str, ...]) -> None:
    if (reason := reason_against(layers)) is not None:
        pytest.skip(reason)
    for name in ("work", "given/data", "others/data"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "others" / "data" / "file").write_text("a secret")
    command = f"cat {tmp_path}/given/data/file {tmp_path}/others/data/file"
    plan = plan_wall(Sandbox(readable=(tmp_path / "given" / "data",)), folder=tmp_path / "work")
    launch = linux_backend(layers).launch(plan, ["/bin/sh", "-c", command])
    (tmp_path / "given").rename(tmp_path / "moved")
    (tmp_path / "given").symlink_to("others")
    with pytest.raises(OSError, match="Stale file handle"):
        process_host().run_blocking(
            launch.argv, cwd=launch.directory, env=launch.environment, wall=launch.wall, timeout_s=30
        )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root reads the memory of the zygote, which is undumpable")
def test_the_zygote_never_has_the_environment_of_a_program() -> None:
    """Its children, the parents of all later programs, would have a copy."""
    host, secret = process_host(), secrets.token_hex(16)
    for _ in range(3):
        assert host.run_blocking(["/bin/sh", "-c", "exit 7"], env={"API_KEY": secret}).returncode == 7
    assert secret.encode() in memory_of(os.getpid())
    for pid in host.zygote_pids():
        held = memory_of(pid)
        assert b"holdfast" in held and secret.encode() not in held


def memory_of(pid: int) -> bytes:
    """Return all of a process's writable memory."""
    found = []
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            area, rights = line.split()[:2]
            if not rights.startswith("rw"):
                continue
            first, last = (int(number, 16) for number in area.split("-"))
            try:
                memory.seek(first)
                found.append(memory.read(last - first))
            except OSError:  # an area of the kernel's own
                continue
    return b"".join(found)
