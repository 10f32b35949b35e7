"""Start Chromium for Playwright: behind a wall of its own, or without one if the operator chose so.

Playwright starts its browser itself and talks to it over two pipes. Behind a wall, it starts `browser_launcher`
instead, which passes the pipes to this process; this process starts Chromium as a program of the current scope.

Invariants
- Chromium's only route to the network is the proxy of walled programs. Behind a wall, its network has nothing but the
  proxy's port.
- Behind a wall, Chromium sees the system, its own installation, and an empty folder. The folder of the launcher and of
  its socket is not visible. Chromium runs without its own sandbox only there, and for root.
- Nothing is shared with other browsers, nor with the session's other programs.
- The socket serves one launcher of the same user, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import shlex
import socket
import struct
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import ToolFailed
from holdfast.runtime import current_scope
from holdfast.runtime.processes.tree import KILL_BOUND_S
from holdfast.tools.sandbox.account import Account
from holdfast.tools.sandbox.choice import are_programs_unwalled
from holdfast.tools.sandbox.environment import clean_environment
from holdfast.tools.sandbox.network import open_network
from holdfast.tools.sandbox.proxy.link import network_proxy
from holdfast.tools.sandbox.proxy.rules import ANY_HOST
from holdfast.tools.sandbox.sandbox import Sandbox
from holdfast.tools.walled import prepare_launch
from holdfast.tools.web import browser_launcher

if TYPE_CHECKING:
    from holdfast.agents.program_usage import ProgramAccounts, WatchedProgram
    from holdfast.runtime import Process, Scope
    from holdfast.tools.sandbox.port import Launch
    from holdfast.tools.sandbox.proxy.link import NetworkAccess

__all__ = ["Chromium", "ChromiumProfile", "LoopbackNetwork", "open_chromium"]

_BACKLOG = 256
_PACKET_BYTES = 1 << 18
_CREDENTIALS = struct.Struct("3i")
_ADDRESS_SPACE = 1 << 46
"""Chromium reserves terabytes of addresses, so that only its memory in use can be limited, by the principal's quota."""
_NETWORK_BYTES = 16 << 30
_SCRATCH_BYTES = 512 << 20
_CPU_S = 24 * 3600
_PROCESSES = 2048
_OPEN_FILES = 8192
_SETTINGS = ("/etc/chromium", "/etc/chromium.d", "/etc/fonts", "/etc/opt/chrome", "/var/cache/fontconfig")
_SYSTEM = ("/usr/", "/bin/", "/lib/")
_START = 'moved=$1; shift; eval \'exec "$0" "$@" "--proxy-server=$http_proxy"\' "$moved"'
"""Shell command for Chromium behind a wall; its first argument moves Playwright's pipes to descriptors 3 and 4."""
_DIRECT = "--proxy-bypass-list=<-loopback>"
_FIRST_FD = 3
_PROFILE = "--user-data-dir="
_OWN_PROFILE = "--user-data-dir=/tmp/profile"
_REFUSED = re.compile(r" at https?://([^/:\s]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChromiumProfile:
    """Access of one Chromium, and the principal that it counts for.

    Parameters:
        executable: path of Chromium.
        arguments: arguments of Chromium, in addition to Playwright's.
        networks: networks that are not public and that pages may reach nevertheless.
        ports: ports that pages may connect to; None allows all ports.
        principal: the principal that the browser runs for.
        programs: the accounts of the host.
    """

    executable: str
    arguments: tuple[str, ...]
    networks: tuple[str, ...]
    ports: Sequence[int] | None
    principal: str
    programs: ProgramAccounts

    @property
    def hosts(self) -> tuple[str, ...]:
        """Rules of hosts for the proxy."""
        return tuple(f"{ANY_HOST}:{port}" for port in (("*",) if self.ports is None else self.ports))


class Chromium:
    """A Chromium that Playwright may start, as long as `open_chromium` is open.

    Parameters:
        options: options of Playwright's ``launch`` for it.
        network: its network.
    """

    def __init__(self, options: dict[str, Any], network: NetworkAccess) -> None:
        self.options = options
        self._network = network
        self.watched: WatchedProgram | None = None
        """The account of the running program; None if it is not counted."""
        self.fault = ""
        """Why Chromium was not started; empty if it was, or if Playwright did not ask for it."""

    async def explain(self, text: str) -> str:
        """Return the text of a browser's error, or the reason for it: a refused connection, or a used-up quota."""
        if self.watched is not None and self.watched.ended_because:
            return f"the browser was ended: {self.watched.ended_because}"
        if "ERR_TUNNEL_CONNECTION_FAILED" in text and (found := _REFUSED.search(text)):
            return dict((await self._network.usage()).refused).get(found[1], text)
        return text


@contextlib.asynccontextmanager
async def open_chromium(profile: ChromiumProfile, home: Path) -> AsyncIterator[Chromium]:
    """Prepare a Chromium for Playwright; on exit, its processes and its network are ended.

    Parameters:
        home: private empty folder for the browser's files, which the caller removes.

    Raises:
        ToolFailed: if its wall cannot be built, or the proxy does not start.
    """
    scope = current_scope()
    assert scope is not None, "a browser runs in a scope"
    if await scope.spawn(are_programs_unwalled, on="thread", name="prepare"):
        reach = {"hosts": profile.hosts, "networks": profile.networks}
        async with LoopbackNetwork(principal=profile.principal, **reach) as network:
            yield Chromium(_unwalled_options(profile, home, network.url), network.access)
        return
    work = home / "work"
    work.mkdir()

    def prepare() -> Launch | ToolFailed:
        try:
            return _prepare(profile, work)
        except ToolFailed as error:  # the caller's, not the scope's
            return error

    prepared = await scope.spawn(prepare, on="thread", name="prepare")
    if isinstance(prepared, ToolFailed):
        raise prepared
    launch = await open_network(prepared)
    assert launch.network is not None, "the profile has a network"
    chromium = Chromium(_walled_options(profile, home), launch.network)
    account = Account(programs=profile.programs, principal=profile.principal, folder=work, shared=False)
    starter = _Starter(scope, dataclasses.replace(launch, account=account), chromium)
    try:
        with _listen(home) as listener:
            scope.spawn(starter.serve(listener), name="chromium")
            yield chromium
    finally:
        await starter.end()


def _prepare(profile: ChromiumProfile, work: Path) -> Launch:
    found = os.path.realpath(profile.executable)
    if not os.path.exists(found):
        raise ToolFailed(f"{profile.executable} does not exist; install Chromium, or name it in HOLDFAST_CHROMIUM")
    readable = [path for path in _SETTINGS if os.path.exists(path)]
    if not found.startswith(_SYSTEM):
        readable.append(os.path.dirname(found))
    sandbox = Sandbox(
        network="hosts",
        hosts=profile.hosts,
        allow_networks=profile.networks,
        network_bytes=_NETWORK_BYTES,
        readable=tuple(readable),
        memory_bytes=_ADDRESS_SPACE,
        cpu_s=_CPU_S,
        processes=_PROCESSES,
        open_files=_OPEN_FILES,
        scratch_bytes=_SCRATCH_BYTES,
    )
    return prepare_launch(
        ["/bin/sh", "-c", _START, found],
        sandbox=sandbox,
        folder=work,
        principal=profile.principal,
        environment=clean_environment(),
    )


def _walled_options(profile: ChromiumProfile, home: Path) -> dict[str, Any]:
    program = home / "chromium"
    words = (sys.executable, "-I", "-S", browser_launcher.__file__, os.fspath(home))
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o700)
    return {
        "executable_path": program,
        "args": [*profile.arguments, _DIRECT],
        "env": {"PATH": os.defpath, "HOME": os.fspath(home)},
        "chromium_sandbox": False,
    }


def _unwalled_options(profile: ChromiumProfile, home: Path, proxy: str) -> dict[str, Any]:
    own = dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"), os.fspath(home))
    return {
        "executable_path": profile.executable,
        "args": [*profile.arguments, _DIRECT],
        "env": {**clean_environment(), **own},
        "proxy": {"server": proxy, "bypass": "<-loopback>"},
        "chromium_sandbox": os.geteuid() != 0,
    }


def _listen(home: Path) -> socket.socket:
    """Return the socket for the launcher; the folder is named by a descriptor, as a socket's path must be short."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    folder = os.open(home, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{browser_launcher.SOCKET_NAME}")
        listener.listen(1)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(folder)
    return listener


class _Starter:
    """Starts the Chromium of one launcher behind its wall, and ends the one with the other."""

    def __init__(self, scope: Scope, launch: Launch, chromium: Chromium) -> None:
        self._scope = scope
        self._launch = launch
        self._chromium = chromium
        self._unused = contextlib.ExitStack()
        for fd in launch.pass_fds:
            self._unused.callback(os.close, fd)
        self._process: Process | None = None

    async def serve(self, listener: socket.socket) -> None:
        """Wait for the launcher, start Chromium for it, and tell it Chromium's exit code."""
        with contextlib.suppress(OSError):  # the listener is closed, or the launcher has ended
            while True:
                await _readable(listener)
                connection, _ = listener.accept()  # here, because a cancelled `sock_accept` may lose the connection
                with connection:
                    if not _is_ours(connection):
                        continue
                    await _readable(connection)
                    process = await self._start(connection)
                    if process is not None:
                        code = await self._attend(process, connection)
                        connection.send(str(code).encode())
                    return

    async def _start(self, connection: socket.socket) -> Process | None:
        packed, fds, _, _ = socket.recv_fds(
            connection, _PACKET_BYTES, len(browser_launcher.PASSED_FDS), socket.MSG_CMSG_CLOEXEC
        )
        with contextlib.ExitStack() as theirs, self._unused:
            for fd in fds:
                theirs.callback(os.close, fd)
            if len(fds) != len(browser_launcher.PASSED_FDS):
                return None
            arguments = map(os.fsdecode, packed.split(b"\0"))
            own = [_OWN_PROFILE if word.startswith(_PROFILE) else word for word in arguments]
            launch = self._launch
            try:
                self._process = await self._scope.process(
                    (*launch.argv, _moved(_FIRST_FD + len(launch.pass_fds)), *own),
                    stdin=fds[0],
                    stdout=fds[1],
                    stderr=fds[2],
                    cwd=launch.directory,
                    env=launch.environment,
                    name="chromium",
                    wall=launch.wall,
                    pass_fds=(*launch.pass_fds, *fds[3:]),
                    confirm=launch.confirm,
                    cgroup=None if launch.account is None else launch.account.cgroup,
                )
            except (OSError, ValueError) as error:
                self._chromium.fault = str(error)
                return None
        if launch.account is not None:
            self._chromium.watched = launch.account.watch(self._process)
        return self._process

    async def _attend(self, process: Process, connection: socket.socket) -> int:
        """Return Chromium's exit code, after all its processes are gone; the launcher's end ends them."""
        loop = asyncio.get_running_loop()

        def end() -> None:
            loop.remove_reader(connection)
            process.tree.ask_kill(0.0, KILL_BOUND_S)

        loop.add_reader(connection, end)
        try:
            code = await process.wait()
            await process.kill_tree()
            return code
        finally:
            loop.remove_reader(connection)

    async def end(self) -> None:
        """End Chromium with all its processes, and its network."""
        try:
            if self._process is not None and self._scope.interrupt.triggered:
                await self._process.wait_gone()  # the scope ends it
            elif self._process is not None:
                await self._process.kill_tree()
        finally:
            self._unused.close()
            if self._launch.network is not None:
                self._launch.network.close()


def _moved(first: int) -> str:
    """Return the redirections that make two descriptors, `first` and the next one, the descriptors 3 and 4."""
    left = [f"{fd}<&-" for fd in (first, first + 1) if fd > _FIRST_FD + 1]
    return " ".join([f"{_FIRST_FD}<&{first} {_FIRST_FD + 1}<&{first + 1}", *left])


def _is_ours(connection: socket.socket) -> bool:
    """Return whether a process of this user is at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_reader(connection, wake)
    try:
        await future
    finally:
        loop.remove_reader(connection)


class LoopbackNetwork:
    """The network of a Chromium without a wall: the proxy, on a port of this machine's loopback.

    Parameters:
        principal: owner of the browser.
        hosts, networks: what pages may reach; see `NetworkProxy.open`.

    Attributes:
        url: the proxy's address, within the ``async with`` block.
        access: the proxy's accounts of it, there.
    """

    def __init__(self, *, principal: str, hosts: Sequence[str], networks: Sequence[str]) -> None:
        self._principal = principal
        self._hosts = hosts
        self._networks = networks
        self._open = contextlib.ExitStack()
        self.access: NetworkAccess
        self.url = ""

    async def __aenter__(self) -> LoopbackNetwork:
        access = await network_proxy().open(
            self._principal, self._hosts, networks=self._networks, bytes_limit=_NETWORK_BYTES
        )
        with contextlib.ExitStack() as opened:
            opened.callback(access.close)
            carrier = opened.enter_context(socket.socket(fileno=access.take_fd()))
            with socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG) as listener:
                self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                socket.send_fds(carrier, [b"listener"], [listener.fileno()])
            self._open = opened.pop_all()
        self.access = access
        return self

    async def __aexit__(self, *_: object) -> None:
        self._open.close()
