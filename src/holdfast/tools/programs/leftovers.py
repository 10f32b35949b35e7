"""Records of background processes, so that a host can end and report those that an earlier host left behind.

Reapers end every process tree with its host; a noted process survives only if its reaper was killed first.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import msgspec

from holdfast import ids
from holdfast.runtime.processes import procfs
from holdfast.runtime.processes.spec import host_marker

__all__ = ["Note", "Notes", "make_note"]


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a background process while it runs.

    Parameters:
        process_id: our id, as the model knows it.
        principal, session_key: owner of the process.
        command: command line, for display.
        pid, started: pid and start time of the program; the time in clock ticks since boot, 0 if unavailable.
        boot: id of the machine's boot.
        host: ``<pid>.<start time>`` of the host that runs it.
    """

    process_id: str
    principal: str
    session_key: str
    command: str
    pid: int
    started: int
    boot: str
    host: str

    def of_living_other(self) -> bool:
        """Return whether another live host runs the process."""
        pid, _, started = self.host.partition(".")
        if self.boot != _boot() or self.host == host_marker().decode() or not started.isdigit():
            return False
        return procfs.lives(int(pid), int(started))

    def kill(self) -> int:
        """Kill the rest of the process tree if it is provably the same process; return how many were killed."""
        if not self.started or self.boot != _boot() or not procfs.lives(self.pid, self.started):
            return 0
        tree = [(pid, procfs.start_time(pid)) for pid in (self.pid, *procfs.descendants(self.pid))]
        return sum(_kill(pid, started) for pid, started in tree)


def _kill(pid: int, started: int | None) -> bool:
    """Kill the process with this pid and start time, and no other."""
    return procfs.strike(pid, signal.SIGKILL, lambda now: now.started == started) == "hit"


class Notes:
    """A folder with one file for each running process.

    Parameters:
        folder: created when the first note is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, note: Note) -> None:
        """Write a note atomically. Raises `OSError`."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = self._folder / f"{note.process_id}.{ids.secret('')[:8]}.part"
        part.write_bytes(msgspec.json.encode(note))
        part.rename(self._path(note.process_id))

    def remove(self, process_id: str) -> None:
        """Delete a note, if it exists."""
        self._path(process_id).unlink(missing_ok=True)

    def left(self) -> list[Note]:
        """Return the notes of processes whose host has ended. Unreadable notes are deleted."""
        found = []
        for path in sorted(self._folder.glob("*")):
            note = None
            with contextlib.suppress(msgspec.DecodeError):
                note = msgspec.json.decode(path.read_bytes(), type=Note)
            if note is None or path != self._path(note.process_id):
                path.unlink(missing_ok=True)
            elif not note.of_living_other():
                found.append(note)
        return found

    def _path(self, process_id: str) -> Path:
        return self._folder / f"{process_id}.json"


def make_note(*, process_id: str, principal: str, session_key: str, command: str, pid: int) -> Note:
    """Return a note about a running process of this host."""
    return Note(
        process_id=process_id,
        principal=principal,
        session_key=session_key,
        command=command,
        pid=pid,
        started=procfs.start_time(pid) or 0,
        boot=_boot(),
        host=host_marker().decode(),
    )


def _boot() -> str:
    return (procfs.read_text("/proc/sys/kernel/random/boot_id") or b"").decode().strip()
