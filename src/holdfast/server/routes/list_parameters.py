"""Query parameters shared by the routes that return lists, and the principal whose items they list."""

from __future__ import annotations

from holdfast.errors import Forbidden
from holdfast.server.parameters import FlagQuery, IntegerQuery
from holdfast.server.request import Request

__all__ = ["ALL", "LIMIT", "LIST_LIMIT", "listed_principal"]

LIST_LIMIT = 1000
LIMIT = IntegerQuery(
    "limit",
    f"Maximum number of items (default 100, at most {LIST_LIMIT}).",
    least=1,
    most=LIST_LIMIT,
    default=100,
)
ALL = FlagQuery("all", "`true` includes all principals (admin only).")


def listed_principal(request: Request) -> str | None:
    """Return the principal whose items are to be listed; None, for all principals, if an admin sent ``?all=true``.

    Raises `Forbidden` if the request has ``?all=true`` without an admin key.
    """
    if not ALL.parse(request):
        return request.caller.principal
    if request.caller.role != "admin":
        raise Forbidden("only admin keys may list the items of all principals", hint="omit ?all=")
    return None
