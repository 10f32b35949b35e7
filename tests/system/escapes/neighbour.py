"""A program of another principal, behind a wall of its own, with something in every place where programs meet.

A bare interpreter runs it in its workspace. It leaves its secret everywhere, writes ``ready`` (a JSON object of where),
appends what its sockets hear to ``heard``, and ends when ``stop`` appears.
"""

import ctypes
import json
import os
import platform
import select
import signal
import socket
import struct
import subprocess
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
X86 = platform.machine() == "x86_64"
TARGETS = ("kill", "stop", "trace", "slow")
LIFE_S = 60


def main(label, secret):
    """Leave the secret, and listen."""
    held = ctypes.create_string_buffer(b"held " + secret)
    where: dict[str, Any] = {
        "held": ctypes.addressof(held),
        "held_bytes": len(held),
        "pid": os.getpid(),
        "sockets": {},
        "targets": {},
    }
    if "HTTP_PROXY" in os.environ:
        where["proxy"] = int(os.environ["HTTP_PROXY"].rpartition(":")[2])
    listeners = []
    for name, family, address in (
        ("abstract", socket.AF_UNIX, f"\0neighbour-{label}"),
        ("scratch", socket.AF_UNIX, f"/tmp/neighbour-{label}.sock"),
        ("workspace", socket.AF_UNIX, "neighbour.sock"),
        ("loopback", socket.AF_INET, ("127.0.0.1", 0)),
    ):
        try:
            listener = socket.socket(family)
            listener.bind(address)
            listener.listen(64)
        except OSError:
            continue
        listeners.append(listener)
        where["sockets"][name] = listener.getsockname()[1] if family == socket.AF_INET else str(address).lstrip("\0")
    for name, path in (("scratch", f"/tmp/neighbour-{label}"), ("shared", f"/dev/shm/neighbour-{label}")):
        try:
            with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o666), "wb") as file:
                file.write(secret)
        except OSError:
            continue
        where[name] = path
    number = int(label, 16) >> 3 & 0x3FFFFFFF | 3
    shm = libc.shmget(number, 4096, 0o1666)
    at = libc.shmat(shm, None, 0) if shm >= 0 else None
    if at:
        ctypes.memmove(at, secret, len(secret))
    where["shm_key"] = number
    queue = f"neighbour-{label}".encode()
    opened = libc.syscall(
        240 if X86 else 180, queue, os.O_CREAT | os.O_RDWR, 0o666, struct.pack("llll4l", 0, 4, 256, *[0] * 5)
    )
    for _ in range(4):
        libc.syscall(242 if X86 else 182, opened, secret, ctypes.c_size_t(len(secret)), 0, None)
    where["queue"] = queue.decode()
    for index, name in enumerate(TARGETS):
        mark = f"6{index}00.{int(label, 16) % 10**9}"
        subprocess.Popen(["sleep", mark])
        where["targets"][name] = mark
    with open("ready.part", "w") as file:
        json.dump(where, file)
    os.rename("ready.part", "ready")
    signal.alarm(LIFE_S)
    while not os.path.exists("stop"):
        for listener in select.select(listeners, [], [], 0.05)[0]:
            line, _ = listener.accept()
            line.settimeout(0.5)
            with open("heard", "ab") as file:
                file.write(line.recv(4096))
            line.close()
    libc.shmctl(shm, 0, None)
    libc.syscall(241 if X86 else 181, queue)
    for left in (where.get("scratch"), where.get("shared"), f"/tmp/neighbour-{label}.sock"):
        if left and os.path.exists(left):
            os.unlink(left)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].encode())
