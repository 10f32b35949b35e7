"""The faults of a nemesis, by name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from holdfast.errors import ConfigurationError
from holdfast.proof.nemesis.clocks import QUESTION_TTL_S, clock_jumps
from holdfast.proof.nemesis.connections import connections
from holdfast.proof.nemesis.disks import disk_full, disk_read_only, disk_slow
from holdfast.proof.nemesis.episode import Episode
from holdfast.proof.nemesis.readers import STALL_S, hostile_readers
from holdfast.proof.nemesis.signals import signals

__all__ = ["FAULTS", "KILLS", "Fault", "chosen"]

KILLS = "kill"
"""Name of the fault that runs as a separate storm, in which SIGKILL is sent at every failpoint and at random."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that a nemesis can inject.

    Parameters:
        name: name of the fault on the command line.
        title: description of the fault in one sentence.
        kinds: kinds of injections, each of which must happen at least once.
        inject: async function that injects the fault; called with the episode, while the load runs.
        settings: server settings for this fault, which override those of the storm.
        kills: whether the fault also kills the server.
        disk: whether the server's store is on a separate small disk, if the machine allows that.
    """

    name: str
    title: str
    kinds: tuple[str, ...]
    inject: Callable[[Episode], Awaitable[None]]
    settings: Mapping[str, Any] = {}
    kills: bool = False
    disk: bool = False


FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            name="disk-full",
            title="The disk is full, while the server runs and when it starts; then there is room again.",
            kinds=("full", "killed when full"),
            inject=disk_full,
            kills=True,
            disk=True,
        ),
        Fault(
            name="disk-slow",
            title="Each commit takes longer.",
            kinds=("slow",),
            inject=disk_slow,
        ),
        Fault(
            name="read-only",
            title="The store becomes read-only while it is open (SQLite's error for that, at the failpoint before each "
            "write), and is when the server starts; then no longer.",
            kinds=("read_only", "read-only at the start"),
            inject=disk_read_only,
            kills=True,
            disk=True,
        ),
        Fault(
            name="clock",
            title="The wall clock is set forward and back by hours, under load and between two starts.",
            kinds=("clock", "set between two starts"),
            inject=clock_jumps,
            settings={"question_ttl_s": QUESTION_TTL_S},
            kills=True,
        ),
        Fault(
            name="signals",
            title="The store's answers come late, or are lost; hints come again; the process is paused.",
            kinds=("late", "lost", "hint", "told again", "paused"),
            inject=signals,
        ),
        Fault(
            name="readers",
            title="Readers never read, take a byte at a time, break off, or close their half.",
            kinds=("never reads", "a byte at a time", "broken off", "half closed"),
            inject=hostile_readers,
            settings={"stream_stall_s": STALL_S},
        ),
        Fault(
            name="connections",
            title="Connections are opened and dropped: idle, in a head, in a body, after a send, in a stream.",
            kinds=("idle", "half a head", "half a body", "right after a send", "a stream never read"),
            inject=connections,
        ),
    )
}


def chosen(names: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list of faults, without duplicates; ``all`` means all faults.

    Raises `ConfigurationError` if a name is unknown.
    """
    known = (KILLS, *FAULTS)
    asked = list(known) if names == "all" else [name.strip() for name in names.split(",")]
    for name in asked:
        if name not in known:
            raise ConfigurationError(f"unknown fault {name!r}", hint=f"choose all, or some of {', '.join(known)}")
    return tuple(dict.fromkeys(asked))
