"""The pytest plugin: marked tests are explored, failures come with a replay file, and each detector goes red."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

LOST_UPDATE = """
import asyncio
import pytest

@pytest.mark.explore(schedules=50)
async def test_lost_update():
    total = 0

    async def add():
        nonlocal total
        seen = total
        await asyncio.sleep(0)
        total = seen + 1

    await asyncio.gather(add(), add())
    assert total == 2

@pytest.mark.explore(schedules=5)
async def test_other():
    await asyncio.sleep(3600)
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run a test file with the plugin, whether or not the environment has it as an entry point."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(source: str, *argv: str, ini: str = "", apart: bool = False) -> pytest.RunResult:
        pytester.makepyfile(test_it=source)
        pytester.makeini(f"[pytest]\naddopts = --strict-markers\nfilterwarnings = error\n{ini}")
        how = pytester.runpytest_subprocess if apart else pytester.runpytest_inprocess
        return how("-p", "holdfast.testing.pytest_plugin", *argv)

    return run


def test_a_marked_async_test_is_explored_and_the_summary_says_how_far(run) -> None:
    result = run(
        """
        import asyncio
        import pytest

        @pytest.fixture
        def names():
            return ["a", "b"]

        @pytest.mark.explore(chooser="exhaustive", tasks="both")
        async def test_all(names):
            await asyncio.gather(*(asyncio.sleep(0) for _ in names))
        """,
        "-v",
    )
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*test_all[[]ordinary]*", "*test_all[[]eager]*"])
    result.stdout.re_match_lines(
        [r"explored 2 tests: \d+ schedules .*all there are in 2 of 2.* states, .* schedules/s"]
    )


def test_a_failure_leaves_a_short_replay_file_that_repeats_it(run, pytester: pytest.Pytester) -> None:
    first = run(LOST_UPDATE)
    first.assert_outcomes(failed=1, passed=1)
    first.stdout.fnmatch_lines(["*to see it again: pytest 'test_it.py::test_lost_update' --explore-replay *"])
    first.stdout.fnmatch_lines([">*assert total == 2"])
    first.stdout.no_fnmatch_line("*outcome*")  # the explorer's own code
    (path,) = Path(pytester.path).glob(".pytest_cache/**/explore/*.json")
    recorded = json.loads(path.read_text())
    assert recorded["test"] == "test_it.py::test_lost_update"
    assert set(recorded["versions"]) == {"holdfast", "python"}
    again = run(LOST_UPDATE, "--explore-replay", str(path))
    again.assert_outcomes(failed=1, deselected=1)
    again.stdout.fnmatch_lines(["*schedule 1 (replay)*"])


@pytest.mark.parametrize("content", ["{", '{"format": "other"}', None])
def test_a_replay_file_that_is_none_is_refused_at_once(run, tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "it.json"
    if content is not None:
        path.write_text(content)
    result = run(LOST_UPDATE, "--explore-replay", str(path))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--explore-replay: *it.json*"])


def test_a_replay_of_a_test_that_is_not_here_is_refused(run, pytester: pytest.Pytester) -> None:
    run(LOST_UPDATE)
    (path,) = Path(pytester.path).glob(".pytest_cache/**/explore/*.json")
    result = run(LOST_UPDATE, "--explore-replay", str(path), "-k", "other")
    assert result.ret != 0


@pytest.mark.parametrize(
    ("marker", "word"),
    [
        ("explore(scheduls=3)", "scheduls"),
        ("explore(3)", "does not accept 3"),
        ("explore()", "not an `async def`"),
        ("explore(tasks='lazy')", "'ordinary', 'eager' or 'both'"),
    ],
)
def test_a_wrong_marker_is_a_mistake_that_is_named(run, marker: str, word: str) -> None:
    kind = "def" if "()" in marker else "async def"
    result = run(f"import pytest\n\n@pytest.mark.{marker}\n{kind} test_it():\n    pass\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert word in result.stderr.str() + result.stdout.str()


def test_so_many_schedules_for_each_test(run) -> None:
    result = run(LOST_UPDATE, "--explore-schedules", "7", "-k", "other")
    result.stdout.fnmatch_lines(["explored 1 test: 7 schedules*"])
    none = run(LOST_UPDATE, "--explore-schedules", "0", "-k", "other")
    none.stdout.fnmatch_lines(["*schedules is 0; it must be at least 1*"])


def test_state_in_a_fixture_that_is_kept_between_schedules_is_named(run) -> None:
    result = run(
        """
        import asyncio
        import pytest

        @pytest.fixture
        def seen():
            return []

        @pytest.mark.explore
        async def test_it(seen):
            seen.append(1)
            await asyncio.gather(*(asyncio.sleep(0) for _ in seen[:3]))
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*not deterministic*"])


LEAKS = {
    "tasks": """
    async def main():
        async def stay():
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    pass
        task = asyncio.get_running_loop().create_task(stay(), name="stayer")
        await asyncio.sleep(0)
        kept.append(task)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    kept[0]._log_destroy_pending = False
    """,
    "threads": """
    gate = threading.Event()
    threading.Thread(target=gate.wait, args=(20,), name="stayer", daemon=True).start()
    kept.append(gate)
    """,
    "fds": """
    kept.append(open(__file__))
    """,
    "processes": """
    kept.append(subprocess.Popen(["sleep", "20"]))
    """,
}


@pytest.mark.parametrize("kind", LEAKS)
def test_what_a_test_leaves_behind_is_named(run, kind: str) -> None:
    source = (
        "import asyncio, subprocess, threading, pytest\nkept = []\n\n"
        f"@pytest.mark.no_leaks\ndef test_leaks():\n{LEAKS[kind]}\n"
        f"@pytest.mark.no_leaks(but=('{kind}',))\ndef test_allowed():\n{LEAKS[kind]}\n"
        f"def test_unwatched():\n{LEAKS[kind]}\n"
        "@pytest.mark.no_leaks\ndef test_clean():\n    pass\n"
        "@pytest.fixture(scope='module', autouse=True)\ndef end():\n    yield\n    for one in kept:\n"
        "        for name in ('close', 'set', 'kill', 'wait'):\n"
        "            getattr(one, name, lambda: None)()\n    kept.clear()\n"
    )
    result = run(source)
    result.assert_outcomes(passed=4, errors=1)
    result.stdout.fnmatch_lines([f"*left behind: {kind}: *"])


def test_a_task_that_is_left_to_the_end_of_asyncio_run_is_named(run) -> None:
    source = """
        import asyncio, pytest

        async def forgets():
            asyncio.get_running_loop().create_task(asyncio.sleep(60), name="forgotten")
            await asyncio.sleep(0)

        async def ends_soon():
            asyncio.get_running_loop().create_task(asyncio.sleep(0))

        @pytest.mark.no_leaks
        def test_forgets():
            asyncio.run(forgets())

        @pytest.mark.no_leaks(but=("tasks",))
        def test_allowed():
            asyncio.run(forgets())

        @pytest.mark.no_leaks
        def test_clean():
            asyncio.run(ends_soon())

        def test_unwatched():
            asyncio.run(forgets())
        """
    result = run(source)
    result.assert_outcomes(passed=4, errors=1)
    result.stdout.fnmatch_lines(["left behind: tasks: 'forgotten' was not done when its loop closed*"])


def test_an_async_test_of_anyios_plugin_leaves_nothing_but_what_it_forgets(run) -> None:
    source = """
        import asyncio, pytest
        pytestmark = [pytest.mark.anyio, pytest.mark.no_leaks]

        @pytest.fixture
        def anyio_backend():
            return "asyncio"

        async def test_clean():
            await asyncio.to_thread(int)

        async def test_forgets():
            asyncio.get_running_loop().create_task(asyncio.sleep(60), name="forgotten")
        """
    result = run(source, "-p", "anyio.pytest_plugin")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["left behind: tasks: 'forgotten' *"])


def test_a_thread_that_a_stop_gave_up_is_named_and_idle_ones_are_not(run) -> None:
    source = """
        import asyncio, threading, pytest
        from holdfast import Host

        gate = threading.Event()
        begun = threading.Event()

        def stuck(text):
            begun.set()
            gate.wait(20)

        async def agent(run):
            return str(await run.call(stuck if run.text == "stick" else len, run.text))

        @pytest.mark.no_leaks
        def test_stuck():
            async def main():
                async with Host(agent, store="memory://") as host:
                    sent = await host.session("a").send("stick")
                    while not begun.is_set():
                        await asyncio.sleep(0.01)
                    await host.session("a").interrupt("enough", grace_s=0.05)
                    await host.session("a").wait(sent.message_id)
            asyncio.run(main())

        @pytest.mark.no_leaks
        def test_idle():
            async def main():
                async with Host(agent, store="memory://") as host:
                    assert await host.session("a").ask("four") == "4"
            asyncio.run(main())

        @pytest.fixture(scope="module", autouse=True)
        def end():
            yield
            gate.set()
        """
    result = run(source)
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["left behind: threads: 'holdfast*' still runs*, now at *test_it.py:* in stuck"])


def test_what_is_made_once_for_a_process_and_what_wider_fixtures_make_is_no_leak(run) -> None:
    source = """
        import asyncio, multiprocessing, pytest

        @pytest.mark.parametrize("method", ["spawn", "forkserver"])
        def test_processes(method):
            process = multiprocessing.get_context(method).Process(target=abs, args=(-1,))
            process.start()
            process.join()
            process.close()

        def test_uvloop():
            uvloop = pytest.importorskip("uvloop")
            uvloop.new_event_loop().close()

        @pytest.fixture(scope="session")
        def loop():
            loop = asyncio.new_event_loop()
            yield loop
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

        def test_a_loop_that_lives_on(request):
            loop = request.getfixturevalue("loop")
            loop.run_until_complete(asyncio.to_thread(int))
        """
    result = run(source, ini="holdfast_no_leaks = true\n", apart=True)
    result.assert_outcomes(passed=4)


def test_a_process_of_the_fork_server_that_is_left_is_named(run) -> None:
    source = """
        import multiprocessing, time, pytest
        kept = []

        @pytest.mark.no_leaks
        def test_leaks():
            process = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(20,))
            process.start()
            kept.append(process)

        @pytest.fixture(scope="module", autouse=True)
        def end():
            yield
            for process in kept:
                process.kill()
                process.join()
        """
    result = run(source, apart=True)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["left behind: processes: * still runs"])


def test_blocking_calls_on_a_loop_are_flagged_even_when_they_are_swallowed(run) -> None:
    source = """
        import asyncio, os, socket, subprocess, threading, time
        import concurrent.futures, contextlib, queue

        def do(kind):
            if kind == "sleep":
                time.sleep(0.001)
            elif kind == "process":
                subprocess.run(["true"])
            elif kind == "system":
                os.system("true")
            elif kind == "event":
                threading.Event().wait(0.01)
            elif kind == "future":
                concurrent.futures.Future().result(0.01)
            elif kind == "queue":
                queue.Queue().get(timeout=0.01)
            elif kind == "socket":
                here, there = socket.socketpair()
                with here, there:
                    here.settimeout(0.01)
                    here.recv(1)

        import pytest
        KINDS = ["sleep", "process", "system", "event", "future", "queue", "socket"]

        @pytest.mark.parametrize("kind", KINDS)
        def test_on_the_loop(kind):
            async def main():
                with contextlib.suppress(RuntimeError):
                    do(kind)
            asyncio.run(main())

        @pytest.mark.parametrize("kind", ["sleep", "process"])
        def test_in_a_thread_or_without_a_loop(kind):
            async def main():
                await asyncio.to_thread(do, kind)
            asyncio.run(main())
            do(kind)

        def test_asyncio_itself():
            async def main():
                server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
                reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
                await reader.read()
                writer.close()
                await writer.wait_closed()
                server.close()
                process = await asyncio.create_subprocess_exec("true")
                await process.wait()
            asyncio.run(main())
        """
    result = run(source, ini="holdfast_no_blocking = true\n")
    result.assert_outcomes(passed=10, errors=7)
    result.stdout.fnmatch_lines(["*time.sleep blocks the event loop*await asyncio.sleep*"])
    run(source, "-k", "not on_the_loop").assert_outcomes(passed=3, deselected=7)


def test_without_network_only_this_machine_is_reached(run) -> None:
    source = """
        import socket
        import pytest

        def test_another_machine():
            with socket.socket() as one, pytest.raises(RuntimeError):
                one.connect(("192.0.2.1", 80))

        def test_its_address():
            with pytest.raises(RuntimeError):
                socket.getaddrinfo("example.org", 80)

        def test_its_name():
            with pytest.raises(RuntimeError):
                socket.gethostbyaddr("192.0.2.1")

        def test_a_datagram():
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one, pytest.raises(RuntimeError):
                one.sendmsg([b"x"], [], 0, ("192.0.2.1", 80))

        def test_this_one():
            with socket.create_server(("127.0.0.1", 0)) as server:
                socket.create_connection(server.getsockname()[:2]).close()
                socket.create_connection(("0.0.0.0", server.getsockname()[1])).close()
                with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as other:
                    other.connect_ex(("::ffff:127.0.0.1", server.getsockname()[1]))
                socket.gethostbyaddr("127.0.0.1")
        """
    result = run(source, ini="holdfast_no_network = true\n", apart=True)
    result.assert_outcomes(passed=5, errors=4)
    result.stdout.fnmatch_lines(["*no network, and wanted 192.0.2.1, port 80*"])


def test_a_test_that_asks_for_nothing_is_left_alone(run) -> None:
    result = run("import time\n\ndef test_it():\n    time.sleep(0)\n")
    result.assert_outcomes(passed=1)
    assert "explored" not in result.stdout.str()


MEMORY = """
import asyncio, functools, logging, pytest
from holdfast import Host, Run
from holdfast.runtime import Scope

KEPT = []
UNEVEN = []

@functools.lru_cache(maxsize=2)
def cached(number):
    return str(number) * 100

NUMBERS = iter(range(1000))

async def agent(run):
    return str(await run.call(len, run.text))

@pytest.mark.no_leaks(repeat=5)
def test_keeps_bytes():
    KEPT.append(bytes(1000))

@pytest.mark.no_leaks(repeat=5)
def test_keeps_scopes():
    KEPT.append(Scope("kept"))

@pytest.mark.no_leaks(repeat=5)
def test_keeps_the_runs_of_a_host():
    async def keeper(run):
        KEPT.append(run)
        return "kept"

    async def main():
        async with Host(keeper, store="memory://") as host:
            await host.session("s").ask("hello")

    asyncio.run(main())

@pytest.mark.no_leaks(repeat=5)
@pytest.mark.parametrize("word", ["parameter"])
def test_keeps_nothing(tmp_path, word):
    for _ in range(3):
        cached(next(NUMBERS))
    if next(NUMBERS) % 3 == 0:
        UNEVEN.append(b"y" * 100)
    logging.getLogger("x").warning("a word: %s", word * 100)
    print(word)

    async def main():
        async with Host(agent, store=f"sqlite:///{tmp_path}/store.db") as host:
            await asyncio.gather(*(host.session(f"s{n}").ask("hello") for n in range(3)))
            sent = await host.session("s").send("hello")
            await host.session("s").interrupt("enough")
            await host.session("s").wait(sent.message_id)

    asyncio.run(main())

def test_unwatched():
    KEPT.append(b"z" * 1000)
"""


def test_memory_that_grows_each_time_is_named_with_its_home_and_nothing_else_is(run) -> None:
    result = run(MEMORY, apart=True)
    result.assert_outcomes(passed=2, failed=3)
    result.stdout.fnmatch_lines(
        [
            "*memory grows: the list test_it.KEPT holds about 1 more each time",
            "*memory grows: the list test_it.KEPT holds about 1 more each time",
            "*memory grows: about 1 more holdfast.runtime.scope.scope.Scope each time",
            "*memory grows: the list test_it.KEPT holds about 1 more each time",
            "*memory grows: about * more holdfast.*",
        ]
    )


@pytest.mark.parametrize(
    ("marker", "word"),
    [
        ("no_leaks(repeat=1)", "repeat is 1; it must be a whole number, 3 or more"),
        ("no_leaks(repeat='often')", "it must be a whole number, 3 or more"),
        ("no_leaks(but='fds')", "use a tuple"),
        ("no_leaks(5)", "does not accept 5"),
        ("no_leaks(only=('fds',))", "does not accept only"),
    ],
)
def test_a_wrong_no_leaks_is_a_mistake_that_is_named(run, marker: str, word: str) -> None:
    result = run(f"import pytest\n\n@pytest.mark.{marker}\ndef test_it(): pass\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert word in "\n".join(result.errlines + result.outlines)


def test_memory_is_not_watched_over_an_async_function(run) -> None:
    result = run("import pytest\n\n@pytest.mark.no_leaks(repeat=5)\nasync def test_it(): pass\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "asyncio.run" in "\n".join(result.errlines + result.outlines)
