"""The side file to which agents write their observations as stamps, and the reader of this file.

Each line is written by one `os.write` to a file opened for appending, so the lines of several processes do not mix, and
the lines of a killed process are kept. Shell programs write a shorter line: ``U``, the machine's uptime (from which the
time of the stamp is computed), the pid, and the words of the stamp.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.proof.history import Stamp

__all__ = ["MARKER", "Stamps", "read_stamps", "shell_stamp"]

MARKER = "HOLDFAST_STORM"
"""Environment variable that marks a storm's processes; contains the storm, principal, session, run and host's pid."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Stamp)


class Stamps:
    """An open side file. `write` may be called from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, stamp: Stamp) -> None:
        """Append one stamp. Raises `OSError` if the write fails."""
        os.write(self._descriptor, _encoder.encode(stamp) + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def shell_stamp(words: tuple[str, str, str, str, str, str], path: Path) -> str:
    """Return a shell command that writes a ``tick`` stamp for the process that executes the command.

    Parameters:
        words: run, attempt, branch, host, principal and session; none of them may contain blanks.
        path: path of the side file, which must not need quoting in a shell.
    """
    return f'read -r up rest </proc/uptime && echo "U $up $$ {" ".join(words)}" >>{path}'


def read_stamps(path: Path) -> Iterator[Stamp]:
    """Yield all stamps of a side file, without an incomplete last line (cut off by a kill, or still being written)."""
    offset = time.monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME)
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            if line.startswith(b"U "):
                _, uptime, pid, run_id, attempt, branch, host_pid, principal, session = line.decode().split()
                yield Stamp(
                    at=float(uptime) + offset,
                    what="tick",
                    principal=principal,
                    session=session,
                    run_id=run_id,
                    attempt=int(attempt),
                    branch=branch,
                    member="process",
                    pid=int(pid),
                    host_pid=int(host_pid),
                    cooperative=False,
                )
            else:
                yield _decoder.decode(line)
