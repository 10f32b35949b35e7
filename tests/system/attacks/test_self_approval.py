"""An agent with an unwalled terminal reads every credential that lies about, and approves its own call with none."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from holdfast import Agent, tool
from holdfast.agents.scripted import ScriptedModel
from holdfast.protocol.model import CallPart
from holdfast.tools.programs.terminal import Terminal
from holdfast.tools.sandbox.choice import are_programs_unwalled, use_backend
from tests.server.live import Live, echo, served

ATTACK = """\
import json, os, sys, urllib.request
url, secret = sys.argv[1:3]
def ask(path, body=None):
    request = urllib.request.Request(url + path, headers={"authorization": "Bearer " + secret,
        "content-type": "application/json"}, data=None if body is None else json.dumps(body).encode())
    try:
        return json.load(urllib.request.urlopen(request, timeout=10))
    except urllib.error.HTTPError as error:
        return json.load(error)
questions = ask("/v1/sessions/victim/approvals")["questions"]
for question in questions:
    for key in ("", secret, os.environ.get("HOLDFAST_KEY", "")):
        print(ask("/v1/sessions/victim/approvals/" + question["question_id"], {"decision": "approve",
            "call_hash": question["call_hash"], "approval_key": key})["error"]["code"])
print(ask("/v1/keys", {"principal": "local", "role": "approver"}).get("error", {}).get("code"))
"""


@tool(approval=True)
def erase(name: str) -> str:
    """Erase something."""
    return f"{name} is erased"


@pytest.mark.parametrize("backend", ["none", "auto"])
def test_a_terminal_s_program_approves_nothing_with_what_it_can_read(
    backend: Literal["none", "auto"], tmp_path: Path
) -> None:
    """The server listens on loopback, and its admin key lies in a file and in the environment of the program.

    Behind a wall, the program does not even reach the server.
    """
    attack = tmp_path / "attack.py"
    attack.write_text(ATTACK)
    commands: list[str] = []
    script: list[Any] = [CallPart(name="erase", arguments={"name": "a"}), "done"]
    victim = Agent(name="victim", model=ScriptedModel(script), tools=[erase])

    def attack_once(request: Any) -> Any:
        return CallPart(name="terminal", arguments={"command": commands.pop()}) if commands else "done"

    attacker = Agent(name="attacker", model=ScriptedModel(attack_once), tools=[Terminal(tmp_path, approval=False)])

    async def scenario(server: Live) -> None:
        _, secret = await server.app.keys.create(principal="local", role="admin")
        session = server.host.session("victim")
        await session.send("go", agent="victim")
        while not await session.questions():
            await asyncio.sleep(0.01)
        commands.append(f"HOLDFAST_KEY={secret} {sys.executable} attack.py {server.url} {secret}")
        await server.host.session("attacker").ask("go", agent="attacker", timeout_s=25)
        entries = await server.host.session("attacker").transcript()
        said = "\n".join(entry.content for entry in entries if entry.role == "tool_result")
        if are_programs_unwalled():
            assert said.count("approval_key_required") == 4, said
        else:
            assert "Connection refused" in said, said
        assert len(await session.questions()) == 1, "the call still waits for a person"

    with use_backend(backend):
        served(scenario, echo, victim, attacker, sandbox=backend)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_a_process_that_holds_a_typed_key_is_undumpable() -> None:
    program = "import ctypes; from holdfast.undumpable import make_undumpable as make; "
    program += "print(ctypes.CDLL(None).prctl(3), make(), ctypes.CDLL(None).prctl(3))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["1", "True", "0"]


def test_the_attack_is_one(tmp_path: Path) -> None:
    """On a server without such a tool, the same program with the same key does approve: keys are trusted there."""
    attack = tmp_path / "attack.py"
    attack.write_text(ATTACK.replace('["error"]["code"]', '.get("decision")'))
    script: list[Any] = [CallPart(name="erase", arguments={"name": "a"}), "done"]
    victim = Agent(name="victim", model=ScriptedModel(script), tools=[erase])

    async def scenario(server: Live) -> None:
        _, secret = await server.app.keys.create(principal="local", role="admin")
        session = server.host.session("victim")
        await session.send("go", agent="victim")
        while not await session.questions():
            await asyncio.sleep(0.01)
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(attack), server.url, secret, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        assert b"approved" in out, json.dumps(out.decode())

    served(scenario, echo, victim)
