"""The browser: it does what a person would, reaches only what it may, and never outlives its session."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import re
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import Host
from holdfast.errors import MissingExtra, ToolFailed
from holdfast.protocol.stopping import StopReceipt
from holdfast.runtime.processes.procfs import all_pids, read_text
from holdfast.tools import addresses as web_addresses
from holdfast.tools.addresses import AddressRules
from holdfast.tools.sandbox.choice import BackendName
from holdfast.tools.web.browser import Browser, find_chromium
from holdfast.tools.web.chromium import LoopbackNetwork
from tests.tools.sandbox.walled import reason_against
from tests.tools.using import Bench, on_host
from tests.tools.web.test_fetch import Request, serving

NO_PLAYWRIGHT = "no playwright: install the extra browser"
HAS_PLAYWRIGHT = importlib.util.find_spec("playwright") is not None
CHROMIUM = find_chromium()
NO_WALL = reason_against(("namespaces",))


def why_not() -> str:
    """Why no browser can be started here; empty if one can."""
    if not HAS_PLAYWRIGHT:
        return NO_PLAYWRIGHT
    if CHROMIUM is None:
        return "no Chromium: install one, or name it in HOLDFAST_CHROMIUM"
    return f"no wall with namespaces: {NO_WALL}" if NO_WALL else ""


real = pytest.mark.skipif(bool(why_not()), reason=why_not())

PAGE = b"""<!doctype html><title>First</title><h1>Welcome</h1>
<label>Name <input id=name></label><button onclick="document.querySelector('p').textContent =
  'Hello ' + document.getElementById('name').value">Greet</button><p></p><a href="/second">on</a>"""


async def pages(request: Request) -> None:
    match request.path:
        case "/":
            await request.answer(PAGE, kind="text/html")
        case "/stall":
            await request.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\n\r\n<title>Stalls")
            await asyncio.sleep(60)
        case "/image":
            await request.answer(b"<title>Image</title><img src='/stall'>", kind="text/html")
        case "/away":
            await request.answer(status="302 Found", location="http://127.0.0.2:1/")
        case _:
            await request.answer(f"<title>Other</title><main>{request.path}".encode(), kind="text/html")


def local(**more: Any) -> Browser:
    return Browser(allow_networks=["127.0.0.1"], ports=None, **more)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Browsers of each test keep their things in a folder of its own, by which their processes are found.

    They run at idle priority, so they may start slowly while other tests use all processors.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("holdfast.tools.web.browser._LAUNCH_S", 90.0)


def browsers() -> list[int]:
    """Processes of browsers of this test."""
    mark = f"{tempfile.gettempdir()}/holdfast-browser-".encode()
    return [
        pid
        for pid in all_pids()
        if any(mark in (read_text(f"/proc/{pid}/{name}") or b"") for name in ("cmdline", "environ"))
    ]


async def noticed() -> None:
    """Until asyncio has seen the ends of the processes that it watches with threads (before Python 3.12)."""
    while any(thread.name.startswith("waitpid-") for thread in threading.enumerate()):
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.01)


def is_gone(receipt: StopReceipt) -> bool:
    """Whether nothing is left, but perhaps asyncio's own thread that is about to see that a process has ended."""
    watching = all("_do_waitpid" in str(abandoned) for abandoned in receipt.abandoned)
    return watching and receipt.survivors == () and receipt.outcome in ("gone", "quarantined")


def with_server(
    toolset: Browser,
    agent: Callable[[Bench, str], Awaitable[Any]],
    *,
    then: Callable[[], Any] | None = None,
    sandbox: BackendName = "auto",
) -> None:
    """Run the agent once, with the address of a server."""
    problems: list[BaseException] = []

    async def scenario(host: Host) -> None:
        session = host.session("s")
        receipt = await session.send("go")
        await session.wait(receipt.message_id)
        if then is not None:
            then()

    async def kept(bench: Bench) -> None:
        try:
            async with serving(pages) as (here, _):
                await agent(bench, here)
        except BaseException as error:
            problems.append(error)
            raise

    on_host([toolset], kept, scenario, sandbox=sandbox)
    if problems:
        raise problems[0]
    assert browsers() == []


def ref(told: str, element: str) -> str:
    found = re.search(re.escape(element) + r".*?\[ref=(\w+)\]", told)
    assert found is not None, told
    return found[1]


@real
def test_a_page_is_opened_read_filled_in_and_clicked(tmp_path: Path) -> None:
    async def agent(bench: Bench, here: str) -> None:
        told = await bench("browser_open", url=f"http://{here}/")
        assert told.startswith(f"[http://{here}/]\n# First\n") and 'heading "Welcome"' in told
        told = await bench("browser_type", ref=ref(told, "textbox"), text="Ada")
        told = await bench("browser_click", ref=ref(told, 'button "Greet"'))
        assert "Hello Ada" in told
        assert (await bench("browser_screenshot", path="shots/one.png")).startswith("saved to shots/one.png")
        assert (tmp_path / "shots/one.png").read_bytes().startswith(b"\x89PNG")
        told = await bench("browser_click", ref=ref(told, 'link "on"'))
        assert f"http://{here}/second" in told
        assert (await bench("browser_read", as_text=True)).endswith("/second")
        assert "element e999 not found" in await bench("browser_click", ref="e999")
        assert "is not an element name" in await bench("browser_click", ref="text=on")

    with_server(local(workspace=tmp_path, timeout_s=50.0), agent)


@real
def test_private_addresses_are_refused_by_the_page_its_parts_and_redirects() -> None:
    async def agent(bench: Bench, here: str) -> None:
        reached: list[Request] = []

        async def secret(request: Request) -> None:
            reached.append(request)
            await request.answer(b"secret")

        async with serving(secret, host="127.0.0.2") as (hidden, _):
            port = hidden.rsplit(":")[-1]

            async def tempting(request: Request) -> None:
                urls = [f"http://{name}:{port}/" for name in ("127.0.0.2", "localhost", "[::1]", "2130706434", "127.2")]
                parts = "".join(f"<img src='{url}'><iframe src='{url}'></iframe>" for url in urls)
                script = "".join(f"fetch('{url}', {{mode: 'no-cors'}}).catch(() => 0);" for url in urls)
                sockets = f"try {{ new WebSocket('ws://127.0.0.2:{port}/') }} catch (e) {{}}"
                body = f"<title>T</title>{parts}<script>{script}{sockets}</script>"
                if request.path == "/away":
                    await request.answer(status="302 Found", location=f"http://{hidden}/")
                else:
                    await request.answer(body.encode(), kind="text/html")

            async with serving(tempting) as (there, _):
                for url in (f"http://{hidden}/", f"http://[::1]:{port}/", "file:///etc/passwd", "chrome://version"):
                    assert (await bench("browser_open", url=url)).startswith("!ToolFailed: "), url
                assert "T" in await bench("browser_open", url=f"http://{there}/")
                away = await bench("browser_open", url=f"http://{there}/away")
                assert "Request blocked: 127.0.0.2 resolves to 127.0.0.2, which is not on the public internet" in away
        assert reached == []

    with_server(local(timeout_s=50.0), agent)


@real
@pytest.mark.nightly
def test_a_name_that_changes_its_address_is_refused_when_it_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.2"]  # at the check before the page is opened; the proxy then looks it up itself

    monkeypatch.setattr(web_addresses, "_resolve", resolve)

    async def agent(bench: Bench, here: str) -> None:
        async with serving(pages, host="127.0.0.2") as (there, _):
            assert "Welcome" in await bench("browser_open", url=f"http://{there}/")
            port = here.rsplit(":")[-1]
            assert "not on the public internet" in await bench("browser_open", url=f"http://localhost:{port}/")

    with_server(Browser(allow_networks=["127.0.0.2"], ports=None, timeout_s=50.0), agent)


@real
@pytest.mark.nightly
@pytest.mark.alone
def test_a_page_that_stalls_ends_at_the_deadline_and_the_browser_goes_on() -> None:
    async def agent(bench: Bench, here: str) -> None:
        assert "did not answer within 4 s" in await bench("browser_open", url=f"http://{here}/stall")
        assert "Image" in await bench("browser_open", url=f"http://{here}/image")  # a part of it stalls

    with_server(local(timeout_s=4.0), agent)


@real
def test_an_interrupt_stops_the_page_from_loading_and_a_stop_ends_the_browser() -> None:
    before: list[int] = []
    asked: list[Request] = []
    here = ""

    async def agent(bench: Bench) -> None:
        await bench("browser_open", url=f"http://{here}{'/never' if bench.run.text == 'stall' else '/'}")

    async def silent(request: Request) -> None:
        if request.path == "/never":
            await request.reader.read()
            closed.set_result(None)
        else:
            await pages(request)

    closed: asyncio.Future[None]

    async def scenario(host: Host) -> None:
        nonlocal here, asked, closed
        closed = asyncio.get_running_loop().create_future()
        async with serving(silent) as (here, asked):
            session = host.session("s")
            first = await session.send("open")
            await session.wait(first.message_id)
            before.extend(browsers())
            await session.send("stall")
            while not any(request.path == "/never" for request in asked):
                await asyncio.sleep(0.01)
            stop = await session.interrupt("enough")
            assert is_gone(stop), stop
            async with asyncio.timeout(10):
                await closed
            assert set(before) <= set(browsers())  # an interrupt leaves it alone
            again = await session.send("open")
            await session.wait(again.message_id)
            ended = await session.stop("all of it")
            assert is_gone(ended.receipt), ended
            assert browsers() == []

    on_host([local(timeout_s=20.0)], agent, scenario, grace_s=5.0)
    assert before


@real
@pytest.mark.parametrize("moment", ["while it starts", pytest.param("while a page loads", marks=pytest.mark.nightly)])
def test_a_stop_at_the_worst_moment_leaves_no_process(moment: str) -> None:
    here = ""
    asked: list[Request] = []

    async def agent(bench: Bench) -> None:
        await bench("browser_open", url=f"http://{here}/stall")

    async def scenario(host: Host) -> None:
        nonlocal here, asked
        async with serving(pages) as (here, asked):
            session = host.session("s")
            await session.send("go")
            while not (asked if moment == "while a page loads" else browsers()):
                await asyncio.sleep(0.005)
            ended = await session.stop("enough")
            assert is_gone(ended.receipt), ended
            assert browsers() == []
            await noticed()

    on_host([local(timeout_s=20.0)], agent, scenario, grace_s=5.0)


@real
@pytest.mark.nightly
def test_a_browser_that_nobody_uses_is_closed_and_the_next_call_has_a_new_one() -> None:
    async def agent(bench: Bench, here: str) -> None:
        await bench("browser_open", url=f"http://{here}/")
        while browsers():
            await asyncio.sleep(0.02)
        assert "about:blank" in await bench("browser_read")

    with_server(local(idle_s=0.3, timeout_s=50.0), agent)


def test_a_browser_that_is_not_there_is_told() -> None:
    async def agent(bench: Bench, here: str) -> None:
        for _ in range(2):
            told = await bench("browser_open", url=f"http://{here}/")
            assert told.startswith("!ToolFailed: the browser failed to start"), told

    if not HAS_PLAYWRIGHT or NO_WALL:
        pytest.skip(NO_PLAYWRIGHT if not HAS_PLAYWRIGHT else f"no wall with namespaces: {NO_WALL}")
    with_server(local(executable="/nowhere/chromium"), agent)


def test_without_playwright_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "playwright", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="browser"):
        Browser()


def test_the_network_without_a_wall_serves_one_host_per_connection_and_ends_them_all() -> None:
    from holdfast.runtime import Scope

    async def main() -> None:
        told: list[bytes] = []

        async def answer(request: Request) -> None:
            assert request.headers["connection"] == "close" and "proxy-connection" not in request.headers
            await request.answer(request.line.encode(), connection="close")

        async with asyncio.timeout(20), Scope("gate") as scope, serving(answer) as (here, asked):

            async def ask(gate: LoopbackNetwork, head: str) -> bytes:
                reader, writer = await asyncio.open_connection(*gate.url.removeprefix("http://").split(":"))
                writer.write(head.encode() + b"\r\n\r\n")
                with contextlib.suppress(ConnectionError):
                    told.append(await reader.read())
                writer.close()
                return told[-1]

            async with LoopbackNetwork(principal="p", hosts=("*:*",), networks=("127.0.0.1",)) as gate:
                plain = f"GET http://{here}/a?b HTTP/1.1\r\nhost: {here}\r\nproxy-connection: keep-alive"
                assert (await ask(gate, plain)).endswith(b"GET /a?b HTTP/1.1")
                for refused in (
                    "GET http://127.0.0.2/ HTTP/1.1",
                    "CONNECT localhost.:1 HTTP/1.1",
                    "CONNECT [::1]:1 HTTP/1.1",
                    "CONNECT 127.0.0.2 HTTP/1.1",
                    "GET ftp://127.0.0.1/ HTTP/1.1",
                    "GET / HTTP/1.1",
                    "nonsense",
                    "CONNECT \xff:1 HTTP/1.1",
                ):
                    assert (await ask(gate, refused)).startswith((b"HTTP/1.1 40", b"HTTP/1.1 502")), refused
                reader, writer = await asyncio.open_connection(*gate.url.removeprefix("http://").split(":"))
                writer.write(f"CONNECT {here} HTTP/1.1\r\n\r\n".encode())
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
                open_one = reader
            with contextlib.suppress(ConnectionError):
                assert await open_one.read() == b""
            writer.close()
            assert len(asked) == 1
            scope.interrupt.trigger("done", kind="stop")

    with contextlib.suppress(BaseExceptionGroup):
        try:
            asyncio.run(main())
        except BaseException as error:
            if type(error).__name__ != "Interrupted":
                raise


def test_refusals_are_those_of_the_rules() -> None:
    with pytest.raises(ToolFailed, match="port 22"):
        AddressRules().check_url("https://1.1.1.1:22/")
