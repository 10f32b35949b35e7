"""Tools that do not want to end, each where it can do its worst: on the loop, in a thread, in a process of its own.

Each call gets a folder and a token: it touches ``folder/token`` when it is at its worst, and every program that it
executes has the token among its arguments. What cannot be ended from outside waits for its `Stage` to be released, and
is on its list meanwhile, so that a test need not believe anybody about what lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from holdfast.runtime import check_interrupt, current_interrupt, current_scope

if TYPE_CHECKING:
    from holdfast.agents.run import Call

__all__ = ["STAGES", "VISITED", "ZOO", "Fate", "Stage"]

Fate = Literal["gone", "quarantined"]
"""What a stop can make of it at most: end it, or give it up and name it."""

VISITED: contextvars.ContextVar[str] = contextvars.ContextVar("visited", default="")
_kept: list[object] = []


class Stage:
    """What one call of this process does, for tests.

    Attributes:
        living: threads and tasks of the call that have not ended, by the name they are known under.
        late: what came of its attempts to say something after it was given up.
    """

    def __init__(self) -> None:
        self.living: list[str] = []
        self.late: list[str] = []
        self._released = threading.Event()
        read, self._write = os.pipe()
        self.read = read

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        self.living.append(name)
        try:
            yield
        finally:
            self.living.remove(name)

    @property
    def released(self) -> bool:
        return self._released.is_set()

    def wait(self) -> None:
        self._released.wait(60)

    def release(self) -> None:
        """Let everything end that waits here."""
        self._released.set()
        os.write(self._write, b"." * 64)

    def close(self) -> None:
        os.close(self.read)
        os.close(self._write)


STAGES: dict[str, Stage] = {}


def begun(folder: str, token: str) -> None:
    Path(folder, token).touch()


def pause() -> None:
    while True:
        time.sleep(1000)


# On the loop


async def sleeps(folder: str, token: str) -> str:
    begun(folder, token)
    await asyncio.sleep(1000)
    return "slept"


async def swallows(folder: str, token: str) -> str:
    stage = STAGES[token]
    with stage.inside("swallows"):
        begun(folder, token)
        while not stage.released:
            try:
                await asyncio.sleep(0.05)
            except BaseException:
                continue
    return "late"


async def raises_in_cleanup(folder: str, token: str) -> str:
    try:
        begun(folder, token)
        await asyncio.sleep(1000)
    finally:
        raise LookupError("in its clean-up")


async def cleans_up_slowly(folder: str, token: str) -> str:
    with STAGES[token].inside("cleans_up_slowly"):
        try:
            begun(folder, token)
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(1000)
    return ""


async def starts_more_in_cleanup(folder: str, token: str) -> str:
    stage = STAGES[token]

    async def more(depth: int) -> None:
        with stage.inside("starts_more_in_cleanup"):
            try:
                await asyncio.sleep(1000)
            finally:
                if depth:
                    _kept.append(asyncio.get_running_loop().create_task(more(depth - 1)))
                    _kept.pop()

    tasks = [asyncio.get_running_loop().create_task(more(2)) for _ in range(3)]
    begun(folder, token)
    await asyncio.wait(tasks)
    return ""


async def blocks_the_loop(folder: str, token: str) -> str:
    begun(folder, token)
    for _ in range(1000):
        time.sleep(0.02)
        await asyncio.sleep(0)
    return ""


async def receives_on_the_loop(folder: str, token: str) -> str:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        begun(folder, token)
        await asyncio.get_running_loop().sock_recv(ours, 1)
    return ""


async def runs_a_stubborn_program(folder: str, token: str) -> str:
    scope = current_scope()
    assert scope is not None
    shell = 'trap \'\' TERM; setsid sh -c \'trap "" TERM; sleep 1000\' "$0" & touch "$1"; sleep 1000'
    program = await scope.process(["sh", "-c", shell, token, os.path.join(folder, token)])
    return f"ended with {await program.wait()}"


async def runs_programs_of_asyncio(folder: str, token: str) -> str:
    shell = "trap '' TERM; env -i setsid sh -c 'sleep 1000' \"$0\" & touch \"$1\"; sleep 1000"
    program = await asyncio.create_subprocess_exec("sh", "-c", shell, token, os.path.join(folder, token))
    return f"ended with {await program.wait()}"


async def changes_the_context(folder: str, token: str) -> str:
    VISITED.set(token)
    interrupt = current_interrupt()
    assert interrupt is not None

    async def generator() -> Any:
        VISITED.set(token)
        yield 1
        yield 2

    async for _ in generator():
        break  # it is never closed
    begun(folder, token)
    await interrupt.sleep(1000)
    return ""


# In a thread


def reads_a_pipe(folder: str, token: str) -> str:
    stage = STAGES[token]
    with stage.inside("reads_a_pipe"):
        begun(folder, token)
        os.read(stage.read, 1)
    return "late"


def receives(folder: str, token: str) -> str:
    """A well-meaning one: it has its socket shut down."""
    scope = current_scope()
    assert scope is not None
    ours, theirs = socket.socketpair()
    with ours, theirs, STAGES[token].inside("receives"):
        scope.add_closer(lambda: ours.shutdown(socket.SHUT_RDWR))
        begun(folder, token)
        ours.recv(1)
        check_interrupt()
    return ""


def swallows_in_a_thread(folder: str, token: str) -> str:
    stage = STAGES[token]
    interrupt = current_interrupt()
    assert interrupt is not None
    with stage.inside("swallows_in_a_thread"):
        begun(folder, token)
        while not stage.released:
            try:
                interrupt.sleep_blocking(1000)
            except BaseException:
                time.sleep(0.01)
    return "late"


def writes_after_the_stop(call: Call, folder: str, token: str) -> str:
    stage = STAGES[token]
    with stage.inside("writes_after_the_stop"):
        _ = call.output("in time")
        begun(folder, token)
        stage.wait()
        for write in (lambda: call.output("late"), lambda: call.run.emit("late")):
            try:
                write()
            except BaseException as error:
                stage.late.append(type(error).__name__)
            else:
                stage.late.append("taken")
    return "late"


def leaks_threads(folder: str, token: str) -> str:
    stage = STAGES[token]

    def leaked(number: int) -> None:
        with stage.inside(f"leaked {number} {token}"):
            stage.wait()

    for number in range(3):
        threading.Thread(target=leaked, args=(number,), name=f"leaked {number} {token}", daemon=True).start()
    while len(stage.living) < 3:
        time.sleep(0.001)
    begun(folder, token)
    interrupt = current_interrupt()
    assert interrupt is not None
    interrupt.sleep_blocking(1000)
    return ""


def runs_subprocesses(folder: str, token: str) -> str:
    """Waits for a pipe that a grandchild holds, in another session and without an environment."""
    shell = "trap '' TERM; env -i setsid sh -c 'sleep 1000' \"$0\" & touch \"$1\"; echo up"
    done = subprocess.run(["sh", "-c", shell, token, os.path.join(folder, token)], stdout=subprocess.PIPE, check=False)
    return done.stdout.decode()


def spawns_daemons(folder: str, token: str) -> str:
    shell = '(setsid sh -c "sleep 1000" "$0" &); exec 0<&- 1>&- 2>&-; (cd /; setsid sh -c "sleep 1000" "$0" &)'
    for _ in range(2):
        subprocess.run(["sh", "-c", shell, token], check=True, stdin=subprocess.DEVNULL)
    begun(folder, token)
    interrupt = current_interrupt()
    assert interrupt is not None
    interrupt.sleep_blocking(1000)
    return ""


def raises_in_the_cleanup_of_a_thread(folder: str, token: str) -> str:
    interrupt = current_interrupt()
    assert interrupt is not None
    try:
        begun(folder, token)
        interrupt.sleep_blocking(1000)
    finally:
        raise LookupError("in its clean-up")


# In a process


def hashes(folder: str, token: str) -> str:
    import hashlib

    begun(folder, token)
    return hashlib.pbkdf2_hmac("sha256", b"a", b"b", 1 << 30).hex()


def matches(folder: str, token: str) -> str:
    """C code that holds the interpreter's lock."""
    begun(folder, token)
    return str(re.match(r"(a|a)+$", "a" * 60 + "b"))


def holds_the_lock(folder: str, token: str) -> str:
    import ctypes

    begun(folder, token)
    ctypes.PyDLL(None).sleep(1000)
    return ""


def is_well_behaved(folder: str, token: str) -> str:
    begun(folder, token)
    time.sleep(1000)
    return ""


def swallows_in_a_process(folder: str, token: str) -> str:
    begun(folder, token)
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            continue


def raises_in_the_cleanup_of_a_process(folder: str, token: str) -> str:
    try:
        begun(folder, token)
        time.sleep(1000)
    finally:
        raise LookupError("in its clean-up")


def ignores_every_signal(folder: str, token: str) -> str:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    begun(folder, token)
    pause()
    return ""


def closes_its_descriptors(folder: str, token: str) -> str:
    begun(folder, token)
    os.closerange(0, 256)
    pause()
    return ""


def daemonises(folder: str, token: str) -> str:
    for wiped in (False, True):
        if os.fork():
            continue
        os.setsid()
        if os.fork():
            os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.closerange(0, 256)
        os.chdir("/")
        if wiped:
            os.execve("/bin/sh", ["sh", "-c", "sleep 1000; :", token], {})
        Path(folder, token).touch()
        pause()
    pause()
    return ""


def holds_pipes(folder: str, token: str) -> str:
    """A grandchild holds everything that this process had open; this one ends without an answer."""
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        begun(folder, token)
        pause()
    while not Path(folder, token).exists():
        time.sleep(0.001)
    os._exit(3)


def bombs(folder: str, token: str) -> str:
    """Doubles to sixteen; and a line of processes, each of which lives just long enough to fork its successor."""
    if os.fork() == 0:
        for _ in range(300):
            if os.fork():
                os._exit(0)
            os.setsid()
            time.sleep(0.002)
        os._exit(0)
    for _ in range(4):
        os.fork()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    begun(folder, token)
    time.sleep(100)
    os._exit(0)


def writes_files_for_ever(folder: str, token: str) -> str:
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            with open(os.path.join(folder, f"{token}.written"), "ab", 0) as file:
                file.write(b".")
            begun(folder, token)
            time.sleep(0.001)
    pause()
    return ""


def leaks_everything(folder: str, token: str) -> str:
    """Returns, but leaves a thread, a program, descriptors and a changed process behind."""
    threading.Thread(target=pause, daemon=True).start()
    _kept.append(subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 1000; :", token]))
    _kept.extend(socket.socketpair())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ.clear()
    os.chdir("/")
    VISITED.set(token)
    begun(folder, token)
    return "left much"


def uses_multiprocessing(folder: str, token: str) -> str:
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(2) as pool:
        begun(folder, token)
        pool.map(time.sleep, [1000, 1000])
    return ""


def prints_for_ever(folder: str, token: str) -> str:
    begun(folder, token)
    while True:
        sys.stdout.write("x" * 1000 + "\n")
        time.sleep(0.001)


def stops_itself(folder: str, token: str) -> str:
    begun(folder, token)
    os.kill(os.getpid(), signal.SIGSTOP)
    return ""


def kills_its_reaper(folder: str, token: str) -> str:
    begun(folder, token)
    os.kill(os.getppid(), signal.SIGKILL)
    pause()
    return ""


def waits_in_select(folder: str, token: str) -> str:
    gc.disable()
    begun(folder, token)
    select.select([], [], [], 1000)
    return ""


ZOO: dict[Callable[..., Any], tuple[Literal["loop", "thread", "process"], Fate]] = {
    sleeps: ("loop", "gone"),
    swallows: ("loop", "quarantined"),
    raises_in_cleanup: ("loop", "gone"),
    cleans_up_slowly: ("loop", "gone"),
    starts_more_in_cleanup: ("loop", "gone"),
    blocks_the_loop: ("loop", "gone"),
    receives_on_the_loop: ("loop", "gone"),
    runs_a_stubborn_program: ("loop", "gone"),
    runs_programs_of_asyncio: ("loop", "gone"),
    changes_the_context: ("loop", "gone"),
    reads_a_pipe: ("thread", "quarantined"),
    receives: ("thread", "gone"),
    swallows_in_a_thread: ("thread", "quarantined"),
    writes_after_the_stop: ("thread", "quarantined"),
    leaks_threads: ("thread", "quarantined"),
    runs_subprocesses: ("thread", "gone"),
    spawns_daemons: ("thread", "gone"),
    raises_in_the_cleanup_of_a_thread: ("thread", "gone"),
    hashes: ("process", "gone"),
    matches: ("process", "gone"),
    holds_the_lock: ("process", "gone"),
    is_well_behaved: ("process", "gone"),
    swallows_in_a_process: ("process", "gone"),
    raises_in_the_cleanup_of_a_process: ("process", "gone"),
    ignores_every_signal: ("process", "gone"),
    closes_its_descriptors: ("process", "gone"),
    daemonises: ("process", "gone"),
    holds_pipes: ("process", "gone"),
    bombs: ("process", "gone"),
    writes_files_for_ever: ("process", "gone"),
    leaks_everything: ("process", "gone"),
    uses_multiprocessing: ("process", "gone"),
    prints_for_ever: ("process", "gone"),
    stops_itself: ("process", "gone"),
    kills_its_reaper: ("process", "gone"),
    waits_in_select: ("process", "gone"),
}
"""Each tool with where it runs, and what becomes of it at worst."""
