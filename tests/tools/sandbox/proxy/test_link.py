"""The proxy's process: started when needed, restarted when it died, blind to the server, and gone with the host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from holdfast import Host, Settings
from holdfast.errors import ConfigurationError
from holdfast.runtime.process_host import process_host
from holdfast.tools.sandbox.proxy.budgets import NetworkBudgets
from holdfast.tools.sandbox.proxy.link import (
    NetworkAccess,
    NetworkProxy,
    NetworkUsage,
    network_proxy,
)
from tests.tools.sandbox.proxy.gates import listening, run, talk
from tests.tools.sandbox.proxy.test_gate import echo, get, opened, until
from tests.tools.web.test_fetch import Request, serving

if not sys.platform.startswith("linux"):
    pytest.skip("the proxy's process needs Linux", allow_module_level=True)

HERE = ["127.0.0.0/8"]


@contextlib.asynccontextmanager
async def proxied() -> AsyncIterator[NetworkProxy]:
    """A proxy of the test's own, which ends with the test."""
    proxy = NetworkProxy(process_host())
    try:
        yield proxy
    finally:
        link = proxy.link
        proxy.close_if_unused()
        if link is not None and link.process is not None:
            assert (await link.process.kill_tree()).outcome == "gone"
            await until(lambda: link.is_closed)


def wall(access: NetworkAccess) -> tuple[int, socket.socket]:
    """Do as a wall does: listen, send the listening socket, keep the other socket open; the port and that socket."""
    kept = socket.socket(fileno=access.take_fd())
    with listening() as listener:
        socket.send_fds(kept, [b"x"], [listener.fileno()])
        return listener.getsockname()[1], kept


async def ended(kept: socket.socket) -> bool:
    """Wait until the proxy has closed its end of the program's socket."""
    kept.setblocking(False)
    return await asyncio.get_running_loop().sock_recv(kept, 1) == b""


def pid_of(proxy: NetworkProxy) -> int:
    assert proxy.link is not None and proxy.link.process is not None
    return proxy.link.process.pid


def test_a_program_gets_through_to_its_hosts_and_is_accounted() -> None:
    async def main() -> None:
        async with serving(echo) as (here, asked), proxied() as proxy:
            access = await proxy.open("alice", ["127.0.0.1:*"], networks=HERE)
            port, kept = wall(access)
            assert b" 200 OK" in await talk(port, get(f"http://{here}/"))
            assert b"host evil.test is not allowed" in await talk(port, get("http://evil.test/"))
            usage = await access.usage()
            assert usage.refused == (("evil.test", "host evil.test is not allowed; allowed: 127.0.0.1:*"),)
            assert usage.describe() == "network: host evil.test is not allowed; allowed: 127.0.0.1:*"
            assert usage.connections == 2 and usage.sent_bytes and usage.received_bytes and not usage.lost
            access.close()
            access.close()
            assert await ended(kept)
            with pytest.raises(ConnectionError):
                await talk(port, b"x")
            assert await access.usage() == NetworkUsage()
            kept.close()
            assert len(asked) == 1

    run(main())


def test_the_end_of_the_programs_socket_closes_its_listener_and_connections() -> None:
    async def main() -> None:
        async def answer(request: Request) -> None:
            await request.closed()

        async with serving(answer) as (here, _), serving(echo) as (there, _), proxied() as proxy:
            access = await proxy.open("alice", ["127.0.0.1:*"], networks=HERE)
            other = await proxy.open("alice", ["127.0.0.1:*"], networks=HERE)
            port, kept = wall(access)
            other_port, other_kept = wall(other)
            reader, writer = await opened(port, f"CONNECT {here} HTTP/1.1\r\n\r\n".encode())
            await reader.readuntil(b"\r\n\r\n")
            kept.close()  # the program's wall has ended
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            with pytest.raises(ConnectionError):
                await talk(port, b"x")
            writer.close()
            assert b" 200 OK" in await talk(other_port, get(f"http://{there}/"))
            assert (await access.usage()).connections == 1
            access.close()
            other.close()
            other_kept.close()

    run(main())


def test_only_a_listening_socket_is_taken() -> None:
    async def main() -> None:
        async with serving(echo) as (here, _), proxied() as proxy:
            with socket.socket() as plain, open("/dev/null") as file, socket.socket(socket.AF_UNIX) as unix:
                for fds in ([plain.fileno()], [file.fileno()], [unix.fileno()], []):
                    access = await proxy.open("alice", ["*"])
                    sender = socket.socket(fileno=access.take_fd())
                    socket.send_fds(sender, [b"x"], fds)
                    assert await ended(sender)
                    sender.close()
                    access.close()
            access = await proxy.open("alice", ["127.0.0.1:*"], networks=HERE)
            port, kept = wall(access)
            assert b" 200 OK" in await talk(port, get(f"http://{here}/"))
            access.close()
            kept.close()

    run(main())


def test_a_killed_proxy_refuses_connections_until_the_network_is_opened_again() -> None:
    async def main() -> None:
        async with serving(echo) as (here, _), proxied() as proxy:
            access = await proxy.open("alice", ["127.0.0.1:*"], networks=HERE)
            port, kept = wall(access)
            assert b" 200 OK" in await talk(port, get(f"http://{here}/"))
            first = pid_of(proxy)
            os.kill(first, signal.SIGKILL)
            usage = await access.usage()
            assert usage.lost and "start the program again" in usage.describe()
            link = proxy.link
            assert link is not None and link.process is not None
            await link.process.kill_tree()
            with pytest.raises(ConnectionError):
                await talk(port, get(f"http://{here}/"))
            again = await proxy.open("alice", ["127.0.0.1:*"], networks=HERE)
            assert pid_of(proxy) != first
            new_port, new_kept = wall(again)
            assert b" 200 OK" in await talk(new_port, get(f"http://{here}/"))
            assert (await access.usage()).lost
            assert not (await again.usage()).lost
            access.close()
            again.close()
            kept.close()
            new_kept.close()

    run(main())


def test_many_programs_at_once_start_one_process_and_end_with_the_host() -> None:
    async def main() -> None:
        async with proxied() as proxy:
            opening = [asyncio.create_task(proxy.open("alice", ["*"])) for _ in range(20)]
            accesses = [await one for one in opening]
            assert len({id(proxy.link)}) == 1
            pid = pid_of(proxy)
            process_host().close_idle()  # as a host does at its end: another host's programs use it
            assert psutil.pid_exists(pid) and not (await accesses[0].usage()).lost
            for one in accesses:
                one.close()
            process = psutil.Process(pid)
            process_host().close_idle()
            await until(lambda: not process.is_running())

    run(main())


def test_a_cancelled_start_leaves_nothing_and_the_next_one_works() -> None:
    async def main() -> None:
        async with proxied() as proxy:
            first = asyncio.create_task(proxy.open("alice", ["*"]))
            second = asyncio.create_task(proxy.open("bob", ["*"]))
            await asyncio.sleep(0)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            access = await second
            assert not (await access.usage()).lost
            access.close()

    run(main())


def test_the_process_has_nothing_of_the_server() -> None:
    async def main() -> None:
        os.environ["SOME_API_KEY"] = "secret-of-the-server"
        listener = listening()
        os.set_inheritable(listener.fileno(), True)
        try:
            async with proxied() as proxy:
                access = await proxy.open("alice", ["*"])
                await access.usage()
                pid = pid_of(proxy)
                assert Path(f"/proc/{pid}/environ").stat().st_uid == 0  # undumpable: its files belong to root
                if os.geteuid() == 0:
                    environment = Path(f"/proc/{pid}/environ").read_bytes()
                    names = {one.partition(b"=")[0] for one in environment.split(b"\0") if one}
                    assert names <= {b"PATH", b"LANG", b"HOLDFAST_HOST"} and b"secret" not in environment
                    opened_there = [os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir()]
                    assert f"socket:[{os.fstat(listener.fileno()).st_ino}]" not in opened_there
                else:
                    with pytest.raises(PermissionError):
                        Path(f"/proc/{pid}/environ").read_bytes()
                heavy = {"httpx2", "msgspec", "starlette", "pydantic", "holdfast.host", "holdfast.agents.run"}
                assert heavy & imported_by_the_proxy() == set()
                access.close()
        finally:
            listener.close()
            del os.environ["SOME_API_KEY"]

    run(main())


def imported_by_the_proxy() -> set[str]:
    code = "import sys, holdfast.tools.sandbox.proxy.main; print(' '.join(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_the_budget_of_a_principal_holds_for_all_its_programs() -> None:
    async def main() -> None:
        async def answer(request: Request) -> None:
            await request.answer(b"x" * 60_000)

        async with serving(answer) as (here, _), proxied() as proxy:
            proxy.principal_bytes = 100_000
            accesses = [
                await proxy.open(principal, ["127.0.0.1:*"], networks=HERE) for principal in ("alice", "alice", "bob")
            ]
            walls = [wall(access) for access in accesses]
            (one, _), (two, _), (bobs, _) = walls
            assert b" 200 OK" in await talk(one, get(f"http://{here}/"))
            await talk(two, get(f"http://{here}/"))
            assert b"100,000 bytes of network this hour" in await talk(one, get(f"http://{here}/"))
            assert b" 200 OK" in await talk(bobs, get(f"http://{here}/"))
            for access, (_, kept) in zip(accesses, walls, strict=True):
                access.close()
                kept.close()

    run(main())


def test_invalid_hosts_and_networks_are_refused_before_anything_starts() -> None:
    async def main() -> None:
        proxy = NetworkProxy(process_host())
        with pytest.raises(ConfigurationError):
            await proxy.open("alice", ["http://x"])
        with pytest.raises(ConfigurationError):
            await proxy.open("alice", ["x"], networks=["10.0.0.1/8"])
        assert proxy.link is None

    run(main())


def test_a_proxy_that_does_not_answer_holds_nobody_up_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with proxied() as proxy:
            access = await proxy.open("alice", ["*"])
            await access.usage()
            pid = pid_of(proxy)
            os.kill(pid, signal.SIGSTOP)
            monkeypatch.setattr("holdfast.tools.sandbox.proxy.link._ANSWER_S", 0.2)
            assert await access.usage() == NetworkUsage()
            access.close()
            os.kill(pid, signal.SIGCONT)

    run(main())


def test_the_settings_limit_each_principal_and_a_host_that_closes_ends_an_unused_proxy() -> None:
    async def main() -> None:
        settings = Settings(principal_program_connections=7, principal_program_traffic_bytes=9)
        async with Host(lambda run: None, store="memory://", settings=settings):
            proxy = network_proxy()
            assert (proxy.principal_connections, proxy.principal_bytes) == (7, 9)
            defaults = NetworkBudgets()
            proxy.principal_connections = defaults.principal_connections
            proxy.principal_bytes = defaults.principal_bytes
            access = await network_proxy().open("alice", ["*"])
            pid = pid_of(network_proxy())
            access.close()
            process = psutil.Process(pid)
        await until(lambda: not process.is_running())

    run(main())


def test_a_usage_of_many_refusals_is_described_briefly() -> None:
    usage = NetworkUsage(refused=tuple((f"h{number}", f"host h{number} is not allowed") for number in range(9)))
    assert usage.describe().count("is not allowed") == 5 and usage.describe().endswith("and 4 more")
    assert NetworkUsage().describe() == ""


NAMESPACE = """
    import os, socket, sys, urllib.request
    import ctypes, fcntl, struct
    control = socket.socket(fileno=int(sys.argv[1]))
    with socket.socket() as one:  # bring the loopback device up
        request = struct.pack("16sh", b"lo", 0x1 | 0x40)
        fcntl.ioctl(one, 0x8914, request)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    socket.send_fds(control, [b"x"], [listener.fileno()])
    proxy = "http://127.0.0.1:%d" % listener.getsockname()[1]
    listener.close()
    url = sys.argv[2]
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10)
    except OSError as error:
        print("directly:", type(error).__name__)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({"http": proxy}))
    print(opener.open(url, timeout=20).read().decode())
    try:
        opener.open(sys.argv[3], timeout=20)
    except OSError as error:
        print(error.code, error.read().decode())
"""


def test_a_listening_socket_comes_from_another_network_namespace() -> None:
    options = ["--net"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--net"]
    probe = subprocess.run(["unshare", *options, "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"no network namespace on this machine: {probe.stderr.decode().strip()}")

    async def main() -> None:
        async with serving(echo) as (here, asked), proxied() as proxy:
            access = await proxy.open("alice", ["127.0.0.1:*"], networks=["127.0.0.1"])
            fd = access.take_fd()
            program = await asyncio.create_subprocess_exec(
                "unshare",
                *options,
                sys.executable,
                "-c",
                textwrap.dedent(NAMESPACE),
                str(fd),
                f"http://{here}/",
                "http://127.0.0.2/",
                pass_fds=[fd],
                stdout=subprocess.PIPE,
            )
            os.close(fd)
            output, _ = await program.communicate()
            lines = output.decode().splitlines()
            assert lines[0] == "directly: URLError"
            assert lines[1] == f"GET / HTTP/1.1|{here}"
            assert lines[2].startswith("403 Request blocked: host 127.0.0.2 is not allowed")
            assert len(asked) == 1
            access.close()

    run(main())
