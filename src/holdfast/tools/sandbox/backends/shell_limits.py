"""Shell commands that set the limits of a program which a foreign tool such as bubblewrap walls.

The shell and the programs `nice` and `env` replace each other with ``exec``, so no process is added.
"""

from __future__ import annotations

import resource
import shutil
from typing import TYPE_CHECKING, Final

from holdfast.errors import NotSupported
from holdfast.runtime.walls.limits import most_open_files

if TYPE_CHECKING:
    from holdfast.tools.sandbox.sandbox import Sandbox

__all__ = ["find_program", "limited_inside", "limited_outside", "lowered", "open_files", "process_limit", "ulimits"]

_SHELL: Final = "/bin/sh"
_NAME: Final = "sandbox"
_FAILED: Final = 125
"""Exit code: the program was not started because a limit could not be set."""


def limited_outside(sandbox: Sandbox, *, idle: bool, more: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the words before a tool that builds a wall, so that it and the program run with the limits of a sandbox.

    The tool ignores SIGTERM, SIGINT and SIGHUP, which a stop sends to the whole tree: the program handles them.

    Parameters:
        idle: whether both run at the lowest priority.
        more: further shell commands, which run first.

    Raises:
        NotSupported: if this machine lacks a program for it.
    """
    commands = [*more, "echo 1000 > /proc/self/oom_score_adj", *ulimits(sandbox), "trap '' TERM INT HUP"]
    lowered_priority = (find_program("nice"), "-n", "19") if idle else ()
    return (_SHELL, "-c", f'{_all(commands)}; exec "$@"', _NAME, *lowered_priority)


def limited_inside(processes: int, more: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the words before the program inside the wall: its signals work again, and its processes are limited.

    Parameters:
        processes: maximum number of processes of the user inside the wall; 0 sets no limit.
        more: further shell commands.

    Raises:
        NotSupported: if this machine lacks a program for it.
    """
    commands = [*more]
    if processes:
        commands.append(process_limit(processes))
    signals = "--default-signal=TERM,INT,HUP"
    return (find_program("env"), signals, _SHELL, "-c", f'{_all(commands)}; exec "$@"', _NAME)


def ulimits(sandbox: Sandbox) -> list[str]:
    """Return shell commands that set the limits of each process, without raising a hard limit."""
    found = [f"ulimit -v {lowered(resource.RLIMIT_AS, sandbox.memory_bytes) // 1024}"]
    found += [f"ulimit -f {lowered(resource.RLIMIT_FSIZE, sandbox.file_bytes) // 512}"]
    found += [f"ulimit -n {open_files(sandbox)}", "ulimit -c 0"]
    soft, hard = sandbox.cpu_s, lowered(resource.RLIMIT_CPU, sandbox.cpu_s + 1)
    return [*found, f"ulimit -S -t {min(soft, hard)}", f"ulimit -H -t {hard}"]


def process_limit(processes: int) -> str:
    """Return a shell command that limits the processes of the user; shells differ in the option."""
    return f"{{ ulimit -u {processes} || ulimit -p {processes}; }} 2>/dev/null"


def find_program(name: str) -> str:
    """Return the path of a program.

    Raises:
        NotSupported: if it is not installed.
    """
    found = shutil.which(name)
    if found is None:
        raise NotSupported(f"the program {name} is not installed", hint="install it, or choose another sandbox")
    return found


def lowered(limit: int, value: int) -> int:
    """Return the value of a limit, or this process's hard limit if that is lower."""
    hard = resource.getrlimit(limit)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def open_files(sandbox: Sandbox) -> int:
    """Return the limit of open descriptors of each process; see `most_open_files`."""
    return lowered(resource.RLIMIT_NOFILE, min(sandbox.open_files, most_open_files()))


def _all(commands: list[str]) -> str:
    return f"{' && '.join(commands) or ':'} || {{ echo 'sandbox: cannot set the limits' >&2; exit {_FAILED}; }}"
