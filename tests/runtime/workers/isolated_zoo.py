"""Functions that are called in processes of their own: well-behaved ones, and those that leave things behind."""

from __future__ import annotations

import contextvars
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import Interrupted
from holdfast.runtime import check_interrupt, current_interrupt
from holdfast.runtime.workers import main as worker_main
from holdfast.runtime.workers.main import IsolatedCall

TENANT: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")
_kept: list[object] = []


def pid() -> int:
    return os.getpid()


def pid_and_time(delay_s: float) -> tuple[int, float, float]:
    began = time.monotonic()
    time.sleep(delay_s)
    return os.getpid(), began, time.monotonic()


def fail() -> None:
    raise ValueError(str(os.getpid()))


def fail_in_a_thread() -> None:
    def work() -> None:
        raise ValueError("password=hunter2 \x1b[2J\n2026-01-01T00:00:00Z ERROR forged")

    thread = threading.Thread(target=work, name="w")
    thread.start()
    thread.join()


def sleep_with_a_cleanup(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    try:
        time.sleep(1000)
    except Interrupted as interrupted:
        Path(path).write_text(f"{interrupted.cause.kind}: {interrupted.cause.reason}")
        raise


def wait_for_the_interrupt(path: str) -> None:
    interrupt = current_interrupt()
    assert interrupt is not None
    seen: list[object] = []
    threading.Thread(target=lambda: seen.append(interrupt.wait_blocking(60))).start()
    Path(path).write_text(str(os.getpid()))
    try:
        time.sleep(1000)
    finally:
        while not seen:
            time.sleep(0.005)
        Path(path).write_text(f"{interrupt.name} {len(seen)}")
        check_interrupt()


def swallow(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            continue


def tenant() -> str:
    return TENANT.get()


def set_tenant() -> None:
    TENANT.set("somebody")


def speak(call: IsolatedCall, path: str) -> str:
    print("printed, ", end="")
    call.output("said, ")
    os.system("echo by a program")
    sys.stderr.write("told\n")
    while not Path(path).exists():
        time.sleep(0.005)
    sys.stdout.buffer.write(b"and \xff and \xc3")
    sys.stdout.flush()
    time.sleep(0.05)
    sys.stdout.buffer.write(b"\xa9.")
    return call.call_id


def speak_much(kilobytes: int) -> None:
    for number in range(kilobytes):
        sys.stdout.write(f"{number:<1023}\n")


def hold_memory(size: int) -> int:
    _kept.append(bytearray(os.urandom(1024)) * (size // 1024))
    return os.getpid()


def double(data: bytes) -> bytes:
    return data * 2


def close_everything() -> None:
    os.closerange(3, 256)


def let_another_take_over_the_number(path: str) -> None:
    own = worker_main._worker_main
    assert own is not None
    other = socket.socket(socket.AF_UNIX)
    other.connect(path)
    os.dup2(other.fileno(), own._control.fileno())


def send_garbage() -> None:
    own = worker_main._worker_main
    assert own is not None
    own._control.sendall(b"\xff" * 64)


def return_twice() -> int:
    return 0 if os.fork() == 0 else 1


# What is left behind


def a_thread() -> int:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True, name="left").start()
    return os.getpid()


def a_program() -> int:
    _kept.append(subprocess.Popen(["sleep", "1000"]))
    return os.getpid()


def a_daemon() -> int:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 256)
            time.sleep(1000)
        os._exit(0)
    os.wait()
    return os.getpid()


def a_descriptor() -> int:
    _kept.append(socket.socket())
    return os.getpid()


def another_descriptor() -> int:
    os.dup2(1, 0)
    return os.getpid()


def a_directory() -> int:
    os.chdir("/")
    return os.getpid()


def a_variable() -> int:
    os.environ["LEFT_BEHIND"] = "1"
    return os.getpid()


def a_handler() -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return os.getpid()


def a_blocked_signal() -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    return os.getpid()


def an_alarm() -> int:
    signal.alarm(1000)
    return os.getpid()


def a_mask() -> int:
    os.umask(0)
    return os.getpid()


def a_path() -> int:
    sys.path.insert(0, "/left")
    return os.getpid()


def a_limit() -> int:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    return os.getpid()


def a_stream() -> int:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return os.getpid()


def a_closed_stream() -> int:
    sys.stdout.close()
    return os.getpid()


LEAVERS: list[Callable[[], int]] = [
    a_thread,
    a_program,
    a_daemon,
    a_descriptor,
    another_descriptor,
    a_directory,
    a_variable,
    a_handler,
    a_blocked_signal,
    an_alarm,
    a_mask,
    a_path,
    a_limit,
    a_stream,
    a_closed_stream,
]


# What is left behind and denied


def _deny(leaver: Callable[[], int]) -> int:
    worker_main._Snapshot.leftovers = lambda self: []  # type: ignore[method-assign]
    return leaver()


def lie_about_a_thread() -> int:
    return _deny(a_thread)


def lie_about_a_descriptor() -> int:
    return _deny(a_descriptor)


def lie_about_a_program() -> int:
    return _deny(a_daemon)
