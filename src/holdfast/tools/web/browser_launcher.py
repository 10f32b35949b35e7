"""The program that Playwright starts instead of Chromium: it asks the host to start Chromium behind a wall.

It is run as a script with ``-I -S``, with the folder of the host's socket and Chromium's arguments as its arguments,
so it imports only the standard library. Invariants
- It passes its descriptors 0 to 4 (standard streams, and Playwright's pipes) to the host and keeps no copy, so that
  either end sees the other's end.
- It lives as long as Chromium: it ends with Chromium's exit code, and when it ends first, the host ends Chromium.
"""

from __future__ import annotations

import os
import socket
import sys

__all__ = ["PASSED_FDS", "SOCKET_NAME", "main"]

SOCKET_NAME = "start"
"""Name of the host's socket in its folder."""

PASSED_FDS = (0, 1, 2, 3, 4)
"""Descriptors of Playwright's program."""

_FAILED = 127


def main() -> int:
    """Pass everything to the host, wait for Chromium's end, and return the exit code."""
    folder, *arguments = sys.argv[1:]
    os.chdir(folder)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as host:
        host.connect(SOCKET_NAME)
        socket.send_fds(host, [b"\0".join(map(os.fsencode, arguments))], PASSED_FDS)
        for fd in PASSED_FDS:
            os.close(fd)
        answer = host.recv(16)
    return int(answer) & 0xFF if answer else _FAILED


if __name__ == "__main__":
    os._exit(main())  # the standard streams are closed already
