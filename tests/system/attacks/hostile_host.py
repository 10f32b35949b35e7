"""A host with a hostile program, in a process of its own: ``HOSTILE=<word or file> hostile_host.py <what> <user>``.

It says ``up`` when the program runs, and then for a line on its input stops the session and says the outcome, and how
many are left. At the end of its input it closes the host.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import holdfast
from holdfast.agents.run import Run
from tests.runtime.fence import LIFE_S, own_user
from tests.runtime.processes_zoo import await_condition, living

BOMB = Path(__file__).with_name("hostile_bomb.py")


_LIVING = 200
"""How many programs the endless thread has at once, though nobody ends them: each ends by itself after a minute."""

_programs: list[subprocess.Popen[bytes]] = []
_over = [False]


def start(*argv: str) -> None:
    """Start a program as foreign code does; `end_programs` waits for it."""
    _programs.append(subprocess.Popen(argv, stdin=-3, stdout=-3, stderr=-3))


def end_programs() -> None:
    """End the endless threads, and wait for all programs that were started here: they are dead by now."""
    _over[0] = True
    for program in _programs[:]:  # a thread may add one
        program.wait(10)
    _programs.clear()


async def shell(run: Run) -> None:
    """What a tool does that knows nothing of us."""
    start("bash", "-c", run.text)
    await run.interrupt.wait()


def endless(run: Run) -> None:
    """A thread that listens to nobody, and starts programs for ever."""
    _over[0] = False
    while not _over[0]:
        if len(_programs) >= _LIVING:
            _programs[:] = [program for program in _programs if program.poll() is None]
            time.sleep(0.01)
            continue
        try:
            start("setsid", "sleep", run.text)
        except Exception:
            time.sleep(0.01)


def left(word: str) -> int:
    """How much of it goes on: the bomb's lives are too short to be seen, and leave a trace in a file."""
    before = lives(word)
    time.sleep(0.05)
    return lives(word) - before + len(living(word))


def begun(word: str) -> bool:
    """Whether the program runs."""
    return lives(word) > 0 or living(word) != []


def lives(word: str) -> int:
    """How many lives the bomb has had."""
    try:
        return os.stat(word).st_size
    except FileNotFoundError:
        return 0


def bomb(word: str, life_s: float = 0.002, branches: int = 2, doublings: int = 2) -> str:
    """The command that starts one."""
    return f"exec {sys.executable} -S -E {BOMB} {life_s} {branches} {doublings} {word} {LIFE_S}"


def become_ordinary() -> None:
    """Become an ordinary user, who has nothing of root's but that it may open the project's files."""
    libc = ctypes.CDLL(None, use_errno=True)
    open_any = (1, 2)
    libc.prctl(8, 1, 0, 0, 0)  # capabilities outlive the change of the user
    for capability in set(range(64)) - set(open_any):
        libc.prctl(24, capability, 0, 0, 0)
    user = own_user()
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    held = sum(1 << capability for capability in open_any)
    libc.prctl(4, 1, 0, 0, 0)  # debuggers of its user see it, as any other
    header = struct.pack("=Ii", 0x20080522, 0)
    if libc.capset(header, struct.pack("=6I", held, held, held, 0, 0, 0)) != 0:
        raise OSError(ctypes.get_errno(), "capset")
    for capability in open_any:
        libc.prctl(47, 2, capability, 0, 0)  # programs inherit it


async def main(what: str, word: str) -> None:
    agent = endless if what == "endless" else shell
    text = {
        "bomb": bomb(word),
        "quick": bomb(word, 0.0003, 1, 0),
        "shed": f"ulimit -x unlimited; env -i setsid sleep {word} &",
        "endless": word,
    }[what]
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with holdfast.Host(agent, store="memory://", settings=holdfast.Settings(drain_timeout_s=0.2)) as host:
        session = host.session("one")
        await session.send(text)
        await asyncio.to_thread(await_condition, lambda: begun(word), "it runs")
        print("up", flush=True)
        if await lines.readline():
            receipt = await session.interrupt(grace_s=0.2)
            print(receipt.outcome, left(word), flush=True)
            await lines.readline()
    print("closed", left(word), flush=True)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[2] == "user" and os.geteuid() == 0:
        become_ordinary()
    asyncio.run(main(sys.argv[1], os.environ["HOSTILE"]))
