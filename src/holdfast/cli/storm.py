"""``holdfast storm``: load a host with messages, interrupts, disconnects and kills, and judge each promise."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from holdfast import ids
from holdfast.cli.exit_codes import Exit, exit_of
from holdfast.cli.options import Json, Key
from holdfast.cli.output import note, say_error, say_json
from holdfast.cli.storm_report import StormProgress, report_figures, say_report, sigterm_interrupts
from holdfast.clock import system_clock
from holdfast.errors import ConfigurationError, HoldfastError

if TYPE_CHECKING:
    from holdfast.proof.checker.judgement import Report
    from holdfast.proof.history import Record
    from holdfast.proof.storm.recorder import StormRecorder

__all__ = ["Storm", "run_storm", "storm"]

_NEMESIS_SESSIONS = 12
_FAILPOINT_S = 1.0
_EMBEDDED_EXTRA_S = 25.0
_KILLS_EXTRA_S = 15.0
_REMOTE_EXTRA_S = 5.0
"""For the estimate: the time of one failpoint, and of everything besides the load and the random kills."""


class Storm(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a storm.

    Parameters:
        sessions: number of sessions.
        seconds: duration of the storm, in seconds.
        kill_every_s: interval at which to kill the server that the storm starts, in seconds; None starts no server.
        url: URL of an existing server to test; None means that the storm starts its own host or server.
        key: API key for the server at `url`.
        say: text that each message to the agent begins with; used only with `url` or `agents`.
        seed: random seed; None chooses a new seed.
        rate: actions per second; None means a rate that suits a small machine.
        history: path of the file to write the history to; with `nemesis`, path of a folder.
        hostile: whether to add a hostile principal; not possible with `url`, `check` or `nemesis`.
        check: path of a saved history to judge; if given, no storm is run.
        nemesis: faults to inject into servers that the storm starts; None injects no faults.
        agents: agents to serve with `nemesis`, each as ``module:name``; if empty, the storm's own agents are served.
        connections: number of connections to open and drop with `nemesis`.
        as_json: whether to print the figures as one JSON value.
    """

    sessions: int = 200
    seconds: float = 60.0
    kill_every_s: float | None = None
    url: str | None = None
    key: str | None = None
    say: str = "stream 10"
    seed: int | None = None
    rate: float | None = None
    history: str | None = None
    hostile: bool = False
    check: str | None = None
    nemesis: str | None = None
    agents: tuple[str, ...] = ()
    connections: int = 10_000
    as_json: bool = False


def storm(
    sessions: Annotated[int, typer.Option("--sessions", help="Number of sessions to drive.", min=1, max=10_000)] = 200,
    seconds: Annotated[float, typer.Option("--seconds", help="Duration, in seconds.", min=0.1)] = 60.0,
    kill_every: Annotated[
        float | None,
        typer.Option(
            "--kill-every", help="Start a server; kill it once at every failpoint, then about every S seconds.", min=0.2
        ),
    ] = None,
    url: Annotated[str | None, typer.Option("--url", help="Target this server instead of an embedded host.")] = None,
    key: Key = None,
    say: Annotated[
        str, typer.Option("--say", help="With --url or --agent: text that each message begins with.")
    ] = "stream 10",
    nemesis: Annotated[
        str | None,
        typer.Option(
            "--nemesis",
            metavar="all|FAULT,...",
            help="Start servers and inject faults into them: kill, disk-full, disk-slow, read-only, clock, signals, "
            "readers, connections.",
        ),
    ] = None,
    agents: Annotated[
        list[str] | None,
        typer.Option("--agent", metavar="MODULE:NAME", help="With --nemesis: test your own agent (repeatable)."),
    ] = None,
    connections: Annotated[
        int, typer.Option("--connections", help="With --nemesis: connections to open and drop.", min=1, max=1_000_000)
    ] = 10_000,
    hostile: Annotated[
        bool,
        typer.Option(
            "--hostile",
            help="Add a hostile user who floods, throws bombs, does not read, and streams with revoked keys.",
        ),
    ] = False,
    seed: Annotated[int | None, typer.Option("--seed", help="Random seed (default: random).")] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Actions per second across all sessions.", min=0.1)
    ] = None,
    history: Annotated[
        str | None, typer.Option("--history", help="File to save the history to; with --nemesis, a folder.")
    ] = None,
    check: Annotated[str | None, typer.Option("--check", help="Judge this saved history; run no storm.")] = None,
    json: Json = False,
) -> Exit:
    """Test the promises under load, interrupts and kills. Exit 1 if one is broken."""
    return run_storm(
        Storm(
            sessions=sessions,
            seconds=seconds,
            kill_every_s=kill_every,
            url=url,
            key=key,
            say=say,
            seed=seed,
            rate=rate,
            history=history,
            hostile=hostile,
            check=check,
            nemesis=nemesis,
            agents=tuple(agents or ()),
            connections=connections,
            as_json=json,
        )
    )


def run_storm(asked: Storm) -> Exit:
    """Run a storm or judge a saved history, print the report, and return the exit code.

    The exit code is 1 if a promise was broken or not observed, or if a failpoint was not hit.
    """
    began = system_clock.monotonic()
    seed = int(ids.node_id()[-7:], 16) if asked.seed is None else asked.seed
    try:
        _check(asked)
        with sigterm_interrupts():
            if asked.nemesis is not None:
                return _run_nemesis(asked, asked.nemesis, seed)
            report = _judged(_read(asked.check)) if asked.check is not None else _stormed(asked, seed)
    except HoldfastError as error:
        say_error(error, as_json=asked.as_json)
        return exit_of(error)
    except KeyboardInterrupt:
        note("storm: interrupted; no verdict")
        return Exit.INTERRUPTED
    if asked.as_json:
        say_json(report_figures(report, seed=None if asked.check else seed, seconds=system_clock.monotonic() - began))
    else:
        say_report(report)
    return Exit.OK if report.passed else Exit.FAILED


def _stormed(asked: Storm, seed: int) -> Report:
    """Run the storm and return the report.

    If the storm does not pass, its stores and history are kept in a folder, and the folder's path is printed.
    """
    from holdfast.proof.history import write_history
    from holdfast.proof.storm.recorder import StormRecorder

    if asked.history is not None:
        _touch(Path(asked.history))
    note(f"storm: seed {seed}; {_plan(asked)}")
    recorder = StormRecorder()
    folder = Path(tempfile.mkdtemp(prefix="holdfast-storm-"))
    keep = False
    try:
        try:
            embedded = asked.url is None and asked.kill_every_s is None
            _run(_conduct(asked, seed, recorder, folder), as_served=embedded)
        finally:
            if asked.history is not None:
                write_history(Path(asked.history), recorder.records)
        report = _judged(recorder.records)
        keep = not report.passed
        return report
    except Exception:
        keep = any(folder.iterdir())
        raise
    finally:
        if keep:
            write_history(folder / "history.jsonl", recorder.records)
            note(f"kept in {folder}: history.jsonl (for --check), and the stores and logs of the storm's servers")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _plan(asked: Storm) -> str:
    """Return what the storm is going to do, and about how long that takes."""
    if asked.url is not None:
        return f"about {asked.seconds + _REMOTE_EXTRA_S:.0f} s: {asked.seconds:g} s of load, then the checks"
    if asked.kill_every_s is None:
        estimate_s = asked.seconds + _EMBEDDED_EXTRA_S
        return f"about {estimate_s:.0f} s: {asked.seconds:g} s of load, then kills of a small server, then the checks"
    from holdfast.proof.storm.killing import registered_failpoints

    failpoints = len(registered_failpoints())
    estimate_s = failpoints * _FAILPOINT_S + asked.seconds + _KILLS_EXTRA_S
    return (
        f"about {estimate_s:.0f} s: {failpoints} failpoints, then {asked.seconds:g} s of random kills, then the checks"
    )


def _touch(path: Path) -> None:
    """Check before a long run that a file is writable. Raises `ConfigurationError` if it is not."""
    try:
        path.touch()
        with path.open("r+b"):
            return
    except OSError as error:
        raise ConfigurationError(
            f"{path} is not writable: {error.strerror}", hint="name a file in an existing folder"
        ) from None


def _judged(records: Sequence[Record]) -> Report:
    from holdfast.proof.checker.judgement import judge

    note(f"judging {len(records):,} records")
    return judge(records)


def _check(asked: Storm) -> None:
    if asked.check is not None and (asked.kill_every_s is not None or asked.url is not None):
        raise ConfigurationError("--check runs no storm: it judges a saved history", hint="omit --url and --kill-every")
    if asked.hostile and (asked.url is not None or asked.check is not None or asked.nemesis is not None):
        raise ConfigurationError(
            "--hostile attacks only a host or server that the storm starts", hint="omit --url, --check and --nemesis"
        )
    if asked.nemesis is not None and (asked.kill_every_s is not None or asked.url or asked.check is not None):
        raise ConfigurationError("--nemesis starts its own servers", hint="omit --url, --check and --kill-every")
    if asked.nemesis is None and asked.agents:
        raise ConfigurationError("--agent requires --nemesis", hint="add --nemesis all")
    if asked.url is not None and asked.kill_every_s is not None:
        raise ConfigurationError(
            "--kill-every kills a server that the storm starts, not the server at --url", hint="omit one of them"
        )


def _run_nemesis(asked: Storm, names: str, seed: int) -> Exit:
    from holdfast.cli.nemesis import nemesis
    from holdfast.proof.nemesis import EpisodePlan

    ask = EpisodePlan(
        sessions=min(asked.sessions, _NEMESIS_SESSIONS),
        connections=asked.connections,
        seed=seed,
        agents=asked.agents,
        say=asked.say,
    )
    return nemesis(names, ask, as_json=asked.as_json, history=asked.history, progress=StormProgress())


def _read(path: str) -> list[Record]:
    from holdfast.proof.history import Opened, read_history

    try:
        records = list(read_history(Path(path)))
    except OSError as error:
        raise ConfigurationError(f"{path} is not readable: {error.strerror}", hint="name a saved history") from None
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{path} is not a history: {error}", hint="name a file that --history wrote") from None
    if not any(isinstance(record, Opened) for record in records):
        raise ConfigurationError(f"{path} has no opening record", hint="name a file that --history wrote")
    return records


def _conduct(asked: Storm, seed: int, recorder: StormRecorder, folder: Path) -> Coroutine[None, None, None]:
    from holdfast.proof.storm import runner

    progress = StormProgress()
    if asked.url is not None:
        return runner.conduct_remote(
            recorder,
            url=asked.url,
            key=asked.key,
            say=asked.say,
            sessions=asked.sessions,
            seconds=asked.seconds,
            seed=seed,
            progress=progress,
            rate=asked.rate,
        )
    if asked.kill_every_s is not None:
        return runner.conduct_kills(
            recorder,
            sessions=asked.sessions,
            seconds=asked.seconds,
            kill_every_s=asked.kill_every_s,
            seed=seed,
            progress=progress,
            rate=asked.rate,
            folder=folder,
            hostile=asked.hostile,
        )
    return runner.conduct_embedded(
        recorder,
        sessions=asked.sessions,
        seconds=asked.seconds,
        seed=seed,
        progress=progress,
        rate=asked.rate,
        folder=folder,
        hostile=asked.hostile,
    )


def _run(work: Coroutine[None, None, None], *, as_served: bool) -> None:
    """Run a storm on a new event loop; with `as_served`, on the kind of loop that a server uses."""
    factory = None
    if as_served and sys.platform == "linux":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(work)
