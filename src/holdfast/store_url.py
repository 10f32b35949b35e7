"""URLs of stores: the form of PostgreSQL's, and how a URL is shown without its password."""

from __future__ import annotations

import re

__all__ = ["POSTGRES_URL", "shown_store"]

POSTGRES_URL = re.compile(
    r"postgres(?:ql)?://(?:(?P<user>[^:@/?#]*)(?::[^:@/?#]*)?@)?(?P<hosts>[^@?#/]*)(?:/(?P<name>[^?#@/]*))?"
    r"(?:\?(?P<query>[^#]*))?"
)
"""A store URL of PostgreSQL. Special characters in its password must be percent-encoded."""


def shown_store(url: str) -> str:
    """Return a store URL for display: of PostgreSQL's, only the user, hosts and database.

    A URL that may contain a password in an unknown place is cut after the scheme.
    """
    found = POSTGRES_URL.fullmatch(url)
    if found is not None:
        user = f"{found['user']}@" if found["user"] else ""
        return f"postgresql://{user}{found['hosts']}/{found['name'] or ''}"
    if url.startswith("sqlite:///") or not ("@" in url or "?" in url):
        return url
    return f"{url.partition('://')[0][:20]}://…" if "://" in url else "…"
