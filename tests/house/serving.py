"""A server as a user starts it: the `holdfast` command in a process of its own, on a free port."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def serving_environment(port: int, **more: str) -> dict[str, str]:
    """The environment of a shell in which the commands of the docs do what they say, on another port."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOLDFAST_PORT": str(port),
        "HOLDFAST_URL": f"http://127.0.0.1:{port}",
        **more,
    }


@contextmanager
def server(folder: Path, environment: dict[str, str], arguments: str = "") -> Iterator[None]:
    """A server in `folder` that answers, with arguments as a shell reads them; afterwards it is drained and gone."""
    log = folder / "serve.log"
    argv = ["holdfast", "serve", *shlex.split(arguments)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [Path(sys.executable).with_name(argv[0]), *argv[1:]],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            await_readiness(process, environment["HOLDFAST_URL"], log)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
                raise


def await_readiness(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Return once the server takes requests; fail with its log if it does not."""
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"{url}/readyz", timeout=5).close()
            return
        except OSError:  # refused, cut, not ready yet, or no answer in time
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
