"""``holdfast storm``: load with double texts, interrupts, disconnects and kills, and a verdict on each promise."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from holdfast import ids
from holdfast.cli.exit_codes import Exit, exit_of
from holdfast.cli.options import Json, Key
from holdfast.cli.output import note, say, say_error, say_json, say_table
from holdfast.clock import system_clock
from holdfast.errors import ConfigurationError, HoldfastError

if TYPE_CHECKING:
    from holdfast.proof.checker.judgement import Report
    from holdfast.proof.history import Record
    from holdfast.proof.storm.recorder import StormRecorder

__all__ = ["Storm", "run_storm", "storm"]

_PROGRESS_S = 1.0
_SHOWN = 3
_NEMESIS_SESSIONS = 12


class Storm(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a storm.

    Parameters:
        sessions: number of sessions.
        seconds: duration of the storm, in seconds.
        kill_every_s: interval in seconds at which to kill a server process that the storm starts; None kills none.
        url: URL of an existing server to test; None means that the storm runs its own host.
        key: API key for the server at `url`.
        say: start of each message to the agent, with `url` or `agents`.
        seed: random seed; None chooses a new seed.
        rate: actions per second; None means a rate that suits a small machine.
        history: path of the file to write the history to.
        hostile: whether to add a hostile principal, which requires a server that the storm starts.
        check: path of a saved history to judge; if given, no storm is run.
        nemesis: faults to inject into servers that the storm starts; None injects no faults.
        agents: agents that servers serve with `nemesis`, each as ``module:name``; empty means the storm's agent.
        connections: number of connections to open and drop with `nemesis`.
        write_docs: whether to write the docs page with `nemesis`.
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
    write_docs: bool = False
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
        str, typer.Option("--say", help="With --url or --agent: start of each message to the agent.")
    ] = "stream 10",
    nemesis: Annotated[
        str | None,
        typer.Option(
            "--nemesis",
            metavar="all|FAULT,...",
            help="Inject faults into servers that it starts: kill, disk-full, disk-slow, read-only, clock, signals, "
            "readers, connections.",
        ),
    ] = None,
    agents: Annotated[
        list[str] | None,
        typer.Option("--agent", metavar="MODULE:NAME", help="With --nemesis: test your own agent (repeatable)."),
    ] = None,
    connections: Annotated[
        int, typer.Option("--connections", help="With --nemesis: number to open and drop.", min=1, max=1_000_000)
    ] = 10_000,
    write_docs: Annotated[
        bool,
        typer.Option("--write-docs", help="With --nemesis: write docs/measured/nemesis.md (run in the source tree)."),
    ] = False,
    hostile: Annotated[
        bool,
        typer.Option("--hostile", help="Add a hostile user who floods, does not read, and streams with revoked keys."),
    ] = False,
    seed: Annotated[int | None, typer.Option("--seed", help="Random seed (default: random).")] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Actions per second across all sessions.", min=0.1)
    ] = None,
    history: Annotated[
        str | None, typer.Option("--history", help="Save the history to this file; with --nemesis, a folder.")
    ] = None,
    check: Annotated[str | None, typer.Option("--check", help="Only check this saved history again.")] = None,
    json: Json = False,
) -> Exit:
    """Test the promises under load: double texts, interrupts, disconnects, kills. Exit 1 if one is broken."""
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
            write_docs=write_docs,
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
        say_json(_figures(report, seed=None if asked.check else seed, seconds=system_clock.monotonic() - began))
    else:
        _say_report(report)
    return Exit.OK if report.passed else Exit.FAILED


def _stormed(asked: Storm, seed: int) -> Report:
    """Run the storm and return the report.

    If the storm does not pass, its stores and history are kept in a folder, and the folder's path is printed.
    """
    from holdfast.proof.history import write_history
    from holdfast.proof.storm.recorder import StormRecorder

    if asked.history is not None:
        _touch(Path(asked.history))
    note(f"storm: seed {seed}")
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
        raise ConfigurationError("--check judges a saved history", hint="omit --url and --kill-every")
    if asked.hostile and (asked.url is not None or asked.check is not None or asked.nemesis is not None):
        raise ConfigurationError(
            "--hostile attacks a server of the storm's own", hint="omit --url, --check and --nemesis"
        )
    if asked.nemesis is not None and (asked.kill_every_s is not None or asked.url or asked.check is not None):
        raise ConfigurationError("--nemesis starts servers of its own", hint="omit --url, --check and --kill-every")
    if asked.nemesis is None and (asked.agents or asked.write_docs):
        raise ConfigurationError("--agent and --write-docs require --nemesis", hint="add --nemesis all")
    if asked.url is not None and asked.kill_every_s is not None:
        raise ConfigurationError(
            "--kill-every kills a server of the storm's own, not the one at --url", hint="omit one of them"
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
    return nemesis(
        names, ask, as_json=asked.as_json, write=asked.write_docs, history=asked.history, progress=_Progress()
    )


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

    progress = _Progress()
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


class _Progress:
    """Printer of progress on stderr; a line that differs only in its figures is printed at most once a second."""

    def __init__(self) -> None:
        self._began = system_clock.monotonic()
        self._last = ("", 0.0)

    def __call__(self, text: str) -> None:
        now = system_clock.monotonic()
        kind = "".join(character for character in text if not character.isdigit())
        if kind == self._last[0] and now - self._last[1] < _PROGRESS_S:
            return
        self._last = (kind, now)
        note(f"{now - self._began:6.1f} s  {text}")


def _figures(report: Report, *, seed: int | None, seconds: float) -> dict[str, object]:
    return {
        "passed": report.passed,
        "seed": seed,
        "seconds": round(seconds, 1),
        "records": report.records,
        "promises": list(report.judgements),
        "failpoints": {
            "registered": len(report.failpoints),
            "hit": sum(report.failpoints.values()),
            "missed": sorted(name for name, hit in report.failpoints.items() if not hit),
        },
        "hostile": list(report.hostile),
    }


def _rows(report: Report) -> Iterable[tuple[str, str, str, str]]:
    for judgement in report.judgements:
        verdict: str = judgement.verdict
        if judgement.broken:
            verdict = f"BROKEN {judgement.broken} times"
        elif not judgement.passed:
            verdict = "NOT OBSERVED"
        elif judgement.verdict == "not observed":
            verdict = "not observed (not visible here)"
        yield judgement.promise, judgement.name, f"{judgement.observations:,}", verdict


def _say_report(report: Report) -> None:
    say_table(("", "promise", "observations", "verdict"), _rows(report))
    for judgement in report.judgements:
        for violation in judgement.violations[:_SHOWN]:
            say(f"\n{judgement.promise}: {violation.what}")
            for evidence in violation.evidence:
                say(f"    {evidence}")
    if report.failpoints:
        missed = sorted(name for name, hit in report.failpoints.items() if not hit)
        say(f"\nfailpoints: {len(report.failpoints) - len(missed)} of {len(report.failpoints)} were hit")
        for name in missed:
            say(f"    NOT HIT {name}")
    if report.hostile:
        say("\nthe hostile principal")
        say_table(
            ("act", "done", "felt", "refused"),
            (
                (act.name, f"{act.did:,}", f"{act.felt:,}" if act.felt else "NOT FELT", f"{act.refused:,}")
                for act in report.hostile
            ),
        )
    say("\nevery promise was kept" if report.passed else "\nnot every promise was kept")
