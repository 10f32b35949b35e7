"""Make a Python environment from a lock file, or leave it alone if it already is what the lock says.

    python3 requirements/install.py serve .venv

Needs nothing but Python 3.11 with venv. The environment carries a stamp, the hash of what it was made from, so a second
call takes no time, and a changed lock brings the environment up to date. Environments are made one at a time: who comes
meanwhile waits, and finds it done. Ctrl-C is safe at any time: the next call continues.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
OLDEST = (3, 11)
# A lock that contains another: an environment made from the larger one serves both.
CONTAINED = {"serve": ("dev",), "dev": (), "bench": (), "lock": ()}
BARE = {"bench", "lock"}
INTERRUPTED = 130


def stamp_of(lock: str) -> str:
    """The hash of the lock and of what the installed package's metadata comes from."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {ROOT}".encode())
    for path in (HERE / f"{lock}.txt", ROOT / "pyproject.toml"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def say(text: str) -> None:
    """Tell the person who waits."""
    print(f"» {text}", flush=True)


def run(*argv: str) -> None:
    """Run a command without its output; if it fails, show the output and exit with its code."""
    result = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode:
        print(result.stdout, end="")
        say(f"failed ({result.returncode}): {' '.join(argv)}")
        sys.exit(result.returncode)


def has_pip(python: Path) -> bool:
    """Whether this environment works at all."""
    check = (python, "-m", "pip", "--version")
    return python.exists() and subprocess.run(check, capture_output=True, check=False).returncode == 0


class Progress:
    """The progress of an installation: one line that is rewritten on a terminal, or a line for every tenth package.

    Parameters:
        total: number of packages to install.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._rewrites = sys.stdout.isatty()
        self._width = 0

    def on_line(self, line: str) -> None:
        """Show what a line of pip's output says about the progress."""
        word, _, rest = line.strip().partition(" ")
        if word in ("Collecting", "Processing", "Requirement"):
            self._done = min(self._done + 1, self._total)
            name = re.split(r"==|-\d", rest.removeprefix("already satisfied: ").split(" ")[0].rpartition("/")[2])[0]
            if self._rewrites or self._done % 10 == 0:
                self._show(f"  {self._done}/{self._total} {name}")
        elif word == "Installing":
            self._show("  unpacking")

    def clear(self) -> None:
        """Erase the line that is being rewritten."""
        if self._width:
            print("\r" + " " * self._width, end="\r", flush=True)
            self._width = 0

    def _show(self, text: str) -> None:
        if not self._rewrites:
            print(text, flush=True)
            return
        self.clear()
        text = text[: shutil.get_terminal_size().columns - 1]
        print(text, end="", flush=True)
        self._width = len(text)


def run_pip(pip: tuple[str, ...], lock: Path) -> None:
    """Install what the lock lists and show the progress; if pip fails, show the end of its output.

    A lock is complete, so pip need not look for dependencies. The pip that comes with Python 3.11 would refuse some
    that are pinned: to it, ``a[b]==1`` does not pin the ``a`` that another package asks for.
    """
    total = sum(1 for line in lock.read_text().splitlines() if "==" in line.split(" ;")[0])
    argv = (*pip, "--require-hashes", "--no-deps", "--requirement", str(lock))
    output: list[str] = []
    progress = Progress(total)
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                output.append(line)
                progress.on_line(line)
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
        finally:
            progress.clear()
    if process.returncode:
        print("".join(output[-40:]), end="")
        say(f"failed ({process.returncode}): {' '.join(argv)}")
        say("If the network was down, run the same command again: it continues where it stopped.")
        sys.exit(process.returncode)


def create(env: Path) -> Path:
    """A fresh virtual environment; the path of its Python."""
    python = env / "bin" / "python"
    if importlib.util.find_spec("ensurepip") and importlib.util.find_spec("venv"):
        run(sys.executable, "-m", "venv", "--clear", str(env))
    elif importlib.util.find_spec("venv") and importlib.util.find_spec("pip"):
        run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(env))
        pinned = ("--quiet", "--require-hashes", "--only-binary", ":all:", "--requirement", str(HERE / "pip.txt"))
        run(sys.executable, "-m", "pip", "--python", str(python), "install", *pinned)
    else:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        say(f"{sys.executable} cannot make environments: its module 'venv' or 'ensurepip' is missing.")
        say(f"On Debian and Ubuntu: apt install python{version}-venv.")
        say("Or name another Python: make PYTHON=/path/to/python3")
        sys.exit(1)
    return python


def is_ready(lock: str, env: Path) -> bool:
    """Whether `env` works and is what `lock` says, or what a lock that contains it says."""
    stamps = {name: env / f".stamp-{name}" for name in (lock, *CONTAINED[lock])}
    fits = any(path.exists() and path.read_text() == stamp_of(name) for name, path in stamps.items())
    return fits and has_pip(env / "bin" / "python")


@contextmanager
def alone() -> Iterator[None]:
    """Wait until nobody else makes an environment of this tree; the lock is on the folder, and ends with its holder."""
    folder = os.open(HERE, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another make is at work on an environment of this folder: waiting until it is done")
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def install(lock: str, env: Path) -> None:
    """Bring `env` to what `lock` says."""
    if lock not in CONTAINED:
        say(f"there is no lock {lock!r}: use one of {', '.join(CONTAINED)}")
        sys.exit(2)
    if is_ready(lock, env):
        return
    with alone():
        if not is_ready(lock, env):
            make(lock, env)


def make(lock: str, env: Path) -> None:
    """Install what `lock` lists into `env`, which is made first where it is missing or broken."""
    python = env / "bin" / "python"
    say(f"making {env.name} from requirements/{lock}.txt with {sys.executable} (once; a minute or two)")
    if not has_pip(python):
        create(env)
    for path in env.glob(".stamp-*"):
        path.unlink()
    pip = (str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input")
    run_pip(pip, HERE / f"{lock}.txt")
    if lock not in BARE:
        run(*pip, "--quiet", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    (env / f".stamp-{lock}").write_text(stamp_of(lock))
    say(f"{env.name} is ready")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print(__doc__)
        sys.exit(2)
    if sys.version_info < OLDEST:
        say(f"{sys.executable} is Python {sys.version.split()[0]}; Holdfast needs 3.11 or newer.")
        sys.exit(1)
    try:
        install(sys.argv[1], Path(sys.argv[2]).absolute())
    except KeyboardInterrupt:
        if sys.stdout.isatty():
            print()  # after the terminal's ^C
        say("interrupted; run the same command again: it continues where it stopped")
        sys.exit(INTERRUPTED)
