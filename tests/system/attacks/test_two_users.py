"""Two users with keys of one server: the agent of each runs whatever its user says, and finds nothing of the other."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import Agent, Client
from holdfast.agents.scripted import ScriptedModel
from holdfast.errors import NotSupported
from holdfast.protocol.model import CallPart, ModelRequest, ToolMessage, UserMessage
from holdfast.tools import Terminal, Workspace
from holdfast.tools.assistant import assistant
from holdfast.tools.sandbox.choice import BackendName, find_backend
from tests.server.live import Live, echo, served

HUNT = """\
grep -rs 'the secret of' {root}
for note in /proc/[0-9]*/cwd/note; do cat "$note" 2>/dev/null; done
for env in /proc/[0-9]*/environ; do tr '\\0' '\\n' <"$env" 2>/dev/null; done | grep '{key}'
for file in {store} {store}-wal {store}-token; do head -c 1 $file >/dev/null 2>&1 && echo "read $file"; done
for file in {store} {store}-planted; do : 2>/dev/null >>$file && echo "wrote $file"; done
(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo 'reached the server'
echo over
"""

KEY = f"key-{secrets.token_hex(16)}"
FINDS = ("the secret of alice", KEY, "read ", "wrote ", "reached the server")


def _shell(request: ModelRequest) -> CallPart | str:
    """A model that was talked into anything: it runs the message, and answers with what came out."""
    last = request.messages[-1]
    if isinstance(last, UserMessage):
        return CallPart(name="terminal", arguments={"command": last.content})
    assert isinstance(last, ToolMessage)
    return last.content


def _shell_agent(root: Path) -> Agent:
    """An agent whose sessions have folders of their own below `root`."""
    terminal = Terminal(Workspace(root / "sessions", per_session=True), approval=False)
    return Agent(name="shell", model=ScriptedModel(_shell), tools=[terminal])


def _assistant(root: Path) -> Agent:
    """The agent of ``holdfast serve --model … --workspace …``."""
    return assistant(ScriptedModel(_shell), workspace=root / "work", approve="none")


def _hunt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox: BackendName, make: Callable[[Path], Agent] = _shell_agent
) -> str:
    """Return what the agent of mallory finds, after that of alice has left a secret."""
    root, store = tmp_path / "home", tmp_path / "data" / "holdfast.db"
    store.parent.mkdir()
    root.mkdir()
    monkeypatch.setenv("PROVIDER_API_KEY", KEY)
    monkeypatch.setenv("HOLDFAST_CONFIG", str(root / "holdfast.toml"))
    (root / "holdfast.toml").touch()
    found: list[str] = []

    async def scenario(server: Live) -> None:
        port = int(server.url.rsplit(":", 1)[1])
        keys = {name: (await server.app.keys.create(principal=name, role="user"))[1] for name in ("alice", "mallory")}
        async with Client(server.url, keys["alice"]) as alice, Client(server.url, keys["mallory"]) as mallory:
            left = await alice.session("s").ask("echo 'the secret of alice' >note; cat note", timeout_s=60)
            assert "the secret of alice" in left
            hunt = HUNT.format(root=root, store=store, port=port, key=KEY)
            found.append(await mallory.session("s").ask(hunt, timeout_s=60))

    served(scenario, make(root), echo, store=f"sqlite:///{store}", sandbox=sandbox)
    return found[0]


@pytest.mark.parametrize("make", [_shell_agent, _assistant])
def test_the_agents_of_two_users_find_nothing_of_each_other_or_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Agent]
) -> None:
    try:
        find_backend("auto")
    except NotSupported as error:
        pytest.skip(error.message)
    found = _hunt(tmp_path, monkeypatch, "auto", make)
    assert "over" in found
    assert [find for find in FINDS if find in found] == []


def test_without_a_wall_the_same_hunt_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _hunt(tmp_path, monkeypatch, "none")
    # The environment is clean and the server undumpable, so its key is safe even so.
    assert [find for find in FINDS if find in found] == [find for find in FINDS if find != KEY]
