"""The fetch tool: only addresses that are allowed, by whatever way they are reached; bounded; nothing left open."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gzip
import ssl
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import Host
from holdfast.errors import ConfigurationError
from holdfast.tools import addresses as web_addresses
from holdfast.tools.addresses import AddressRules
from holdfast.tools.web import fetch as web
from holdfast.tools.web.fetch import Web
from holdfast.tools.web.text import decoded, html_text
from tests.tools.using import Bench, on_host, use

Answer = Callable[["Request"], Awaitable[None]]


class Request:
    """One connection as the server sees it: the request's head, and the way to answer."""

    def __init__(self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.line, _, rest = head.partition("\r\n")
        self.path = self.line.split(" ")[1]
        self.headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest.split("\r\n"))
        }
        self.reader = reader
        self.writer = writer

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def closed(self) -> None:
        """Wait until the client has closed the connection."""
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                assert await self.reader.read() == b""

    async def answer(self, body: bytes = b"", *, status: str = "200 OK", kind: str = "text/plain", **more: str) -> None:
        headers = {"content-type": kind, "content-length": str(len(body)), **more}
        head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        await self.write(f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body)


@contextlib.asynccontextmanager
async def serving(
    answer: Answer, *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[str, list[Request]]]:
    """A server; its address as ``host:port``, and what it was asked."""
    asked: list[Request] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                request = Request(head.rstrip(), reader, writer)
                asked.append(request)
                await answer(request)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, host, 0, ssl=tls)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}", asked


def local(**more: Any) -> Web:
    """A tool that may reach this machine's loopback."""
    return Web(allow_networks=["127.0.0.0/8", "::1"], ports=None, **more)


def fetch(toolset: Web, work: Callable[[Bench], Awaitable[Any]]) -> None:
    use(toolset, work)


NOT_PUBLIC = """
    0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 100.100.100.200 127.0.0.1 127.8.9.1 168.63.129.16 169.254.169.254 172.16.0.1
    192.0.0.192 192.168.1.1 192.88.99.1 198.18.0.1 203.0.113.1 224.0.0.1 240.0.0.1 255.255.255.255
    :: ::1 ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:0:127.0.0.1 64:ff9b::127.0.0.1 64:ff9b::a9fe:a9fe 64:ff9b:1::1
    100::1 2001::1 2001:db8::1 2002:7f00:1:: 3fff::1 5f00::1 fc00::1 fd00:ec2::254 fe80::1 fe80::1%lo fec0::1
    ff02::1 nonsense 1 127.1
"""
PUBLIC = "1.1.1.1 93.184.215.14 ::ffff:1.1.1.1 64:ff9b::101:101 2606:4700::1111 2a00:1450::1"


def test_only_public_addresses_are_permitted_in_whatever_way_they_are_written() -> None:
    rules = AddressRules()
    for address in NOT_PUBLIC.split():
        assert not rules.permits(address), address
    for address in PUBLIC.split():
        assert rules.permits(address), address


def test_allowed_networks_are_permitted_besides() -> None:
    rules = AddressRules(["10.1.0.0/16", "::1"])
    permitted = [one for one in ("10.1.2.3", "::ffff:10.1.2.3", "10.2.0.1", "::1", "127.0.0.1") if rules.permits(one)]
    assert permitted == ["10.1.2.3", "::ffff:10.1.2.3", "::1"]
    with pytest.raises(ConfigurationError):
        AddressRules(["10.1.2.3/8"])


REFUSED = [
    "http://127.0.0.1/",
    "http://127.1/",
    "http://2130706433/",
    "http://0x7f000001/",
    "http://0177.0.0.1/",
    "http://0/",
    "http://0.0.0.0/",
    "http://[::1]/",
    "http://[::]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]/",
    "http://[fe80::1%25lo]/",
    "http://localhost/",
    "http://LOCALHOST./",
    "http://169.254.169.254/latest/meta-data/",
    "http://user@127.0.0.1/",
    "http://example.com@127.0.0.1/",
    "http://example.com:80@127.0.0.1/",
    "http://127.0.0.1\\@example.com/",
    "http://①②⑦.⓪.⓪.①/",
    "http://127。0。0。1/",
    "http://1.1.1.1:22/",
    "http://1.1.1.1:99999/",
    "http://[1.1.1.1/",
    "http:///nothing",
    "ftp://1.1.1.1/",
    "file:///etc/passwd",
    "gopher://127.0.0.1/",
    "javascript:alert(1)",
    "//1.1.1.1/",
    "1.1.1.1",
    "",
    "http://\x00/",
    "http://a b/",
    "http://" + "a" * 300 + "/",
    "http://no-such-host.invalid/",
]


def test_addresses_that_are_not_public_are_refused_however_they_are_written() -> None:
    told: dict[str, str] = {}
    asked: list[Any] = []

    async def agent(bench: Bench) -> None:
        async def answer(request: Request) -> None:
            asked.append(request)

        async with serving(answer):
            for url in REFUSED:
                told[url] = await bench("fetch", url=url)

    fetch(Web(), agent)
    assert {url: text for url, text in told.items() if not text.startswith("!ToolFailed: ")} == {}
    assert "not on the public internet" in told["http://127.1/"]
    assert "port 22" in told["http://1.1.1.1:22/"]
    assert asked == []


def test_each_redirect_is_judged_anew() -> None:
    told: list[str] = []

    async def agent(bench: Bench) -> None:
        async def secret(request: Request) -> None:
            raise AssertionError("it was reached")

        async with serving(secret, host="127.0.0.2") as (hidden, reached):

            async def answer(request: Request) -> None:
                target = {
                    "/in": f"http://{hidden}/",
                    "/file": "file:///etc/passwd",
                    "/user": f"http://me@{request.headers['host']}/",
                    "/loop": "/loop",
                    "/relative": "../end?x=1#part",
                }.get(request.path)
                if target is None:
                    await request.answer(f"{request.line}".encode())
                else:
                    await request.answer(status="302 Found", location=target)

            async with serving(answer) as (here, _):
                for path in ("/in", "/file", "/user", "/loop", "/relative"):
                    told.append(await bench("fetch", url=f"http://{here}{path}"))
            assert reached == []

    fetch(Web(allow_networks=["127.0.0.1"], ports=None), agent)
    assert "not on the public internet" in told[0]
    assert "is not a web URL" in told[1]
    assert "user name" in told[2]
    assert "stopped after 10 redirects" in told[3]
    assert told[4].endswith("GET /end?x=1 HTTP/1.1")


def test_a_name_is_resolved_once_and_only_the_judged_address_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved: list[str] = []
    told: list[str] = []

    async def rebinding(host: str, port: int) -> list[str]:
        """A name server that answers otherwise each time."""
        resolved.append(host)
        return ["127.0.0.2"] if len(resolved) % 2 else ["127.0.0.3"]

    monkeypatch.setattr(web_addresses, "_resolve", rebinding)

    async def agent(bench: Bench) -> None:
        async def answer(request: Request) -> None:
            await request.answer(request.headers["host"].encode())

        async with serving(answer, host="127.0.0.2") as (here, asked):
            port = here.rsplit(":")[-1]
            told.append(await bench("fetch", url=f"http://rebind.test:{port}/"))
            told.append(await bench("fetch", url=f"http://rebind.test:{port}/"))
            assert len(asked) == 1

    fetch(Web(allow_networks=["127.0.0.2"], ports=None), agent)
    assert resolved == ["rebind.test"] * 2
    assert told[0].splitlines()[-1].startswith("rebind.test:")
    assert "rebind.test resolves to 127.0.0.3, which is not on the public internet" in told[1]


def test_a_certificate_must_be_that_of_the_name_though_an_address_is_connected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server_side, trusting = certified(tmp_path, "secure.test")
    monkeypatch.setattr(web, "_ssl_context", lambda: trusting)

    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.9", "127.0.0.1"]  # nobody listens on the first

    monkeypatch.setattr(web_addresses, "_resolve", resolve)
    told: list[str] = []
    names: list[str] = []
    server_side.sni_callback = lambda _socket, name, _context: names.append(name)

    async def agent(bench: Bench) -> None:
        async def answer(request: Request) -> None:
            await request.answer(b"safe")

        async with serving(answer, tls=server_side) as (here, _):
            port = here.rsplit(":")[-1]
            for name in ("secure.test", "other.test"):
                told.append(await bench("fetch", url=f"https://{name}:{port}/"))

    fetch(local(), agent)
    assert told[0].endswith("\nsafe")
    assert "certificate" in told[1] and "other.test" in told[1]
    assert names == ["secure.test", "other.test"]


def certified(folder: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context with a certificate for the name, and a client's that trusts it."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=36500))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    (folder / "both.pem").write_bytes(
        pem
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "both.pem")
    return server, ssl.create_default_context(cadata=pem.decode())


def test_a_page_is_told_as_text_with_its_links() -> None:
    page = """<!doctype html><html><head><title>The
      page</title><style>p {}</style><script>if (a < b) { "</p>" }</script></head><body>
      <h2>Head&amp;ing</h2><p>One <b>bold</b>   <a href="next?a=1&amp;b=2">link</a>.<br>two
      <a href="javascript:x()">nothing</a> <img src=x alt="a picture"></p>
      <ul><li>first<li><a href="//other.test/x">second</a></ul><noscript>no</noscript><svg><title>icon</title></svg>
      <table><tr><td>a</td><td>b</td></tr></table><pre>  keep
    this</pre></body></html>"""
    title, text = html_text(page, "https://here.test/dir/page")
    assert title == "The page"
    assert text.splitlines() == [
        "## Head&ing",
        "",
        "One bold [link](https://here.test/dir/next?a=1&b=2).",
        "two nothing ![a picture]",
        "",
        "- first",
        "- [second](https://other.test/x)",
        "",
        "a | b",
        "",
        "  keep",
        "    this",
    ]


@pytest.mark.parametrize(
    "source",
    [
        *("<", "<!--", "<a ", "<a x='", '<a x="', "<a =", "<div>", "<svg>", "</", "&#", "<![", "<script>", "<title>"),
        *("<a>x</p>", "<a href=x>", "a\n", "<p", "<pre>\n", "&#9", "<a   =   ", "<svg></b>", "</a", " ", "<a b '"),
    ],
)
def test_broken_pages_are_read_in_the_end(source: str) -> None:
    html_text(source * 100_000, "https://here.test/")
    html_text(source + source[-1] * 300_000, "https://here.test/")


@pytest.mark.parametrize(
    ("data", "charset", "text"),
    [
        ("käse".encode(), None, "käse"),
        ("käse".encode("latin-1"), None, "käse"),
        ("käse".encode("latin-1"), "iso-8859-1", "käse"),
        ("“x”".encode("cp1252"), "latin-1", "“x”"),
        ("käse".encode("utf-16"), "utf-8", "käse"),
        (b"\xef\xbb\xbfx", None, "x"),
        ("日本".encode("shift_jis"), "Shift_JIS", "日本"),
        (b"<meta charset=koi8-r>" + "да".encode("koi8-r"), None, "<meta charset=koi8-r>да"),
        ("käse".encode(), "no-such-thing", "käse"),
        (b"x", "zip", "x"),
        (b"x" * 10_000, "punycode", "x" * 10_000),
        ("käse".encode()[:-3], None, "k"),
    ],
)
def test_text_is_read_in_its_charset(data: bytes, charset: str | None, text: str) -> None:
    assert decoded(data, charset, html=True) == text


def test_what_a_result_says(tmp_path: Path) -> None:
    told: dict[str, str] = {}
    picture = b"\x89PNG\0\0" + bytes(range(256))

    async def agent(bench: Bench) -> None:
        async def answer(request: Request) -> None:
            match request.path:
                case "/page":
                    await request.answer(b"<title>T</title><p>x", kind="text/html; charset=utf-8")
                case "/missing":
                    await request.answer(b"not here", status="404 Not Found")
                case "/picture":
                    await request.answer(picture, kind="image/png")
                case "/unnamed":
                    await request.answer(picture, kind="application/octet-stream")
                case "/long":
                    await request.answer("".join(map(str, range(100_000))).encode())
                case "/json":
                    await request.answer(b'{"a": 1}', kind="application/vnd.api+json")

        async with serving(answer) as (here, asked):
            for path in ("/page", "/missing", "/picture", "/unnamed", "/json"):
                told[path] = (await bench("fetch", url=f"http://{here}{path}")).replace(here, "here")
            told["saved"] = await bench("fetch", url=f"http://{here}/picture", save_as="in/picture.png")
            told["out"] = await bench("fetch", url=f"http://{here}/picture", save_as="../picture.png")
            told["head"] = await bench("fetch", url=f"http://{here}/picture", method="HEAD")
            assert asked[-1].line.startswith("HEAD ")
            first = await bench("fetch", url=f"http://{here}/long")
            second = await bench("fetch", url=f"http://{here}/long", start=100)
            told["long"] = first.splitlines()[-1] + second.splitlines()[-1]

    fetch(local(workspace=tmp_path, text_limit=100), agent)
    assert told["/page"] == "[200 OK · text/html · 20 bytes · http://here/page]\n# T\nx"
    assert told["/missing"] == "[404 Not Found · text/plain · 8 bytes · http://here/missing]\nnot here"
    assert "[not text, not shown; save it with save_as]" in told["/picture"]
    assert "[not text" in told["/unnamed"]
    assert told["/json"].endswith('\n{"a": 1}')
    assert told["saved"].endswith("[saved to in/picture.png]")
    assert (tmp_path / "in/picture.png").read_bytes() == picture
    assert told["out"].startswith("!ToolFailed: ") and not (tmp_path.parent / "picture.png").exists()
    assert "content-type: image/png" in told["head"]
    assert told["long"].count("for more: start=") == 2 and "start=200]" in told["long"]


def test_methods_that_are_not_allowed_are_refused_and_those_that_are_work() -> None:
    told: list[str] = []

    async def agent(bench: Bench) -> None:
        async def answer(request: Request) -> None:
            body = await request.reader.readexactly(int(request.headers.get("content-length", "0")))
            if request.path == "/moved":
                await request.answer(status="303 See Other", location="/seen")
            else:
                await request.answer(f"{request.line} {request.headers.get('content-type')} {body!r}".encode())

        async with serving(answer) as (here, _):
            for path in ("/kept", "/moved"):
                told.append(await bench("fetch", url=f"http://{here}{path}", method="POST", body='{"ä": 1}'))

    fetch(local(methods=("GET", "POST")), agent)
    assert told[0].endswith("POST /kept HTTP/1.1 application/json b'{\"\\xc3\\xa4\": 1}'")
    assert told[1].endswith("GET /seen HTTP/1.1 None b''")
    (tool,) = local().tools()
    with pytest.raises(Exception, match="method"):
        tool.check({"url": "http://x", "method": "POST"})
    with pytest.raises(Exception, match="body"):
        tool.check({"url": "http://x", "body": "x"})


BODIES = "endless bomb gzip zlib bare broken other twice cut headers nonsense hangs-up"


def test_what_is_read_and_what_it_unpacks_to_are_bounded() -> None:
    told: dict[str, str] = {}
    sent = 0

    async def agent(bench: Bench) -> None:
        async def answer(request: Request) -> None:
            nonlocal sent
            match request.path:
                case "/endless":
                    await request.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n")
                    while True:
                        await request.write(b"x" * 10_000)
                        sent += 10_000
                case "/bomb":
                    await request.answer(gzip.compress(b"\0" * 100_000_000), content_encoding="gzip")
                case "/gzip":
                    await request.answer(gzip.compress(b"packed"), content_encoding="gzip")
                case "/zlib":
                    await request.answer(zlib.compress(b"packed"), content_encoding="deflate")
                case "/bare":
                    await request.answer(zlib.compress(b"packed")[2:-4], content_encoding="deflate")
                case "/broken":
                    await request.answer(b"not packed", content_encoding="gzip")
                case "/other":
                    await request.answer(b"x", content_encoding="br")
                case "/twice":
                    await request.answer(b"x", content_encoding="gzip, gzip")
                case "/cut":
                    await request.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nx")
                case "/headers":
                    await request.write(b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 1_000_000 + b"\r\n\r\n")
                case "/nonsense":
                    await request.write(b"\0\1\2 nonsense\r\n\r\n")
                case "/hangs-up":
                    pass

        async with serving(answer) as (here, _):
            for path in BODIES.split():
                told[path] = await bench("fetch", url=f"http://{here}/{path}")

    fetch(local(limit_bytes=1_000_000), agent)
    assert "1,000,000 bytes and more" in told["endless"] and sent < 20_000_000
    assert "1,000,000 bytes and more" in told["bomb"]
    assert [told[name].endswith("\npacked") for name in ("gzip", "zlib", "bare")] == [True] * 3
    refused = {name: told[name] for name in ("broken", "other", "twice", "cut", "headers", "nonsense", "hangs-up")}
    assert {name: text for name, text in refused.items() if not text.startswith("!ToolFailed: ")} == {}


@pytest.mark.parametrize("where", ["before the answer", "in the headers", "in the body", "in drops"])
def test_a_server_that_stalls_is_left_at_the_deadline(where: str) -> None:
    told: list[str] = []

    async def agent(bench: Bench) -> None:
        async with serving(stalling(where)) as (here, asked):
            told.append(await bench("fetch", url=f"http://{here}/"))
            await asked[0].closed()

    fetch(local(timeout_s=3.0), agent)
    assert "did not respond completely within 3 s" in told[0]


def stalling(where: str) -> Answer:
    async def answer(request: Request) -> None:
        match where:
            case "in the headers":
                await request.write(b"HTTP/1.1 200 OK\r\nx: ")
            case "in the body":
                await request.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 100\r\n\r\nx")
            case "in drops":
                await request.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n")
                while True:
                    await request.write(b"x")
                    await asyncio.sleep(0.02)
        await asyncio.sleep(60)

    return answer


@pytest.mark.parametrize("where", ["before the answer", "in the headers", "in the body", "in drops"])
def test_an_interrupt_closes_the_connection_as_the_server_sees_it(where: str) -> None:
    here = ""
    asked: list[Request] = []

    async def agent(bench: Bench) -> None:
        await bench("fetch", url=f"http://{here}/")

    async def scenario(host: Host) -> None:
        nonlocal here, asked
        async with serving(stalling(where)) as (here, asked):
            session = host.session("s")
            await session.send("go")
            while not asked:
                await asyncio.sleep(0.005)
            stop = await session.interrupt("enough")
            await asked[0].closed()
            assert stop.outcome == "gone" and stop.abandoned == ()

    on_host([local()], agent, scenario, grace_s=5.0)


def test_each_fetch_closes_its_connections(tmp_path: Path) -> None:
    async def agent(bench: Bench) -> None:
        async def answer(request: Request) -> None:
            await request.answer(b"x", connection="keep-alive")
            await request.closed()
            ended.append(request.path)

        ended: list[str] = []
        async with serving(answer) as (here, asked), serving(answer, host="::1") as (six, _):
            for number in range(3):
                await bench("fetch", url=f"http://{here}/{number}")
            assert (await bench("fetch", url=f"http://{six}/six")).endswith("\nx")
            while len(ended) < 4:
                await asyncio.sleep(0.005)
            assert len(asked) == 3

    fetch(local(), agent)
