"""What stands outside of a wall while escapes run: files, another principal's program, processes, sockets, terminals.

What an escape may change is its own, so that many can run in one start and each is judged alone. All of it belongs to
the user whose wall is tried: nothing but the wall stands between an escape and what it wants.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import pty
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

import holdfast
from tests.system.escapes.escape import Escape, writes

__all__ = ["PYTHON", "Stage", "as_user", "staged"]

SYSTEM_PYTHON = "/usr/bin/python3"
PYTHON = SYSTEM_PYTHON if os.path.exists(SYSTEM_PYTHON) else sys.executable
"""An interpreter that every user has, inside of a wall, too."""
_HERE = Path(__file__).resolve().parent
_FILES = ("store.db", "local-token", "holdfast.toml", "agent.py", ".env")
_COMMON = "common"
_TERMINALS = 4
_BACKLOG = 1024
_END_S = 10.0
_READY_S = 20.0
_LOOKS = 4


class Stage:
    """The outside of one wall, for one user.

    Parameters:
        root: folder that holds all files.
        uid: user that owns everything.
        escapes: what will be run.
    """

    def __init__(self, root: Path, uid: int, escapes: Sequence[Escape]) -> None:
        self.root, self.uid = root, uid
        self.label = secrets.token_hex(8)
        self.secret = f"secret-{secrets.token_hex(16)}"
        self.own = root / "workspaces" / "own"
        self.shared = root / "server" / "shared"
        self.neighbour = root / "workspaces" / "neighbour"
        self._apart = {escape.name for escape in escapes if escape.judge is writes}
        self._before: dict[str, object] = {}
        self._targets: dict[str, subprocess.Popen[bytes]] = {}
        self._conditions: dict[str, object] = {}
        self._neighbours: dict[str, tuple[int, object]] = {}
        self._proxies: dict[str, tuple[int, object]] = {}
        self._heard, self._typed = "", ""
        self._listeners: list[socket.socket] = []
        self._datagrams: list[socket.socket] = []
        self._masters: list[int] = []
        self.at: dict[str, Any] = {}

    def make(self, escapes: Sequence[Escape], stack: ExitStack) -> None:
        """Put everything up; the stack takes it down."""
        self.shared.mkdir(parents=True)
        self.neighbour.mkdir(parents=True)
        (self.neighbour / "secret").write_text(self.secret)
        for name in (_COMMON, *sorted(self._apart)):
            self._make_files(name)
        for escape in escapes:
            (self.own / escape.name).mkdir(parents=True)
        for folder, _, names in os.walk(self.root):
            os.chown(folder, self.uid, self.uid)
            for name in names:
                os.chown(os.path.join(folder, name), self.uid, self.uid)
        self._listen(stack)
        self._open_terminal(stack)
        self.at |= self._start_victim(stack)
        for escape in escapes:
            if escape.target:
                self._start_target(escape.name, stack)
        self._before = {name: self._state(name) for name in self._apart}

    def _make_files(self, name: str) -> None:
        outside, others = self.outside(name), self.others(name)
        outside.mkdir(parents=True)
        others.mkdir(parents=True)
        for path in (*(outside / file for file in _FILES), others / "notes.txt"):
            path.write_text(f"{path.name} {self.secret}\n")
            path.chmod(0o600)

    def outside(self, name: str) -> Path:
        """The server's files that an escape wants."""
        return self.root / "server" / (name if name in self._apart else _COMMON)

    def others(self, name: str) -> Path:
        """Another principal's files that an escape wants."""
        return self.root / "workspaces" / "others" / (name if name in self._apart else _COMMON)

    def places(self, name: str) -> dict[str, Any]:
        """Everything that an escape is told."""
        outside = self.outside(name)
        target = self._targets.get(name)
        handles = {"handle": _handle(outside / "store.db")} if os.geteuid() == 0 else {}
        return {
            **self.at,
            **handles,
            "name": name,
            "mark": self.mark(name),
            "package": holdfast.__file__,
            "device": os.stat(self.root).st_dev,
            "root": str(self.root),
            "own": str(self.own / name),
            "outside": str(outside),
            "place": str(outside.relative_to(self.root)),
            "store": str(outside / "store.db"),
            "token": str(outside / "local-token"),
            "settings": str(outside / "holdfast.toml"),
            "code": str(outside / "agent.py"),
            "dotenv": str(outside / ".env"),
            "home": str(outside / "home"),
            "others": str(self.others(name)),
            "notes": str(self.others(name) / "notes.txt"),
            "target": 0 if target is None else target.pid,
        }

    def is_changed(self, name: str) -> bool:
        """Whether a file of the server, or of the other principal, is not what it was."""
        return self._state(name) != self._before[name]

    def _state(self, name: str) -> object:
        return _tree(self.outside(name)), _tree(self.others(name))

    def heard(self) -> str:
        """Everything that arrived at a socket so far."""
        for listener in self._listeners:
            with contextlib.suppress(BlockingIOError):
                while True:
                    line, _ = listener.accept()
                    with line, contextlib.suppress(OSError):
                        line.settimeout(0.3)
                        while chunk := line.recv(1 << 16):
                            self._heard += chunk.decode("utf-8", "replace")
        for listener in self._datagrams:
            with contextlib.suppress(BlockingIOError):
                while True:
                    self._heard += listener.recv(1 << 16).decode("utf-8", "replace")
        heard = self.neighbour / "heard"
        return self._heard + (heard.read_text("utf-8", "replace") if heard.exists() else "")

    def typed(self) -> str:
        """Everything that was typed on, or written to, the terminal so far."""
        for master in self._masters:
            with contextlib.suppress(BlockingIOError, OSError):
                while chunk := os.read(master, 1 << 16):
                    self._typed += chunk.decode("utf-8", "replace")
        return self._typed

    def meet_neighbour(self) -> None:
        """Wait until the neighbour is ready, and learn where it has left what."""
        ready = self.neighbour / "ready"
        until = time.monotonic() + _READY_S
        while not ready.exists():
            assert time.monotonic() < until, "the neighbour does not start"
            time.sleep(0.02)
        where = json.loads(ready.read_text())
        pid, targets = 0, dict.fromkeys(where["targets"], 0)
        while not (pid and all(targets.values())):  # a program has its words a little after its start
            assert time.monotonic() < until, (pid, targets)
            programs = list(_programs())
            pid = next((pid for pid, words in programs if words[:1] == [PYTHON] and str(self.neighbour) in words), 0)
            for name, mark in where["targets"].items():
                targets[name] = next((pid for pid, words in programs if words == ["sleep", mark]), 0)
        self._neighbours = {name: (pid, _condition(pid)) for name, pid in targets.items()}
        self.at |= {f"neighbour_{name}": value for name, value in where.items()}
        self.at |= {"neighbour": pid, "neighbour_targets": targets, "neighbour_folder": str(self.neighbour)}

    def is_neighbour_harmed(self, target: str) -> bool:
        """Whether a program of the neighbour is not what it was."""
        return _is_changed(*self._neighbours[target])

    def meet_proxies(self, told: Mapping[str, Any], friend: str, friend_port: int) -> None:
        """Learn of the proxies, and of the server that they may connect to; see `proxies`."""
        self.at |= {
            "friend": friend,
            "friend_port": friend_port,
            "names": _own_names(),
            "link_local": _link_local(),
            **told,
        }
        self._proxies = {name: (pid, _condition(pid)) for name, pid in told["proxies"].items()}

    def is_proxy_harmed(self, name: str) -> bool:
        """Whether a proxy is not what it was."""
        return _is_changed(*self._proxies[name])

    def start(self, script: Path, *words: str) -> subprocess.Popen[bytes]:
        """Start a script by a bare interpreter, as the stage's user, with a secret in its environment."""
        return subprocess.Popen(
            [PYTHON, "-I", "-S", str(script), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": os.defpath, "PROVIDER_API_KEY": self.secret},
            **as_user(self.uid),
        )

    def mark(self, name: str) -> str:
        """An argument by which a process that an escape has left is found."""
        return f"{self.label}-{name}"

    def end_marked(self, name: str) -> list[int]:
        """End what an escape has left; the pids."""
        marks = {self.mark(name), str(self.own / f"{name}.json")}
        ended: list[int] = []
        for _ in range(_LOOKS):  # one that forks all the time may be missed by a look
            found = [pid for pid, words in _programs() if marks & {*words}]
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ended += found
            if ended and not found:
                break
        return ended

    def is_harmed(self, name: str) -> bool:
        """Whether the process that was started for an escape is not what it was."""
        target = self._targets[name]
        with contextlib.suppress(subprocess.TimeoutExpired):
            target.wait(0.05)
        return target.poll() is not None or _condition(target.pid) != self._conditions[name]

    def _listen(self, stack: ExitStack) -> None:
        anywhere = stack.enter_context(socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True))
        anywhere.listen(_BACKLOG)
        port = anywhere.getsockname()[1]
        datagrams = stack.enter_context(socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
        datagrams.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        datagrams.bind(("::", port))
        self._listeners.append(anywhere)
        self._datagrams.append(datagrams)
        paths = {
            "abstract": f"\0holdfast-{self.label}",
            "bus": str(self.shared / "bus"),
            "scratch_socket": f"/tmp/holdfast-{self.label}.sock",
        }
        for path in paths.values():
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(path)
            listener.listen(_BACKLOG)
            self._listeners.append(listener)
            if not path.startswith("\0"):
                os.chmod(path, 0o777)
                stack.callback(os.unlink, path)
        paths["post"] = str(self.shared / "post")
        for path in (f"\0holdfast-{self.label}-post", paths["post"]):
            post = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            post.bind(path)
            self._datagrams.append(post)
        os.chmod(paths["post"], 0o777)
        for listener in (*self._listeners, *self._datagrams):
            listener.setblocking(False)
        self.at |= {name: path.lstrip("\0") for name, path in paths.items()} | {"port": port}
        self.at |= {"hostname": socket.gethostname(), "addresses": _addresses()}

    def _open_terminal(self, stack: ExitStack) -> None:
        self.at["terminals"] = [self._terminal(stack) for _ in range(_TERMINALS)]

    def _terminal(self, stack: ExitStack) -> str:
        master, slave = pty.openpty()
        stack.callback(os.close, master)
        stack.callback(os.close, slave)
        tty.setcbreak(slave)
        flags = termios.tcgetattr(slave)
        flags[3] |= termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, flags)
        os.set_blocking(master, False)
        os.chown(os.ttyname(slave), self.uid, -1)
        self._masters.append(master)
        return os.ttyname(slave)

    def _start_victim(self, stack: ExitStack) -> dict[str, Any]:
        given = {"secret": self.secret, "label": self.label, "folder": str(self.shared)}
        victim = self.start(_HERE / "victim.py", json.dumps(given))
        stack.callback(_end, victim)
        assert victim.stdout is not None
        where: dict[str, Any] = json.loads(victim.stdout.readline())
        assert where["victim"] == victim.pid
        assert min(where["shm"], where["key"]) > 0, where
        return where

    def _start_target(self, name: str, stack: ExitStack) -> None:
        target = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, **as_user(self.uid))
        stack.callback(_end, target)
        self._targets[name] = target
        self._conditions[name] = _condition(target.pid)


def _programs() -> Iterator[tuple[int, list[str]]]:
    """All processes that can be seen, with their arguments."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{name}/cmdline").read_bytes().decode("utf-8", "replace").rstrip("\0")
                yield int(name), words.split("\0")


def _condition(pid: int) -> tuple[object, ...]:
    """How a target runs."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (
        "alive" if stat[0] in "RSD" else stat[0],
        (stat[16], stat[38]),
        next(
            line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if line.startswith("Max open files")
        ),
        os.sched_getaffinity(pid),
        Path(f"/proc/{pid}/oom_score_adj").read_text().strip(),
    )


def _is_changed(pid: int, before: object) -> bool:
    """Whether a process does not run as it did."""
    try:
        return _condition(pid) != before
    except OSError:
        return True


def _tree(folder: Path) -> object:
    """Names, contents, modes, owners, times and attributes of everything below a folder."""
    found: dict[str, object] = {}
    for at, folders, names in os.walk(folder):
        for name in (".", *folders, *names):
            path = os.path.join(at, name)
            status = os.lstat(path)
            try:
                held = Path(path).read_bytes() if os.path.isfile(path) else b""
            except OSError as error:
                held = repr(error).encode()
            attributes = os.listxattr(path, follow_symlinks=False)
            found[path] = (held, status.st_mode, status.st_uid, status.st_mtime_ns, status.st_nlink, attributes)
    return found


def _handle(path: Path) -> str:
    """The handle of a file, in hexadecimal digits, by which it can be opened without its name."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    handle = ctypes.create_string_buffer((128).to_bytes(4, "little") + bytes(4 + 128))
    where = ctypes.c_int()
    if libc.name_to_handle_at(-100, os.fsencode(path), handle, ctypes.byref(where), 0) != 0:
        return ""
    return handle.raw[: 8 + int.from_bytes(handle.raw[:4], "little")].hex()


def _addresses() -> list[str]:
    """The addresses of this machine that other machines can reach."""
    found = (address.address for addresses in psutil.net_if_addrs().values() for address in addresses)
    return [one for one in found if _is_reachable(one)]


def _link_local() -> list[str]:
    """The link-local IPv6 addresses of this machine, with their interfaces."""
    found = (address.address for addresses in psutil.net_if_addrs().values() for address in addresses)
    return [one for one in found if one.startswith("fe80:") and "%" in one]


def _own_names() -> list[str]:
    """The names that this machine has for itself."""
    lines = (line.partition("#")[0].split() for line in Path("/etc/hosts").read_text().splitlines())
    return [name for address, *names in filter(None, lines) if not _is_reachable(address) for name in names]


def _is_reachable(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_link_local)


def as_user(uid: int) -> dict[str, Any]:
    """Parameters of `subprocess.Popen` that start a program as a user."""
    return {} if uid == os.geteuid() else {"user": uid, "group": uid, "extra_groups": []}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that the stage has started."""
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)
    try:
        process.wait(_END_S if process.stdin is not None else 0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


@contextmanager
def staged(uid: int, escapes: Sequence[Escape]) -> Iterator[Stage]:
    """Put up a stage, and take it down."""
    root = Path(tempfile.mkdtemp(prefix="escapes-", dir="/var/tmp"))
    root.chmod(0o755)
    try:
        with ExitStack() as stack:
            stage = Stage(root, uid, escapes)
            stage.make(escapes, stack)
            yield stage
    finally:
        shutil.rmtree(root, onerror=_force)


def _force(_function: object, path: str, _error: object) -> None:
    """Remove what an escape has locked."""
    os.chmod(os.path.dirname(path), 0o700)
    with contextlib.suppress(OSError):
        os.unlink(path) if not os.path.isdir(path) or os.path.islink(path) else shutil.rmtree(path, ignore_errors=True)
