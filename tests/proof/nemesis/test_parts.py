"""What the nemesis found once stays mended, its disks are what they say, and its command tells what it did."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import sqlite3
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import Host, Run, failpoints
from holdfast.cli import storm as storm_command
from holdfast.cli.exit_codes import Exit
from holdfast.cli.storm import Storm
from holdfast.clock import system_clock
from holdfast.errors import ConfigurationError, HoldfastError, NotSupported, StoreFull, StoreReadOnly
from holdfast.proof.nemesis import FAULTS, EpisodePlan, FaultOutcome, chosen
from holdfast.proof.nemesis.disk import LimitedDisk, SmallDisk, open_disk
from holdfast.proof.nemesis.episode import Tally
from holdfast.proof.nemesis.startup_failure import StartupFailure, read_startup_failure
from holdfast.proof.raw_connection import RawConnection
from holdfast.proof.storm.ack_audit import AckAudit
from holdfast.proof.storm.bounds import LIMITS, SETTINGS
from holdfast.proof.storm.recorder import StormRecorder
from holdfast.proof.storm.server import OwnServer
from holdfast.storage import SqliteStore
from holdfast.storage.port import Send

HOURS_S = 3600.0


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(90):
            await work

    asyncio.run(bounded())


class SetClock:
    """The system's clock, set so far off."""

    off_s = 0.0

    def now(self) -> float:
        return system_clock.now() + self.off_s

    def monotonic(self) -> float:
        return system_clock.monotonic()


async def echo(run: Run) -> None:
    await run.emit(run.text)


# ── found: a clock that is set back ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("restarted", [False, True], ids=["while it runs", "between two starts"])
def test_a_batch_that_collects_is_taken_in_time_when_the_clock_is_set_back(restarted: bool, tmp_path: Path) -> None:
    async def work() -> None:
        clock = SetClock()
        where = f"sqlite:///{tmp_path / 'own.db'}"
        host = Host(echo, store=where, clock=clock)
        await host.start()
        session = host.session("s")
        receipt = await session.send("hello", policy="collect", quiet_s=0.05, max_wait_s=0.1)
        if restarted:
            await host.close()
            host = Host(echo, store=where, clock=clock)
        clock.off_s = -10 * HOURS_S
        if restarted:
            await host.start()
        assert (await host.session("s").wait(receipt.message_id, timeout_s=60)).state == "completed"
        await host.close()

    run(work())


# ── found: a stop that the store could not record ────────────────────────────────────────────────────────────────


def test_a_stop_that_the_store_could_not_take_stands_in_the_log_before_the_end_of_its_run(tmp_path: Path) -> None:
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL

    def passed(name: str) -> None:
        if name == "sqlite.interrupt.before_write":
            raise full

    async def patient(run: Run) -> None:
        await run.interrupt.sleep(60)

    async def work() -> None:
        async with Host(patient, store=f"sqlite:///{tmp_path / 'own.db'}") as host:
            session = host.session("s")
            sent = await session.send("hello")
            with failpoints.attend(passed):
                receipt = await session.interrupt("enough", grace_s=0.1)
            assert receipt.outcome == "gone"
            assert (await session.wait(sent.message_id, timeout_s=60)).state == "interrupted"
            kinds = [event.kind async for event in session.events(follow=sent.message_id)]
            assert kinds[1:] == ["run.started", "run.stopping", "run.finished", "message.settled"]

    run(work())


# ── found: a disk that is full in other words ────────────────────────────────────────────────────────────────────


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def a_send(number: int) -> Send:
    return Send(
        principal="p",
        key=f"k{number}",
        agent=None,
        default_agent="demo",
        message_id=f"m{number}",
        content="x" * 5000,
        policy="queue",
        at=1.0,
        run_id=None,
    )


def test_a_limit_on_the_size_of_files_is_a_full_disk_and_writing_goes_on_once_it_is_gone(tmp_path: Path) -> None:
    async def work() -> None:
        store = SqliteStore(str(tmp_path / "own.db"))
        await store.open(node_id="n", at=1.0)
        try:
            await store.send(a_send(1))
            with files_up_to((tmp_path / "own.db-wal").stat().st_size):
                with pytest.raises(StoreFull) as caught:
                    await store.send(a_send(2))
                assert os.strerror(errno.EFBIG) in caught.value.message
                assert caught.value.hint
            await store.send(a_send(2))
            assert await store.find_session("p", "k2") is not None
        finally:
            await store.close()

    run(work())


# ── what is told ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("said", "refusal"),
    [
        (
            'a warning\n{"error":{"code":"store_full","message":"the disk is full","hint":"make room"}}\nbye',
            StartupFailure(7, "store_full", "the disk is full", "make room"),
        ),
        ('{"error":{"code":"broken","message":"no hint"}}', StartupFailure(7, "broken", "no hint")),
        ('{"error": "store_full"}', StartupFailure(7, "", '{"error": "store_full"}')),
        ("Traceback: store_full", StartupFailure(7, "", "Traceback: store_full")),
        ("", StartupFailure(7, "", "")),
    ],
)
def test_why_a_server_does_not_start_is_read_from_what_it_said(said: str, refusal: StartupFailure) -> None:
    assert read_startup_failure(7, said) == refusal


def test_a_server_that_does_not_start_is_told_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise RuntimeError('not today')")
    code = storm_command.run_storm(Storm(nemesis="readers", agents=("mine:agent",), seed=1))
    told = capsys.readouterr().err
    assert code is Exit.UNREACHABLE
    assert "did not start: cannot import mine: " in told
    assert "mine.py, line 1: RuntimeError: not today\n  fix that module" in told
    assert "{" not in told


def test_what_a_server_said_is_not_taken_for_the_words_of_the_next(tmp_path: Path) -> None:
    async def work() -> None:
        program = "import os, sys; sys.exit(os.environ['SAYS'])"
        server = OwnServer(tmp_path, StormRecorder(), LIMITS, "a storm", SETTINGS, program=program)
        for said in ("store_full", "something else"):
            assert not await server.start(environment={"SAYS": said})
            assert await server.refused() == 1
            assert server.tail() == said

    run(work())


def test_what_dies_before_it_is_cancelled_is_counted_and_told() -> None:
    async def dies() -> None:
        raise ConnectionRefusedError("nobody is there")

    async def work() -> None:
        tally = Tally()
        tasks = [asyncio.create_task(work, name="reader") for work in (dies(), asyncio.sleep(0), asyncio.sleep(60))]
        await asyncio.wait(tasks[:2])
        for task in tasks:
            tally.check_alive(task)
        tasks[2].cancel()
        assert tally.checked == 3
        assert tally.found == ["the reader died of ConnectionRefusedError: nobody is there", "the reader died"]

    run(work())


def test_what_was_answered_is_so_and_what_was_only_asked_for_may_be() -> None:
    answered = AckAudit("key")
    answered.ask("a", "valid")
    assert answered.wrong({}) == answered.wrong({"a": "valid"}) == []
    answered.answer("a", "valid")
    assert answered.wrong({}) == ["key a was answered to be valid, and is gone"]
    answered.ask("a", "revoked")
    assert answered.wrong({"a": "valid"}) == answered.wrong({"a": "revoked"}) == []
    answered.answer("a", "revoked")
    assert answered.wrong({"a": "valid"}) == ["key a was answered to be revoked, and is valid"]
    assert answered.names == ("a",)


@pytest.mark.parametrize(
    ("said", "status"), [(b"HTTP/1.1 404 Not Found", 404), (b"HTTP/1.1 2", None), (b"", None)], ids=str
)
def test_a_line_knows_whether_it_was_answered(said: bytes, status: int | None) -> None:
    async def work() -> None:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(said)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        line = RawConnection(server.sockets[0].getsockname()[1], "a key")
        try:
            await line.open()
            if status is None:
                with pytest.raises(ConnectionError, match="before a response arrived"):
                    await line.status()
            else:
                assert await line.status() == status
        finally:
            line.drop()
            server.close()
            await server.wait_closed()

    run(work())


# ── the disks ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_small_disk_is_full_and_read_only_by_the_kernel(tmp_path: Path) -> None:
    async def work() -> None:
        seed, place = tmp_path / "seed.db", tmp_path / "disk"
        seed.write_bytes(b"a seed")
        place.mkdir()
        try:
            disk = await SmallDisk.open(place, seed)
        except NotSupported as error:
            pytest.skip(error.message)
        try:
            inside = Path(f"/proc/{disk.keeper}/root{place}")
            assert (inside / "seed.db").read_bytes() == b"a seed"
            assert list(place.iterdir()) == []
            await disk.fill(0)
            with pytest.raises(OSError, match="No space left"):
                (inside / "more").write_bytes(bytes(8192))
            await disk.free(0)
            (inside / "more").write_bytes(bytes(8192))
            await disk.set_read_only(True)
            with pytest.raises(OSError, match="Read-only"):
                (inside / "more").write_bytes(b"")
            await disk.set_read_only(False)
        finally:
            await disk.close()

    run(work())


def test_a_machine_without_namespaces_gets_a_limited_disk_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(folder: Path, seed: Path) -> SmallDisk:
        raise NotSupported("not here")

    async def work() -> None:
        seed, place = tmp_path / "seed.db", tmp_path / "disk"
        seed.write_bytes(b"a seed")
        place.mkdir()
        disk = await open_disk(place, seed, small=True)
        assert isinstance(disk, LimitedDisk)
        assert "not here" in disk.how
        await disk.set_read_only(True)
        if os.geteuid() != 0:
            with pytest.raises(PermissionError):
                disk.path.write_bytes(b"")
        await disk.close()
        disk.path.write_bytes(b"")

    monkeypatch.setattr(SmallDisk, "open", refuse)
    run(work())


# ── failpoints that are attended ─────────────────────────────────────────────────────────────────────────────────


def test_who_attends_the_failpoints_sees_each_and_what_they_raise_is_the_stores_error(tmp_path: Path) -> None:
    seen: list[str] = []

    def passed(name: str) -> None:
        seen.append(name)
        if name == "sqlite.send.before_write" and len(seen) < 4:
            error = sqlite3.OperationalError("now")
            error.sqlite_errorcode = sqlite3.SQLITE_READONLY
            raise error

    async def work() -> None:
        store = SqliteStore(str(tmp_path / "own.db"))
        await store.open(node_id="n", at=1.0)
        try:
            with failpoints.attend(passed):
                assert failpoints.armed() == "*"
                with pytest.raises(StoreReadOnly):
                    await store.send(a_send(1))
                seen.extend(["-"] * 4)
                await store.send(a_send(1))
            assert failpoints.armed() is None
        finally:
            await store.close()

    run(work())
    points = [name.rpartition(".")[2] for name in seen if name.startswith("sqlite.send")]
    assert points == ["before_write", "before_write", "between_writes", "before_commit", "after_commit"]


# ── the command ─────────────────────────────────────────────────────────────────────────────────────


def an_outcome(**changes: Any) -> FaultOutcome:
    fine = FaultOutcome(
        fault="clock",
        title="The clock | is set.",
        injected={"clock": 3},
        observations=10,
        checked=2,
        broken=0,
        found=(),
        seconds=1.0,
    )
    return msgspec.structs.replace(fine, **changes)


@pytest.mark.parametrize(
    ("changes", "passed"),
    [
        ({}, True),
        ({"injected": {"clock": 0}}, False),
        ({"broken": 1, "found": ("P5: gone",)}, False),
        ({"observations": 0}, False),
    ],
)
def test_a_fault_passes_if_it_was_injected_and_seen_and_broke_nothing(changes: dict[str, Any], passed: bool) -> None:
    assert an_outcome(**changes).passed is passed


def test_faults_are_chosen_by_name_each_once() -> None:
    assert chosen("all") == ("kill", *FAULTS)
    assert chosen("clock, clock,kill") == ("clock", "kill")
    with pytest.raises(ConfigurationError, match="'flood'"):
        chosen("clock,flood")


def test_the_command_fails_when_a_promise_was_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = [an_outcome()]

    async def run_faults(names: object, ask: EpisodePlan, progress: object) -> list[tuple[FaultOutcome, object]]:
        if ask.connections == 7:
            raise HoldfastError("the server does not start")
        return [(outcome, None) for outcome in outcomes]

    monkeypatch.setattr("holdfast.proof.nemesis.run_faults", run_faults)
    asked = Storm(nemesis="clock", as_json=True, seed=1)
    assert storm_command.run_storm(asked) == Exit.OK
    assert msgspec.json.decode(capsys.readouterr().out)["faults"][0]["injected"] == {"clock": 3}
    outcomes.append(an_outcome(broken=2, found=("P5: gone",)))
    assert storm_command.run_storm(msgspec.structs.replace(asked, as_json=False)) == Exit.FAILED
    assert "BROKEN 2" in capsys.readouterr().out
    assert storm_command.run_storm(msgspec.structs.replace(asked, connections=7)) == Exit.REFUSED


@pytest.mark.parametrize("nemesis", [None, "clock"])
def test_a_history_that_cannot_be_kept_is_told_before_anything_runs(
    nemesis: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    asked = Storm(nemesis=nemesis, history=str(tmp_path / "file" / "kept"), seed=1, sessions=1, seconds=0.1)
    assert storm_command.run_storm(asked) == Exit.USAGE
    told = capsys.readouterr().err
    assert "kept" in told
    assert "seed" not in told


@pytest.mark.parametrize(
    "asked",
    [
        Storm(nemesis="flood"),
        Storm(nemesis="all", url="http://127.0.0.1:1"),
        Storm(nemesis="all", kill_every_s=1.0),
        Storm(nemesis="all", check="x"),
        Storm(agents=("a:b",)),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_a_usage_error(asked: Storm) -> None:
    assert storm_command.run_storm(asked) == Exit.USAGE
