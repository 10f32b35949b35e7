"""Names of the sessions on the server, for completion in a shell."""

from __future__ import annotations

import asyncio
import shlex

from holdfast.cli.target import Target
from holdfast.errors import HoldfastError

__all__ = ["session_names"]

_WITHIN_S = 1.0
_LISTED = 200


def session_names(*, url: str | None, key: str | None, user: str | None) -> list[str]:
    """Return the keys of the newest sessions; none if the server does not list them within a second.

    Keys that a shell would not read as one plain word are left out.
    """

    import holdfast.client  # noqa: F401  - its import takes part of the time on a busy machine

    async def names() -> list[str]:
        async with asyncio.timeout(_WITHIN_S), Target(url=url, key=key, user=user).client(retry_s=0.0) as client:
            views = await client.sessions(limit=_LISTED)
            return [view.key for view in views if view.state != "deleted" and shlex.quote(view.key) == view.key]

    try:
        return asyncio.run(names())
    except (HoldfastError, OSError):  # TimeoutError is an OSError
        return []
