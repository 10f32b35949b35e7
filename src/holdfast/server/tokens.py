"""Signed tokens (JWT) of your own identity provider: verify them, and derive the principal and its permissions.

Invariants
- The algorithm must be one with a configured key, and a key is used only for its own algorithm: ``none``, and a public
  key used as a secret, are refused before anything is verified.
- A token without an end (``exp``) or an owner (``sub``) is refused.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast, get_args

from holdfast.clock import Clock, system_clock
from holdfast.errors import ConfigurationError, MissingExtra, Unauthenticated
from holdfast.server.exchange import Caller, Role
from holdfast.settings import Settings

__all__ = ["ROLE_CLAIM", "TokenVerifier", "looks_signed"]

ROLE_CLAIM = "holdfast_role"
"""The claim that names a role; a name of our own, as others give ``role`` meanings of theirs."""

AGENTS_CLAIM = "holdfast_agents"
"""The claim that lists the agents which the token may name."""

LOCAL_PRINCIPAL = "local"
"""Whoever calls a server without keys; no token speaks for it."""

_LATEST = 1e12
"""A later end is no time in seconds."""
_LEEWAY_S = 10.0  # for nbf and iat; exp has none


def looks_signed(secret: bytes) -> bool:
    """Whether a bearer token has the form of a JWT, which no API key has."""
    return secret.startswith(b"ey") and secret.count(b".") == 2


class TokenVerifier:
    """Verifies tokens with the keys of the settings.

    Parameters:
        settings: for ``jwt_secret`` (HS256), ``jwt_public_key`` (RS256), ``jwt_issuer`` and ``jwt_audience``.
        clock: tells when a token has expired.

    Raises:
        ConfigurationError: a key that cannot be one.
        MissingExtra: the package ``pyjwt`` is not installed.
    """

    __slots__ = ("_audience", "_clock", "_issuer", "_jwt", "_keys")

    def __init__(self, settings: Settings, clock: Clock = system_clock) -> None:
        try:
            import jwt
        except ImportError:
            raise MissingExtra("signed tokens", extra="jwt") from None
        self._jwt = jwt
        self._clock = clock
        self._issuer = settings.jwt_issuer or None
        self._audience = settings.jwt_audience or None
        self._keys: dict[str, Any] = {}
        if settings.jwt_secret:
            self._keys["HS256"] = self._prepared("HS256", "jwt_secret", settings.jwt_secret)
        if settings.jwt_public_key:
            self._keys["RS256"] = self._prepared("RS256", "jwt_public_key", _pem(settings.jwt_public_key))

    @classmethod
    def of(cls, settings: Settings, clock: Clock = system_clock) -> TokenVerifier | None:
        """A verifier; None where the settings have no key. Raises as the class does."""
        return cls(settings, clock) if settings.jwt_secret or settings.jwt_public_key else None

    def _prepared(self, algorithm: str, setting: str, key: str) -> Any:
        try:
            return self._jwt.get_algorithm_by_name(algorithm).prepare_key(key)
        except NotImplementedError:
            raise MissingExtra("RS256 tokens", extra="jwt") from None
        except Exception as error:  # the crypto libraries have many, none of which has the key in its text
            raise ConfigurationError(
                f"setting {setting} has no key for {algorithm} ({type(error).__name__})",
                hint="jwt_secret is a random text of 32 characters or more, jwt_public_key a PEM text or file",
            ) from None

    def _end_of(self, claims: dict[str, Any]) -> float:
        """When a token expires, without any leeway: as for a stream that is open. Raises `Unauthenticated`."""
        end = claims["exp"]
        if isinstance(end, bool) or not isinstance(end, (int, float)) or not math.isfinite(end) or end > _LATEST:
            raise Unauthenticated("the token is not valid: its exp is no time")
        if end <= self._clock.now():
            raise Unauthenticated("the token has expired", hint="get a new one")
        return float(end)

    def caller(self, token: bytes) -> Caller:
        """Whom a token is for. Raises `Unauthenticated` for one that is not valid, or not valid any more."""
        jwt = self._jwt
        try:
            algorithm = str(jwt.get_unverified_header(token).get("alg"))
            key = self._keys.get(algorithm)
            if key is None:
                raise Unauthenticated("the token is signed in a way that is not taken here")
            claims = jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                audience=self._audience,
                issuer=self._issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "sub"], "verify_exp": False},
            )
            expires_at = self._end_of(claims)
        except (jwt.InvalidTokenError, ArithmeticError, RecursionError, TypeError, ValueError) as error:
            reason = _REASONS.get(type(error).__name__, "it is no JWT of ours")
            raise Unauthenticated(f"the token is not valid: {reason}") from None
        if self._audience is None and "aud" in claims:
            raise Unauthenticated("the token is not valid: it is for another audience")
        principal, role = claims["sub"], claims.get(ROLE_CLAIM, "user")
        if principal == LOCAL_PRINCIPAL:
            raise Unauthenticated(f"the token's sub is {principal!r}, which is the principal of a server without keys")
        if not 1 <= len(principal) <= 200 or not principal.isprintable():
            raise Unauthenticated("the token's sub cannot be a principal", hint="use 1 to 200 printable characters")
        if role not in get_args(Role):
            raise Unauthenticated(f"the token's {ROLE_CLAIM} is no role", hint=f"use {', '.join(get_args(Role))}")
        agents = claims.get(AGENTS_CLAIM)
        if agents is not None and not (isinstance(agents, list) and all(isinstance(one, str) for one in agents)):
            raise Unauthenticated(
                f"the token's {AGENTS_CLAIM} is no list of names", hint="leave it out, or list agents"
            )
        return Caller(
            principal,
            cast(Role, role),
            "jwt",
            expires_at=expires_at,
            agents=None if agents is None else frozenset(agents),
        )


_REASONS = {
    "InvalidSignatureError": "its signature does not fit",
    "InvalidAudienceError": "it is for another audience",
    "InvalidIssuerError": "it is from another issuer",
    "MissingRequiredClaimError": "it lacks a claim; exp and sub are needed, and aud and iss where they are set",
    "ImmatureSignatureError": "it is not valid yet",
    "InvalidSubjectError": "its sub is no text",
}


def _pem(text: str) -> str:
    """The key itself, from the text or from the file that it names. Raises `ConfigurationError`."""
    if text.lstrip().startswith("-----BEGIN"):
        return text
    try:
        return Path(text).read_text("ascii")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"setting jwt_public_key is no PEM text, and the file cannot be read: {error}",
            hint="it begins with -----BEGIN PUBLIC KEY-----, or names a file that does",
        ) from None
