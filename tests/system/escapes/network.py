"""Escapes that reach sockets of the host: loopback by every spelling, addresses, families, transports."""

from __future__ import annotations

from typing import Any

from tests.system.escapes.escape import Escape, reaches, reads, says

__all__ = ["ESCAPES", "SPELLINGS"]


def _reaches(name: str, program: str, **more: Any) -> Escape:
    return Escape(name=name, subject="network", program=program, judge=reaches, **more)


def _says(name: str, program: str, **more: Any) -> Escape:
    return Escape(name=name, subject="network", program=program, judge=says, **more)


def _spelled(label: str, host: str) -> Escape:
    family = "socket.AF_INET6" if ":" in host else "socket.AF_INET"
    return _reaches(f"reaches-loopback-as-{label}", f"knock({family}, socket.SOCK_STREAM, ({host!r}, at.port))")


SPELLINGS = (
    ("127-0-0-1", "127.0.0.1"),
    ("127-1", "127.1"),
    ("127-0-0-2", "127.0.0.2"),
    ("0", "0"),
    ("0-0-0-0", "0.0.0.0"),
    ("a-decimal", "2130706433"),
    ("octal", "0177.0.0.1"),
    ("hexadecimal", "0x7f.0.0.1"),
    ("one-hexadecimal", "0x7f000001"),
    ("v6", "::1"),
    ("v6-any", "::"),
    ("v4-in-v6", "::ffff:127.0.0.1"),
    ("v4-in-v6-hexadecimal", "::ffff:7f00:1"),
    ("any-v4-in-v6", "::ffff:0.0.0.0"),
    ("v6-written-out", "0:0:0:0:0:0:0:1"),
)

ESCAPES = (
    *(_spelled(label, host) for label, host in SPELLINGS),
    _reaches("reaches-loopback-as-localhost", "knock(socket.AF_INET, socket.SOCK_STREAM, ('localhost', at.port))"),
    _reaches(
        "reaches-the-host-by-its-name",
        "knock(socket.AF_INET, socket.SOCK_STREAM, (at.hostname, at.port))",
        may_fail="the machine's name has no address",
    ),
    _reaches(
        "reaches-the-host-by-its-address",
        "knock(socket.AF_INET, socket.SOCK_STREAM, ([one for one in at.addresses if ':' not in one][0], at.port))",
        may_fail="the machine has no address but loopback",
    ),
    _reaches(
        "reaches-the-host-by-its-v6-address",
        "knock(socket.AF_INET6, socket.SOCK_STREAM, ([one for one in at.addresses if ':' in one][0], at.port))",
        may_fail="the machine has no IPv6 address but loopback",
    ),
    _reaches(
        "reaches-the-host-by-a-link-local-address",
        "for line in open('/proc/net/if_inet6'):\n"
        "    digits, index, *_, name = line.split()\n"
        "    if digits.startswith('fe80'):\n"
        "        address = ':'.join(digits[n:n + 4] for n in range(0, 32, 4))\n"
        "        knock(socket.AF_INET6, socket.SOCK_STREAM, (address, at.port, 0, int(index, 16)))",
        may_fail="no interface has a link-local address",
    ),
    _reaches("reaches-loopback-by-udp", "knock(socket.AF_INET, socket.SOCK_DGRAM, ('127.0.0.1', at.port))"),
    _reaches("reaches-loopback-by-udp-v6", "knock(socket.AF_INET6, socket.SOCK_DGRAM, ('::1', at.port))"),
    _reaches(
        "reaches-loopback-by-a-fast-open",
        "line = socket.socket()\nline.sendto(f'{at.name};'.encode(), socket.MSG_FASTOPEN, ('127.0.0.1', at.port))",
        may_fail="TCP fast open is off",
    ),
    _reaches(
        "reaches-loopback-by-mptcp",
        "knock(socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', at.port), 262)",
        may_fail="the kernel has no multipath TCP",
    ),
    _reaches(
        "reaches-loopback-without-blocking",
        "line = socket.socket()\nline.setblocking(False)\nline.connect_ex(('127.0.0.1', at.port))\n"
        "select.select([], [line], [], 1)\nline.send(f'{at.name};'.encode())",
    ),
    _reaches(
        "reaches-loopback-by-bash",
        'bash -c "exec 3<>/dev/tcp/127.0.0.1/$PORT; echo \\"$NAME;\\" >&3"',
        language="shell",
    ),
    _reaches("reaches-loopback-by-curl", 'curl -s -m 0.5 "http://127.0.0.1:$PORT/$NAME;"', language="shell"),
    _reaches(
        "reaches-loopback-by-curl-and-a-name",
        'curl -s -m 0.5 --resolve "example.org:$PORT:127.0.0.1" "http://example.org:$PORT/$NAME;"',
        language="shell",
    ),
    _reaches(
        "reaches-loopback-without-the-proxy",
        'http_proxy= NO_PROXY="*" curl -s -m 0.5 --noproxy "*" "http://0x7f.1:$PORT/$NAME;"',
        language="shell",
    ),
    _reaches(
        "reaches-loopback-by-a-name-for-it", 'curl -s -m 0.5 "http://anything.localhost:$PORT/$NAME;"', language="shell"
    ),
    _says(
        "holds-a-socket-of-its-starter",
        "for fd in range(3, 256):\n    try: stat.S_ISSOCK(os.fstat(fd).st_mode) and say()\n    except OSError: pass",
    ),
    _says(
        "takes-a-socket-of-its-first-process",
        "pidfd = call('pidfd_open', 1 if at.walled else os.getppid(), 0)\n"
        "for number in range(3, 64):\n"
        "    try: fd = call('pidfd_getfd', pidfd, number, 0)\n"
        "    except OSError as error: print(error, flush=True)\n"
        "    else: stat.S_ISSOCK(os.fstat(fd).st_mode) and say()",
    ),
    Escape(
        name="approves-its-own-call",
        subject="network",
        program='curl -s -m 0.5 -X POST -H "Authorization: Bearer $(cat "$TOKEN")" '
        '"http://127.0.0.1:$PORT/v1/sessions/s/approve/$NAME;"',
        language="shell",
        judge=reaches,
    ),
    Escape(
        name="finds-the-token-and-the-port-of-the-server",
        subject="network",
        program="cat $(find \"$OUTSIDE\" -name '*token*'); cat /proc/net/tcp",
        language="shell",
        judge=reads,
    ),
    _says(
        "has-a-way-to-the-metadata-address",
        "line = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nline.connect(('169.254.169.254', 80))\nsay()",
        may_fail="the machine has no default route",
    ),
    _says(
        "has-a-way-to-a-private-network",
        "line = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nline.connect(('10.1.2.3', 80))\nsay()",
        may_fail="the machine has no default route",
    ),
    _says(
        "has-a-way-to-the-internet",
        "line = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nline.connect(('198.51.100.1', 80))\nsay()",
        may_fail="the machine has no default route",
    ),
    _says("sees-the-sockets-of-the-host", "f':{at.port:04X}' in open('/proc/net/tcp6').read() and say()"),
    _says("sees-the-unix-sockets-of-the-host", "at.abstract in open('/proc/net/unix').read() and say()"),
    _says(
        "sees-the-interfaces-of-the-host",
        "set(name for _, name in socket.if_nameindex()) - {'lo'} and say()",
        may_fail="the machine has no interface but loopback",
    ),
    _says(
        "asks-netlink-for-the-sockets-of-the-host",
        "line = socket.socket(16, socket.SOCK_RAW, 4)\n"
        "asked = struct.pack('BBBBI', 10, 6, 0, 0, 0xFFFFFFFF) + bytes(48)\n"
        "line.send(struct.pack('IHHII', 16 + len(asked), 20, 0x301, 1, 0) + asked)\n"
        "line.settimeout(1)\n"
        "struct.pack('>H', at.port) in line.recv(1 << 16) and say()",
        may_fail="the kernel has no socket diagnosis",
    ),
    _says(
        "listens-to-the-devices-of-the-host",
        "line = socket.socket(16, socket.SOCK_RAW, 15)\n"
        "line.bind((0, 1))\n"
        "'eth0' in [n for _, n in socket.if_nameindex()] and say()",
        may_fail="the machine has no interface eth0",
    ),
    _says("opens-a-raw-socket", "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)\nsay()", needs="root"),
    _says("opens-a-raw-v6-socket", "socket.socket(socket.AF_INET6, socket.SOCK_RAW, 58)\nsay()", needs="root"),
    _says("opens-a-packet-socket", "socket.socket(17, socket.SOCK_RAW, 0x0300)\nsay()", needs="root"),
    _says("opens-a-packet-datagram-socket", "socket.socket(17, socket.SOCK_DGRAM, 0x0300)\nsay()", needs="root"),
    _says("opens-an-old-packet-socket", "socket.socket(socket.AF_INET, 10, 0x0300)\nsay()", needs="root"),
    _says(
        "opens-a-socket-to-the-hypervisor",
        "socket.socket(40, socket.SOCK_STREAM)\nsay()",
        may_fail="the kernel has no vsock",
    ),
    _says(
        "opens-a-socket-of-the-kernels-ciphers",
        "socket.socket(38, socket.SOCK_SEQPACKET)\nsay()",
        may_fail="the kernel has no AF_ALG",
    ),
    _says(
        "opens-a-bluetooth-socket",
        "socket.socket(31, socket.SOCK_RAW, 1)\nsay()",
        may_fail="the kernel has no Bluetooth",
    ),
    _says(
        "opens-an-xdp-socket",
        "socket.socket(44, socket.SOCK_RAW)\nsay()",
        may_fail="the kernel has no XDP",
        needs="root",
    ),
    _says(
        "opens-a-vsock-pair-of-high-bits",
        "call(41 if platform.machine() == 'x86_64' else 198, 40 | 1 << 40, 1, 0)\nsay()",
        may_fail="the kernel has no vsock",
    ),
    _says(
        "changes-the-interfaces-of-the-host",
        "line = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "asked = struct.pack('16sH14s', b'lo', 0, bytes(14))\n"
        "flags = struct.unpack('16sH14s', fcntl.ioctl(line, 0x8913, asked))[1]\n"
        "fcntl.ioctl(line, 0x8914, struct.pack('16sH14s', b'lo', flags, bytes(14)))\nsay()",
        needs="root",
    ),
    _says(
        "opens-a-tunnel",
        "fcntl.ioctl(os.open('/dev/net/tun', os.O_RDWR), 0x400454CA, struct.pack('16sH22x', b'', 0x1001))\nsay()",
        needs="root",
        may_fail="the machine has no tunnels",
    ),
)
