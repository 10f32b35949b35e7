"""A process outside of the host that removes the host's containers after the host has ended, however it ended.

The watcher reads a pipe of which only the host holds the other end. It is a shell, so that it needs little memory.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Mapping
from typing import Final

from holdfast.runtime.oneshot import Oneshot
from holdfast.runtime.process_host import process_host
from holdfast.runtime.processes import procfs
from holdfast.runtime.processes.spec import host_marker

__all__ = ["host_label", "is_host_alive", "start_watcher"]

_SCRIPT: Final = """\
trap '' TERM INT HUP
read -r _
for _ in 1 2 3 4 5; do
  found=$(timeout 20 "$0" ps --all --quiet --filter "label=holdfast.host=$1") &&
    [ -n "$found" ] && timeout 20 "$0" rm --force $found
  sleep 1
done
"""
"""Several rounds: the engine may still be making a container whose client died with the host."""

_START_S: Final = 10.0

_watchers: dict[str, tuple[int, subprocess.Popen[bytes]]] = {}
_lock = threading.Lock()


def host_label() -> str:
    """Return the value of the label that this host's containers have."""
    return host_marker().decode()


def is_host_alive(label: str) -> bool:
    """Return whether the host of a label still runs."""
    pid, _, started = label.partition(".")
    return pid.isdigit() and started.isdigit() and procfs.start_time(int(pid)) == int(started)


def start_watcher(engine: str, environment: Mapping[str, str]) -> None:
    """Start the watcher for an engine, unless it runs.

    Parameters:
        engine: the engine's command.
        environment: complete environment for it.
    """
    with _lock:
        pid, watcher = _watchers.get(engine, (0, None))
        if pid == os.getpid() and watcher is not None and watcher.poll() is None:
            return
        started: Oneshot[bool] = Oneshot()

        def start() -> None:
            _watchers[engine] = (os.getpid(), _start(engine, environment))
            started.set(True)

        process_host().call_in_reading_thread(start)  # in no scope, which would end it
        started.wait_blocking(_START_S)


def _start(engine: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["/bin/sh", "-c", _SCRIPT, engine, host_label()],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=dict(environment),
        start_new_session=True,
    )
