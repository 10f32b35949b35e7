"""Authentication: API keys, roles, and the allow-lists for ``Host`` and ``Origin``.

A key is shown once, and only its SHA-256 hash is stored. Until the first key is created, anyone on loopback acts as the
principal ``local`` with role admin; afterwards, every request requires a key. A server that listens on any other
address must have a valid key, or accept signed tokens, before it starts. If agents may execute commands on this
machine, requests on loopback require a credential even before the first key is created: the local token
(`holdfast.local_token`), which lets its holder act as ``local``. If the settings contain a key that verifies signed
tokens, such tokens are accepted too (`holdfast.server.tokens`).

Keys change only through `KeyRing`. If no other host uses the store, the keys in memory are therefore always up to date.
Otherwise, they are read again at the interval ``cluster_poll_s`` (`KeyRing.follow`).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast
from urllib.parse import urlsplit

from holdfast import ids
from holdfast.clock import Clock, system_clock
from holdfast.errors import (
    ApprovalKeyRequired,
    ConfigurationError,
    Forbidden,
    HostRefused,
    InvalidRequest,
    OriginRefused,
    StorageError,
    Unauthenticated,
    UnknownKey,
)
from holdfast.local_token import is_loopback
from holdfast.protocol.http import KeyRole
from holdfast.server.caller import Caller, Role
from holdfast.server.credentials import CredentialsInUse
from holdfast.server.tokens import TokenVerifier, looks_signed
from holdfast.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.storage.port import KeyRecord

__all__ = ["LOCAL", "KeyRing", "KeyStore", "OriginGate", "make_key", "refuse_repeated"]

LOCAL = Caller("local", "admin")
"""The caller of every request on loopback while the server has no keys."""

T = TypeVar("T")

_APPROVAL_PREFIX = "hfa_"
_NO_KEYS = frozenset(("jwt",))
_REVOKED = "the key was revoked or the server began to require one"
_USER_HEADER = b"x-holdfast-user"
_ONCE = (b"host", b"origin", b"authorization", _USER_HEADER, b"content-type", b"last-event-id")


class KeyStore(Protocol):
    """Interface of the store that `KeyRing` uses."""

    async def add_key(self, record: KeyRecord) -> None:
        """Store the record of a new key, which contains the key's hash."""
        ...

    async def keys(self) -> Sequence[KeyRecord]:
        """Return the records of all keys, including revoked keys."""
        ...

    async def revoke_key(self, key_id: str, *, at: float) -> bool:
        """Revoke a key. Return False if the key does not exist or is already revoked."""
        ...


def digest_of(secret: str | bytes) -> bytes:
    """Return the SHA-256 hash of a secret. Only this hash is stored, never the secret itself."""
    return hashlib.sha256(secret.encode() if isinstance(secret, str) else secret).digest()


def make_key(
    *, principal: str, role: KeyRole, label: str, at: float, agents: Sequence[str] | None = None
) -> tuple[KeyRecord, str]:
    """Generate a key, and return its record and its secret. The caller must show the secret only once.

    Raises:
        InvalidRequest: if the principal, the label or an agent name is too long or not printable, or if the principal
            or an agent name is empty.
    """
    from holdfast.storage.port import KeyRecord

    check_principal(principal)
    if len(label) > 200 or not label.isprintable():
        raise InvalidRequest("the label is too long or not printable", hint="use at most 200 printable characters")
    for agent in agents or ():
        if not 1 <= len(agent) <= 200 or not agent.isprintable():
            raise InvalidRequest(f"{agent[:40]!r} is not a valid agent name", hint="use 1 to 200 printable characters")
    secret = ids.secret(_APPROVAL_PREFIX) if role == "approver" else ids.secret()
    digest = digest_of(secret)
    record = KeyRecord(
        key_id="k_" + digest.hex()[:12],
        principal=principal,
        role=role,
        digest=digest,
        created_at=at,
        label=label,
        agents=None if agents is None else tuple(sorted(set(agents))),
    )
    return record, secret


def check_principal(principal: str) -> None:
    """Raise `InvalidRequest` unless `principal` consists of 1 to 200 printable characters."""
    if not 1 <= len(principal) <= 200 or not principal.isprintable():
        raise InvalidRequest(f"{principal[:40]!r} is not a valid principal", hint="use 1 to 200 printable characters")


class KeyRing:
    """The API keys of a host. Use a key ring from one event loop only.

    The attribute ``in_use`` is the register of requests in progress. When a key change invalidates the credential of a
    request, the request ends immediately.

    Parameters:
        store: store that contains the keys.
        clock: source of the current time.
        token: local token that every request must contain while the server has no keys; if None, requests then need no
            token.
        signed: verifier of signed tokens (JWT); if None, signed tokens are not accepted.
    """

    __slots__ = (
        "_approvers",
        "_by_digest",
        "_callers",
        "_changing",
        "_clock",
        "_ever",
        "_shown_approver",
        "_signed",
        "_store",
        "_token",
        "_writes",
        "in_use",
    )

    def __init__(
        self,
        store: KeyStore,
        clock: Clock = system_clock,
        *,
        token: str | None = None,
        signed: TokenVerifier | None = None,
    ) -> None:
        self._store = store
        self._signed = signed
        self._clock = clock
        self._token = None if token is None else digest_of(token)
        self._by_digest: dict[bytes, KeyRecord] = {}
        self._callers: dict[str, Caller] = {}
        self._approvers: dict[bytes, KeyRecord] = {}
        self._shown_approver: bytes | None = None
        self._ever = False
        self._changing = asyncio.Lock()
        self._writes: set[asyncio.Task[Any]] = set()
        self.in_use = CredentialsInUse(clock)

    @property
    def required(self) -> bool:
        """Whether requests require a key or a token.

        True once a key other than an approval key has been created, even if all keys are revoked.
        """
        return self._ever or self._token is not None or self._signed is not None

    @property
    def ever(self) -> bool:
        """Whether a key other than an approval key has ever been created."""
        return self._ever

    @property
    def any_valid(self) -> bool:
        """Whether a valid key exists or signed tokens are accepted. Approval keys do not count."""
        return bool(self._by_digest) or self._signed is not None

    @property
    def any_approver(self) -> bool:
        """Whether the store contains a valid approval key."""
        return bool(self._approvers)

    async def load(self) -> None:
        """Read the keys from the store."""
        async with self._changing:
            await self._load()

    async def _load(self) -> None:
        """Read the keys from the store. The caller must hold the lock.

        Without the lock, the older of two concurrent reads could be applied last.
        """
        records = await self._store.keys()
        valid_ones = {record.digest[:8]: record for record in records if record.revoked_at is None}
        self._by_digest = {start: record for start, record in valid_ones.items() if record.role != "approver"}
        self._callers = {record.key_id: _caller_with(record) for record in self._by_digest.values()}
        self._approvers = {start: record for start, record in valid_ones.items() if record.role == "approver"}
        self._ever = any(record.role != "approver" for record in records)
        valid = {record.key_id for record in self._by_digest.values()}
        self.in_use.end_all_but(valid | (_NO_KEYS if self._ever else _NO_KEYS | {LOCAL.credential}), _REVOKED)

    async def follow(self, every_s: float) -> None:
        """Read the keys at this interval, because other hosts create and revoke keys too. It does not return."""
        while True:
            await asyncio.sleep(every_s)
            with suppress(StorageError):  # the next read comes soon
                await self.load()

    async def records(self) -> list[KeyRecord]:
        """Return the records of all keys, including revoked keys."""
        return list(await self._store.keys())

    async def create(
        self, *, principal: str, role: KeyRole, label: str = "", agents: Sequence[str] | None = None
    ) -> tuple[KeyRecord, str]:
        """Create a key, and return its record and its secret. The secret cannot be read again. Raises as `make_key`."""
        record, secret = make_key(principal=principal, role=role, label=label, agents=agents, at=self._clock.now())
        await self._change(self._store.add_key(record))
        return record, secret

    async def revoke(self, key_id: str, *, again: bool = False) -> KeyRecord:
        """Revoke a key, end the requests in progress that use the key, and return its record.

        Parameters:
            key_id: id of the key.
            again: whether to accept a key that is already revoked.

        Raises:
            UnknownKey: if the key does not exist, or if it is already revoked and `again` is False.
        """
        revoked = await self._change(self._store.revoke_key(key_id, at=self._clock.now()))
        record = next((one for one in await self._store.keys() if one.key_id == key_id), None)
        if record is None or not (revoked or again):
            raise UnknownKey(f"unknown or revoked key {key_id[:40]!r}")
        return record

    async def _change(self, change: Coroutine[Any, Any, T]) -> T:
        """Write a change to the store and reload the keys, even if the caller is cancelled meanwhile.

        The write and the reload run in a separate task, which is never cancelled.
        """
        task = asyncio.create_task(self._write(change), name="change of keys")  # noqa: TID251  # this ring owns it
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        return await asyncio.shield(task)

    async def _write(self, change: Coroutine[Any, Any, T]) -> T:
        async with self._changing:
            try:
                return await change
            finally:
                await self._load()

    def show_approver(self) -> str:
        """Create and return an approval key that is valid for all principals, until this key ring is discarded.

        The key ring keeps only the key's hash. Show the key on the terminal of the server's operator, and never write
        it to a file or log.
        """
        secret = ids.secret(_APPROVAL_PREFIX)
        self._shown_approver = digest_of(secret)
        return secret

    def approver(self, secret: str, principal: str) -> str:
        """Check that an approval key may approve tool calls of `principal`, and return the key's id.

        Raises `ApprovalKeyRequired` if the key is missing or invalid.
        """
        if not secret:
            raise ApprovalKeyRequired("approvals on this server require an approval key typed by a person")
        digest = digest_of(secret)
        if self._shown_approver is not None and hmac.compare_digest(self._shown_approver, digest):
            return "shown by serve"
        record = self._approvers.get(digest[:8])
        if record is None or not hmac.compare_digest(record.digest, digest) or record.principal != principal:
            raise ApprovalKeyRequired("invalid approval key for this session")
        return record.key_id

    def find(self, secret: bytes) -> KeyRecord:
        """Return the record of the valid key with this secret. Raises `Unauthenticated` if no valid key matches."""
        digest = digest_of(secret)
        record = self._by_digest.get(digest[:8])
        if record is None or not hmac.compare_digest(record.digest, digest):
            raise Unauthenticated("invalid API key")
        return record

    def holder(self, authorization: bytes) -> str | None:
        """Return the principal of the API key or local token in an ``Authorization`` header; None if neither is valid.

        Use the result only to decide which connections are served first. This method does not authenticate a request.
        """
        try:
            if self._ever:
                return self.find(_secret(authorization)).principal
            if self._token is not None:
                self._check_token(self._token, authorization)
                return LOCAL.principal
        except Unauthenticated:
            pass
        return None

    def may_be_signed(self, authorization: bytes) -> bool:
        """Return whether an ``Authorization`` header may contain a signed token that the server accepts.

        The token is not verified.
        """
        try:
            return self._signed is not None and looks_signed(_secret(authorization))
        except Unauthenticated:
            return False

    def caller(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Authenticate a request by its `headers`, and return the caller.

        Raises:
            Unauthenticated: if a required credential is missing or invalid.
            Forbidden: if the credential may not act for the principal in ``X-Holdfast-User``.
            InvalidRequest: if ``X-Holdfast-User`` is not a valid principal.
        """
        caller = self._known(headers.get(b"authorization"))
        user = headers.get(_USER_HEADER)
        if user is None:
            return caller
        if caller.role == "user":
            raise Forbidden(
                "this key may not act for other users", hint="use a key with role trusted, or omit X-Holdfast-User"
            )
        try:
            principal = user.decode("utf-8")
        except UnicodeDecodeError:
            raise InvalidRequest("X-Holdfast-User is not UTF-8", hint="encode the name as UTF-8") from None
        check_principal(principal)
        if principal == LOCAL.principal and caller.role != "admin":
            raise Forbidden("this key may not act for 'local'", hint="'local' is reserved for servers without keys")
        return replace(caller, principal=principal, owner=caller.principal)

    def _known(self, authorization: bytes | None) -> Caller:
        """Return the caller that a key or token identifies, or `LOCAL` if the server requires neither.

        Raises `Unauthenticated` if a required credential is missing or invalid.
        """
        if self._signed is not None and authorization is not None and looks_signed(secret := _secret(authorization)):
            return self._signed.caller(secret)
        if self._ever:
            return self._callers[self.find(_secret(authorization)).key_id]
        if self._token is not None:
            self._check_token(self._token, authorization)
        elif self._signed is not None:
            _secret(authorization)
            raise Unauthenticated("the credential is not a signed token")
        return LOCAL

    @staticmethod
    def _check_token(token: bytes, authorization: bytes | None) -> None:
        if authorization is None or not hmac.compare_digest(token, digest_of(_secret(authorization))):
            said = "the request has no token" if authorization is None else "the token is invalid"
            raise Unauthenticated(
                f"this server's agents can run commands on this machine, so a token is required: {said}",
                hint="send 'Authorization: Bearer <token>'; the token is in the …-token file beside the store",
            )


def _caller_with(record: KeyRecord) -> Caller:
    agents = None if record.agents is None else frozenset(record.agents)
    return Caller(record.principal, cast(Role, record.role), record.key_id, agents=agents)


def refuse_repeated(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise `InvalidRequest` if a security-relevant header is repeated.

    If a header is repeated, a proxy in front of the server might use a different value than the server does.
    """
    names = [name for name, _ in headers]
    for name in _ONCE:
        if names.count(name) > 1:
            raise InvalidRequest(f"header {name.decode()} was sent {names.count(name)} times", hint="send it once")


def _secret(authorization: bytes | None) -> bytes:
    if authorization is None:
        raise Unauthenticated("the request has no API key")
    scheme, _, value = authorization.partition(b" ")
    value = value.strip()
    if scheme.lower() == b"bearer":
        return value
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except binascii.Error:
            raise Unauthenticated("invalid Basic credentials") from None
    raise Unauthenticated("the Authorization scheme is neither Bearer nor Basic")


class OriginGate:
    """Allow-lists for the headers ``Host`` and ``Origin``.

    They prevent pages of other websites from using an agent, even through DNS rebinding.

    Parameters:
        settings: server settings, from which the listen address, ``allowed_hosts`` and ``allowed_origins`` are used.
    """

    __slots__ = ("_any_address", "_hosts", "_origins", "_passed")

    def __init__(self, settings: Settings) -> None:
        names = {"localhost", "127.0.0.1", "::1", settings.host.lower(), *(h.lower() for h in settings.allowed_hosts)}
        self._any_address = not is_loopback(settings.host)
        if self._any_address:
            names.add(socket.gethostname().lower())
        self._hosts = frozenset(names)
        self._origins = frozenset(origin.lower().rstrip("/") for origin in settings.allowed_origins)
        self._passed: set[bytes] = set()

    @staticmethod
    def require_keys(settings: Settings, *, any_valid: bool) -> None:
        """Raise `ConfigurationError` if other machines can reach the listen address and `any_valid` is False.

        Parameters:
            settings: server settings, from which the listen address is used.
            any_valid: whether a valid key exists or signed tokens are accepted.
        """
        if not any_valid and not is_loopback(settings.host):
            raise ConfigurationError(
                f"host {settings.host!r} is reachable from other machines, but the server has no API key",
                hint="create one with 'holdfast keys create', or listen on 127.0.0.1",
            )

    def check(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Check the headers ``Host`` and ``Origin``, and return the origin of an allowed cross-origin request.

        Return None if the request is same-origin or has no ``Origin`` header.

        Raises:
            HostRefused: if the ``Host`` header is not allowed.
            OriginRefused: if the ``Origin`` header is not allowed.
        """
        host = headers.get(b"host", b"")
        if host not in self._passed:
            self._check_host(host)
        origin = headers.get(b"origin")
        return None if origin is None else self._check_origin(origin, host)

    def _check_host(self, host: bytes) -> None:
        try:
            name = urlsplit(b"//" + host).hostname
            text = (name or b"").decode("ascii").lower()
        except ValueError:
            text = ""
        if text not in self._hosts and not (self._any_address and _is_address(text)):
            raise HostRefused(f"Host header not allowed: {host.decode('latin-1')[:80]!r}")
        if len(self._passed) < 100:
            self._passed.add(host)

    def _check_origin(self, origin: bytes, host: bytes) -> bytes | None:
        if origin in (b"http://" + host, b"https://" + host):
            return None
        if origin.decode("latin-1").lower().rstrip("/") in self._origins:
            return origin
        raise OriginRefused(f"origin {origin.decode('latin-1')[:80]!r} is not allowed")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
