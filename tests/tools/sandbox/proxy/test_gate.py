"""The gate of one program: only checked targets, by every protocol, within bounds, and nothing outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from holdfast.tools import addresses as tool_addresses
from holdfast.tools.addresses import AddressRules
from holdfast.tools.sandbox.proxy import gate as gates
from holdfast.tools.sandbox.proxy.budgets import NetworkBudgets, PrincipalTraffic
from tests.tools.sandbox.proxy.gates import Names, gate_for, run, talk
from tests.tools.web.test_fetch import NOT_PUBLIC, REFUSED, Request, serving


async def echo(request: Request) -> None:
    """Answer with the request's line and Host, and close."""
    await request.answer(f"{request.line}|{request.headers['host']}".encode())


def get(url: str, *fields: str) -> bytes:
    lines = [f"GET {url} HTTP/1.1", f"Host: {urlsplit(url).netloc}", *fields, "", ""]
    return "\r\n".join(lines).encode()


def socks_request(host: str | bytes, port: int, *, command: int = 1) -> bytes:
    if isinstance(host, bytes):
        address = bytes((1 if len(host) == 4 else 4,)) + host
    else:
        name = host.encode("latin-1")
        address = bytes((3, len(name))) + name
    return b"\x05\x01\x00" + bytes((5, command, 0)) + address + struct.pack("!H", port)


def port_of(here: str) -> int:
    return int(here.rpartition(":")[2])


NAMES = {"good_test": ["127.0.0.1"]}


def test_all_three_protocols_reach_an_allowed_host_on_one_port() -> None:
    async def main() -> None:
        names = Names(**NAMES)
        async with serving(echo) as (here, asked), gate_for(["good.test:*"], names=names) as (gate, port):
            target = f"good.test:{port_of(here)}"
            plain = await talk(port, get(f"http://{target}/a?b"))
            assert plain.endswith(f"GET /a?b HTTP/1.1|{target}".encode())
            assert b"\r\nConnection: close\r\n" in plain
            tunnel = await talk(
                port, f"CONNECT {target} HTTP/1.1\r\n\r\n".encode(), b"GET /c HTTP/1.1\r\nhost: x\r\n\r\n"
            )
            assert tunnel.startswith(b"HTTP/1.1 200 ") and tunnel.endswith(b"GET /c HTTP/1.1|x")
            socks = await talk(port, socks_request("good.test", port_of(here)), b"GET /d HTTP/1.1\r\nhost: y\r\n\r\n")
            assert socks[:4] == b"\x05\x00\x05\x00" and socks.endswith(b"GET /d HTTP/1.1|y")
            assert len(asked) == 3 and names.asked == ["good.test"] * 3
            assert gate.traffic.connections == 3 and not gate.refused
            assert gate.traffic.sent_bytes > 100 and gate.traffic.received_bytes > 100

    run(main())


def test_a_host_that_is_not_allowed_is_neither_resolved_nor_reached() -> None:
    async def main() -> None:
        names = Names(evil_test=["127.0.0.1"], **NAMES)
        async with serving(echo) as (here, asked), gate_for(["good.test:*"], names=names) as (gate, port):
            evil = f"evil.test:{port_of(here)}"
            plain = await talk(port, get(f"http://{evil}/secret?key=1"))
            assert plain.startswith(b"HTTP/1.1 403 Forbidden\r\n")
            assert plain.endswith(b"Request blocked: host evil.test is not allowed; allowed: good.test:*\n")
            assert (await talk(port, f"CONNECT {evil} HTTP/1.1\r\n\r\n".encode())).startswith(b"HTTP/1.1 403 ")
            assert asked == [] and names.asked == []
            assert dict(gate.refused) == {"evil.test": "host evil.test is not allowed; allowed: good.test:*"}

    run(main())


def test_socks_refusals_have_their_codes() -> None:
    async def main() -> None:
        names = Names(**NAMES)
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            free = closed.getsockname()[1]
            async with gate_for(["good.test:*"], names=names) as (_, port):
                for request, code in (
                    (socks_request("evil.test", 80), 2),
                    (socks_request("good.test", 0), 2),
                    (socks_request("good.test", free), 4),
                    (socks_request("good.test", 80, command=2), 7),
                    (socks_request("good.test", 80, command=3), 7),
                    (socks_request(socket.inet_aton("127.0.0.1"), 80), 2),
                    (socks_request(socket.inet_pton(socket.AF_INET6, "::1"), 80), 2),
                    (socks_request("good.test\x00.evil", 80), 2),
                    (socks_request("g\xe4", 80), 2),
                    (b"\x05\x01\x00\x05\x01\x00\x09", 8),
                ):
                    answer = await talk(port, request)
                    assert answer[:2] == b"\x05\x00" and answer[2:4] == bytes((5, code)), (request, answer)
                assert await talk(port, b"\x05\x01\x02") == b"\x05\xff"  # a name and password only
                assert await talk(port, b"\x05\x02", end=True) == b""
                assert (await talk(port, b"\x04\x01\x00\x50\x7f\x00\x00\x01\x00", end=True)) == b""

    run(main())


def test_addresses_that_are_not_public_are_refused_however_they_are_spelled() -> None:
    """With every host allowed, by numbers, names and redirects: none leads to this machine or its network."""

    async def main() -> None:
        names = Names(inside_test=["10.0.0.1"], meta_test=["169.254.169.254"], both_test=["::1", "127.0.0.2"])
        async with serving(echo) as (here, asked), gate_for(["*:*"], networks=[], names=names) as (gate, port):
            hosts = [one for one in NOT_PUBLIC.split() if one != "nonsense"] + [
                "2130706433",
                "0x7f000001",
                "0177.0.0.1",
            ]
            hosts += ["127.0.0.1.", "localhost", "inside.test", "meta.test", "both.test", "0", "0x7f.1"]
            for host in hosts:
                shown = f"[{host}]" if ":" in host else host
                answer = await talk(port, f"CONNECT {shown}:{port_of(here)} HTTP/1.1\r\n\r\n".encode())
                assert answer.startswith(b"HTTP/1.1 403 "), (host, answer)
                answer = await talk(port, socks_request(host, port_of(here)))
                assert answer[:4] == b"\x05\x00\x05\x02", (host, answer)
            assert len(gate.refused) <= 32
        async with serving(echo) as (here, asked), gate_for(["*"], networks=[], names=names) as (_, port):
            for url in REFUSED:
                request = f"GET {url} HTTP/1.1\r\nHost: {urlsplit(url).netloc if '[1' not in url else ''}\r\n\r\n"
                answer = await talk(port, request.encode())
                assert answer.startswith(b"HTTP/1.1 40"), (url, answer)
            assert asked == []

    run(main())


def test_the_machines_own_public_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_addresses, "_is_public", lambda address: True)
    rules = AddressRules()
    assert rules.permits("127.0.0.1")
    with pytest.raises(Exception, match="not on the public internet"):
        rules.permitted("here.test", ["127.0.0.1"])
    assert AddressRules(["127.0.0.1"]).permitted("here.test", ["127.0.0.1"]) == ["127.0.0.1"]


def test_a_name_is_resolved_once_and_only_the_checked_address_is_connected() -> None:
    async def main() -> None:
        class Rebinding(Names):
            def __call__(self, host: str, port: int) -> list[str]:
                self.asked.append(host)
                return ["127.0.0.1"] if len(self.asked) % 2 else ["127.0.0.2"]

        names = Rebinding()
        async with serving(echo) as (here, asked), gate_for(["*:*"], names=names) as (_, port):
            url = f"http://rebind.test:{port_of(here)}/"
            assert b" 200 OK" in await talk(port, get(url))
            assert b"resolves to 127.0.0.2, which is not" in await talk(port, get(url))
            assert b" 200 OK" in await talk(port, get(url))
            assert names.asked == ["rebind.test"] * 3 and len(asked) == 2

    run(main())


def test_of_several_addresses_only_allowed_ones_are_tried() -> None:
    async def main() -> None:
        names = Names(mixed_test=["127.0.0.2", "::1", "127.0.0.1"])
        async with serving(echo) as (here, _), serving(echo, host="127.0.0.2") as (_, hidden):
            async with gate_for(["*:*"], names=names) as (_, port):
                assert b" 200 OK" in await talk(port, get(f"http://mixed.test:{port_of(here)}/"))
                assert hidden == []

    run(main())


def test_a_redirect_is_a_new_request_and_checked_again() -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")

    async def main() -> None:
        names = Names(evil_test=["127.0.0.1"], **NAMES)

        async def answer(request: Request) -> None:
            await request.answer(status="302 Found", location=f"http://evil.test:{target}/next")

        async with serving(answer) as (here, asked), gate_for(["good.test:*"], names=names) as (gate, port):
            target = port_of(here)
            ended = await asyncio.to_thread(
                subprocess.run,
                [curl, "-sSL", "--noproxy", "", "-x", f"http://127.0.0.1:{port}", f"http://good.test:{target}/"],
                capture_output=True,
                check=False,
            )
            assert ended.stdout.startswith(b"Request blocked: host evil.test is not allowed")
            assert len(asked) == 1 and list(gate.refused) == ["evil.test"]

    run(main())


CLIENTS = {
    "urllib": "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=20).read().decode())",
    "httpx2": "import sys, httpx2; print(httpx2.get(sys.argv[1], timeout=20).text)",
    "http.client": "import sys, http.client, os; from urllib.parse import urlsplit\n"
    "proxy, url = urlsplit(os.environ['HTTP_PROXY']), urlsplit(sys.argv[1])\n"
    "c = http.client.HTTPConnection(proxy.hostname, proxy.port); c.set_tunnel(url.hostname, url.port)\n"
    "c.request('GET', url.path); print(c.getresponse().read().decode())",
}


@pytest.mark.parametrize("client", [*CLIENTS, "curl", "curl --proxytunnel", "curl --socks5-hostname"])
def test_real_clients_get_through_and_are_refused(client: str) -> None:
    if client.startswith("curl") and shutil.which("curl") is None:
        pytest.skip("curl is not installed")

    async def main() -> None:
        names = Names(evil_test=["127.0.0.1"], **NAMES)
        async with serving(echo) as (here, asked), gate_for(["good.test:*"], names=names) as (gate, port):
            proxy = f"http://127.0.0.1:{port}"
            variables = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY"), proxy) | {"NO_PROXY": ""}

            async def ask(name: str) -> tuple[int, str]:
                url = f"http://{name}:{port_of(here)}/x"
                match client.split():
                    case ["curl", "--socks5-hostname"]:
                        argv = ["curl", "-sS", "--noproxy", "", "--socks5-hostname", f"127.0.0.1:{port}", url]
                    case ["curl", *options]:
                        argv = ["curl", "-sSf", *options, "-x", proxy, "--noproxy", "", url]
                    case _:
                        argv = [sys.executable, "-c", CLIENTS[client], url]
                program = await asyncio.create_subprocess_exec(
                    *argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | variables
                )
                output, _ = await program.communicate()
                assert program.returncode is not None
                return program.returncode, output.decode().strip()

            code, text = await ask("good.test")
            assert (code, text) == (0, f"GET /x HTTP/1.1|good.test:{port_of(here)}")
            code, text = await ask("evil.test")
            assert code != 0 or "Request blocked" in text
            assert len(asked) == 1 and list(gate.refused) == ["evil.test"]

    run(main())


def test_bodies_are_passed_on_in_both_framings_and_nothing_after_them() -> None:
    async def main() -> None:
        bodies: list[bytes] = []

        async def answer(request: Request) -> None:
            if "content-length" in request.headers:
                bodies.append(await request.reader.readexactly(int(request.headers["content-length"])))
            else:
                bodies.append(await request.reader.readuntil(b"0\r\n\r\n"))
            bodies.append(await request.reader.read(1000) if request.path == "/rest" else b"")
            await request.answer(b"done")

        async with serving(answer) as (here, asked), gate_for(["127.0.0.1:*"]) as (_, port):
            post = f"POST http://{here}/ HTTP/1.1\r\nHost: {here}\r\n"
            second = get(f"http://{here}/second")
            big = b"x" * 500_000
            for framing, body in (
                (f"Content-Length: {len(big)}\r\n\r\n", big),
                ("Content-Length: 5\r\n\r\n", b"hello"),
                ("Transfer-Encoding: chunked\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n"),
            ):
                answered = await talk(port, (post + framing).encode() + body, second)
                assert answered.count(b"HTTP/1.1 200 OK") == 1 and answered.endswith(b"done"), answered[:200]
            assert bodies[::2] == [big, b"hello", b"5\r\nhello\r\n0\r\n\r\n"]
            assert [request.path for request in asked] == ["/"] * 3

    run(main())


def test_a_second_request_on_the_connection_reaches_nobody() -> None:
    """Neither a pipelined request, nor one hidden in a body that two readers would end at different places."""

    async def main() -> None:
        async with serving(echo) as (here, asked), gate_for(["127.0.0.1:*"]) as (_, port):
            await talk(port, get(f"http://{here}/1") + get(f"http://{here}/2"))
            assert [request.path for request in asked] == ["/1"]
            for fields in (
                "Content-Length: 4\r\nTransfer-Encoding: chunked",
                "Content-Length: 4\r\nContent-Length: 40",
            ):
                smuggled = (
                    f"POST http://{here}/ HTTP/1.1\r\nHost: {here}\r\n{fields}\r\n\r\n0\r\n\r\nGET /3 HTTP/1.1\r\n\r\n"
                )
                assert (await talk(port, smuggled.encode())).startswith(b"HTTP/1.1 400 ")
            assert len(asked) == 1

    run(main())


@pytest.mark.parametrize(
    ("answered", "status"),
    [
        (b"", b"502"),
        (b"SSH-2.0-nothing\r\n\r\n", b"502"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", b"502"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", b"502"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokay", b"100"),
    ],
)
def test_responses_that_are_not_http_are_not_passed_on(answered: bytes, status: bytes) -> None:
    async def main() -> None:
        async def answer(request: Request) -> None:
            await request.write(answered)

        async with serving(answer) as (here, _), gate_for(["127.0.0.1:*"]) as (_, port):
            got = await talk(port, get(f"http://{here}/"))
            assert got.startswith(b"HTTP/1.1 " + status), got[:100]
            if status == b"100":
                assert got.endswith(b"\r\n\r\nok")

    run(main())


def test_an_unreachable_host_is_told_apart_from_a_refused_one() -> None:
    async def main() -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            async with gate_for(["*:*"]) as (gate, port):
                got = await talk(port, get(f"http://127.0.0.1:{closed.getsockname()[1]}/"))
                assert got.startswith(b"HTTP/1.1 502 ") and b"127.0.0.1 is unreachable" in got
                assert list(gate.refused.values()) == ["127.0.0.1 is unreachable: Connection refused"]
                assert b"unknown host 'no.test'" in await talk(port, get("http://no.test/"))

    run(main())


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, which something on this loop will bring about."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def opened(port: int, first: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(first)
    return reader, writer


def with_tunnel(
    work: Callable[[gates.Gate, int, str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    answer: Callable[[Request], Awaitable[None]],
    *,
    budgets: NetworkBudgets | None = None,
    deadlines: gates.Deadlines = gates.DEADLINES,
) -> None:
    """Run a scenario with a tunnel that is open to a server."""

    async def main() -> None:
        async with (
            serving(answer) as (here, _),
            gate_for(["127.0.0.1:*"], budgets=budgets, deadlines=deadlines) as (gate, port),
        ):
            reader, writer = await opened(port, f"CONNECT {here} HTTP/1.1\r\n\r\n".encode())
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            await work(gate, port, here, reader, writer)
            writer.close()

    run(main())


def test_an_end_in_one_direction_leaves_the_other_open() -> None:
    async def answer(request: Request) -> None:
        rest = await request.reader.read()
        await request.write(b"after the end: " + rest)

    async def work(
        gate: gates.Gate, port: int, here: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(b"GET / HTTP/1.1\r\n\r\nthe rest")
        writer.write_eof()
        assert await reader.read() == b"after the end: the rest"

    with_tunnel(work, answer)


def test_a_slow_reader_slows_the_sender_and_costs_no_memory() -> None:
    sent = 0

    async def answer(request: Request) -> None:
        nonlocal sent
        with contextlib.suppress(ConnectionError):
            while True:
                await request.write(b"x" * 65536)
                sent += 65536

    async def work(
        gate: gates.Gate, port: int, here: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        before = -1
        while sent != before:  # until the sender makes no progress
            before = sent
            await asyncio.sleep(0.3)
        assert 0 < sent < 40_000_000  # what the kernel's buffers hold
        assert gate.traffic.received_bytes <= sent

    with_tunnel(work, answer)


def test_a_sender_that_is_always_ready_does_not_keep_others_waiting() -> None:
    async def main() -> None:
        async def answer(request: Request) -> None:
            with contextlib.suppress(ConnectionError):
                if request.path == "/small":
                    await request.answer(b"small")
                else:
                    while True:
                        await request.write(b"x" * 65536)

        async with serving(answer) as (here, _), gate_for(["127.0.0.1:*"]) as (_, port):

            async def devour() -> None:
                reader, writer = await opened(port, get(f"http://{here}/endless"))
                try:
                    while await reader.read(1 << 16):
                        pass
                finally:
                    writer.close()

            greedy = [asyncio.create_task(devour()) for _ in range(8)]
            async with asyncio.timeout(20):
                for _ in range(5):
                    assert (await talk(port, get(f"http://{here}/small"))).endswith(b"small")
            for task in greedy:
                task.cancel()
            await asyncio.wait(greedy)

    run(main())


@pytest.mark.parametrize("first", [b"", b"GET http://127.0.0.1/ HTTP/1.1\r\n", b"\x05\x01\x00\x05"])
def test_a_head_that_never_ends_has_a_deadline(first: bytes) -> None:
    async def main() -> None:
        async with gate_for(["127.0.0.1:*"], deadlines=gates.Deadlines(head_s=0.2)) as (gate, port):
            got = await talk(port, first)
            assert got in (b"", b"\x05\x00") or got.startswith(b"HTTP/1.1 408 ")
            await until(lambda: gate.traffic.open == 0)

    run(main())


def test_a_head_that_is_too_long_is_refused() -> None:
    async def main() -> None:
        async with gate_for(["127.0.0.1:*"]) as (_, port):
            assert (await talk(port, get("http://127.0.0.1/", "x: " + "y" * 70_000))).startswith(b"HTTP/1.1 431 ")
            assert (await talk(port, b"A" * 200_000)).startswith(b"HTTP/1.1 431 ")

    run(main())


def test_an_idle_connection_is_closed() -> None:
    async def answer(request: Request) -> None:
        await request.closed()

    async def work(
        gate: gates.Gate, port: int, here: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        await until(lambda: gate.traffic.open == 0)

    with_tunnel(work, answer, deadlines=gates.Deadlines(idle_s=0.3))


def test_a_name_server_that_does_not_answer_holds_up_only_its_principal() -> None:
    go = threading.Event()

    async def main() -> None:
        class Stuck(Names):
            def __call__(self, host: str, port: int) -> list[str]:
                found = super().__call__(host, port)
                if host == "stuck.test":
                    go.wait(30)
                return found

        names = Stuck(stuck_test=["127.0.0.1"], **NAMES)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))  # as in the proxy's process
        async with (
            serving(echo) as (here, _),
            gate_for(["*:*"], names=names, deadlines=gates.Deadlines(connect_s=0.3)) as (gate, port),
        ):
            async with gate_for(["*:*"], names=names) as (_, other):
                got = await asyncio.gather(*(talk(port, get("http://stuck.test/")) for _ in range(12)))
                assert all(one.startswith(b"HTTP/1.1 502 ") and b"cannot be resolved" in one for one in got)
                assert names.asked.count("stuck.test") == 8
                assert gate.traffic.principal.resolving.locked()
                url = get(f"http://good.test:{port_of(here)}/")
                assert b" 200 OK" in await talk(other, url)
                assert b"too many lookups" in await talk(port, url)
                go.set()
                await until(lambda: not gate.traffic.principal.resolving.locked())
                assert b" 200 OK" in await talk(port, url)

    try:
        run(main())
    finally:
        go.set()


def test_bytes_of_a_program_are_bounded() -> None:
    async def answer(request: Request) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                await request.write(b"x" * 10_000)

    async def work(
        gate: gates.Gate, port: int, here: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        got = 0
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                got += len(data)
        assert 0 < got <= 1_000_000
        assert gate.traffic.received_bytes <= 1_000_000 + 65_536
        refused = await talk(port, get(f"http://{here}/"))
        assert refused.startswith(b"HTTP/1.1 403 ") and b"network budget of 1,000,000 bytes" in refused

    with_tunnel(work, answer, budgets=NetworkBudgets(program_bytes=1_000_000))


def test_bytes_and_connections_of_a_principal_are_bounded_over_its_programs() -> None:
    async def main() -> None:
        async def answer(request: Request) -> None:
            if request.path == "/open":
                await request.closed()
            await request.answer(b"x" * 60_000)

        principal, budgets = PrincipalTraffic(), NetworkBudgets(principal_bytes=100_000, principal_connections=2)
        async with serving(answer) as (here, _):
            async with (
                gate_for(["127.0.0.1:*"], budgets=budgets, principal=principal) as (_, one),
                gate_for(["127.0.0.1:*"], budgets=budgets, principal=principal) as (second, two),
                gate_for(["127.0.0.1:*"], budgets=budgets) as (_, other),
            ):
                held = [await opened(port, get(f"http://{here}/open")) for port in (one, two)]
                await until(lambda: principal.open == 2)
                assert b"already have 2 open connections" in await talk(one, get(f"http://{here}/"))
                assert list(second.refused) == []
                assert b" 200 OK" in await talk(other, get(f"http://{here}/"))
                for _, writer in held:
                    writer.close()
                await until(lambda: principal.open == 0)
                assert b" 200 OK" in await talk(one, get(f"http://{here}/"))
                await talk(two, get(f"http://{here}/"))
                refused = await talk(one, get(f"http://{here}/"))
                assert refused.startswith(b"HTTP/1.1 403 ") and b"this hour" in refused

    run(main())


def test_a_thousand_connections_of_one_program_leave_others_alone() -> None:
    async def main() -> None:
        async with serving(echo) as (here, _):
            async with gate_for(["127.0.0.1:*"]) as (crowd, port), gate_for(["127.0.0.1:*"]) as (_, other):
                flood = [await opened(port) for _ in range(400)]  # and one process has both ends of each
                async with asyncio.timeout(20):
                    for _ in range(20):
                        assert b" 200 OK" in await talk(other, get(f"http://{here}/"))
                await until(lambda: crowd.traffic.connections >= 300)
                assert crowd.traffic.open <= 256 + 400
                assert "already has 256 open connections" in crowd.refused["any host"]
                for _, writer in flood:
                    writer.close()
                await until(lambda: crowd.traffic.open == 0)
                assert b" 200 OK" in await talk(port, get(f"http://{here}/"))

    run(main())


def test_the_end_of_the_gate_ends_its_connections() -> None:
    async def main() -> None:
        async def answer(request: Request) -> None:
            await request.closed()

        async with serving(answer) as (here, _):
            async with gate_for(["127.0.0.1:*"]) as (gate, port):
                tunnel, writer = await opened(port, f"CONNECT {here} HTTP/1.1\r\n\r\n".encode())
                await tunnel.readuntil(b"\r\n\r\n")
                half, half_writer = await opened(port, b"GET htt")
                await until(lambda: gate.traffic.open == 2)
            for reader in (tunnel, half):
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            with pytest.raises(ConnectionError):
                await opened(port)
            writer.close()
            half_writer.close()

    run(main())
