"""Process trees: whatever a program does, nothing of it outlives the stop of its tree, or the end of the host."""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import resource
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.runtime import process_host as processes
from holdfast.runtime.process_host import DEVNULL, PIPE, STDOUT, ProcessHost, TreeResult
from holdfast.runtime.processes import procfs, seal, zygote_link
from holdfast.runtime.processes import spec as process_spec
from holdfast.runtime.processes import tags as process_tags
from holdfast.runtime.processes.program_lease import ProgramLease
from tests.runtime.processes_zoo import ROLES, await_condition, has_strayed, living, program

pytestmark = pytest.mark.skipif(not procfs.supported(), reason="process trees are proven dead only on Linux")

_SOURCE = Path(processes.__file__).parents[2]


@pytest.fixture
def token() -> Iterator[str]:
    word = f"zoo-{uuid.uuid4().hex}"
    yield word
    for pid in living(word):  # only after a failure
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def host() -> Iterator[ProcessHost]:
    made = ProcessHost()
    yield made
    made.close()


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await body()

    asyncio.run(bounded())


def descriptors() -> set[str]:
    return {f"{fd} {target}" for fd in os.listdir("/proc/self/fd") if (target := _target(fd)) is not None}


def _target(fd: str) -> str | None:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return None


def state(pid: int) -> str:
    stat = procfs.read_stat(pid)
    return "" if stat is None else stat.state


def ended(pid: int) -> bool:
    stat = procfs.read_stat(pid)
    return stat is None or stat.dead


# -- what dies


@pytest.mark.parametrize("role", ROLES)
def test_nothing_of_a_hostile_tree_outlives_its_kill(host: ProcessHost, token: str, role: str) -> None:
    async def body() -> None:
        process = await host.spawn(program(role, token))
        if role == "leaves-strays":
            await process.wait()
        await_condition(lambda: len(living(token)) >= ROLES[role], f"{role} has started its processes")
        result = await process.kill_tree()
        assert living(token) == []
        assert result.outcome == "gone"
        assert len(result.killed) >= ROLES[role]
        assert await process.wait() == (7 if role == "leaves-strays" else -signal.SIGKILL)
        assert process.gone

    run(body)


def test_a_fork_bomb_dies(host: ProcessHost, token: str) -> None:
    async def body() -> None:
        process = await host.spawn(program("bomb", token, "8"))
        await_condition(lambda: len(living(token)) > 20, "the bomb has gone off")
        result = await process.kill_tree(bound_s=10)
        assert result.outcome == "gone"
        assert living(token) == []

    run(body)


def test_processes_that_run_away_by_forking_and_exiting_are_caught(host: ProcessHost, token: str) -> None:
    async def body() -> None:
        process = await host.spawn(program("runs-away", token, "3"))
        seen: set[int] = set()  # one look on a busy machine finds few: most have ended before they are read

        def have_run_away() -> bool:
            seen.update(living(token))
            return len(seen) > 3

        try:
            await_condition(have_run_away, "they run")
        finally:
            result = await process.kill_tree(bound_s=10)
        assert result.outcome == "gone"
        assert living(token) == []

    run(body)


def test_strays_stay_until_the_kill_when_the_program_itself_ends(host: ProcessHost, token: str) -> None:
    async def body() -> None:
        process = await host.spawn(program("leaves-strays", token))
        assert await process.wait() == 7
        await_condition(lambda: len(living(token)) == 2, "two strays live")
        assert not process.gone
        await process.kill_tree()
        assert living(token) == []
        assert process.returncode == 7

    run(body)


def test_a_stray_that_holds_the_pipe_delays_neither_the_wait_nor_the_kill(host: ProcessHost, token: str) -> None:
    async def body() -> None:
        process = await host.spawn(program("holds-pipe", token), stdout=PIPE)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"held\n"
        assert await process.wait() == 0
        await_condition(lambda: len(living(token)) == 1, "only the stray lives")
        await process.kill_tree()
        assert await process.stdout.read() == b""
        assert living(token) == []

    run(body)


def test_a_tree_whose_reaper_was_killed_dies_and_is_reported(host: ProcessHost, token: str) -> None:
    async def body() -> None:
        process = await host.spawn(program("kills-reaper", token))
        assert await process.wait() == -signal.SIGKILL
        result = await process.kill_tree()
        assert result.outcome == "gone"
        assert living(token) == []

    run(body)


def test_a_reaper_that_is_stopped_is_continued(host: ProcessHost, token: str) -> None:
    async def body() -> None:
        process = await host.spawn(program("stops-reaper", token))
        await_condition(lambda: len(living(token)) == 2, "the stray lives")
        program_stat = procfs.read_stat(process.pid)
        assert program_stat is not None
        await_condition(lambda: state(program_stat.parent) != "T", "the reaper goes on")
        assert (await process.kill_tree()).outcome == "gone"
        assert living(token) == []

    run(body)


def test_without_zygote_a_killed_reaper_is_reported_as_unknown_and_the_next_program_gets_a_new_zygote(
    token: str,
) -> None:
    host = ProcessHost()

    async def body() -> None:
        process = await host.spawn(program("ignores-term", token))
        reaper = procfs.read_stat(process.pid)
        assert reaper is not None
        zygote = procfs.read_stat(reaper.parent)
        assert zygote is not None
        os.kill(zygote.parent, signal.SIGKILL)
        os.kill(reaper.parent, signal.SIGKILL)
        assert (await process.kill_tree()).outcome == "unknown"
        again = await host.spawn(["true"])
        assert await again.wait() == 0

    try:
        run(body)
    finally:
        host.close()
    await_condition(lambda: living(token) == [], "the parent-death signal reached the program")


def test_trees_of_one_host_do_not_disturb_each_other(host: ProcessHost, token: str) -> None:
    async def body() -> None:
        first = await host.spawn(program("double-fork", f"{token}-1"))
        second = await host.spawn(program("double-fork", f"{token}-2"))
        await_condition(lambda: has_strayed(f"{token}-1") and has_strayed(f"{token}-2"), "both trees stand")
        await first.kill_tree()
        assert living(f"{token}-1") == []
        assert len(living(f"{token}-2")) == 2
        await second.kill_tree()

    run(body)


def test_term_first_leaves_the_tree_time_to_end_by_itself(host: ProcessHost, tmp_path: Path) -> None:
    async def body() -> None:
        script = "trap 'echo bye >> said; exit 5' TERM; echo up; while :; do sleep 0.01; done"
        process = await host.spawn(["sh", "-c", script], stdout=PIPE, cwd=tmp_path)
        assert process.stdout is not None
        await process.stdout.readline()
        result = await process.kill_tree(term_first_s=10)
        assert process.returncode == 5
        assert (tmp_path / "said").read_text() == "bye\n"
        assert result.survivors == ()

    run(body)


def test_term_first_kills_what_ignores_it(host: ProcessHost, token: str) -> None:
    async def body() -> None:
        process = await host.spawn(program("double-fork", token))
        await_condition(lambda: has_strayed(token), "the stray lives")
        result = await process.kill_tree(term_first_s=0.05)
        assert len(result.killed) == 2
        assert living(token) == []

    run(body)


def test_killing_twice_and_from_several_callers_gives_each_an_answer(host: ProcessHost, token: str) -> None:
    async def body() -> None:
        process = await host.spawn(program("ignores-term", token))
        results = await asyncio.gather(*(process.kill_tree() for _ in range(5)))
        assert {result.killed for result in results} == {(process.pid,)}
        assert await process.kill_tree() == results[0]

    run(body)


# -- when the host dies

_HOST = """
import asyncio, os, sys
from holdfast.runtime.process_host import ProcessHost
from tests.runtime.processes_zoo import ROLES, program

async def main():
    host = ProcessHost()
    for role in ROLES:
        await host.spawn(program(role, sys.argv[1]))
    print(*{link.pid for link in host._links.values()}, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""

NOBODY = 65534


def interpreter_for(uid: int) -> str:
    """An interpreter that this user can run; skips the test where there is none."""
    for path in (os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            check = [path, "-c", "import asyncio, sys; sys.exit(sys.version_info < (3, 11))"]
            if subprocess.run(check, user=uid, group=uid, extra_groups=[], capture_output=True).returncode == 0:
                return path
        except OSError:
            continue
    pytest.skip(f"user {uid} can run no Python here")


@contextlib.contextmanager
def other_host(
    token: str, *, nobody: bool = False, source: str = _HOST
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A host in another process, with one tree of each role; and the pid of its zygote."""
    root = Path(__file__).parents[2]
    uid = NOBODY if nobody else os.getuid()
    with subprocess.Popen(
        [interpreter_for(uid) if nobody else sys.executable, "-c", source, token],
        stdout=subprocess.PIPE,
        cwd="/",
        env={**os.environ, "PYTHONPATH": f"{root}:{_SOURCE}", "PYTHONDONTWRITEBYTECODE": "1"},
        user=uid if nobody else None,
        group=uid if nobody else None,
        extra_groups=[] if nobody else None,
    ) as started:
        try:
            assert started.stdout is not None
            zygote = int(started.stdout.readline())
            await_condition(lambda: len(living(token)) >= sum(ROLES.values()), "all trees stand")
            yield started, zygote
        finally:
            started.kill()


def users() -> list[bool]:
    return [False, True] if os.getuid() == 0 else [False]


@pytest.mark.parametrize("nobody", users(), ids=lambda nobody: "as-nobody" if nobody else "as-oneself")
@pytest.mark.parametrize("also_zygote", [False, True])
def test_nothing_outlives_a_host_that_is_killed(token: str, nobody: bool, also_zygote: bool) -> None:
    with other_host(token, nobody=nobody) as (started, zygote):
        os.kill(started.pid, signal.SIGSTOP)  # so that both are gone before either can act
        if also_zygote:
            os.kill(zygote, signal.SIGKILL)
        os.kill(started.pid, signal.SIGKILL)
        started.wait(10)
        await_condition(lambda: living(token) == [], "the trees are gone")
        await_condition(lambda: ended(zygote), "the zygote is gone")


def test_a_host_that_ends_normally_leaves_nothing(token: str) -> None:
    with other_host(token) as (started, zygote):
        os.kill(started.pid, signal.SIGINT)
        started.wait(10)
        await_condition(lambda: living(token) == [], "the trees are gone")
        await_condition(lambda: ended(zygote), "the zygote is gone")


def test_a_forked_child_of_the_host_does_not_keep_its_trees_alive(token: str) -> None:
    source = _HOST.replace(
        "    print(",
        f"""    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", "{token}-kept"])
    if os.fork() == 0:
        os.close(1)
        import time
        time.sleep(60)
    print(""",
    )
    with other_host(token, source=source) as (started, _):
        await_condition(lambda: living(f"{token}-kept") != [], "the forked children live")
        forked = [pid for pid in procfs.children(started.pid) if pid in living(token)]
        assert len(forked) == 1
        kept = [*forked, *living(f"{token}-kept")]
        try:
            started.kill()
            started.wait(10)
            await_condition(lambda: living(token) == forked, "the trees are gone")
        finally:
            for pid in kept:
                os.kill(pid, signal.SIGKILL)


# -- starting


def test_a_program_gets_as_many_descriptors_as_are_supported(host: ProcessHost) -> None:
    with contextlib.ExitStack() as opened:
        ends = [os.pipe() for _ in range(process_spec.MORE_FDS + 1)]
        for fd in (fd for pair in ends for fd in pair):
            opened.callback(os.close, fd)
        passed = [write for _, write in ends]
        with pytest.raises(ValueError, match=f"at most {process_spec.MORE_FDS} are supported"):
            host.run_blocking(["true"], pass_fds=passed)
        numbers = range(3, 3 + process_spec.MORE_FDS)
        code = f"import os\nfor fd in {[*numbers]}: os.write(fd, b'%d' % fd)"
        assert host.run_blocking([sys.executable, "-I", "-S", "-c", code], pass_fds=passed[:-1]).returncode == 0
        assert [int(os.read(read, 9)) for read, _ in ends[:-1]] == [*numbers]


def test_a_program_that_cannot_be_started_is_a_clear_error(host: ProcessHost, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("no program")

    async def body() -> None:
        with pytest.raises(FileNotFoundError, match="no-such-program"):
            await host.spawn(["no-such-program"])
        with pytest.raises(FileNotFoundError, match="missing"):
            await host.spawn(["true"], cwd=tmp_path / "missing")
        with pytest.raises(PermissionError, match="plain"):
            await host.spawn([plain])
        with pytest.raises(ValueError, match="NUL"):
            await host.spawn(["echo", "a\0b"])
        with pytest.raises(ValueError, match="sequence"):
            await host.spawn("ls -l")
        with pytest.raises(ValueError, match="sequence"):
            await host.spawn([])

    run(body)
    await_condition(lambda: host.statistics().reapers == 0, "what failed to start has no reaper")


def test_a_program_gets_its_streams_directory_environment_and_default_signals(
    host: ProcessHost, tmp_path: Path
) -> None:
    async def body() -> None:
        script = 'cat; echo "$WORD $(pwd)"; echo err >&2; exit 3'
        process = await host.spawn(
            ["sh", "-c", script],
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            cwd=tmp_path,
            env={"WORD": "word", "PATH": os.environ["PATH"]},
            name="greeter",
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"in\n")
        process.stdin.close()
        assert await process.stdout.read() == f"in\nword {tmp_path}\n".encode()
        assert await process.stderr.read() == b"err\n"
        assert await process.wait() == 3
        assert process.name == "greeter"

        merged = await host.spawn(["sh", "-c", "echo a; echo b >&2"], stdout=PIPE, stderr=STDOUT)
        assert merged.stdout is not None
        assert await merged.stdout.read() == b"a\nb\n"
        assert merged.stderr is None

        status = await host.spawn(["cat", "/proc/self/status"], stdout=PIPE)
        assert status.stdout is not None
        fields = dict(line.split(b":\t", 1) for line in (await status.stdout.read()).splitlines() if b":\t" in line)
        assert int(fields[b"SigIgn"], 16) & 0x7FFFFFFF == 0  # the C library keeps 32 and 33 to itself
        assert int(fields[b"SigBlk"], 16) == 0

        listing = await host.spawn(["ls", "/proc/self/fd"], stdout=PIPE, stderr=DEVNULL)
        assert listing.stdout is not None
        assert (await listing.stdout.read()).split() == [b"0", b"1", b"2", b"3"]  # the last is the listing itself

    run(body)


def test_a_long_environment_and_many_arguments_arrive(host: ProcessHost) -> None:
    async def body() -> None:
        words = ["x" * 1000] * 500
        process = await host.spawn(
            ["sh", "-c", "echo $# ${#BIG}", "sh", *words],
            stdout=PIPE,
            env={"BIG": "y" * 100_000, "PATH": "/bin:/usr/bin"},
        )
        assert process.stdout is not None
        assert await process.stdout.read() == b"500 100000\n"

    run(body)


def test_output_that_nobody_read_is_kept_and_leaves_no_descriptor(host: ProcessHost) -> None:
    async def body() -> None:
        await (await host.spawn(["true"])).kill_tree()  # the zygote has descriptors of its own
        await_condition(lambda: host.statistics().reapers == 0, "the trees of other tests are gone")
        before = descriptors()
        process = await host.spawn(["sh", "-c", "head -c 300000 /dev/zero"], stdout=PIPE)
        assert process.stdout is not None
        got = await process.stdout.readexactly(1)
        await process.kill_tree()
        while not process.stdout.at_eof():
            got += await process.stdout.read(4096)
        assert 1 <= len(got) <= 300_000
        async with asyncio.timeout(10):
            while not descriptors() <= before:
                await asyncio.sleep(0.005)

    run(body)


def test_a_spawn_that_is_cancelled_leaves_nothing(host: ProcessHost, token: str) -> None:
    async def body() -> None:
        await_condition(lambda: host.statistics().live == 0, "the trees of other tests are gone")
        for steps in range(12):
            task = asyncio.create_task(host.spawn(program("ignores-term", token), stdout=PIPE, stdin=PIPE))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                process = await task
                await process.kill_tree()
            assert living(token) == []
        assert host.statistics().live == 0

    run(body)


def test_a_hundred_programs_leave_no_descriptor_process_or_thread(host: ProcessHost) -> None:
    host.start()

    async def one(number: int) -> None:
        process = await host.spawn(["sh", "-c", f"echo {number}; exit {number % 7}"], stdout=PIPE)
        assert process.stdout is not None
        assert await process.stdout.read() == f"{number}\n".encode()
        assert await process.wait() == number % 7
        await process.kill_tree()

    async def body() -> None:
        await one(0)
        before = descriptors()
        threads = set(threading.enumerate())
        await asyncio.gather(*(one(number) for number in range(100)))
        async with asyncio.timeout(10):
            while not (descriptors() <= before and set(threading.enumerate()) <= threads):
                await asyncio.sleep(0.005)

    run(body)
    (link,) = set(host._links.values())
    await_condition(lambda: procfs.children(link.pid) == [], "all reapers have ended")
    await_condition(lambda: len(os.listdir(f"/proc/{link.pid}/fd")) <= 10, "the zygote holds nothing")
    await_condition(
        lambda: (host.statistics().live, host.statistics().reapers) == (0, 0), "the host knows that all have ended"
    )


def test_threads_may_spawn_wait_and_kill(host: ProcessHost, token: str) -> None:
    completed = host.run_blocking(["sh", "-c", "cat; echo err >&2; exit 4"], input=b"words")
    assert (completed.returncode, completed.stdout, completed.stderr) == (4, b"words", b"err\n")
    process = host.spawn_blocking(program("double-fork", token))
    await_condition(lambda: len(living(token)) == 2, "the stray lives")
    with pytest.raises(TimeoutError):
        process.wait_blocking(0.01)
    waiter = threading.Thread(target=process.wait_blocking, args=(10,))
    waiter.start()
    assert process.kill_tree_blocking().outcome == "gone"
    waiter.join(10)
    assert not waiter.is_alive()
    assert living(token) == []
    with pytest.raises(TimeoutError):
        host.run_blocking(program("leaves-strays", token, "x") and program("double-fork", token), timeout_s=0.5)
    assert living(token) == []
    with pytest.raises(ValueError, match="PIPE"):
        host.spawn_blocking(["true"], stdout=PIPE)


def test_a_signal_reaches_the_program(host: ProcessHost) -> None:
    async def body() -> None:
        process = await host.spawn(
            ["sh", "-c", "trap 'exit 9' USR1; echo up; while :; do sleep 0.01; done"], stdout=PIPE
        )
        assert process.stdout is not None
        await process.stdout.readline()
        process.signal(signal.SIGUSR1)
        assert await process.wait() == 9
        process.signal(signal.SIGUSR1)  # no other process is hit, and no error raised
        await process.kill_tree()

    run(body)


def test_closing_the_host_kills_all_trees_and_ends_the_zygote(token: str) -> None:
    host = ProcessHost()

    async def body() -> None:
        for role in ROLES:
            await host.spawn(program(role, token))
        await_condition(lambda: len(living(token)) >= sum(ROLES.values()), "all trees stand")

    run(body)
    (link,) = set(host._links.values())
    host.close()
    assert living(token) == []
    assert procfs.read_stat(link.pid) is None
    assert host.statistics().live == 0
    host.close()


def test_a_closed_host_can_be_used_again(token: str) -> None:
    host = ProcessHost()
    for _ in range(2):
        assert host.run_blocking(["echo", "on"]).stdout == b"on\n"
        host.close()


# -- what a result says


def test_only_a_proven_result_without_survivors_is_gone() -> None:
    assert TreeResult().outcome == "gone"
    assert TreeResult(survivors=(1,)).outcome == "unknown"
    assert TreeResult(proven=False).outcome == "unknown"
    assert TreeResult(unattributed=("1 init",)).outcome == "unknown"


def test_without_reapers_the_group_is_killed_and_nothing_is_called_proven(
    monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setattr(processes, "supported", lambda: False)
    host = ProcessHost()

    async def body() -> None:
        process = await host.spawn(program("ignores-term", token), stdout=PIPE)
        result = await process.kill_tree()
        assert result.outcome == "unknown"
        assert await process.wait() == -signal.SIGKILL
        assert living(token) == []
        with pytest.raises(FileNotFoundError):
            await host.spawn(["no-such-program"])

    run(body)
    host.close()


def test_a_signal_never_reaches_a_process_that_is_not_wanted(token: str) -> None:
    with subprocess.Popen(program("ignores-term", token)) as started:
        assert procfs.strike(started.pid, signal.SIGKILL, lambda stat: stat.parent == 1) == "dead"
        assert started.poll() is None
        assert procfs.strike(started.pid, signal.SIGKILL, lambda stat: stat.parent == os.getpid()) == "hit"
        assert started.wait(10) == -signal.SIGKILL
        assert procfs.strike(started.pid, signal.SIGKILL, lambda _stat: True) == "dead"


@contextlib.contextmanager
def running(words: list[str], environment: dict[str, str]) -> Iterator[int]:
    with subprocess.Popen(words, env=environment) as started:
        try:
            yield started.pid
        finally:
            started.kill()


def test_orphans_of_a_host_that_no_longer_lives_are_found_and_others_are_not(token: str) -> None:
    mark = os.fsdecode(procfs.HOST_MARKER)
    dead = subprocess.Popen(["true"])
    dead.wait(10)
    lost = {**os.environ, mark: f"{dead.pid}.1"}
    held = {**os.environ, mark: os.fsdecode(process_spec.host_marker())}
    words = program("ignores-term", token)
    with running(words, lost) as orphan, running(words, held) as owned:
        await_condition(lambda: len(living(token)) == 2, "both run, their environment is in place")
        found = {entry.pid: entry.host for entry in processes.orphans()}
    assert owned not in found
    assert found[orphan] == dead.pid


def test_orphans_that_wiped_their_environment_are_found_by_their_tag(token: str) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait(10)
    with running(program("ignores-term", token), {}) as orphan:
        await_condition(lambda: len(living(token)) == 1, "it runs")
        _, hard = resource.prlimit(orphan, seal.CARRIERS[1])
        resource.prlimit(orphan, seal.CARRIERS[1], (process_tags.make_tag(dead.pid, 1, 1), hard))
        found = {entry.pid: entry.host for entry in processes.orphans()}
    assert found[orphan] == dead.pid


def test_a_forked_child_starts_its_own_zygote_and_leaves_the_trees_of_its_parent_alone(token: str) -> None:
    script = """
import os, stat, sys
from holdfast.runtime.adoption.processes import install
from holdfast.runtime.process_host import process_host
from tests.runtime.processes_zoo import living, program

class Place:
    def adopt_process(self, process):
        return True

def is_socket(fd):
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False

with install(Place):
    host = process_host()
    held = host.spawn_blocking(program("ignores-term", sys.argv[1]))
    child = os.fork()
    if child == 0:
        sockets = [fd for fd in range(3, 50) if is_socket(fd)]
        if sockets:
            os._exit(2)
        ok = host.run_blocking(["echo", "child"]).stdout == b"child\\\\n" and host.statistics().started == 1
        host.close()
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert living(sys.argv[1]) == [held.pid]
    assert held.kill_tree_blocking().outcome == "gone"
    host.close()
""".replace("\\\\", "\\")
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, token],
        check=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": f"{root}:{_SOURCE}"},
    )


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_signal_of_the_terminal_leaves_a_zygote_that_is_starting_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], signum: signal.Signals
) -> None:
    spawn = zygote_link._posix_spawn

    def spawn_and_signal(*args: Any, **options: Any) -> int:
        pid = spawn(*args, **options)
        os.kill(pid, signum)
        return pid

    monkeypatch.setattr(zygote_link, "_posix_spawn", spawn_and_signal)
    link = zygote_link.ZygoteLink(ProgramLease(lambda: None))
    link.socket.setblocking(True)
    try:
        assert marshal.loads(link.socket.recv(1000)) == ("ready", link.pid)
    finally:
        link.socket.close()
        os.waitpid(link.pid, 0)
        os.close(link.pidfd)
        zygote_link.zygotes.discard(link.pid)
    assert capfd.readouterr().err == ""


def test_a_forked_child_keeps_a_descriptor_that_has_the_number_of_one_of_a_dead_zygote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pool forks while a zygote starts, so a process of the pool keeps the zygote's end of the socket open, and the
    host is not told of its end."""
    kept: list[int] = []
    spawn = zygote_link._posix_spawn

    def forking(*args: Any, file_actions: list[tuple[int, ...]], **options: Any) -> int:
        kept.append(os.dup(file_actions[2][1]))
        return spawn(*args, file_actions=file_actions, **options)

    monkeypatch.setattr(zygote_link, "_posix_spawn", forking)
    host = ProcessHost()
    host.start()
    [link] = set(host._links.values())
    number = link.pidfd
    os.kill(link.pid, signal.SIGKILL)
    await_condition(lambda: host.buried_zygotes == 1 and not procfs.read_stat(link.pid), "it is buried")
    await_condition(lambda: not os.path.exists(f"/proc/self/fd/{number}"), "its descriptor is closed")
    os.dup2(kept[0], number)
    try:
        child = os.fork()
        if child == 0:
            os._exit(0 if os.path.exists(f"/proc/self/fd/{number}") else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        os.close(number)
        os.close(kept[0])
        host.close()


def test_what_fails_in_the_reading_thread_is_shown_and_silences_no_tree(
    host: ProcessHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: shown.append(str(arguments.exc_value)))
    fd = os.eventfd(1)

    def fail() -> None:
        host.unwatch(fd)
        raise RuntimeError("out of order")

    host.watch(fd, fail)
    await_condition(lambda: shown == ["out of order"], "the failure was shown")
    os.close(fd)
    assert host.run_blocking(["echo", "on"]).stdout == b"on\n"
