"""``holdfast cluster-demo``: several servers on one PostgreSQL, one of which fails every few seconds, under load."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from holdfast import ids
from holdfast.cli.exit_codes import Exit, exit_of
from holdfast.cli.options import Json
from holdfast.cli.output import note, say, say_error, say_json
from holdfast.cli.storm_report import StormProgress, report_figures, say_report, sigterm_interrupts
from holdfast.clock import system_clock
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.proof.checker.judgement import Report
    from holdfast.proof.checker.takeovers import ClusterFigures
    from holdfast.proof.storm.cluster import ClusterCounts

__all__ = ["cluster_demo"]

_LEASE_S = 3.0
_SESSIONS = 16
_FAULTS_IN_LINE = 5
_INDENT = "\n" + 22 * " "
_EXTRA_S = 25.0
"""For the estimate: the time of everything besides the faults."""


def cluster_demo(
    seconds: Annotated[float, typer.Option("--seconds", help="Inject faults for this many seconds.", min=0.1)] = 60.0,
    nodes: Annotated[int, typer.Option("--nodes", help="Number of servers.", min=2, max=9)] = 3,
    seed: Annotated[int | None, typer.Option("--seed", help="Random seed (default: random).")] = None,
    nats: Annotated[
        bool, typer.Option("--nats/--no-nats", help="Notify over a NATS server, or over PostgreSQL.")
    ] = True,
    json: Json = False,
) -> Exit:
    """Test a cluster of servers under load and faults. Exit with 1 if a promise is broken."""
    from holdfast.proof.storm.postgres_server import check_installed

    began = system_clock.monotonic()
    seed = int(ids.node_id()[-7:], 16) if seed is None else seed
    try:
        check_installed()
        servers = "one PostgreSQL and one NATS server" if nats else "one PostgreSQL"
        note(f"cluster-demo: seed {seed}; about {seconds + _EXTRA_S:.0f} s: {nodes} nodes on {servers}")
        with sigterm_interrupts():
            report, figures, counts = _demonstrate(seconds, nodes, seed, nats=nats)
    except HoldfastError as error:
        say_error(error, as_json=json)
        return exit_of(error)
    except KeyboardInterrupt:
        note("cluster-demo: interrupted; no verdict")
        return Exit.INTERRUPTED
    passed = report.passed and not counts.broken_live
    if json:
        said = report_figures(report, seed=seed, seconds=system_clock.monotonic() - began)
        cluster = {**msgspec.to_builtins(figures), **msgspec.to_builtins(counts)}
        say_json({**said, "passed": passed, "nodes": nodes, "lease_s": _LEASE_S, "cluster": cluster})
    else:
        _say_closing(report, figures, counts)
        say_report(report)
    return Exit.OK if passed else Exit.FAILED


def _demonstrate(seconds: float, nodes: int, seed: int, *, nats: bool) -> tuple[Report, ClusterFigures, ClusterCounts]:
    """Run the storm and judge it. If it does not pass, its history is kept in a folder, whose path is printed."""
    from holdfast.proof.checker.facts import Facts
    from holdfast.proof.checker.judgement import judge_facts
    from holdfast.proof.checker.takeovers import cluster_figures
    from holdfast.proof.history import write_history
    from holdfast.proof.storm.cluster import cluster_storm
    from holdfast.proof.storm.recorder import StormRecorder

    recorder = StormRecorder()
    folder = Path(tempfile.mkdtemp(prefix="holdfast-storm-"))
    keep = False
    try:
        work = cluster_storm(
            recorder,
            folder=folder,
            nodes=nodes,
            sessions=_SESSIONS,
            seconds=seconds,
            lease_s=_LEASE_S,
            seed=seed,
            progress=StormProgress(),
            nats=nats,
        )
        counts = asyncio.run(work)
        note(f"judging {len(recorder.records):,} records")
        facts = Facts(recorder.records)
        report = judge_facts(facts)
        keep = not report.passed or bool(counts.broken_live)
        return report, cluster_figures(facts), counts
    except Exception:
        keep = bool(recorder.records)
        raise
    finally:
        if keep:
            write_history(folder / "history.jsonl", recorder.records)
            note(f"kept in {folder}: history.jsonl (for 'holdfast storm --check'), and the logs of the servers")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _say_closing(report: Report, figures: ClusterFigures, counts: ClusterCounts) -> None:
    overlapping = report.of("P4").broken
    faults = [f"{times} × {fault}" for fault, times in counts.faults.items()]
    lines = [", ".join(faults[first : first + _FAULTS_IN_LINE]) for first in range(0, len(faults), _FAULTS_IN_LINE)]
    say(f"faults                {(',' + _INDENT).join(lines)}")
    say(f"messages accepted     {figures.accepted:,}")
    say(f"lost                  {figures.lost}")
    say(f"doubled               {figures.doubled}")
    say(f"overlapping           {overlapping}")
    say(f"runs taken over       {figures.takeovers}, the longest in {figures.longest_takeover_s:.2f} s")
    say(f"                      (bound: {_LEASE_S + 1:g} s, the lease and a second)")
    say(f"stale writes refused  {counts.stale_writes_refused}")
    for broken in counts.broken_live:
        say(f"BROKEN while it ran   {broken}")
    say("")
