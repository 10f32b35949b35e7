"""Records of background processes, so that a host can kill and report processes that an earlier host left behind.

Reapers end every process tree together with its host, so a recorded process survives its host only if its reaper was
killed first.
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
    """Record of a running background process.

    Parameters:
        process_id: Holdfast's id of the process, which the model uses.
        principal, session_key: owner of the process.
        command: command line, for display.
        pid: pid of the program.
        started: start time of the program in clock ticks since boot; 0 if unavailable.
        boot: id of the machine's boot during which the process was started.
        host: ``<pid>.<start time>`` of the host that runs the process.
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
        """Return whether the process belongs to another host that is still running."""
        pid, _, started = self.host.partition(".")
        if self.boot != _boot() or self.host == host_marker().decode() or not started.isdigit():
            return False
        return procfs.lives(int(pid), int(started))

    def kill(self) -> int:
        """Kill the process tree and return the number of killed processes.

        Kill nothing if the recorded process has ended or cannot be identified by its start time.
        """
        if not self.started or self.boot != _boot() or not procfs.lives(self.pid, self.started):
            return 0
        tree = [(pid, procfs.start_time(pid)) for pid in (self.pid, *procfs.descendants(self.pid))]
        return sum(_kill(pid, started) for pid, started in tree)


def _kill(pid: int, started: int | None) -> bool:
    """Kill the process with this pid only if its start time is `started`; return whether it was killed."""
    return procfs.strike(pid, signal.SIGKILL, lambda now: now.started == started) == "hit"


class Notes:
    """A folder of notes, with one file for each running process.

    Parameters:
        folder: path of the folder, which is created when the first note is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, note: Note) -> None:
        """Write a note atomically. Raises `OSError` if writing fails."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = self._folder / f"{note.process_id}.{ids.secret('')[:8]}.part"
        part.write_bytes(msgspec.json.encode(note))
        part.rename(self._path(note.process_id))

    def remove(self, process_id: str) -> None:
        """Delete the note of a process, if the note exists."""
        self._path(process_id).unlink(missing_ok=True)

    def left(self) -> list[Note]:
        """Return all notes except those of other hosts that are still running, and delete unreadable notes."""
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
    """Create a note for a running process of this host."""
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
