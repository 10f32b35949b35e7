"""Escapes that gain rights or leave them behind: set-uid files, devices, namespaces, mounts, roots, users."""

from __future__ import annotations

import stat
from collections.abc import Callable
from typing import Any

from tests.system.escapes.escape import Escape, Scene, reads, says

__all__ = ["ESCAPES"]


def _own_files(test: Callable[[Scene, str], bool]) -> Callable[[Scene], bool]:
    def judge(scene: Scene) -> bool:
        folder = scene.stage.own / scene.name
        return any(test(scene, str(path)) for path in folder.rglob("*"))

    return judge


def _special(_scene: Scene, path: str) -> bool:
    import os

    status = os.lstat(path)
    if "security.capability" in os.listxattr(path, follow_symlinks=False):
        return True
    return bool(status.st_mode & (stat.S_ISUID | stat.S_ISGID)) and stat.S_ISREG(status.st_mode)


def _device(_scene: Scene, path: str) -> bool:
    import os

    mode = os.lstat(path).st_mode
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def _foreign(scene: Scene, path: str) -> bool:
    import os

    return os.lstat(path).st_uid != scene.stage.uid


def _leaves(name: str, program: str, **more: Any) -> Escape:
    """A file that has more rights outside than its maker."""
    made = "open('x', 'w').write('#!/bin/sh'); os.chmod('x', 0o755)\n"
    return Escape(name=name, subject="set-uid files", program=made + program, judge=_own_files(_special), **more)


def _says(subject: str, name: str, program: str, **more: Any) -> Escape:
    return Escape(name=name, subject=subject, program=program, judge=says, **more)


_THIRTY_TWO = (
    "libc.mmap.restype = ctypes.c_void_p\n"
    "page = libc.mmap(ctypes.c_void_p(0x10000), ctypes.c_size_t(4096), 7, 0x32, -1, ctypes.c_long(0))\n"
    "code = b'\\x53\\xb8\\x0f\\0\\0\\0\\xbb\\x80\\0\\1\\0\\xb9' + struct.pack('<I', 0o6755) + b'\\xcd\\x80\\x5b\\xc3'\n"
    "ctypes.memmove(page, code, len(code)); ctypes.memmove(page + 0x80, b'x\\0', 2)\n"
    "ctypes.CFUNCTYPE(ctypes.c_int)(page)()"
)

_SET_UID = (
    _leaves("sets-the-uid-bit", "os.chmod('x', 0o4755)"),
    _leaves("sets-the-gid-bit", "os.chmod('x', 0o2755)"),
    _leaves("sets-the-uid-bit-by-fchmod", "os.fchmod(os.open('x', os.O_RDWR), 0o4755)"),
    _leaves("sets-the-uid-bit-by-fchmodat", "os.chmod('x', 0o4755, dir_fd=os.open('.', os.O_RDONLY))"),
    _leaves(
        "sets-the-uid-bit-by-fchmodat2",
        "call('fchmodat2', AT_FDCWD, b'x', 0o4755, 0)",
        may_fail="the kernel has no fchmodat2",
    ),
    _leaves(
        "sets-the-uid-bit-with-high-bits",
        "call(268 if platform.machine() == 'x86_64' else 53, AT_FDCWD, b'x', 0o4755 | 1 << 40)",
    ),
    _leaves("makes-a-set-uid-file", "os.open('y', os.O_CREAT | os.O_WRONLY, 0o4755)"),
    _leaves("makes-a-set-uid-file-by-mknod", "os.mknod('y', stat.S_IFREG | 0o4755)"),
    _leaves(
        "makes-a-set-uid-file-by-openat2",
        "call('openat2', AT_FDCWD, b'y', struct.pack('QQQ', os.O_CREAT | os.O_WRONLY, 0o4755, 0), 24)",
    ),
    _leaves(
        "makes-a-set-uid-file-without-a-name", "fd = os.open('.', os.O_TMPFILE | os.O_WRONLY, 0o4755)\nnamed(fd, 'y')"
    ),
    _leaves("sets-the-uid-bit-by-int-80", _THIRTY_TWO, may_fail="the processor or the kernel runs no 32-bit calls"),
    _leaves("sets-the-uid-bit-by-x32", "call(0x40000000 | 90, b'x', 0o4755)", may_fail="the kernel has no x32 calls"),
    _leaves(
        "gives-a-file-capabilities",
        "os.setxattr('x', 'security.capability', struct.pack('<IIIII', 0x02000001, 0xFFFFFFFF, 0, 0xFFFFFFFF, 0))",
        needs="root",
    ),
    _leaves(
        "unpacks-a-set-uid-file",
        "import tarfile, io\n"
        "entry = tarfile.TarInfo('z'); entry.mode = 0o4755\n"
        "with tarfile.open('z.tar', 'w') as file: file.addfile(entry, io.BytesIO())\n"
        "subprocess.run(['tar', '-xpf', 'z.tar'])",
    ),
    _leaves("installs-a-set-uid-file", "subprocess.run(['install', '-m', '6755', 'x', 'y'])"),
    _leaves(
        "copies-a-set-uid-program",
        "subprocess.run(['cp', '--preserve=mode', '/usr/bin/passwd', 'passwd'])",
        may_fail="there is no set-uid program to copy",
    ),
)

_DEVICES = (
    Escape(
        name="makes-a-device-of-memory",
        subject="devices",
        program="os.mknod('memory', stat.S_IFCHR | 0o600, os.makedev(1, 1))",
        judge=_own_files(_device),
        needs="root",
    ),
    Escape(
        name="makes-a-device-of-null",
        subject="devices",
        program="os.mknod('null', stat.S_IFCHR | 0o600, os.makedev(1, 3))",
        judge=_own_files(_device),
        needs="root",
    ),
    Escape(
        name="reads-the-disk-by-a-device-of-its-own",
        subject="devices",
        program="os.mknod('disk', stat.S_IFBLK | 0o600, at.device)\n"
        "os.pread(os.open('disk', os.O_RDONLY), 2, 1080) == b'\\x53\\xef' and say()",
        judge=says,
        needs="root",
        may_fail="the files lie on no ext4 disk",
    ),
    Escape(
        name="reads-the-disk",
        subject="devices",
        program="for path in glob.glob('/dev/[vsn][dv]*') + glob.glob('/dev/block/*') + glob.glob('/dev/mapper/*'):\n"
        "    if os.pread(os.open(path, os.O_RDONLY), 2, 1080) == b'\\x53\\xef': say(); break",
        judge=says,
        needs="root",
        may_fail="the machine has no ext4 disk",
    ),
    *(
        _says("devices", f"opens-{label}", f"os.open({path!r}, os.{how} | os.O_NOCTTY | os.O_NONBLOCK)\nsay()", **more)
        for label, path, how, more in (
            ("physical-memory", "/dev/mem", "O_RDONLY", {"needs": "root", "may_fail": "there is no /dev/mem"}),
            ("the-ports", "/dev/port", "O_RDONLY", {"needs": "root", "may_fail": "there is no /dev/port"}),
            ("the-kernels-log", "/dev/kmsg", "O_RDONLY", {"may_fail": "only root may read the kernel's log"}),
            ("the-virtual-machines", "/dev/kvm", "O_RDWR", {"needs": "root", "may_fail": "there is no /dev/kvm"}),
            ("file-systems-of-users", "/dev/fuse", "O_RDWR", {"may_fail": "only root may open /dev/fuse"}),
            (
                "the-loop-devices",
                "/dev/loop-control",
                "O_RDWR",
                {"needs": "root", "may_fail": "there are no loop devices"},
            ),
            (
                "the-processors-registers",
                "/dev/cpu/0/msr",
                "O_RDONLY",
                {"needs": "root", "may_fail": "there is no msr device"},
            ),
            ("the-kernels-memory", "/proc/kcore", "O_RDONLY", {"needs": "root", "may_fail": "there is no /proc/kcore"}),
            ("the-magic-keys", "/proc/sysrq-trigger", "O_WRONLY", {"needs": "root", "may_fail": "there is no sysrq"}),
            ("the-pattern-of-core-files", "/proc/sys/kernel/core_pattern", "O_WRONLY", {"needs": "root"}),
            (
                "the-loader-of-modules",
                "/proc/sys/kernel/modprobe",
                "O_WRONLY",
                {"needs": "root", "may_fail": "the kernel has no modules"},
            ),
            (
                "the-helper-of-devices",
                "/sys/kernel/uevent_helper",
                "O_WRONLY",
                {"needs": "root", "may_fail": "there is no such helper"},
            ),
            (
                "the-release-agent-of-cgroups",
                "/sys/fs/cgroup/memory/release_agent",
                "O_WRONLY",
                {"needs": "root", "may_fail": "there is no cgroup v1"},
            ),
            (
                "the-power-switch",
                "/sys/power/state",
                "O_WRONLY",
                {"needs": "root", "may_fail": "the machine cannot sleep"},
            ),
            (
                "a-binary-format",
                "/proc/sys/fs/binfmt_misc/register",
                "O_WRONLY",
                {"needs": "root", "may_fail": "binfmt_misc is not mounted"},
            ),
            ("the-overcommit-of-memory", "/proc/sys/vm/overcommit_memory", "O_WRONLY", {"needs": "root"}),
            ("the-forwarding-of-packets", "/proc/sys/net/ipv4/ip_forward", "O_WRONLY", {"needs": "root"}),
        )
    ),
    *(
        _says(
            "devices",
            f"reads-{label}",
            f"open({path!r}, 'rb').read(64) and say()",
            may_fail=f"there is no {path} for this user",
        )
        for label, path in (
            ("the-timers-of-the-host", "/proc/timer_list"),
            ("the-slabs-of-the-kernel", "/proc/slabinfo"),
            ("the-addresses-of-the-kernel", "/proc/vmallocinfo"),
            ("the-flags-of-pages", "/proc/kpageflags"),
            ("the-counts-of-pages", "/proc/kpagecount"),
            ("the-map-of-memory", "/proc/iomem"),
            ("the-interrupts", "/proc/interrupts"),
            ("the-line-that-started-the-kernel", "/proc/cmdline"),
            ("the-users-of-keys", "/proc/key-users"),
            ("the-statistics-of-the-scheduler", "/proc/schedstat"),
            ("the-disks-of-the-host", "/proc/diskstats"),
            ("the-terminals-drivers", "/proc/tty/driver/serial"),
            ("the-devices-of-the-bus", "/proc/bus/pci/devices"),
        )
    ),
    _says(
        "devices",
        "makes-a-cgroup",
        "path = f'/sys/fs/cgroup/pids/zoo-{os.getpid()}'\nos.mkdir(path)\nos.rmdir(path)\nsay()",
        needs="root",
        may_fail="there is no cgroup v1",
    ),
    _says(
        "devices",
        "reads-addresses-of-the-kernel",
        "any(int(line.split()[0], 16) for line in open('/proc/kallsyms').readlines()[:5]) and say()",
        needs="root",
        may_fail="the kernel hides its addresses",
    ),
)

_SPACES = "namespaces, mounts and roots"
_NAMESPACES = (
    *(
        _says(_SPACES, f"unshares-{label}", f"call('unshare', {flag} | (0 if os.geteuid() == 0 else NEWUSER))\nsay()")
        for label, flag in (
            ("users", "NEWUSER"),
            ("mounts", "NEWNS"),
            ("the-network", "NEWNET"),
            ("processes", "NEWPID"),
            ("queues", "NEWIPC"),
            ("the-host-name", "NEWUTS"),
            ("cgroups", "0x02000000"),
            ("time", "0x80"),
        )
    ),
    _says(
        _SPACES,
        "clones-a-user-namespace",
        "pid = call('clone', NEWUSER | signal.SIGCHLD, 0, 0, 0, 0)\n"
        "if pid == 0: os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "say()",
    ),
    _says(
        _SPACES,
        "clones-a-user-namespace-by-clone3",
        "asked = ctypes.create_string_buffer(struct.pack('11Q', NEWUSER, 0, 0, 0, signal.SIGCHLD, 0, 0, "
        "0, 0, 0, 0), 88)\n"
        "pid = call('clone3', asked, 88)\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0)\nsay()",
    ),
    _says(
        _SPACES,
        "clones-a-namespace-with-high-bits",
        "pid = call('clone', NEWUSER | signal.SIGCHLD | 1 << 40, 0, 0, 0, 0)\n"
        "if pid == 0: os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "say()",
    ),
    _says(_SPACES, "unshares-by-a-program", "subprocess.run(['unshare', '-U', 'true'], check=True)\nsay()"),
    _says(
        _SPACES,
        "enters-the-mounts-of-a-process",
        "call('setns', os.open(f'/proc/{at.victim}/ns/mnt', os.O_RDONLY), NEWNS)\nsay()",
        needs="root",
    ),
    _says(
        _SPACES,
        "enters-the-network-of-a-process",
        "call('setns', os.open(f'/proc/{at.victim}/ns/net', os.O_RDONLY), NEWNET)\nsay()",
        needs="root",
    ),
    _says(
        _SPACES,
        "enters-a-process-by-pidfd",
        "call('setns', call('pidfd_open', at.victim, 0), NEWNET | NEWIPC)\nsay()",
        needs="root",
    ),
    _says(
        _SPACES,
        "enters-a-namespace-of-its-parents",
        "for pid in (1, os.getppid()):\n"
        "    try: call('setns', os.open(f'/proc/{pid}/ns/uts', os.O_RDONLY), NEWUTS); say()\n"
        "    except OSError as error: print(error)",
        needs="root",
    ),
    _says(
        _SPACES,
        "asks-for-the-parent-of-its-namespace",
        "fd = os.open('/proc/self/ns/net', os.O_RDONLY)\n"
        "owner = fcntl.ioctl(fd, 0xB701)\n"
        "call('setns', owner, NEWUSER)\n"
        "say()",
        needs="root",
        may_fail="a process may not enter its own user namespace again",
    ),
    _says(_SPACES, "changes-its-root", "privileged()\nos.mkdir('new')\ncall('chroot', b'new')\nsay()"),
    Escape(
        name="leaves-its-root",
        subject=_SPACES,
        program="privileged()\nos.mkdir('new')\nfd = os.open('/', os.O_RDONLY)\ncall('chroot', b'new')\nos.fchdir(fd)\n"
        "for _ in range(50): os.chdir('..')\ncall('chroot', b'.')\nshow(at.store)",
        judge=reads,
    ),
    _says(
        _SPACES,
        "mounts-an-empty-file-system",
        "privileged()\nos.mkdir('m')\ncall('mount', b'zoo', b'm', b'tmpfs', 0, None)\nsay()",
    ),
    _says(
        _SPACES,
        "mounts-proc",
        "privileged()\n"
        "call('unshare', NEWPID)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os.mkdir('p'); call('mount', b'proc', b'p', b'proc', 0, None); say(); os._exit(0)\n"
        "os.waitpid(pid, 0)",
        needs="root",
    ),
    Escape(
        name="binds-the-folder-of-the-server",
        subject=_SPACES,
        program="privileged()\n"
        "os.mkdir('m')\n"
        "call('mount', at.outside.encode(), b'm', None, 4096, None)\n"
        "show('m/store.db')",
        judge=reads,
    ),
    Escape(
        name="lays-a-file-system-over-the-server",
        subject=_SPACES,
        program="privileged()\nfor name in 'uwm': os.mkdir(name)\n"
        "call('mount', b'overlay', b'm', b'overlay', 0, f'lowerdir={at.outside},upperdir=u,workdir=w'.encode())\n"
        "show('m/store.db')",
        judge=reads,
        may_fail="the kernel has no overlayfs for this file system",
    ),
    Escape(
        name="takes-the-cover-off",
        subject=_SPACES,
        program="privileged()\nfor line in reversed(open('/proc/self/mountinfo').readlines()):\n"
        "    where = line.split()[4]\n"
        "    if where not in ('/', '/proc'):\n"
        "        try: call('umount2', where.encode(), 2)\n"
        "        except OSError as error: print(where, error)\n"
        "show(at.store)",
        judge=reads,
    ),
    _says(_SPACES, "mounts-again-for-writing", "privileged()\ncall('mount', None, b'/', None, 32 | 4096, None)\nsay()"),
    _says(
        _SPACES,
        "clears-read-only",
        "privileged()\ncall('mount_setattr', AT_FDCWD, b'/', 0, struct.pack('QQQQ', 0, 1, 0, 0), 32)\nsay()",
    ),
    _says(_SPACES, "opens-a-file-system", "privileged()\ncall('fsopen', b'tmpfs', 0)\nsay()"),
    Escape(
        name="opens-a-tree-and-moves-it",
        subject=_SPACES,
        program="privileged()\nos.mkdir('m')\nfd = call('open_tree', AT_FDCWD, at.outside.encode(), 1)\n"
        "call('move_mount', fd, b'', AT_FDCWD, b'm', 4)\nshow('m/store.db')",
        judge=reads,
    ),
    _says(
        _SPACES,
        "pivots-its-root",
        "privileged()\n"
        "os.mkdir('m')\n"
        "call('mount', b'm', b'm', None, 4096, None)\n"
        "os.mkdir('m/old')\n"
        "call('pivot_root', b'm', b'm/old')\n"
        "say()",
    ),
    _says(
        _SPACES,
        "writes-to-the-read-only-system",
        "os.close(os.open('/usr/bin', os.O_TMPFILE | os.O_WRONLY))\nsay()",
        needs="root",
    ),
)

_USERS = "users and capabilities"
_RIGHTS = (
    _says(_USERS, "becomes-another-user", "os.setresuid(1, 1, 1)\nsay()", needs="root"),
    _says(_USERS, "becomes-another-group", "os.setresgid(1, 1, 1)\nsay()", needs="root"),
    _says(_USERS, "leaves-its-groups", "os.setgroups([])\nsay()", needs="root"),
    Escape(
        name="gives-a-file-to-another-user",
        subject=_USERS,
        program="open('x', 'w').close()\nos.chown('x', 1, 1)",
        judge=_own_files(_foreign),
        needs="root",
    ),
    _says(
        _USERS,
        "has-capabilities",
        "line = next(line for line in open('/proc/self/status') if line.startswith('CapEff'))\n"
        "int(line.split()[1], 16) and say()",
        needs="root",
    ),
    _says(
        _USERS,
        "may-gain-capabilities",
        "line = next(line for line in open('/proc/self/status') if line.startswith('CapBnd'))\n"
        "int(line.split()[1], 16) and say()",
    ),
    _says(
        _USERS,
        "raises-a-capability",
        "held = struct.pack('IIIIII', 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0x1FF, 0x1FF, 0)\n"
        "libc.capset(struct.pack('Ii', 0x20080522, 0), struct.pack('6I', 1 << 21, 1 << 21, 0, 0, 0, 0)) == 0 and say()",
        needs="root",
    ),
    _says(
        _USERS,
        "raises-an-ambient-capability",
        "libc.prctl(47, 2, 21, 0, 0) == 0 and say()",
        needs="root",
        may_fail="the capability is not inheritable",
    ),
    _says(_USERS, "gains-rights-by-executing", "libc.prctl(39, 0, 0, 0, 0) == 0 and say()"),
    _says(_USERS, "reads-what-any-user-may-not", "open('/etc/shadow').close()\nsay()", needs="root"),
)

ESCAPES = (*_SET_UID, *_DEVICES, *_NAMESPACES, *_RIGHTS)
