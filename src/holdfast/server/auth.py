"""Authentication: API keys, roles, and the allow-lists for ``Host`` and ``Origin``.

A key is shown once and stored as the SHA-256 of its 160 random bits. While the store has never had a key, anyone on
loopback acts as principal ``local`` and may do everything; from the first key on, every request needs one. To listen on
any other address, the server needs a key before it starts. With an agent that follows a model, even loopback needs a
credential while there are no keys: the local token (`holdfast.local_token`), whose holder is ``local``. Signed tokens
(`holdfast.server.tokens`) are accepted in addition to keys if the settings have a key for them.

Only this process opens the store, so the keys in memory are authoritative: they change only through `KeyRing`.
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
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast
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
    Unauthenticated,
    UnknownKey,
)
from holdfast.local_token import is_loopback
from holdfast.server.credentials import CredentialsInUse
from holdfast.server.exchange import Caller, Role
from holdfast.server.tokens import TokenVerifier, looks_signed
from holdfast.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.storage.port import KeyRecord

__all__ = ["LOCAL", "Gate", "KeyRing", "KeyRole", "KeyStore", "make_key", "refuse_repeated"]

KeyRole = Literal["user", "admin", "trusted", "approver"]
"""What a key may do; see `KeyRecord`."""

LOCAL = Caller("local", "admin")
"""Everybody on loopback while there are no keys."""

T = TypeVar("T")

_APPROVAL_PREFIX = "hfa_"
_NO_KEYS = frozenset(("jwt",))
_REVOKED = "the key was revoked or is needed now"
_USER_HEADER = b"x-holdfast-user"
_ONCE = (b"host", b"origin", b"authorization", _USER_HEADER, b"content-type", b"last-event-id")


class KeyStore(Protocol):
    """What the key ring needs of a store."""

    async def add_key(self, record: KeyRecord) -> None:
        """Store a key's hash."""
        ...

    async def keys(self) -> Sequence[KeyRecord]:
        """All keys, revoked ones included."""
        ...

    async def revoke_key(self, key_id: str, *, at: float) -> bool:
        """Revoke a key; False if there is none that is valid."""
        ...


def digest_of(secret: str | bytes) -> bytes:
    """The SHA-256 under which a secret is stored."""
    return hashlib.sha256(secret.encode() if isinstance(secret, str) else secret).digest()


def make_key(
    *, principal: str, role: KeyRole, label: str, at: float, agents: Sequence[str] | None = None
) -> tuple[KeyRecord, str]:
    """A new key's record and its secret, which is to be shown once.

    Raises:
        InvalidRequest: a principal, label or agent that is not printable or too long.
    """
    from holdfast.storage.port import KeyRecord

    check_principal(principal)
    if len(label) > 200 or not label.isprintable():
        raise InvalidRequest("the label does not fit", hint="use at most 200 printable characters")
    for agent in agents or ():
        if not 1 <= len(agent) <= 200 or not agent.isprintable():
            raise InvalidRequest(f"{agent[:40]!r} cannot be an agent", hint="use 1 to 200 printable characters")
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
    """Raise `InvalidRequest` for a principal that is not 1 to 200 printable characters."""
    if not 1 <= len(principal) <= 200 or not principal.isprintable():
        raise InvalidRequest(f"{principal[:40]!r} cannot be a principal", hint="use 1 to 200 printable characters")


class KeyRing:
    """The API keys of this host. Of one loop.

    Parameters:
        store: keeps the keys.
        clock: for the time of a change.
        token: what everybody must show while there are no keys; None: nothing.
        signed: verifies signed tokens (JWT); None: there are none.

    ``in_use`` is the register of what is under way; what loses its credential by a change is ended in the same turn.
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
        """Whether a request needs a key or a token. A key: since the first one was made, even if all are revoked."""
        return self._ever or self._token is not None or self._signed is not None

    @property
    def ever(self) -> bool:
        """Whether there has ever been a key."""
        return self._ever

    @property
    def any_valid(self) -> bool:
        """Whether there is a key that is not revoked, or signed tokens are taken."""
        return bool(self._by_digest) or self._signed is not None

    @property
    def any_approver(self) -> bool:
        """Whether there is an approval key that is not revoked."""
        return bool(self._approvers)

    async def load(self) -> None:
        """Read the keys from the store."""
        async with self._changing:
            await self._load()

    async def _load(self) -> None:
        """One at a time: of two that read at once, the one that read first could be the last to be taken."""
        records = await self._store.keys()
        valid_ones = {record.digest[:8]: record for record in records if record.revoked_at is None}
        self._by_digest = {start: record for start, record in valid_ones.items() if record.role != "approver"}
        self._callers = {record.key_id: _caller_with(record) for record in self._by_digest.values()}
        self._approvers = {start: record for start, record in valid_ones.items() if record.role == "approver"}
        self._ever = any(record.role != "approver" for record in records)
        valid = {record.key_id for record in self._by_digest.values()}
        self.in_use.end_all_but(valid | (_NO_KEYS if self._ever else _NO_KEYS | {LOCAL.credential}), _REVOKED)

    async def records(self) -> list[KeyRecord]:
        """All keys, revoked ones included."""
        return list(await self._store.keys())

    async def create(
        self, *, principal: str, role: KeyRole, label: str = "", agents: Sequence[str] | None = None
    ) -> tuple[KeyRecord, str]:
        """Make a key. Returns its record and its secret, which nobody can see again."""
        record, secret = make_key(principal=principal, role=role, label=label, agents=agents, at=self._clock.now())
        await self._change(self._store.add_key(record))
        return record, secret

    async def revoke(self, key_id: str, *, again: bool = False) -> KeyRecord:
        """Make a key invalid at once, end what is under way with it, and return its record.

        Parameters:
            key_id: its id.
            again: a key that was revoked before will do.

        Raises:
            UnknownKey: there is none that is valid.
        """
        revoked = await self._change(self._store.revoke_key(key_id, at=self._clock.now()))
        record = next((one for one in await self._store.keys() if one.key_id == key_id), None)
        if record is None or not (revoked or again):
            raise UnknownKey(f"there is no valid key {key_id[:40]!r}")
        return record

    async def _change(self, change: Coroutine[Any, Any, T]) -> T:
        """Write to the store and take over what it has then, also where the caller is cancelled meanwhile.

        A write that was submitted is done in any case: a task of its own waits for it, and reads the keys after it.
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
        """Make an approval key for every principal that lives as long as this key ring, and return it to be shown.

        Only its digest is kept. It is for the terminal of whoever runs the server, and for nothing that is written.
        """
        secret = ids.secret(_APPROVAL_PREFIX)
        self._shown_approver = digest_of(secret)
        return secret

    def approver(self, secret: str, principal: str) -> str:
        """The id of an approval key for the calls of `principal`. Raises `ApprovalKeyRequired`."""
        if not secret:
            raise ApprovalKeyRequired("an approval on this server needs an approval key that a person typed")
        digest = digest_of(secret)
        if self._shown_approver is not None and hmac.compare_digest(self._shown_approver, digest):
            return "shown by serve"
        record = self._approvers.get(digest[:8])
        if record is None or not hmac.compare_digest(record.digest, digest) or record.principal != principal:
            raise ApprovalKeyRequired("that is no approval key for this session")
        return record.key_id

    def find(self, secret: bytes) -> KeyRecord:
        """The record of a secret. Raises `Unauthenticated`."""
        digest = digest_of(secret)
        record = self._by_digest.get(digest[:8])
        if record is None or not hmac.compare_digest(record.digest, digest):
            raise Unauthenticated("the key is not valid")
        return record

    def holder(self, authorization: bytes) -> str | None:
        """The principal whose valid API key, or local token, an ``Authorization`` field has; None for all others.

        It authenticates nobody: it is for the order in which connections are served.
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
        """Whether an ``Authorization`` field has what may be a signed token, where such are accepted."""
        try:
            return self._signed is not None and looks_signed(_secret(authorization))
        except Unauthenticated:
            return False

    def caller(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Who sends a request with these headers.

        Raises:
            Unauthenticated: a key is needed and there is none, or it is not valid.
            Forbidden: ``X-Holdfast-User`` came with a key that may not act for others.
        """
        caller = self._known(headers.get(b"authorization"))
        user = headers.get(_USER_HEADER)
        if user is None:
            return caller
        if caller.role == "user":
            raise Forbidden(
                "this key may not act for other users", hint="use a key with role trusted, or leave X-Holdfast-User out"
            )
        try:
            principal = user.decode("utf-8")
        except UnicodeDecodeError:
            raise InvalidRequest("X-Holdfast-User is not UTF-8", hint="send the name in UTF-8") from None
        check_principal(principal)
        if principal == LOCAL.principal and caller.role != "admin":
            raise Forbidden("this key may not act for 'local'", hint="that is the principal of a server without keys")
        return replace(caller, principal=principal, owner=caller.principal)

    def _known(self, authorization: bytes | None) -> Caller:
        """The owner of a key or token; everybody is `LOCAL` where none is needed. Raises `Unauthenticated`."""
        if self._signed is not None and authorization is not None and looks_signed(secret := _secret(authorization)):
            return self._signed.caller(secret)
        if self._ever:
            return self._callers[self.find(_secret(authorization)).key_id]
        if self._token is not None:
            self._check_token(self._token, authorization)
        elif self._signed is not None:
            _secret(authorization)
            raise Unauthenticated("that is no signed token")
        return LOCAL

    @staticmethod
    def _check_token(token: bytes, authorization: bytes | None) -> None:
        if authorization is None or not hmac.compare_digest(token, digest_of(_secret(authorization))):
            said = "no token came with the request" if authorization is None else "the token is not valid"
            raise Unauthenticated(
                f"agents here do on this machine what a model says, and {said}",
                hint="send 'Authorization: Bearer <token>'; the token lies beside the store, in a file named …-token",
            )


def _caller_with(record: KeyRecord) -> Caller:
    agents = None if record.agents is None else frozenset(record.agents)
    return Caller(record.principal, cast(Role, record.role), record.key_id, agents=agents)


def refuse_repeated(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise `InvalidRequest` if a header that decides comes twice: a proxy in front may have read the other one."""
    names = [name for name, _ in headers]
    for name in _ONCE:
        if names.count(name) > 1:
            raise InvalidRequest(f"the header {name.decode()} came {names.count(name)} times", hint="send it once")


def _secret(authorization: bytes | None) -> bytes:
    if authorization is None:
        raise Unauthenticated("no key came with the request")
    scheme, _, value = authorization.partition(b" ")
    value = value.strip()
    if scheme.lower() == b"bearer":
        return value
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except binascii.Error:
            raise Unauthenticated("the Basic credentials cannot be read") from None
    raise Unauthenticated("the Authorization header is neither Bearer nor Basic")


class Gate:
    """The allow-lists for ``Host`` and ``Origin``: no page of another site, rebound or not, may drive an agent.

    Parameters:
        settings: for the address, ``allowed_hosts`` and ``allowed_origins``.
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
        """Refuse an address that others can reach while there is no key. Raises `ConfigurationError`."""
        if not any_valid and not is_loopback(settings.host):
            raise ConfigurationError(
                f"host is {settings.host!r}, which others can reach, and there is no API key",
                hint="make one with 'holdfast keys create', or listen on 127.0.0.1",
            )

    def check(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """The allowed foreign origin of a request, or None for same-origin ones and programs.

        Raises:
            HostRefused, OriginRefused: not on the allow-list.
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
            raise HostRefused(f"this server does not answer for {host.decode('latin-1')[:80]!r}")
        if len(self._passed) < 100:
            self._passed.add(host)

    def _check_origin(self, origin: bytes, host: bytes) -> bytes | None:
        if origin in (b"http://" + host, b"https://" + host):
            return None
        if origin.decode("latin-1").lower().rstrip("/") in self._origins:
            return origin
        raise OriginRefused(f"pages of {origin.decode('latin-1')[:80]!r} may not call this server")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
