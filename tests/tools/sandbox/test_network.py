"""The network of walled programs: through the proxy to allowed hosts, and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigurationError, NotSupported
from holdfast.runtime.process_host import TreeResult, process_host
from holdfast.tools.sandbox.backends.linux import LinuxBackend
from holdfast.tools.sandbox.network import open_network
from holdfast.tools.sandbox.plan import plan_wall
from holdfast.tools.sandbox.proxy.link import NetworkUsage
from holdfast.tools.sandbox.sandbox import Sandbox
from tests.tools.sandbox.proxy.gates import run
from tests.tools.web.test_fetch import Request, serving

HERE = ("127.0.0.1",)


def namespaces_here() -> LinuxBackend:
    """A backend with namespaces, or skip."""
    backend = LinuxBackend()
    if backend.probe() is not None or "namespaces" not in backend.layers:
        pytest.skip(f"no walls with namespaces on this machine: {backend.probe() or backend.layers}")
    return backend


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a walled program ended, and what it used of the network."""

    output: str
    returncode: int
    tree: TreeResult
    usage: NetworkUsage


async def run_connected(
    argv: Sequence[str],
    *,
    folder: Path,
    sandbox: Sandbox,
    backend: LinuxBackend,
    session: str = "",
    output: Path | None = None,
) -> Ended:
    """Run a program behind a wall with the network of its sandbox, as the tools do."""
    plan = plan_wall(sandbox, folder=folder, principal="alice", session=session)
    launch = await open_network(backend.launch(plan, argv))
    output = output or folder / "output"
    try:
        with output.open("wb") as file:
            process = await process_host().spawn(
                launch.argv,
                stdout=file,
                stderr=file,
                cwd=launch.directory,
                env=launch.environment,
                wall=launch.wall,
                pass_fds=launch.pass_fds,
            )
    finally:
        for fd in launch.pass_fds:
            os.close(fd)
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
def test_a_walled_program_reaches_its_hosts_through_the_proxy_only(tmp_path: Path, network: str) -> None:
    backend = namespaces_here()

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


def test_curl_goes_through_the_proxy_by_itself(tmp_path: Path) -> None:
    backend = namespaces_here()
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


def test_a_walled_program_has_no_way_around_the_proxy(tmp_path: Path) -> None:
    backend = namespaces_here()

    async def main() -> None:
        async with serving(echo) as (here, asked):
            sandbox = Sandbox(network="all", hosts=("*:*",))
            argv = python(DIRECT, here.rpartition(":")[2])
            ended = await run_connected(argv, folder=tmp_path, sandbox=sandbox, backend=backend)
            assert ended.output == "done\n", ended
            assert asked == []

    run(main())


def test_without_a_network_no_proxy_is_started_or_named(tmp_path: Path) -> None:
    backend = namespaces_here()

    async def main() -> None:
        for sandbox in (Sandbox(), Sandbox(network="hosts")):
            plan = plan_wall(sandbox, folder=tmp_path, principal="alice")
            launch = backend.launch(plan, ["/bin/true"])
            assert launch.wall is not None and launch.wall.listen_fd == -1
            assert await open_network(launch) is launch and launch.network is None
            assert not {name for name in launch.environment if "proxy" in name.lower()} - set(os.environ)

    run(main())


def test_the_end_of_the_program_ends_its_network(tmp_path: Path) -> None:
    """A connection that the program leaves open is closed, and so is its port, though the session's network is kept."""
    backend = namespaces_here()
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


def test_programs_with_other_hosts_share_no_network(tmp_path: Path) -> None:
    """What was allowed for one call is not within reach of another call of the session."""
    backend = namespaces_here()

    def key(hosts: Sequence[str] = (), **more: Any) -> bytes:
        sandbox = Sandbox(network="hosts", hosts=("a.test",), **more)
        wall = backend.launch(plan_wall(sandbox, folder=tmp_path, session="s", hosts=hosts), ["/bin/true"]).wall
        assert wall is not None
        return wall.key

    assert key() == key()
    others = (key(("b.test",)), key(allow_networks=HERE), key(network_bytes=1), key(connections=1))
    assert len({key(), *others}) == 1 + len(others)


def test_a_program_cannot_use_the_proxy_of_one_with_more_networks_in_its_session(tmp_path: Path) -> None:
    backend = namespaces_here()
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
