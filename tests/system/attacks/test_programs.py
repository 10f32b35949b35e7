"""Programs that shed every mark, multiply, and are started where nobody looks: `gone` is said of what is gone."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.agents.run import Run
from holdfast.runtime.process_host import process_host
from holdfast.runtime.processes import procfs
from tests.runtime.processes_zoo import await_condition, living
from tests.system.attacks.hostile_host import begun, bomb, end_programs, endless, left, lives, shell, start

pytestmark = [
    pytest.mark.skipif(not procfs.supported(), reason="process trees are proven only on Linux"),
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

_ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def word() -> Iterator[str]:
    """A number of seconds by which its sleepers are known: about a minute, whoever fails to end them."""
    chosen = f"60.{random.randrange(10_000_000, 99_999_999)}"
    yield chosen
    for pid in living(chosen):  # only after a failure
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def _nothing_left_to_later_tests() -> Iterator[None]:
    yield
    end_programs()


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await body()

    asyncio.run(bounded())


async def until(condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(await_condition, condition, what)


def came_home(word: str) -> bool:
    stats = [procfs.read_stat(pid) for pid in living(word)]
    return bool(stats) and all(stat is not None and stat.parent == os.getpid() for stat in stats)


_SHED = (
    "import ctypes, struct; call = ctypes.CDLL(None).syscall; free = struct.pack('QQ', 2**64 - 1, 2**64 - 1); "
    "[call(number, limit, free) for number in (160, 160 | 1 << 30) for limit in (5, 10, 15)]; "
    "[call(302, 0, limit, free, None) for limit in (5, 10, 15)]; "
)
SHEDDING = {
    "word of the fork server": "setsid sleep {} & # multiprocessing.forkserver",
    "word of the tracker": "setsid sleep {} & # multiprocessing.resource_tracker",
    "su": "su - nobody -s /bin/sh -c 'setsid sleep {} &'",
    "runuser": "runuser -l nobody -s /bin/sh -c 'setsid sleep {} &'",
    "setpriv": "setpriv --reuid=65534 --regid=65534 --clear-groups env -i sh -c 'setsid sleep {} &'",
    "ulimit": "ulimit -x unlimited; ulimit -m unlimited; env -i setsid sleep {} & sleep 0.1",
    "syscalls": f'{sys.executable} -c "{_SHED} import os; os.fork() and os._exit(0); os.setsid(); '
    "os.execve('/bin/sleep', ['sleep', '{}'], {{}})\"",
}


async def shell_of_asyncio(run: Run) -> None:
    await (await asyncio.create_subprocess_shell(f"exec bash -c {run.text!r}")).wait()
    await run.interrupt.wait()


def shell_in_a_thread(run: Run) -> None:
    subprocess.run(["bash", "-c", run.text], stdin=-3, stdout=-3, stderr=-3, check=False)
    run.interrupt.wait_blocking()


@pytest.mark.parametrize("way", SHEDDING)
@pytest.mark.parametrize("agent", [shell, shell_in_a_thread])
def test_a_program_that_sheds_every_mark_is_gone_when_the_receipt_says_so(word: str, way: str, agent: Any) -> None:
    if way in ("su", "runuser", "setpriv") and os.geteuid() != 0:
        pytest.skip("only root changes its user without a password")

    async def body() -> None:
        async with holdfast.Host(agent, store="memory://") as host:
            session = host.session("one")
            await session.send(SHEDDING[way].format(word))
            await until(lambda: came_home(word), "it has left whoever started it")
            receipt = await session.interrupt(grace_s=0.4)
            assert (receipt.outcome, receipt.unattributed, living(word)) == ("gone", (), [])

    run(body)


def system(run: Run) -> None:
    """C code starts it, and nobody sees that."""
    ctypes.CDLL(None).system(run.text.encode())
    run.interrupt.wait_blocking()


async def idle(run: Run) -> None:
    await run.interrupt.wait()


def test_what_c_code_of_a_thread_waits_for_dies_with_the_session_of_the_thread(word: str) -> None:
    async def body() -> None:
        async with holdfast.Host(agents={"system": system, "idle": idle}, store="memory://") as host:
            before, own = host.session("before", agent="idle"), host.session("own", agent="system")
            await before.send("wait")
            await own.send(f"sleep {word}; true")
            await until(lambda: living(word) != [], "it runs")
            receipt = await before.interrupt(grace_s=0.2)
            assert (receipt.outcome, len(living(word))) == ("gone", 1), "it is another's for certain"
            receipt = await own.interrupt(grace_s=0.2)
            assert (receipt.outcome, living(word)) == ("gone", [])

    run(body)


def test_a_stray_of_nobody_is_told_to_the_operator_and_no_receipt_names_it(
    word: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_PASSWORD", f"hunter2-{word}")

    async def body() -> None:
        async with holdfast.Host(agents={"system": system, "idle": idle}, store="memory://") as host:
            before = host.session("before", principal="alice", agent="idle")
            own = host.session("own", principal="mallory", agent="system")
            after = host.session("after", principal="bob", agent="idle")
            await before.send("wait")
            secret = f"hunter2-{word}"
            await own.send(f"setsid sh -c 'sleep {word}; true' {secret} &")
            # Until its program runs, what the shell has forked for it has the shell's arguments.
            await until(lambda: living(word) != [] and came_home(secret), "it has left whoever started it")
            (stray,) = living(secret)
            ticks = os.sysconf("SC_CLK_TCK")
            await asyncio.sleep(2 / ticks)  # a start is known to the tick
            await after.send("wait")
            receipts = [await one.interrupt(grace_s=0.2) for one in (before, after, own)]
            assert [receipt.outcome for receipt in receipts] == ["unknown", "gone", "unknown"]
            the_pid = re.compile(rf"(?<![\w.]){stray}(?![\w.])")  # not the digits of a time
            assert not the_pid.search(repr(receipts))
            assert not any(text in repr(receipts) for text in (word, "hunter2"))
            told = [record.getMessage() for record in caplog.records if the_pid.search(record.getMessage())]
            assert len(told) == 1, "once, to the operator"
            assert secret not in told[0]
        assert living(secret) == [], "the host's end is its end"

    with caplog.at_level(logging.WARNING, "holdfast"):
        run(body)


def test_what_an_abandoned_thread_starts_is_refused_or_killed_and_outlives_no_host(word: str) -> None:
    async def body() -> None:
        async with holdfast.Host(endless, store="memory://") as host:
            session = host.session("one")
            await session.send(word)
            await until(lambda: len(living(word)) > 20, "it starts programs")
            receipt = await session.interrupt(grace_s=0.1)
            assert receipt.outcome == "quarantined"
            assert living(word) == []
        assert living(word) == []

    run(body)
    assert living(word) == [], "nor does it start any after the host's end"


WAYS = ["popen", "posix_spawn", "fork", "system", "multiprocessing-fork", "multiprocessing-spawn", "thread"]


@pytest.mark.parametrize("hosts", ["after", "beside"])
@pytest.mark.parametrize("way", WAYS)
def test_an_abandoned_thread_is_refused_for_good_and_is_in_no_other_hosts_receipts(
    word: str, way: str, hosts: str
) -> None:
    path = f"{_ROOT}:{Path(holdfast.__file__).parents[1]}"
    said = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.system.attacks.hostile_thread", way, hosts, word],
        check=True,
        timeout=60,
        stdout=subprocess.PIPE,
        cwd="/",
        env={**os.environ, "PYTHONPATH": path},
    ).stdout
    others = 4 if hosts == "after" else 5
    assert json.loads(said) == {"outcome": "quarantined", "after": 0, "said": [["gone"]] * others, "left": 0}


BOMBS = {"slow": (0.005, 1, 0), "fast": (0.0003, 1, 0), "at once": (0.0, 1, 0), "branches": (0.002, 4, 0)}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_fork_bomb_is_gone_when_the_receipt_says_so(tmp_path: Path, kind: str) -> None:
    trace = str(tmp_path / "lives")

    async def body() -> None:
        async with holdfast.Host(shell, store="memory://") as host:
            session = host.session("one")
            await session.send(bomb(trace, *BOMBS[kind]))
            await until(lambda: begun(trace), "it goes on")
            receipt = await session.interrupt(grace_s=0.1)
            assert (receipt.outcome, left(trace)) == ("gone", 0)

    run(body)
    assert left(trace) == 0


@pytest.mark.nightly
@pytest.mark.parametrize("life_s", [0.0, 0.0003, 0.002, 0.005])
@pytest.mark.parametrize("branches", [1, 4, 8])
@pytest.mark.parametrize("doublings", [0, 3])
def test_a_bomb_that_multiplies_is_gone_or_the_receipt_says_otherwise(
    tmp_path: Path, life_s: float, branches: int, doublings: int
) -> None:
    trace = str(tmp_path / "lives")

    async def body() -> None:
        async with holdfast.Host(shell, store="memory://") as host:
            session = host.session("one")
            await session.send(bomb(trace, life_s, branches, doublings))
            await until(lambda: begun(trace), "it goes on")
            receipt = await session.interrupt(grace_s=0.1)
            assert receipt.outcome != "gone" or left(trace) == 0
        assert left(trace) == 0

    run(body)


@contextlib.contextmanager
def hostile_host(what: str, user: str, word: str) -> Iterator[subprocess.Popen[str]]:
    path = f"{_ROOT}:{Path(holdfast.__file__).parents[1]}"
    with subprocess.Popen(
        [sys.executable, "-m", "tests.system.attacks.hostile_host", what, user],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": path, "HOSTILE": word},
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def said(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    return started.stdout.readline().strip()


def say(started: subprocess.Popen[str]) -> None:
    assert started.stdin is not None
    started.stdin.write("go on\n")
    started.stdin.flush()


@pytest.fixture(params=["bomb", "shed", "endless"])
def hostile(request: pytest.FixtureRequest, word: str, tmp_path: Path) -> tuple[str, str]:
    """What runs, and by which word it is known."""
    return request.param, str(tmp_path / "lives") if request.param == "bomb" else word


@pytest.mark.parametrize("user", ["root", "user"])
def test_it_is_the_same_for_an_ordinary_user(hostile: tuple[str, str], user: str) -> None:
    if user == "user" and os.geteuid() != 0:
        pytest.skip("then the other case is this one")
    with hostile_host(hostile[0], user, hostile[1]) as started:
        assert said(started) == "up"
        say(started)
        # On a machine so busy that no look at all processes ends in time, the receipt does not claim to know.
        assert said(started) in (("quarantined 0", "unknown 0") if hostile[0] == "endless" else ("gone 0",))
        say(started)
        assert said(started) == "closed 0"


@pytest.mark.parametrize("user", ["root", "user"])
def test_nothing_outlives_a_host_that_is_killed(hostile: tuple[str, str], user: str) -> None:
    with hostile_host(hostile[0], user, hostile[1]) as started:
        assert said(started) == "up"
        started.send_signal(signal.SIGKILL)
        started.wait()
        await_condition(lambda: left(hostile[1]) == 0, "nothing is left")
    assert left(hostile[1]) == 0


@pytest.mark.parametrize("user", ["root", "user"])
def test_no_quick_bomb_outlives_a_host_that_is_killed(tmp_path: Path, user: str) -> None:
    trace = str(tmp_path / "lives")
    with hostile_host("quick", user, trace) as started:
        assert said(started) == "up"
        await_condition(lambda: lives(trace) > 300, "the dead are many, and make each look long")
        started.send_signal(signal.SIGKILL)
        started.wait()
        await_condition(lambda: left(trace) == 0, "nothing is left")
    assert left(trace) == 0


def test_nothing_outlives_a_host_that_closes(hostile: tuple[str, str]) -> None:
    with hostile_host(hostile[0], "root", hostile[1]) as started:
        assert said(started) == "up"
        assert started.stdin is not None
        started.stdin.close()
        assert said(started) == "closed 0"
        started.wait()
    assert left(hostile[1]) == 0


async def stop_many(word: str, sessions: int) -> None:
    async with holdfast.Host(shell, store="memory://") as host:
        every = [host.session(f"s{number}") for number in range(sessions)]
        text = f"trap '' TERM; sleep {word} & sleep {word}"
        await asyncio.gather(*(session.send(text) for session in every))
        await until(lambda: len(living(word)) == 2 * sessions, "all run")
        receipts = await asyncio.gather(*(session.interrupt(grace_s=0.2) for session in every))
        assert {receipt.outcome for receipt in receipts} == {"gone"}
        assert living(word) == []


def test_many_sessions_with_programs_stop_at_once_and_all_are_gone(word: str) -> None:
    run(lambda: stop_many(word, 80))


async def mixed(run: Run) -> None:
    """A program of each kind, both hostile."""
    start("bash", "-c", f"trap '' TERM; setsid sleep {run.text} & sleep {run.text}")
    async with run.scope.child("tool") as scope:
        await scope.process(["bash", "-c", f"trap '' TERM; setsid sleep {run.text} & sleep {run.text}"])
        await run.interrupt.wait()


VICTIMS = ["reapers", "zygote", "both"]


def kill_helpers(victims: str) -> int:
    """Kill the reapers that there are now, or the zygote, or both; which zygote that was."""
    zygote = process_host()._zygote
    assert zygote is not None
    reapers = procfs.children(zygote.pid)
    for pid in {"reapers": reapers, "zygote": [zygote.pid], "both": [zygote.pid, *reapers]}[victims]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return zygote.pid


def zombies() -> set[int]:
    return {pid for pid in procfs.children(os.getpid()) if (stat := procfs.read_stat(pid)) is not None and stat.dead}


@pytest.fixture
def earlier() -> set[int]:
    """Zombies of earlier tests, which left them to nobody who waits."""
    return zombies()


async def works(host: holdfast.Host, name: str, word: str) -> None:
    """A session of its own starts programs, and they are gone when it stops."""
    session = host.session(name)
    await session.send(word)
    await until(lambda: len(living(word)) == 4, "its programs run")
    assert (await session.interrupt(grace_s=0.1)).outcome == "gone"
    assert living(word) == []


@pytest.mark.parametrize("victims", VICTIMS)
def test_receipts_are_true_when_reapers_and_zygote_are_killed_under_load(
    word: str, victims: str, earlier: set[int]
) -> None:
    async def body() -> None:
        async with holdfast.Host(mixed, store="memory://") as host:
            every = [host.session(f"s{number}") for number in range(20)]
            await asyncio.gather(*(session.send(word) for session in every))
            await until(lambda: len(living(word)) == 80, "all run")
            stops = [asyncio.ensure_future(session.interrupt(grace_s=0.1)) for session in every]
            await asyncio.sleep(0)
            kill_helpers(victims)
            receipts = await asyncio.gather(*stops)
            if all(receipt.outcome == "gone" for receipt in receipts):
                assert living(word) == []
            await until(lambda: living(word) == [], "what they held is killed all the same")
            await works(host, "next", f"{word}1")
        end_programs()
        await until(lambda: zombies() <= earlier, "no zombie stays")

    run(body)


@pytest.mark.parametrize("victims", VICTIMS)
def test_killed_helpers_are_replaced_and_leave_no_zombie_to_a_host_that_is_idle(
    word: str, victims: str, earlier: set[int]
) -> None:
    async def body() -> None:
        async with holdfast.Host(mixed, store="memory://") as host:
            await works(host, "first", word)
            await host.session("idle").send(f"{word}1")
            await until(lambda: len(living(f"{word}1")) == 4, "its programs run")
            first = kill_helpers(victims)
            await until(lambda: len(living(f"{word}1")) == (4 if victims == "zygote" else 2), "the others live")
            await works(host, "next", f"{word}2")
            zygote = process_host()._zygote
            assert zygote is not None
            assert (zygote.pid == first) == (victims == "reapers")
            receipt = await host.session("idle").interrupt(grace_s=0.1)
            assert living(f"{word}1") == []
            assert receipt.outcome == ("unknown" if victims == "both" else "gone")
            end_programs()
            await until(lambda: zombies() <= earlier, "no zombie stays")

    run(body)


async def insistent(run: Run) -> None:
    """As `mixed`; what holds its program may be killed while it starts."""
    with contextlib.suppress(OSError):
        await mixed(run)
    await run.interrupt.wait()


@pytest.mark.parametrize("victims", VICTIMS)
def test_helpers_that_are_killed_again_and_again_while_sessions_start_and_stop(
    word: str, victims: str, earlier: set[int]
) -> None:
    async def body() -> None:
        said: list[str] = []

        async def go_on(name: str) -> None:
            while stopped[name] < 4:
                await once(name, f"{word}{name}{stopped[name]}")
                stopped[name] += 1

        async def once(name: str, mine: str) -> None:
            await host.session(name).send(mine)
            await until(lambda: len(living(mine)) >= 2, "a program of it runs")
            receipt = await host.session(name).interrupt(grace_s=0.1)
            alive = living(mine) if receipt.outcome == "gone" else []
            said.extend([f"{receipt} though {alive} live"] if alive else [])

        stopped = dict.fromkeys("123456", 0)
        async with holdfast.Host(insistent, store="memory://") as host:
            load = asyncio.gather(*map(go_on, stopped))
            for total in range(2, 24, 3):
                while sum(stopped.values()) < total and not load.done():
                    await asyncio.sleep(0.005)
                kill_helpers(victims)
            await load
            assert said == []
            rounds = [f"{word}{name}{number}" for name in stopped for number in range(4)]
            await until(lambda: not any(map(living, rounds)), "what they held is killed too")
            await works(host, "next", f"{word}0")
        end_programs()
        await until(lambda: zombies() <= earlier, "no zombie stays")

    run(body)
