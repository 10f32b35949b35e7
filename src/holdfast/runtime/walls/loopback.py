"""The port of the proxy inside of a wall, and a program that opens it behind a wall of a foreign tool.

The zygote imports this module. Behind bubblewrap, an interpreter runs its text with ``-I -S -c``, so it imports only
the standard library. Invariants of that program
- It replaces itself with the program of the wall, so no process is added.
- It closes the socket to the proxy before the program starts, which could otherwise send the proxy sockets without end.
- It runs after everything irrevocable was done, behind the system call filter, and needs no right that the program
  lacks.
- The program gets the variables and the handling of signals that this program got; those that the interpreter changed
  are put back.
"""

from __future__ import annotations

import _socket
import os
import signal
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["listen", "main"]

_BACKLOG = 64
_FAILED = 125
"""Exit code: the program was not started because its network could not be opened."""


def listen(carrier: int) -> bytes:
    """Listen on a free loopback port of this network, send the socket over `carrier`, and return the proxy's URL."""
    listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC, 0)
    listener.bind(("127.0.0.1", 0))
    listener.listen(_BACKLOG)
    port: int = listener.getsockname()[1]
    connection = _socket.socket(fileno=carrier)
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", listener.fileno()))
    connection.sendmsg([b"listener"], [rights])
    connection.detach()
    listener.close()
    return b"http://127.0.0.1:%d" % port


def main(carrier: str, variables: str, *argv: str) -> NoReturn:
    """Open the network, and become a program.

    Parameters:
        carrier: number of the descriptor of the socket to the proxy.
        variables: names of the environment variables for the proxy's URL, separated by commas.
        argv: the path of the program, and its arguments.
    """
    try:
        url = listen(int(carrier))
        os.close(int(carrier))
        with open("/proc/self/environ", "rb") as file:  # `os.environ` has what the interpreter set for itself, too
            entries = [entry.partition(b"=") for entry in file.read().split(b"\0") if entry]
        environment = {name: value for name, _, value in entries} | dict.fromkeys(variables.encode().split(b","), url)
        for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # which the interpreter ignores
            signal.signal(signum, signal.SIG_DFL)
        os.execve(argv[0], argv, environment)
    except OSError as error:
        os.write(2, f"sandbox: cannot open the network: {error}\n".encode())
    finally:
        os._exit(_FAILED)


if __name__ == "__main__":
    main(*sys.argv[1:])
