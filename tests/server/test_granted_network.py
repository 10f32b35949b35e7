"""A host that a person grants over HTTP is reached by the walled program, through the proxy, until it is revoked."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast import Agent
from holdfast.agents.scripted import ScriptedModel
from holdfast.protocol.model import CallPart, ToolMessage
from holdfast.tools import Sandbox, Terminal, Workspace
from tests.server.live import Live, echo, served
from tests.server.test_bad_input import refused
from tests.tools.sandbox.ordinary_user import networked_backend
from tests.tools.web.test_fetch import Request, serving

GET = f"{sys.executable} -I -c 'import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=20).read())'"


async def hello(request: Request) -> None:
    await request.answer(b"hello from the host")


@pytest.mark.parametrize("scope", ["call", "session"])
def test_a_granted_host_is_reached_until_the_grant_is_revoked(tmp_path: Path, scope: str) -> None:
    networked_backend("linux")
    commands: list[dict[str, Any]] = []

    def answer(request: Any) -> Any:
        last = request.messages[-1]
        return last.content if isinstance(last, ToolMessage) else CallPart(name="terminal", arguments=commands.pop())

    # the profile has no network; the test allows loopback as a place where granted hosts may lead
    terminal = Terminal(Workspace(tmp_path), sandbox=Sandbox(allow_networks=("127.0.0.0/8",)))
    agent = Agent(name="worker", model=ScriptedModel(answer), tools=[terminal])

    async def scenario(server: Live) -> None:
        made = (await server.app.keys.create(principal="local", role="user"))[1]
        server.http.headers["authorization"] = f"Bearer {made}"
        key = server.app.keys.show_approver()
        session = server.host.session("s")

        async def start(*, asking: bool) -> str:
            asked = {"access": {"hosts": [place]}} if asking else {}
            commands.append({"command": f"{GET} http://{place}/", **asked})
            return (await session.send("go", agent="worker")).message_id

        async def question() -> dict[str, Any]:
            while not (found := (await server.http.get("/v1/sessions/s/approvals")).json()["questions"]):
                await asyncio.sleep(0.01)
            one: dict[str, Any] = found[0]
            assert one["access"]["hosts"] == [place]
            assert f"reach {place} (" in one["text"]
            return one

        async def decide(decision: str, **more: Any) -> Any:
            one = await question()
            body = {"decision": decision, "call_hash": one["call_hash"], **more}
            return await server.http.post(f"/v1/sessions/s/approvals/{one['question_id']}", json=body)

        async def said(message_id: str) -> str:
            return (await session.wait(message_id, timeout_s=60)).text or ""

        async with serving(hello) as (place, reached):
            assert "hello from the host" not in await said(await start(asking=False))
            assert not reached, "nothing is reached before a person has granted it"

            first = await start(asking=True)
            refused(await decide("approve", scope=scope), 403, "approval_key_required")
            assert not reached
            given = await decide("approve", scope=scope, approval_key=key)
            assert given.status_code == 200, given.text
            assert "hello from the host" in await said(first)
            assert len(reached) == 1

            grants = (await server.http.get("/v1/grants")).json()["grants"]
            if scope == "call":
                assert grants == []
            else:
                assert [grant["access"]["hosts"] for grant in grants] == [[place]]
                assert "hello from the host" in await said(await start(asking=True)), "nobody is asked again"
                assert "hello from the host" in await said(await start(asking=False)), "it holds for every call"
                assert len(reached) == 3
                revoked = await server.http.delete(f"/v1/grants/{grants[0]['grant_id']}")
                assert revoked.status_code == 200

            before = len(reached)
            assert "hello from the host" not in await said(await start(asking=False))
            last = await start(asking=True)
            assert (await decide("deny")).status_code == 200
            assert "hello from the host" not in await said(last)
            assert len(reached) == before

    served(scenario, echo, agent)
