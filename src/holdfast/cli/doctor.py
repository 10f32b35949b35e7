"""``holdfast doctor``: check everything that Holdfast depends on, and suggest a fix for each problem."""

from __future__ import annotations

import errno
import mmap
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
import typer

from holdfast import ids
from holdfast.cli.check_result import Check
from holdfast.cli.exit_codes import Exit
from holdfast.cli.options import Json, Key, Store, Url
from holdfast.cli.output import counted, note, say, say_json, visible
from holdfast.cli.style import style_for
from holdfast.cli.target import Target, run
from holdfast.cli.wall_checks import check_walls
from holdfast.clock import system_clock
from holdfast.errors import (
    AccessDenied,
    ConfigurationError,
    HoldfastError,
    LimitExceeded,
    ServerUnreachable,
    StoreLocked,
)
from holdfast.settings import DATA_FOLDER, Settings, default_store, load_settings
from holdfast.store_url import POSTGRES_URL, shown_store

__all__ = ["doctor"]

_PACKAGES = ("holdfast-agents", "starlette", "uvicorn", "uvloop", "httptools", "msgspec", "httpx2")
_SLOW_DISK_S = 0.02
_LITTLE_SPACE_BYTES = 1 << 30
_FEW_FILES = 4096
_LARGEST_TABLES = 5
_COUNTED_FILES = 1000
_MANY_FILES = 10_000
_METER_SHARE = 0.2
"""Share of the time in which a meter counts files."""
_SUBREAPER = "import ctypes, sys; sys.exit(ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) != 0)"


def doctor(
    store: Store = None,
    port: Annotated[int | None, typer.Option("--port", help="Check the server at this port.", min=1, max=65535)] = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> Exit:
    """Check this machine and the server, and suggest fixes.

    The checks: versions, open files, process control, walls and attempts to break through them, orphaned processes,
    quotas of programs, the store, the archive of events, the disk, the port and the server behind it. Exit 1 if one
    finds a fault.
    """
    if port is not None and url is not None:
        raise ConfigurationError("--port and --url both name the server", hint="omit one of them")
    target = Target(url=url, port=port, key=key, as_json=json)

    async def work() -> Exit:
        settings = load_settings({"store": store})
        checks: list[Check] = []
        for name, look in (
            ("versions", _versions),
            ("limits", _limits),
            ("process control", _process_control),
            ("walls", lambda: check_walls(settings)),
            ("orphans", _orphans),
        ):
            if not target.as_json and sys.stderr.isatty():
                note(f"… {name}")
            checks += look()
        checks.append(_quotas(settings))
        checks += await _store(settings)
        checks += _event_archive(settings)
        checks += _disk(settings)
        checks += await _server(target)
        faults = sum(check.state == "fault" for check in checks)
        if target.as_json:
            say_json({"checks": checks, "faults": faults})
        else:
            _say(checks)
        return Exit.FAILED if faults else Exit.OK

    return run(work, as_json=target.as_json)


def _say(checks: list[Check]) -> None:
    style = style_for(sys.stdout)
    marks = {
        "ok": f"{style.green}ok{style.plain}    ",
        "advice": f"{style.yellow}advice{style.plain}",
        "fault": f"{style.red}FAULT{style.plain} ",
    }
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(marks[check.state], end="  ")
        say(f"{check.name:<{width}}  {check.found}")
        if check.advice:
            say(f"{'':<8}{'':<{width}}  → {check.advice}")


def _versions() -> Iterator[Check]:
    found = [f"Python {platform.python_version()}"]
    missing = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            if package != "uvloop" or sys.platform == "linux":
                missing.append(package)
    yield Check(name="versions", state="ok", found=", ".join(found))
    if missing:
        yield Check(
            name="packages",
            state="fault",
            found=f"missing: {', '.join(missing)}",
            advice="reinstall Holdfast with its dependencies",
        )


def _limits() -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft < _FEW_FILES
    yield Check(
        name="open files",
        state="advice" if few else "ok",
        found=f"limit {soft} (can be raised to {hard})",
        advice=f"each event stream and client needs one; raise it with 'ulimit -n {min(hard, 65536)}'" if few else "",
    )


def _process_control() -> Iterator[Check]:
    if sys.platform != "linux":
        yield Check(
            name="process control",
            state="advice",
            found=f"{sys.platform}: process groups only",
            advice="a program that leaves its group may outlive a stop (see the receipt); use Linux for proof",
        )
        return
    works = _succeeds(_SUBREAPER) and os.path.isdir("/proc/self/task")
    yield Check(
        name="process control",
        state="ok" if works else "fault",
        found="subreaper, parent-death signal and /proc work" if works else "no subreaper or no /proc",
        advice="" if works else "mount /proc and allow prctl; stops need them to prove that process trees are gone",
    )


def _quotas(settings: Settings) -> Check:
    """Return the quotas of each principal's programs, and by how much they may be exceeded on this machine."""
    from holdfast.host.program_accounts import program_limits
    from holdfast.host.program_quotas import ENFORCED_BY, REACTION_S, shown_bytes
    from holdfast.runtime.processes.cgroup_delegation import ProgramCgroups, take_cgroups

    limits = program_limits(settings)
    shown = {
        "memory": f"{shown_bytes(limits.memory_bytes)} of memory",
        "processes": f"{limits.processes:,} processes",
        "files": f"{limits.files:,} open files",
        "disk": f"{shown_bytes(limits.disk_bytes)} and {limits.inodes:,} files on disk",
    }
    cgroups = take_cgroups()
    controllers = cgroups.controllers if isinstance(cgroups, ProgramCgroups) else frozenset()
    enforced = [name for name, controller in ENFORCED_BY.items() if controller in controllers]
    by_kernel = " and ".join(shown.pop(name) for name in enforced)
    excess = [_disk_excess()]
    if "memory" in shown:
        excess.insert(0, f"{shown_bytes(int(_memory_speed() * REACTION_S))} of memory")
    missing = [controller for name, controller in ENFORCED_BY.items() if name in shown]
    why = cgroups if isinstance(cgroups, str) else f"the controller {' and '.join(missing)} is not delegated"
    return Check(
        name="program quotas",
        state="ok",
        found="each principal: "
        + (f"{by_kernel}, enforced by the kernel (cgroup v2); " if enforced else "")
        + f"{', '.join(shown.values())}, checked every 0.1 s, so exceeded by at most about {' and '.join(excess)}, "
        + f"and what starts within {REACTION_S:g} s"
        + (f" (the kernel enforces memory and processes in a delegated cgroup; here, {why})" if missing else ""),
    )


def _disk_excess() -> str:
    """Return by how much a quota of disk may be exceeded here: within the reaction time, and during a walk."""
    from holdfast.host.program_quotas import REACTION_S, shown_bytes

    try:
        speed, files_per_s = _disk_speed(), _walk_speed()
    except OSError as error:
        return f"an amount on disk that could not be measured ({error.strerror})"
    during_walk = f"{shown_bytes(int(speed * _MANY_FILES / files_per_s))} for each {_MANY_FILES:,} files in a workspace"
    return f"{shown_bytes(int(speed * REACTION_S))} on disk (and {during_walk})"


def _memory_speed() -> float:
    """Return how many bytes per second programs can make resident, on all processors together."""
    size = 32 << 20
    began = system_clock.monotonic()
    pages = mmap.mmap(-1, size)
    for at in range(0, size, mmap.PAGESIZE):
        pages[at] = 1
    speed = size / (system_clock.monotonic() - began)
    pages.close()
    return speed * (os.cpu_count() or 1)


def _disk_speed() -> float:
    """Return how many bytes per second a program can write to files, which the kernel stores later."""
    chunk = bytes(1 << 20)
    with tempfile.TemporaryFile() as file:
        began = system_clock.monotonic()
        for _ in range(16):
            file.write(chunk)
        file.flush()
        return 16 * len(chunk) / (system_clock.monotonic() - began)


def _walk_speed() -> float:
    """Return how many files per second the meter counts in a workspace, its pauses included."""
    from holdfast.runtime.processes.folder_usage import FolderWalk

    with tempfile.TemporaryDirectory() as folder:
        for number in range(_COUNTED_FILES):
            Path(folder, str(number)).touch()
        walk = FolderWalk(os.fsencode(folder), sys.maxsize, sys.maxsize)
        began = system_clock.monotonic()
        for _ in walk.steps():
            pass
        return _COUNTED_FILES / (system_clock.monotonic() - began) * _METER_SHARE


def _succeeds(program: str) -> bool:
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, timeout=10, check=False)
    return done.returncode == 0


def _orphans() -> Iterator[Check]:
    from holdfast.runtime.process_host import orphans

    found = orphans()
    if not found:
        yield Check(name="orphans", state="ok", found="no process outlived its host")
    for orphan in found:
        yield Check(
            name="orphans",
            state="fault",
            found=f"pid {orphan.pid} outlived its host {orphan.host}: {orphan.command}",
            advice=f"inspect it, then: kill -9 {orphan.pid}",
        )


def _file_of(settings: Settings) -> Path | None:
    return Path(settings.store.removeprefix("sqlite:///")) if settings.store.startswith("sqlite:///") else None


async def _store(settings: Settings) -> list[Check]:
    from holdfast.storage import open_store

    path = _file_of(settings)
    if POSTGRES_URL.fullmatch(settings.store):
        return [_database(settings)]
    if path is None:
        return [
            Check(
                name="store",
                state="advice",
                found=shown_store(settings.store),
                advice="data is lost at exit; use sqlite:/// to keep it",
            )
        ]
    if not path.exists():
        folder = path.parent.parent if path.parent.name == DATA_FOLDER and not path.parent.exists() else path.parent
        if folder.is_dir() and os.access(folder, os.W_OK):
            return [Check(name="store", state="ok", found=f"{path} does not exist yet; the first start creates it")]
        return [
            Check(
                name="store",
                state="fault",
                found=f"{path.parent} is not a writable folder",
                advice="create it, or choose another file with --store",
            )
        ]
    store = open_store(settings.store)
    try:
        await store.open(node_id=ids.node_id(), at=system_clock.now())
        info = await store.info()
    except StoreLocked as error:
        return [Check(name="store", state="ok", found=_in_use(path, error)), *_readers_of(path)]
    except HoldfastError as error:
        return [Check(name="store", state="fault", found=error.message, advice=error.hint)]
    finally:
        await store.close()
    size = path.stat().st_size
    found = f"{path}: {info.version}, {counted(info.sessions, 'session')}, {size:,} bytes"
    return [Check(name="store", state="ok", found=found), *_readers_of(path)]


def _database(settings: Settings) -> Check:
    """Check a store in PostgreSQL, which a running server may have open."""
    try:
        from holdfast.storage.postgres.inspection import inspect_database
    except ImportError:
        return Check(
            name="store",
            state="fault",
            found=f"{shown_store(settings.store)} needs packages that are not installed",
            advice="pip install 'holdfast-agents[postgres]'",
        )
    try:
        seen = inspect_database(settings.store)
    except HoldfastError as error:
        return Check(name="store", state="fault", found=error.message, advice=error.hint)
    server = f"{seen.shown} (PostgreSQL {seen.server_version})"
    if not seen.schema_version:
        return Check(name="store", state="ok", found=f"{server} has no tables yet; the first start creates them")
    tables = ", ".join(f"{name} {size:,}" for name, size in seen.sizes[:_LARGEST_TABLES])
    used = f"in use by {', '.join(seen.nodes)}" if seen.nodes else "no host has it open"
    found = f"{server}: {counted(seen.sessions, 'session')}, {used}; bytes of the largest tables: {tables}"
    if seen.awaiting_pool:
        missing = ", ".join(f"{pool!r} ({counted(count, 'session')})" for pool, count in seen.awaiting_pool)
        return Check(
            name="store",
            state="advice",
            found=f"{found}; sessions wait for a host of a workspace_pool that no host has: {missing}",
            advice="start a host that has the files of that pool, with workspace_pool set to its name",
        )
    if seen.awaiting_agent:
        from holdfast.host.run_reports import agent_label

        missing = "; ".join(
            f"{agent_label(name, version)} ({counted(count, 'run')})" for name, version, count in seen.awaiting_agent
        )
        return Check(
            name="store",
            state="advice",
            found=f"{found}; runs wait for a host that has their agent and a free slot: {missing}",
            advice="start a host with that version of the agent, or interrupt the runs",
        )
    return Check(name="store", state="ok", found=found)


def _event_archive(settings: Settings) -> Iterator[Check]:
    """Check the folder of the setting ``event_archive``, if it is set."""
    if not settings.event_archive:
        return
    from holdfast.host.event_archive import archive_folder

    folder = Path(archive_folder(settings.event_archive))
    name = "event archive"
    if not folder.exists():
        yield Check(name=name, state="ok", found=f"{folder} does not exist yet; the server creates it")
    elif not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        yield Check(
            name=name,
            state="fault",
            found=f"this user cannot write to {folder}",
            advice="change the folder's owner or mode, or set event_archive to another folder",
        )
    else:
        sizes = [file.stat().st_size for file in folder.glob("events-*.jsonl")]
        yield Check(name=name, state="ok", found=f"{folder}: {counted(len(sizes), 'file')}, {sum(sizes):,} bytes")


def _in_use(path: Path, error: StoreLocked) -> str:
    holder = re.search(r"process (\d+)", error.message)
    return f"{path} is in use by a running server (process {holder[1]})" if holder else error.message


def _readers_of(path: Path) -> Iterator[Check]:
    """Check who else can read the store, and whether it is in its usual folder."""
    from holdfast.storage.sqlite.private_file import wider_mode

    beside = [path, *(path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))]
    if open_to_others := [str(file) for file in beside if wider_mode(str(file))]:
        yield Check(
            name="store mode",
            state="advice",
            found=f"other users of this machine can read or write {', '.join(open_to_others)}",
            advice=f"chmod 600 {' '.join(open_to_others)}",
        )
    if f"sqlite:///{path}" == default_store() and path.parent.name != DATA_FOLDER:
        yield Check(
            name="store place",
            state="advice",
            found=f"{path} is where older versions kept the store",
            advice=f"stop the server and move it into {DATA_FOLDER}/: holdfast store move",
        )


def _disk(settings: Settings) -> Iterator[Check]:
    path = _file_of(settings)
    folder = path.parent if path is not None else Path()
    if folder.name == DATA_FOLDER and not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        return
    free = shutil.disk_usage(folder).free
    little = free < _LITTLE_SPACE_BYTES
    yield Check(
        name="disk space",
        state="advice" if little else "ok",
        found=f"{free / 1e9:.1f} GB free in {folder.resolve()}",
        advice="free some space: on a full disk, new messages are refused (accepted ones are safe)" if little else "",
    )
    try:
        latency_s = _sync_latency(folder)
    except OSError as error:
        yield Check(
            name="disk latency",
            state="fault",
            found=f"cannot write in {folder}: {error.strerror}",
            advice="free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check its owner and mode",
        )
        return
    slow = latency_s > _SLOW_DISK_S
    yield Check(
        name="disk latency",
        state="advice" if slow else "ok",
        found=f"fdatasync takes {latency_s * 1000:.2f} ms (median of 20)",
        advice="each accepted message waits for it; a local SSD is faster" if slow else "",
    )


def _sync_latency(folder: Path) -> float:
    sync = getattr(os, "fdatasync", os.fsync)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".holdfast-doctor-") as file:
        times = []
        for _ in range(20):
            began = system_clock.monotonic()
            os.write(file.fileno(), b"\0" * 4096)
            sync(file.fileno())
            times.append(system_clock.monotonic() - began)
    return statistics.median(times)


class _ServerTold(msgspec.Struct):
    """The part of a server's description that the checks need."""

    version: str
    agents: list[str]
    statistics: dict[str, Any] | None
    budgets: dict[str, Any]
    incidents: list[dict[str, Any]]
    approval_key_required: bool = False


async def _server(target: Target) -> list[Check]:
    address = target.address
    from holdfast.client.wire import decode

    try:
        async with target.client(retry_s=0.0) as client:
            response = await client.request("GET", "/v1/server", reply_s=5.0)
        view = msgspec.structs.asdict(decode(response, _ServerTold))
    except ServerUnreachable:
        return [_port(address)]
    except (AccessDenied, LimitExceeded) as error:
        return [Check(name="server", state="advice", found=f"{address}: {error.message}", advice=error.hint)]
    except HoldfastError as error:
        foreign = type(error) is HoldfastError  # an answer that is not Holdfast's
        found = f"{address} is not a Holdfast server" if foreign else address
        return [Check(name="server", state="fault", found=f"{found}: {error.message}", advice=error.hint)]
    from holdfast.version import __version__

    checks = []
    if view.get("approval_key_required"):
        checks.append(
            Check(
                name="approvals",
                state="ok",
                found="agents of the server run programs, so a person must type an approval key to approve a call",
            )
        )
    statistics_ = view["statistics"]
    agents = f"agents {', '.join(view['agents'])}"
    if statistics_ is None:
        found = f"{address} answers: {agents} (an admin key shows more)"
    else:
        state = "draining" if statistics_["draining"] else "ready"
        found = (
            f"{address} is {state}: pid {statistics_['pid']}, "
            f"{counted(statistics_['running'], 'run')}, {counted(statistics_['sessions_live'], 'session')} in memory, "
            f"{agents}"
        )
    checks.append(Check(name="server", state="ok", found=found))
    checks += [_budget(name, usage) for name, usage in view["budgets"].items() if usage["used"]]
    if view["version"] != __version__:
        checks.append(
            Check(
                name="server version",
                state="advice",
                found=f"the server has version {view['version']}, this command {__version__}",
                advice="restart the server with this version",
            )
        )
    promises = statistics_["promises"] if statistics_ is not None else {}
    broken = [f"{number} {count['name']}" for number, count in promises.items() if count["broken"]]
    if broken:
        checks.append(
            Check(
                name="promises",
                state="fault",
                found=f"broken since start: {', '.join(broken)}",
                advice="see the counters on the page at / or in /metrics, and report it",
            )
        )
    checks += [
        Check(name="incident", state="advice", found=f"{incident['kind']}: {incident['text']}")
        for incident in view["incidents"][-5:]
    ]
    return checks


def _budget(name: str, usage: Mapping[str, Any]) -> Check:
    """Return the result of checking a budget, including the budget's heaviest users."""
    share = usage["share"]
    most = [
        f"{visible(principal) or 'without a key'} {_figure(amount)}"
        for principal, amount in list(usage["principals"].items())[:3]
    ]
    full = any(amount >= share for amount in usage["principals"].values()) and name not in _COUNTED
    return Check(
        name=f"budget {name}",
        state="advice" if full else "ok",
        found=f"{', '.join(most)}; share {_figure(share)}, refused {usage['refused']:,}",
        advice=_ADVICE_ON_PROGRAMS if full and name.startswith("program_") else _ADVICE_ON_SHARES if full else "",
    )


def _figure(amount: float) -> str:
    """Format bytes and counts in full, seconds to the millisecond."""
    return f"{amount:,.0f}" if amount == round(amount) else f"{amount:,.3f}"


_ADVICE_ON_SHARES = "a principal is at its share: ask it to read its responses, or revoke its key"
_ADVICE_ON_PROGRAMS = "a principal is at its quota: it has to end programs or delete files; or raise the setting"

_COUNTED = ("loop_time", "listings")
"""Budgets that are briefly full in normal operation."""


def _port(address: str) -> Check:
    """Return who listens at an address that does not answer as a server of Holdfast."""
    from holdfast.server import holder_of

    parts = urlsplit(address)
    port = parts.port or 80
    try:
        with socket.create_connection((parts.hostname or "127.0.0.1", port), timeout=2):
            pass
    except OSError:
        return Check(
            name="server",
            state="ok",
            found=f"no server runs at {address}; the port is free",
            advice="start one: holdfast serve" + ("" if address == Target().address else f" --port {port}"),
        )
    holder = holder_of(port) or "an unknown program"
    return Check(
        name="server",
        state="fault",
        found=f"port {port} is taken by {holder}, which does not answer as Holdfast",
        advice="stop it, or choose another port: --port 8421 or HOLDFAST_PORT",
    )
