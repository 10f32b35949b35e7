"""Heads and bodies that can be read in two ways are refused; of the others, only what was understood is passed on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ToolFailed
from holdfast.tools.sandbox.proxy.http import ChunkedBody, InvalidHead, parse_request, rewrite_response


def head(*lines: str) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def test_a_request_is_written_anew_for_the_server() -> None:
    request = parse_request(
        head(
            "GET http://Example.org/a?b=c HTTP/1.1",
            "Host: example.org:80",
            "Proxy-Connection: keep-alive",
            "Proxy-Authorization: Basic c2VjcmV0",
            "Connection: keep-alive, X-Mine",
            "X-Mine: 1",
            "Upgrade: websocket",
            "Accept: */*",
        )
    )
    assert (request.method, request.target, request.length) == ("GET", ("example.org", 80), 0)
    assert request.head == head("GET /a?b=c HTTP/1.1", "Host: example.org", "Accept: */*", "Connection: close")


@pytest.mark.parametrize(
    ("url", "path", "host"),
    [
        ("http://a.test", "/", "a.test"),
        ("HTTP://A.test:8080?x", "/?x", "a.test:8080"),
        ("http://[2606:4700::1111]:81/%2e%2e/", "/%2e%2e/", "[2606:4700::1111]:81"),
    ],
)
def test_urls_are_split_into_target_and_path(url: str, path: str, host: str) -> None:
    authority = url.partition("://")[2].partition("/")[0].partition("?")[0]
    request = parse_request(head(f"GET {url} HTTP/1.1", f"Host: {authority}"))
    assert request.head.startswith(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n".encode())


AMBIGUOUS = [
    ("Content-Length: 5", "Content-Length: 6"),
    ("Content-Length: 5", "Content-Length: 5"),
    ("Content-Length: 5, 5",),
    ("Content-Length: +5",),
    ("Content-Length: -1",),
    ("Content-Length: 0x5",),
    ("Content-Length: 5_0",),
    ("Content-Length: \xb2",),
    ("Content-Length:",),
    ("Content-Length: " + "9" * 19,),
    ("Content-Length: 5", "Transfer-Encoding: chunked"),
    ("Transfer-Encoding: chunked", "Content-Length: 0"),
    ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
    ("Transfer-Encoding: chunked", "Transfer-Encoding: identity"),
    ("Transfer-Encoding: gzip, chunked",),
    ("Transfer-Encoding: chunked, identity",),
    ("Transfer-Encoding: xchunked",),
    ("Transfer-Encoding: \x0bchunked",),
    ("Transfer-Encoding : chunked",),
    ("Transfer-Encoding\t: chunked",),
    ("Transfer-Encoding",),
    (" Transfer-Encoding: chunked",),
    ("X: y", " Transfer-Encoding: chunked"),
    ("X: y\nTransfer-Encoding: chunked",),
    ("X: y\rTransfer-Encoding: chunked",),
    ("X: \x00",),
    ("X\x00: y",),
    (": y",),
    ("X y: z",),
    ("Host: a.test",),
    ("host: b.test",),
    ("Connection: content-length", "Content-Length: 5"),
    ("Connection: close, Transfer-Encoding", "Transfer-Encoding: chunked"),
    ("Connection: host",),
]


@pytest.mark.parametrize("fields", AMBIGUOUS, ids=str)
def test_requests_that_can_be_read_in_two_ways_are_refused(fields: tuple[str, ...]) -> None:
    with pytest.raises(InvalidHead):
        parse_request(head("POST http://a.test/ HTTP/1.1", "Host: a.test", *fields))


@pytest.mark.parametrize(
    "line",
    [
        "GET http://a.test/  HTTP/1.1",
        " GET http://a.test/ HTTP/1.1",
        "GET\thttp://a.test/\tHTTP/1.1",
        "GET http://a.test/ HTTP/1.1 ",
        "GET http://a.test/ HTTP/2.0",
        "GET http://a.test/ http/1.1",
        "GET http://a.test/ HTTP/1.1\rX: y",
        "GET http://a.test/\x00 HTTP/1.1",
        "GET http://a.test/\xe4 HTTP/1.1",
        "GET http://a.test/",
        "G(T http://a.test/ HTTP/1.1",
        "GET /only/a/path HTTP/1.1",
        "GET http://user:word@a.test/ HTTP/1.1",
        "GET http://a.test@b.test/ HTTP/1.1",
        "GET http://a.test#b/ HTTP/1.1",
        "GET http://a.test\\@b.test/ HTTP/1.1",
        "GET http://a.test\\.b.test/ HTTP/1.1",
        "",
    ],
)
def test_request_lines_that_are_not_strict_are_refused(line: str) -> None:
    with pytest.raises((InvalidHead, ToolFailed)):
        parse_request(head(line, "Host: a.test"))


@pytest.mark.parametrize(
    "url", ["https://a.test/", "ftp://a.test/", "file:///etc/passwd", "a.test:80", "http:/a.test/", "*"]
)
def test_other_urls_are_not_requested(url: str) -> None:
    with pytest.raises((ToolFailed, InvalidHead)):
        parse_request(head(f"GET {url} HTTP/1.1", "Host: a.test"))


@pytest.mark.parametrize(
    "host", ["b.test", "a.test:8080", "a.test, b.test", "", "a.test:80:80", "a.test@b.test", "[a.test]"]
)
def test_the_host_header_must_be_the_target(host: str) -> None:
    with pytest.raises(InvalidHead, match="Host"):
        parse_request(head("GET http://a.test/ HTTP/1.1", f"Host: {host}"))
    with pytest.raises(InvalidHead, match="Host"):
        parse_request(head("CONNECT a.test:443 HTTP/1.1", f"Host: {host}"))


def test_a_missing_host_header_is_refused_in_http_1_1() -> None:
    with pytest.raises(InvalidHead, match="one Host"):
        parse_request(head("GET http://a.test/ HTTP/1.1"))
    assert b"Host: a.test\r\n" in parse_request(head("GET http://a.test/ HTTP/1.0")).head


def test_connect_has_a_port_and_no_body() -> None:
    assert parse_request(head("CONNECT a.test:443 HTTP/1.0")).target == ("a.test", 443)
    assert parse_request(head("CONNECT a.test:443 HTTP/1.1", "Host: a.test")).target == ("a.test", 443)
    for lines in (
        ["CONNECT a.test HTTP/1.1"],
        ["CONNECT http://a.test:443/ HTTP/1.1"],
        ["CONNECT a.test:443 HTTP/1.1", "Content-Length: 5"],
        ["CONNECT a.test:443 HTTP/1.1", "Transfer-Encoding: chunked"],
    ):
        with pytest.raises((InvalidHead, ToolFailed)):
            parse_request(head(*lines))


@given(st.binary(max_size=200))
def test_no_input_is_understood_as_two_requests_or_breaks_the_parser(data: bytes) -> None:
    for raw in (data + b"\r\n\r\n", b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n" + data + b"\r\n\r\n"):
        try:
            request = parse_request(raw[: raw.index(b"\r\n\r\n") + 4])
        except (InvalidHead, ToolFailed):
            continue
        written = request.head
        assert written.count(b"\r\n\r\n") == 1 and written.endswith(b"\r\n\r\n")
        assert b"\n" not in written.replace(b"\r\n", b"") and b"\x00" not in written


def fed(body: bytes, step: int) -> tuple[bytes, ChunkedBody]:
    reader = ChunkedBody()
    out = b"".join(reader.feed(body[at : at + step]) for at in range(0, len(body), step))
    return out, reader


@pytest.mark.parametrize("step", [1, 2, 3, 1000])
def test_a_body_in_chunks_is_passed_on_without_extensions_trailers_and_what_follows(step: int) -> None:
    body = b"5;x=y\r\nhello\r\n0A\r\n0123456789\r\n0\r\nHost: b.test\r\n\r\nGET http://b.test/ HTTP/1.1\r\n\r\n"
    out, reader = fed(body, step)
    assert reader.done
    assert out == b"5\r\nhello\r\na\r\n0123456789\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "body",
    [
        b"5\nhello\r\n",
        b"5\r\nhelloX\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"-1\r\n",
        b"0x5\r\n",
        b" 5\r\n",
        b"5 \r\n",
        b"\r\n",
        b"g\r\n",
        b"5;\x00\r\n",
        b"f" * 16 + b"\r\n",
        b"5;" + b"x" * 2000,
        b"1_0\r\n",
        b"0\r\n" + b"a" * 9000,
    ],
)
@pytest.mark.parametrize("step", [1, 5000])
def test_a_body_that_is_not_strictly_in_chunks_is_refused(body: bytes, step: int) -> None:
    with pytest.raises(InvalidHead):
        fed(body, step)


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=5), st.integers(1, 20))
def test_every_body_in_chunks_comes_through_however_it_is_cut(chunks: list[bytes], step: int) -> None:
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    out, reader = fed(body, step)
    assert reader.done
    assert fed(out, 1000)[0] == out


def test_a_response_says_that_the_connection_ends() -> None:
    status, written, length = rewrite_response(
        head("HTTP/1.1 200 OK", "Connection: keep-alive", "Keep-Alive: timeout=5", "Content-Length: 5"), "GET"
    )
    assert (status, length) == (200, 5)
    assert written == head("HTTP/1.1 200 OK", "Content-Length: 5", "Connection: close")


@pytest.mark.parametrize(
    ("line", "fields", "method", "length"),
    [
        ("HTTP/1.1 200 OK", (), "GET", None),
        ("HTTP/1.1 200", ("Content-Length: 3",), "HEAD", 0),
        ("HTTP/1.0 304 Not Modified", ("Content-Length: 3",), "GET", 0),
        ("HTTP/1.1 200 OK", ("Content-Length: 3", "Transfer-Encoding: chunked"), "GET", None),
        ("HTTP/1.1 200 OK", ("Content-Length: 3", "Content-Length: 4"), "GET", None),
        ("HTTP/1.1 200 OK", ("Content-Length: x",), "GET", None),
    ],
)
def test_the_length_of_a_response(line: str, fields: tuple[str, ...], method: str, length: int | None) -> None:
    assert rewrite_response(head(line, *fields), method)[2] == length


@pytest.mark.parametrize(
    "line", ["nonsense", "HTTP/1.1 101 Switching", "HTTP/2 200", "HTTP/1.1 99 x", "SSH-2.0-x", "HTTP/1.1 2000"]
)
def test_a_response_that_is_not_http_is_refused(line: str) -> None:
    with pytest.raises(InvalidHead):
        rewrite_response(head(line), "GET")
