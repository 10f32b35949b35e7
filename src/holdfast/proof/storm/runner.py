"""Run a storm and record its history: over a host in this process, a dedicated server or an existing server."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.proof.history import Opened, Source
from holdfast.proof.storm.access import Progress
from holdfast.proof.storm.bounds import HOSTILE, LIMITS, LIMITS_WITH_HOSTILE
from holdfast.proof.storm.embedded import embedded_storm
from holdfast.proof.storm.killing import kill_storm, registered_failpoints
from holdfast.proof.storm.recorder import StormRecorder
from holdfast.proof.storm.remote import remote_storm
from holdfast.proof.storm.wall_probe import can_build_walls

__all__ = ["conduct_embedded", "conduct_kills", "conduct_remote"]

_EVERYTHING: tuple[Source, ...] = ("clients", "stamps", "processes", "kills", "drain", "host", "principals", "places")
_CRASHES_S = 2.0
_CRASH_SESSIONS = 8


def _sees(*, hostile: bool) -> tuple[Source, ...]:
    """Return the sources of a storm here. Where programs run without walls, none are run."""
    if not can_build_walls():
        return _EVERYTHING
    return (*_EVERYTHING, "walls", "bombs") if hostile else (*_EVERYTHING, "walls")


@contextmanager
def _a_folder(folder: Path | None) -> Iterator[Path]:
    """Yield `folder`; None yields a temporary folder, which is deleted when the storm is over."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="holdfast-storm-") as name:
            yield Path(name)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


async def conduct_embedded(
    recorder: StormRecorder,
    *,
    sessions: int,
    seconds: float,
    seed: int,
    progress: Progress,
    rate: float | None = None,
    folder: Path | None = None,
    hostile: bool = False,
) -> None:
    """Run a storm over a host in this process, then one over a small dedicated server, which is killed a few times.

    The second storm is needed because the host in this process cannot be killed.

    Parameters:
        recorder: recorder of the history.
        sessions, seconds, seed, rate: number of sessions, duration in seconds, random seed, and actions per second over
            all sessions.
        progress: called with progress messages.
        folder: folder for the stores and related files; None uses temporary folders, which are deleted at the end.
        hostile: whether to add a hostile principal to the storm over the small server.
    """
    limits = LIMITS_WITH_HOSTILE if hostile else LIMITS
    recorder.note(
        Opened,
        seed=seed,
        mode="embedded",
        sees=_sees(hostile=hostile),
        limits=limits,
        hostile=HOSTILE if hostile else "",
    )
    with _a_folder(folder and folder / "embedded") as own:
        await embedded_storm(
            recorder, folder=own, sessions=sessions, seconds=seconds, seed=seed, progress=progress, rate=rate
        )
    progress("crashes of a small server")
    with _a_folder(folder and folder / "killed") as own:
        await kill_storm(
            recorder,
            folder=own,
            sessions=min(_CRASH_SESSIONS, sessions),
            seconds=_CRASHES_S,
            kill_every_s=_CRASHES_S / 2,
            seed=seed,
            points=(),
            progress=progress,
            prefix="k",
            first=3,
            contention=False,
            hostile=hostile,
        )


async def conduct_kills(
    recorder: StormRecorder,
    *,
    sessions: int,
    seconds: float,
    kill_every_s: float,
    seed: int,
    progress: Progress,
    rate: float | None = None,
    points: tuple[str, ...] | None = None,
    folder: Path | None = None,
    hostile: bool = False,
) -> None:
    """Run a storm over a dedicated server that is killed once at each failpoint, then at random for `seconds`.

    Parameters:
        points: names of the failpoints; None means all registered failpoints.
        folder: folder for the store and related files; None uses a temporary folder, which is deleted at the end.
        hostile: whether to add a hostile principal.

    Raises:
        ServerUnreachable: if the server cannot be started.
    """
    names = registered_failpoints() if points is None else points
    recorder.note(
        Opened,
        seed=seed,
        mode="kill",
        sees=_sees(hostile=hostile),
        limits=LIMITS_WITH_HOSTILE if hostile else LIMITS,
        failpoints=names,
        hostile=HOSTILE if hostile else "",
    )
    with _a_folder(folder) as own:
        await kill_storm(
            recorder,
            folder=own,
            sessions=sessions,
            seconds=seconds,
            kill_every_s=kill_every_s,
            seed=seed,
            points=names,
            progress=progress,
            rate=rate,
            hostile=hostile,
        )


async def conduct_remote(
    recorder: StormRecorder,
    *,
    url: str,
    key: str | None,
    say: str,
    sessions: int,
    seconds: float,
    seed: int,
    progress: Progress,
    rate: float | None = None,
) -> None:
    """Run a storm over an existing server. Raises `HoldfastError` if the server does not answer or refuses the key."""
    await remote_storm(
        recorder,
        url=url,
        key=key,
        say=say,
        sessions=sessions,
        seconds=seconds,
        seed=seed,
        progress=progress,
        rate=rate,
    )
