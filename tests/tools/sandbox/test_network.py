"""The network of walled programs: through the proxy to allowed hosts, and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigurationError, NotSupported
from holdfast.runtime.process_host import PIPE, Process, TreeResult, process_host
from holdfast.runtime.processes.procfs import all_pids
from holdfast.tools.sandbox.backends.linux import LinuxBackend
from holdfast.tools.sandbox.network import DIRECT_VARIABLES, PROXY_VARIABLES, open_network
from holdfast.tools.sandbox.plan import plan_wall
from holdfast.tools.sandbox.port import Launch, NetworkRequest, SandboxBackend
from holdfast.tools.sandbox.proxy.link import NetworkUsage
from holdfast.tools.sandbox.sandbox import Sandbox
from tests.tools.sandbox.ordinary_user import NETWORKED, networked_backend, run_as_ordinary_user
from tests.tools.sandbox.proxy.gates import run
from tests.tools.web.test_fetch import Request, serving

HERE = ("127.0.0.1",)


@pytest.fixture(params=NETWORKED)
def backend(request: pytest.FixtureRequest) -> SandboxBackend:
    """A backend whose walls have a network, or skip."""
    return networked_backend(request.param)


def test_the_network_of_bubblewrap_works_for_an_ordinary_user() -> None:
    run_as_ordinary_user(__file__, "-k", "bwrap")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a walled program ended, and what it used of the network."""

    output: str
    returncode: int
    tree: TreeResult
    usage: NetworkUsage


async def spawned(launch: Launch, **streams: Any) -> Process:
    """Start a program behind its wall, and close the descriptors that it got."""
    try:
        return await process_host().spawn(
            launch.argv,
            cwd=launch.directory,
            env=launch.environment,
            wall=launch.wall,
            pass_fds=launch.pass_fds,
            **streams,
        )
    finally:
        for fd in launch.pass_fds:
            os.close(fd)


async def run_connected(
    argv: Sequence[str],
    *,
    folder: Path,
    sandbox: Sandbox,
    backend: SandboxBackend,
    session: str = "",
    output: Path | None = None,
    **more: Any,
) -> Ended:
    """Run a program behind a wall with the network of its sandbox, as the tools do.

    Parameters:
        more: further parameters of `plan_wall`.
    """
    plan = plan_wall(sandbox, folder=folder, principal="alice", session=session, **more)
    launch = await open_network(backend.launch(plan, argv))
    output = output or folder / "output"
    with output.open("wb") as file:
        process = await spawned(launch, stdout=file, stderr=file)
    async with asyncio.timeout(50):
        returncode = await process.wait()
    tree = await process.kill_tree()
    usage = NetworkUsage()
    if launch.network is not None:
        usage = await launch.network.usage()
        launch.network.close()
    return Ended(output=output.read_text(), returncode=returncode, tree=tree, usage=usage)


async def echo(request: Request) -> None:
    await request.answer(f"{request.line}|{request.headers['host']}".encode())


PROGRAM = """
import sys, urllib.request
for url in sys.argv[1:]:
    try:
        print(urllib.request.urlopen(url, timeout=20).read().decode())
    except OSError as error:
        print(getattr(error, "code", type(error).__name__), error.read().decode() if hasattr(error, "read") else "")
"""

DIRECT = """
import os, socket, sys
assert os.environ["HTTP_PROXY"] == os.environ["all_proxy"] and os.environ["NO_PROXY"] == os.environ["no_proxy"] == ""
for family, address in (
    (socket.AF_INET, ("127.0.0.1", int(sys.argv[1]))),
    (socket.AF_INET, ("127.0.0.2", int(sys.argv[1]))),
    (socket.AF_INET, ("0.0.0.0", int(sys.argv[1]))),
    (socket.AF_INET6, ("::1", int(sys.argv[1]))),
    (socket.AF_INET, ("169.254.169.254", 80)),
    (socket.AF_INET, ("1.1.1.1", 443)),
):
    with socket.socket(family) as one:
        one.settimeout(10)
        try:
            one.connect(address)
            print("reached", address)
        except OSError:
            pass
for fd in os.listdir("/proc/self/fd"):
    if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}"):
        print("descriptor", fd, os.readlink(f"/proc/self/fd/{fd}"))
print("done")
"""


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-I", "-c", code, *arguments]


@pytest.mark.parametrize("network", ["hosts", "all"])
def test_a_walled_program_reaches_its_hosts_through_the_proxy_only(
    tmp_path: Path, network: str, backend: SandboxBackend
) -> None:
    async def main() -> None:
        async with serving(echo) as (here, asked), serving(echo, host="127.0.0.2") as (there, hidden):
            sandbox = Sandbox(
                network="hosts" if network == "hosts" else "all",
                hosts=(f"127.0.0.1:{here.rpartition(':')[2]}", "localhost:*"),
                allow_networks=HERE,
            )
            urls = (
                f"http://{here}/a",
                f"http://localhost:{here.rpartition(':')[2]}/b",
                f"http://{there}/",
                "http://10.0.0.1/",
            )
            ended = await run_connected(python(PROGRAM, *urls), folder=tmp_path, sandbox=sandbox, backend=backend)
            lines = ended.output.splitlines()
            assert lines[0] == f"GET /a HTTP/1.1|{here}", ended
            assert lines[1].startswith("GET /b HTTP/1.1|localhost:"), ended
            assert lines[2].startswith("403 Request blocked: "), ended
            assert ended.tree.outcome == "gone" and len(asked) == 2 and hidden == []
            assert ended.usage.connections == 4 and len(ended.usage.refused) == 2
            assert "127.0.0.2" in ended.usage.describe()

    run(main())


def test_curl_goes_through_the_proxy_by_itself(tmp_path: Path, backend: SandboxBackend) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")

    async def main() -> None:
        async with serving(echo) as (here, _):
            sandbox = Sandbox(network="hosts", hosts=("127.0.0.1:*",), allow_networks=HERE)
            ended = await run_connected(
                [curl, "-sS", f"http://{here}/x"], folder=tmp_path, sandbox=sandbox, backend=backend
            )
            assert ended.output == f"GET /x HTTP/1.1|{here}", ended
            argv = [curl, "-sS", "http://evil.test/"]
            ended = await run_connected(argv, folder=tmp_path, sandbox=sandbox, backend=backend)
            assert "host evil.test is not allowed; allowed: 127.0.0.1:*" in ended.output

    run(main())


def test_a_walled_program_has_no_way_around_the_proxy(tmp_path: Path, backend: SandboxBackend) -> None:
    async def main() -> None:
        async with serving(echo) as (here, asked):
            sandbox = Sandbox(network="all", hosts=("*:*",))
            argv = python(DIRECT, here.rpartition(":")[2])
            ended = await run_connected(argv, folder=tmp_path, sandbox=sandbox, backend=backend)
            assert ended.output == "done\n", ended
            assert asked == []

    run(main())


def test_without_a_network_no_proxy_is_started_or_named(tmp_path: Path, backend: SandboxBackend) -> None:
    async def main() -> None:
        for sandbox in (Sandbox(), Sandbox(network="hosts")):
            plan = plan_wall(sandbox, folder=tmp_path, principal="alice")
            launch = backend.launch(plan, ["/bin/true"])
            for fd in launch.pass_fds:
                os.close(fd)
            assert launch.wall is None or launch.wall.listen_fd == -1
            assert await open_network(launch) is launch and launch.network is None
            assert not {name for name in launch.environment if "proxy" in name.lower()} - set(os.environ)

    run(main())


def test_the_end_of_the_program_ends_its_network(tmp_path: Path, backend: SandboxBackend) -> None:
    """A connection that the program leaves open is closed, and so is its port, though the session's network is kept."""
    code = """
import os, socket, sys
from urllib.parse import urlsplit
proxy = urlsplit(os.environ["HTTP_PROXY"])
one = socket.create_connection((proxy.hostname, proxy.port))
one.sendall(b"CONNECT %s HTTP/1.1\\r\\n\\r\\n" % sys.argv[1].encode())
print(one.recv(100).split()[1].decode(), proxy.port, flush=True)
"""
    probe = """
import socket, sys
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=10)
except ConnectionRefusedError:
    print("refused")
"""

    async def main() -> None:
        closed: list[bytes] = []

        async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                closed.append(await reader.read())
            writer.close()

        server = await asyncio.start_server(wait, "127.0.0.1", 0)
        async with server:
            here = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            sandbox = Sandbox(network="hosts", hosts=("127.0.0.1:*",), allow_networks=HERE)
            ended = await run_connected(
                python(code, here), folder=tmp_path, sandbox=sandbox, backend=backend, session="s"
            )
            status, port = ended.output.split()
            assert status == "200"
            async with asyncio.timeout(30):
                while not closed:
                    await asyncio.sleep(0.01)
            ended = await run_connected(
                python(probe, port), folder=tmp_path, sandbox=sandbox, backend=backend, session="s"
            )
            assert ended.output == "refused\n"

    run(main())


STATE = """
import json, os, resource
with open("/proc/self/environ", encoding="utf-8", errors="backslashreplace", newline="") as file:
    variables = dict(entry.partition("=")[::2] for entry in file.read().split("\\0") if entry)
with open("/proc/self/status") as file:
    lines = dict(line.rstrip().split(":", 1) for line in file)
state = {name: lines[name] for name in ("CapEff", "NoNewPrivs", "Seccomp", "Seccomp_filters")}
state["limits"] = [resource.getrlimit(n) for n in range(16)]
state["niceness"] = os.getpriority(os.PRIO_PROCESS, 0)
state["descriptors"] = sorted(fd for fd in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + fd))
state["processes"] = sorted(pid for pid in os.listdir("/proc") if pid.isdigit())
state["folder"] = os.getcwd()
print(json.dumps([variables, state]))
"""


def test_a_network_changes_nothing_of_a_program_but_the_variables_for_it(
    tmp_path: Path, backend: SandboxBackend
) -> None:
    environment = {
        "PATH": os.defpath,
        "QUOTED": "'\" $x \\\n",
        "EMPTY": "",
        "ODD": "\udcff",
    }  # no locale: none is made up

    async def main() -> None:
        found = []
        for sandbox in (Sandbox(), Sandbox(network="all")):
            ended = await run_connected(
                ["/bin/sh", "-c", 'grep -E "^Sig(Blk|Ign)" /proc/self/status; exec "$@"', "signals", *python(STATE)],
                folder=tmp_path,
                sandbox=sandbox,
                backend=backend,
                environment=environment,
            )
            *signals, told = ended.output.splitlines()
            found.append((*json.loads(told), signals))
        (without, *state), (variables, *same) = found
        proxies = {name: variables.pop(name) for name in (*PROXY_VARIABLES, *DIRECT_VARIABLES)}
        variables.pop("HOLDFAST_HOST", None), without.pop("HOLDFAST_HOST", None)
        assert variables == without and without["QUOTED"] == environment["QUOTED"]
        assert state == same
        assert {proxies[name] for name in DIRECT_VARIABLES} == {""}
        assert len({proxies[name] for name in PROXY_VARIABLES}) == 1

    run(main())


def test_files_are_protected_and_the_network_works(tmp_path: Path, backend: SandboxBackend) -> None:
    kept = tmp_path / "kept"
    kept.write_text("old")

    async def main() -> None:
        async with serving(echo) as (here, _):
            sandbox = Sandbox(network="hosts", hosts=("127.0.0.1:*",), allow_networks=HERE)
            code = f"{PROGRAM}\ntry:\n    open('kept', 'w')\nexcept OSError:\n    print('protected')"
            argv = python(code, f"http://{here}/a")
            ended = await run_connected(argv, folder=tmp_path, sandbox=sandbox, backend=backend, protected=[kept])
            assert ended.output.splitlines() == [f"GET /a HTTP/1.1|{here}", "protected"], ended

    run(main())
    assert kept.read_text() == "old"


def test_only_the_first_process_of_a_wall_holds_the_socket_to_the_proxy(
    tmp_path: Path, backend: SandboxBackend
) -> None:
    """A program that held it could send the proxy sockets without end, and its end would not be the network's."""

    async def main() -> None:
        plan = plan_wall(Sandbox(network="all"), folder=tmp_path, principal="alice", protected=[tmp_path / "kept"])
        launch = await open_network(backend.launch(plan, ["/bin/sh", "-c", "echo $http_proxy; exec sleep 60"]))
        assert launch.network is not None
        name = f"socket:[{os.fstat(launch.pass_fds[-1]).st_ino}]"
        process = await spawned(launch, stdout=PIPE)
        assert process.stdout is not None
        assert (await process.stdout.readline()).startswith(b"http://127.0.0.1:")
        holders = [pid for pid in all_pids() if name in descriptors(pid)]
        assert [pids_inside(pid) for pid in holders] == [1], holders
        assert (await process.kill_tree()).outcome == "gone"
        assert (await launch.network.usage()).lost is False
        launch.network.close()

    (tmp_path / "kept").touch()
    run(main())


def descriptors(pid: int) -> list[str]:
    """What a process has open, as far as this user may know."""
    found = []
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def pids_inside(pid: int) -> int:
    """The number of a process in its own namespace."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])


def test_without_its_proxy_a_program_is_not_started(tmp_path: Path, backend: SandboxBackend) -> None:
    for protected in ((), (tmp_path / "kept",)):
        for path in protected:
            path.touch()
        plan = plan_wall(Sandbox(network="all"), folder=tmp_path, protected=protected)
        launch = backend.launch(plan, ["/bin/sh", "-c", "echo started > started"])
        with contextlib.suppress(OSError):
            ended = process_host().run_blocking(
                launch.argv,
                cwd=launch.directory,
                env=launch.environment,
                wall=launch.wall,
                pass_fds=launch.pass_fds,
            )
            assert ended.returncode != 0, ended
        for fd in launch.pass_fds:
            os.close(fd)
        assert not (tmp_path / "started").exists()


def test_a_network_that_does_not_open_leaves_no_descriptor_open(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(write)
    wrong = NetworkRequest(principal="alice", hosts=("http://a.test",), networks=(), connections=1, bytes_limit=1)
    launch = Launch(argv=("true",), environment={}, directory="/", pass_fds=(read,), network_request=wrong)

    async def main() -> None:
        with pytest.raises(ConfigurationError):
            await open_network(launch)

    run(main())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)


def test_programs_with_other_hosts_share_no_network(tmp_path: Path) -> None:
    """What was allowed for one call is not within reach of another call of the session."""
    backend = networked_backend("linux")

    def key(hosts: Sequence[str] = (), **more: Any) -> bytes:
        sandbox = Sandbox(network="hosts", hosts=("a.test",), **more)
        wall = backend.launch(plan_wall(sandbox, folder=tmp_path, session="s", hosts=hosts), ["/bin/true"]).wall
        assert wall is not None
        return wall.key

    assert key() == key()
    others = (key(("b.test",)), key(allow_networks=HERE), key(network_bytes=1), key(connections=1))
    assert len({key(), *others}) == 1 + len(others)


def test_a_program_cannot_use_the_proxy_of_one_with_more_networks_in_its_session(tmp_path: Path) -> None:
    backend = networked_backend("linux")
    os.mkfifo(tmp_path / "port")
    os.mkfifo(tmp_path / "end")
    wide = "import os; open('port', 'w').write(os.environ['HTTP_PROXY']); open('end').read()"
    narrow = """
import os, sys, urllib.request
for proxy in (sys.argv[2], os.environ['HTTP_PROXY']):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({'http': proxy}))
    try:
        print(opener.open(sys.argv[1], timeout=20).read().decode())
    except OSError as error:
        print(getattr(error, 'code', None) or error.reason.errno)
"""

    async def main() -> None:
        async with serving(echo) as (here, asked), asyncio.TaskGroup() as programs:
            start = functools.partial(run_connected, folder=tmp_path, backend=backend, session="s")
            less = Sandbox(network="hosts", hosts=("127.0.0.1:*",))
            more = dataclasses.replace(less, allow_networks=HERE)
            programs.create_task(start(python(wide), sandbox=more, output=tmp_path / "of-the-other"))
            proxy = await asyncio.to_thread((tmp_path / "port").read_text)
            ended = await start(python(narrow, f"http://{here}/", proxy), sandbox=less)
            await asyncio.to_thread((tmp_path / "end").write_text, "")
            assert ended.output.split() == [str(errno.ECONNREFUSED), "403"]
            assert not asked

    run(main())


def test_landlock_alone_refuses_a_network(tmp_path: Path) -> None:
    backend = LinuxBackend(("landlock",))
    if (reason := backend.probe()) is not None:
        pytest.skip(f"no Landlock on this machine: {reason}")
    for sandbox in (Sandbox(network="all"), Sandbox(network="hosts", hosts=("example.org",))):
        with pytest.raises(NotSupported, match="needs namespaces") as refused:
            backend.launch(plan_wall(sandbox, folder=tmp_path), ["/bin/true"])
        assert "allow user namespaces" in str(refused.value.hint)


def test_a_sandbox_that_contradicts_itself_is_refused() -> None:
    for values in (
        {"hosts": ("a.test",)},
        {"network": "hosts", "hosts": ("http://a.test",)},
        {"network": "hosts", "hosts": "a.test"},
        {"allow_networks": ("10.0.0.1/8",)},
        {"network": "some"},
        {"network_bytes": 0},
        {"connections": -1},
    ):
        with pytest.raises(ConfigurationError):
            Sandbox(**values)


def test_the_description_names_the_hosts() -> None:
    assert (
        "Network access only to a.test, *.b.test." in Sandbox(network="hosts", hosts=("a.test", "*.b.test")).describe()
    )
    assert "public hosts" in Sandbox(network="all").describe()
