"""Hostile programs, and a way to see from outside which of them live.

Each program is started with a token among its arguments, which no descendant can shake off without changing its
program; so `living` needs to trust nobody's report, only ``/proc``. Those that multiply are fenced, and all end by
themselves after a while.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.runtime.processes import procfs

__all__ = ["ROLES", "await_condition", "has_strayed", "living", "program"]

_SOURCE = (
    Path(__file__).with_name("fence.py").read_text()
    + r"""
import os, signal, sys, time
role, token = sys.argv[1], sys.argv[2]
end_at = time.monotonic() + 100

def pause():
    while time.monotonic() < end_at:
        time.sleep(1)
    os._exit(0)

def insistent_fork():
    # At the fence it waits for somebody to bury the dead.
    while True:
        try:
            return os.fork()
        except BlockingIOError:
            if time.monotonic() > end_at:
                os._exit(0)
            time.sleep(0.0005)

def stray(env=None):
    # A new session, forked twice: its parent is gone. With env it is another program with that environment.
    between = os.fork()
    if between:
        os.waitid(os.P_PID, between, os.WEXITED | os.WNOWAIT)  # so that who counts afterwards counts no third process
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if env is not None:
        os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", "import time; time.sleep(100)", token], env)
    pause()

signal.signal(signal.SIGTERM, signal.SIG_IGN)
if role == "ignores-term":
    pass
elif role == "new-session":
    if os.fork() == 0:
        os.setsid()
elif role == "double-fork":
    stray()
elif role == "wiped-environment":
    stray(env={})
elif role == "closes-descriptors":
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.closerange(0, 1000)
elif role == "leaves-strays":
    stray()
    stray(env={})
    sys.exit(7)
elif role == "holds-pipe":
    stray()
    os.write(1, b"held\n")
    sys.exit(0)
elif role == "stopped":
    if os.fork() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
elif role == "bomb":
    # Doubles until there are 2 ** n processes; who comes last starts nothing more.
    put_up_fence()
    for _ in range(int(sys.argv[3])):
        os.fork()
elif role == "runs-away":
    # A few lines of processes, each of which lives just long enough to fork its successor.
    put_up_fence()
    for _ in range(int(sys.argv[3])):
        if os.fork() == 0:
            while time.monotonic() < end_at and insistent_fork() == 0:
                os.setsid()
                if insistent_fork():
                    os._exit(0)
            os._exit(0)
elif role == "respawns":
    # Whatever is killed is started again, at once, by several watchers.
    for _ in range(4):
        if os.fork() == 0:
            while time.monotonic() < end_at:
                child = os.fork()
                if child == 0:
                    os.setsid()
                    pause()
                os.waitpid(child, 0)
elif role == "outlives-its-first-thread":
    # It is shown as a zombie, and works on.
    import ctypes, threading
    def go_on():
        while open("/proc/%d/stat" % os.getpid()).read().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.001)
        os.fork()
        pause()
    threading.Thread(target=go_on).start()
    ctypes.CDLL(None).pthread_exit(None)
elif role == "kills-reaper":
    stray()
    stray(env={})
    os.kill(os.getppid(), signal.SIGKILL)
elif role == "stops-reaper":
    stray()
    os.kill(os.getppid(), signal.SIGSTOP)
pause()
"""
)

ROLES = {
    "ignores-term": 1,
    "new-session": 2,
    "double-fork": 2,
    "wiped-environment": 2,
    "closes-descriptors": 2,
    "leaves-strays": 2,
    "stopped": 2,
    "respawns": 9,
    "outlives-its-first-thread": 2,
}
"""Role and how many of its processes live once it has settled."""


def program(role: str, token: str, *more: str) -> list[str]:
    """The command line of a hostile program."""
    return [os.path.realpath(sys.executable), "-I", "-S", "-c", _SOURCE, role, token, *more]


def living(token: str) -> list[int]:
    """Pids of processes with ``token`` among their arguments of which a thread is no zombie."""
    wanted = token.encode()
    return [
        int(entry)
        for entry in os.listdir("/proc")
        if entry.isdigit() and int(entry) != os.getpid() and any(_runs(thread, wanted) for thread in _threads(entry))
    ]


def has_strayed(token: str) -> bool:
    """Whether a program and its one stray live, and no more: while the stray is forked, its parent makes it two too."""
    pids = living(token)
    stats = [procfs.read_stat(pid) for pid in pids]
    return len(pids) == 2 and all(stat is not None and stat.parent not in pids for stat in stats)


def _threads(pid: str) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def _runs(thread: Path, word: bytes) -> bool:
    try:
        words = (thread / "cmdline").read_bytes().split(b"\0")
        state = (thread / "stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return word in words and state not in (b"Z", b"X")


def await_condition(condition: Callable[[], bool], what: str, *, bound_s: float = 40.0) -> None:
    """Poll until ``condition`` holds; fail after ``bound_s`` seconds."""
    deadline = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {bound_s} s: {what}"
        time.sleep(0.005)
