"""Notes about background processes, so that those a host left when it ended can be ended and told about.

Reapers end every tree with its host; a process that a note names lives on only where its reaper was killed first.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import msgspec

from holdfast import ids
from holdfast.runtime import procfs
from holdfast.runtime.starting import host_marker

__all__ = ["Note", "Notes", "make_note"]


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a background process while it runs.

    Parameters:
        process_id: ours, as the model knows it.
        principal, session_key: whose it is.
        command: for people.
        pid, started: of the program; the start time in clock ticks since the boot, 0 where it cannot be had.
        boot: names the boot of the machine.
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
        """Whether another host, which lives, runs it."""
        pid, _, started = self.host.partition(".")
        if self.boot != _boot() or self.host == host_marker().decode() or not started.isdigit():
            return False
        return procfs.lives(int(pid), int(started))

    def kill(self) -> int:
        """Kill what is left of its tree, where it is proven to be the same process; how many were killed."""
        if not self.started or self.boot != _boot() or not procfs.lives(self.pid, self.started):
            return 0
        tree = [(pid, procfs.start_time(pid)) for pid in (self.pid, *procfs.descendants(self.pid))]
        return sum(_kill(pid, started) for pid, started in tree)


def _kill(pid: int, started: int | None) -> bool:
    """Kill exactly the process that started then."""
    return procfs.strike(pid, signal.SIGKILL, lambda now: now.started == started) == "hit"


class Notes:
    """A folder with one file for each process that runs.

    Parameters:
        folder: made when the first note is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, note: Note) -> None:
        """Keep a note, whole or not at all. Raises `OSError`."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = self._folder / f"{note.process_id}.{ids.secret('')[:8]}.part"
        part.write_bytes(msgspec.json.encode(note))
        part.rename(self._path(note.process_id))

    def remove(self, process_id: str) -> None:
        """Drop a note; nothing when there is none."""
        self._path(process_id).unlink(missing_ok=True)

    def left(self) -> list[Note]:
        """The notes of processes whose host has ended. What cannot be read is removed."""
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
    """A note about a process of this host that runs now."""
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
