"""Runs escapes inside of a wall, each in a process of its own, and prints their output as one line of JSON.

A bare interpreter runs it with the name of a JSON file, so it imports only the standard library. What is defined here
is what the escapes have: `call`, `say`, `show`, `knock`, `privileged`, `talk`, `by_connect` and its like, and the
modules.
"""

import array  # noqa: F401
import ctypes
import errno  # noqa: F401
import fcntl  # noqa: F401
import glob  # noqa: F401
import json
import mmap  # noqa: F401
import os
import platform
import resource  # noqa: F401
import select
import signal
import socket
import stat  # noqa: F401
import struct  # noqa: F401
import subprocess  # noqa: F401
import sys
import threading  # noqa: F401
import time
import traceback
from types import SimpleNamespace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

AT_ONCE = 4
OUTPUT_BYTES = 1 << 16
PROGRAM_S = 4.0

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
AT_FDCWD = -100
SOCKS = b"\5\1\0\5\1\0"
END = b"0\r\n\r\n"

at = SimpleNamespace()
"""What the escape that this process runs is told."""

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

# Numbers of system calls: x86_64, then the generic table.
NUMBERS = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clone": (56, 220),
    "clone3": (435, 435),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "fchmodat2": (452, 452),
    "finit_module": (313, 273),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "init_module": (175, 105),
    "inotify_add_watch": (254, 27),
    "inotify_init1": (294, 26),
    "io_uring_setup": (425, 425),
    "ioperm": (173, -1),
    "iopl": (172, -1),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "migrate_pages": (256, 238),
    "linkat": (265, 37),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "mq_timedreceive": (243, 183),
    "mq_timedsend": (242, 182),
    "msgget": (68, 186),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "openat2": (437, 437),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pivot_root": (155, 41),
    "prlimit64": (302, 261),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "renameat2": (316, 276),
    "request_key": (249, 218),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semget": (64, 190),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmget": (29, 194),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "tgkill": (234, 131),
    "tkill": (200, 130),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vmsplice": (278, 75),
}


def call(name, *words):
    """Make a system call by its number; returns its result, or raises `OSError`."""
    number = name if isinstance(name, int) else NUMBERS[name][0 if platform.machine() == "x86_64" else 1]
    given = [ctypes.c_long(word) if isinstance(word, int) else word for word in words]
    ctypes.set_errno(0)
    made = libc.syscall(ctypes.c_long(number), *given)
    if made < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return made


def refused(name, *words):
    """The error number of a system call that cannot succeed; a wall refuses it before the kernel looks at it."""
    try:
        call(name, *words)
    except OSError as error:
        return error.errno
    return 0


def say():
    """Say that the kernel did what was asked."""
    print(f"through {at.name};", flush=True)


def show(path):
    """Print what a file holds."""
    with open(path, "rb") as file:
        print(file.read(1 << 14).decode("utf-8", "replace"), flush=True)


def named(fd, path):
    """Give a name to a file without one."""
    call("linkat", AT_FDCWD, f"/proc/self/fd/{fd}".encode(), AT_FDCWD, path.encode(), 0x400)


def privileged():
    """Enter a mount namespace, and for an ordinary user a user namespace, too; unwalled mounts stay in there."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        call("unshare", NEWNS | (NEWUSER if uid else 0))
        if uid:
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        call("mount", b"none", b"/", None, 0x4000 | 0x40000, None)
    except OSError as error:
        if not at.walled:
            raise  # what follows would change the machine
        print(error, flush=True)


def knock(family, kind, address, protocol=0):
    """Send the escape's name to an address."""
    with socket.socket(family, kind, protocol) as line:
        line.settimeout(1.5)
        line.connect(address)
        line.sendall(f"{at.name};".encode())


def proxy_port():
    """The port of the proxy on this loopback."""
    return int(os.environ["HTTP_PROXY"].rpartition(":")[2]) if "HTTP_PROXY" in os.environ else at.proxy_port


def talk(*parts, proxy=0, end=True, quiet_s=0.3):
    """Send parts to the proxy on one connection; the answers, each up to a pause.

    Parameters:
        proxy: port of another proxy.
        end: end the stream after the last part, so that the answer need not be waited for.
    """
    answers = []
    with socket.create_connection(("127.0.0.1", proxy or proxy_port()), 1.5) as line:
        for number, part in enumerate(parts, 1):
            line.sendall(part)
            if end and number == len(parts):
                line.shutdown(socket.SHUT_WR)
            answer = b""
            while select.select([line], [], [], 3.0 if end and number == len(parts) else quiet_s)[0]:
                chunk = line.recv(1 << 16)
                answer += chunk
                if not chunk:
                    break
            answers.append(answer)
    print("the proxy answered:", *(answer[:200] for answer in answers), flush=True)
    return answers


def authority(host, port):
    """A host, which may be an address, and a port, as the bytes of a request."""
    return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode("utf-8")


def mark():
    """What the server that an escape wants to reach must get."""
    return f"{at.name};".encode()


def here():
    """The server that no escape may reach."""
    return authority("127.0.0.1", at.port)


def friend():
    """The server that the proxy may connect to."""
    return authority(at.friend, at.friend_port)


def name_friend():
    """The rest of a SOCKS request for the friend."""
    return b"\1" + socket.inet_aton(at.friend) + at.friend_port.to_bytes(2, "big")


def head(target, host, *fields):
    """A request for a target, with the escape's name behind it."""
    return b"\r\n".join([b"GET %s%s HTTP/1.1" % (target, mark()), b"Host: " + host, *fields, b"", b""])


def page():
    """A request to the server that no escape may reach."""
    return head(b"http://%s/" % here(), here())


def to_friend(*fields):
    """A request to the friend, which does not have the escape's name."""
    return b"\r\n".join([b"POST http://%s/ HTTP/1.1" % friend(), b"Host: " + friend(), *fields, b"", b""])


def tunnel(target, *fields):
    """A request for a tunnel."""
    return b"\r\n".join([b"CONNECT %s HTTP/1.1" % target, *fields, b"", b""])


def by_connect(host, port, **more):
    """Send the escape's name through a tunnel."""
    target = authority(host, port)
    return talk(tunnel(target, b"Host: " + target) + mark(), **more)


def by_request(host, port, **more):
    """Send the escape's name as the path of a request."""
    target = authority(host, port)
    return talk(head(b"http://%s/" % target, target), **more)


def by_socks(host, port, **more):
    """Send the escape's name through a SOCKS connection to a name; a host of bytes is an address."""
    kind = b"\3" if isinstance(host, str) else b"\1" if len(host) == 4 else b"\4"
    text = host.encode() if isinstance(host, str) else host
    return talk(SOCKS + kind + bytes([len(text)][: kind == b"\3"]) + text + port.to_bytes(2, "big") + mark(), **more)


def unless_refused(answers):
    """Say that the proxy took a target for one that it may connect to; if it is not there, the proxy may be silent."""
    answer = answers[-1].removeprefix(b"\5\0") if answers[-1][:2] == b"\5\0" else answers[-1]
    refused = answer[:2] == b"\5\2" or answer[9:12] in (b"400", b"403")
    if not refused:
        say()


def perform(one):
    """Become one escape. Never returns."""
    global at
    at = SimpleNamespace(**one["at"])
    if os.getsid(0) != os.getpid():
        os.setsid()
    os.chdir(one["at"]["own"])
    given = os.open("/dev/null", os.O_RDONLY)
    os.dup2(given, 0)
    os.write(1, b"began\n")
    if one["language"] == "shell":
        words = {name.upper(): str(value) for name, value in one["at"].items()}
        os.execve("/bin/sh", ["sh", "-c", one["program"]], {**os.environ, **words})
    try:
        exec(compile(one["program"], at.name, "exec"), globals())
    except BaseException:
        print(*traceback.format_exception_only(*sys.exc_info()[:2]), flush=True)
    finally:
        sys.stdout.flush()
        os._exit(0)


def start(one):
    """Start one escape; returns its pid and a descriptor of its output."""
    read, write = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(read)
        os.close(write)
        raise
    if pid == 0:
        try:
            os.dup2(write, 1)
            os.dup2(write, 2)
            os.close(read)
            os.close(write)
            perform(one)
        finally:
            os._exit(1)
    os.close(write)
    return pid, read


def main(path):
    """Run all escapes of the file, a few at a time, and print what each wrote."""
    with open(path) as file:
        waiting = json.load(file)
    waiting.reverse()
    running: dict[int, Any] = {}
    written: dict[str, bytes] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            one = waiting.pop()
            try:
                pid, read = start(one)
            except OSError:  # too many processes just now
                waiting.append(one)
                time.sleep(0.01)
                break
            running[read] = (one["name"], pid, time.monotonic() + PROGRAM_S)
            written[one["name"]] = b""
        ready = select.select(list(running), [], [], 0.2)[0]
        for read, (name, pid, until) in list(running.items()):
            chunk = os.read(read, 1 << 16) if read in ready else None
            if chunk and len(written[name]) < OUTPUT_BYTES:
                written[name] += chunk
            if chunk == b"" or time.monotonic() > until:
                for kill in (os.killpg, os.kill):
                    try:
                        kill(pid, signal.SIGKILL)
                    except OSError:
                        pass
                os.close(read)
                os.waitpid(pid, 0)
                del running[read]
    print(json.dumps({name: text.decode("utf-8", "replace") for name, text in written.items()}), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        with open(sys.argv[1]) as file:
            perform(json.load(file)[0])
    main(sys.argv[1])
