"""Set-up: two commands, and clear words when they cannot work."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pyte
import pytest

ROOT = Path(__file__).parents[2]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def install(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "requirements" / "install.py", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


PIP = """
import sys; sys.path.insert(0, "requirements"); import install
lock = install.Path(sys.argv[1])
lock.write_text("".join(f"package{number}==1.0\\n" for number in range(25)))
pip = '''
for number in range(25): print(f"Collecting package{number}==1.0", flush=True)
print("Installing collected packages: …")
'''
install.run_pip((sys.executable, "-c", pip), lock)
install.say("done")
"""
"""A program that installs with a pip that only says so."""


def on_terminal(argv: list[str], *, interrupt_after: str = "") -> tuple[int, str]:
    """Run a command on a terminal, and press Ctrl-C when a text comes; its exit code, and what it wrote."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv(argv[0], argv)
    written = b""
    with os.fdopen(terminal, "r+b", buffering=0) as stream:
        while True:
            try:
                data = stream.read(65_536)
            except OSError:  # the other side is closed
                break
            if not data:
                break
            written += data
            if interrupt_after and interrupt_after.encode() in written:
                interrupt_after = ""
                stream.write(b"\x03")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), written.decode()


def test_help_lists_every_target_that_a_person_types() -> None:
    targets = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"serve", "chat", "test", "nightly", "bench", "lint", "types", "layers", "docs", "lock", "help"} <= targets
    shown = make("help").stdout
    assert [target for target in targets if f"make {target}" not in shown] == []


def test_without_a_python_it_says_what_to_do() -> None:
    result = make("PYTHON=", "serve")
    assert result.returncode != 0
    assert "needs Python 3.11" in result.stdout
    assert "make PYTHON=" in result.stdout


def test_an_environment_that_fits_the_lock_is_left_alone(tmp_path: Path) -> None:
    env = tmp_path / "env"
    (env / "bin").mkdir(parents=True)
    (env / "bin" / "python").symlink_to(sys.executable)
    program = "import sys; sys.path.insert(0, 'requirements'); import install; print(install.stamp_of('serve'), end='')"
    stamp = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (env / ".stamp-serve").write_text(stamp)
    result = install("serve", str(env))
    assert (result.returncode, result.stdout) == (0, ""), result.stdout + result.stderr


def test_two_who_make_an_environment_at_once_take_turns(tmp_path: Path) -> None:
    # `make serve` and, a moment later, `make chat` in another terminal: both found no environment.
    program = """
import sys; sys.path.insert(0, "requirements"); import install
def make(lock, env):
    (env / "bin").mkdir(parents=True)  # fails if the other one is here, too
    print("making", flush=True)
    sys.stdin.readline()
    (env / "bin" / "python").symlink_to(sys.executable)
    (env / ".stamp-dev").write_text(install.stamp_of("dev"))
install.make = make
install.install(sys.argv[1], install.Path(sys.argv[2]))
print("ready", flush=True)
"""

    def begin(lock: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", program, lock, str(tmp_path / "env")]
        return subprocess.Popen(
            argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    with begin("dev") as first, begin("serve") as second:
        assert first.stdout is not None and second.stdout is not None
        said = {first: [first.stdout.readline()], second: [second.stdout.readline()]}
        ahead, behind = (first, second) if said[first] == ["making\n"] else (second, first)
        assert "another make is at work" in said[behind][0], said
        rest = ahead.communicate("\n", timeout=30)
        assert (ahead.returncode, rest) == (0, ("ready\n", ""))
        rest = behind.communicate("\n", timeout=30)
        assert (behind.returncode, rest) == (0, ("ready\n", ""))


def test_progress_is_one_line_that_is_rewritten_on_a_terminal(tmp_path: Path) -> None:
    code, written = on_terminal([sys.executable, "-c", PIP, str(tmp_path / "lock.txt")])
    assert (code, "  7/25 package6" in written) == (0, True), written
    screen = pyte.Screen(80, 24)
    pyte.Stream(screen).feed(written)
    assert [line.rstrip() for line in screen.display if line.strip()] == ["» done"]


def test_progress_in_a_log_is_a_line_for_every_tenth_package(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", PIP, str(tmp_path / "lock.txt")]
    written = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert written.splitlines() == ["  10/25 package9", "  20/25 package19", "  unpacking", "» done"]


def test_an_installation_takes_the_lock_as_it_is(tmp_path: Path) -> None:
    show = PIP.replace('print("Installing', 'import sys; print("Installing", *sys.argv[1:]); sys.exit(1); print("')
    argv = [sys.executable, "-c", show, str(tmp_path / "lock.txt")]
    written = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert f"Installing --require-hashes --no-deps --requirement {tmp_path / 'lock.txt'}" in written


def test_ctrl_c_during_an_installation_ends_it_without_a_traceback(tmp_path: Path) -> None:
    argv = [sys.executable, str(ROOT / "requirements" / "install.py"), "serve", str(tmp_path / "env")]
    code, written = on_terminal(argv, interrupt_after="» making")
    assert code == 130, written
    assert "interrupted; run the same command again" in written
    assert "Traceback" not in written


def test_a_lock_that_does_not_exist_is_named(tmp_path: Path) -> None:
    result = install("nothing", str(tmp_path / "env"))
    assert result.returncode == 2
    assert "no lock 'nothing'" in result.stdout


CHECKS = ["docs", "layers", "lint", "types"]


@pytest.mark.parametrize("failing", ["", "env-dev", *CHECKS, "test"])
def test_ci_calls_the_same_targets_as_a_person_and_fails_if_one_of_them_does(tmp_path: Path, failing: str) -> None:
    called = tmp_path / "called"
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\nfor target; do :; done\necho "$target" >>{called}\n[ "$target" != "{failing}" ]\n')
    make.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        [ROOT / ".ci" / "run"], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    first, *checks = called.read_text().split()
    assert first == "env-dev"
    if failing != "env-dev":  # without an environment, nothing else can run
        assert (sorted(checks[:-1]), checks[-1]) == (CHECKS, "test")
    assert done.returncode == (1 if failing else 0)
    assert (f"── {failing} failed" in done.stdout) == bool(failing)


def test_the_readme_and_the_docs_begin_with_the_same_words() -> None:
    first = [(ROOT / name).read_text().split("\n\n")[1] for name in ("README.md", "docs/index.md")]
    assert first[0] == first[1]


def test_without_ensurepip_pip_comes_pinned_with_its_hash(tmp_path: Path) -> None:
    program = """
import sys; sys.path.insert(0, "requirements"); import install
found = install.importlib.util.find_spec
install.importlib.util.find_spec = lambda name: None if name == "ensurepip" else found(name)
install.run = lambda *argv: print(*argv)
install.create(install.Path(sys.argv[1]))
"""
    argv = [sys.executable, "-c", program, str(tmp_path / "env")]
    _, fetched = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "--require-hashes" in fetched and fetched.endswith("pip.txt")
    assert re.fullmatch(
        r"pip==\S+ \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+    # via.*\n",
        (ROOT / "requirements/pip.txt").read_text(),
    )
