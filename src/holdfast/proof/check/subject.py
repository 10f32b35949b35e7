"""The judge's handle on the adapter's process: start it, call it over two pipes, kill it, and restart it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from holdfast.proof.check.kit import NotOffered

__all__ = ["LIMIT_S", "AdapterFailed", "Subject", "SubjectTarget"]

_KIT = Path(__file__).with_name("kit.py")
_LINE_BYTES = 1 << 24
_START_S = 60.0
_CLOSE_S = 3.0
_ENDING_S = 1.0
LIMIT_S = 30.0
"""Default timeout of a call to the adapter, in seconds."""


class AdapterFailed(Exception):
    """The adapter raised an error, or its process ended."""


class SubjectTarget(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter, and the Python interpreter that runs it.

    Parameters:
        name: the adapter's name in the table.
        adapter: location of the adapter class, as ``file.py:Class`` or ``module:Class``.
        python: path of the interpreter in the framework's environment.
    """

    name: str
    adapter: str
    python: str


class Subject:
    """One adapter in a separate process. Use it as an async context manager, which kills the process tree on exit.

    Parameters:
        target: the adapter and its interpreter.
        model_url: base URL of the fake model server.
        folder: folder for data that is kept when the process is restarted.
    """

    def __init__(self, target: SubjectTarget, *, model_url: str, folder: Path) -> None:
        self._target = target
        self._model_url = model_url
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._known: dict[int, psutil.Process] = {}
        self.versions: Sequence[str] = ()

    async def __aenter__(self) -> Subject:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(AdapterFailed, NotOffered, TimeoutError):
            await self.ask("close", limit_s=_CLOSE_S)
        await self.kill()

    async def start(self) -> None:
        """Start the process and the adapter in it. Raises the same errors as `ask`; the process is then killed."""
        with (self._folder / "stderr.txt").open("ab") as errors:
            self._process = await asyncio.create_subprocess_exec(
                self._target.python,
                "-P",
                str(_KIT),
                self._target.adapter,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                limit=_LINE_BYTES,
                env=_environment(),
                start_new_session=True,
            )
        self._reading = asyncio.get_running_loop().create_task(self._read(self._process))
        try:
            await self.ask("start", self._model_url, str(self._folder), limit_s=_START_S)
            self.versions = await self.ask("versions")
        except BaseException:
            await self.kill()
            raise

    async def kill(self) -> None:
        """Send SIGKILL to the process and its known descendants. `start` may be called again afterwards."""
        process = self._process
        if process is None:
            return
        self._process = None
        self.look()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for child in self._known.values():
            with suppress(psutil.NoSuchProcess):
                child.kill()
        self._known.clear()
        await process.wait()
        if self._reading is not None:
            await asyncio.wait({self._reading})

    def look(self) -> None:
        """Record the process's current descendants, so that `kill` ends them, too."""
        if self._process is not None:
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(self._process.pid).children(recursive=True):
                    self._known[child.pid] = child

    async def ask(self, op: str, *args: Any, limit_s: float | None = None) -> Any:
        """Call the adapter's method `op`, and wait at most `limit_s` seconds for the result. None selects `LIMIT_S`.

        Raises:
            AdapterFailed: if the method raises an error, or the process ends.
            NotOffered: if the framework lacks the feature.
            TimeoutError: if the method does not return in time.
        """
        limit_s = LIMIT_S if limit_s is None else limit_s
        process = self._process
        if process is None or process.stdin is None or self._reading is None or self._reading.done():
            raise AdapterFailed(f"the adapter's process has ended: {self._last_words()}")
        self._number += 1
        number = self._number
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        process.stdin.write(msgspec.json.encode({"id": number, "op": op, "args": args}) + b"\n")
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            raise TimeoutError(f"{op} did not return in {limit_s:g} s") from None
        finally:
            del self._waiting[number]

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        why = "the adapter's process ended"
        while line := await process.stdout.readline():
            try:
                said = msgspec.json.decode(line, type=dict[str, Any])
                number = said["id"]
            except (msgspec.DecodeError, KeyError):
                why = f"the adapter's process wrote {line[:40]!r} into the pipe to the judge"
                break
            answer = self._waiting.get(number)
            if answer is None or answer.done():
                continue
            if "error" in said:
                answer.set_exception(AdapterFailed(said["error"]))
            elif "not_offered" in said:
                answer.set_exception(NotOffered(said["not_offered"]))
            else:
                answer.set_result(said["value"])
        else:
            why += await self._exit_code(process)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(AdapterFailed(f"{why}: {self._last_words()}"))

    async def _exit_code(self, process: asyncio.subprocess.Process) -> str:
        with suppress(TimeoutError):
            async with asyncio.timeout(_ENDING_S):
                return f" with exit code {await process.wait()}"
        return ""

    def _last_words(self) -> str:
        lines = (self._folder / "stderr.txt").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"


def _environment() -> dict[str, str]:
    """Return this environment without keys, settings and proxies that would change a framework's behaviour."""
    kept = {"PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "SYSTEMROOT", "LD_LIBRARY_PATH"}
    quiet = {"PYTHONUNBUFFERED": "1", "OPENAI_AGENTS_DISABLE_TRACING": "1", "LANGSMITH_TRACING": "false"}
    return {name: value for name, value in os.environ.items() if name in kept} | quiet
