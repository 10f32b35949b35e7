"""HTTP connection to a Holdfast server: requests, safe retries, and the server's errors as Holdfast exceptions.

Idempotent requests, such as reads, withdrawals and sends (they carry an idempotency key), are retried while the server
does not answer, for at most ``retry_s``. Stops, and interrupts without a run id, are not: the second one could hit a
later run. A request that never reached the server is always safe to retry.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Self, TypeVar
from urllib.parse import SplitResult, urlsplit

import httpx2
import msgspec

from holdfast.client.wire import connecting, decode, error_of, unreachable
from holdfast.errors import ConfigurationError, HoldfastError, InvalidRequest, RateLimited

__all__ = ["Transport"]

T = TypeVar("T")

_CONNECT_S = 5.0
_REPLY_S = 30.0
_SILENCE_S = 45.0
_LEAST_BYTES_PER_S = 100_000
_FIRST_DELAY_S = 0.05
_MOST_DELAY_S = 2.0


class Transport:
    """Requests to one server, with one credential. Use it from one loop only, inside ``async with``.

    ``approval_key`` is sent with approvals where the server requires one; set it to the key that a person typed.

    Parameters:
        url: the server's address.
        key: an API key; not required on loopback while the server has none.
        user: the principal to act for; requires a key with role trusted or admin.
        retry_s: how long to retry a request that is safe to repeat while the server does not answer, in seconds.
        reconnect_s: how long `RemoteSession.events` tries to reconnect, in seconds.
        on_cut: called with the error when an event connection is lost, before the reconnect.
        on_back: called after the reconnect.
        transport: carries the requests in place of a socket, such as `httpx2.ASGITransport`.

    Raises:
        ConfigurationError: `url` is not an http or https address, or `key` or `user` is invalid.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8420",
        key: str | None = None,
        *,
        user: str | None = None,
        retry_s: float = 10.0,
        reconnect_s: float = 60.0,
        on_cut: Callable[[HoldfastError], None] | None = None,
        on_back: Callable[[], None] | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
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
        """GET `path` and decode the response as `kind`. Raises the server's error."""
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
        """Call one operation of the API and return its successful response.

        Parameters:
            method, path, query: as in the OpenAPI document.
            body: encoded as JSON; None: no body.
            repeatable: whether the request is idempotent, so that it may be retried if the response is lost.
            reply_s: how long the server may take to respond, in seconds.

        Raises:
            HoldfastError: the server's error, of the same class as on the server.
            ServerUnreachable: the server did not respond; a request that is not repeatable may have taken effect.
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
        """Send raw bytes. Retried while the server does not answer, because identical bytes are stored once.

        Raises as `request`, and `InvalidRequest` for an invalid media type.
        """
        if not (media_type.isascii() and media_type.isprintable()):
            raise InvalidRequest(f"{media_type[:100]!r} is not a media type", hint="use one such as image/png")
        query = {"name": name} if name else None
        headers = {"content-type": media_type}
        reply_s = _REPLY_S + len(body) / _LEAST_BYTES_PER_S
        return await self._send("POST", path, bytes(body), headers, query, repeatable=True, reply_s=reply_s)

    @asynccontextmanager
    async def stream(self, path: str, *, query: Mapping[str, str]) -> AsyncGenerator[httpx2.Response, None]:
        """Open an event stream; the response may be an error. Raises `httpx2.TransportError` if the stream breaks."""
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
    """Return the parts of a server's URL, which may end with the path of a proxy. Raises `ConfigurationError`."""
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        fits = fits and not (parts.query or parts.fragment) and url.isprintable() and " " not in url
    except ValueError:
        fits = False
    if not fits:
        raise ConfigurationError(f"{url!r} is not a server URL", hint="use one such as http://127.0.0.1:8420")
    return parts
