"""Killed at any failpoint, the store has all that was answered, nothing by halves, and goes on."""

import asyncio
import json
import pathlib
import signal
import sqlite3
import subprocess
import sys

import pytest

from holdfast import failpoints
from holdfast.errors import ConfigurationError
from holdfast.storage import SqliteStore
from tests.storage.audit import audit, audit_file, recover

POINTS = [name for name in failpoints.names() if name.startswith("sqlite.")]


@pytest.fixture(scope="module")
def crashed(tmp_path_factory):
    """The folder of all databases that were left behind, and how each child ended, by failpoint."""
    folder = tmp_path_factory.mktemp("crashed")
    load = pathlib.Path(__file__).with_name("crash_load.py")
    output = subprocess.run(
        [sys.executable, str(load), str(folder)], stdout=subprocess.PIPE, text=True, timeout=110, check=True
    ).stdout
    return folder, dict(line.split() for line in output.splitlines())


@pytest.mark.parametrize("name", POINTS)
def test_a_kill_at_a_failpoint_loses_nothing_and_leaves_no_halves(crashed, name):
    folder, ends = crashed
    assert int(ends[name]) == signal.SIGKILL, "the load did not pass this failpoint"
    path = folder / f"{name}.db"
    answers = [json.loads(line) for line in (folder / f"{name}.answers").read_text().splitlines()]

    async def main():
        async with asyncio.timeout(30):
            store = SqliteStore(str(path))
            await store.open(node_id="n_after", at=1000.0)
            audit_file(path)
            logs = await audit(store)
            deleted = {view.key for view in await store.sessions(principal="p", limit=99) if view.state == "deleted"}
            known = {}
            grants = {}
            for answer in answers:
                if "schedule" in answer:
                    known[answer["schedule"]] = answer["fired"]
                    continue
                if "grant" in answer:
                    grants[answer["grant"]] = answer["state"]
                    continue
                if "attachment" in answer:
                    stored = await store.attachment("p", answer["attachment"])
                    if (
                        answer["attachment"] == "used" or ".checkpoint." not in name
                    ):  # a checkpoint may be after a prune
                        assert (stored is None) == (answer["attachment"] == "unused" and ".prune.after" in name)
                    continue
                log = {event.seq: event for event in logs["p", answer["key"]]}
                for seq, kind, body in answer["events"]:
                    if answer["key"] in deleted and seq not in log:  # a deletion takes the events before it along
                        assert seq < max(log)
                        continue
                    assert log[seq].kind == kind
                    assert log[seq].body.decode() == body
            await audit_schedules(store, known, logs)
            held = {grant.grant_id for grant in await store.grants("p")}
            for grant_id, state in grants.items():
                assert state == "ending" or (grant_id in held) == (state == "granted"), "a grant is lost or comes back"
            await recover(store, at=2000.0)
            await audit(store)
            await store.close()
            audit_file(path)

    asyncio.run(main())
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


async def audit_schedules(store, known, logs):
    """No schedule that was answered for is lost, none comes back, and each tick has its one message or was refused."""
    views = {view.schedule_id: view for view in await store.schedules(principal="p", limit=9)}
    for schedule_id, fired in known.items():
        if schedule_id != "gone" or fired is None:
            assert (schedule_id in views) == (fired is not None)
    ticks = views.get("ticks")
    if ticks is None:
        return
    accepted = [event for event in logs.get(("p", "timed"), ()) if event.kind == "message.accepted"]
    answered = known.get("ticks", 0)
    assert answered <= ticks.fired <= answered + 1, "what was answered is there, and what was on its way"
    assert len(accepted) == ticks.fired, "a tick that counts as fired has its message, and every message its tick"
    assert ticks.next_at == 100.0 + 10.0 * (ticks.fired + ticks.refused)


def test_every_write_path_and_the_checkpoints_have_four_failpoints():
    verbs = {name.split(".")[1] for name in POINTS}
    assert verbs == {
        "open", "send", "claim", "append", "commit_run", "interrupt", "stop_session", "withdraw", "delete_session",
        "rescue", "restart", "prune", "add_key", "revoke_key", "steer", "suspend", "answer", "park", "edit_history",
        "add_attachment", "put_schedule", "pause_schedule", "delete_schedule", "fire_schedule", "revoke_grant",
        "merge", "checkpoint",
    }  # fmt: skip
    assert len(POINTS) == 4 * len(verbs)


def test_a_failpoint_in_process_raises_at_its_nth_hit_only():
    name = POINTS[0]
    with failpoints.arm(name, error=ValueError("now"), nth=2):
        failpoints.hit("test.other")
        failpoints.hit(name)
        with pytest.raises(ValueError, match="now"):
            failpoints.hit(name)
        failpoints.hit(name)
        assert failpoints.armed() == name
    failpoints.hit(name)
    with pytest.raises(ConfigurationError), failpoints.arm("no.such.point", error=None):
        pass


@pytest.mark.parametrize(("value", "killed"), [("test.point:2", True), ("test.point:3", False), ("test.other", False)])
def test_a_failpoint_in_the_environment_kills_the_process(value, killed):
    code = "from holdfast import failpoints as f; f.register('test.point'); f.hit('test.point'); f.hit('test.point')"
    ended = subprocess.run([sys.executable, "-c", code], env={failpoints.VARIABLE: value}, timeout=30, check=False)
    assert (ended.returncode == -signal.SIGKILL) == killed


def test_a_nonsense_failpoint_in_the_environment_is_named():
    code = "import holdfast.failpoints"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={failpoints.VARIABLE: "x:none"},
        timeout=30,
        check=False,
        capture_output=True,
        text=True,
    )
    assert "x:none" in ended.stderr
