"""The base classes of the error hierarchy, and errors that any layer may raise."""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AccessDenied",
    "ConfigurationError",
    "Conflict",
    "HoldfastError",
    "IllegalTransition",
    "InternalError",
    "InvalidKey",
    "InvalidRequest",
    "LimitExceeded",
    "MissingExtra",
    "NotFound",
    "NotSupported",
    "Unavailable",
    "format_error",
]


class HoldfastError(Exception):
    """Base class of all errors. ``code`` is stable and meant for programs; ``hint`` suggests what to do next."""

    code: ClassVar[str] = "error"
    default_hint: ClassVar[str] = ""
    retry_after_s: float | None = None
    """Seconds after which to retry; None if a retry does not help."""

    def __init__(self, message: str = "", *, hint: str | None = None) -> None:
        text = message or (self.__doc__ or self.code).strip().splitlines()[0]
        super().__init__(text)
        self.message = text
        self.hint = self.default_hint if hint is None else hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidRequest(HoldfastError):
    """The request is invalid."""

    code = "invalid_request"


class InvalidKey(InvalidRequest):
    """The session key or schedule id is invalid."""

    code = "invalid_key"
    default_hint = "use 1 to 200 printable characters without slashes or control characters"


class NotSupported(InvalidRequest):
    """The agent or this machine does not support the operation."""

    code = "not_supported"


class NotFound(HoldfastError):
    """No such resource, or you do not own it."""

    code = "not_found"


class Conflict(HoldfastError):
    """The current state does not allow the operation."""

    code = "conflict"


class IllegalTransition(Conflict):
    """The state table does not allow this change."""

    code = "illegal_transition"


class LimitExceeded(HoldfastError):
    """A limit was reached; nothing was stored."""

    code = "limit_exceeded"
    retry_after_s = 1.0


class AccessDenied(HoldfastError):
    """The caller is not allowed to do this."""

    code = "access_denied"


class Unavailable(HoldfastError):
    """The host or server is temporarily unavailable."""

    code = "unavailable"
    retry_after_s = 2.0


class ConfigurationError(HoldfastError):
    """A setting, flag or agent is invalid."""

    code = "configuration_error"


class MissingExtra(ConfigurationError):
    """An optional feature needs a package that is not installed."""

    code = "missing_extra"

    def __init__(self, part: str, *, extra: str) -> None:
        super().__init__(
            f"packages for {part} are not installed",
            hint=f"install them: pip install 'holdfast-agents[{extra}]'",
        )


class InternalError(HoldfastError):
    """The request failed because of a bug in Holdfast; other requests are not affected."""

    code = "internal_error"
    default_hint = "the server's log has the details; a send with an idempotency key is safe to retry"


def format_error(error: BaseException) -> str:
    """Return the class and text of an error, even if the error's ``__str__`` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as trouble:
        return f"{type(error).__name__} (its text is unavailable: {type(trouble).__name__}"
