"""Report that a server has stopped to respond while a command waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.client import Client

__all__ = ["watch_server"]

_FIRST_S = 3.0
_MOST_S = 30.0
_REPLY_S = 2.0


@asynccontextmanager
async def watch_server(client: Client, report: Callable[[str], None]) -> AsyncIterator[None]:
    """During the block, report when the server stops to respond, and when it responds again.

    The server is checked after 3 s, then less often while it responds. One that cannot be reached at all is not
    reported, because the request that the command waits for fails.
    """
    failure: Exception | None = None
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(_watch(client, report))
        try:
            yield
        except Exception as error:
            failure = error  # the group would raise it as part of an ExceptionGroup
        finally:
            watch.cancel()
    if failure is not None:
        raise failure


async def _watch(client: Client, report: Callable[[str], None]) -> None:
    import httpx2

    responds = True
    pause_s = _FIRST_S
    while True:
        await asyncio.sleep(pause_s)
        try:
            await client.http.get(f"{client.url}/healthz", timeout=_REPLY_S)
        except httpx2.ReadTimeout:
            if responds:
                report(f"the server at {client.url} does not respond; still waiting")
                report("  its event loop may be blocked by an agent: see the server's terminal")
            responds, pause_s = False, _FIRST_S
        except httpx2.TransportError:
            continue
        else:
            if not responds:
                report(f"the server at {client.url} responds again")
            responds, pause_s = True, min(_MOST_S, 2 * pause_s)
