"""Stands for the server: holds secrets and descriptors, and starts programs, walled or not, as its user.

It is a process of its own because a wall is built by the user that the server runs as. It reads one JSON object a line
from standard input (``id``, ``argv``, ``workspace``, ``limits``, ``wall``) and answers each with one line (``id``,
``returncode``, ``output``), in any order.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from typing import Any

from tests.system.escapes.walls import start_unwalled, start_walled

_said = threading.Lock()
_DESCRIPTORS = 700
"""Soft limit of the starter: below the usual 1,024, so that a bomb above it hurts no other process of the user."""


def serve(secret_file: str) -> None:
    """Hold what must not be handed on, and start programs until the standard input ends."""
    held = os.open(secret_file, os.O_RDONLY)
    os.set_inheritable(held, True)
    folder = os.open(os.path.dirname(secret_file), os.O_RDONLY | os.O_DIRECTORY)
    os.set_inheritable(folder, True)
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    near.set_inheritable(True)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.set_inheritable(True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = _DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, _DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard))
    print(json.dumps({"pid": os.getpid(), "descriptors": descriptors}), flush=True)
    for line in sys.stdin:
        threading.Thread(target=_answer, args=(json.loads(line),), daemon=True).start()
    near.close()
    far.close()


def _answer(asked: dict[str, Any]) -> None:
    try:
        start = start_unwalled if asked["wall"] == "none" else start_walled
        code, output = start(asked)
    except subprocess.TimeoutExpired as error:
        code, output = None, error.stdout or b""
    except Exception as error:
        code, output = None, f"cannot start: {error!r}".encode()
    answer = {"id": asked["id"], "returncode": code, "output": base64.b64encode(output).decode()}
    with _said:
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
    os._exit(0)  # threads may still wait for output
