"""Verification of signed tokens (JWT) issued by your own identity provider.

Invariants
- A token is accepted only if a key is configured for its algorithm, and each key is used only for its own algorithm.
  The algorithm ``none``, and a public key used as an HMAC secret, are therefore refused before any verification.
- A token without an expiry (``exp``) or a subject (``sub``) is refused.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast, get_args

from holdfast.clock import Clock, system_clock
from holdfast.errors import ConfigurationError, MissingExtra, Unauthenticated
from holdfast.server.caller import Caller, Role
from holdfast.settings import Settings

__all__ = ["ROLE_CLAIM", "TokenVerifier", "looks_signed"]

ROLE_CLAIM = "holdfast_role"
"""Claim that contains the role. It has a prefix, because identity providers use ``role`` for other purposes."""

AGENTS_CLAIM = "holdfast_agents"
"""Claim that lists the agents that a caller with the token may use."""

LOCAL_PRINCIPAL = "local"
"""Principal of the callers of a server without keys. The ``sub`` of a token must not be this principal."""

_LATEST = 1e12
"""Latest accepted expiry, in seconds since the epoch."""
_LEEWAY_S = 10.0  # for nbf and iat; exp has none


def looks_signed(secret: bytes) -> bool:
    """Return whether a bearer token has the form of a JWT. An API key never has this form."""
    return secret.startswith(b"ey") and secret.count(b".") == 2


class TokenVerifier:
    """Verifier of signed tokens, which uses the keys in the settings.

    Parameters:
        settings: server settings, from which ``jwt_secret`` (HS256), ``jwt_public_key`` (RS256), ``jwt_issuer`` and
            ``jwt_audience`` are used.
        clock: source of the current time, which is compared with a token's expiry.

    Raises:
        ConfigurationError: if a configured key is invalid.
        MissingExtra: if a package that the extra ``jwt`` installs is missing.
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
        """Return a verifier; None if the settings contain no key for signed tokens. Raises as `TokenVerifier`."""
        return cls(settings, clock) if settings.jwt_secret or settings.jwt_public_key else None

    def _prepared(self, algorithm: str, setting: str, key: str) -> Any:
        try:
            return self._jwt.get_algorithm_by_name(algorithm).prepare_key(key)
        except NotImplementedError:
            raise MissingExtra("RS256 tokens", extra="jwt") from None
        except Exception as error:  # crypto libraries raise many types; none includes the key in its text
            raise ConfigurationError(
                f"setting {setting} is not a valid key for {algorithm} ({type(error).__name__})",
                hint="set jwt_secret to 32 or more random characters, or jwt_public_key to a PEM public key",
            ) from None

    def _end_of(self, claims: dict[str, Any]) -> float:
        """Return the time at which a token expires, without leeway.

        Raises `Unauthenticated` if the expiry is invalid or has passed.
        """
        end = claims["exp"]
        if isinstance(end, bool) or not isinstance(end, (int, float)) or not math.isfinite(end) or end > _LATEST:
            raise Unauthenticated("invalid token: its exp is not a valid time")
        if end <= self._clock.now():
            raise Unauthenticated("the token has expired", hint="get a new one")
        return float(end)

    def caller(self, token: bytes) -> Caller:
        """Return the caller that a token identifies.

        Raises `Unauthenticated` if the token is invalid or has expired.
        """
        jwt = self._jwt
        try:
            algorithm = str(jwt.get_unverified_header(token).get("alg"))
            key = self._keys.get(algorithm)
            if key is None:
                raise Unauthenticated("the token's signing algorithm is not accepted")
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
            reason = _REASONS.get(type(error).__name__, "it is not a valid JWT")
            raise Unauthenticated(f"invalid token: {reason}") from None
        if self._audience is None and "aud" in claims:
            raise Unauthenticated("invalid token: it is for another audience")
        principal, role = claims["sub"], claims.get(ROLE_CLAIM, "user")
        if principal == LOCAL_PRINCIPAL:
            raise Unauthenticated(f"the token's sub is {principal!r}, which is reserved for servers without keys")
        if not 1 <= len(principal) <= 200 or not principal.isprintable():
            raise Unauthenticated("the token's sub is not a valid principal", hint="use 1 to 200 printable characters")
        if role not in get_args(Role):
            raise Unauthenticated(f"the token's {ROLE_CLAIM} is not a role", hint=f"use {', '.join(get_args(Role))}")
        agents = claims.get(AGENTS_CLAIM)
        if agents is not None and not (isinstance(agents, list) and all(isinstance(one, str) for one in agents)):
            raise Unauthenticated(
                f"the token's {AGENTS_CLAIM} is not a list of names", hint="omit this claim, or list agent names"
            )
        return Caller(
            principal,
            cast(Role, role),
            "jwt",
            expires_at=expires_at,
            agents=None if agents is None else frozenset(agents),
        )


_REASONS = {
    "InvalidSignatureError": "its signature does not match",
    "InvalidAudienceError": "it is for another audience",
    "InvalidIssuerError": "it is from another issuer",
    "MissingRequiredClaimError": "a required claim is missing: exp, sub, or the configured aud or iss",
    "ImmatureSignatureError": "it is not valid yet",
    "InvalidSubjectError": "its sub is not a string",
}


def _pem(text: str) -> str:
    """Return a key in PEM format. `text` is either the key itself or the path of a file that contains the key.

    Raises `ConfigurationError` if `text` is neither.
    """
    if text.lstrip().startswith("-----BEGIN"):
        return text
    try:
        return Path(text).read_text("ascii")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"setting jwt_public_key is neither PEM text nor a readable file: {error}",
            hint="use a text that begins with -----BEGIN PUBLIC KEY-----, or the path of such a file",
        ) from None
