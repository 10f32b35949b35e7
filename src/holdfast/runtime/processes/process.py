"""A running program and the tree below it, as its starter sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os

from holdfast.runtime.processes.spec import Descriptors
from holdfast.runtime.processes.tree import KILL_BOUND_S, Held, TreeResult, end_tree, end_tree_blocking

__all__ = ["Process"]


class Process:
    """A running program and the tree below it; created by `ProcessHost.spawn`. Usable from any thread or loop of the
    process that created it, but its streams only on the loop of ``spawn``.

    Attributes:
        pid: pid of the program itself.
        name: display name.
        tree: holder of the program and all that it started.
        stdin, stdout, stderr: asyncio streams where `PIPE` was requested, else None.
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
        """Exit code of the program, negative for the signal that ended it; None while it runs."""
        return self.tree.exited.value

    @property
    def gone(self) -> bool:
        """True if the whole tree is gone, as far as can be known; see `kill_tree` for proof."""
        return self.tree.gone.value is not None

    @property
    def result(self) -> TreeResult | None:
        """Outcome of its tree, once the whole tree is gone."""
        return self.tree.gone.value

    def living(self) -> list[int]:
        """Return the pids of the tree's running processes, as far as visible from here."""
        return self.tree.living()

    async def wait(self) -> int:
        """Wait for the program to end; return its exit code. Stray descendants may still run, see `kill_tree`."""
        return await self.tree.exited.wait()

    def wait_blocking(self, timeout_s: float | None = None) -> int:
        """Like `wait`, but block this thread.

        Raises:
            TimeoutError: it did not end within ``timeout_s`` seconds.
        """
        return self.tree.exited.wait_blocking(timeout_s)

    async def wait_gone(self) -> TreeResult:
        """Wait until the whole tree is gone; return the result. Stray descendants may delay this indefinitely."""
        return await self.tree.gone.wait()

    def signal(self, signum: int) -> None:
        """Signal the program itself; does nothing if it has ended."""
        self.tree.tell(("signal", int(signum)))

    async def kill_tree(self, *, term_first_s: float = 0.0, bound_s: float = KILL_BOUND_S) -> TreeResult:
        """Kill the program and everything it ever started; return at once if the tree is already gone.

        Concurrent callers get the same result. Cancelling the wait does not revoke the kill.

        Parameters:
            term_first_s: send SIGTERM first and give the tree this long to end by itself.
            bound_s: how long to wait for processes to die after SIGKILL.
        """
        return await end_tree(self.tree, term_first_s, bound_s)

    def kill_tree_blocking(self, *, term_first_s: float = 0.0, bound_s: float = KILL_BOUND_S) -> TreeResult:
        """Like `kill_tree`, but block this thread."""
        return end_tree_blocking(self.tree, term_first_s, bound_s)

    async def connect(self, descriptors: Descriptors) -> None:
        """Open streams on the pipes of its start; called by `ProcessHost.spawn`."""
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
        """After the tree is gone, read what is left in the pipes (at most a pipe's capacity) and close them."""
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
