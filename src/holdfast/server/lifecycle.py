"""Server lifecycle: bind the address, open the host, serve, and shut down.

The first SIGINT, SIGTERM or SIGHUP starts a drain: new messages are refused with 503, and runs must finish or be
suspended by the deadline. Then requests that wait for a message to settle get a response, and event streams get a
closing frame. The second signal exits the process immediately, which is always safe for the store. If the shutdown
hangs, a watchdog outside the event loop prints the stacks of all threads and exits the process.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import gc
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from holdfast.errors import ConfigurationError
from holdfast.host import DrainReport, Host
from holdfast.host.run_reports import session_label
from holdfast.local_token import keep_token, remove_token
from holdfast.server.acceptor import Acceptor
from holdfast.server.asgi import App
from holdfast.server.auth import KeyRing, OriginGate
from holdfast.server.connections import Connection, Connections
from holdfast.server.tokens import TokenVerifier
from holdfast.server.worker_link import DRAIN, ORPHANED, WorkerLink
from holdfast.server.write_coalescing import BoundedReader
from holdfast.settings import Settings

if TYPE_CHECKING:
    from holdfast.host.live_session import LiveRun

__all__ = ["Running", "bind", "holder_of", "serve", "serve_until", "url_of"]

FORCED_EXIT = 5
_OTHER_ADDRESS = "choose an address of this machine: --host 127.0.0.1 or HOLDFAST_HOST"
_LAST_FRAMES_S = 1.0
_HAND_OVER_S = 0.5
"""Time for requests that are on their way to a worker that leaves; it still accepts messages."""
_CONNECTIONS_S = 2
_WATCHDOG_S = 30.0
_PROGRESS_S = 5.0
_NAMED = 5
_BACKLOG = 2048
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A running server.

    Parameters:
        url: URL of the server.
        host: host that the server serves.
        app: ASGI application of the server.
        keys_required: whether requests require a key or a token.
        token_file: path of the file that contains the local token; None if the server has no local token.
    """

    url: str
    host: Host
    app: App
    keys_required: bool
    token_file: Path | None = None


def bind(settings: Settings) -> socket.socket:
    """Return a socket that listens on the host and port in `settings`.

    Raises:
        ConfigurationError: if the address does not belong to this machine, is not permitted, or is in use. If the port
            is in use, the message names the program that listens on it, if that program is known.
    """
    where = f"{settings.host}:{settings.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {where}: {error.strerror}", hint=_OTHER_ADDRESS) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        text = f"cannot listen on {where}: {(error.strerror or str(error)).lower()}"
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigurationError(text, hint=_OTHER_ADDRESS) from None
        if error.errno == errno.EACCES:
            hint = "choose a port above 1023: HOLDFAST_PORT=8421 or --port 8421 (0 picks a free one)"
            raise ConfigurationError(text, hint=hint) from None
        holder = holder_of(settings.port) if settings.port else None
        raise ConfigurationError(
            text + (f": {holder} has it" if holder else ""),
            hint="stop that program, or choose another port: HOLDFAST_PORT=8421 or --port 8421 (0 picks a free one)",
        ) from None
    return listener


def holder_of(port: int) -> str | None:
    """Return a description of the program that listens on a TCP port, such as ``pid 123 (python -m …)``.

    A process that the same command started, such as the server of ``serve --reload``, is described as that command:
    if it alone ended, the port would soon be in use again. Return None if this user can see no such program.
    """
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.Error:
        return None
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            if connection.pid is None:
                return "a program of another user"
            pid, command = _as_started(connection.pid)
            return f"pid {pid} ({' '.join(command)[:120] or 'its command cannot be seen'})"
    return None


def _as_started(pid: int) -> tuple[int, Sequence[str]]:
    """Return the pid and the command of a process, or of its outermost ancestor that runs the same command."""
    import psutil

    command: list[str] = []
    with suppress(psutil.Error):  # it has ended, or belongs to another user
        process: psutil.Process | None = psutil.Process(pid)
        while process is not None and (not command or process.cmdline()[1:3] == command[1:3] != []):
            pid, command = process.pid, process.cmdline()
            process = process.parent()
    return pid, command


class _Server(uvicorn.Server):
    """uvicorn server with an `Acceptor` and without signal handlers.

    The future ``listening`` is done once the server accepts connections.
    """

    def __init__(self, config: uvicorn.Config, connections: Connections, keys: KeyRing) -> None:
        super().__init__(config)
        self.listening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connections = connections
        self._keys = keys

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers, because `serve` installs its own handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections on `sockets`."""
        await self.lifespan.startup()
        self.servers = [  # uvicorn only calls close() and wait_closed()
            Acceptor(listener, self._protocol, self._connections, self._keys)  # type: ignore[misc]
            for listener in sockets or ()
        ]
        self.started = True
        self.listening.set_result(None)

    def hand_over(self) -> None:
        """Leave new connections and requests to the other processes that listen on the same socket.

        Idle connections are closed at once, the others after their next response.
        """
        self._connections.is_leaving = True
        for server in self.servers:
            server.stop_listening()  # type: ignore[attr-defined]  # an Acceptor
        for connection in list(self.server_state.connections):
            # A new connection has no cycle yet: its first request may be on its way.
            if getattr(connection, "cycle", None) is not None:
                connection.shutdown()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and close all connections, including connections that are still being set up."""
        for server in self.servers:
            server.close()
            await server.wait_closed()
        await super().shutdown(sockets)

    def _protocol(self, waited: Connection | None) -> BoundedReader:
        return BoundedReader(
            self._connections,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            waited=waited,
        )


async def serve(
    host: Host,
    listener: socket.socket,
    *,
    ready: Callable[[Running], None],
    note: Callable[[str], None],
    link: WorkerLink | None = None,
) -> DrainReport:
    """Serve until a signal arrives, and return the report of the drain. Call it only in the main thread of a process.

    See `serve_until` for the other parameters and the errors.

    Parameters:
        link: connection to the supervisor, which can end the server too; None if this is the only process.
    """
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[str] = loop.create_future()

    def request_exit(why: str) -> None:
        if asked.done() and why == ORPHANED:
            os._exit(FORCED_EXIT)  # who killed the supervisor during the drain waits no longer
        if not asked.done():
            asked.set_result(why)
            faulthandler.dump_traceback_later(host.settings.drain_timeout_s + _WATCHDOG_S, exit=True)

    def on_signal(name: str) -> None:
        if asked.done():
            note("Quitting now. Messages are safe; at the next start, replayable runs continue, and others end.")
            os._exit(FORCED_EXIT)
        request_exit(name)

    def on_ready(running: Running) -> None:
        gc.collect()
        gc.freeze()  # objects of the start live as long as the process: never scan them again
        ready(running)

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, signal.Signals(number).name)
    if link is not None:
        link.start(request_exit)
    try:
        return await serve_until(asked, host, listener, ready=on_ready, note=note, is_worker=link is not None)
    finally:
        if link is not None:
            link.close()
        faulthandler.cancel_dump_traceback_later()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def serve_until(
    asked: asyncio.Future[str],
    host: Host,
    listener: socket.socket,
    *,
    ready: Callable[[Running], None],
    note: Callable[[str], None],
    is_worker: bool = False,
) -> DrainReport:
    """Open `host`, serve HTTP on `listener` until `asked` is done, shut down, and return the report of the drain.

    Parameters:
        asked: future that requests the shutdown when it is done; its result is the reason.
        host: host to serve, not started yet.
        listener: bound, listening socket, which is closed at the end.
        ready: called once with the `Running` server when the server accepts connections.
        note: called with lines of text for the operator when the shutdown begins and while it waits for runs.
        is_worker: whether other processes listen on `listener` too. Unless all of them end, they get the new
            connections while this one shuts down.

    Raises:
        ConfigurationError: if the address is reachable from other machines but neither a valid API key exists nor
            signed tokens are accepted, or if a key for signed tokens is invalid.
        StorageError: if the store cannot be opened.
    """
    settings = host.settings
    try:
        signed = TokenVerifier.of(settings, host.clock)
        async with host, _guarded(host, signed, may_use_token=not is_worker) as (keys, token_file):
            async with App(host, keys) as app, asyncio.TaskGroup() as group:
                connections = Connections(host)
                server = _Server(_config(app), connections, keys)
                serving = group.create_task(server.serve(sockets=[listener]))
                await server.listening
                ready(
                    Running(
                        url=url_of(listener), host=host, app=app, keys_required=keys.required, token_file=token_file
                    )
                )
                why = await asked
                if is_worker and why != DRAIN:
                    server.hand_over()
                    await asyncio.sleep(_HAND_OVER_S)
                with _progress(host, why, note):
                    report = await host.drain(deadline_s=settings.drain_timeout_s)
                host.close_streams()
                await _last_frames(app)
                server.should_exit = True
                await serving
                connections.close()
        return report
    finally:
        listener.close()


@contextmanager
def _progress(host: Host, why: str, note: Callable[[str], None]) -> Iterator[None]:
    """Tell the operator at the start of a drain, and every 5 s, which runs it waits for."""
    loop, deadline_s = host.loop, host.settings.drain_timeout_s
    ends_at = loop.time() + deadline_s
    timer: asyncio.TimerHandle

    def still_waiting() -> None:
        nonlocal timer
        if host.live:
            runs = _listed([f"{_session_of(run)} ({run.run.agent.name})" for run in host.live.values()])
            note(f"still waiting for {runs}; {max(0.0, ends_at - loop.time()):.0f} s left")
        timer = loop.call_later(_PROGRESS_S, still_waiting)

    count = len(host.live)
    if count:
        again = "Press Ctrl-C again" if why == "SIGINT" else "Send the signal again"
        runs = f"{count} run{'' if count == 1 else 's'} ({_listed([_session_of(run) for run in host.live.values()])})"
        note(f"Shutting down: waiting up to {deadline_s:g} s for {runs}. {again} to quit now.")
    elif sessions := [session_label(live.principal, live.key) for live in host.actors.values() if live.background]:
        note(f"Shutting down: ending background work of {_listed(sessions)}.")
    else:
        note("Shutting down: nothing is running.")
    timer = loop.call_later(_PROGRESS_S, still_waiting)
    try:
        yield
    finally:
        timer.cancel()


def _session_of(run: LiveRun) -> str:
    return session_label(run.actor.principal, run.actor.key)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


@asynccontextmanager
async def _guarded(
    host: Host, signed: TokenVerifier | None, *, may_use_token: bool
) -> AsyncIterator[tuple[KeyRing, Path | None]]:
    """Load the keys of a host, and create the local token if one is required.

    Yields the keys and the path of the token file, or None in place of the path if no token is required. The token file
    is deleted on exit.
    """
    keys = KeyRing(host.store, host.clock, signed=signed)
    await keys.load()
    OriginGate.require_keys(host.settings, any_valid=keys.any_valid)
    info = await host.store.info()
    store = f"sqlite:///{info.path}" if info.engine == "sqlite" else ""
    if keys.ever or not any(agent.executes for agent in host.agents.values()):
        remove_token(store)
        async with _followed(keys, host):
            yield keys, None
        return
    if not may_use_token:
        raise ConfigurationError(
            "--workers requires an API key if agents can execute commands on this machine",
            hint="create one with 'holdfast keys create PRINCIPAL', or start one worker",
        )
    token, file = keep_token(store)
    try:
        keys = KeyRing(host.store, host.clock, token=token, signed=signed)
        await keys.load()
        async with _followed(keys, host):
            yield keys, file
    finally:
        file.unlink(missing_ok=True)


@asynccontextmanager
async def _followed(keys: KeyRing, host: Host) -> AsyncIterator[None]:
    """Read the keys again and again if other hosts use the store too."""
    if host.store.cluster is None:
        yield
        return
    following = host.start_task(keys.follow(host.settings.cluster_poll_s), "follow the keys")
    try:
        yield
    finally:
        following.cancel()


async def _last_frames(app: App) -> None:
    """Wait until the event streams have written their last frames, and cut streams whose clients do not read them."""
    try:
        async with asyncio.timeout(_LAST_FRAMES_S):
            await app.context.streams.all_ended()
    except TimeoutError:
        app.context.streams.cut()


def _config(app: App) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_CONNECTIONS_S,
    )


def url_of(listener: socket.socket) -> str:
    """Return the URL at which clients on this machine reach a listening socket."""
    address, port = listener.getsockname()[:2]
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
