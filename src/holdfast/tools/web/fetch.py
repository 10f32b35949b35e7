"""The tool that fetches a page as text, only from allowed addresses, with limits on size and time.

Invariants
- Each connection uses an address that `AddressRules` has checked. The Host header, SNI and certificate check use the
  requested name. Each redirect is a new request, so both rules apply to redirects as well.
- No connection outlives the call: keep-alive is not used, and the socket is closed when the call ends.
- Memory is bounded: the bytes read and the bytes decompressed are counted as they arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import ssl
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from holdfast.agents.run import Call
from holdfast.agents.tool import Tool, Toolset, ToolsetContext
from holdfast.errors import ToolFailed
from holdfast.runtime import current_scope
from holdfast.tools.addresses import AddressRules
from holdfast.tools.files.changes import OTHER_NAME, WorkspaceChange, change_workspace
from holdfast.tools.files.workspace import Workspace
from holdfast.tools.web.text import decoded, html_text, is_text

__all__ = ["Web"]

_CONNECT_S = 10.0
_REDIRECTS = 10
_PIECE_BYTES = 65_536
_MARGIN_S = 15.0
_HEADERS_LIMIT = 4000
_ACCEPT = "text/html, application/xhtml+xml, text/*;q=0.9, application/json;q=0.9, */*;q=0.5"
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetched:
    url: str
    status: str
    headers: httpx2.Headers
    data: bytes
    cut: bool

    @property
    def media_type(self) -> str:
        return str(self.headers.get("content-type", "")).partition(";")[0].strip().lower()


class Web(Toolset):
    """The tool ``fetch`` for a model, which fetches a page and returns the page's text.

    Private, loopback and link-local addresses, including those of cloud metadata services, are refused unless
    `allow_networks` includes them. This applies to host names, to any spelling of an address, and to redirects. Proxy
    environment variables are ignored.

    Parameters:
        allow_networks: non-public addresses that the tool may fetch from, such as ``["10.1.0.0/16"]``.
        ports: ports that the tool may connect to; None allows all ports.
        methods: HTTP methods that the model may use.
        workspace: workspace that the model may save downloads to; None disables saving.
        timeout_s: timeout of a whole fetch, including redirects, in seconds.
        limit_bytes: maximum number of body bytes to read, after decompression.
        text_limit: maximum number of text characters in a result; the model can request the rest.
        user_agent: value of the User-Agent header.

    Raises:
        ConfigurationError: if `AddressRules` rejects `allow_networks` or `Workspace` rejects `workspace`.
    """

    def __init__(
        self,
        *,
        allow_networks: Sequence[str] = (),
        ports: Sequence[int] | None = (80, 443),
        methods: Sequence[str] = ("GET", "HEAD"),
        workspace: Workspace | str | os.PathLike[str] | None = None,
        timeout_s: float = 30.0,
        limit_bytes: int = 5_000_000,
        text_limit: int = 40_000,
        user_agent: str = "holdfast (an AI agent's fetch)",
    ) -> None:
        self._rules = AddressRules(allow_networks, ports)
        self._methods = [method for method in _METHODS if method in methods]
        self._workspace = workspace if workspace is None or isinstance(workspace, Workspace) else Workspace(workspace)
        self._timeout_s = timeout_s
        self._limit_bytes = limit_bytes
        self._text_limit = text_limit
        self._user_agent = user_agent

    @contextlib.asynccontextmanager
    async def lifespan(self, home: ToolsetContext) -> AsyncIterator[None]:
        """Keep the records of what sessions made while the host runs."""
        if self._workspace is not None:
            self._workspace.keep_records(home.data_dir)
        yield

    def folders(self) -> Sequence[Path]:
        """Return the root of the workspace; the result is empty if no workspace was given."""
        return () if self._workspace is None else (self._workspace.root,)

    def tools(self) -> Sequence[Tool]:
        """Return the tool ``fetch``."""
        properties: dict[str, Any] = {
            "url": {"type": "string", "description": "Starts with https:// or http://."},
            "start": {"type": "integer", "minimum": 0, "description": "Character offset to start at."},
        }
        if len(self._methods) > 1:
            properties["method"] = {"enum": self._methods, "description": "Default: GET."}
        if {"POST", "PUT", "PATCH"} & set(self._methods):
            properties["body"] = {"type": "string", "description": "Request body."}
            properties["content_type"] = {"type": "string", "description": "Body type; default: application/json."}
        if self._workspace is not None:
            properties["save_as"] = {
                "type": "string",
                "description": "Save the body, of any type, to this workspace file instead of returning it.",
            }
        return (
            Tool(
                name="fetch",
                description=(
                    "Fetch a URL and return its text; for a web page, the readable part with its links. Pages are not "
                    "rendered and scripts do not run. Private addresses are refused."
                ),
                parameters={
                    "type": "object",
                    "properties": properties,
                    "required": ["url"],
                    "additionalProperties": False,
                },
                work=self.fetch,
                timeout_s=self._timeout_s + _MARGIN_S,
                idempotent=set(self._methods) <= {"GET", "HEAD"},
            ),
        )

    async def fetch(
        self,
        call: Call,
        url: str,
        start: int = 0,
        method: str = "GET",
        body: str | None = None,
        content_type: str = "application/json",
        save_as: str | None = None,
    ) -> str:
        """Fetch a URL and return its text.

        Raises:
            ToolFailed: if the URL is not allowed or the fetch fails.
        """
        content = None if body is None else body.encode("utf-8", "replace")
        headers = {"user-agent": self._user_agent, "accept": _ACCEPT, "accept-encoding": "gzip, deflate"}
        if content is not None:
            headers["content-type"] = content_type
        try:
            async with asyncio.timeout(self._timeout_s):
                fetched = await self._follow(method, url, headers, content)
        except TimeoutError as error:
            raise ToolFailed(f"{url} did not respond completely within {self._timeout_s:g} s") from error
        except httpx2.InvalidURL as error:
            raise ToolFailed(f"{url[:200]!r} is not a valid URL: {error}") from error
        except httpx2.TransportError as error:
            raise ToolFailed(f"{url}: fetch failed: {_why(error)}") from error
        scope = current_scope()
        assert scope is not None, "tools run in a scope"
        if save_as is not None:
            return await self._save(call, fetched, save_as)
        return await scope.spawn(self._show, fetched, start, on="thread", name="read")

    async def _follow(self, method: str, url: str, headers: dict[str, str], content: bytes | None) -> _Fetched:
        """Send a request, follow redirects, and return the final response."""
        for _ in range(_REDIRECTS + 1):
            host, port = self._rules.check_url(url)
            addresses = await self._rules.addresses(host, port)
            request = httpx2.Request(method, url, headers=headers, content=content)
            async with self._opened(request, addresses, port) as answer:
                target = answer.headers.get("location")
                if not answer.is_redirect or target is None:
                    return await self._read(answer, url, with_body=method != "HEAD")
                if answer.status_code == 303 or (answer.status_code in (301, 302) and method == "POST"):
                    method = "HEAD" if method == "HEAD" else "GET"
                    content = None
                    headers.pop("content-type", None)
                url = str(httpx2.URL(url).join(target))
        raise ToolFailed(f"stopped after {_REDIRECTS} redirects; the next one leads to {url[:200]}")

    @contextlib.asynccontextmanager
    async def _opened(self, request: httpx2.Request, addresses: list[str], port: int) -> AsyncIterator[httpx2.Response]:
        """Send the request to the first address that accepts a connection."""
        limits = httpx2.Limits(max_connections=1, max_keepalive_connections=0)
        timeout = httpx2.Timeout(self._timeout_s, connect=min(_CONNECT_S, self._timeout_s))
        extensions = {"sni_hostname": request.url.host, "timeout": timeout.as_dict()}
        scope = current_scope()
        assert scope is not None, "tools run in a scope"
        context = await scope.spawn(_ssl_context, on="thread", name="certificates")
        transport = httpx2.AsyncHTTPTransport(verify=context, trust_env=False, limits=limits)
        async with contextlib.AsyncExitStack() as opened:
            await opened.enter_async_context(transport)
            for number, address in enumerate(addresses, 1):
                aimed = httpx2.Request(
                    request.method,
                    request.url.copy_with(host=address, port=port),
                    headers=request.headers,
                    stream=request.stream,
                    extensions=extensions,
                )
                try:
                    answer = await transport.handle_async_request(aimed)
                    break
                except (httpx2.ConnectError, httpx2.ConnectTimeout):
                    if number == len(addresses):
                        raise
            opened.push_async_callback(answer.aclose)
            yield answer

    async def _read(self, answer: httpx2.Response, url: str, *, with_body: bool) -> _Fetched:
        data = bytearray()
        cut = False
        if with_body:
            coding = answer.headers.get("content-encoding", "").strip().lower()
            async with contextlib.aclosing(_unpacked(answer, coding)) as pieces:
                async for piece in pieces:
                    data += piece
                    if cut := len(data) > self._limit_bytes:
                        del data[self._limit_bytes :]
                        break
        status = f"{answer.status_code} {answer.reason_phrase}".strip()
        return _Fetched(url=url, status=status, headers=answer.headers, data=bytes(data), cut=cut)

    async def _save(self, call: Call, fetched: _Fetched, path: str) -> str:
        assert self._workspace is not None
        if fetched.cut:
            raise ToolFailed(f"the body exceeds {self._limit_bytes:,} bytes and was not saved")

        def save(change: WorkspaceChange) -> str:
            return change.replace(path, fetched.data)

        saved = await change_workspace(call, self._workspace, save, advice=OTHER_NAME)
        return f"{_headline(fetched)}\n[saved to {saved}]"

    def _show(self, fetched: _Fetched, start: int) -> str:
        if not fetched.data:
            lines = "\n".join(f"{name}: {value}" for name, value in fetched.headers.items())
            return f"{_headline(fetched)}\n{lines[:_HEADERS_LIMIT]}\n[no body]"
        if not is_text(fetched.media_type, fetched.data):
            hint = "; save it with save_as" if self._workspace is not None else ""
            return f"{_headline(fetched)}\n[not text, not shown{hint}]"
        is_html = fetched.media_type in ("text/html", "application/xhtml+xml")
        charset = httpx2.Response(200, headers=fetched.headers).charset_encoding
        text = decoded(fetched.data, charset, html=is_html)
        title = ""
        if is_html:
            title, text = html_text(text, fetched.url)
        shown = text[start : start + self._text_limit]
        parts = [_headline(fetched), *([f"# {title}"] if title else []), shown or "[no text]"]
        end = start + len(shown)
        if end < len(text):
            parts.append(f"[characters {start:,} to {end:,} of {len(text):,}; for more: start={end}]")
        elif fetched.cut:
            parts.append(f"[truncated: the body exceeds {self._limit_bytes:,} bytes]")
        return "\n".join(parts)


def _headline(fetched: _Fetched) -> str:
    kind = fetched.media_type or "no content type"
    return (
        f"[{fetched.status} · {kind} · {len(fetched.data):,} bytes{' and more' if fetched.cut else ''} · {fetched.url}]"
    )


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """Return a TLS context with this machine's certificates; the first call takes a while."""
    return httpx2.create_ssl_context(trust_env=True)


async def _unpacked(answer: httpx2.Response, coding: str) -> AsyncGenerator[bytes, None]:
    """Yield the decompressed response body in chunks of bounded size."""
    if coding in ("", "identity"):
        async for raw in answer.aiter_raw():
            yield raw
        return
    if coding not in ("gzip", "x-gzip", "deflate"):
        raise ToolFailed(f"the server used an unrequested content encoding ({coding[:40]})")
    unpacker: Any = zlib.decompressobj(zlib.MAX_WBITS | 32)
    begun = False
    async for raw in answer.aiter_raw():
        rest = raw
        while rest and not unpacker.eof:
            try:
                piece = unpacker.decompress(rest, _PIECE_BYTES)
            except zlib.error as error:
                if begun or coding != "deflate":
                    raise ToolFailed(f"failed to decompress the response: {error}") from error
                unpacker = zlib.decompressobj(-zlib.MAX_WBITS)  # some servers omit the zlib header
                begun = True
                continue
            begun = True
            rest = unpacker.unconsumed_tail
            yield piece
        if unpacker.eof:
            return


def _why(error: BaseException) -> str:
    """Return the text of an error, or the text of its cause if the error has no text."""
    below = error.__cause__ or error.__context__
    return str(error) or (_why(below) if below is not None else type(error).__name__)
