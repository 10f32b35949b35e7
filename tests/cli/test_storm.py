"""The storm keeps every promise over each kind of host, leaves nothing behind, and its command says how it went."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import ids
from holdfast.cli import storm as storm_command
from holdfast.cli.exit_codes import Exit
from holdfast.cli.storm import Storm
from holdfast.client import Client
from holdfast.errors import ServerUnreachable
from holdfast.proof.checker.judgement import Report, judge
from holdfast.proof.history import (
    FailpointHit,
    HoldingRead,
    HostileAct,
    HostileActed,
    HostKilled,
    Opened,
    Record,
    SendAcknowledged,
    SendAttempted,
    StreamRevoked,
    read_history,
    write_history,
)
from holdfast.proof.limits import Limits
from holdfast.proof.storm.bombs import BOMBS
from holdfast.proof.storm.bounds import HOSTILE
from holdfast.proof.storm.hostile import ACTS
from holdfast.proof.storm.recorder import StormRecorder
from holdfast.proof.storm.runner import conduct_kills, conduct_remote
from holdfast.proof.storm.server import OwnServer, free_port
from holdfast.proof.storm.stamps import MARKER
from holdfast.proof.storm.wall_probe import can_build_walls
from holdfast.settings import Settings
from tests.cli.processes import HOLDFAST, LIMIT_S, clean_environment
from tests.proof.nemesis.storms import run_storm, sockets_may_be_left

BOUND_S = 230.0
pytestmark = pytest.mark.timeout(BOUND_S + 10)


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(BOUND_S):
            await work

    run_storm(bounded())


def told(report: Report) -> list[object]:
    return [(j.promise, v.what, v.evidence) for j in report.judgements for v in j.violations]


def expected_acts() -> set[str]:
    """Where programs run without walls, no bombs are thrown."""
    return {name for name in ACTS if can_build_walls() or name not in {bomb.name for bomb in BOMBS}}


def quietly(text: str) -> None:
    """Progress that nobody wants to see."""


@contextmanager
def nothing_left() -> Iterator[None]:
    """Inside the block, no folder and no process of a storm is left behind."""
    with tempfile.TemporaryDirectory() as own, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", own)
        yield
        assert [name for name in os.listdir(own) if name.startswith("holdfast-storm-")] == []
    assert marked() == []


def marked() -> list[int]:
    """Processes below this one that carry a storm's marker."""
    import psutil

    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if MARKER in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_a_small_storm_over_an_embedded_host_keeps_every_promise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "history.jsonl"
    with nothing_left(), sockets_may_be_left():
        code = storm_command.run_storm(Storm(sessions=12, seconds=2.0, seed=7, history=str(kept), as_json=True))
    figures = msgspec.json.decode(capsys.readouterr().out)
    assert [(p["promise"], p["violations"]) for p in figures["promises"] if p["verdict"] != "kept"] == []
    assert all(promise["observations"] > 0 for promise in figures["promises"])
    assert figures["passed"] is True
    assert code == Exit.OK
    assert storm_command.run_storm(Storm(check=str(kept), as_json=True)) == Exit.OK
    again = msgspec.json.decode(capsys.readouterr().out)
    assert again["promises"] == figures["promises"]


def test_a_storm_that_fails_keeps_its_stores_and_its_history_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def conduct(recorder: StormRecorder, *, folder: Path, seed: int, **_: object) -> None:
        (folder / "storm.db").write_text("a store")
        recorder.note(Opened, seed=seed, mode="kill", sees=("clients",), limits=Limits())

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("holdfast.proof.storm.runner.conduct_kills", conduct)
    assert storm_command.run_storm(Storm(kill_every_s=1.0, seed=7)) == Exit.FAILED
    (kept,) = tmp_path.iterdir()
    assert str(kept) in capsys.readouterr().err
    assert (kept / "storm.db").exists()
    assert storm_command.run_storm(Storm(check=str(kept / "history.jsonl"))) == Exit.FAILED


def test_a_storm_that_breaks_off_keeps_what_its_server_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def conduct(recorder: StormRecorder, *, folder: Path, **_: object) -> None:
        (folder / "stderr").write_text("it fell")
        raise ServerUnreachable("the storm's server does not answer: it fell")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("holdfast.proof.storm.runner.conduct_kills", conduct)
    assert storm_command.run_storm(Storm(kill_every_s=1.0, seed=7)) == Exit.UNREACHABLE
    (kept,) = tmp_path.iterdir()
    assert str(kept) in capsys.readouterr().err
    assert (kept / "stderr").exists()


def test_kills_at_failpoints_and_at_random_lose_nothing() -> None:
    points = ("sqlite.commit_run.before_commit", "sqlite.restart.before_write")
    recorder = StormRecorder()
    with nothing_left():
        run(conduct_kills(recorder, sessions=6, seconds=1.0, kill_every_s=0.5, seed=3, points=points, progress=quietly))
    report = judge(recorder.records)
    assert told(report) == []
    assert dict(report.failpoints) == dict.fromkeys(points, True)
    assert sum(isinstance(record, HostKilled) for record in recorder.records) > len(points)
    assert [j.promise for j in report.judgements if j.verdict != "kept"] == []


def test_a_hostile_principal_is_felt_and_every_promise_is_kept_for_the_others() -> None:
    recorder = StormRecorder()
    with nothing_left():
        run(
            conduct_kills(
                recorder, sessions=4, seconds=1.0, kill_every_s=0.5, seed=5, points=(), progress=quietly, hostile=True
            )
        )
    report = judge(recorder.records)
    assert told(report) == []
    assert [act for act in report.hostile if not act.felt] == []
    assert {act.name for act in report.hostile} == expected_acts()
    assert report.bombs is can_build_walls()
    assert [record.moment for record in recorder.records if isinstance(record, HoldingRead)].count("after") == 1
    assert any(isinstance(record, StreamRevoked) and record.ended for record in recorder.records)
    own = [record for record in recorder.records if isinstance(record, SendAttempted) and record.principal == HOSTILE]
    assert own


@pytest.mark.parametrize("walls", [True, False])
def test_a_storm_says_where_no_bombs_are_thrown(
    walls: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def kill_storm(recorder: StormRecorder, **_: object) -> None:
        acts = expected_acts() if walls else {name for name in ACTS if "bombs" not in name}
        recorder.note(HostileActed, acts=tuple(HostileAct(name=name, did=1, felt=1) for name in acts))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("holdfast.proof.storm.runner.can_build_walls", lambda: walls)
    monkeypatch.setattr("holdfast.proof.storm.runner.kill_storm", kill_storm)
    storm_command.run_storm(Storm(kill_every_s=1.0, seed=7, hostile=True))
    out = capsys.readouterr().out
    assert ("bombs: NOT THROWN" in out) is not walls
    assert ("no bomb was thrown" in out) is walls


def test_a_storm_over_a_url_demands_only_what_can_be_seen_and_leaves_no_session(tmp_path: Path) -> None:
    settings = Settings(port=free_port(), store=f"sqlite:///{tmp_path / 'own.db'}")

    recorder = StormRecorder()

    async def work() -> None:
        demo = ("holdfast.agents.demo:agent",)
        server = OwnServer(tmp_path, StormRecorder(), Limits(), ids.node_id(), settings, agents=demo)
        assert await server.start()
        try:
            await conduct_remote(
                recorder, url=server.url, key=None, say="stream 10", sessions=6, seconds=2.0, seed=1, progress=quietly
            )
            async with Client(server.url) as client:
                left = [view for view in await client.sessions(everybody=True) if view.state != "deleted"]
            assert left == []
        finally:
            await server.end()

    run(work())
    report = judge(recorder.records)
    assert told(report) == []
    unseen = [j.promise for j in report.judgements if j.verdict == "not observed"]
    assert set(unseen) >= {"P1", "P11", "P12", "P13"}
    assert [j.promise for j in report.judgements if not j.passed] == []


def test_a_url_where_nothing_answers_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with nothing_left():
        code = storm_command.run_storm(Storm(url=f"http://127.0.0.1:{free_port()}", sessions=1, seconds=0.1))
    assert code == Exit.UNREACHABLE
    assert "holdfast serve" in capsys.readouterr().err


def test_a_kept_history_that_breaks_a_promise_is_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "history.jsonl"
    records: list[Record] = [
        Opened(at=1.0, seed=1, mode="url", sees=("clients",), failpoints=("sqlite.send.before_write",)),
        SendAttempted(at=2.0, token="t1", principal="ann", session="s", idempotency_key="k", content="hello"),
        SendAcknowledged(at=3.0, token="t1", message_id="m_1", seq=1, disposition="started", cursor=0),
    ]
    write_history(kept, records)
    assert list(read_history(kept)) == records
    assert storm_command.run_storm(Storm(check=str(kept))) == Exit.FAILED
    out = capsys.readouterr().out
    assert "P5" in out
    assert "BROKEN" in out
    assert "its session has no log" in out
    assert "NOT HIT sqlite.send.before_write" in out
    assert "NOT OBSERVED" in out


@pytest.mark.parametrize("text", ["", "{}\n", "not json\n"])
def test_a_file_that_is_no_history_is_a_usage_error(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "history.jsonl"
    kept.write_text(text)
    assert storm_command.run_storm(Storm(check=str(kept))) == Exit.USAGE
    assert str(kept) in capsys.readouterr().err


def test_options_that_exclude_each_other_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert storm_command.run_storm(Storm(url="http://127.0.0.1:1", kill_every_s=1.0)) == Exit.USAGE
    assert storm_command.run_storm(Storm(check="x", kill_every_s=1.0)) == Exit.USAGE
    assert storm_command.run_storm(Storm(check="does-not-exist")) == Exit.USAGE
    for other in (Storm(hostile=True, url="http://127.0.0.1:1"), Storm(hostile=True, nemesis="all")):
        assert storm_command.run_storm(other) == Exit.USAGE
    assert "--hostile" in capsys.readouterr().err


def test_the_command_has_its_options() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from holdfast.cli import main; main()", "storm", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    for option in (
        "--sessions",
        "--seconds",
        "--kill-every",
        "--url",
        "--seed",
        "--history",
        "--check",
        "--hostile",
        "--json",
    ):
        assert option in done.stdout


def test_a_storm_begins_with_its_plan_and_an_estimate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.proof.storm.killing import registered_failpoints

    async def conduct(recorder: StormRecorder, **_: object) -> None:
        recorder.note(Opened, seed=7, mode="kill", sees=("clients",), limits=Limits())

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("conduct_embedded", "conduct_kills", "conduct_remote"):
        monkeypatch.setattr(f"holdfast.proof.storm.runner.{name}", conduct)
    failpoints = len(registered_failpoints())
    plans = {
        Storm(seed=7): "about 85 s: 60 s of load, then kills of a small server, then the checks",
        Storm(seed=7, kill_every_s=5.0, seconds=15.0): (
            f"about {failpoints + 30} s: {failpoints} failpoints, then 15 s of random kills, then the checks"
        ),
        Storm(seed=7, url="http://127.0.0.1:1", seconds=2.0): "about 7 s: 2 s of load, then the checks",
    }
    for asked, plan in plans.items():
        storm_command.run_storm(asked)
        assert capsys.readouterr().err.splitlines()[0] == f"storm: seed 7; {plan}"


@pytest.mark.parametrize("kind", [(), ("--kill-every", "5"), ("--nemesis", "disk-slow")], ids=str)
def test_a_storm_that_gets_sigterm_leaves_no_folder_and_no_process(kind: tuple[str, ...], tmp_path: Path) -> None:
    import psutil

    tmp_path = tmp_path / ("longer than a Unix socket's path may be " * 3)
    tmp_path.mkdir()
    argv = [*HOLDFAST, "storm", "--sessions", "5", "--seconds", "60", "--seed", "7", *kind]
    with subprocess.Popen(
        argv, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=clean_environment(TMPDIR=str(tmp_path))
    ) as storm:
        assert storm.stderr
        said = ""
        for line in storm.stderr:
            said += line
            if " s  " in line:  # the first line of progress: it is at work
                break
        below = psutil.Process(storm.pid).children(recursive=True)
        storm.terminate()
        rest = said + storm.stderr.read()
        assert storm.wait(LIMIT_S) == Exit.INTERRUPTED, rest
    assert "interrupted; no verdict" in rest
    assert [path.name for path in tmp_path.iterdir()] == []
    _, alive = psutil.wait_procs(below, timeout=LIMIT_S)
    assert alive == []


def test_every_failpoint_hit_is_one_that_was_registered() -> None:
    from holdfast.proof.storm.killing import registered_failpoints

    names = registered_failpoints()
    assert names
    assert FailpointHit(at=0.0, incarnation=1, name=names[0]).name in names


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.timeout(1800)
def test_the_storm_of_the_readme_keeps_every_promise(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "holdfast"), "storm", "--sessions", "200", "--seconds", "60"]
    done = subprocess.run(
        [*command, "--kill-every", "5", "--hostile", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == Exit.OK, (done.stderr[-3000:], done.stdout[-3000:])
    report = msgspec.json.decode(done.stdout)
    assert report["passed"]
    assert len(report["promises"]) == 15
    assert {act["name"] for act in report["hostile"]} == expected_acts()
