"""Run a host inside a web application: the application adds a route of its own and mounts the host's API.

    python examples/in_a_web_app.py            (or: uvicorn examples.in_a_web_app:app)

Press Ctrl-C or send SIGTERM to shut it down, even while event streams are open. The host detects that its server is
shutting down, drains, and ends the streams; the server waits for them before it leaves the lifespan.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

import holdfast
from holdfast.server import App, KeyRing


async def clock(run: holdfast.Run) -> AsyncIterator[str]:
    for number in range(10_000):
        yield f"{number} "
        await asyncio.sleep(0.05)


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    settings = holdfast.Settings(store="memory://", drain_timeout_s=0.5, grace_s=0.5)
    async with holdfast.Host(clock, settings=settings) as host:
        keys = KeyRing(host.store)
        await keys.load()
        async with App(host, keys) as api:
            app.state.host, app.state.api = host, api
            yield


async def words(request: Request) -> StreamingResponse:
    """Stream the agent's answer to one user as plain text."""
    session = request.app.state.host.session(request.path_params["user"])
    receipt = await session.send("go")

    async def pieces() -> AsyncIterator[str]:
        async for event in session.events(after=receipt.cursor):
            if event.kind == "text.delta":
                yield event.text

    return StreamingResponse(pieces(), media_type="text/plain")


async def api(scope: Scope, receive: Receive, send: Send) -> None:
    """Forward the request to the host's API, which is below ``/v1``."""
    await scope["app"].state.api(scope, receive, send)


app = Starlette(routes=[Route("/words/{user}", words), Mount("/", app=api)], lifespan=lifespan)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ.get("PORT", "8430")), log_level="warning")
