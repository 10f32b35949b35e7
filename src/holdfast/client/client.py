"""HTTP connection to a Holdfast server: requests, safe retries, and the server's errors as Holdfast exceptions.

Idempotent requests are retried while the server does not answer, for at most ``retry_s``: reads, withdrawals, and
sends (they carry an idempotency key). Interrupts and stops are not retried: the second one could hit a later run. A
request that never reached the server is always safe to retry.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit

import httpx2
import msgspec

from holdfast.client.schedules import RemoteSchedule
from holdfast.client.session import RemoteSession
from holdfast.client.wire import connecting, decode, error_of, unreachable
from holdfast.errors import ConfigurationError, HoldfastError, InvalidRequest, RateLimited
from holdfast.protocol.messages import Policy, SessionView, TreeNode
from holdfast.protocol.schedules import Miss, ScheduleView

__all__ = ["Client"]

T = TypeVar("T")

_CONNECT_S = 5.0
_REPLY_S = 30.0
_LEAST_BYTES_PER_S = 100_000
_FIRST_DELAY_S = 0.05
_MOST_DELAY_S = 2.0


class _Sessions(msgspec.Struct):
    sessions: list[SessionView]


class _Schedules(msgspec.Struct):
    schedules: list[ScheduleView]


class Client:
    """Sessions of a server, with the interface of a `Host`'s. Open it with ``async with``; use it from one loop only.

    Parameters:
        url: the server's address.
        key: an API key; not required on loopback while the server has none.
        user: the principal to act for; requires a key with role trusted or admin.
        retry_s: how long to retry a request that is safe to repeat while the server does not answer, in seconds.
        reconnect_s: how long `RemoteSession.events` tries to reconnect, in seconds.
        on_cut: called with the error when an event connection is lost, before the reconnect.
        on_back: called after the reconnect.

        ``approval_key`` is sent with approvals where the server requires one; set it to the key that a person typed.

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

    async def __aenter__(self) -> Client:
        await self.http.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.http.aclose()

    def session(self, key: str) -> RemoteSession:
        """Return a session of the key's principal. No I/O. Raises `InvalidKey` for a key that a URL cannot carry."""
        return RemoteSession(self, key)

    async def sessions(self, *, limit: int = 100, everybody: bool = False) -> list[SessionView]:
        """Return sessions, most recently changed first.

        Parameters:
            limit: maximum number of sessions.
            everybody: include all principals; requires an admin key.
        """
        query = {"limit": str(limit), "all": str(everybody).lower()}
        return (await self.read("/v1/sessions", _Sessions, query=query)).sessions

    async def schedule(
        self,
        key: str,
        text: str,
        *,
        every_s: float | None = None,
        cron: str | None = None,
        timezone: str = "UTC",
        schedule_id: str | None = None,
        agent: str | None = None,
        overlap: Policy = "queue",
        miss: Miss = "skip",
        initial_delay_s: float | None = None,
        jitter_s: float = 0.0,
        max_runs: int | None = None,
    ) -> RemoteSchedule:
        """Send a session messages on a schedule; as `SessionLike.schedule`, for the session `key`."""
        return await self.session(key).schedule(
            text,
            every_s=every_s,
            cron=cron,
            timezone=timezone,
            schedule_id=schedule_id,
            agent=agent,
            overlap=overlap,
            miss=miss,
            initial_delay_s=initial_delay_s,
            jitter_s=jitter_s,
            max_runs=max_runs,
        )

    def find_schedule(self, schedule_id: str) -> RemoteSchedule:
        """Return a schedule of the key's principal. No I/O. Raises `InvalidKey` for an id that a URL cannot carry."""
        return RemoteSchedule(self, schedule_id)

    async def schedules(
        self, *, session: str | None = None, limit: int = 100, everybody: bool = False
    ) -> list[ScheduleView]:
        """Return schedules in order of creation.

        Parameters:
            session: only schedules of this session.
            limit: maximum number of schedules.
            everybody: include all principals; requires an admin key.
        """
        query = {"limit": str(limit), "all": str(everybody).lower()}
        if session is not None:
            query["session"] = session
        return (await self.read("/v1/schedules", _Schedules, query=query)).schedules

    async def tree(self, *, everybody: bool = False) -> TreeNode:
        """Return the live tasks, threads and processes; `everybody`: of all principals, requires an admin key."""
        return await self.read("/v1/tree", TreeNode, query={"all": str(everybody).lower()})

    async def read(self, path: str, kind: type[T], *, query: dict[str, str] | None = None) -> T:
        """GET `path` and decode the response as `kind`. Raises the server's error."""
        response = await self.request("GET", path, query=query, repeatable=True)
        return decode(response, kind)

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, object] | None = None,
        query: dict[str, str] | None = None,
        repeatable: bool = False,
        reply_s: float = _REPLY_S,
    ) -> httpx2.Response:
        """Call one operation of the API and return its successful response.

        Parameters:
            method, path, query: as in the OpenAPI document.
            body: encoded as JSON; None: no body.
            repeatable: a repeat has no second effect.
            reply_s: how long the server may take to respond, in seconds.

        Raises:
            HoldfastError: the server's error, of the same class as on the server.
            ServerUnreachable: no response; a request that is not repeatable may have taken effect.
        """
        for name, value in (body or {}).items():
            if isinstance(value, float) and not math.isfinite(value):  # JSON would encode it as null
                raise InvalidRequest(f"{name} is {value}; use a number of seconds, 0 or more")
        try:
            content = None if body is None else msgspec.json.encode(body)
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"cannot encode the text as UTF-8: {error.reason}", hint="remove lone surrogates"
            ) from None
        headers = {} if body is None and method != "POST" else {"content-type": "application/json"}
        return await self._exchange(method, path, content, headers, query, repeatable=repeatable, reply_s=reply_s)

    async def upload(self, path: str, body: bytes, *, media_type: str, name: str) -> httpx2.Response:
        """Send raw bytes. Retried while the server does not answer, because identical bytes are stored once.

        Raises as `request`, and `InvalidRequest` for an invalid media type.
        """
        if not (media_type.isascii() and media_type.isprintable()):
            raise InvalidRequest(f"{media_type[:100]!r} is not a media type", hint="use one such as image/png")
        query = {"name": name} if name else None
        headers = {"content-type": media_type}
        reply_s = _REPLY_S + len(body) / _LEAST_BYTES_PER_S
        return await self._exchange("POST", path, bytes(body), headers, query, repeatable=True, reply_s=reply_s)

    async def _exchange(
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
