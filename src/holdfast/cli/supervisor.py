"""``holdfast serve --workers N``: several server processes on one socket, and the supervisor that keeps them alive.

- The supervisor binds the socket, and all workers accept from its one queue. So the end of a worker loses no connection
  that waits there; with a socket for each worker (SO_REUSEPORT), it would.
- A worker that ends is started again: at once if it ended in order, else after a growing pause. If one fails before
  all have ever been ready, the settings are at fault: all end, with its exit code.
- A request to end is passed on once, over the workers' connections. A second one is passed on as a signal, which ends
  them at once. The workers have sessions of their own, so a terminal's Ctrl-C reaches the supervisor only.
- SIGUSR2 replaces the workers one after the other. Each serves until its successor is ready.
- A worker ends when its connection to the supervisor does, so a killed supervisor leaves nothing behind.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.cli.exit_codes import Exit, exit_of
from holdfast.cli.output import counted, note, say, say_error, say_json
from holdfast.cli.worker_share import worker_settings
from holdfast.clock import system_clock
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.runtime.processes.cgroup_delegation import take_cgroups
from holdfast.settings import load_settings
from holdfast.store_url import shown_store

if TYPE_CHECKING:
    from holdfast.server import WorkerLink

__all__ = ["Supervisor", "WorkerPlace", "restart_pause_s", "serve_workers"]

_END: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_REPLACE: Final = signal.SIGUSR2
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_PROVEN_S: Final = 60.0
"""A worker that lived for this long did not fail to start: its next pause is the first one again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """How a worker finds its supervisor.

    Parameters:
        workers: number of workers.
        listener: descriptor of the listening socket.
        link: descriptor of the connection to the supervisor.
    """

    workers: int
    listener: int
    link: int

    @classmethod
    def parse(cls, text: str) -> WorkerPlace:
        """Return the value of a command-line option."""
        workers, listener, link = map(int, text.split(","))
        return cls(workers=workers, listener=listener, link=link)

    def __str__(self) -> str:
        return f"{self.workers},{self.listener},{self.link}"

    def take_listener(self) -> socket.socket:
        """Return the listening socket, which programs that this process starts do not get."""
        return _taken(self.listener)

    def take_link(self) -> WorkerLink:
        """Return the connection to the supervisor, which programs that this process starts do not get."""
        from holdfast.server import WorkerLink

        return WorkerLink(_taken(self.link))


def _taken(descriptor: int) -> socket.socket:
    taken = socket.socket(fileno=descriptor)
    taken.set_inheritable(False)
    taken.setblocking(False)
    return taken


def restart_pause_s(failures: int) -> float:
    """Return the pause before a worker is started again that has failed `failures` times in a row."""
    return 0.0 if failures == 0 else min(_FIRST_PAUSE_S * 2.0 ** min(failures - 1, 16), _LONGEST_PAUSE_S)


class _Worker:
    """One process. ``about`` is its description of itself; None until it is ready."""

    def __init__(self, place: int, process: subprocess.Popen[bytes], link: socket.socket) -> None:
        self.place = place
        self.process = process
        self.link = link
        self.started_at = system_clock.monotonic()
        self.about: dict[str, Any] | None = None
        self.heard = b""
        self.is_leaving = False

    def ask(self, request: bytes) -> None:
        """Ask it to end."""
        self.is_leaving = True
        if self.about is None:
            self.process.terminate()  # it may not listen yet
            return
        with suppress(OSError):  # it has ended
            self.link.send(request)


class Supervisor:
    """Runs the workers. Use it in the main thread.

    Parameters:
        listener: listening socket, which is closed at the end.
        arguments: arguments of ``holdfast`` for each worker, without ``--worker``.
        environment: environment of the workers.
        workers: number of workers.
        on_ready: called once, when all workers are ready, with the description of each.
    """

    def __init__(
        self,
        listener: socket.socket,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        workers: int,
        on_ready: Callable[[Sequence[dict[str, Any]]], object],
    ) -> None:
        self._listener = listener
        self._command = [sys.executable, sys.argv[0], *arguments]
        self._environment = dict(environment)
        self._count = workers
        self._on_ready = on_ready
        self._selector = selectors.DefaultSelector()
        self._serving: dict[int, _Worker] = {}
        """The worker at each place; a place without one is started again at ``_starts``."""
        self._starts = dict.fromkeys(range(workers), 0.0)
        self._failures = dict.fromkeys(range(workers), 0)
        self._leaving: list[_Worker] = []
        self._to_replace: list[int] = []
        self._successor: _Worker | None = None
        self._was_ready = False
        self._is_ending = False
        self._code: int | None = None
        """The exit code, once a worker has failed at the start."""
        self._worst = 0

    def run(self) -> int:
        """Run the workers until a signal ends them, and return the exit code."""
        wakeup, wake_end = socket.socketpair()
        with wakeup, wake_end, self._selector, self._listener:
            wakeup.setblocking(False)
            wake_end.setblocking(False)
            signal.set_wakeup_fd(wake_end.fileno(), warn_on_full_buffer=False)
            for number in (*_END, _REPLACE, signal.SIGCHLD):
                signal.signal(number, lambda _number, _frame: None)
            self._selector.register(wakeup, selectors.EVENT_READ)
            try:
                while not self._is_ending or self._all():
                    self._start_due()
                    for key, _ in self._selector.select(self._wait_s()):
                        if key.data is None:
                            self._on_signals(wakeup.recv(256))
                        else:
                            self._hear(key.data)
                    self._reap()
            finally:
                signal.set_wakeup_fd(-1)
                for worker in self._all():
                    worker.process.kill()  # only after an error of this loop
        return self._worst if self._code is None else self._code

    def _all(self) -> list[_Worker]:
        successor = [] if self._successor is None else [self._successor]
        return [*self._serving.values(), *successor, *self._leaving]

    # ── starting ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _wait_s(self) -> float | None:
        if self._is_ending or not self._starts:
            return None
        return max(0.0, min(self._starts.values()) - system_clock.monotonic())

    def _start_due(self) -> None:
        if self._is_ending:
            return
        now = system_clock.monotonic()
        for place in [place for place, at in self._starts.items() if at <= now]:
            try:
                self._serving[place] = self._start(place)
            except OSError as error:  # too many processes, or no memory
                self._failures[place] += 1
                self._starts[place] = now + restart_pause_s(self._failures[place])
                note(f"worker {place + 1} did not start: {error}; trying again")
            else:
                del self._starts[place]

    def _start(self, place: int) -> _Worker:
        own, theirs = socket.socketpair()
        with ExitStack() as unused, theirs:
            unused.callback(own.close)
            where = WorkerPlace(workers=self._count, listener=self._listener.fileno(), link=theirs.fileno())
            process = subprocess.Popen(
                [*self._command, "--worker", str(where)],
                stdin=subprocess.DEVNULL,
                env=self._environment,
                pass_fds=(where.listener, where.link),
                start_new_session=True,
            )
            unused.pop_all()
        own.setblocking(False)
        worker = _Worker(place, process, own)
        self._selector.register(own, selectors.EVENT_READ, worker)
        return worker

    def _hear(self, worker: _Worker) -> None:
        try:
            heard = worker.link.recv(65_536)
        except BlockingIOError:
            return
        except OSError:
            heard = b""
        if not heard:
            self._selector.unregister(worker.link)  # it is about to end
            return
        worker.heard += heard
        if worker.about is None and worker.heard.endswith(b"\n"):
            worker.about = msgspec.json.decode(worker.heard)
            self._on_worker_ready(worker)

    def _on_worker_ready(self, worker: _Worker) -> None:
        if worker is self._successor:
            self._successor = None
            before = self._serving.pop(worker.place, None)
            self._starts.pop(worker.place, None)
            self._serving[worker.place] = worker
            if before is not None:
                self._leaving.append(before)
                before.ask(b"h")
            self._replace_next()
        elif self._was_ready:
            note(f"worker {worker.place + 1} is ready again (pid {worker.process.pid})")
        ready = [one.about for one in self._serving.values() if one.about is not None]
        if not self._was_ready and len(ready) == self._count and not self._is_ending:
            self._was_ready = True
            self._on_ready(ready)

    # ── signals ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in _END:
                self._end()
            elif number == _REPLACE and self._was_ready and not self._is_ending and not self._to_replace:
                note(f"replacing {counted(self._count, 'worker')} one after the other")
                self._to_replace = list(range(self._count))
                self._replace_next()

    def _end(self) -> None:
        """Ask all workers to end; the second time, let them end at once."""
        if self._is_ending:
            for worker in self._all():
                worker.process.terminate()
            return
        self._is_ending = True
        self._listener.close()  # once no worker accepts, clients are refused
        for worker in self._all():
            if not worker.is_leaving:
                worker.ask(b"d")

    def _replace_next(self) -> None:
        if self._to_replace and self._successor is None and not self._is_ending:
            try:
                self._successor = self._start(self._to_replace.pop(0))
            except OSError as error:
                self._to_replace = []
                note(f"a worker did not start: {error}; the other workers stay as they are")

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _reap(self) -> None:
        for worker in self._all():
            code = worker.process.poll()
            if code is not None:
                self._forget(worker)
                self._on_end(worker, code)

    def _forget(self, worker: _Worker) -> None:
        with suppress(KeyError, ValueError):  # its end was read already
            self._selector.unregister(worker.link)
        worker.link.close()

    def _on_end(self, worker: _Worker, code: int) -> None:
        ended = f"worker {worker.place + 1} (pid {worker.process.pid}) {_described(code)}"
        if worker in self._leaving:
            self._leaving.remove(worker)
            return
        if worker is self._successor:
            self._successor = None
            self._to_replace = []
            note(f"{ended} before it was ready; the other workers stay as they are")
            return
        del self._serving[worker.place]
        if self._is_ending:
            self._worst = max(self._worst, code if code >= 0 else Exit.INTERRUPTED)
        elif not self._was_ready:
            note(f"{ended} before all were ready; ending the others")
            self._end()
            self._code = code if code > 0 else Exit.FAILED
        else:
            lived_s = system_clock.monotonic() - worker.started_at
            failures = 0 if code == 0 else 1 if lived_s >= _PROVEN_S else self._failures[worker.place] + 1
            self._failures[worker.place] = failures
            pause_s = restart_pause_s(failures)
            self._starts[worker.place] = system_clock.monotonic() + pause_s
            note(f"{ended}; restarting it in {pause_s:g} s")


def _described(code: int) -> str:
    return f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def serve_workers(
    flags: Mapping[str, object], *, workers: int, as_json: bool, on_url: Callable[[str], object] | None
) -> Exit:
    """Run several server processes with this command's arguments until a signal ends them.

    Parameters:
        flags: settings from the command line, by name; None stands for an option that was not given.
        workers: number of processes, at least 2.
        as_json: whether to print status changes as JSON lines.
        on_url: called with the URL of the page when all workers are ready.
    """
    from holdfast.server import bind

    try:
        settings = load_settings(flags)
        if not settings.store.startswith(("postgresql://", "postgres://")):
            raise ConfigurationError(
                f"--workers {workers} requires a PostgreSQL store, not {shown_store(settings.store)}",
                hint="set --store or HOLDFAST_STORE to a postgresql:// URL, or omit --workers",
            )
        worker_settings(settings, workers=workers)
        listener = bind(settings)
    except HoldfastError as error:
        say_error(error, as_json=as_json)
        return exit_of(error)

    def on_ready(workers_ready: Sequence[dict[str, Any]]) -> None:
        url = workers_ready[0]["url"]
        with suppress(OSError):  # the output is closed; keep serving
            if as_json:
                pids = [one["pid"] for one in workers_ready]
                say_json({"event": "ready", **workers_ready[0], "pid": os.getpid(), "workers": pids})
            else:
                say(f"Holdfast answers on {url} (pid {os.getpid()}, {counted(workers, 'worker')})")
                say(f"  agents  {', '.join(workers_ready[0]['agents'])}")
                say(f"  store   {workers_ready[0]['store']}")
                say("Press Ctrl-C to shut down; press it twice to quit at once.")
        if on_url is not None:
            on_url(f"{url}/")

    take_cgroups()  # before there is a worker: no cgroup can be divided that contains a process of others
    arguments = _without_options(sys.argv[1:], valued=("--workers", "--store"), flags=("--open",))
    # The store is never an argument: everyone on this machine can read those of a process.
    environment = {**os.environ, "HOLDFAST_STORE": settings.store}
    code = Supervisor(listener, arguments, environment, workers=workers, on_ready=on_ready).run()
    with suppress(OSError):
        if as_json:
            say_json({"event": "stopped"})
        else:
            note("Stopped.")
    return Exit(code)


def _without_options(arguments: Sequence[str], *, valued: Sequence[str], flags: Sequence[str] = ()) -> list[str]:
    """Return `arguments` without these options, and without the values of the valued ones."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        name = argument.partition("=")[0]
        if skip:
            skip = False
        elif argument in valued:
            skip = True
        elif not (name in valued or name in flags):
            kept.append(argument)
    return kept
