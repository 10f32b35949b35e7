"""HTTP transport to a Holdfast server: sends requests, retries them if that is safe, and raises the server's errors.

While the server does not answer, idempotent requests are retried for at most ``retry_s``. Reads and withdrawals are
idempotent; so are sends, because each carries an idempotency key. Stops, and interrupts without a run id, are not
retried after a lost response, because a retry could stop a later run. A request that never reached the server, or that
was refused because of a rate limit, is always safe to retry.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Self, TypeVar
from urllib.parse import SplitResult, urlsplit

import httpx2
import msgspec

from holdfast.client.wire import connecting, decode, error_of, unreachable
from holdfast.errors import ConfigurationError, HoldfastError, InvalidRequest, RateLimited
from holdfast.settings import load_settings, server_url

__all__ = ["Transport"]

T = TypeVar("T")

_CONNECT_S = 5.0
_REPLY_S = 30.0
_SILENCE_S = 45.0
_LEAST_BYTES_PER_S = 100_000
_FIRST_DELAY_S = 0.05
_MOST_DELAY_S = 2.0


class Transport:
    """HTTP transport to one server, with one credential.

    Open the transport with ``async with``, and use it from one event loop only. If the server requires an approval key,
    set the attribute ``approval_key`` to the key that a person typed; the client sends the key with each approval.

    Parameters:
        url: URL of the server; None uses the one that commands use: ``HOLDFAST_URL``, or else the host and port from
            the settings (``HOLDFAST_PORT``, ``holdfast.toml``; normally http://127.0.0.1:8420).
        key: API key or local token; None sends no credential.
        user: principal to act for, which requires a key with role trusted or admin; None acts for the key's own
            principal.
        retry_s: maximum time in seconds for which a request is retried, if retrying it is safe.
        reconnect_s: maximum time in seconds for which `RemoteSession.events` tries to reconnect.
        on_cut: called with the error when the connection of an event stream is lost, before the first reconnect.
        on_back: called without arguments when a lost event stream receives data again.
        transport: HTTPX transport that carries the requests, such as `httpx2.ASGITransport`; None connects to `url`.

    Raises:
        ConfigurationError: if `url` is not an http or https URL, or if `key`, `user` or the settings are invalid.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        user: str | None = None,
        retry_s: float = 10.0,
        reconnect_s: float = 60.0,
        on_cut: Callable[[HoldfastError], None] | None = None,
        on_back: Callable[[], None] | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        if url is None:
            url = os.environ.get("HOLDFAST_URL") or server_url(load_settings())
        parts = _checked(url)
        self.url = url.rstrip("/")
        self.retry_s = retry_s
        self.reconnect_s = reconnect_s
        self.on_cut = on_cut
        self.on_back = on_back
        self.approval_key: str | None = None
        headers = {"accept": "application/json"}
        if key is not None:
            if not (key.isascii() and key.isprintable() and key and " " not in key):
                raise ConfigurationError("invalid API key", hint="pass the key as it was shown: hf_…")
            headers["authorization"] = f"Bearer {key}"
        if user is not None:
            if not user.isprintable():
                raise ConfigurationError(f"{user!r} is not a valid principal", hint="use printable characters")
            headers["x-holdfast-user"] = user
        self.http = httpx2.AsyncClient(
            headers={name.encode(): value.encode() for name, value in headers.items()},
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=100),
            timeout=httpx2.Timeout(_REPLY_S, connect=_CONNECT_S, pool=None),
            verify=parts.scheme == "https",
            trust_env=parts.hostname not in ("localhost", "127.0.0.1", "::1"),
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        await self.http.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.http.aclose()

    async def read(self, path: str, kind: type[T], *, query: dict[str, str] | None = None) -> T:
        """Send a GET request for `path`, and return the response decoded as `kind`.

        Raises the same errors as `request`.
        """
        response = await self.request("GET", path, query=query, repeatable=True)
        return decode(response, kind)

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, object] | msgspec.Struct | None = None,
        query: dict[str, str] | None = None,
        repeatable: bool = False,
        reply_s: float = _REPLY_S,
    ) -> httpx2.Response:
        """Send a request to the API, and return its successful response.

        Parameters:
            method: HTTP method.
            path: path of the operation, with its placeholders filled in.
            body: request body, which is encoded as JSON; None sends no body.
            query: query parameters by name; None sends no query.
            repeatable: whether the request is idempotent and may therefore be retried if the response is lost.
            reply_s: timeout for the server's response, in seconds.

        Raises:
            HoldfastError: if the server responds with an error; the exception has the same class as on the server.
            ServerUnreachable: if the server does not respond; the request may have taken effect nevertheless.
        """
        fields = msgspec.structs.asdict(body) if isinstance(body, msgspec.Struct) else body or {}
        for name, value in fields.items():
            if isinstance(value, float) and not math.isfinite(value):  # JSON would encode it as null
                raise InvalidRequest(f"{name} is {value}; use a number of seconds, 0 or more")
        try:
            content = None if body is None else msgspec.json.encode(body)
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"cannot encode the text as UTF-8: {error.reason}", hint="remove lone surrogates"
            ) from None
        headers = {} if body is None and method != "POST" else {"content-type": "application/json"}
        return await self._send(method, path, content, headers, query, repeatable=repeatable, reply_s=reply_s)

    async def upload(self, path: str, body: bytes, *, media_type: str, name: str) -> httpx2.Response:
        """Upload raw bytes. Retried after a lost response, because the server stores identical bytes only once.

        Raises the same errors as `request`, and `InvalidRequest` if the media type is invalid.
        """
        if not (media_type.isascii() and media_type.isprintable()):
            raise InvalidRequest(f"{media_type[:100]!r} is not a media type", hint="use one such as image/png")
        query = {"name": name} if name else None
        headers = {"content-type": media_type}
        reply_s = _REPLY_S + len(body) / _LEAST_BYTES_PER_S
        return await self._send("POST", path, bytes(body), headers, query, repeatable=True, reply_s=reply_s)

    @asynccontextmanager
    async def stream(self, path: str, *, query: Mapping[str, str]) -> AsyncGenerator[httpx2.Response, None]:
        """Open an event stream, and yield the response, which may be an error response.

        Raises `httpx2.TransportError` if the connection fails.
        """
        opening = self.http.stream(
            "GET",
            self.url + path,
            params=query,
            headers={"accept": "text/event-stream"},
            timeout=httpx2.Timeout(_SILENCE_S, connect=_CONNECT_S, pool=None),
        )
        async with AsyncExitStack() as stack:
            with connecting():
                response = await stack.enter_async_context(opening)
            yield response

    async def _send(
        self,
        method: str,
        path: str,
        content: bytes | None,
        headers: dict[str, str],
        query: dict[str, str] | None,
        *,
        repeatable: bool,
        reply_s: float,
    ) -> httpx2.Response:
        timeout = httpx2.Timeout(reply_s, connect=_CONNECT_S, pool=None)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.retry_s
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                with connecting():
                    response = await self.http.request(
                        method, self.url + path, params=query, content=content, headers=headers, timeout=timeout
                    )
            except httpx2.TransportError as error:
                reached = not isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout))
                failure: HoldfastError = unreachable(self.url, error, lost_reply=reached and not repeatable)
                if reached and not repeatable:
                    raise failure from error
            else:
                if response.status_code < 400:
                    return response
                failure = error_of(response)
                if not isinstance(failure, RateLimited):
                    raise failure
                delay_s = max(delay_s, failure.retry_after_s or 0.0)
            if loop.time() + delay_s > deadline:
                raise failure
            await asyncio.sleep(delay_s)
            delay_s = min(_MOST_DELAY_S, delay_s * 2)


def _checked(url: str) -> SplitResult:
    """Parse a server's URL, which may contain the path prefix of a proxy.

    Raises `ConfigurationError` if the URL is invalid.
    """
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        fits = fits and not (parts.query or parts.fragment) and url.isprintable() and " " not in url
    except ValueError:
        fits = False
    if not fits:
        raise ConfigurationError(f"{url!r} is not a server URL", hint="use one such as http://127.0.0.1:8420")
    return parts
