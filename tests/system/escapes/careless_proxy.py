"""A proxy that checks nothing: without a wall, escapes go through it.

It sends what it is asked to every host that any reading of the request names: targets, Host headers, hidden second
requests, what stands before or after an ``@``. So an escape succeeds here if some proxy could be led by it. It speaks
HTTP, CONNECT, SOCKS 4, 4a and 5. Nothing leaves this machine: a host elsewhere is answered with 502.

A bare interpreter runs it. It prints a JSON object with its ports, and ends when its standard input ends.
"""

import json
import re
import select
import socket
import sys
import threading
from pathlib import Path
from urllib.parse import unquote

PORTS = 2
BACKLOG = 256
IDLE_S = 5.0
READ_BYTES = 1 << 14
NAMED = re.compile(
    r"(?:CONNECT[ \t]+|(?:https?|ftp)://|\n[ \t]*Host[ \t]*:[ \t]*|^[A-Z]+[ \t]+//)([^\s/]+)", re.IGNORECASE
)
FILES = re.compile(rb"file://(\S+)")
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
ELSEWHERE = b"HTTP/1.1 502 Bad Gateway\r\n\r\n"


def attend(client):
    """Serve a connection in the protocol of its first byte."""
    try:
        first = client.recv(1 << 16)
        serve = {b"\5": serve_socks5, b"\4": serve_socks4}.get(first[:1], serve_http)
        serve(client, first)
    except OSError:
        pass
    finally:
        client.close()


def serve_http(client, data, upstreams=None):
    """Send everything to every host that is named, as soon as it is named, and answer with what comes back."""
    upstreams = {} if upstreams is None else upstreams
    try:
        while True:
            for path in FILES.findall(data):
                client.sendall(Path(path.decode()).read_bytes())
            for target in named(data):
                if target not in upstreams:
                    upstreams[target] = introduce(client, target, data)
            lines = {line: target for target, line in upstreams.items() if line is not None}
            for line in select.select([client, *lines], [], [], IDLE_S)[0] or [None]:
                chunk = line.recv(1 << 16) if line else b""
                if line in lines and chunk:
                    client.sendall(chunk)
                elif line in lines:
                    upstreams[lines[line]] = None
                    line.close()
                elif chunk:
                    data = (data + chunk)[:READ_BYTES]
                    for one in lines:
                        one.sendall(chunk)
                else:
                    return
    finally:
        for line in upstreams.values():
            if line is not None:
                line.close()


def named(data):
    """All hosts that what has been sent could name, with their ports."""
    return dict.fromkeys(target for found in NAMED.findall(data.decode("latin-1")) for target in readings(found))


def introduce(client, target, data):
    """Connect to a host, and send it everything but the head of a CONNECT."""
    line, tunnel = opened(*target), data.startswith(b"CONNECT")
    if line is not None:
        line.sendall(data.partition(b"\r\n\r\n")[2] if tunnel else data)
    if tunnel or line is None:
        client.sendall(ELSEWHERE if line is None else ESTABLISHED)
    return line


def readings(authority):
    """All hosts that an authority could name, with its port."""
    text = unquote(authority)
    port = port_of(text, 80)
    parts = {part for part in {text, *re.split(r"[@#?\\;,]", text)} if part}
    return [(host_of(part), port_of(part, port)) for part in sorted(parts)]


def port_of(text, default):
    """The port of an authority, or another one if it has none."""
    found = re.search(r":(\d+)$", text)
    return int(found[1]) & 0xFFFF if found else default


def host_of(text):
    """The host of an authority, which may be an IPv6 address in brackets."""
    bracketed = re.match(r"\[(.*)\]", text)
    return bracketed[1] if bracketed else text if text.count(":") > 1 else text.partition(":")[0]


def opened(host, port):
    """A connection to a host of this machine; None for a host elsewhere, which stays in peace."""
    host = host.partition("\0")[0].strip(" \t[].") or "0.0.0.0"
    host = host if host.startswith("fe80") else host.partition("%")[0]
    try:
        host = host.encode("latin-1").decode()
    except UnicodeError:
        pass
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, _, _, address in found:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # a UDP connect sends nothing
            try:
                probe.connect(address)
            except OSError:
                continue
            own = probe.getsockname()[0]
        if own.partition("%")[0] in (str(address[0]).partition("%")[0], "127.0.0.1", "::1", "::ffff:127.0.0.1"):
            line = socket.socket(family, kind)
            line.settimeout(IDLE_S)
            try:
                line.connect(address)
            except OSError:
                line.close()
                continue
            return line
    return None


def serve_socks5(client, data):
    """CONNECT, BIND or UDP ASSOCIATE, by name or address."""
    client.sendall(b"\5\0")
    data = data[2 + data[1] :] or client.recv(1 << 16)
    command, kind = data[1], data[3]
    if kind == 3:
        host, rest = data[5 : 5 + data[4]].decode("latin-1"), data[5 + data[4] :]
    else:
        size = 4 if kind == 1 else 16
        family = socket.AF_INET if kind == 1 else socket.AF_INET6
        host, rest = socket.inet_ntop(family, data[4 : 4 + size]), data[4 + size :]
    answer_socks(client, command, host, rest, b"\5\0\0\1" + bytes(6), b"\5\4\0\1" + bytes(6))


def serve_socks4(client, data):
    """CONNECT or BIND; a name follows an address that begins with three zeros."""
    host = socket.inet_ntoa(data[4:8])
    rest = data[8:].partition(b"\0")[2]
    if host.startswith("0.0.0."):
        name, _, rest = rest.partition(b"\0")
        host = name.decode("latin-1")
    answer_socks(client, data[1], host, data[2:4] + rest, b"\0\x5a" + bytes(6), b"\0\x5b" + bytes(6))


def answer_socks(client, command, host, rest, granted, elsewhere):
    """Carry out a request; `rest` begins with the port."""
    port, rest = int.from_bytes(rest[:2], "big"), rest[2:]
    if command != 1:
        kind = socket.SOCK_STREAM if command == 2 else socket.SOCK_DGRAM
        with socket.socket(socket.AF_INET, kind) as bound:
            bound.bind(("127.0.0.1", 0))
            client.sendall(granted[:-2] + bound.getsockname()[1].to_bytes(2, "big"))
            client.recv(1)
        return
    line = next(filter(None, (opened(name, port) for name, _ in readings(host))), None)
    client.sendall(elsewhere if line is None else granted)
    if line is not None:
        line.sendall(rest)
        serve_http(client, rest, {None: line})


def accept(listener):
    """Serve each connection in a thread of its own."""
    while True:
        client, _ = listener.accept()
        client.settimeout(IDLE_S)
        threading.Thread(target=attend, args=(client,), daemon=True).start()


def main():
    """Listen, say where, and wait for the end of the standard input."""
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) for _ in range(PORTS)]
    for listener in listeners:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
    print(json.dumps({"ports": [listener.getsockname()[1] for listener in listeners]}), flush=True)
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
