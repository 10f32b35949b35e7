"""A process of the host that holds secrets wherever a process can hold them. It runs until its standard input ends.

A bare interpreter runs it, as the user whose wall is tried. It is dumpable, so nothing but a wall keeps its secrets.
The argument is a JSON object with ``secret``, ``label`` (unique) and ``folder`` (where it leaves files). It prints a
JSON object of where everything is.
"""

import ctypes
import json
import os
import platform
import signal
import socket
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
X86 = platform.machine() == "x86_64"
ADD_KEY, KEYCTL, MQ_OPEN, MQ_SEND = (248, 250, 240, 242) if X86 else (217, 219, 180, 182)
USER_KEYRING, SETPERM = -4, 5
CREATE, REMOVE = 0o1000, 0
MESSAGES = 4


def main(given):
    """Leave the secret everywhere, say where, wait, and take away what would stay."""
    secret, label, folder = given["secret"].encode(), given["label"], given["folder"]
    os.chdir(folder)
    held = ctypes.create_string_buffer(b"held " + secret)
    gone = os.open(f"{folder}/deleted", os.O_RDWR | os.O_CREAT, 0o600)
    os.write(gone, secret)
    os.unlink(f"{folder}/deleted")
    where: dict[str, Any] = {
        "victim": os.getpid(),
        "held": ctypes.addressof(held),
        "held_bytes": len(held),
        "gone": gone,
    }
    where["unnamed"] = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.write(where["unnamed"], secret)
    number = int(label, 16) & 0x3FFFFFFF | 1
    where["shm_key"] = where["msg_key"] = where["sem_key"] = number
    shm, msg = libc.shmget(number, 4096, CREATE | 0o600), libc.msgget(number, CREATE | 0o600)
    sem = libc.semget(number, 1, CREATE | 0o600)
    at = libc.shmat(shm, None, 0)
    ctypes.memmove(at, secret, len(secret))
    where["shm"], where["msg"], where["sem"] = shm, msg, sem
    where["spare_shm"] = libc.shmget(0, 4096, CREATE | 0o600)
    for _ in range(MESSAGES):
        libc.msgsnd(msg, struct.pack("l", 1) + secret, len(secret), 0)
    where["queue"] = f"holdfast-{label}"
    attributes = struct.pack("llll4l", 0, MESSAGES, 256, 0, 0, 0, 0, 0)
    queue = libc.syscall(MQ_OPEN, where["queue"].encode(), os.O_CREAT | os.O_RDWR, 0o600, attributes)
    where["spare_queue"] = f"spare-{label}"
    libc.syscall(MQ_OPEN, where["spare_queue"].encode(), os.O_CREAT | os.O_RDWR, 0o600, attributes)
    for _ in range(MESSAGES):
        libc.syscall(MQ_SEND, queue, secret, ctypes.c_size_t(len(secret)), 0, None)
    key = libc.syscall(ADD_KEY, b"user", label.encode(), secret, ctypes.c_size_t(len(secret)), USER_KEYRING)
    libc.syscall(KEYCTL, SETPERM, key, 0x3F3F0000)
    where["key"], where["key_name"] = key, label
    left = {"shared": f"/dev/shm/holdfast-{label}", "scratch": f"/tmp/holdfast-{label}"}
    for path in left.values():
        with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
            file.write(secret)
    where.update(left)
    anonymous = os.memfd_create("held")
    os.write(anonymous, secret)
    where["anonymous"] = anonymous
    one, _other = socket.socketpair()
    where["line"] = one.fileno()
    _other.send(secret)
    print(json.dumps(where), flush=True)
    try:
        sys.stdin.buffer.read()
    finally:
        for path in left.values():
            os.unlink(path)
        libc.shmctl(shm, REMOVE, None)
        libc.msgctl(msg, REMOVE, None)
        libc.semctl(sem, 0, REMOVE)
        libc.shmctl(where["spare_shm"], REMOVE, None)
        for name in (where["queue"], where["spare_queue"]):
            libc.syscall(241 if X86 else 181, name.encode())
        libc.syscall(KEYCTL, 3, key)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(json.loads(sys.argv[1]))
