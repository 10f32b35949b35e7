"""Programs that foreign code starts in a scope end with the scope, and their starters still learn how."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import importlib
import multiprocessing
import os
import posix
import queue
import select
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
from holdfast.runtime.adoption import adopted_programs, stranger_search
from holdfast.runtime.adoption import processes as adoption_processes
from holdfast.runtime.adoption.adopted_programs import AdoptedPrograms
from holdfast.runtime.adoption.kill_passes import KillPasses
from holdfast.runtime.adoption.processes import install, kill_trees
from holdfast.runtime.adoption.stranger_search import StrangerSearch
from holdfast.runtime.oneshot import Oneshot
from holdfast.runtime.process_host import ProcessHost, TreeResult
from holdfast.runtime.processes import procfs, seal, zygote
from holdfast.runtime.processes import tags as process_tags
from holdfast.runtime.processes.foreign_process import ForeignProcess
from holdfast.runtime.processes.killer import Killer
from tests.runtime.processes_zoo import ROLES, await_condition, has_strayed, living, program

pytestmark = pytest.mark.skipif(not procfs.supported(), reason="foreign trees are adopted only on Linux")


class Place:
    """Stands for a scope: keeps what it is given."""

    def __init__(self) -> None:
        self.members: list[ForeignProcess] = []
        self.open = True

    def adopt_process(self, process: ForeignProcess) -> bool:
        if self.open:
            self.members.append(process)
        return self.open

    async def kill(self) -> TreeResult:
        return await kill_trees([member for member in self.members if not member.ended], bound_s=10)


here: contextvars.ContextVar[Place | None] = contextvars.ContextVar("here", default=None)


@contextlib.contextmanager
def inside(place: Place) -> Iterator[Place]:
    token = here.set(place)
    try:
        yield place
    finally:
        here.reset(token)


@pytest.fixture
def token() -> Iterator[str]:
    word = f"zoo-{uuid.uuid4().hex}"
    yield word
    for pid in living(word):  # only after a failure
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Gate:
    """Holds programs back until they were tagged: what they fork before that carries only the marker."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._closed: list[Path] = []

    def __call__(self, words: list[str]) -> list[str]:
        path = self._folder / f"gate-{len(list(self._folder.iterdir()))}"
        os.mkfifo(path)
        self._closed.append(path)
        return ["/bin/sh", "-c", 'read -r _ < "$0"; exec "$@"', str(path), *words]

    def open(self) -> None:
        """Let them run."""
        while self._closed:
            self._closed.pop().write_text("go\n")


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


@pytest.fixture
def start(token: str) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts programs; what the test has not waited for is waited for after it."""
    all_started: list[subprocess.Popen[bytes]] = []

    def started(*words: str) -> subprocess.Popen[bytes]:
        all_started.append(subprocess.Popen(words))
        return all_started[-1]

    yield started
    for one in all_started:
        one.kill()
        one.wait(10)


@pytest.fixture(scope="module")
def host() -> Iterator[ProcessHost]:
    with contextlib.suppress(ImportError):
        importlib.import_module("uvloop")  # before install(), as a program that runs on it does
    made = ProcessHost()
    with install(here.get, made):
        yield made
    made.close()


@pytest.fixture(autouse=True)
def installed(host: ProcessHost) -> None:
    """Adoption is on in every test."""


async def bounded(body: Callable[[], Awaitable[None]]) -> None:
    async with asyncio.timeout(30):
        await body()


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(bounded(body))


def zombies() -> list[int]:
    return [pid for pid in procfs.children(os.getpid()) if (stat := procfs.read_stat(pid)) is not None and stat.dead]


@pytest.mark.parametrize("role", ROLES)
def test_nothing_of_a_foreign_tree_outlives_its_kill(
    gate: Gate, token: str, start: Callable[..., subprocess.Popen[bytes]], role: str
) -> None:
    async def body() -> None:
        earlier = zombies()  # of tests that killed reapers and zygotes: they are waited for by the next host only
        with inside(Place()) as place:
            started = start(*gate(program(role, token)))
        gate.open()
        await_condition(lambda: len(living(token)) >= ROLES[role], f"{role} has started its processes")
        await_condition(lambda: role != "leaves-strays" or place.members[0].ended, "its end was seen")
        result = await place.kill()
        assert living(token) == []
        assert result.outcome == "gone", result
        assert started.wait(10) == (7 if role == "leaves-strays" else -signal.SIGKILL)
        await_condition(lambda: set(zombies()) <= set(earlier), "orphans were waited for")

    run(body)


def by_popen(words: list[str]) -> Callable[[], int]:
    return functools.partial(subprocess.Popen(words).wait, 10)


def by_posix_spawn(words: list[str]) -> Callable[[], int]:
    pid = os.posix_spawn(words[0], words, os.environ)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def by_fork(words: list[str]) -> Callable[[], int]:
    pid = os.fork()
    if pid == 0:
        os.execv(words[0], words)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def by_multiprocessing(method: str, words: list[str]) -> Callable[[], int]:
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=subprocess.call, args=(words,))
    process.start()

    def wait() -> int:
        process.join(10)
        return int(process.exitcode)

    return wait


WAYS: dict[str, Callable[[list[str]], Callable[[], int]]] = {
    "popen": by_popen,
    "posix-spawn": by_posix_spawn,
    "fork": by_fork,
    "multiprocessing-fork": functools.partial(by_multiprocessing, "fork"),
    "multiprocessing-spawn": functools.partial(by_multiprocessing, "spawn"),
    "multiprocessing-forkserver": functools.partial(by_multiprocessing, "forkserver"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_however_a_program_is_started_it_dies_with_its_scope_and_its_starter_learns_how(
    gate: Gate, token: str, way: str
) -> None:
    with inside(Place()) as place:
        role = "new-session" if way == "multiprocessing-forkserver" else "wiped-environment"  # see install()
        wait = WAYS[way](gate(program(role, token)))
    gate.open()
    await_condition(lambda: len(living(token)) >= 2, "the tree stands")
    result = asyncio.run(place.kill())
    assert result.outcome == "gone", result
    assert wait() == -signal.SIGKILL
    assert living(token) == []


@pytest.mark.parametrize("way", ["exec", "shell"])
@pytest.mark.parametrize("watcher", ["default", "threaded", "pidfd", "uvloop"])
def test_asyncio_programs_die_with_their_scope_and_their_watcher_learns_how(token: str, way: str, watcher: str) -> None:
    async def body() -> None:
        with inside(Place()) as place:
            words = program("double-fork", token)
            if way == "exec":
                started = await asyncio.create_subprocess_exec(*words)
            else:
                started = await asyncio.create_subprocess_shell("exec sleep 1000")
        assert [member.pid for member in place.members] == [started.pid]
        if way == "exec":
            await_condition(lambda: len(living(token)) == 2, "the tree stands")
        result = await place.kill()
        assert result.outcome == "gone", result
        assert await started.wait() == -signal.SIGKILL
        assert living(token) == []

    if watcher == "uvloop":
        pytest.importorskip("uvloop").run(bounded(body))
        return
    if watcher != "default":
        name = {"threaded": "ThreadedChildWatcher", "pidfd": "PidfdChildWatcher"}[watcher]
        if sys.version_info >= (3, 12):
            pytest.skip("watchers cannot be chosen any more")
        asyncio.set_child_watcher(getattr(asyncio, name)())
    try:
        run(body)
    finally:
        if watcher != "default":
            asyncio.set_child_watcher(asyncio.ThreadedChildWatcher())


def test_scopes_and_what_is_outside_of_them_do_not_disturb_each_other(
    gate: Gate, token: str, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    async def body() -> None:
        outside = start(*program("double-fork", f"{token}-outside"))
        with inside(Place()) as first:
            start(*gate(program("wiped-environment", f"{token}-1")))
        with inside(Place()) as second:
            start(*gate(program("wiped-environment", f"{token}-2")))
        gate.open()
        names = [f"{token}-1", f"{token}-2", f"{token}-outside"]
        await_condition(lambda: all(has_strayed(name) for name in names), "all trees stand")
        assert len((await first.kill()).killed) == 2
        await_condition(lambda: [len(living(name)) for name in names] == [0, 2, 2], "the others go on")
        await second.kill()
        await_condition(lambda: [len(living(name)) for name in names] == [0, 0, 2], "the outside goes on")
        outside.kill()
        outside.wait(10)
        for pid in living(f"{token}-outside"):
            os.kill(pid, signal.SIGKILL)

    run(body)


def test_strays_of_a_program_that_ended_become_members_before_its_end_is_told(
    gate: Gate, token: str, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    async def body() -> None:
        with inside(Place()) as place:
            started = start(*gate(program("leaves-strays", token)))
        gate.open()
        assert await asyncio.to_thread(started.wait, 10) == 7
        await place.members[0].wait_ended()
        assert set(living(token)) <= {member.pid for member in place.members[1:]}
        assert len(place.members) >= 3
        await place.kill()
        assert living(token) == []

    run(body)


def test_a_start_after_the_scope_closed_is_killed_at_once(
    token: str, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    place = Place()
    place.open = False
    with inside(place):
        started = start(*program("double-fork", token))
    assert started.wait(10) == -signal.SIGKILL


def test_exit_statuses_of_short_programs_are_never_taken_from_their_starters() -> None:
    wrong: list[int] = []

    def start_many(place: Place | None) -> None:
        token = here.set(place)
        for number in range(40):
            if (got := subprocess.run(["sh", "-c", f"exit {number}"], timeout=60).returncode) != number:
                wrong.append(got)  # noqa: PERF401
        here.reset(token)

    stop = threading.Event()

    def bury() -> None:
        adoption = adoption_processes._adoption
        assert adoption is not None
        while not stop.is_set():
            adoption.programs._tick_at = 0.0
            adoption.programs._busy = True
            adoption.programs.tick()

    threads = [threading.Thread(target=start_many, args=(place,)) for place in (None, Place(), Place())]
    burier = threading.Thread(target=bury)
    for thread in (*threads, burier):
        thread.start()
    for thread in threads:
        thread.join(60)
    stop.set()
    burier.join(10)
    assert wrong == []


def test_what_was_started_outside_of_scopes_is_no_concern_of_theirs(
    token: str, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """An orphan of it comes home as a stray of a scope would."""

    async def body() -> None:
        with inside(Place()) as place:
            start(*program("ignores-term", f"{token}-tree"))
        outside = start("sh", "-c", 'setsid "$@" & exit 0', "sh", *program("ignores-term", token))
        outside.wait(10)
        await_condition(lambda: len(living(token)) == len(living(f"{token}-tree")) == 1, "both live")
        await_condition(
            lambda: living(token)[0] in procfs.children(os.getpid()), "the one that belongs to nobody came home"
        )
        (lost,) = living(token)
        assert adoption_processes.strangers(0) == 0
        result = await place.kill()
        assert (result.outcome, result.unattributed) == ("gone", ())
        assert living(f"{token}-tree") == []
        os.kill(lost, signal.SIGKILL)

    run(body)


def test_the_shared_parts_of_multiprocessing_belong_to_no_scope() -> None:
    from multiprocessing import resource_tracker

    with inside(Place()) as place:
        resource_tracker.ensure_running()
        multiprocessing.get_context("forkserver")
        from multiprocessing import forkserver

        forkserver.ensure_running()
    assert place.members == []


def test_adoption_leaves_no_descriptor(host: ProcessHost) -> None:
    with inside(Place()) as place:
        for _ in range(20):
            subprocess.run(["true"], timeout=10)
    await_condition(lambda: all(member.ended for member in place.members), "all ends were seen")
    assert len(place.members) == 20
    await_condition(lambda: not host._watched, "nothing is watched any more")
    adoption = adoption_processes._adoption
    assert adoption is not None
    await_condition(
        lambda: not adoption.programs._families and not adoption.programs._by_tag, "their owners are forgotten"
    )


def popen_of_true() -> int:
    program = subprocess.Popen(["true"])
    program.returncode = 0  # the test waits for it
    return program.pid


def posix_spawn_of_true() -> int:
    return os.posix_spawn("/bin/true", ["true"], dict(os.environ))


def fork_that_ends() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    return pid


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_every_program_has_the_tag_of_its_own_scope_from_its_first_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is started at the same time; nobody is given a tag when it runs already."""
    plain = seal.Seal.put
    monkeypatch.setattr(seal.Seal, "put", lambda self, pid, tag: plain(self, pid, tag) if pid == 0 else False)
    adoption = adoption_processes._adoption
    assert adoption is not None
    carrier = adoption.seal.carrier
    assert carrier is not None
    right: list[str] = []
    wrong: list[str] = []

    def start_some(place: Place | None, way: Callable[[], int]) -> None:
        here.set(place)
        for _ in range(25):
            pid = way()
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            tag = process_tags.tag_of(pid, carrier)
            members = [] if place is None else place.members
            expected = [adoption.tags.outside] if place is None else [one.tag for one in members if one.pid == pid]
            (right if expected[-1:] == [tag] else wrong).append(way.__name__)
            os.waitpid(pid, 0)

    threads = [
        threading.Thread(target=start_some, args=(place, way))
        for place in (Place(), Place(), None)
        for way in (popen_of_true, posix_spawn_of_true, fork_that_ends)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert len(right) == 225
    assert process_tags.tag_of(os.getpid(), carrier) == adoption.tags.own


def test_a_program_of_os_system_is_a_member_and_its_status_is_as_ever(token: str) -> None:
    assert os.system("exit 3") == 3 << 8
    assert os.system("kill -9 $$") == 9

    async def body() -> None:
        place = Place()

        def call() -> int:
            with inside(place):
                return os.system(f"trap '' TERM; setsid sh -c 'sleep 1000; :' {token} & sleep 1000")

        calling = asyncio.create_task(asyncio.to_thread(call))
        while not living(token):
            await asyncio.sleep(0.005)
        assert (await place.kill()).outcome == "gone"
        assert living(token) == []
        assert await calling == 9

    run(body)


def test_an_event_of_one_installation_ends_no_program_of_the_next() -> None:
    """The reading thread is held between two events; the number of the second one's descriptor is another's by then."""
    script = (
        "import os, subprocess, threading\n"
        "from holdfast.runtime.adoption.processes import install\n"
        "from holdfast.runtime.process_host import process_host\n"
        "from tests.runtime.adoption.test_processes import Place\n"
        "host, first, second = process_host(), Place(), Place()\n"
        "reached, go_on = [threading.Event() for _ in '12'], [threading.Event() for _ in '12']\n"
        "def stop_at(number):\n"
        "    def act():\n"
        "        reached[number].set()\n"
        "        go_on[number].wait(20)\n"
        "    host.call_in_reading_thread(act)\n"
        "    return act\n"
        "installed = install(lambda: first, host)\n"
        "programs = [subprocess.Popen(['sleep', '600']) for _ in range(8)]\n"
        "stop_at(0)\n"
        "assert reached[0].wait(20)\n"
        "stop_at(1)\n"
        "for program in programs:\n"
        "    program.kill()\n"
        "    program.wait(20)\n"
        "go_on[0].set()\n"
        "assert reached[1].wait(20)\n"
        "installed.restore()\n"
        "with install(lambda: second, host):\n"
        "    programs = [subprocess.Popen(['sleep', '600']) for _ in range(16)]\n"
        "    go_on[1].set()\n"
        "    done = threading.Event()\n"
        "    host.call_in_reading_thread(lambda: host.call_in_reading_thread(done.set))\n"
        "    assert done.wait(20)\n"
        "    print(len(second.members), sum(member.ended for member in second.members))\n"
        "    for program in programs:\n"
        "        program.kill()\n"
        "        program.wait(20)\n"
        "host.close()\n"
    )
    root = Path(__file__).parents[3]
    path = f"{root}:{Path(processes.__file__).parents[2]}"
    ran = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        timeout=60,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert ran.stdout.split() == [b"16", b"0"]


@pytest.mark.parametrize("signum", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_kill_is_done_though_the_zygote_that_shall_do_it_is_stopped_or_killed(
    gate: Gate,
    token: str,
    start: Callable[..., subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    signum: signal.Signals,
) -> None:
    sent: list[Killer] = []
    submit = Killer.submit

    def struck(killer: Killer) -> bool:
        if not sent:
            sent.append(killer)
            os.kill(killer._link.pid, signum)
            state = ("T", "Z")
            await_condition(
                lambda: (stat := procfs.read_stat(killer._link.pid)) is None or stat.state in state, "it is struck"
            )
        return submit(killer)

    monkeypatch.setattr(Killer, "submit", struck)

    async def body() -> None:
        with inside(Place()) as place:
            started = start(*gate(program("double-fork", token)))
        gate.open()
        await_condition(lambda: len(living(token)) >= ROLES["double-fork"], "they live")
        assert (await place.kill()).outcome == "gone"
        assert living(token) == []
        assert started.wait(10) == -signal.SIGKILL

    run(body)


def test_reapers_of_a_killed_zygote_do_not_stay_zombies(
    host: ProcessHost, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopted_programs, "_UNKNOWN_ZOMBIE_S", 0.2)
    adoption = adoption_processes._adoption
    assert adoption is not None

    async def body() -> None:
        process = await host.spawn(program("ignores-term", token))
        program_stat = procfs.read_stat(process.pid)
        assert program_stat is not None
        reaper = program_stat.parent
        zygote = procfs.read_stat(reaper)
        assert zygote is not None
        adoption.programs._busy = False  # as when nothing else was started that would have it look
        os.kill(zygote.parent, signal.SIGKILL)
        await_condition(lambda: reaper in procfs.children(os.getpid()), "the reaper came home")
        assert (await process.kill_tree()).outcome == "gone"
        await_condition(lambda: procfs.read_stat(reaper) is None, "it was waited for")
        (await host.spawn(["true"])).wait_blocking(10)

    run(body)


def test_a_forked_child_starts_programs_though_a_lock_was_held_at_its_fork(host: ProcessHost) -> None:
    adoption = adoption_processes._adoption
    assert adoption is not None
    with adoption.programs._lock:
        child = posix.fork()  # as on another thread; the one in os would wait for the lock here
        if child == 0:
            status = 1
            try:
                grandchild = os.fork()
                if grandchild == 0:
                    os._exit(0)
                os.waitpid(grandchild, 0)
                status = subprocess.run(["true"], check=False).returncode
            finally:
                os._exit(status)
    ended: list[int] = []

    def over() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        ended.extend([status] if pid else [])
        return bool(ended)

    try:
        await_condition(over, "the child has started its programs")
    finally:
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert ended == [0]


def test_restoring_takes_the_wrappers_off() -> None:
    script = (
        "import os, subprocess, resource\n"
        "from holdfast.runtime import process_host as processes\n"
        "from holdfast.runtime.adoption import processes as adoption_processes\n"
        "before = (os.fork, os.posix_spawn, subprocess._fork_exec, resource.getrlimit(10))\n"
        "with adoption_processes.install(lambda: None):\n"
        "    assert os.fork is not before[0]\n"
        "    try:\n"
        "        adoption_processes.install(lambda: None)\n"
        "    except RuntimeError as error:\n"
        "        assert 'restore' in str(error)\n"
        "assert before == (os.fork, os.posix_spawn, subprocess._fork_exec, resource.getrlimit(10))\n"
        "processes.process_host().close()\n"
    )
    root = Path(processes.__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30, env={**os.environ, "PYTHONPATH": str(root)})


def test_what_a_scope_does_not_take_any_more_is_dead_before_who_left_it_counts_as_ended() -> None:
    alive: list[int] = []

    def leave_a_daemon() -> None:
        place = Refusing()
        with inside(place):
            left = subprocess.Popen(["sh", "-c", "setsid sleep 1000 & read -r _"], stdin=subprocess.PIPE)
        program = place.members[0]
        program.on_end(lambda: alive.extend(place.living_refused()))
        place.open = False
        left.communicate(b"\n", timeout=10)
        await_condition(lambda: program.ended, "it has ended")
        assert len(place.refused) == 1

    for _ in range(30):
        leave_a_daemon()
    assert alive == []


class Refusing(Place):
    """Remembers what it did not take."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[ForeignProcess] = []

    def adopt_process(self, process: ForeignProcess) -> bool:
        taken = super().adopt_process(process)
        if not taken:
            self.refused.append(process)
        return taken

    def living_refused(self) -> list[int]:
        stats = [(one, procfs.read_stat(one.pid)) for one in self.refused]
        return [one.pid for one, stat in stats if stat is not None and stat.started == one.started and not stat.dead]


# -- when the host dies

_HOST = """
import asyncio, contextvars, os, subprocess, sys
from holdfast.runtime.adoption.processes import install
from tests.runtime.processes_zoo import ROLES, program

class Place:
    def adopt_process(self, process):
        return True

place = Place()
restorer = install(lambda: place)
gate = ["/bin/sh", "-c", 'read -r _; exec "$@"', "sh"]
held = [subprocess.Popen([*gate, *program(role, sys.argv[1])], stdin=subprocess.PIPE) for role in ROLES]
for one in held:
    one.stdin.write(b"go\\n")
    one.stdin.close()
restorer.restore()
subprocess.Popen(program("ignores-term", sys.argv[1] + "-outside"))
print("up", flush=True)
import time
time.sleep(1000)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_foreign_trees_of_scopes_do_not_outlive_the_host_and_others_do(token: str, end: signal.Signals) -> None:
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", _HOST, token],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={**os.environ, "PYTHONPATH": f"{root}:{Path(processes.__file__).parents[2]}"},
    ) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == b"up\n"
            await_condition(lambda: len(living(token)) >= sum(ROLES.values()), "all trees stand")
        finally:
            started.send_signal(end)
    try:
        await_condition(lambda: living(token) == [], "the trees are gone")
        assert len(living(f"{token}-outside")) == 1
    finally:
        for pid in living(f"{token}-outside"):
            os.kill(pid, signal.SIGKILL)


def test_a_tag_says_whose_it_is() -> None:
    tag = process_tags.make_tag(4_194_303, 123_456_789, 65_535)
    assert process_tags.host_of_tag(tag) == (4_194_303, 123_456_789 & 0xFFFFF)
    assert process_tags.scope_of_tag(tag) == 65_535
    assert tag < 1 << 63
    assert process_tags.host_of_tag(12345) is None


def test_who_was_struck_but_is_still_dying_is_not_called_gone(
    token: str, start: Callable[..., subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = start("sh", "-c", '"$@" & wait', "sh", *program("ignores-term", token))
    await_condition(lambda: len(living(token)) == 2, "the child lives")
    (child,) = [pid for pid in living(token) if pid != parent.pid]
    strikes: list[int] = []
    plain = process_tags._strike

    def strike(pid: int, tag: int, carried: Callable[[int, int], bool]) -> bool | None:
        strikes.append(pid)
        if pid == child and strikes.count(child) < 3:  # it takes its time, as one does that writes to a slow disk
            return carried(pid, tag)
        return plain(pid, tag, carried)

    monkeypatch.setattr(process_tags, "_strike", strike)
    started = procfs.start_time(parent.pid)
    assert started is not None
    told: dict[int, tuple[list[int], list[int]]] = {}
    process_tags.kill(os.getpid(), (), None, {7: [(parent.pid, started)]}, 10, told.update, sealed=False)
    killed, survivors = told[7]
    assert survivors == []
    assert set(killed) == {parent.pid, child}
    assert living(token) == []


def test_what_a_host_leaves_is_killed_where_no_process_can_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise BlockingIOError("no room for a process")

    ended: list[str] = []
    monkeypatch.setattr(os, "fork", refused)
    alone: zygote.Zygote = object.__new__(zygote.Zygote)  # without the signal handlers of a process of its own
    alone._clear_up(lambda: ended.append("here"))
    assert ended == ["here"]


_TENDED = """
import os, subprocess, sys
from holdfast.runtime.processes import procfs, zygote
stray, reaper = (subprocess.Popen(["sleep", "60"]).pid for _ in range(2))
elsewhere = int(sys.argv[1])
alone = object.__new__(zygote.Zygote)  # without the signal handlers of a process of its own
alone._forked, alone._lost, alone._stray_kills = {reaper}, {}, {}
procfs.descendants = lambda pid: [elsewhere, reaper]  # they have the numbers of descendants that ended meanwhile
alone._tend()
os.waitpid(stray, 0)
print(list(alone._stray_kills) == [stray], procfs.living([reaper]) == [reaper])
os.kill(reaper, 9)
"""


def test_the_zygote_kills_nobody_who_took_over_the_number_of_a_stray(
    start: Callable[..., subprocess.Popen[bytes]],
) -> None:
    innocent = start("sleep", "60")
    source = Path(processes.__file__).parents[2]
    said = subprocess.run(
        [sys.executable, "-c", _TENDED, str(innocent.pid)],
        check=True,
        timeout=30,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(source)},
    ).stdout
    assert (said, innocent.poll()) == (b"True True\n", None)


# Many scopes at once


@pytest.mark.parametrize("count", [2, 24])
def test_kills_of_many_scopes_at_once_take_two_passes(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for who asks first, and one for all who ask while it looks; each looks at our children once before."""
    adoption = adoption_processes._adoption
    assert adoption is not None
    asked: list[Oneshot[TreeResult]] = []
    passes: list[Killer] = []
    looks: list[object] = []
    plain_ask, plain_submit, plain_prepare = KillPasses.ask, Killer.submit, adoption.passes._prepare

    def ask(self: KillPasses, tags: Any, bound_s: float) -> Oneshot[TreeResult]:
        answer = plain_ask(self, tags, bound_s)
        asked.append(answer)
        return answer

    def submit(killer: Killer) -> bool:
        if len(asked) < count:
            return False  # as when the zygote has too many requests: it is tried again
        if killer not in passes:  # before it is sent: its answer may be there before this goes on
            passes.append(killer)
        return plain_submit(killer)

    def prepare() -> object:
        looks.append(None)
        return plain_prepare()

    monkeypatch.setattr(KillPasses, "ask", ask)
    monkeypatch.setattr(Killer, "submit", submit)
    monkeypatch.setattr(adoption.passes, "_prepare", prepare)
    places = [Place() for _ in range(count)]
    programs: list[subprocess.Popen[bytes]] = []
    for place in places:
        with inside(place):
            programs.append(subprocess.Popen(["sleep", "1000"]))

    async def body() -> None:
        results = await asyncio.gather(*(place.kill() for place in places))
        assert {result.outcome for result in results} == {"gone"}

    run(body)
    assert [program.wait(10) for program in programs] == [-signal.SIGKILL] * count
    assert (len(passes), len(looks)) == (2, 2)


@pytest.mark.parametrize("count", [1, 200])
def test_a_kill_of_many_scopes_looks_at_all_processes_twice(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []

    def every_pid() -> Iterator[int]:
        looks.append(None)
        return iter(())  # whatever else the machine starts

    monkeypatch.setattr(process_tags, "_every_pid", every_pid)
    tags: dict[int, list[tuple[int, int]]]
    tags = {process_tags.make_tag(os.getpid(), 7, number): [] for number in range(1, count + 1)}
    told: dict[int, tuple[list[int], list[int]]] = {}
    process_tags.kill(os.getpid(), (), None, tags, 10, told.update, sealed=True)
    assert told == dict.fromkeys(tags, ([], []))
    assert len(looks) == 2


def test_ends_at_the_same_time_cost_one_look_for_strays(
    host: ProcessHost, start: Callable[..., subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    plain = AdoptedPrograms.enter_strays

    def enter_strays(adoption: Any, *families: Any) -> bool:
        looks.append(len(families))
        return plain(adoption, *families)

    await_condition(lambda: not host._watched, "what other tests started has ended, and its end was told")
    monkeypatch.setattr(AdoptedPrograms, "enter_strays", enter_strays)
    places = [Place() for _ in range(16)]
    held, go_on = threading.Event(), threading.Event()
    for place in places:
        with inside(place):
            start("sleep", "1000")

    def hold() -> None:
        held.set()
        go_on.wait(20)

    host.call_in_reading_thread(hold)
    assert held.wait(20)
    poll = select.poll()
    for place in places:
        assert place.members[0].signal(signal.SIGKILL)
        poll.register(place.members[0]._pidfd, select.POLLIN)
    await_condition(lambda: len(poll.poll(0)) == len(places), "all have ended")
    go_on.set()
    await_condition(lambda: all(place.members[0].ended for place in places), "all ends are told")
    assert looks == [len(places)]


def test_many_who_ask_for_strangers_cost_one_look_and_are_told_some_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    adoption = adoption_processes._adoption
    assert adoption is not None
    looks: list[None] = []
    plain = StrangerSearch.claim

    def claim(adoption: Any) -> Any:
        looks.append(None)
        return plain(adoption)

    monkeypatch.setattr(StrangerSearch, "claim", claim)
    count = 3 * stranger_search._TOLD_PER_TURN + 1
    turns: list[list[int]] = [[]]

    async def body() -> None:
        loop = asyncio.get_running_loop()
        told = loop.create_future()

        def tell(number: int, strangers: int) -> None:
            turns[-1].append(number)
            if number == count - 1:
                told.set_result(strangers)

        for number in range(count):
            adoption_processes.look_soon(loop, 0.0, functools.partial(tell, number))
        assert turns == [[]]
        while not told.done():
            await asyncio.sleep(0)
            turns.append([])

    run(body)
    assert [number for turn in turns for number in turn] == list(range(count))
    assert max(map(len, turns)) == stranger_search._TOLD_PER_TURN
    assert len(looks) == 1


def test_a_program_that_is_dead_counts_no_processes_before_its_end_is_noted(
    start: Callable[..., subprocess.Popen[bytes]],
) -> None:
    """A stop proves the end from the kernel's data, which the thread that notes ends may read later."""
    program = start("sleep", "1000")
    started = procfs.start_time(program.pid)
    assert started is not None
    process = ForeignProcess(program.pid, "sleep", started, 0, -1, orphan=False, unnamed=False)
    assert process.count(100) == 1
    program.kill()
    os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped
    assert not process.ended
    assert process.count(100) == 0


def test_a_signal_goes_out_before_another_process_can_get_the_number_of_the_descriptor(
    start: Callable[..., subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reading thread closes the descriptor of a program that has ended, just while another thread signals it."""
    program = start("sleep", "1000")
    pidfd = os.pidfd_open(program.pid)
    process = ForeignProcess(program.pid, "sleep", 0, 0, pidfd, orphan=False, unnamed=False)
    came: queue.Queue[str] = queue.Queue()
    lock = process._lock

    class Watched:
        def __enter__(self) -> None:
            if not lock.acquire(blocking=False):
                came.put("waits")
                lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    def close() -> None:
        os.close(process.give_up_pidfd())
        came.put("closed")

    closing = threading.Thread(target=close)
    plain = procfs.pidfd_signal

    def pidfd_signal(number: int, signum: int) -> None:
        closing.start()
        assert came.get(timeout=20) == "waits"
        plain(number, signum)

    monkeypatch.setattr(process, "_lock", Watched())
    monkeypatch.setattr(procfs, "pidfd_signal", pidfd_signal)
    assert process.signal(signal.SIGTERM)
    assert program.wait(20) == -signal.SIGTERM
    closing.join(20)
    assert not process.signal(signal.SIGTERM)
