"""A host in the lifespan of a web application ends its streams when that application's server is told to end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from holdfast.proof.storm.server import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "in_a_web_app.py"
_END_S = 30.0
ASKS = """
import contextlib, sys
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from holdfast import Host, Run, Settings, agent
from holdfast.errors import Draining, UnknownSession

QUICK = Settings(drain_timeout_s=0.1, grace_s=0.3)

@agent(replayable=True)
async def slow(run: Run) -> str:
    await run.interrupt.sleep(600)
    return "done"

@contextlib.asynccontextmanager
async def lifespan(app):
    async with Host(slow, store="sqlite:///asks.db", settings=QUICK) as app.state.host:
        yield

async def ask(request):
    try:
        return PlainTextResponse(await request.app.state.host.session("s").ask("go"))
    except Draining as error:
        return PlainTextResponse(str(error), 503)

async def runs(request):
    try:
        return PlainTextResponse((await request.app.state.host.session("s").info()).run_id or "")
    except UnknownSession:
        return PlainTextResponse("")

def ready(request):
    return PlainTextResponse("")

app = Starlette(routes=[Route("/ask", ask), Route("/runs", runs), Route("/ready", ready)], lifespan=lifespan)
uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_web_application_ends_with_its_event_streams_open(tmp_path: Path, number: signal.Signals) -> None:
    async def main() -> None:
        port = free_port()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(EXAMPLE),
            cwd=tmp_path,
            env=os.environ | {"PORT": str(port)},
            stderr=subprocess.PIPE,
        )
        try:
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as http:
                await answers(http, process)
                async with http.stream("GET", "/words/alice") as words, asyncio.TaskGroup() as group:
                    pieces = words.aiter_text()
                    assert "0 " in await anext(pieces)
                    events = group.create_task(last_frame(http, "/v1/sessions/alice/events"))
                    wait = group.create_task(http.post("/v1/sessions/bob/messages?wait=300", json={"content": "go"}))
                    await has_run(http, "bob")
                    process.send_signal(number)
                    async with asyncio.timeout(_END_S):
                        [piece async for piece in pieces]
                        assert '"reason":"shutdown"' in await events
                        assert (await wait).status_code in (200, 202)
            async with asyncio.timeout(_END_S):
                said = (await process.communicate())[1]
            assert b"Traceback" not in said or number is signal.SIGINT, said.decode()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    asyncio.run(main())


def test_a_route_that_waits_for_an_answer_does_not_keep_its_server(tmp_path: Path) -> None:
    async def main() -> None:
        port = free_port()
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", ASKS, str(port), cwd=tmp_path)
        try:
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
                await answers(http, process, "/ready")
                async with asyncio.TaskGroup() as group:
                    asked = group.create_task(http.get("/ask"))
                    async with asyncio.timeout(_END_S):
                        while not (await http.get("/runs")).text:
                            await asyncio.sleep(0.02)
                    process.send_signal(signal.SIGTERM)
                    async with asyncio.timeout(_END_S):
                        answer = await asked
                assert (answer.status_code, "it is not lost" in answer.text) == (503, True)
            async with asyncio.timeout(_END_S):
                await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    asyncio.run(main())


async def answers(http: httpx2.AsyncClient, process: asyncio.subprocess.Process, path: str = "/healthz") -> None:
    """Return once the application answers."""
    async with asyncio.timeout(_END_S):
        while True:
            assert process.returncode is None
            try:
                (await http.get(path)).raise_for_status()
                return
            except httpx2.TransportError:
                await asyncio.sleep(0.05)


async def has_run(http: httpx2.AsyncClient, key: str) -> None:
    """Return once a run of that session has begun."""
    async with asyncio.timeout(_END_S):
        while (await http.get(f"/v1/sessions/{key}")).json().get("run_id") is None:
            await asyncio.sleep(0.02)


async def last_frame(http: httpx2.AsyncClient, path: str) -> str:
    """The end of an event stream."""
    async with http.stream("GET", path) as stream:
        return "".join([piece async for piece in stream.aiter_text()])[-300:]
