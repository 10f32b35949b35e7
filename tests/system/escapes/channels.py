"""Escapes by what programs share without files: unix sockets, the bus, shared memory, queues, terminals, keyrings."""

from __future__ import annotations

from typing import Any

from tests.system.escapes.escape import Escape, reaches, reads, says, types

__all__ = ["ESCAPES"]


def _reaches(name: str, program: str, **more: Any) -> Escape:
    return Escape(name=name, subject="unix sockets and the bus", program=program, judge=reaches, **more)


def _reads(name: str, program: str, **more: Any) -> Escape:
    return Escape(name=name, subject="shared memory and queues", program=program, judge=reads, **more)


def _says(subject: str, name: str, program: str, **more: Any) -> Escape:
    return Escape(name=name, subject=subject, program=program, judge=says, **more)


def _types(name: str, program: str, **more: Any) -> Escape:
    return Escape(name=name, subject="terminals", program=program, judge=types, **more)


_QUEUES = "shared memory and queues"
_KEYS = "keyrings"
_TERMINALS = "terminals"

ESCAPES = (
    _reaches("speaks-to-an-abstract-socket", "knock(socket.AF_UNIX, socket.SOCK_STREAM, '\\0' + at.abstract)"),
    _reaches(
        "speaks-to-an-abstract-datagram-socket",
        "knock(socket.AF_UNIX, socket.SOCK_DGRAM, '\\0' + at.abstract + '-post')",
    ),
    _reaches(
        "sends-to-an-abstract-datagram-socket",
        "one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "one.sendto(f'{at.name};'.encode(), '\\0' + at.abstract + '-post')",
    ),
    _reaches(
        "sends-to-a-datagram-socket-of-the-server",
        "one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "one.sendto(f'{at.name};'.encode(), at.post)",
    ),
    _reaches(
        "connects-a-pair-to-a-datagram-socket-of-the-server",
        "one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "one.connect(at.post)\none.send(f'{at.name};'.encode())",
    ),
    _reaches("speaks-to-a-socket-of-the-server", "knock(socket.AF_UNIX, socket.SOCK_STREAM, at.bus)"),
    _reaches(
        "speaks-to-a-socket-by-a-link", "os.symlink(at.bus, 'bus')\nknock(socket.AF_UNIX, socket.SOCK_STREAM, 'bus')"
    ),
    _reaches(
        "speaks-to-a-socket-by-the-root-of-the-server",
        "os.symlink(f'/proc/{at.starter}/root' + at.bus, 'bus')\nknock(socket.AF_UNIX, socket.SOCK_STREAM, 'bus')",
    ),
    _reaches("speaks-to-a-socket-in-tmp", "knock(socket.AF_UNIX, socket.SOCK_STREAM, at.scratch_socket)"),
    _reaches(
        "speaks-to-the-bus-of-its-environment",
        "knock(socket.AF_UNIX, socket.SOCK_STREAM, os.environ['DBUS_SESSION_BUS_ADDRESS'].partition('=')[2])",
    ),
    _reaches(
        "speaks-to-the-agent-of-its-environment",
        "knock(socket.AF_UNIX, socket.SOCK_STREAM, os.environ['SSH_AUTH_SOCK'])",
    ),
    _reads("reads-shared-memory-of-the-host", "show(at.shared)"),
    _reads("reads-a-file-in-tmp", "show(at.scratch)"),
    _reads(
        "reads-system-v-shared-memory",
        "shm = call('shmget', at.shm_key, 0, 0)\n"
        "print(ctypes.string_at(call('shmat', shm, None, 0o10000), 64).decode())",
    ),
    _reads(
        "reads-system-v-shared-memory-by-its-number",
        "print(ctypes.string_at(call('shmat', at.shm, None, 0o10000), 64).decode())",
    ),
    _reads(
        "reads-a-system-v-queue",
        "held = ctypes.create_string_buffer(4096)\n"
        "call('msgrcv', call('msgget', at.msg_key, 0), held, 4000, 0, 0o4000)\n"
        "print(held.raw[8:].rstrip(b'\\0').decode())",
    ),
    _reads(
        "reads-a-system-v-queue-by-its-number",
        "held = ctypes.create_string_buffer(4096)\ncall('msgrcv', at.msg, held, 4000, 0, 0o4000)\n"
        "print(held.raw[8:].rstrip(b'\\0').decode())",
    ),
    _reads(
        "reads-a-posix-queue",
        "queue = call('mq_open', at.queue.encode(), os.O_RDONLY | os.O_NONBLOCK, 0, None)\n"
        "held = ctypes.create_string_buffer(256)\ncall('mq_timedreceive', queue, held, 256, None, None)\n"
        "print(held.value.decode())",
    ),
    _says(
        _QUEUES, "sees-the-shared-memory-of-the-host", "str(at.shm_key) in open('/proc/sysvipc/shm').read() and say()"
    ),
    _says(_QUEUES, "takes-a-semaphore-of-the-host", "call('semget', at.sem_key, 0, 0)\nsay()"),
    _says(_QUEUES, "raises-a-semaphore-of-the-host", "call('semop', at.sem, struct.pack('HhH', 0, 1, 0), 1)\nsay()"),
    _says(_QUEUES, "removes-a-queue-of-the-host", "call('mq_unlink', at.spare_queue.encode())\nsay()"),
    _says(_QUEUES, "removes-system-v-shared-memory", "call('shmctl', at.spare_shm, 0, None)\nsay()"),
    _says(
        _QUEUES,
        "leaves-shared-memory-in-the-host",
        "key = at.shm_key ^ 0x10000\nshm = call('shmget', key, 4096, 0o1600)\n"
        "held = int(open('/proc/sysvipc/shm').read().count(str(at.shm_key)))\n"
        "call('shmctl', shm, 0, None)\n"
        "held and say()",
    ),
    _says(
        _QUEUES,
        "leaves-a-file-in-the-hosts-tmp",
        "path = at.scratch + '-left'\n"
        "open(path, 'w').close()\n"
        "held = os.path.exists(at.scratch)\n"
        "os.unlink(path)\n"
        "held and say()",
    ),
    Escape(
        name="reads-a-key-of-its-user",
        subject=_KEYS,
        program="held = ctypes.create_string_buffer(256)\n"
        "call('keyctl', 11, at.key, held, 256, 0)\n"
        "print(held.value.decode())",
        judge=reads,
        may_fail="the kernel has no keyrings",
    ),
    Escape(
        name="finds-a-key-of-its-user",
        subject=_KEYS,
        program="key = call('request_key', b'user', at.key_name.encode(), None, -4)\n"
        "held = ctypes.create_string_buffer(256)\ncall('keyctl', 11, key, held, 256, 0)\nprint(held.value.decode())",
        judge=reads,
        may_fail="the kernel has no keyrings",
    ),
    _says(
        _KEYS,
        "sees-the-keys-of-its-user",
        "at.key_name in open('/proc/keys').read() and say()",
        may_fail="/proc/keys shows only keys it possesses",
    ),
    _says(
        _KEYS,
        "leaves-a-key-for-its-user",
        "key = call('add_key', b'user', at.name.encode(), b'left', 4, -4)\ncall('keyctl', 9, key, -4)\nsay()",
        may_fail="the kernel has no keyrings",
    ),
    _says(
        _KEYS,
        "joins-a-session-keyring",
        "call('keyctl', 1, b'holdfast-zoo')\nsay()",
        may_fail="the kernel has no keyrings",
    ),
    _types("writes-on-a-terminal", "open(at.terminals[0], 'w').write(f'{at.name};')"),
    _types(
        "types-on-a-terminal-by-tiocsti",
        "fd = os.open(at.terminals[1], os.O_RDWR | os.O_NOCTTY)\n"
        "fcntl.ioctl(fd, 0x540E, 1 if os.geteuid() == 0 else 0)\n"
        "for letter in f'{at.name};': fcntl.ioctl(fd, 0x5412, letter.encode())",
        may_fail="the kernel has no TIOCSTI",
    ),
    _types(
        "types-by-tiocsti-with-high-bits",
        "fd = os.open(at.terminals[2], os.O_RDWR | os.O_NOCTTY)\n"
        "call(16 if platform.machine() == 'x86_64' else 29, fd, 0x540E, 1 if os.geteuid() == 0 else 0)\n"
        "for letter in f'{at.name};':\n"
        "    call(16 if platform.machine() == 'x86_64' else 29, fd, 0x5412 | 1 << 40, "
        "ctypes.c_char_p(letter.encode()))",
        may_fail="the kernel has no TIOCSTI",
    ),
    _says(
        _TERMINALS,
        "takes-over-a-terminal",
        "fd = os.open(at.terminals[3], os.O_RDWR | os.O_NOCTTY)\n"
        "fcntl.ioctl(fd, 0x540E, 1 if os.geteuid() == 0 else 0)\n"
        "say()",
        may_fail="the terminal is taken",
    ),
    _says(
        _TERMINALS,
        "selects-text-on-a-console",
        "fcntl.ioctl(os.open('/dev/tty0', os.O_RDWR | os.O_NOCTTY), 0x541C, bytearray(b'\\6'))\nsay()",
        needs="root",
        may_fail="the machine has no virtual console",
    ),
    _says(
        _TERMINALS,
        "opens-the-console",
        "os.open('/dev/console', os.O_WRONLY | os.O_NOCTTY)\nsay()",
        needs="root",
        may_fail="the machine has no console",
    ),
    _says(
        _TERMINALS,
        "sees-the-terminals-of-the-host",
        "os.stat(at.terminals[3])\nsay()",
        known={"linux-landlock": "Landlock judges what is opened, not what is only looked at"},
    ),
)
