"""The browser's wall: Chromium sees nothing of the server, reaches nothing of this machine, and shares nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from holdfast import Host
from holdfast.runtime.processes.procfs import all_pids, read_text
from holdfast.tools import walled
from holdfast.tools.sandbox.choice import BackendName
from holdfast.tools.web import chromium
from tests.tools.sandbox.ordinary_user import NETWORKED, networked_backend, run_as_ordinary_user
from tests.tools.sandbox.walled import linux_backend, reason_against
from tests.tools.using import Bench, on_host
from tests.tools.web.test_browser import CHROMIUM, browsers, is_gone, local, pages, real, with_server
from tests.tools.web.test_fetch import Request, serving

KINDS = ("pid", "net", "mnt", "ipc", "uts", "user")

PROBE = """#!{python} -IS
import json, os, socket, sys
wanted = json.loads({wanted!r})
told = {{"pids": [int(name) for name in os.listdir("/proc") if name.isdigit()]}}
told["opened"], told["connected"] = [], []
for path in wanted["paths"]:
    try:
        os.close(os.open(path, os.O_RDONLY))
        told["opened"].append(path)
    except OSError:
        pass
for family, address in wanted["addresses"]:
    try:
        with socket.socket(family) as connection:
            connection.settimeout(2)
            connection.connect(tuple(address) if isinstance(address, list) else address)
        told["connected"].append(address)
    except OSError:
        pass
with open(os.environ["HOME"] + "/told.json", "w") as file:
    json.dump(told, file)
os.execv({chromium!r}, [{chromium!r}, *sys.argv[1:]])
"""
"""A program in the place of Chromium, which tells what Chromium could do and then becomes it."""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Browsers of each test keep their things in a folder of its own, by which their processes are found."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("holdfast.tools.web.browser._LAUNCH_S", 90.0)


def probe(folder: Path, *, paths: list[str], addresses: list[tuple[int, Any]]) -> str:
    """Return the path of a program that tells which of the paths it can open, and which addresses it can reach."""
    (folder / "program").mkdir()
    program = folder / "program" / "chromium"
    wanted = json.dumps({"paths": paths, "addresses": addresses})
    program.write_text(PROBE.format(python=sys.executable, wanted=wanted, chromium=CHROMIUM))
    program.chmod(0o755)
    return str(program)


def namespaces_of(pid: int) -> dict[str, str]:
    return {kind: os.readlink(f"/proc/{pid}/ns/{kind}") for kind in KINDS}


def inside() -> dict[int, dict[str, str]]:
    """Namespaces of all processes behind walls of this test's browsers, zygotes and renderers included."""
    own = namespaces_of(os.getpid())["pid"]
    walls = {namespaces_of(pid)["pid"] for pid in browsers()} - {own}
    found: dict[int, dict[str, str]] = {}
    for pid in all_pids():
        with contextlib.suppress(OSError):  # it has ended, or is a thread of the kernel
            if os.readlink(f"/proc/{pid}/ns/pid") in walls:
                found[pid] = namespaces_of(pid)
    return found


@pytest.fixture(params=NETWORKED)
def sandbox(request: pytest.FixtureRequest) -> BackendName:
    """The setting of the host."""
    networked_backend(request.param)
    name: BackendName = request.param
    return name


@real
@pytest.mark.nightly
def test_the_browser_behind_bubblewrap_works_for_an_ordinary_user() -> None:
    run_as_ordinary_user(__file__, "-k", "bwrap")


@real
def test_chromium_can_open_no_file_of_the_server_and_reach_nothing_of_this_machine(
    tmp_path: Path, sandbox: BackendName
) -> None:
    store, secret = tmp_path / "store.db", tmp_path / "secret"
    store.write_text("private")
    secret.write_text("private")
    listeners = [socket.create_server(("127.0.0.1", 0)), socket.create_server(("0.0.0.0", 0))]
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0holdfast-test-browser-wall")
    abstract.listen()
    ports = [one.getsockname()[1] for one in listeners]
    addresses: list[tuple[int, Any]] = [
        (int(socket.AF_INET), (name, port))
        for port in ports
        for name in ("127.0.0.1", "127.0.0.2", "localhost", "0.0.0.0", "2130706433", "127.1", socket.gethostname())
    ]
    addresses += [(int(socket.AF_INET6), (name, port)) for port in ports for name in ("::1", "::ffff:127.0.0.1", "::")]
    addresses.append((int(socket.AF_UNIX), "\0holdfast-test-browser-wall"))
    paths = [str(store), str(secret), "/etc/shadow", f"/proc/{os.getpid()}/environ", "/proc/self/../1/root/etc/shadow"]
    told: dict[str, Any] = {}
    seen: list[dict[str, str]] = []
    executable = probe(tmp_path, paths=[*paths, "/etc/passwd"], addresses=addresses)

    async def agent(bench: Bench, here: str) -> None:
        assert "Welcome" in await bench("browser_open", url=f"http://{here}/")
        told.update(json.loads(next(tmp_path.glob("holdfast-browser-*/work/told.json")).read_text()))
        seen.extend(inside().values())

    try:
        with_server(local(executable=executable, timeout_s=50.0), agent, sandbox=sandbox)
    finally:
        for one in (*listeners, abstract):
            one.close()
    assert told == {"pids": told["pids"], "opened": ["/etc/passwd"], "connected": []}
    assert max(told["pids"]) < 10
    assert len(seen) > 3 and all(found == seen[0] for found in seen), seen
    assert all(seen[0][kind] != namespaces_of(os.getpid())[kind] for kind in KINDS)


@real
def test_a_process_of_chromium_has_neither_capabilities_nor_new_privileges() -> None:
    states: list[dict[str, str]] = []

    async def agent(bench: Bench, here: str) -> None:
        await bench("browser_open", url=f"http://{here}/")
        for pid in inside():
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            states.append(dict(line.split(":\t", 1) for line in lines if ":\t" in line))

    with_server(local(timeout_s=50.0), agent)
    assert len(states) > 3
    for state in states:
        assert int(state["CapEff"], 16) == int(state["CapPrm"], 16) == 0, state
        assert (state["NoNewPrivs"], state["Seccomp"]) == ("1", "2"), state


@real
def test_the_browsers_of_two_sessions_share_no_namespace_and_one_stop_ends_one() -> None:
    async def agent(bench: Bench) -> None:
        told = await bench("browser_open", url=f"http://{bench.run.text}/")
        assert "Welcome" in told

    async def scenario(host: Host) -> None:
        async with serving(pages) as (here, _):
            found: list[dict[str, set[str]]] = []
            known: set[int] = set()
            for key in ("one", "two"):
                session = host.session(key)
                receipt = await session.send(here)
                await session.wait(receipt.message_id)
                ours = inside()
                spaces = [ours[pid] for pid in ours.keys() - known]
                assert len(spaces) > 3
                known.update(ours)
                found.append({kind: {one[kind] for one in spaces} for kind in KINDS})
            for kind in KINDS:
                assert found[0][kind].isdisjoint(found[1][kind]), kind
            ended = await host.session("one").stop("enough")
            assert is_gone(ended.receipt), ended
            left = [one["pid"] for one in inside().values()]
            assert found[0]["pid"].isdisjoint(left) and not found[1]["pid"].isdisjoint(left)

    on_host([local(timeout_s=20.0)], agent, scenario, grace_s=5.0)
    assert browsers() == []


@real
def test_the_end_of_chromium_ends_its_launcher_and_the_end_of_the_launcher_ends_chromium(sandbox: BackendName) -> None:
    async def agent(bench: Bench, here: str) -> None:
        for victim in ("chromium", "launcher"):
            assert "Welcome" in await bench("browser_open", url=f"http://{here}/")
            outside = namespaces_of(os.getpid())["pid"]
            mine = {pid: namespaces_of(pid)["pid"] for pid in browsers()}
            launchers = [pid for pid in mine if b"browser_launcher.py" in (read_text(f"/proc/{pid}/cmdline") or b"")]
            main = min(pid for pid, space in mine.items() if space != outside)
            assert len(launchers) == 1, mine
            os.kill(launchers[0] if victim == "launcher" else main, 9)
            while set(browsers()) & set(mine):
                await asyncio.sleep(0.01)

    with_server(local(timeout_s=50.0), agent, sandbox=sandbox)


@pytest.mark.skipif(bool(reason_against(("landlock",))), reason=f"no Landlock: {reason_against(('landlock',))}")
@real
def test_a_wall_without_a_network_of_its_own_refuses_the_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walled, "find_backend", lambda: linux_backend(("landlock",)))

    async def agent(bench: Bench, here: str) -> None:
        told = await bench("browser_open", url=f"http://{here}/")
        assert told.startswith("!ToolFailed: the browser failed to start: network access 'hosts' needs namespaces"), (
            told
        )
        assert browsers() == []

    with_server(local(), agent)


@real
@pytest.mark.nightly
def test_without_walls_the_browser_works_behind_the_same_proxy() -> None:
    async def away(request: Request) -> None:
        await request.answer(status="302 Found", location="http://127.0.0.2:8081/")

    async def agent(bench: Bench, here: str) -> None:
        assert "Welcome" in await bench("browser_open", url=f"http://{here}/")
        async with serving(away) as (there, _):
            assert "not on the public internet" in await bench("browser_open", url=f"http://{there}/")
        assert browser.unwalled
        assert browsers() and not inside()

    browser = local(timeout_s=50.0)
    with_server(browser, agent, sandbox="none")


@real
def test_a_stranger_on_the_launchers_socket_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chromium, "_is_ours", lambda _: False)
    monkeypatch.setattr("holdfast.tools.web.browser._LAUNCH_S", 3.0)

    async def agent(bench: Bench, here: str) -> None:
        assert (await bench("browser_open", url=f"http://{here}/")).startswith("!ToolFailed: the browser ")

    with_server(local(), agent)
