"""What the open network of a wall adds to the stage: proxies, and a server that walled programs may reach.

Behind a wall, the proxy is Holdfast's. Without one, it is a careless one (`careless_proxy`), once for each that is used
or harmed.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

__all__ = ["FRIEND", "befriended", "careless_proxies", "proxy_of"]

FRIEND = "127.77.0.1"
"""The one address that is not public and that walled programs with a network may reach."""

_HERE = Path(__file__).resolve().parent
_END_S = 10.0

Start = Callable[..., "subprocess.Popen[bytes]"]
"""Starts a script of this folder with arguments, as the wall's user, with its standard input and output as pipes."""


@contextlib.contextmanager
def befriended(start: Start, asked: list[str]) -> Iterator[int]:
    """Run the server that walled programs may reach; its port. Afterwards `asked` has the paths it was asked for."""
    server = start(_HERE / "friend.py", FRIEND)
    try:
        yield int(_said(server)["port"])
        asked += json.loads(server.communicate(timeout=_END_S)[0])
    finally:
        _end(server)


@contextlib.contextmanager
def careless_proxies(start: Start) -> Iterator[dict[str, Any]]:
    """Run the proxies of programs without a wall; what escapes are told of them."""
    proxies = {name: start(_HERE / "careless_proxy.py") for name in ("use", "kill", "stop")}
    try:
        own, other = _said(proxies["use"])["ports"]
        pids = {name: proxy.pid for name, proxy in proxies.items()}
        yield {"proxy_port": own, "neighbour_proxy": other, "proxies": pids}
    finally:
        for proxy in proxies.values():
            _end(proxy)


def proxy_of(server: int) -> dict[str, Any]:
    """What escapes are told of Holdfast's proxy, which a process has started."""
    found = [one.pid for one in psutil.Process(server).children(recursive=True) if "proxy.main" in str(one.cmdline())]
    assert len(found) == 1, f"{len(found)} processes of the proxy"
    return {"proxies": dict.fromkeys(("use", "kill", "stop"), found[0])}


def _said(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    said: dict[str, Any] = json.loads(process.stdout.readline())
    return said


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
