"""Disks that can be made full or read-only without root privileges.

A `SmallDisk` is a separate in-memory file system, mounted inside a user namespace that one small process keeps open.
When the file system is full or read-only, writes fail with the kernel's own ENOSPC or EROFS. If the machine does not
allow user namespaces, a `LimitedDisk` is used instead. It is an ordinary folder: a limit on the size of the server's
files simulates a full disk (EFBIG), and file modes make the folder read-only.
"""

from __future__ import annotations

import asyncio
import resource
import shutil
import subprocess
import sys
from asyncio.subprocess import Process
from pathlib import Path
from typing import Protocol

from holdfast.errors import NotSupported

__all__ = ["Disk", "LimitedDisk", "SmallDisk", "open_disk"]

_SIZE_BYTES = 64 << 20

_KEEPER = """\
import ctypes, os, shutil, sys
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
place, size = sys.argv[1].encode(), sys.argv[2].encode()
def fill():
    with open(place + b"/filler", "ab", buffering=0) as file:
        for step in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(step))
            except OSError:
                pass
def mode(flags):
    check(libc.mount(None, place, None, 32 | flags, None))
uid, gid = os.getuid(), os.getgid()
check(libc.unshare(0x10000000 | 0x00020000))
for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
check(libc.prctl(1, 9, 0, 0, 0))
check(libc.mount(b"none", b"/", None, 1 << 14 | 1 << 18, None))
check(libc.mount(b"tmpfs", place, b"tmpfs", 0, b"size=" + size))
if len(sys.argv) > 3:
    shutil.copy(sys.argv[3], sys.argv[1])
acts = {
    "fill": fill,
    "free": lambda: os.unlink(place + b"/filler"),
    "read-only": lambda: mode(1),
    "writable": lambda: mode(0),
}
print("ok", flush=True)
for line in sys.stdin:
    try:
        acts[line.strip()]()
        print("ok", flush=True)
    except OSError as error:
        print(error, flush=True)
"""


class Disk(Protocol):
    """The disk that holds the store of a server under test. Only one server may use the disk at a time."""

    how: str
    """Short description of how the disk is made full and read-only."""
    path: Path
    """Path of the database, as the server sees it."""
    keeper: int | None
    """Pid of the process whose mounts the server must see, or None if the server needs no special mounts."""

    async def fill(self, pid: int) -> None:
        """Fill the disk completely, for the server with process id `pid`."""
        ...

    async def free(self, pid: int | None) -> None:
        """Make room again, for the server with process id `pid`; None means that the server has ended."""
        ...

    async def set_read_only(self, read_only: bool) -> None:
        """Make the disk read-only, or writable again. No server may have the database open."""
        ...

    async def close(self) -> None:
        """Close the disk; an in-memory disk is removed together with its contents."""
        ...


class SmallDisk:
    """An in-memory disk, as described in the module docstring. Use it on one event loop."""

    def __init__(self, path: Path, keeper: Process) -> None:
        self.how = "a small tmpfs in a user namespace: the kernel's ENOSPC and EROFS"
        self.path = path
        self.keeper: int | None = keeper.pid
        self._process = keeper

    @classmethod
    async def open(cls, folder: Path, seed: Path) -> SmallDisk:
        """Mount a small disk at `folder`, and copy the database `seed` to the disk.

        Raises:
            NotSupported: if this machine does not allow the mount.
        """
        keeper = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _KEEPER, str(folder), str(_SIZE_BYTES), str(seed)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        if (await keeper.stdout.readline()).strip() != b"ok":
            told = (await keeper.stderr.read()).decode(errors="replace").strip().rpartition("\n")[2]
            await keeper.wait()
            raise NotSupported(f"cannot mount a small disk on this machine: {told}")
        return cls(folder / seed.name, keeper)

    async def fill(self, pid: int) -> None:
        """See `Disk`."""
        await self._do("fill")

    async def free(self, pid: int | None) -> None:
        """See `Disk`."""
        await self._do("free")

    async def set_read_only(self, read_only: bool) -> None:
        """See `Disk`."""
        await self._do("read-only" if read_only else "writable")

    async def _do(self, act: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{act}\n".encode())
        answer = (await self._process.stdout.readline()).decode().strip()
        if answer != "ok":
            raise OSError(f"{act}: {answer or 'the keeper of the disk has ended'}")

    async def close(self) -> None:
        """See `Disk`."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


class LimitedDisk:
    """An ordinary folder with limits, as described in the module docstring. Use it on one event loop.

    Parameters:
        folder: the folder.
        seed: database that is copied to the folder.
        because: why a `SmallDisk` is not used, for the description in ``how``; may be empty.
    """

    def __init__(self, folder: Path, seed: Path, *, because: str = "") -> None:
        how = "a limit on the size of files (EFBIG), and files without the right to write"
        self.how = f"{how}; {because}" if because else how
        self.path = Path(shutil.copy(seed, folder))
        self.keeper: int | None = None
        self._limit: tuple[int, int] | None = None

    async def fill(self, pid: int) -> None:
        """See `Disk`. Prevents the server's files from growing."""
        largest = max(file.stat().st_size for file in self.path.parent.iterdir())
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (largest, before[1]))
        self._limit = self._limit or before

    async def free(self, pid: int | None) -> None:
        """See `Disk`."""
        if self._limit is not None and pid is not None:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, self._limit)
        self._limit = None

    async def set_read_only(self, read_only: bool) -> None:
        """See `Disk`. Has no effect on a server that runs as root."""
        folder = self.path.parent
        for file in folder.iterdir():
            file.chmod(0o400 if read_only else 0o600)
        folder.chmod(0o500 if read_only else 0o700)

    async def close(self) -> None:
        """See `Disk`."""
        await self.set_read_only(False)


async def open_disk(folder: Path, seed: Path, *, small: bool) -> Disk:
    """Create a disk at the empty `folder`, with a copy of the database `seed`.

    The disk is a `SmallDisk` if `small` is set and the machine allows it, else a `LimitedDisk`.
    """
    if small and sys.platform == "linux":
        try:
            return await SmallDisk.open(folder, seed)
        except NotSupported as error:
            return LimitedDisk(folder, seed, because=error.message)
    return LimitedDisk(folder, seed)
