"""Namespaces of a walled program, and its file system. The zygote imports this module.

Namespaces are either new or those that the zygote keeps for the session. Kept are the namespaces of users, the network,
the host name and files, the last one as a template: each program copies it, and mounts its own ``/proc``, ``/tmp`` and
``/dev/shm``. Namespaces of processes and IPC are always new. Invariants:

- A path is mounted through a descriptor whose identity was compared with the specification, so that no link that is
  put in its place meanwhile is followed.
- The template contains nothing of one program but its ``/proc``, which each program covers with its own.
- User namespaces cannot be made inside.
"""

from __future__ import annotations

import _socket
import ctypes
import errno
import fcntl
import os
import struct

from holdfast.runtime.walls.kernel import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    check,
    libc,
    set_dumpable,
    system_call,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.runtime.walls.spec import WallPath, WallSpec

__all__ = [
    "DEVICES",
    "SCRATCH",
    "create",
    "enter",
    "host_paths",
    "make_private_mounts",
    "make_template",
    "protect",
]

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_MNT_DETACH = 2
_RDONLY, _NOSUID, _NODEV = 1, 2, 4
_AT_FDCWD = -100
_AT_SYMLINK_NOFOLLOW, _AT_EMPTY_PATH, _AT_RECURSIVE = 0x100, 0x1000, 0x8000
_OPEN_TREE_CLONE = 1
_FROM_DESCRIPTOR, _TO_DESCRIPTOR = 0x04, 0x40
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_RESERVED_PIDS = 300
_STAGE = b"/proc"
"""Where the new file system is put together: a folder that every machine has, and that is never visible inside."""

SCRATCH = (b"/tmp", b"/dev/shm")
"""Folders in memory that each program has for itself."""

_SCRATCH_PREFIXES = tuple(folder + b"/" for folder in SCRATCH)

_HOST_FILES = tuple(
    b"/proc/" + name
    for name in (
        *(b"buddyinfo", b"cmdline", b"consoles", b"crypto", b"devices", b"diskstats", b"execdomains", b"fb"),
        *(b"interrupts", b"iomem", b"ioports", b"kallsyms", b"kcore", b"key-users", b"keys", b"kmsg", b"kpagecgroup"),
        *(b"kpagecount", b"kpageflags", b"latency_stats", b"locks", b"misc", b"modules", b"mtrr", b"pagetypeinfo"),
        *(b"partitions", b"sched_debug", b"schedstat", b"slabinfo", b"softirqs", b"swaps", b"sysrq-trigger"),
        *(b"timer_list", b"vmallocinfo", b"zoneinfo"),
    )
)
_HOST_FOLDERS = tuple(
    b"/proc/" + name
    for name in (b"acpi", b"asound", b"bus", b"driver", b"dynamic_debug", b"fs", b"irq", b"pressure", b"scsi", b"tty")
)
"""What ``/proc`` tells of the whole machine, some of it to root only. Keys are those of all sessions of a user."""

DEVICES = (b"/dev/null", b"/dev/zero", b"/dev/full", b"/dev/random", b"/dev/urandom", b"/dev/tty")


def create(*, share_network: bool) -> tuple[int, ...]:
    """Enter new namespaces, and return descriptors of those that can be kept.

    The user keeps its ids, and gets all capabilities in the namespaces. The namespace of processes begins with the next
    fork.
    """
    uid, gid = os.getuid(), os.getgid()
    kinds = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS
    check(libc.unshare(kinds | (0 if share_network else CLONE_NEWNET)), "unshare")
    set_dumpable(True)  # otherwise the files belong to root
    for name, text in (
        ("setgroups", b"deny"),
        ("uid_map", b"%d %d 1" % (uid, uid)),
        ("gid_map", b"%d %d 1" % (gid, gid)),
    ):
        fd = os.open(f"/proc/self/{name}", os.O_WRONLY | os.O_CLOEXEC)
        os.write(fd, text)
        os.close(fd)
    set_dumpable(False)
    check(libc.sethostname(b"sandbox", 7), "sethostname")
    if not share_network:
        _bring_up_loopback()
    names = ("user", "mnt", "uts") if share_network else ("user", "mnt", "uts", "net")
    return tuple(os.open(f"/proc/self/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in names)


def enter(kept: Sequence[int]) -> None:
    """Enter kept namespaces, and new ones of IPC and, from the next fork on, of processes."""
    for fd in kept:
        check(libc.setns(fd, 0), "setns")
    check(libc.unshare(CLONE_NEWPID | CLONE_NEWIPC), "unshare")


def _bring_up_loopback() -> None:
    connection = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC, 0)
    request = struct.pack("16sH14x", b"lo", 0)
    flags: int = struct.unpack("16sH14x", fcntl.ioctl(connection.fileno(), _SIOCGIFFLAGS, request))[1]
    fcntl.ioctl(connection.fileno(), _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
    connection.close()


def make_template(wall: WallSpec) -> None:
    """Build a file system of the visible paths, and detach the old one. Runs as the first process of its namespace."""
    _mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE)
    _mount(b"tmpfs", _STAGE, b"tmpfs", _MS_NOSUID | _MS_NODEV, b"size=1m,mode=755")
    for folder in (b"/dev/shm", b"/dev/pts", b"/tmp", b"/proc"):
        os.makedirs(_STAGE + folder)
    _make_links(wall.links, _STAGE)
    shown = [(path, _RDONLY) for path in wall.readable] + [(path, 0) for path in wall.writable]
    for path, attribute in sorted(shown):  # deeper paths are mounted over their parents
        _show(path, _NOSUID | _NODEV | attribute)
    for path in wall.hidden:
        _hide(path, [inner for inner in wall.writable if inner[0].startswith(path[0] + b"/")])
    for device in DEVICES:
        if os.path.exists(device):
            _show((device, 0, 0, False), _NOSUID)
    links = ((b"fd", b""), (b"stdin", b"/0"), (b"stdout", b"/1"), (b"stderr", b"/2"))
    for name, number in links:
        os.symlink(b"/proc/self/fd" + number, _STAGE + b"/dev/" + name)
    os.symlink(b"pts/ptmx", _STAGE + b"/dev/ptmx")
    _mount(b"proc", _STAGE + b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _write(_STAGE + b"/proc/sys/user/max_user_namespaces", b"0")  # a program would regain all capabilities in one
    _set_attributes(_AT_FDCWD, _STAGE, _RDONLY, 0)
    os.chdir(_STAGE)
    system_call("pivot_root", b".", b".")
    check(libc.umount2(b".", _MNT_DETACH), "umount")
    os.chdir("/")


def make_private_mounts(wall: WallSpec, *, copy: bool) -> None:
    """Mount what each program has for itself: ``/proc``, ``/tmp``, ``/dev/shm`` and ``/dev/pts``.

    Parameters:
        copy: whether the current file system is a template, which is copied first.
    """
    if copy:
        check(libc.unshare(CLONE_NEWNS), "unshare")
        _mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    if wall.processes:
        _bound_pids(wall.processes)
    _set_attributes(_AT_FDCWD, b"/proc", _RDONLY, 0)
    _cover_host()
    size = b"size=%d,mode=1777" % wall.scratch_bytes
    covered = sorted(path for path in (*wall.readable, *wall.writable) if path[0].startswith(_SCRATCH_PREFIXES))
    trees = [(path, _open_tree(path)) for path in covered]
    for folder in SCRATCH:
        _mount(b"tmpfs", folder, b"tmpfs", _MS_NOSUID | _MS_NODEV, size)
    _make_links([link for link in wall.links if link[0].startswith(_SCRATCH_PREFIXES)], b"")
    for path, tree in trees:  # after the links, as a tree may contain them
        _attach(tree, path, path[0])
    _mount(b"devpts", b"/dev/pts", b"devpts", _MS_NOSUID | _MS_NOEXEC, b"newinstance,ptmxmode=0666,mode=600,max=64")


def _cover_host() -> None:
    """Cover the files of ``/proc`` that tell of the host; those that a program needs to size itself stay visible."""
    os.stat("/dev/null")  # otherwise it would look as if the files below were missing
    bind, flags = ctypes.c_ulong(_MS_BIND), ctypes.c_ulong(_MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    for path in _HOST_FILES:
        _check_cover(libc.mount(b"/dev/null", path, None, bind, None), path)
    for path in _HOST_FOLDERS:
        _check_cover(libc.mount(b"tmpfs", path, b"tmpfs", flags, b"size=4k,mode=755"), path)


def _check_cover(result: int, path: bytes) -> None:
    if result < 0 and ctypes.get_errno() != errno.ENOENT:
        check(result, f"cover {os.fsdecode(path)}")


def protect(paths: Sequence[WallPath], writable: Sequence[WallPath] = ()) -> None:
    """Make paths below writable ones read-only, except for the writable paths inside them."""
    folders = tuple(path[0] + b"/" for path in paths)
    inside = [(path, _open_tree(path)) for path in writable if path[0].startswith(folders)]
    for path in paths:
        tree = _open_tree(path)
        _set_attributes(tree, b"", _RDONLY | _NOSUID | _NODEV, _AT_EMPTY_PATH | _AT_RECURSIVE)
        _cover(path, tree)
    for path, tree in inside:
        _cover(path, tree)


def _cover(path: WallPath, tree: int) -> None:
    """Mount a tree on a path, and close the tree."""
    target = os.open(path[0], os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    _compare(target, path)
    flags = _FROM_DESCRIPTOR | _TO_DESCRIPTOR
    system_call("move_mount", tree, b"", target, b"", flags, what=f"protect {os.fsdecode(path[0])}")
    os.close(tree)
    os.close(target)


def _make_links(links: Sequence[tuple[bytes, bytes]], root: bytes) -> None:
    for link, target in links:
        os.makedirs(os.path.dirname(root + link), exist_ok=True)
        os.symlink(target, root + link)


def _bound_pids(processes: int) -> None:
    """Limit the namespace's process ids if the kernel supports it (6.14): real root is exempt from RLIMIT_NPROC.

    The kernel gives out the first 300 ids once: a namespace of no more could start nothing after 300 programs.
    """
    try:
        with open("/proc/sys/kernel/pid_max", "r+b", buffering=0) as file:
            if int(file.read(32)) > processes:
                file.seek(0)  # the kernel ignores what is written anywhere else
                file.write(b"%d" % (_RESERVED_PIDS + processes + 2))
    except OSError:
        return


def _write(path: bytes, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    os.write(fd, text)
    os.close(fd)


def _open_tree(path: WallPath) -> int:
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE | _AT_SYMLINK_NOFOLLOW
    tree = system_call("open_tree", _AT_FDCWD, path[0], flags, what=f"mount {os.fsdecode(path[0])}")
    _compare(tree, path)
    return tree


def _compare(fd: int, path: WallPath) -> None:
    """Check that the descriptor is of the file that the specification means; devices of the system have no identity."""
    if path[2]:
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) != path[1:3]:
            raise OSError(errno.ESTALE, "the path now leads to another file", os.fsdecode(path[0]))


def _show(path: WallPath, attributes: int) -> None:
    target = _STAGE + path[0]
    tree = _open_tree(path)
    _set_attributes(tree, b"", attributes, _AT_EMPTY_PATH | _AT_RECURSIVE)
    _attach(tree, path, target)


def _attach(tree: int, path: WallPath, target: bytes) -> None:
    """Mount a detached tree at a path, which is created if it is missing."""
    if path[3]:
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    system_call("move_mount", tree, b"", _AT_FDCWD, target, _FROM_DESCRIPTOR, what=f"mount {os.fsdecode(path[0])}")
    os.close(tree)


def _hide(path: WallPath, shown: Sequence[WallPath]) -> None:
    """Cover a visible path with an empty file or folder in which only the folders `shown` remain visible."""
    target = _STAGE + path[0]
    if os.path.isdir(target):
        _mount(b"tmpfs", target, b"tmpfs", _MS_NOSUID | _MS_NODEV, b"size=4k,mode=755")
        for folder in shown:
            _show(folder, _NOSUID | _NODEV)
        _set_attributes(_AT_FDCWD, target, _RDONLY, 0)
    elif os.path.exists(target):
        tree = _open_tree((b"/dev/null", 0, 0, False))
        system_call("move_mount", tree, b"", _AT_FDCWD, target, _FROM_DESCRIPTOR, what=f"hide {os.fsdecode(path[0])}")
        os.close(tree)


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int, data: bytes | None = None) -> None:
    check(libc.mount(source, target, kind, ctypes.c_ulong(flags), data), f"mount {os.fsdecode(target)}")


def _set_attributes(folder: int, path: bytes, attributes: int, flags: int) -> None:
    value = struct.pack("QQQQ", attributes, 0, 0, 0)
    arguments = (folder, path, flags, value, ctypes.c_size_t(len(value)))
    system_call("mount_setattr", *arguments, what=f"mount_setattr {os.fsdecode(path)}")


def host_paths() -> tuple[list[bytes], list[bytes]]:
    """Return the files and the folders of ``/proc`` that tell of the host, as far as this machine has them."""
    files = [path for path in _HOST_FILES if os.path.exists(path)]
    return files, [path for path in _HOST_FOLDERS if os.path.exists(path)]
