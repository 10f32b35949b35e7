"""Handle of a running program and its process tree, for the code that started the program."""

from __future__ import annotations

import asyncio
import contextlib
import os

from holdfast.runtime.processes.spec import Descriptors
from holdfast.runtime.processes.tree import KILL_BOUND_S, Held, TreeResult, end_tree, end_tree_blocking

__all__ = ["Process"]


class Process:
    """A running program and its process tree; created by `ProcessHost.spawn`.

    All methods are callable from any thread or loop of the process that started the program. The streams are usable
    only on the loop on which ``spawn`` was called.

    Attributes:
        pid: process id of the program itself.
        name: display name.
        tree: process tree, which consists of the program and its descendants.
        stdin, stdout, stderr: asyncio streams; None for each stream for which `PIPE` was not requested.
    """

    def __init__(self, held: Held, pid: int) -> None:
        self.tree = held
        self._readers: list[tuple[asyncio.ReadTransport, asyncio.StreamReader]] = []
        self.pid = pid
        self.name = held.name
        self.stdin: asyncio.StreamWriter | None = None
        self.stdout: asyncio.StreamReader | None = None
        self.stderr: asyncio.StreamReader | None = None

    def __repr__(self) -> str:
        return f"<Process {self.name} pid={self.pid} returncode={self.returncode}>"

    @property
    def returncode(self) -> int | None:
        """Exit code of the program, or minus the number of the signal that ended it; None while it runs."""
        return self.tree.exited.value

    @property
    def gone(self) -> bool:
        """Whether the whole process tree is gone, as far as known; see `TreeResult.proven`."""
        return self.tree.gone.value is not None

    @property
    def result(self) -> TreeResult | None:
        """`TreeResult` of the whole process tree; None until the tree is gone."""
        return self.tree.gone.value

    def living(self) -> list[int]:
        """Return the pids of the running processes of the tree, as far as this process can see them."""
        return self.tree.living()

    def count(self, limit: int) -> int:
        """Return the number of running processes of the tree, for display; stop counting at ``limit``."""
        return self.tree.count(limit)

    async def wait(self) -> int:
        """Wait for the program to end; return its exit code.

        Descendants of the program may still run; `kill_tree` kills them.
        """
        return await self.tree.exited.wait()

    def wait_blocking(self, timeout_s: float | None = None) -> int:
        """Block this thread until the program ends; return its exit code.

        Parameters:
            timeout_s: timeout in seconds; None waits indefinitely.

        Raises:
            TimeoutError: the program did not end within ``timeout_s`` seconds.
        """
        return self.tree.exited.wait_blocking(timeout_s)

    async def wait_gone(self) -> TreeResult:
        """Wait until the whole tree is gone; return the result. If descendants keep running, this never returns."""
        return await self.tree.gone.wait()

    def signal(self, signum: int) -> None:
        """Send a signal to the program itself; does nothing if the program has ended."""
        self.tree.tell(("signal", int(signum)))

    async def kill_tree(self, *, term_first_s: float = 0.0, bound_s: float = KILL_BOUND_S) -> TreeResult:
        """Kill the program and all its descendants; return at once if the tree is already gone.

        Concurrent calls return the same result. Cancelling the caller does not revoke the kill.

        Parameters:
            term_first_s: time in seconds from a first SIGTERM until SIGKILL; 0 sends SIGKILL at once.
            bound_s: maximum time in seconds to wait for processes to die after SIGKILL.
        """
        return await end_tree(self.tree, term_first_s, bound_s)

    def kill_tree_blocking(self, *, term_first_s: float = 0.0, bound_s: float = KILL_BOUND_S) -> TreeResult:
        """Kill the tree like `kill_tree`, but block this thread until the result is known."""
        return end_tree_blocking(self.tree, term_first_s, bound_s)

    async def connect(self, descriptors: Descriptors) -> None:
        """Open asyncio streams on the pipes that the program was started with; called by `ProcessHost.spawn`."""
        loop = asyncio.get_running_loop()
        if (fd := descriptors.take("stdin")) is not None:
            sink = asyncio.StreamReaderProtocol(asyncio.StreamReader(loop=loop), loop=loop)
            writing, _ = await loop.connect_write_pipe(lambda: sink, os.fdopen(fd, "wb", 0))
            self.stdin = asyncio.StreamWriter(writing, sink, None, loop)
        self.stdout = await self._connect_reader(descriptors.take("stdout"))
        self.stderr = await self._connect_reader(descriptors.take("stderr"))
        if self.stdin is not None or self._readers:

            def settle() -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed, and its transports with it
                    loop.call_soon_threadsafe(self._settle_streams)

            if not self.tree.gone.add(settle):
                self._settle_streams()

    async def _connect_reader(self, fd: int | None) -> asyncio.StreamReader | None:
        if fd is None:
            return None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(fd, "rb", 0))
        self._readers.append((transport, reader))
        return reader

    def _settle_streams(self) -> None:
        """Read the rest of the output from the pipes and close the pipes, after the tree is gone."""
        if self.stdin is not None and not self.stdin.transport.is_closing():
            self.stdin.transport.abort()
        for transport, reader in self._readers:
            if transport.is_closing():
                continue
            fd = transport.get_extra_info("pipe").fileno()
            with contextlib.suppress(BlockingIOError):  # held by a process outside the tree: left to the transport
                while data := os.read(fd, 65536):
                    reader.feed_data(data)
                transport.close()
        self._readers.clear()
